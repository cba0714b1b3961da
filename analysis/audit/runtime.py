"""Apply the options of a runtime to a model's matrix operations: fuse, split and recompute them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from kernels.common.checks import check_counts, check_option
from kernels.common.errors import UserError
from kernels.config import ceil_div
from kernels.problem import Gemm
from sweeps.capture.captured import (
    FORWARD,
    WGRAD,
    Attention,
    Captured,
    GroupedGemm,
    Product,
    in_size,
    out_size,
)

EAGER, COMPILE = "eager", "compile"
RECOMPUTED = "recompute"
FUSIONS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Roles of GEMMs that share an input, keyed by the role of the fused GEMM that replaces them."""

# Roles of layers that are divided among GPUs by their output features (the columns of y = x Wᵀ) or
# by their input features (the rows of Wᵀ).
_BY_COLUMNS = ("q", "k", "v", "qkv", "up", "gate", "gate_up", "head")
_BY_ROWS = ("out", "down")

# Multi-head latent attention (DeepSeek-AI 2024): every GPU computes the whole compression, and a
# part of the decompression.
_WHOLE = re.compile(r"(q_a_proj|kv_a_proj\w*)$")
_COLUMNS_BY_PATH = re.compile(r"kv_b_proj$")


@dataclass(frozen=True)
class Runtime:
    """Options for running a model.

    Attributes:
        kind: ``eager`` runs one operation at a time; ``compile`` fuses all operations between two
            matrix operations.
        fuse: keys of :data:`FUSIONS`, each for a group of GEMMs that are computed as one GEMM.
        tp: tensor-parallel degree: number of GPUs that share each layer.
        recompute: True if the forward pass of repeated layers is computed again for the backward
            pass.
        loss_chunks: largest number of chunks of tokens in which the output head and the loss are
            computed.
        optimizer: ``adamw``, ``sgd`` or ``none``.
        attention: share of the peak that fused attention is assumed to reach; None to use measured
            times or, if there are none, :data:`analysis.audit.account.ASSUMED_SHARE`.
        attention_kernel: framework that computes attention, such as ``vllm``; None if it is
            unknown.
        causal_half: True if the attention kernel skips the half of the query–key pairs that a
            causal mask hides.
        skew: number of experts divided by the number of experts that get tokens. The tokens are
            divided equally among the experts that get any.
    """

    kind: str = EAGER
    fuse: tuple[str, ...] = ()
    tp: int = 1
    recompute: bool = False
    loss_chunks: int = 1
    optimizer: str = "adamw"
    attention: float | None = None
    attention_kernel: str | None = None
    causal_half: bool = True
    skew: float = 1.0

    def __post_init__(self) -> None:
        check_option("--runtime", self.kind, (EAGER, COMPILE))
        check_option("--optimizer", self.optimizer, ("adamw", "sgd", "none"))
        for name in self.fuse:
            check_option("--fuse", name, tuple(FUSIONS))
        check_counts(self, "tp", "loss_chunks")
        if self.attention is not None and not 0 < self.attention <= 1:
            raise UserError(
                f"--attention is {100 * self.attention:.6g}% of the peak; give a share above 0% "
                "and up to 100%."
            )
        if self.attention is not None and self.attention_kernel is not None:
            raise UserError(
                "--attention assumes a speed, and --attention-kernel uses measured times; give "
                "only one of them."
            )
        if not 1 <= self.skew < math.inf:
            raise UserError(
                f"--skew is {self.skew:g}; give 1 (all experts get tokens) or a larger finite "
                "number."
            )

    def products(self, captured: Captured) -> list[Product]:
        """Return the matrix operations as this runtime computes them.

        Chunking and recomputation may insert operations. The ``forward_position`` fields are then
        not updated, so they may be wrong.

        Raises:
            UserError: if a size cannot be divided equally among the GPUs.
        """
        products = list(captured.products)
        for role in self.fuse:
            products = _fused(products, role)
        # Splitting looks up forward operations by ``forward_position``, so it comes before the
        # steps that insert operations.
        if self.tp > 1:
            products = [
                _split(product, products[product.forward_position], self.tp) for product in products
            ]
        if self.loss_chunks > 1:
            products = [
                part for product in products for part in _chunked(product, self.loss_chunks)
            ]
        if self.recompute:
            products = [execution for product in products for execution in _twice(product)]
        if self.skew > 1:
            products = [_skewed(product, self.skew) for product in products]
        if not self.causal_half:
            products = [_with_every_pair(product) for product in products]
        return products

    def changes(self, captured: Captured) -> list[str]:
        """Describe the effects that the options have on a model's operations."""
        products = list(captured.products)
        kinds = {product.work.op for product in products}
        fusing = [role for role in self.fuse if len(_fused(products, role)) < len(products)]
        descriptions = [f"{role} as one GEMM" for role in fusing]
        if self.tp > 1:
            whole = "convolutions and other operations" if "conv" in kinds else "other operations"
            descriptions.append(
                f"the widths of matrix operations divided by {self.tp} ({whole} are not divided, "
                "and communication is not counted)"
            )
        if self.recompute:
            descriptions.append("only the matrix operations of repeated layers are recomputed")
        if self.loss_chunks > 1 and any(product.role == "head" for product in products):
            descriptions.append(
                f"the head is computed in at most {self.loss_chunks} chunks of tokens"
            )
        if "attention" in kinds:
            if self.attention is not None:
                descriptions.append(f"fused attention at {self.attention:.0%} of the peak")
            counted_as = "as half" if self.causal_half else "in full"
            descriptions.append(f"causal masks counted {counted_as}")
        if "grouped" in kinds:
            if self.skew > 1:
                descriptions.append(
                    f"only one in {self.skew:g} experts gets tokens, and all experts that get "
                    "tokens get the same share"
                )
            else:
                descriptions.append("each expert gets the same share of the tokens")
        return descriptions


