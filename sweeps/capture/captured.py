"""Data classes of a captured step: its products, and the bytes that its other operations move.

A *product* is a GEMM, a grouped GEMM, a convolution or a call to attention. The operations of a
model that do not multiply matrices are its *other operations*. This module does not import PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kernels.common.checks import check_positive
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.problem import Conv, Gemm

FORWARD, DGRAD, WGRAD, BACKWARD = "forward", "dgrad", "wgrad", "backward"
"""Passes of a product.

``dgrad`` computes the gradient of the input, and ``wgrad`` computes the gradient of the weight.
``backward`` computes the gradients of a product without a weight: attention or a batched GEMM."""

ROLES = (
    "q", "k", "v", "qkv", "out", "up", "gate", "gate_up", "down", "router", "experts", "head",
    "attention", "convolution", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """One GEMM per expert: each of ``m`` rows is multiplied by its expert's weight (k, n).

    If ``pass_`` is ``wgrad``, each expert's GEMM sums over the expert's rows, and its result is the
    gradient (n, k) of the expert's weight.
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
        """FLOPs: 2 · m · n · k."""
        return 2 * self.m * self.n * self.k

    def spec(self) -> str:
        """Return ``M,N,K,dtype,E experts``."""
        return f"{self.m},{self.n},{self.k},{self.dtype},{self.experts} experts"

    def __str__(self) -> str:
        return f"{self.m}×{self.n}×{self.k} {self.dtype} over {counted(self.experts, 'expert')}"


