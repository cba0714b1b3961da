"""Operands of a problem, as views of flat memory in the problem's layout.

A GEMM's operands are A (m, k) and B (k, n). If ``batch`` is above 1, A and B have a leading batch
axis. A convolution's operands are the two tensors that its pass reads: (x, w) for fprop, (dy, w)
for dgrad, (x, dy) for wgrad. The operands of any other operation are its inputs and its parameters.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.config import DENSE, Storage, ceil_div
from kernels.operation import GATES, Layer, Operation, Series, Workload
from kernels.problem import Conv, Gemm

TORCH_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


_CONV_TENSORS = {"fprop": ("x", "w", "y"), "dgrad": ("y", "w", "x"), "wgrad": ("x", "y", "w")}
"""Names of the two operands and the result of each pass, as in :func:`conv_shapes`.

The gradient of a tensor has the tensor's name, because both have the same shape.
"""


class Operands(NamedTuple):
    """One set of operands: two inputs and the memory for the result, all with logical shapes."""

    a: Tensor
    b: Tensor
    out: Tensor


def element_counts(problem: Workload, storage: Storage = DENSE) -> tuple[int, int, int]:
    """Return how many elements of memory each input and the result occupy.

    The offset and the gaps between rows, which ``storage`` describes, are included.
    """
    a, b, out = _counts_without_offset(problem, storage)
    return a + storage.offset, b + storage.offset, out + storage.offset


def _counts_without_offset(problem: Workload, storage: Storage) -> tuple[int, int, int]:
    if isinstance(problem, Gemm):
        counts = []
        for rows, columns, letter in _matrices(problem):
            stored_rows, row_length = _stored(rows, columns, letter)
            row_stride = _row_stride(row_length, storage.ld_multiple)
            counts.append(problem.batch * stored_rows * row_stride)
        count_a, count_b, count_out = counts
        return count_a, count_b, count_out
    if isinstance(problem, Operation):
        return problem.operand_elements
    shapes = conv_shapes(problem)
    a, b, out = _CONV_TENSORS[problem.pass_]
    return math.prod(shapes[a]), math.prod(shapes[b]), math.prod(shapes[out])


def view_operands(
    problem: Workload, a: Tensor, b: Tensor, out: Tensor, storage: Storage = DENSE
) -> Operands:
    """View three flat tensors, whose sizes :func:`element_counts` returns, as operands."""
    a, b, out = a[storage.offset :], b[storage.offset :], out[storage.offset :]
    if isinstance(problem, Gemm):
        matrices = [
            _matrix(flat, rows, columns, letter, problem.batch, storage.ld_multiple)
            for flat, (rows, columns, letter) in zip((a, b, out), _matrices(problem), strict=True)
        ]
        return Operands(*matrices)
    if isinstance(problem, Operation):
        return _view_operation(problem, a, b, out)
    shapes = conv_shapes(problem)
    images = [
        _image(flat, shapes[name], problem.layout)
        for flat, name in zip((a, b, out), _CONV_TENSORS[problem.pass_], strict=True)
    ]
    return Operands(*images)


def _view_operation(operation: Operation, a: Tensor, b: Tensor, out: Tensor) -> Operands:
    if isinstance(operation, Layer):
        shape = (operation.n, operation.c, operation.h, operation.w)
        image = _image(a, shape, operation.layout)
        result = _image(out, shape, operation.layout)
        return Operands(image, b.view(2, -1), result)  # one row of scales, and one of shifts
    if isinstance(operation, Series):
        count, m, n, k = operation.count, operation.m, operation.n, operation.k
        # Projections share one input, and timesteps share one weight.
        if operation.op == "projections":
            x, weights = a.view(m, k), b.view(count, n, k)
        else:
            x, weights = a.view(count, m, k), b.view(n, k)
        return Operands(x, weights, out.view(count, m, n))
    lstm = operation
    return Operands(
        a.view(lstm.steps, lstm.minibatch, lstm.features),
        b.view(GATES * lstm.hidden, lstm.features + lstm.hidden),
        out.view(lstm.steps, lstm.minibatch, lstm.hidden),
    )


def conv_shapes(conv: Conv) -> dict[str, tuple[int, int, int, int]]:
    """Return the logical shapes of the input ``x``, the filter ``w`` and the output ``y``."""
    return {
        "x": (conv.n, conv.c, conv.h, conv.w),
        "w": (conv.kout, conv.c // conv.groups, conv.r, conv.s),
        "y": (conv.n, conv.kout, conv.p, conv.q),
    }


def random_operands(
    problem: Workload, device: torch.device | str, seed: int = 0, storage: Storage = DENSE
) -> Operands:
    """Return a new set of operands with normally distributed values.

    The memory for the result is filled with NaN, so that a check fails if an implementation does
    not write every element.
    """
    dtype = TORCH_DTYPES[problem.dtype]
    generator = torch.Generator(device=device).manual_seed(seed)
    count_a, count_b, count_out = element_counts(problem, storage)
    a = torch.randn(count_a, generator=generator, device=device).to(dtype)
    b = torch.randn(count_b, generator=generator, device=device).to(dtype)
    out = torch.full((count_out,), math.nan, dtype=dtype, device=device)
    return view_operands(problem, a, b, out, storage)


def _matrices(gemm: Gemm) -> tuple[tuple[int, int, str], ...]:
    """Return (rows, columns, letter of the layout) for A, B and the result."""
    m, n, k = gemm.m, gemm.n, gemm.k
    return (m, k, gemm.layout[0]), (k, n, gemm.layout[1]), (m, n, "n")


def _stored(rows: int, columns: int, letter: str) -> tuple[int, int]:
    """Return the number of stored rows, and their length in elements."""
    return (rows, columns) if letter == "n" else (columns, rows)


def _row_stride(row_length: int, ld_multiple: int) -> int:
    multiples: int = ceil_div(row_length, ld_multiple)
    return multiples * ld_multiple


def _matrix(
    flat: Tensor, rows: int, columns: int, letter: str, batch: int, ld_multiple: int
) -> Tensor:
    """View flat memory as a matrix (rows, columns) or, if ``batch`` is above 1, as a batch.

    The view leaves out the gaps between stored rows.
    """
    stored_rows, row_length = _stored(rows, columns, letter)
    row_stride = _row_stride(row_length, ld_multiple)
    shape = (batch, stored_rows, row_stride) if batch > 1 else (stored_rows, row_stride)
    matrix = flat.view(shape)[..., :row_length]
    return matrix if letter == "n" else matrix.transpose(-1, -2)


def _image(flat: Tensor, shape: tuple[int, int, int, int], layout: str) -> Tensor:
    """View flat memory, which holds images or filters in ``layout``, as (n, c, h, w)."""
    n, c, h, w = shape
    if layout == "nchw":
        return flat.view(n, c, h, w)
    return flat.view(n, h, w, c).permute(0, 3, 1, 2)