def _fused(products: list[Product], role: str) -> list[Product]:
    """Replace each complete group of GEMMs with one fused GEMM that has the given role.

    The GEMMs of a group have the same parent module and input. A group is complete if it has a
    GEMM for each role in ``FUSIONS[role]``.
    """
    # 1. Group the positions of forward GEMMs by parent module and input. Keep complete groups.
    groups: dict[tuple[str, int], list[int]] = {}
    for position, product in enumerate(products):
        is_forward = product.forward_position == position
        if is_forward and product.role in FUSIONS[role] and product.input_id >= 0:
            module = product.path.rpartition(".")[0]
            groups.setdefault((module, product.input_id), []).append(position)
    complete = [group for group in groups.values() if len(group) == len(FUSIONS[role])]
    # 2. The first GEMM of each group, its leader, gets the output features of the other GEMMs.
    leader_of = {position: group[0] for group in complete for position in group}
    more_features: dict[int, int] = {}  # by position of the leader
    for leader, *others in complete:
        works = [products[other].work for other in others]
        more_features[leader] = sum(work.n for work in works if isinstance(work, Gemm))
    # 3. Drop the other GEMMs of each group. A gradient has the position of its forward GEMM in
    #    ``forward_position``, and is kept or dropped with that GEMM.
    kept: list[Product] = []
    new_positions: dict[int, int] = {}
    for position, product in enumerate(products):
        leader = leader_of.get(product.forward_position, product.forward_position)
        if product.forward_position != leader:
            continue
        new_positions[position] = len(kept)
        if leader in more_features:
            # The fused sizes are sums over several layers, so no dimension names them.
            wider = _wider(product, products[leader], more_features[leader])
            kept.append(replace(wider, role=role, names={}))
        else:
            kept.append(product)
    return [
        replace(product, forward_position=new_positions[product.forward_position])
        for product in kept
    ]


def _wider(product: Product, forward: Product, more_features: int) -> Product:
    """Return a forward or gradient GEMM as if its layer had ``more_features`` more outputs."""
    size = out_size(product, forward)
    return product.resized({size: product.sizes[size] + more_features})


