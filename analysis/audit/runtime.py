"""What the runtime does to a model's products: fuses them, splits them, computes them twice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.errors import UserError
from kernels.problem import Gemm
from sweeps.capture.captured import DGRAD, FORWARD, WGRAD, Attention, Captured, Grouped, Product

EAGER, COMPILE = "eager", "compile"
RECOMPUTED = "recompute"
FUSIONS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Roles that share an input, and the role of the one product that computes them all."""

_BY_COLUMNS = ("q", "k", "v", "qkv", "up", "gate", "gate_up", "head")
_BY_ROWS = ("out", "down")


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
    """

    kind: str = EAGER
    fuse: tuple[str, ...] = ()
    tp: int = 1
    recompute: bool = False
    loss_chunks: int = 1
    optimizer: str = "adamw"
    attention: float = 0.5

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
            products = [_chunked(product, self.loss_chunks) for product in products]
        if self.recompute:
            products = [p for product in products for p in _twice(product)]
        return products


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


def _out_size(product: Product, forward: Product) -> str:
    """Which size of a product is the output features of its forward product."""
    if product.pass_ == DGRAD:
        return "k"
    if product.pass_ == WGRAD:
        # y = x Wᵀ stores W (out, in), and y = x W stores it (in, out), as its gradient is.
        return "m" if isinstance(forward.work, Gemm) and forward.work.layout[1] == "t" else "n"
    return "n"


def _in_size(product: Product, forward: Product) -> str:
    """Which size of a product is the input features of its forward product."""
    if product.pass_ == WGRAD:
        return "n" if _out_size(product, forward) == "m" else "m"
    return "n" if product.pass_ == DGRAD else "k"


def _wider(product: Product, forward: Product, out: int) -> Product:
    size = _out_size(product, forward)
    return product.resized({size: product.sizes[size] + out})


def _split(product: Product, forward: Product, tp: int) -> Product:
    """As one of ``tp`` GPUs computes it (Shoeybi et al. 2019, Megatron-LM)."""
    work = product.work
    if isinstance(work, Attention):
        kv = max(1, work.kv_heads // tp)
        return product.resized({"heads": _divided(work.heads, tp, "heads"), "kv_heads": kv})
    if isinstance(work, Grouped):  # experts are dealt out, and their tokens with them
        experts = _divided(work.experts, tp, "experts")
        return product.resized({"experts": experts, "m": max(1, work.m // tp)})
    if not isinstance(work, Gemm):
        return product
    if product.role == "attention":
        return product.resized({"batch": _divided(work.batch, tp, "batched products")})
    if product.role in _BY_COLUMNS:
        size = _out_size(product, forward)
    elif product.role in _BY_ROWS:
        size = _in_size(product, forward)
    else:
        return product
    return product.resized({size: _divided(product.sizes[size], tp, product.role)})


def _divided(size: int, tp: int, what: str) -> int:
    if size % tp:
        raise UserError(f"--tp {tp} does not divide the {size} of {what}.")
    return size // tp


def _chunked(product: Product, chunks: int) -> Product:
    """A part of the tokens at a time, for the head alone."""
    if product.role != "head":
        return product
    size = "k" if product.pass_ == WGRAD else "m"
    part = -(-product.sizes[size] // chunks)
    return replace(product.resized({size: part}), count=product.count * chunks)


def _twice(product: Product) -> list[Product]:
    repeated = product.pass_ == FORWARD and "*" in product.path
    return [product, replace(product, pass_=RECOMPUTED)] if repeated else [product]


def optimizer_bytes(captured: Captured, runtime: Runtime) -> int:
    """What a step of the optimizer reads and writes, with its state in the parameters' dtype.

    AdamW reads parameter, gradient and two moments and writes all but the gradient; SGD reads
    parameter and gradient and writes the parameter.
    """
    accesses = {"adamw": 7, "sgd": 3, "none": 0}[runtime.optimizer]
    return accesses * captured.parameter_bytes // runtime.tp
