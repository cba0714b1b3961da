"""Kernels of ``triton-conv``.

One kernel computes the forward pass and the input's gradient. The rows of its GEMM are pixels of
the result, and the columns are channels of the result. The sum runs over the taps (positions within
the filter) and the channels of the source. The source is the convolution's input or, in the
backward pass, the gradient of the convolution's output. A block of the GEMM's left operand is
gathered from the source, with zeros where a tap hits padding.

With stride s, the input's gradient consists of s × s convolutions with stride 1, one for each phase
of the result's pixels. A pixel's phase is its row and column, modulo s. All pixels of a phase use
the same taps, so the kernel does not multiply the zeros that a single convolution would need
between the pixels of the source.

A second kernel computes the filter's gradient, for which the right operand is gathered from the
input. The GEMM of this kernel sums over pixels, and often has few tiles with very long sums. Both
kernels can split their sums into parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.blocks import grouped, tensor_stride

TAP_BITS = 32  # largest number of taps along an axis: `taps_inside` has a bit for each


@triton.jit
def taps_along_axis(phase, taps, stride, padding, dilation, tap_step, BACKWARD: tl.constexpr):
    """Return five numbers that tell which taps and source positions each destination uses.

    All positions are along one axis, and a destination is the position of a pixel of the result.
    The first three numbers are the first tap, the number of taps, and the source position of the
    first destination at the first tap. The last two numbers are the steps by which the source
    position moves per destination and per tap. In the backward pass, ``phase`` is the position of
    the destinations modulo the stride. In the forward pass, it is not used.

    In the backward pass, destination ``phase + stride · i`` uses the taps t for which ``phase +
    padding − t · dilation`` is a multiple of the stride. The distance from one of these taps to the
    next is ``tap_step``: the stride divided by the greatest common divisor of stride and dilation.
    """
    if BACKWARD:
        # A loop over scalars finds the first tap, not a reduction of a block. The compiler would
        # assume that the result of a reduction differs between threads. It would then compute every
        # address in the loop over K per thread.
        first = taps
        for before in range(tap_step):
            tap = tap_step - 1 - before  # downwards, so that the first tap that is used is kept
            meets = (tap < taps) & ((phase + padding - tap * dilation) % stride == 0)
            first = tl.where(meets, tap, first)
        count = tl.cdiv(taps - first, tap_step)
        source = (phase + padding - first * dilation) // stride
        return first, count, source, 1, -(dilation * tap_step // stride)
    else:
        return 0, taps, -padding, stride, dilation


@triton.jit
def within(place, size):
    """Return, for each position along an axis, True if it is a pixel and False if it is padding.

    One comparison is enough, because a negative position is larger than any size if it is read as
    an unsigned number.
    """
    if place.dtype == tl.int64:
        return place.to(tl.uint64, bitcast=True) < tl.cast(size, tl.uint64)
    else:
        return place.to(tl.uint32, bitcast=True) < tl.cast(size, tl.uint32)


@triton.jit
def taps_inside(start, step, size, wanted, TAPS: tl.constexpr):
    """Return an integer for each position along an axis: bit t is set if tap t hits a pixel.

    Tap t is at ``start + t · step``, and there are ``size`` pixels. The integer is 0 where
    ``wanted`` is False. The loop is unrolled, because the compiler would otherwise
    convert the layout of the result in every K step.
    """
    bits = tl.zeros(start.shape, dtype=tl.uint32)
    for tap in tl.static_range(TAPS):
        bits |= within(start + tap * step, size).to(tl.uint32) << tap
    return tl.where(wanted, bits, 0)


@triton.jit
def conv_data(
    source_ptr, filter_ptr, out_ptr,
    images, source_size, out_size, depth, width, groups, taps, tap_step,
    stride, padding, dilation, source_stride, filter_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BACKWARD: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, UNITS: tl.constexpr, TAPS: tl.constexpr,
    EVEN_N: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    """Convolve source (images, …, groups · depth) into out (part; images, …, groups · width).

    Sizes, taps, ``tap_step``, stride, padding and dilation are (vertical, horizontal). The strides
    of the source are (group, image, row, column, channel), those of the filter are (group, out
    channel, source channel, r, s), and those of out are (part, image, row, column, channel).
    ``depth`` is in units of UNITS[0], ``width`` is in units of UNITS[1], and the three tensors'
    strides are in units of UNITS[2], except that None means a stride of 1 element. The grid is
    (tiles × groups × phases, parts).

    - BACKWARD: compute the input's gradient.
    - WHOLE: every K step stays within one tap, and there are at most 32 taps along each axis.
    - TAPS: a power of two that is at least the number of taps along each axis.
    - EVEN_N: ``width`` is a multiple of BN.
    - PHASES: there is more than one phase.
    - WIDE: offsets inside a tensor may need 64 bits.

    ``tap_step`` is described in :func:`taps_along_axis`, GROUP in
    :func:`kernels.triton.blocks.grouped`, and PRECISION and UPCAST in
    :func:`kernels.triton.blocks.product`.
    """
    # 1. Convert sizes and strides from units to elements.
    depth, width = depth * UNITS[0], width * UNITS[1]
    source_stride = tensor_stride(source_stride, UNITS[2])
    filter_stride = tensor_stride(filter_stride, UNITS[2])
    out_stride = tensor_stride(out_stride, UNITS[2])
    # 2. Find the part, the group and the phase of this program.
    if BACKWARD:  # the first phase is the largest, and the grid is made for it
        largest = tl.cdiv(out_size[0], stride[0]) * tl.cdiv(out_size[1], stride[1])
    else:
        largest = out_size[0] * out_size[1]
    tiles_down = tl.cdiv(images * largest, BM)
    tiles_across = tl.cdiv(width, BN)
    tiles = tiles_down * tiles_across
    part = tl.program_id(1).to(tl.int64)
    group_and_phase = tl.program_id(0) // tiles
    group = (group_and_phase % groups).to(tl.int64)
    phase = group_and_phase // groups
    phase_row = phase // stride[1]
    phase_column = phase % stride[1]
    # 3. Find the taps that pixels of the phase use, and the number of these pixels. For each axis,
    # `taps_along_axis` returns the first tap, the number of taps, the source position of pixel 0 at
    # the first tap, and the steps of the source position per pixel and per tap.
    r0, r_taps, h0, h_step, h_tap = taps_along_axis(
        phase_row, taps[0], stride[0], padding[0], dilation[0], tap_step[0], BACKWARD
    )
    s0, s_taps, w0, w_step, w_tap = taps_along_axis(
        phase_column, taps[1], stride[1], padding[1], dilation[1], tap_step[1], BACKWARD
    )
    rows, columns = out_size[0], out_size[1]
    if BACKWARD:  # count only the pixels of this phase, which may have none
        rows = tl.cdiv(rows - phase_row, stride[0])
        columns = tl.cdiv(columns - phase_column, stride[1])
    pixels = images * rows * columns

    # 4. Find the pixels and the channels of this tile. A pixel is in row i and column j of its
    # image or, in the backward pass, of its phase. Its source position at the first tap is (h, w).
    # The maxima only keep the divisions valid for a phase without pixels.
    tile_row, tile_column = grouped(tl.program_id(0) % tiles, tiles_down, tiles_across, GROUP)
    pixel = tile_row * BM + tl.arange(0, BM)
    n = tile_column * BN + tl.arange(0, BN)
    image = pixel // tl.maximum(rows * columns, 1)
    i = pixel // tl.maximum(columns, 1) % tl.maximum(rows, 1)
    j = pixel % tl.maximum(columns, 1)
    h = i * h_step + h0
    w = j * w_step + w0
    m_in = pixel < pixels
    n_in = n < width
    if WIDE:
        image, h, w, n = image.to(tl.int64), h.to(tl.int64), w.to(tl.int64), n.to(tl.int64)
    source_ptr += group * source_stride[0]
    filter_ptr += group * filter_stride[0]
    image_at = image * source_stride[1]

    # 5. Find the K steps of this part.
    K = r_taps * s_taps * depth
    steps = tl.where(tile_row * BM < pixels, tl.cdiv(K, BK), 0)
    # The bounds have 32 bits like the loop's counter, because the compiler does not carry the
    # assumption below through a cast.
    first = (part * steps // tl.num_programs(1)).to(tl.int32)
    last = ((part + 1) * steps // tl.num_programs(1)).to(tl.int32)
    if not PHASES:  # one of several phases may have no taps, and one of its tiles no pixels
        tl.assume(last > first)  # see `product` in blocks.py
    # 6. Sum over the K steps.
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if WHOLE:
        # Offsets that depend on the tap and its channels are the same for all pixels, so an
        # iteration of the loop adds one number to each pointer. Bits say which taps of a pixel hit
        # padding, because comparing in each iteration takes 18 instructions per pixel on sm_90.
        k = tl.arange(0, BK)
        a_block = (image_at + h * source_stride[2] + w * source_stride[3])[:, None]
        a_block += k[None, :] * source_stride[4]
        b_block = k[:, None] * filter_stride[2] + n[None, :] * filter_stride[1]
        row_bits = taps_inside(h, h_tap, source_size[0], m_in, TAPS)[:, None]
        column_bits = taps_inside(w, w_tap, source_size[1], m_in, TAPS)[:, None]
        per_tap = depth // BK
        # The tap of a step, and its block of channels in the tap, are counted up from step to step.
        # Dividing by the channels in each iteration takes longer than multiplying a small tile.
        tap = first // per_tap
        block = first % per_tap
        # A phase may have no taps. The loop then has no iterations, but the division must be valid.
        r = tap // tl.maximum(s_taps, 1)
        s = tap % tl.maximum(s_taps, 1)
        for _ in range(first, last):
            row_shift = r * h_tap
            column_shift = s * w_tap
            tap_row = r0 + r * tap_step[0]
            tap_column = s0 + s * tap_step[1]
            channels = block * BK
            if WIDE:
                row_shift, column_shift = row_shift.to(tl.int64), column_shift.to(tl.int64)
                tap_row, tap_column = tap_row.to(tl.int64), tap_column.to(tl.int64)
                channels = channels.to(tl.int64)
            a_at = row_shift * source_stride[2] + column_shift * source_stride[3]
            b_at = tap_row * filter_stride[3] + tap_column * filter_stride[4]
            a_ptr = source_ptr + (a_at + channels * source_stride[4])
            b_ptr = filter_ptr + (b_at + channels * filter_stride[2])
            inside = ((row_bits >> r) & (column_bits >> s) & 1) != 0
            a = tl.load(a_ptr + a_block, mask=inside, other=0.0)
            if EVEN_N:
                b = tl.load(b_ptr + b_block)
            else:
                b = tl.load(b_ptr + b_block, mask=n_in[None, :], other=0.0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            block += 1
            s = tl.where(block == per_tap, s + 1, s)
            block = tl.where(block == per_tap, 0, block)
            r = tl.where(s == s_taps, r + 1, r)
            s = tl.where(s == s_taps, 0, s)
    else:
        # A step may contain elements of several taps, so each element computes its own tap.
        for step in range(first, last):
            flat = step * BK + tl.arange(0, BK)
            tap, k = flat // depth, flat % depth
            a_mask = m_in[:, None] & (flat < K)[None, :]
            b_mask = (flat < K)[:, None] & n_in[None, :]
            hh = h[:, None] + (tap // s_taps * h_tap)[None, :]
            ww = w[:, None] + (tap % s_taps * w_tap)[None, :]
            a_mask &= within(hh, source_size[0]) & within(ww, source_size[1])
            a_at = image_at[:, None] + hh * source_stride[2] + ww * source_stride[3]
            tap_row = r0 + tap // s_taps * tap_step[0]
            tap_column = s0 + tap % s_taps * tap_step[1]
            b_at = (tap_row * filter_stride[3] + tap_column * filter_stride[4])[:, None]
            b_at += n[None, :] * filter_stride[1]
            a = tl.load(source_ptr + (a_at + k[None, :] * source_stride[4]), mask=a_mask, other=0.0)
            b = tl.load(filter_ptr + (b_at + k[:, None] * filter_stride[2]), mask=b_mask, other=0.0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)

    # 7. Store the sums; pixels of a phase lie a stride apart.
    if BACKWARD:
        i, j = i * stride[0] + phase_row, j * stride[1] + phase_column
    if WIDE:
        i, j = i.to(tl.int64), j.to(tl.int64)
    pixel_at = image * out_stride[1] + i * out_stride[2] + j * out_stride[3]
    out_ptr += part * out_stride[0] + group * width * out_stride[4]
    target = out_ptr + (pixel_at[:, None] + n[None, :] * out_stride[4])
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=m_in[:, None] & n_in[None, :])


@triton.jit
def conv_filter(
    source_ptr, grad_ptr, out_ptr,
    images, source_size, grad_size, depth, width, taps,
    stride, padding, dilation, source_stride, grad_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
    UNITS: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Sum the filter's gradient over pixels, into ``out`` (part; groups · width, depth, r, s).

    ``grad`` is the gradient of the convolution's output, and the source is the convolution's input.
    The rows of the GEMM are the channels of ``grad``, and its columns are the channels of the
    source, repeated for each tap. Sizes, units, GROUP, PRECISION, WIDE and UPCAST are as in
    :func:`conv_data`. The strides of the source and of ``grad`` are (group, image, row, column,
    channel). Those of ``out`` are (part, channel of ``grad``, channel of the source, r, s). The
    grid is (tiles × groups, parts).

    - WHOLE: all columns of a tile stay within one tap.
    - DENSE: the pixels of ``grad`` are at equal distances in memory, even across images.
    """
    # 1. Convert sizes and strides from units to elements.
    depth, width = depth * UNITS[0], width * UNITS[1]
    source_stride = tensor_stride(source_stride, UNITS[2])
    grad_stride = tensor_stride(grad_stride, UNITS[2])
    out_stride = tensor_stride(out_stride, UNITS[2])
    # 2. Find the tile, the group and the part of this program, and the taps of its columns.
    N = taps[0] * taps[1] * depth
    down, across = tl.cdiv(width, BM), tl.cdiv(N, BN)
    group = (tl.program_id(0) // (down * across)).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    row, column = grouped(tl.program_id(0) % (down * across), down, across, GROUP)
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    m_in, n_in = (m < width)[:, None], (n < N)[None, :]
    if WHOLE:
        tap = column // (depth // BN)
        channel = column % (depth // BN) * BN + tl.arange(0, BN)[None, :]
    else:
        tap, channel = (n // depth)[None, :], (n % depth)[None, :]
    r, s = tap // taps[1], tap % taps[1]
    if WIDE:
        m, channel = m.to(tl.int64), channel.to(tl.int64)
    grad_ptr += group * grad_stride[0]
    source_ptr += group * source_stride[0]

    # 3. Find the K steps of this part: K counts the pixels of all images.
    per_image = grad_size[0] * grad_size[1]
    K = images * per_image
    steps = tl.cdiv(K, BK)
    first = (part * steps // tl.num_programs(1)).to(tl.int32)
    last = ((part + 1) * steps // tl.num_programs(1)).to(tl.int32)
    tl.assume(last > first)  # see `product` in blocks.py
    total = tl.zeros((BM, BN), dtype=tl.float32)
    # 4. Sum over the K steps. The pixels of a step, as (image, row, column), are counted up by BK
    # pixels: dividing by the sizes of an image in each iteration takes twice the instructions.
    pixel = (first * BK + tl.arange(0, BK))[:, None]
    image = pixel // per_image
    p = pixel // grad_size[1] % grad_size[0]
    q = pixel % grad_size[1]
    image_step = BK // per_image
    row_step = BK // grad_size[1] % grad_size[0]
    column_step = BK % grad_size[1]
    h_tap, w_tap = r * dilation[0] - padding[0], s * dilation[1] - padding[1]
    for step in range(first, last):
        h, w = p * stride[0] + h_tap, q * stride[1] + w_tap
        inside = within(h, source_size[0]) & within(w, source_size[1]) & (image < images)
        source_image = image  # a copy that may be widened, because the loop counts in 32 bits
        if WIDE:
            source_image, h, w = image.to(tl.int64), h.to(tl.int64), w.to(tl.int64)
        b_at = source_image * source_stride[1] + h * source_stride[2] + w * source_stride[3]
        flat = step * BK + tl.arange(0, BK)
        if DENSE:
            a_at = (flat.to(tl.int64) if WIDE else flat) * grad_stride[3]
        else:
            grad_image, grad_row = flat // per_image, flat // grad_size[1] % grad_size[0]
            grad_column = flat % grad_size[1]
            if WIDE:
                grad_image, grad_row = grad_image.to(tl.int64), grad_row.to(tl.int64)
                grad_column = grad_column.to(tl.int64)
            a_at = grad_image * grad_stride[1] + grad_row * grad_stride[2]
            a_at += grad_column * grad_stride[3]
        a_mask, b_mask = m_in & (flat < K)[None, :], n_in & inside
        a = tl.load(grad_ptr + (a_at[None, :] + m[:, None] * grad_stride[4]), a_mask, other=0.0)
        b = tl.load(source_ptr + (b_at + channel * source_stride[4]), b_mask, other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        q += column_step
        p += row_step + (q >= grad_size[1]).to(tl.int32)
        q = tl.where(q >= grad_size[1], q - grad_size[1], q)
        image += image_step + (p >= grad_size[0]).to(tl.int32)
        p = tl.where(p >= grad_size[0], p - grad_size[0], p)

    # 5. Store the sums.
    out_ptr += part * out_stride[0] + group * width * out_stride[1]
    offset = m[:, None] * out_stride[1] + channel * out_stride[2]
    offset += r * out_stride[3] + s * out_stride[4]
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=m_in & n_in)