def _split(product: Product, forward: Product, tp: int) -> Product:
    """Return the part of an operation that one of ``tp`` GPUs computes.

    The split is that of Megatron-LM (Shoeybi et al. 2019).
    """
    work = product.work
    # 1. Each GPU gets a part of the heads of attention, and a part of the experts with their
    #    tokens.
    if isinstance(work, Attention):
        heads = _divided(work.heads, tp, "the number of heads")
        kv_heads = _divided(work.kv_heads, tp, "the number of KV heads")
        part_of_heads = product.resized({"heads": heads, "kv_heads": kv_heads})
        return _named(part_of_heads, ("heads", "kv_heads"), tp)
    if isinstance(work, GroupedGemm):
        experts = _divided(work.experts, tp, "the number of experts")
        # Each GPU gets 1/tp of the rows, because all experts get the same share. The number of
        # experts has to be a multiple of tp, but the number of rows is rounded down.
        part_of_experts = product.resized({"experts": experts, "m": max(1, work.m // tp)})
        return _named(part_of_experts, ("experts",), tp)
    # 2. Each GPU gets a part of the output or input features of layers with known roles, and a part
    #    of the batch of attention's batched GEMMs. All other operations remain whole.
    if not isinstance(work, Gemm) or _WHOLE.search(product.path):
        return product
    if product.role == "attention" and work.batch > 1:
        batch = _divided(work.batch, tp, "the batch count of a batched GEMM")
        return _named(product.resized({"batch": batch}), ("batch",), tp)
    if product.role in _BY_COLUMNS or _COLUMNS_BY_PATH.search(product.path):
        size = out_size(product, forward)
    elif product.role in _BY_ROWS:
        size = in_size(product, forward)
    else:
        return product
    if product.role == "head":  # a vocabulary is padded to a multiple of tp
        part = int(ceil_div(product.sizes[size], tp))
    else:
        part = _divided(product.sizes[size], tp, f"a width of a GEMM with the role {product.role}")
    return _named(product.resized({size: part}), (size,), tp)


def _named(product: Product, sizes: tuple[str, ...], divisor: float) -> Product:
    """Return an operation with the divisor in the names of the given sizes, such as ``ffn / 2``."""
    names = dict(product.names)
    for size in sizes:
        name = names.get(size, "fixed")
        if name != "fixed":
            is_sum = " + " in name or " − " in name
            names[size] = f"({name}) / {divisor:g}" if is_sum else f"{name} / {divisor:g}"
    return replace(product, names=names)


def _divided(size: int, tp: int, what: str) -> int:
    if size % tp:
        raise UserError(f"--tp {tp} does not divide {what} ({size}); give another --tp.")
    return size // tp


def _chunked(product: Product, chunks: int) -> list[Product]:
    """Split an output head's tokens into at most ``chunks`` chunks.

    Chunks of equal size are returned as one operation with a larger count.
    """
    if product.role != "head":
        return [product]
    size = "k" if product.pass_ == WGRAD else "m"
    tokens = product.sizes[size]
    tokens_per_chunk = int(ceil_div(tokens, min(chunks, tokens)))
    full_chunks, remaining_tokens = divmod(tokens, tokens_per_chunk)
    full = product.resized({size: tokens_per_chunk})
    head_chunks = [replace(full, count=product.count * full_chunks)]
    if remaining_tokens:
        head_chunks.append(product.resized({size: remaining_tokens}))
    return head_chunks


def _twice(product: Product) -> list[Product]:
    """Return an operation and, if the backward pass recomputes it, its second execution."""
    is_recomputed = product.pass_ == FORWARD and product.repeated
    return [product, replace(product, pass_=RECOMPUTED)] if is_recomputed else [product]


def _skewed(product: Product, skew: float) -> Product:
    """Keep only one in ``skew`` experts of a grouped GEMM."""
    if not isinstance(product.work, GroupedGemm):
        return product
    fewer = {"experts": math.ceil(product.work.experts / skew)}
    return _named(product.resized(fewer), ("experts",), skew)


def _with_every_pair(product: Product) -> Product:
    """Remove the causal mask from attention, for kernels that also compute hidden pairs."""
    if not isinstance(product.work, Attention):
        return product
    return replace(product, work=replace(product.work, causal=False))


def optimizer_bytes(captured: Captured, runtime: Runtime) -> int:
    """Return the bytes that a step of the optimizer reads and writes on each GPU.

    The optimizer's state has the parameters' dtype. For each parameter, AdamW reads the
    parameter, the gradient and two moments, and writes all but the gradient. SGD reads the
    parameter and the gradient, and writes the parameter.
    """
    accesses = {"adamw": 7, "sgd": 3, "none": 0}[runtime.optimizer]
    return accesses * captured.parameter_bytes // runtime.tp
