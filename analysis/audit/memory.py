"""Compute the memory that a step needs on each GPU, and find options that make the step fit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from analysis.audit.runtime import EAGER, Runtime
from kernels.common.errors import UserError
from kernels.config import ceil_div
from kernels.machine import Machine
from kernels.problem import DTYPE_BYTES
from sweeps.capture.captured import FORWARD, Attention, Captured

_STATES = {"adamw": 2, "sgd": 0, "none": 0}
"""Number of values that each optimizer keeps per parameter. AdamW keeps two moments. SGD is
assumed to have no momentum."""

_DEGREES = (2, 4, 8, 16)
"""Tensor-parallel degrees that are tried if a step does not fit in memory."""

_CHUNKS = 8
"""Value of ``--loss-chunks`` that is tried if a step does not fit in memory."""

# Multi-head latent attention keeps one compressed vector per token (DeepSeek-AI 2024).
_COMPRESSED = re.compile(r"kv_a_proj\w*$")


@dataclass(frozen=True)
class Memory:
    """Bytes that a step needs on each GPU, by use, and the bytes ``available`` on each GPU.

    ``available`` is 0 if the machine did not report its memory.

    In training, ``activations`` are the tensors that the forward pass keeps for the backward pass
    and, in eager mode, the temporary tensors of the backward pass. In other modes,
    ``activations`` are the tensors of the operation that reads and writes the most bytes, not
    counting parameters.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    kv_cache: int
    available: int

    @property
    def total(self) -> int:
        """Largest number of bytes that the step needs at any time.

        Gradients take the place of activations that are freed, so only the larger of the two is
        counted.
        """
        larger = max(self.gradients, self.activations)
        return self.weights + self.optimizer + larger + self.kv_cache

    @property
    def fits(self) -> bool | None:
        """True if each GPU has enough memory; None if the machine did not report its memory."""
        return self.total <= self.available if self.available else None

    def to_json(self) -> dict[str, Any]:
        """Return all sizes in bytes and ``fits`` as a record."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "kv_cache": self.kv_cache,
            "total": self.total,
            "available": self.available,
            "fits": self.fits,
        }


def memory_of(captured: Captured, runtime: Runtime, machine: Machine, trains: bool) -> Memory:
    """Return the memory that a step needs on each of ``runtime.tp`` GPUs.

    Gradients and the optimizer's state are assumed to have the parameters' dtype. The gradients of
    the previous step are assumed to be freed (``zero_grad``'s default). Fusion in
    compiled code is assumed to remove temporary tensors, such as the intermediate gradients of the
    loss. Tensor parallelism is assumed to divide all memory evenly. Dividing activations evenly
    requires sequence parallelism (Korthikanti et al. 2022). The memory of the framework and its
    kernels is not counted.
    """
    weights = captured.parameter_bytes // runtime.tp
    if not trains:
        return Memory(
            weights=weights,
            gradients=0,
            optimizer=0,
            activations=captured.largest_operation_bytes // runtime.tp,
            kv_cache=kv_cache_bytes(captured) // runtime.tp,
            available=machine.memory_bytes,
        )
    saved, peak = _in_chunks(captured, runtime.loss_chunks)
    activations = saved
    if runtime.recompute:
        activations -= captured.saved - captured.saved_recomputed
    if runtime.kind == EAGER:
        activations += max(0, peak - saved)
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=_STATES[runtime.optimizer] * weights,
        activations=activations // runtime.tp,
        kv_cache=0,
        available=machine.memory_bytes,
    )


def _in_chunks(captured: Captured, chunks: int) -> tuple[int, int]:
    """Return a training step's saved and peak bytes if its loss is computed in chunks of tokens.

    The chunks are assumed to run one after the other, each with its backward pass, so the head and
    the loss keep the tensors of only one chunk at a time (Hsu et al. 2024, arXiv:2410.10989). The
    gradients of the head's input and parameters are needed in full, in addition to the tensors that
    the layers save.
    """
    heads = [p for p in captured.products if p.role == "head" and p.pass_ == FORWARD]
    if chunks == 1 or not heads:
        return captured.saved, captured.peak
    tokens = heads[-1].sizes["m"]
    largest_chunk = int(ceil_div(tokens, min(chunks, tokens)))
    loss = captured.loss
    saved_by_layers = captured.saved - loss.saved
    during_loss = saved_by_layers + loss.gradients + loss.peak * largest_chunk // tokens
    saved = saved_by_layers + loss.saved * largest_chunk // tokens
    return saved, max(during_loss, loss.peak_elsewhere)


def kv_cache_bytes(captured: Captured) -> int:
    """Return the bytes of the cached keys and values of all sequences.

    A layer with a sliding window caches only the tokens in the window.
    """
    compressed = [product for product in captured.products if _COMPRESSED.search(product.path)]
    total = 0
    for product in captured.products:
        work = product.work
        if not isinstance(work, Attention) or product.pass_ != FORWARD:
            continue
        # If a model generates tokens, its attention has a causal mask or, in decoding, fewer
        # queries than keys. Any other attention is not cached.
        if not work.causal and work.queries >= work.keys:
            continue
        # A window of 0 stands for attention without a window.
        cached_keys = min(work.keys, work.window or work.keys)
        if compressed:
            # The compressed form is assumed to be equally wide in all layers.
            elements_per_token = compressed[0].sizes["n"]
        else:
            elements_per_token = work.kv_heads * (work.width + work.value_width)
        elements = work.batch * cached_keys * elements_per_token
        total += product.count * elements * DTYPE_BYTES[work.dtype]
    return total


def what_fits(
    captured: Captured, runtime: Runtime, machine: Machine, trains: bool, batch: int | None
) -> list[str]:
    """Return command-line options of ``audit``, each of which should make a step fit in memory.

    ``batch`` is the step's number of sequences or images, or None if ``--batch`` does not change
    this number.
    """
    options = []
    # 1. Only activations and the KV cache grow with the batch, nearly in proportion to it.
    if batch is not None:
        memory = memory_of(captured, runtime, machine, trains)
        free_bytes = memory.available - memory.weights - memory.optimizer
        bytes_per_sequence = (memory.activations + memory.kv_cache) / batch
        # The lower limit of 1 byte avoids a division by 0 if no memory grows with the batch.
        largest_batch = int(free_bytes // max(bytes_per_sequence, 1.0))
        if largest_batch >= 1 and memory.gradients <= free_bytes:
            options.append(f"--batch {largest_batch}")
    # 2. Only training keeps activations that can be recomputed.
    if trains and not runtime.recompute:
        recomputing = replace(runtime, recompute=True)
        if memory_of(captured, recomputing, machine, trains).fits:
            options.append("--recompute")
    # 3. Only training computes a loss, which chunks of tokens make smaller.
    if trains and runtime.loss_chunks == 1 and captured.loss.saved:
        chunked = replace(runtime, loss_chunks=_CHUNKS)
        if memory_of(captured, chunked, machine, trains).fits:
            options.append(f"--loss-chunks {_CHUNKS}")
    # 4. Try more GPUs than the step uses now.
    for degree in _DEGREES:
        if degree <= runtime.tp:
            continue
        split = replace(runtime, tp=degree)
        if _can_split(captured, split) and memory_of(captured, split, machine, trains).fits:
            options.append(f"--tp {degree}")
            break
    return options


def _can_split(captured: Captured, runtime: Runtime) -> bool:
    try:
        runtime.products(captured)
    except UserError:
        return False
    return True
