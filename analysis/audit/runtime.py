"""What the runtime does to a model's products: fuses them, splits them, computes them twice."""

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
"""Roles that share an input, and the role of the one product that computes them all."""

_BY_COLUMNS = ("q", "k", "v", "qkv", "up", "gate", "gate_up", "head")
_BY_ROWS = ("out", "down")

# Multi-head latent attention (DeepSeek-AI 2024): each GPU has the whole of what is compressed.
_WHOLE = re.compile(r"(q_a_proj|kv_a_proj\w*)$")
_COLUMNS_BY_PATH = re.compile(r"kv_b_proj$")


@dataclass(frozen=True)
class Runtime:
    """How a model is run.

    Attributes:
        kind: ``eager``, one operation at a time; ``compile``, what lies between two products fused.
        fuse: which products that share an input are one, of :data:`FUSIONS`.
        tp: the tensor-parallel degree: widths are divided by it.
        recompute: whether the forward pass of repeated layers is computed again for the backward.
        loss_chunks: into how many parts of the tokens the head and the loss are cut.
        optimizer: ``adamw``, ``sgd`` or ``none``; what its step moves.
        attention: the share of the peak that fused attention is taken to reach.
        causal_half: whether its kernel skips what a causal mask hides, half of the pairs.
        skew: tokens go to one expert in so many, to each of these the same share.
    """

    kind: str = EAGER
    fuse: tuple[str, ...] = ()
    tp: int = 1
    recompute: bool = False
    loss_chunks: int = 1
    optimizer: str = "adamw"
    attention: float = 0.5
    causal_half: bool = True
    skew: float = 1.0

    def __post_init__(self) -> None:
        check_option("--runtime", self.kind, (EAGER, COMPILE))
        check_option("--optimizer", self.optimizer, ("adamw", "sgd", "none"))
        for name in self.fuse:
            check_option("--fuse", name, tuple(FUSIONS))
        check_counts(self, "tp", "loss_chunks")
        if not 0 < self.attention <= 1:
            raise UserError("--attention takes a share of the peak above 0%.")
        if not 1 <= self.skew < math.inf:
            raise UserError(f"--skew is {self.skew:g}; give 1 (all experts alike) or more.")

    def products(self, captured: Captured) -> list[Product]:
        """The products as this runtime computes them, in the order of the step.

        Raises:
            UserError: a width cannot be divided.
        """
        products = list(captured.products)
        for role in self.fuse:
            products = _fused(products, role)
        if self.tp > 1:
            products = [_split(product, products[product.of], self.tp) for product in products]
        if self.loss_chunks > 1:
            products = [p for product in products for p in _chunked(product, self.loss_chunks)]
        if self.recompute:
            products = [p for product in products for p in _twice(product)]
        if self.skew > 1:
            products = [_skewed(product, self.skew) for product in products]
        if not self.causal_half:
            products = [_with_every_pair(product) for product in products]
        return products

    def changes(self, captured: Captured) -> list[str]:
        """What it does to a model's products, in words, for those options that do anything."""
        products = list(captured.products)
        kinds = {product.work.op for product in products}
        fusing = [role for role in self.fuse if len(_fused(products, role)) < len(products)]
        said = [f"{role} as one GEMM" for role in fusing]
        if self.tp > 1:
            said.append(
                f"widths divided by {self.tp}; other operations are not divided, and "
                "communication is not counted"
            )
        if self.recompute:
            said.append("GEMMs of repeated layers are recomputed; other operations are not")
        if self.loss_chunks > 1 and any(product.role == "head" for product in products):
            said.append(f"the head is computed in {self.loss_chunks} parts")
        if "attention" in kinds:
            masks = "as half" if self.causal_half else "in full"
            said.append(
                f"fused attention at {self.attention:.0%} of the peak; causal masks counted {masks}"
            )
        if "grouped" in kinds:
            who = f"one expert in {self.skew:g} gets tokens, each" if self.skew > 1 else "each gets"
            said.append(f"experts: {who} the same share of the tokens")
        return said


