"""Data classes of a captured step: what a model multiplies and moves.

A *product* is a GEMM, a grouped GEMM, a convolution or a call of attention. Every other operation
of a model is one of its *other operations*. This module does not import PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kernels.common.checks import check_positive
from kernels.common.errors import UserError
from kernels.problem import Conv, Gemm

FORWARD, DGRAD, WGRAD, BACKWARD = "forward", "dgrad", "wgrad", "backward"
"""Passes of a product.

``dgrad`` is the gradient of the input, ``wgrad`` that of the weight, and ``backward`` any gradient
of an operation that has no weight."""

ROLES = (
    "q", "k", "v", "qkv", "out", "up", "gate", "gate_up", "down", "router", "experts", "head",
    "attention", "convolution", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """One GEMM per expert: ``m`` rows in total, distributed over ``experts`` weights of (k, n).

    In the gradient of the weights (``pass_`` is ``wgrad``), each expert's result is (n, k), and the
    GEMMs sum over the rows.
    """

    m: int
    n: int
    k: int
    experts: int
    dtype: str
    layout: str = "nt"
    pass_: str = FORWARD

    op = "grouped"

    def __post_init__(self) -> None:
        check_positive(self, ("m", "n", "k", "experts"))

    @property
    def flops(self) -> int:
        """2 · m · n · k, no matter how the rows are distributed."""
        return 2 * self.m * self.n * self.k

    def spec(self) -> str:
        """Return ``M,N,K,dtype`` and the number of experts."""
        return f"{self.m},{self.n},{self.k},{self.dtype},{self.experts} experts"

    def __str__(self) -> str:
        return f"{self.m}×{self.n}×{self.k} {self.dtype} over {self.experts} experts"


@dataclass(frozen=True, slots=True)
class Attention:
    """Scores, softmax and weighted sum of one call, as one fused kernel computes them.

    The queries are (batch, heads, queries, width), the keys (batch, kv_heads, keys, width) and the
    values (batch, kv_heads, keys, value_width). ``window`` is the number of keys that a query sees;
    0 means all of them.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    dtype: str
    causal: bool = False
    window: int = 0
    pass_: str = FORWARD

    op = "attention"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(f"{self.kv_heads} key heads do not divide {self.heads} heads.")

    @property
    def flops(self) -> int:
        """2 · batch · heads · pairs · (width + value_width), and 5/2 of that for the gradients.

        The backward pass has five GEMMs where the forward pass has two, because fused kernels
        compute the scores again (Dao 2023, FlashAttention-2).
        """
        forward = 2 * self.batch * self.heads * self.pairs * (self.width + self.value_width)
        return forward if self.pass_ == FORWARD else forward * 5 // 2

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that the mask leaves.

        By convention, causal attention of several queries has half of all pairs, unless a window
        limits the keys that each query sees.
        """
        keys_in_window = min(self.keys, self.window or self.keys)
        pairs = self.queries * keys_in_window
        is_halved = self.causal and self.queries > 1 and keys_in_window == self.keys
        return pairs // 2 if is_halved else pairs

    def spec(self) -> str:
        """Return ``batch×heads,queries×keys,width,dtype`` and the mask."""
        mask = ",causal" if self.causal else ""
        window = f",window {self.window}" if self.window else ""
        return (
            f"{self.batch}×{self.heads},{self.queries}×{self.keys},{self.width},{self.dtype}"
            f"{mask}{window}"
        )

    def __str__(self) -> str:
        return (
            f"{self.batch}×{self.heads} heads of {self.width}, {self.queries} queries × "
            f"{self.keys} keys"
        )


Work = Gemm | Conv | GroupedGemm | Attention


@dataclass(frozen=True)
class Product:
    """A product of one shape, pass and place in the model, which occurs ``count`` times in a step.

    ``path`` is the path of its module, with ``*`` in place of layer numbers. ``shares`` is the same
    number for products that read the same input, and -1 where that is not known. ``of`` is the
    position of the forward product whose gradient this is; a forward product has its own position.
    ``names`` gives each size as a formula of the model's dimensions, such as ``2·hidden``.
    ``repeated`` says that it is in a layer that has identical copies.
    """

    work: Work
    role: str
    path: str
    pass_: str
    count: int
    shares: int
    of: int
    names: Mapping[str, str] = field(default_factory=dict)
    repeated: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by name; changing the model may change any of them."""
        names = {
            "gemm": ("m", "n", "k", "batch"),
            "conv": ("n", "c", "h", "w", "kout", "r", "s", "groups"),
            "grouped": ("m", "n", "k", "experts"),
            "attention": ("batch", "heads", "kv_heads", "queries", "keys", "width", "value_width"),
        }[self.work.op]
        return {name: getattr(self.work, name) for name in names}

    def resized(self, sizes: Mapping[str, int]) -> Product:
        """Return the same product with other sizes."""
        return replace(self, work=replace(self.work, **sizes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that other operations of one kind read and write in a step."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Captured:
    """One step of a model: its products in order, and the bytes that its other operations move.

    ``moved`` counts each operation by itself. ``moved_fused`` counts the operations between two
    products as one. ``parameters`` is the number of elements of distinct parameters. ``uncounted``
    has the names of products of unknown kinds.

    ``saved`` is the number of bytes that the forward pass keeps for the backward pass.
    ``saved_recomputed`` is that number if repeated layers keep only their inputs and are computed
    again one by one. ``largest_operation`` is the largest number of bytes that the tensors of one
    operation have, without parameters.
    """

    products: tuple[Product, ...]
    moved: tuple[MovedBytes, ...]
    moved_fused: tuple[MovedBytes, ...]
    parameters: int
    parameter_bytes: int
    saved: int = 0
    saved_recomputed: int = 0
    largest_operation: int = 0
    uncounted: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of all products of the step."""
        return sum(product.count * product.work.flops for product in self.products)


@dataclass(frozen=True)
class Dimension:
    """A size of the model that can be changed, and its effect on the sizes of the products.

    ``slopes`` maps the position of a product and the name of one of its sizes to the growth of that
    size when the dimension grows by one.
    """

    name: str
    value: int
    slopes: Mapping[tuple[int, str], float] = field(default_factory=dict)


def with_names(captured: Captured, dimensions: Sequence[Dimension]) -> Captured:
    """Return the capture with the sizes of its products named after dimensions.

    A size that depends on no dimension is named ``fixed``. The sizes of a gradient get no names if
    it is not known how they follow from those of the forward pass.
    """
    named = []
    for product in captured.products:
        forward = captured.products[product.of]
        forward_names = {
            size: _formula(product.of, size, value, dimensions)
            for size, value in forward.sizes.items()
        }
        names: dict[str, str] = {}
        if product is forward or not isinstance(product.work, Gemm | GroupedGemm):
            names = forward_names
        elif product.pass_ in (DGRAD, WGRAD):
            # A gradient has the sizes of its forward product in another order.
            rows = "k" if product.pass_ == WGRAD else "m"
            names = {
                rows: forward_names["m"],
                out_size(product, forward): forward_names["n"],
                in_size(product, forward): forward_names["k"],
            }
        named.append(replace(product, names=names))
    return replace(captured, products=tuple(named))


def out_size(product: Product, forward: Product) -> str:
    """Return the name of the size that holds the output features of a product's forward pass."""
    if product.pass_ == DGRAD:
        return "k"
    if product.pass_ == WGRAD:
        # y = x Wᵀ stores W as (out, in), y = x W as (in, out). Its gradient is stored the same way.
        return "m" if isinstance(forward.work, Gemm) and forward.work.layout[1] == "t" else "n"
    return "n"


def in_size(product: Product, forward: Product) -> str:
    """Return the name of the size that holds the input features of a product's forward pass."""
    if product.pass_ == WGRAD:
        return "n" if out_size(product, forward) == "m" else "m"
    return "n" if product.pass_ == DGRAD else "k"


def _formula(position: int, size: str, value: int, dimensions: Sequence[Dimension]) -> str:
    """Write a size as dimensions multiplied together, or as a sum of their multiples.

    Args:
        position: position of the product.
        size: name of the size.
        value: the size itself.
        dimensions: dimensions that may affect it.
    """
    effects = [
        (dimension, dimension.slopes[position, size])
        for dimension in dimensions
        if (position, size) in dimension.slopes
    ]
    if not effects:
        return "fixed"
    # A dimension explains the size if the size is its multiple, by the slope and without a rest.
    sufficient = [dimension for dimension, slope in effects if slope * dimension.value == value]
    # 1. The size is a multiple of all its dimensions multiplied together.
    product = math.prod(dimension.value for dimension, _ in effects)
    if value % product == 0 and len(sufficient) == len(effects):
        factor = value // product
        factors = [str(factor)] if factor > 1 else []
        return "·".join([*factors, *(dimension.name for dimension in sufficient)])
    # 2. One dimension explains the size. The others are derived from it, or it from them.
    if sufficient:
        return sufficient[0].name
    # 3. The size is a sum of multiples of its dimensions and a constant.
    terms = [
        dimension.name if slope == 1 else f"{slope:g}·{dimension.name}"
        for dimension, slope in effects
    ]
    constant = value - sum(slope * dimension.value for dimension, slope in effects)
    if constant:
        terms.append(f"{constant:g}")
    return " + ".join(terms).replace("+ -", "− ")
