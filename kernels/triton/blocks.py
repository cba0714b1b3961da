"""Functions that the GEMM and convolution kernels call, and kernels that run before or after them.

A matrix is given as a pointer and its strides (row, column) in elements. Tiles are BM × BN, and a
K step is BK deep. The offset of a tile is a 64-bit number, because an operand may have more than
2³¹ elements.

The kernels that call these functions take sizes and strides in units. A unit is a number of
elements that is known at compile time. Without units, Triton would copy many aligned rows one
element at a time, because it detects only whether an argument is a multiple of 16. An aligned row
is a multiple of 16 bytes long, and 16 bytes hold only 8 or 4 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def elements(stride, UNIT: tl.constexpr):
    """Convert a stride from units of UNIT elements to elements; None means a stride of 1."""
    if stride is None:
        return 1
    else:
        return stride * UNIT


@triton.jit
def matrix_stride(stride, UNIT: tl.constexpr):
    """Convert (batch, row, column) strides from units of UNIT elements to elements."""
    return elements(stride[0], UNIT), elements(stride[1], UNIT), elements(stride[2], UNIT)


@triton.jit
def tensor_stride(stride, UNIT: tl.constexpr):
    """Convert five strides from units of UNIT elements to elements."""
    return (
        elements(stride[0], UNIT),
        elements(stride[1], UNIT),
        elements(stride[2], UNIT),
        elements(stride[3], UNIT),
        elements(stride[4], UNIT),
    )


@triton.jit
def grouped(tile, rows, columns, GROUP: tl.constexpr):
    """Return the (row, column) of tile number ``tile``.

    The tiles form a grid of ``rows`` × ``columns``. Tiles are numbered column by column inside
    groups of GROUP rows of tiles, so that concurrent CTAs share blocks of A and B in the L2 cache.
    """
    per_group = GROUP * columns
    first_row = tile // per_group * GROUP
    height = min(rows - first_row, GROUP)  # the last group may have fewer rows
    in_group = tile % per_group
    return first_row + in_group % height, in_group // height


@triton.jit
def product(
    a_ptr, a_stride, b_ptr, b_stride, m0, n0, first, last, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Multiply rows m0… of A (M, K) by columns n0… of B (K, N) into an fp32 block (BM, BN).

    The K steps run from ``first`` to ``last − 1``, and ``last`` must be greater than ``first``.
    PRECISION is the ``input_precision`` of ``tl.dot``.

    - EVEN: M and N are multiples of BM and BN.
    - EVEN_K: K is a multiple of BK.
    - WIDE: offsets inside a block of A, B or C may need 64 bits.
    - UPCAST: widen the operands to fp32, because Triton's interpreter multiplies bf16 as raw
      integers.
    """
    # 1. Find the addresses of the first blocks of A and B, and the rows and columns that exist.
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    m_in, n_in = m0 + m < M, n0 + n < N
    if WIDE:
        m, n, k = m.to(tl.int64), n.to(tl.int64), k.to(tl.int64)
    k0 = tl.cast(first, tl.int64) * BK
    a_ptr += m0.to(tl.int64) * a_stride[0] + k0 * a_stride[1]
    b_ptr += n0.to(tl.int64) * b_stride[1] + k0 * b_stride[0]
    a_block = m[:, None] * a_stride[0] + k[None, :] * a_stride[1]
    b_block = k[:, None] * b_stride[0] + n[None, :] * b_stride[1]

    # 2. Sum over the K steps, with masks only where a block may reach beyond A or B.
    # If the loop could be empty, the sums would also be set on the edge that skips the loop. With
    # the code that Triton 3.6 generates, ptxas then waits for every wgmma (warning C7515).
    tl.assume(last > first)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(first, last):
        if EVEN and EVEN_K:
            a = tl.load(a_ptr + a_block)
            b = tl.load(b_ptr + b_block)
        elif EVEN_K:
            a = tl.load(a_ptr + a_block, mask=m_in[:, None], other=0.0)
            b = tl.load(b_ptr + b_block, mask=n_in[None, :], other=0.0)
        else:
            k_in = tl.arange(0, BK) < K - step * BK
            a = tl.load(a_ptr + a_block, mask=m_in[:, None] & k_in[None, :], other=0.0)
            b = tl.load(b_ptr + b_block, mask=k_in[:, None] & n_in[None, :], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_ptr += tl.cast(BK, tl.int64) * a_stride[1]
        b_ptr += tl.cast(BK, tl.int64) * b_stride[0]
    return total


@triton.jit
def store(
    c_ptr, c_stride, m0, n0, total, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile's sums at row m0, column n0 of C (M, N), in C's dtype.

    EVEN and WIDE are as in :func:`product`.
    """
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    m_in, n_in = m0 + m < M, n0 + n < N
    if WIDE:
        m, n = m.to(tl.int64), n.to(tl.int64)
    c_ptr += m0.to(tl.int64) * c_stride[0] + n0.to(tl.int64) * c_stride[1]
    c_block = c_ptr + m[:, None] * c_stride[0] + n[None, :] * c_stride[1]
    result = total.to(c_ptr.dtype.element_ty)
    if EVEN:
        tl.store(c_block, result)
    else:
        tl.store(c_block, result, mask=m_in[:, None] & n_in[None, :])


@triton.jit
def transpose(
    x_ptr, y_ptr, ROWS, COLUMNS, x_batch_stride, x_column_stride, y_batch_stride, y_row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy x (batch, ROWS, COLUMNS), whose columns are contiguous, into y, whose rows are.

    Each program copies one block of BLOCK × BLOCK elements. Blocks are numbered row by row.
    """
    down, across = tl.cdiv(ROWS, BLOCK), tl.cdiv(COLUMNS, BLOCK)
    block = tl.program_id(0)
    z = (block // (down * across)).to(tl.int64)
    row = block // across % down * BLOCK + tl.arange(0, BLOCK)
    column = block % across * BLOCK + tl.arange(0, BLOCK)
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    source = x_ptr + z * x_batch_stride + column.to(tl.int64)[None, :] * x_column_stride
    target = y_ptr + z * y_batch_stride + row.to(tl.int64)[:, None] * y_row_stride
    values = tl.load(source + row[:, None], mask=inside)
    tl.store(target + column[None, :], values, mask=inside)


@triton.jit
def add_parts(
    parts_ptr, out_ptr, parts, D0, D1, D2, D3, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum ``parts`` dense fp32 arrays (D0, D1, D2, D3) into out, which may have any strides.

    The parts are added in order, so that the result has the same bits in every run. Each program
    sums one block of ROWS × COLUMNS elements over all parts; the first three axes form the rows.
    """
    # 1. Find the rows and columns of this program's block. Blocks are numbered row by row.
    across = tl.cdiv(D3, COLUMNS)
    block = tl.program_id(0).to(tl.int64)
    row = block // across * ROWS + tl.arange(0, ROWS)
    column = block % across * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.cast(D0, tl.int64) * D1 * D2
    inside = (row < rows)[:, None] & (column < D3)[None, :]
    # 2. Add up the block over all parts, which lie one after another in memory.
    source = parts_ptr + row[:, None] * D3 + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(parts):
        total += tl.load(source, mask=inside, other=0.0)
        source += rows * D3
    # 3. Split each row's number into its three axes again, because out may have any strides.
    row_offset = row // (D1 * D2) * out_stride[0] + row // D2 % D1 * out_stride[1]
    row_offset += row % D2 * out_stride[2]
    target = out_ptr + row_offset[:, None] + column[None, :].to(tl.int64) * out_stride[3]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)