@dataclass(frozen=True, slots=True)
class Attention:
    """One call to attention: scores, softmax and weighted sum, computed by one fused kernel.

    The queries are (batch, heads, queries, width), the keys (batch, kv_heads, keys, width) and the
    values (batch, kv_heads, keys, value_width). ``window`` is the largest number of keys that a
    query sees; 0 means no limit.
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
        names = ("batch", "heads", "kv_heads", "queries", "keys", "width", "value_width")
        check_positive(self, names)
        if self.heads % self.kv_heads:
            raise UserError(
                f"the number of heads ({self.heads}) is not a multiple of the number of KV heads "
                f"({self.kv_heads}); change one of them."
            )

    @property
    def flops(self) -> int:
        """FLOPs: 2 · batch · heads · pairs · (width + value_width), times 5/2 in the backward pass.

        The forward pass computes two GEMMs. The backward pass computes five GEMMs, because fused
        kernels recompute the scores (Dao 2023, FlashAttention-2).
        """
        forward = 2 * self.batch * self.heads * self.pairs * (self.width + self.value_width)
        return forward if self.pass_ == FORWARD else forward * 5 // 2

    @property
    def pairs(self) -> int:
        """Number of query–key pairs of each head that count towards the FLOPs.

        If causal attention has several queries, half of all pairs are counted, which is the usual
        convention. But if the window is smaller than the number of keys, every key of the window is
        counted for each query.
        """
        keys_in_window = min(self.keys, self.window) if self.window else self.keys
        pairs = self.queries * keys_in_window
        is_halved = self.causal and self.queries > 1 and keys_in_window == self.keys
        return pairs // 2 if is_halved else pairs

    def spec(self) -> str:
        """Return ``batch×heads,queries×keys,width,dtype``, followed by the kind of mask, if any."""
        mask = ",causal" if self.causal else ""
        window = f",window {self.window}" if self.window else ""
        return (
            f"{self.batch}×{self.heads},{self.queries}×{self.keys},{self.width},{self.dtype}"
            f"{mask}{window}"
        )

    def __str__(self) -> str:
        queries = "1 query" if self.queries == 1 else f"{self.queries} queries"
        keys = "1 key" if self.keys == 1 else f"{self.keys} keys"
        return f"{self.batch}×{self.heads} heads of {self.width}, {queries} × {keys}"


Work = Gemm | Conv | GroupedGemm | Attention


@dataclass(frozen=True)
class Product:
    """A product of one shape and pass, at one place in a model or in each of its identical layers.

    Attributes:
        role: purpose of the product in the model, one of :data:`ROLES`.
        path: path of the product's module, with ``*`` in place of numbers.
        count: number of times that the product occurs in a step.
        input_id: number that is the same for all forward products that read the same input; -1 for
            a gradient.
        forward_position: position in :attr:`Captured.products` of the forward product whose
            gradient the product computes. If the product is a forward product, or a gradient whose
            forward product is not known, this is the position of the product itself.
        names: formula of each size in terms of the model's dimensions, such as ``2·hidden``; empty
            if the formulas are not known.
        repeated: True if the product is in a layer that has identical copies.
        recomputed: True if the product is recomputed by activation checkpointing in the backward
            pass; False for the original product in the forward pass.
    """

    work: Work
    role: str
    path: str
    pass_: str
    count: int
    input_id: int
    forward_position: int
    names: Mapping[str, str] = field(default_factory=dict)
    repeated: bool = False
    recomputed: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that may depend on the model's dimensions, by name."""
        names = {
            "gemm": ("m", "n", "k", "batch"),
            "conv": ("n", "c", "h", "w", "kout", "r", "s", "groups"),
            "grouped": ("m", "n", "k", "experts"),
            "attention": ("batch", "heads", "kv_heads", "queries", "keys", "width", "value_width"),
        }[self.work.op]
        return {name: getattr(self.work, name) for name in names}

    def resized(self, sizes: Mapping[str, int]) -> Product:
        """Return a copy of the product with new values for the given sizes."""
        return replace(self, work=replace(self.work, **sizes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that the other operations of one kind read and write in a step.

    ``what`` is the name of the kind.
    """

    what: str
    bytes: int


@dataclass(frozen=True)
class LossMemory:
    """Memory of the output head and the loss, and peak memory of the rest of a training step.

    All values are 0 if the step does not train. If the model has no output head, all but
    ``peak_elsewhere`` are 0.

    Attributes:
        saved: bytes that the head and the loss keep for the backward pass, such as the logits.
        peak: largest number of bytes that the saved and temporary tensors of the head and the loss
            occupy at any time in their backward pass, without ``gradients``.
        gradients: bytes of the gradients of the head's input and parameters.
        peak_elsewhere: largest number of bytes that all saved and temporary tensors occupy at any
            time after the backward pass of the head.
    """

    saved: int = 0
    peak: int = 0
    gradients: int = 0
    peak_elsewhere: int = 0


@dataclass(frozen=True)
class Captured:
    """One step of a model: its products in execution order, its memory traffic and its memory use.

    Attributes:
        moved: bytes that the other operations move if each of them is a separate kernel.
        moved_fused: bytes that the other operations move if consecutive ones in the same layer,
            with no product between them, are fused into one kernel.
        parameters: number of elements of all distinct parameters.
        saved: bytes that the forward pass keeps for the backward pass.
        saved_recomputed: bytes kept for the backward pass if repeated layers keep only their inputs
            and are recomputed one by one.
        peak: largest number of bytes that saved and temporary tensors occupy at any time in the
            backward pass if each operation is a separate kernel.
        loss: memory of the output head and the loss, and peak memory after their backward pass.
        largest_operation_bytes: largest number of bytes that one operation reads and writes,
            without parameters.
        operations: number of operations that eager mode launches in a step, without the optimizer.
        uncounted: names of operations that multiply matrices but cannot be read as products.
        assumptions: assumptions about the model and its input, in words.
    """

    products: tuple[Product, ...]
    moved: tuple[MovedBytes, ...]
    moved_fused: tuple[MovedBytes, ...]
    parameters: int
    parameter_bytes: int
    saved: int = 0
    saved_recomputed: int = 0
    peak: int = 0
    loss: LossMemory = LossMemory()
    largest_operation_bytes: int = 0
    operations: int = 0
    uncounted: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of all products of the step."""
        return sum(product.count * product.work.flops for product in self.products)


@dataclass(frozen=True)
class Dimension:
    """A size of the model that can be changed, and its effect on the sizes of the products.

    ``slopes`` says by how much each affected size of a product grows if the dimension grows by 1.
    Its keys are the position of the product and the name of the affected size.
    """

    name: str
    value: int
    slopes: Mapping[tuple[int, str], float] = field(default_factory=dict)


def with_names(captured: Captured, dimensions: Sequence[Dimension]) -> Captured:
    """Return the capture with formulas (:func:`_formula`) for the sizes of its products.

    The sizes of a batched GEMM's gradient get no formulas, because it is not known to which sizes
    of the forward GEMM they correspond. A recomputed product, its gradients, and a gradient whose
    forward product is not known get no formulas, because ``dimensions`` describe only the forward
    pass.
    """
    named = []
    for product in captured.products:
        forward = captured.products[product.forward_position]
        forward_names = {
            size: _formula(product.forward_position, size, value, dimensions)
            for size, value in forward.sizes.items()
        }
        if forward.recomputed or forward.pass_ != FORWARD:
            names = {}
        elif product is forward or not isinstance(product.work, Gemm | GroupedGemm):
            # Convolutions and attention have sizes with the same names in all passes.
            names = forward_names
        elif product.pass_ not in (DGRAD, WGRAD):  # a gradient of a batched GEMM
            names = {}
        else:
            # A gradient has the sizes of its forward product in another order. The gradient of the
            # weight sums over the forward product's rows, which a grouped GEMM always calls m.
            sums_over_k = product.pass_ == WGRAD and isinstance(product.work, Gemm)
            row_size = "k" if sums_over_k else "m"
            names = {
                row_size: forward_names["m"],
                out_size(product, forward): forward_names["n"],
                in_size(product, forward): forward_names["k"],
            }
        named.append(replace(product, names=names))
    return replace(captured, products=tuple(named))


def out_size(product: Product, forward: Product) -> str:
    """Return which size of ``product`` (m, n or k) is the number of output features of ``forward``.

    ``product`` is a GEMM or a grouped GEMM, and ``forward`` is its forward product. If ``product``
    is itself a forward product, pass it as ``forward``, too.
    """
    if product.pass_ == DGRAD:
        return "k"
    if product.pass_ == WGRAD:
        # y = x Wᵀ stores W as (out, in), and y = x W stores it as (in, out). The gradient of W is
        # stored like W: as (m, n) by a GEMM, and as (n, k) for each expert by a grouped GEMM.
        first, second = _weight_sizes(product)
        assert isinstance(forward.work, Gemm | GroupedGemm)
        return first if forward.work.layout[1] == "t" else second
    return "n"


def in_size(product: Product, forward: Product) -> str:
    """Return which size of ``product`` (m, n or k) is the number of input features of ``forward``.

    The arguments are as in :func:`out_size`.
    """
    if product.pass_ == WGRAD:
        first, second = _weight_sizes(product)
        return second if out_size(product, forward) == first else first
    return "n" if product.pass_ == DGRAD else "k"


def _weight_sizes(product: Product) -> tuple[str, str]:
    """Return the names of the sizes that count the rows and the columns of a weight's gradient."""
    return ("n", "k") if isinstance(product.work, GroupedGemm) else ("m", "n")


def _term(dimension: Dimension, slope: float) -> str:
    """Format a multiple of a dimension, such as ``3·hidden``."""
    return dimension.name if slope == 1 else f"{slope:g}·{dimension.name}"


def _formula(position: int, size: str, value: int, dimensions: Sequence[Dimension]) -> str:
    """Return a formula for a size in terms of dimensions, or ``fixed`` if none affects the size."""
    effects = [
        (dimension, dimension.slopes[position, size])
        for dimension in dimensions
        if (position, size) in dimension.slopes
    ]
    if not effects:
        return "fixed"
    # A dimension explains the size if the size is the slope times the dimension. The comparison is
    # not exact, because a slope such as 7/3 has a rounding error.
    sufficient = [
        (dimension, slope)
        for dimension, slope in effects
        if math.isclose(slope * dimension.value, value)
    ]
    # 1. The size is a multiple of all its dimensions multiplied together. Each of them then
    #    explains the size, because its slope contains the others.
    dimensions_multiplied = math.prod(dimension.value for dimension, _ in effects)
    if value % dimensions_multiplied == 0 and len(sufficient) == len(effects):
        factor = value // dimensions_multiplied
        factors = [str(factor)] if factor > 1 else []
        return "·".join([*factors, *(dimension.name for dimension, _ in sufficient)])
    # 2. One dimension explains the size by itself: the factor is a fraction, the others depend on
    #    it, or the size is a quotient of dimensions.
    if sufficient:
        return _term(*sufficient[0])
    # 3. The size is a sum of multiples of its dimensions and a constant.
    terms = [_term(dimension, slope) for dimension, slope in effects]
    explained = sum(slope * dimension.value for dimension, slope in effects)
    if not math.isclose(explained, value):
        terms.append(f"{value - explained:g}")
    # A negative term is subtracted: "a + -2" becomes "a − 2".
    return " + ".join(terms).replace("+ -", "− ")