def _fused(products: list[Product], role: str) -> list[Product]:
    """Products of one input as one; places change, so ``of`` is found anew."""
    leaders: dict[tuple[str, int], int] = {}
    leader_of: dict[int, int] = {}
    for place, product in enumerate(products):
        if product.of == place and product.role in FUSIONS[role] and product.shares >= 0:
            key = (product.path.rpartition(".")[0], product.shares)
            leader_of[place] = leaders.setdefault(key, place)
    members = {
        leader: [p for p, of in leader_of.items() if of == leader] for leader in leaders.values()
    }
    whole = {leader for leader, those in members.items() if len(those) == len(FUSIONS[role])}
    kept: list[Product] = []
    places: dict[int, int] = {}
    for place, product in enumerate(products):
        leader = leader_of.get(product.of)
        if leader not in whole:
            places[place] = len(kept)
            kept.append(product)
        elif product.of == leader:
            assert leader is not None
            others = [products[member].work for member in members[leader] if member != leader]
            out = sum(work.n for work in others if isinstance(work, Gemm))
            places[place] = len(kept)
            wide = _wider(product, products[leader], out)
            kept.append(replace(wide, role=role, names={}))
    return [replace(product, of=places[product.of]) for product in kept]


def _wider(product: Product, forward: Product, out: int) -> Product:
    size = out_size(product, forward)
    return product.resized({size: product.sizes[size] + out})


def _split(product: Product, forward: Product, tp: int) -> Product:
    """As one of ``tp`` GPUs computes it (Shoeybi et al. 2019, Megatron-LM)."""
    work = product.work
    if isinstance(work, Attention):
        heads, keys = (
            _divided(work.heads, tp, "heads"),
            _divided(work.kv_heads, tp, "key heads"),
        )
        return _named(
            product.resized({"heads": heads, "kv_heads": keys}), ("heads", "kv_heads"), tp
        )
    if isinstance(work, GroupedGemm):  # experts are dealt out, and their tokens with them
        experts = _divided(work.experts, tp, "experts")
        return _named(
            product.resized({"experts": experts, "m": max(1, work.m // tp)}), ("experts",), tp
        )
    if not isinstance(work, Gemm) or _WHOLE.search(product.path):
        return product
    if product.role == "attention" and work.batch > 1:
        return product.resized({"batch": _divided(work.batch, tp, "batched products")})
    if product.role in _BY_COLUMNS or _COLUMNS_BY_PATH.search(product.path):
        size = out_size(product, forward)
    elif product.role in _BY_ROWS:
        size = in_size(product, forward)
    else:
        return product
    if product.role == "head":  # a vocabulary is padded until it can be divided
        part = int(ceil_div(product.sizes[size], tp))
    else:
        part = _divided(product.sizes[size], tp, product.role)
    return _named(product.resized({size: part}), (size,), tp)


def _named(product: Product, sizes: tuple[str, ...], divisor: float) -> Product:
    """Sizes that were divided are named so."""
    names = {
        size: f"{name} / {divisor:g}" if size in sizes and name != "fixed" else name
        for size, name in product.names.items()
    }
    return replace(product, names=names)


def _divided(size: int, tp: int, what: str) -> int:
    if size % tp:
        raise UserError(f"--tp {tp} does not divide the {size} of {what}.")
    return size // tp


def _chunked(product: Product, chunks: int) -> list[Product]:
    """A part of the tokens at a time, for the head alone; the last part may be smaller."""
    if product.role != "head":
        return [product]
    size = "k" if product.pass_ == WGRAD else "m"
    tokens = product.sizes[size]
    part = int(ceil_div(tokens, min(chunks, tokens)))
    whole, rest = divmod(tokens, part)
    parts = [replace(product.resized({size: part}), count=product.count * whole)]
    return parts + ([product.resized({size: rest})] if rest else [])


def _twice(product: Product) -> list[Product]:
    again = product.pass_ == FORWARD and product.repeated
    return [product, replace(product, pass_=RECOMPUTED)] if again else [product]


def _skewed(product: Product, skew: float) -> Product:
    """Tokens go to fewer experts, of which each has more of them."""
    if not isinstance(product.work, GroupedGemm):
        return product
    fewer = {"experts": math.ceil(product.work.experts / skew)}
    return _named(product.resized(fewer), ("experts",), skew)


def _with_every_pair(product: Product) -> Product:
    """As a kernel computes attention that masks scores instead of skipping them."""
    if not isinstance(product.work, Attention):
        return product
    return replace(product, work=replace(product.work, causal=False))


def optimizer_bytes(captured: Captured, runtime: Runtime) -> int:
    """What a step of the optimizer reads and writes, with its state in the parameters' dtype.

    AdamW reads parameter, gradient and two moments and writes all but the gradient; SGD reads
    parameter and gradient and writes the parameter.
    """
    accesses = {"adamw": 7, "sgd": 3, "none": 0}[runtime.optimizer]
    return accesses * captured.parameter_bytes // runtime.tp
