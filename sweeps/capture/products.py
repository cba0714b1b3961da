"""Turn traced operations into products, each with its sizes, layout, role and pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.problem import Conv, Gemm
from sweeps.capture.captured import (
    BACKWARD,
    DGRAD,
    FORWARD,
    WGRAD,
    Attention,
    GroupedGemm,
    Product,
    Work,
)
from sweeps.capture.convolutions import (
    ConvolutionSettings,
    StoredTensor,
    UnsupportedOperationError,
    convolutions_of,
)
from sweeps.capture.roles import role_of
from sweeps.capture.trace import TracedOperation

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# Pattern of the names of operations that multiply matrices, even if no function below reads them.
# Upsampling is excluded, because the name of "aten::upsample_bilinear2d" contains "linear".
_LIKE_A_PRODUCT = re.compile(
    r"^(?!aten::_?upsample).*"
    r"(mm\b|bmm|addmv|\bmv\b|\bdot\b|convolution|conv\d|matmul|linear|attention|_mm|lstm|gru|rnn)"
)


def products_of(operations: Sequence[TracedOperation]) -> tuple[list[Product], list[str]]:
    """Return the products of a step in order, and the names of the unsupported operations.

    An unsupported operation multiplies matrices, judging by its name, but cannot be read as a
    product.
    """
    products: list[Product] = []
    unknown: dict[str, None] = {}  # the dictionary is used as a set that keeps its order
    # Position of each forward product, by the number of its autograd node.
    forward_positions: dict[int, int] = {}
    for operation in operations:
        works = _works(operation)
        if works is None:
            unknown[operation.name] = None
            continue
        for read_pass, work in works:
            # 1. Find the forward product. A gradient has the same autograd node as its forward
            # product. The forward product of a forward product is the product itself.
            position = len(products)
            if operation.backward:
                forward_position = forward_positions.get(operation.node, position)
            else:
                forward_position = position
                forward_positions.setdefault(operation.node, position)
            # 2. Find the role and the pass. A gradient has the role of its forward product, whose
            # sizes tell the two gradients apart.
            role = role_of(operation.module, work)
            pass_ = read_pass
            if forward_position < position:
                forward = products[forward_position]
                role = forward.role
                if read_pass in (DGRAD, WGRAD):
                    pass_ = _gradient_of(work, forward.work, read_pass)
            # 3. Add the product. If the first operand is a bias, the second one is the input.
            has_bias_first = operation.name in ("aten::addmm", "aten::baddbmm")
            input_access = operation.reads[1 if has_bias_first else 0]
            products.append(
                Product(
                    work=work,
                    role=role,
                    path=re.sub(r"\b\d+\b", "*", operation.module),
                    pass_=pass_,
                    count=operation.count,
                    input_id=-1 if operation.backward else input_access.storage,
                    forward_position=forward_position,
                    repeated=bool(operation.layers),
                    recomputed=operation.recomputed,
                )
            )
    return products, list(unknown)


def is_product(operation: TracedOperation) -> bool:
    """Return True if an operation multiplies matrices, judging by its name."""
    return operation.name in _READERS or bool(_LIKE_A_PRODUCT.search(operation.name))


def _works(operation: TracedOperation) -> list[tuple[str, Work]] | None:
    """Return the passes that a traced operation computes, each with the product's shape.

    Return an empty list if the operation is not a product, and None if it is a product that cannot
    be read.
    """
    if not is_product(operation):
        return []
    reader = _READERS.get(operation.name)
    if reader is None:
        return None
    try:
        return reader(operation)
    except UnsupportedOperationError:
        return None


def _dtype(tensor: Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise UnsupportedOperationError(f"an operand in {tensor.dtype}")
    return DTYPES[tensor.dtype]


def _pass(operation: TracedOperation, a: Tensor) -> str:
    """Return the pass of a GEMM. If it computes a gradient, the storage order of A decides.

    The GEMM for the gradient of a weight sums over the rows of the activations, so its operand A is
    stored transposed.
    """
    if not operation.backward:
        return FORWARD
    return WGRAD if _storage_letter(a) == "t" else DGRAD


def _gradient_of(work: Work, forward: Work, guess: str) -> str:
    """Return the pass of a gradient, judging by the sizes of its GEMM and of the forward GEMM.

    Return ``guess`` if either product is not a GEMM, or if the sizes fit both passes or neither.
    """
    if not isinstance(work, Gemm) or not isinstance(forward, Gemm):
        return guess
    fits_input = (work.m, work.n, work.k) == (forward.m, forward.k, forward.n)
    fits_weight = work.k == forward.m and {work.m, work.n} == {forward.n, forward.k}
    if fits_input == fits_weight:
        return guess
    return DGRAD if fits_input else WGRAD


def _gemm(a: Tensor, b: Tensor) -> Gemm:
    """Return the GEMM of operands (…, m, k) and (…, k, n), with at most one batch dimension."""
    m, k = a.shape[-2:]
    batch = a.shape[0] if a.dim() == 3 else 1
    layout = _storage_letter(a) + _storage_letter(b)
    return Gemm(m, b.shape[-1], k, _dtype(a), layout, batch)


def _storage_letter(tensor: Tensor) -> str:
    """Return ``t`` if the columns of a matrix are contiguous and its rows are not, else ``n``."""
    row_stride, column_stride = tensor.stride()[-2:]
    return "t" if column_stride != 1 and row_stride == 1 else "n"


def _mm(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, b = operation.args[:2]  # an output dtype may follow
    return [(_pass(operation, a), _gemm(a, b))]


def _addmm(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, b = operation.args[1:3]  # the bias is the first argument
    return [(_pass(operation, a), _gemm(a, b))]


def _bmm(operation: TracedOperation) -> list[tuple[str, Work]]:
    """Return the pass and the GEMM of ``bmm(a, b)``, which multiplies batches of activations."""
    a, b = operation.args[:2]
    return [(BACKWARD if operation.backward else FORWARD, _gemm(a, b))]


def _baddbmm(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, b = operation.args[1:3]
    return [(BACKWARD if operation.backward else FORWARD, _gemm(a, b))]


def _mv(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, x = operation.args
    return [(_pass(operation, a), _gemm(a, x.unsqueeze(-1)))]


def _grouped(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, b = operation.args[:2]
    dtype = _dtype(a)
    layout = _storage_letter(a) + _storage_letter(b)
    # If both operands have three dimensions, nothing is grouped: this is a batched GEMM.
    if a.dim() == 3 and b.dim() == 3:
        return [(BACKWARD if operation.backward else FORWARD, _gemm(a, b))]
    # If only B has three, each of the rows (m, k) is multiplied by its expert's weight (k, n).
    if a.dim() == 2 and b.dim() == 3:
        pass_ = DGRAD if operation.backward else FORWARD
        rows = a.shape[0]
        experts, k, n = b.shape
        return [(pass_, GroupedGemm(rows, n, k, experts, dtype, layout, pass_))]
    if a.dim() == 3:
        raise UnsupportedOperationError("a grouped GEMM with one matrix A per expert")
    # Otherwise, each gradient of a weight is A (n, rows) times B (rows, k) over its expert's rows.
    n, rows = a.shape
    k = b.shape[1]
    experts = operation.result.shape[0]
    return [(WGRAD, GroupedGemm(rows, n, k, experts, dtype, layout, WGRAD))]


def _attention(operation: TracedOperation) -> list[tuple[str, Work]]:
    backward = operation.name.endswith("_backward")
    q, k, v, causal, window = operation.args[1:] if backward else operation.args
    pass_ = BACKWARD if backward else FORWARD
    batch, heads, queries, width = q.shape
    work = Attention(
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        queries=queries,
        keys=k.shape[2],
        width=width,
        value_width=v.shape[3],
        dtype=_dtype(q),
        causal=causal,
        window=window,
        pass_=pass_,
    )
    return [(pass_, work)]


def _convolution(operation: TracedOperation) -> list[tuple[str, Work]]:
    """Return the pass and the shape of ``convolution(x, weight, bias, settings…)``."""
    x, weight = operation.args[:2]
    convolutions = _convolutions(x, weight, operation.args[3:], ("fprop",))
    return [(FORWARD, conv) for conv in convolutions]


def _convolution_backward(operation: TracedOperation) -> list[tuple[str, Work]]:
    """Return the passes that ``convolution_backward`` computes, each with its shape.

    The arguments are (gradient, x, weight, bias sizes, settings…, output mask).
    """
    _, x, weight = operation.args[:3]
    # The mask says which of the gradients of x, weight and bias are computed.
    computes_dgrad, computes_wgrad, _ = operation.args[-1]
    passes = []
    if computes_dgrad:
        passes.append("dgrad")
    if computes_wgrad:
        passes.append("wgrad")
    convolutions = _convolutions(x, weight, operation.args[4:], passes)
    # The input gradient of a transposed convolution is computed by an ordinary convolution, whose
    # own pass is therefore fprop.
    return [(WGRAD if conv.pass_ == "wgrad" else DGRAD, conv) for conv in convolutions]


def _convolutions(
    x: Tensor, weight: Tensor, settings: Sequence[Any], passes: Sequence[str]
) -> list[Conv]:
    """Return a :class:`Conv` for each of the given passes of a convolution.

    ``settings`` are stride, padding, dilation, transposed, output padding and groups, possibly
    followed by other arguments.
    """
    dimensions = x.dim() - 2

    def per_dimension(numbers: Sequence[int]) -> Sequence[int]:
        """Return one number per spatial dimension. Repeat a single number for all dimensions."""
        return [*numbers] * dimensions if len(numbers) == 1 else numbers

    stride, padding, dilation, transposed, output_padding, groups = settings[:6]
    return convolutions_of(
        StoredTensor(x.shape, x.stride()),
        StoredTensor(weight.shape, weight.stride()),
        ConvolutionSettings(
            stride=per_dimension(stride),
            padding=per_dimension(padding),
            dilation=per_dimension(dilation),
            transposed=transposed,
            output_padding=per_dimension(output_padding),
            groups=groups,
        ),
        _dtype(x),
        passes,
    )


_READERS: dict[str, Callable[[TracedOperation], list[tuple[str, Work]]]] = {
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _baddbmm,
    "aten::mv": _mv,
    "aten::_grouped_mm": _grouped,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "rooftile::attention": _attention,
    "rooftile::attention_backward": _attention,
}
"""Functions that read the products of an operation, by the name of the operation."""
