"""Capture a model's step, and find how its products depend on the model's sizes.

:mod:`sweeps.capture.captured` explains the terms.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.common.errors import UserError
from sweeps.capture.activation_bytes import (
    largest_operation_bytes,
    peak_bytes,
    saved_bytes,
    saved_recomputed,
)
from sweeps.capture.attention import OneAttention
from sweeps.capture.captured import Attention, Captured, Dimension, Product
from sweeps.capture.norms import OneRmsNorm
from sweeps.capture.products import products_of
from sweeps.capture.step import (
    DECODE,
    PREFILL,
    TORCH_DTYPES,
    TRAIN,
    ModelSource,
    ModelStep,
    first_line,
)
from sweeps.capture.trace import trace
from sweeps.capture.traffic import bytes_moved, launched

# Pattern of the names of configuration entries that are sizes.
_SIZE = re.compile(
    r"size|dim|d_model|d_ff|d_kv|n_embd|n_inner|n_head|heads|rank|experts|width|channels|features"
    r"|ffn|vocab|hidden|stem|classes|intermediate"
)
# Pattern of the names of entries that count heads.
_HEADS = re.compile(r"heads|n_head$")
# Pattern of the names of entries that are not sizes, although _SIZE may match them.
_NO_SIZE = re.compile(
    r"token|layer|position|window|patch|image|kernel|stride|per_tok|top|n_group|factor|chunk|_id$"
    r"|type_vocab|depth|block|bucket|num_labels|index"
)


def capture(
    source: ModelSource, step: ModelStep, changes: Mapping[str, int] | None = None
) -> Captured:
    """Capture one step of a model, without a GPU and without memory for its parameters.

    ``changes`` has new values for sizes of the model, by name.

    Raises:
        UserError: if the model cannot be built with these sizes, or if its step cannot be run.
    """
    with fake_tensors(), _autocast(step):
        try:
            started = source.start(step, changes or {})
            with OneAttention(), OneRmsNorm(), torch.set_grad_enabled(step.mode == TRAIN):
                operations, saved = trace(started.model, started.call, backward=step.mode == TRAIN)
        except UserError:
            raise
        except Exception as error:  # a model's own code may raise anything at unusual sizes
            reason = first_line(error).rstrip(".")
            raise UserError(
                f"{source.name} cannot be run ({reason}); correct its sizes, inputs or code."
            ) from error
    parameters = list(started.model.parameters())
    parameter_storages = {parameter.untyped_storage()._cdata for parameter in parameters}
    products, unknown = products_of(operations)
    peak, loss = peak_bytes(operations, saved, parameter_storages)
    return Captured(
        products=tuple(_corrected_for_step(product, step) for product in products),
        moved=bytes_moved(operations, fused=False),
        moved_fused=bytes_moved(operations, fused=True),
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(
            parameter.numel() * parameter.element_size() for parameter in parameters
        ),
        saved=saved_bytes(saved),
        saved_recomputed=saved_recomputed(saved),
        peak=peak,
        loss=loss,
        largest_operation_bytes=largest_operation_bytes(operations, parameter_storages),
        operations=launched(operations),
        uncounted=tuple(unknown),
        assumptions=started.assumptions,
    )


def dimensions(
    source: ModelSource, step: ModelStep, base: Captured, named: Sequence[str] = ()
) -> list[Dimension]:
    """Return the sizes of a model that affect the sizes of its products, each with its effect.

    ``base`` is the capture of the step with unchanged sizes. ``named`` has the names of the sizes
    to try. If it is empty, the function tries the entries of ``source.sizes`` that are above 1 and
    whose names suggest a size of a layer.

    Raises:
        UserError: if a named size does not exist or is below 1, or if the forward pass cannot be
            captured.
    """
    # 1. Choose the sizes.
    sizes = source.sizes
    for name in named:
        if name not in sizes:
            available = f"use one of {', '.join(sorted(sizes))}" if sizes else "leave out --vary"
            raise UserError(f"{source.name} has no size {name!r} to vary; {available}.")
        if sizes[name] < 1:  # 0 often stands for a size that the model derives from others
            raise UserError(
                f"{name} of {source.name} is {sizes[name]}, but only sizes of at least 1 can be "
                f"varied; give {name} a value of at least 1."
            )
    chosen = list(dict.fromkeys(named))  # a name may be given twice
    if not chosen:
        chosen = [
            name
            for name, value in sizes.items()
            if value > 1 and _SIZE.search(name) and not _NO_SIZE.search(name)
        ]
    # 2. Replace a training step by its forward pass, from which the sizes of gradients follow.
    if step.mode == TRAIN:
        step = replace(step, mode=PREFILL)
        base = capture(source, step)
    # 3. Change one size at a time. A size that was divisible by a number of heads stays divisible
    # if it grows by this unit. The factor of 2 keeps an even width of a head even, as RoPE needs.
    head_counts = [value for name, value in sizes.items() if _HEADS.search(name) and value > 0]
    unit = 2 * math.lcm(1, *head_counts)
    effects = []
    for name in chosen:
        dimension = _dimension(source, step, base, name, sizes[name], unit)
        if dimension is not None:
            effects.append(dimension)
    return effects


def _dimension(
    source: ModelSource, step: ModelStep, base: Captured, name: str, value: int, unit: int
) -> Dimension | None:
    """Return a size with its effect on the sizes of the products, or None if no effect is found."""
    # Most models allow the first value. Others allow only a change by 64 or 8, or by a factor of 2.
    values_to_try = (value + unit, value + 64, 2 * value, value // 2, value + 8)
    for changed_value in dict.fromkeys(values_to_try):  # each value once
        if changed_value < 1 or changed_value == value:
            continue
        try:
            changed = capture(source, step, {name: changed_value})
        except UserError:
            continue
        if _comparable(base.products, changed.products):
            slopes = _slopes(base.products, changed.products, changed_value - value)
            return Dimension(name, value, slopes) if slopes else None
    return None


def _slopes(
    products: Sequence[Product], changed_products: Sequence[Product], change: int
) -> dict[tuple[int, str], float]:
    """Return the ``slopes`` of a :class:`Dimension` whose value was changed by ``change``."""
    slopes = {}
    for position, (before, after) in enumerate(zip(products, changed_products, strict=True)):
        sizes_after = after.sizes
        for size, value in before.sizes.items():
            if sizes_after[size] != value:
                slopes[position, size] = (sizes_after[size] - value) / change
    return slopes


def _comparable(first: Sequence[Product], second: Sequence[Product]) -> bool:
    """Return True if two lists of products agree in modules, passes, kinds and counts."""

    def without_sizes(product: Product) -> tuple[str, str, str, int]:
        return product.path, product.pass_, product.work.op, product.count

    return list(map(without_sizes, first)) == list(map(without_sizes, second))


def _corrected_for_step(product: Product, step: ModelStep) -> Product:
    """Return a captured product, corrected for the settings of the step.

    In a decoding step, attention also reads the keys of all earlier tokens. The causal mask is then
    ignored, because it hides only keys of the few new tokens. PyTorch stores tf32 as fp32, so
    the products of a tf32 step are captured as fp32, and their dtype is corrected to tf32.
    """
    if isinstance(product.work, Attention) and step.mode == DECODE:
        decoded = replace(product.work, keys=step.seq + step.tokens, causal=False)
        product = replace(product, work=decoded)
    if step.dtype == "tf32" and product.work.dtype == "fp32":
        product = replace(product, work=replace(product.work, dtype="tf32"))
    return product


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Create CPU tensors with shapes but without values while the context is active.

    The device ``meta`` is not suitable: models that read the values of masks fail on it, and
    PyTorch splits attention into separate operations there.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = log.disabled
    log.disabled = True  # errors about changed sizes that do not fit are expected
    try:
        with (
            warnings.catch_warnings(),
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.device("cpu"),
        ):
            warnings.simplefilter("ignore")  # models warn about values, which fake tensors lack
            yield
    finally:
        log.disabled = was_disabled


def _autocast(step: ModelStep) -> contextlib.AbstractContextManager[object]:
    if not step.autocast:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=TORCH_DTYPES[step.dtype])
