"""What a model's step multiplies and moves, as plain data; no PyTorch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kernels.common.checks import check_positive
from kernels.common.errors import UserError
from kernels.problem import Conv, Gemm

FORWARD, DGRAD, WGRAD, BACKWARD = "forward", "dgrad", "wgrad", "backward"
"""Passes: the gradient of an input, of a weight, and of an operation that is neither's."""

ROLES = (
    "q", "k", "v", "qkv", "out", "up", "gate", "gate_up", "down", "router", "experts", "head",
    "attention", "convolution", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """One product for each expert: ``m`` rows in all, dealt out to ``experts`` weights (k, n).

    A gradient of the weights is (n, k) for each expert, with the rows as what is summed over:
    ``pass_`` is then ``wgrad``.
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
        """2 · m · n · k, however the rows are dealt out."""
        return 2 * self.m * self.n * self.k

    def spec(self) -> str:
        """``M,N,K,dtype`` and how many experts."""
        return f"{self.m},{self.n},{self.k},{self.dtype},{self.experts} experts"

    def __str__(self) -> str:
        return f"{self.m}×{self.n}×{self.k} {self.dtype} over {self.experts} experts"


@dataclass(frozen=True, slots=True)
class Attention:
    """Scores, softmax and weighted sum of one call, as one fused kernel computes them.

    Queries (batch, heads, queries, width), keys (batch, kv_heads, keys, width), values
    (batch, kv_heads, keys, value_width). ``window`` 0 means every key.
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
        """2 · batch · heads · pairs · (width + value_width), of the pairs that the mask leaves.

        The gradient has five products where the forward pass has two, as fused kernels compute
        the scores again (Dao 2023, FlashAttention-2).
        """
        forward = 2 * self.batch * self.heads * self.pairs * (self.width + self.value_width)
        return forward if self.pass_ == FORWARD else forward * 5 // 2

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key: by convention half of them where attention is causal."""
        seen = min(self.keys, self.window or self.keys)
        every = self.queries * seen
        return every // 2 if self.causal and self.queries > 1 and seen == self.keys else every

    def spec(self) -> str:
        """``batch×heads,queries×keys,width,dtype`` and what is masked."""
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
    """Products of one shape, pass and place in the model; ``count`` of them in a step.

    ``path`` is the module's, layers that are alike as ``*``. ``shares`` is the same number for
    products of one input, -1 where nothing is known. ``of`` is the place of the forward product
    whose gradient this is, its own for a forward product. ``names`` says of which dimensions of the
    model its sizes are made, such as ``2·hidden``. ``repeated`` says that it is in a layer of which
    there are several alike.
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
        """Its sizes by name: those that a change of the model may change."""
        names = {
            "gemm": ("m", "n", "k", "batch"),
            "conv": ("n", "c", "h", "w", "kout", "r", "s", "groups"),
            "grouped": ("m", "n", "k", "experts"),
            "attention": ("batch", "heads", "kv_heads", "queries", "keys", "width", "value_width"),
        }[self.work.op]
        return {name: getattr(self.work, name) for name in names}

    def resized(self, sizes: Mapping[str, int]) -> Product:
        """The same with other sizes."""
        return replace(self, work=replace(self.work, **sizes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that operations of one kind, no products, read and write in a step."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Captured:
    """One step of a model: its products, in order, and what its other operations move.

    ``moved`` is of operations one at a time, ``moved_fused`` with those between two products as
    one. ``parameters`` are distinct elements; ``uncounted`` names products of no known kind.
    """

    products: tuple[Product, ...]
    moved: tuple[MovedBytes, ...]
    moved_fused: tuple[MovedBytes, ...]
    parameters: int
    parameter_bytes: int
    uncounted: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """Of all products of the step."""
        return sum(product.count * product.work.flops for product in self.products)


@dataclass(frozen=True)
class Dimension:
    """A size of the model that can be changed, and what it does to the products' sizes.

    ``slopes`` has, by a product's place and a size's name, how much that grows for one more of the
    dimension.
    """

    name: str
    value: int
    slopes: Mapping[tuple[int, str], float] = field(default_factory=dict)


def with_names(captured: Captured, dimensions: Sequence[Dimension]) -> Captured:
    """The same with the products' sizes named; what follows no dimension is ``fixed``."""
    named = []
    for product in captured.products:
        first = captured.products[product.of]
        sizes = first.sizes
        of_first = {
            size: _formula(product.of, size, value, dimensions) for size, value in sizes.items()
        }
        names = of_first
        if product is not first and isinstance(product.work, Gemm | GroupedGemm):
            names = {}
            if product.pass_ in (DGRAD, WGRAD):  # the forward product's sizes in another order
                rows = "k" if product.pass_ == WGRAD else "m"
                order = {rows: "m", out_size(product, first): "n", in_size(product, first): "k"}
                names = {size: of_first[name] for size, name in order.items()}
        named.append(replace(product, names=names))
    return replace(captured, products=tuple(named))


def out_size(product: Product, forward: Product) -> str:
    """Which size of a product is the output features of its forward product."""
    if product.pass_ == DGRAD:
        return "k"
    if product.pass_ == WGRAD:
        # y = x Wᵀ stores W (out, in), and y = x W stores it (in, out), as its gradient is.
        return "m" if isinstance(forward.work, Gemm) and forward.work.layout[1] == "t" else "n"
    return "n"


def in_size(product: Product, forward: Product) -> str:
    """Which size of a product is the input features of its forward product."""
    if product.pass_ == WGRAD:
        return "n" if out_size(product, forward) == "m" else "m"
    return "n" if product.pass_ == DGRAD else "k"


def _formula(place: int, size: str, value: int, dimensions: Sequence[Dimension]) -> str:
    """A size as a product of dimensions or a sum of multiples of them."""
    found = [(d, d.slopes[place, size]) for d in dimensions if (place, size) in d.slopes]
    if not found:
        return "fixed"
    whole = math.prod(d.value for d, _ in found)
    if value % whole == 0 and all(slope * d.value == value for d, slope in found):
        factor = value // whole
        return "·".join([*([str(factor)] if factor > 1 else []), *(d.name for d, _ in found)])
    alone = [d.name for d, slope in found if slope * d.value == value]
    if alone:  # the others are derived from it, or it from them
        return alone[0]
    rest = value - sum(slope * d.value for d, slope in found)
    terms = [f"{slope:g}·{d.name}" if slope != 1 else d.name for d, slope in found]
    return " + ".join([*terms, *([f"{rest:g}"] if rest else [])]).replace("+ -", "− ")
