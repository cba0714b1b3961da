"""Turn traced operations into products: what each multiplies, in which layout, for which role."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from sweeps.capture.roles import role_of
from sweeps.capture.trace import TracedOperation

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# Names of operations that multiply matrices, including kinds that no reader below understands.
_LIKE_A_PRODUCT = re.compile(
    r"mm\b|bmm|addmv|\bmv\b|\bdot\b|convolution|conv\d|matmul|linear|attention|_mm|lstm|gru|rnn"
)


def products_of(operations: Sequence[TracedOperation]) -> tuple[list[Product], list[str]]:
    """Return the products of a step in order, and the names of operations of unknown kinds."""
    products: list[Product] = []
    unknown: dict[str, None] = {}
    places: dict[int, int] = {}  # position of each forward product, by its autograd node's number
    for operation in operations:
        works = _works(operation)
        if works is None:
            unknown[operation.name] = None
            continue
        for pass_, work in works:
            place = len(products)
            forward = place
            if operation.backward:
                forward = places.get(operation.node, place)
            else:
                places.setdefault(operation.node, place)
            if operation.backward and pass_ in (DGRAD, WGRAD):
                pass_ = _gradient_of(work, products[forward].work, pass_)
            # The first operand of addmm is the bias.
            inputs = operation.reads[1 if operation.name == "aten::addmm" else 0]
            products.append(
                Product(
                    work=work,
                    role=products[forward].role
                    if forward < place
                    else role_of(operation.module, work),
                    path=re.sub(r"\b\d+\b", "*", operation.module),
                    pass_=pass_,
                    count=operation.count,
                    shares=-1 if operation.backward else inputs.storage,
                    of=forward,
                    repeated=bool(operation.layers),
                )
            )
    return products, list(unknown)


def is_product(operation: TracedOperation) -> bool:
    """Return True if an operation multiplies matrices, even if its kind is unknown."""
    return operation.name in _READERS or bool(_LIKE_A_PRODUCT.search(operation.name))


def _works(operation: TracedOperation) -> list[tuple[str, Work]] | None:
    """Return the passes of an operation, with what each of them multiplies.

    The list is empty for an operation that is not a product. None stands for an unknown kind of
    product.
    """
    if not is_product(operation):
        return []
    reader = _READERS.get(operation.name)
    try:
        return None if reader is None else reader(operation)
    except KeyError:  # the dtype is never timed, or a convolution has more than two dimensions
        return None


def _pass(operation: TracedOperation, a: Tensor, b: Tensor) -> str:
    """Return the pass of a GEMM of two matrices.

    The gradient of a parameter sums over the rows, so its operand A is transposed.
    """
    if not operation.backward:
        return FORWARD
    return WGRAD if _letter(a) == "t" else DGRAD


def _gradient_of(work: Work, forward: Work, guess: str) -> str:
    """Return which gradient a GEMM computes, judging by its sizes.

    If the sizes fit both gradients or neither, keep the guess, which comes from how A is stored.
    """
    if not isinstance(work, Gemm) or not isinstance(forward, Gemm):
        return guess
    of_input = (work.m, work.n, work.k) == (forward.m, forward.k, forward.n)
    of_weight = work.k == forward.m and {work.m, work.n} == {forward.n, forward.k}
    if of_input == of_weight:
        return guess
    return DGRAD if of_input else WGRAD


def _gemm(a: Tensor, b: Tensor) -> Gemm:
    """Return the GEMM of (…, m, k) and (…, k, n), with at most one batch dimension."""
    m, k = a.shape[-2:]
    batch = a.shape[0] if a.dim() == 3 else 1
    return Gemm(m, b.shape[-1], k, DTYPES[a.dtype], _letter(a) + _letter(b), batch)


def _letter(tensor: Tensor) -> str:
    """Return ``t`` if a matrix's columns are contiguous and its rows are not, else ``n``."""
    rows, columns = tensor.stride()[-2:]
    return "t" if columns != 1 and rows == 1 else "n"


def _mm(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, b = operation.args[-2:]
    return [(_pass(operation, a, b), _gemm(a, b))]


def _addmm(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, b = operation.args[1:3]
    return [(_pass(operation, a, b), _gemm(a, b))]


def _bmm(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, b = operation.args[-2:]
    return [(BACKWARD if operation.backward else FORWARD, _gemm(a, b))]


def _baddbmm(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, b = operation.args[1:3]
    return [(BACKWARD if operation.backward else FORWARD, _gemm(a, b))]


def _mv(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, x = operation.args[-2:]
    return [(_pass(operation, a, a), _gemm(a, x.unsqueeze(-1)))]


def _grouped(operation: TracedOperation) -> list[tuple[str, Work]]:
    a, b = operation.args[:2]
    dtype = DTYPES[a.dtype]
    if a.dim() == 3 and b.dim() == 3:
        return [(FORWARD, _gemm(a, b))]
    # Each of the rows (m, k) is multiplied by the weight (k, n) of its expert.
    if a.dim() == 2 and b.dim() == 3:
        pass_ = DGRAD if operation.backward else FORWARD
        layout = _letter(a) + _letter(b)
        work = GroupedGemm(a.shape[0], b.shape[2], b.shape[1], b.shape[0], dtype, layout, pass_)
        return [(pass_, work)]
    # The gradients of the weights are A (n, rows) times B (rows, k), each over its expert's rows.
    experts = operation.result.shape[0]
    layout = _letter(a) + _letter(b)
    return [(WGRAD, GroupedGemm(a.shape[1], a.shape[0], b.shape[1], experts, dtype, layout, WGRAD))]


def _attention(operation: TracedOperation) -> list[tuple[str, Work]]:
    backward = operation.name.endswith("_backward")
    q, k, v, causal, window = operation.args[1:] if backward else operation.args
    pass_ = BACKWARD if backward else FORWARD
    batch, heads, queries, width = q.shape
    work = Attention(
        batch,
        heads,
        k.shape[1],
        queries,
        k.shape[2],
        width,
        v.shape[3],
        DTYPES[q.dtype],
        causal,
        window,
        pass_,
    )
    return [(pass_, work)]


def _convolution(operation: TracedOperation) -> list[tuple[str, Work]]:
    x, weight = operation.args[:2]
    return _convolutions(x, weight, operation.args[3:], FORWARD, ("fprop",))


def _convolution_backward(operation: TracedOperation) -> list[tuple[str, Work]]:
    _, x, weight = operation.args[:3]
    output_mask = operation.args[-1]
    passes = [name for name, asked in zip(("dgrad", "wgrad"), output_mask, strict=False) if asked]
    return _convolutions(x, weight, operation.args[4:], BACKWARD, tuple(passes))


def _convolutions(
    x: Tensor, weight: Tensor, settings: Sequence[Any], pass_: str, passes: tuple[str, ...]
) -> list[tuple[str, Work]]:
    """Return the given passes of one convolution."""
    # 1. Give a convolution over one dimension a second one of size 1.
    stride, padding, dilation, transposed, output_padding, groups = settings[:6]
    spatial = x.dim() - 2
    if spatial > 2:
        raise KeyError("a convolution with more than two dimensions")
    # A convolution over one dimension is a convolution over images of one row.
    ones = [1] * (2 - spatial)
    channels_last = torch.channels_last
    # 2. Find the layout. A filter of one tap and an image of one channel are contiguous in both
    # formats at once. The layout is therefore NHWC if either tensor is contiguous in that format
    # only.
    nhwc = x.dim() == 4 and any(
        t.is_contiguous(memory_format=channels_last) and not t.is_contiguous() for t in (x, weight)
    )
    # 3. Collect the sizes of the convolution whose pass this is.
    image, taps = [*ones, *x.shape[2:]], [*ones, *weight.shape[2:]]
    pads = [*([0] * len(ones)), *padding]
    steps, dilations = [*ones, *stride], [*ones, *dilation]
    channels, out = x.shape[1], weight.shape[0]
    if transposed:
        # A transposed convolution computes the gradient of a convolution's input, and the gradient
        # of its own input is that convolution's forward pass.
        channels, out = weight.shape[1] * groups, x.shape[1]
        output_pads = [*([0] * len(ones)), *output_padding]
        image = [
            (size - 1) * s - 2 * p + d * (t - 1) + o + 1
            for size, s, p, d, t, o in zip(
                image, steps, pads, dilations, taps, output_pads, strict=True
            )
        ]
        passes = tuple({"fprop": "dgrad", "dgrad": "fprop"}.get(name, name) for name in passes)
    conv = Conv(
        x.shape[0],
        channels,
        image[0],
        image[1],
        out,
        taps[0],
        taps[1],
        (steps[0], steps[1]),
        (pads[0], pads[1]),
        (dilations[0], dilations[1]),
        groups,
        DTYPES[x.dtype],
        "nhwc" if nhwc else "nchw",
    )
    return [
        (
            FORWARD if pass_ == FORWARD else WGRAD if name == "wgrad" else DGRAD,
            replace(conv, pass_=name),
        )
        for name in passes
    ]


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
