"""``triton-conv``: convolution as an implicit GEMM, which never stores the gathered operand.

One kernel computes the forward pass and the input's gradient. The rows of its GEMM are pixels of
the result, and the columns are channels of the result. The sum runs over the taps (positions within
the filter) and the channels of the source. The source is the convolution's input or, in the
backward pass, the gradient of the convolution's output. A block of the GEMM's left operand is
gathered from the source, with zeros where a tap hits padding.

With stride s, the input's gradient consists of s × s plain convolutions, one for each phase of the
destination pixels (their row and column modulo s). All pixels of a phase use the same taps, so the
zeros between strided pixels are never multiplied.

A second kernel computes the filter's gradient, for which the right operand is gathered from the
input. The GEMM of this kernel sums over pixels, and often has few tiles with very long sums. Both
kernels can split their sums into parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.config import ConvConfig, PersistentConfig, TileConfig, ceil_div
from kernels.machine import Machine
from kernels.operands import Operands, conv_shapes
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Conv, Gemm, Problem
from kernels.timemodel.constants import Constants
from kernels.timemodel.estimate import Array
from kernels.triton.blocks import grouped, tensor_stride
from kernels.triton.family import (
    INTERPRETED,
    LaunchSpec,
    TritonFamily,
    add_parts_call,
    in_units,
    input_precision,
    wide_unit,
)
from kernels.triton.gemm import GemmFamily
from kernels.triton.persistent import TritonPersistent
from kernels.triton.splitk import TritonSplitK
from kernels.triton.tiled import TritonTiled

SPLITS = (1, 2, 4, 8, 16, 32)
_TAP_BITS = 32  # largest number of taps along an axis: `taps_inside` has a bit for each


@triton.jit
def taps_along_axis(phase, taps, stride, padding, dilation, tap_step, BACKWARD: tl.constexpr):
    """Return the taps and source pixels that the destinations along one axis use.

    The first three values are the first tap, the number of taps, and the source position of
    destination 0 at the first tap. The last two values are the steps by which the source position
    moves per destination and per tap. ``taps`` is the filter's number of taps along this axis.
    ``phase`` is the position of the destinations modulo the stride, and 0 in the forward pass.

    In the backward pass, destination ``phase + stride · i`` uses the taps t for which ``phase +
    padding − t · dilation`` is a multiple of the stride. These taps are ``tap_step`` apart. This is
    the stride divided by its greatest common divisor with the dilation.
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

    As an unsigned number, a negative position is larger than any size, so one comparison is enough.
    """
    if place.dtype == tl.int64:
        return place.to(tl.uint64, bitcast=True) < tl.cast(size, tl.uint64)
    else:
        return place.to(tl.uint32, bitcast=True) < tl.cast(size, tl.uint32)


@triton.jit
def taps_inside(start, step, size, wanted, TAPS: tl.constexpr):
    """Return an integer for each position along an axis: bit t is set if tap t hits a pixel.

    Tap t is at ``start + t · step``, and there are ``size`` pixels. The integer is 0 for a position
    that is not ``wanted``. The loop is unrolled, because the compiler would change the layout of a
    loop's result in every K step.
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
    EVEN_N: tl.constexpr,
):  # fmt: skip
    """Convolve source (images, …, groups · depth) into out (part; images, …, groups · width).

    Sizes, taps, stride, padding and dilation are (vertical, horizontal). Strides are (group, image,
    row, column, channel) for the source, (group, out channel, source channel, r, s) for the filter,
    and (part, image, row, column, channel) for out. ``depth`` is in units of UNITS[0], ``width`` in
    units of UNITS[1], and strides are in units of UNITS[2]. A stride of None means 1. The grid is
    (tiles × groups × phases, parts).

    - BACKWARD: compute the input's gradient.
    - WHOLE: every K step stays within one tap, and there are at most 32 taps along an axis.
    - TAPS: a power of two, at least the number of taps along each axis.
    - EVEN_N: ``width`` is a multiple of BN.
    - WIDE: offsets inside a tensor may need 64 bits.

    ``tap_step`` is described in :func:`taps_along_axis`, GROUP in
    :func:`kernels.triton.blocks.grouped`, and PRECISION and UPCAST in
    :func:`kernels.triton.blocks.product`.
    """
    # 1. Convert sizes and strides from units to elements.
    depth, width = depth * UNITS[0], width * UNITS[1]
    source_stride, filter_stride = (
        tensor_stride(source_stride, UNITS[2]),
        tensor_stride(filter_stride, UNITS[2]),
    )
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
    if not BACKWARD:  # in the backward pass, a phase may have no taps, and a tile no pixels
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
    """Sum the filter's gradient over pixels, into out (part; groups · width, depth, r, s).

    ``grad`` is the gradient of the convolution's output, and the source is the convolution's input.
    The rows of the GEMM are the channels of ``grad``, and its columns are the channels of the
    source, repeated for each tap. Sizes, units, GROUP, PRECISION, WIDE and UPCAST are as in
    :func:`conv_data`. The strides of the source and of ``grad`` are (group, image, row, column,
    channel); those of out are (part, channel of ``grad``, channel of the source, r, s). The grid is
    (tiles × groups, parts).

    - WHOLE: all columns of a tile stay within one tap.
    - DENSE: the pixels of ``grad`` are at equal distances in memory, also from one image to the
      next.
    """
    # 1. Convert sizes and strides from units to elements.
    depth, width = depth * UNITS[0], width * UNITS[1]
    source_stride, grad_stride = (
        tensor_stride(source_stride, UNITS[2]),
        tensor_stride(grad_stride, UNITS[2]),
    )
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
    image, p, q = pixel // per_image, pixel // grad_size[1] % grad_size[0], pixel % grad_size[1]
    image_step, row_step, column_step = (
        BK // per_image,
        BK // grad_size[1] % grad_size[0],
        BK % grad_size[1],
    )
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


class TritonConv(TritonFamily):
    """Launcher of :func:`conv_data` and :func:`conv_filter`."""

    name = "triton-conv"
    ops = ("conv",)

    def refusal(self, problem: Problem) -> str | None:
        """Return why the kernels cannot compute a convolution, or None if they can.

        They do not compute NCHW, because the gather would read one element at a time. They count
        the pixels of all images in 32 bits, so there must be fewer than 2³¹ pixels.
        """
        assert isinstance(problem, Conv)
        if problem.layout != "nhwc":
            return f"{self.name} computes only channels-last convolutions; use the layout nhwc."
        if problem.n * max(problem.h * problem.w, problem.p * problem.q) >= 2**31:
            return (
                f"{self.name} counts pixels in 32 bits, and this convolution has 2³¹ pixels or "
                "more; use a smaller batch or image."
            )
        return None

    def candidates(self, problem: Problem, machine: Machine) -> list[TileConfig]:
        """Return tiles of up to 128×256, each once with an unsplit sum and once per useful split.

        A split is useful if it gives at most two waves of CTAs, and at least two K steps to each
        CTA. If the convolution is a GEMM, configs of GEMM kernels come first.

        The largest tiles of the convolution kernels depend on the dtype and the alignment:

        - fp32: 64×64.
        - Other dtypes with misaligned channels: 128×64 and 64×128, because a 128×128 tile would
          spill, most of all in the forward pass.
        - Other dtypes with aligned channels: 128×128, except in the next case.
        - 16-bit dtypes with aligned channels, on Hopper and datacentre Blackwell: 128×256 and
          256×128, because the Tensor Cores of these GPUs read their operands from shared memory.
          The condition of :func:`_stays_in_tap` must also hold, because the kernel otherwise
          computes divisions, which take too many registers.
        """
        assert isinstance(problem, Conv)
        # 1. List the parameters of the tiles: (bm, bn, warps, stages).
        fma = problem.dtype == "fp32"
        aligned = problem.alignment == WIDE_BYTES
        params = [(64, 64, 8 if fma else 4, 3), (64, 32, 4, 3), (32, 64, 4, 3), (32, 32, 4, 3)]
        if not fma:
            params = [(128, 64, 8, 3), (64, 128, 8, 3), *params]
        if aligned and not fma:
            params = [(128, 128, 8, 4), (128, 32, 4, 4), *params]
        bk = (128 if aligned and not fma else 64) // DTYPE_BYTES[problem.dtype]
        major = machine.capability[0] if machine.capability else 0
        if aligned and DTYPE_BYTES[problem.dtype] == 2 and major in (9, 10):
            large = [(128, 256, 8, 4), (256, 128, 8, 4)]
            params = [*(tile for tile in large if _stays_in_tap(problem, tile[1], bk)), *params]
        # 2. Make a config of each tile without a split, and with each useful split.
        gemm = _computed_problem(problem).implied_gemm
        configs: list[TileConfig] = list(_gemm_candidates(problem, machine))
        for bm, bn, warps, stages in params:
            tiles = gemm.batch * ceil_div(gemm.m, bm) * ceil_div(gemm.n, bn)
            for split in SPLITS:
                has_two_waves_at_most = tiles * split <= 2 * machine.sms
                has_two_steps = gemm.k >= 2 * bk * split
                if split == 1 or (has_two_waves_at_most and has_two_steps):
                    config = ConvConfig(bm, bn, bk, stages, warps, split=split)
                    configs.append(config.fitted(problem.dtype, machine))
        return configs

    def seconds(
        self, problem: Problem, configs: Sequence[TileConfig], machine: Machine, c: Constants
    ) -> Array:
        """Estimate the seconds of the convolution (:func:`_computed_problem`) with each config."""
        assert isinstance(problem, Conv)
        return super().seconds(_computed_problem(problem), configs, machine, c)

    def scratch(self, problem: Problem, config: TileConfig) -> tuple[int, ...]:
        """Return the shape of the array for partial results, or () if there are none."""
        assert isinstance(problem, Conv)
        assert isinstance(config, ConvConfig)
        gemm = as_gemm(problem)
        if config.gemm and gemm is not None:
            return _gemm_family(config).scratch(gemm, config.gemm_config)
        return self._parts_shape(problem, config)

    def _parts_shape(self, problem: Conv, config: ConvConfig) -> tuple[int, ...]:
        """Return the shape of the parts that the kernels write, or () if the sum is not split.

        The shape is (parts, images, rows, columns, channels), or (parts, filters, r, s, channels)
        for a filter's gradient.
        """
        parts = _parts(problem, config)
        if parts == 1:
            return ()
        result = {"fprop": "y", "dgrad": "x", "wgrad": "w"}[problem.pass_]
        outer, channels, rows, columns = conv_shapes(problem)[result]
        return parts, outer, rows, columns, channels

    def calls(
        self, problem: Problem, operands: Operands, config: TileConfig, scratch: Tensor
    ) -> list[LaunchSpec]:
        """Return the launches that compute the result, or its parts and then their sum."""
        assert isinstance(problem, Conv)
        assert isinstance(config, ConvConfig)
        gemm = as_gemm(problem)
        if config.gemm and gemm is not None:
            matrices = _matrices(problem, operands)
            if matrices is not None:
                gemm_config = config.gemm_config
                return _gemm_family(config).calls(gemm, matrices, gemm_config, scratch)
            # A tensor has gaps between its pixels, so the kernels of this family compute the
            # result, in the same number of parts.
        make_call = _filter_call if problem.pass_ == "wgrad" else _data_call
        parts_shape = self._parts_shape(problem, config)
        if not parts_shape:
            return [make_call(problem, operands, config, operands.out, (0, *operands.out.stride()))]
        # Scratch may have the shape of a GEMM's parts, with the same elements in the same order.
        parts = scratch.view(parts_shape)
        # Parts have the channels last. The kernels take strides with the channels second, like
        # those of the result.
        part_stride, outer_stride, row_stride, column_stride, channel_stride = parts.stride()
        parts_strides = (part_stride, outer_stride, channel_stride, row_stride, column_stride)
        return [
            make_call(problem, operands, config, parts, parts_strides),
            add_parts_call(parts, operands.out.permute(0, 2, 3, 1)),
        ]


def as_gemm(conv: Conv) -> Gemm | None:
    """Return the GEMM with the same result as an NHWC convolution, or None if there is none."""
    has_one_tap = (conv.r, conv.s) == (1, 1)
    keeps_pixels = (*conv.stride, *conv.padding) == (1, 1, 0, 0)
    if not (has_one_tap and keeps_pixels and conv.groups == 1):
        return None
    pixels = conv.n * conv.h * conv.w
    sizes, layout = {
        "fprop": ((pixels, conv.kout, conv.c), "nt"),
        "dgrad": ((pixels, conv.c, conv.kout), "nn"),
        "wgrad": ((conv.kout, conv.c, pixels), "tn"),
    }[conv.pass_]
    return Gemm(*sizes, conv.dtype, layout)


def _matrices(conv: Conv, operands: Operands) -> Operands | None:
    """Return views of the tensors as the operands of :func:`as_gemm`'s GEMM.

    Return None if a tensor has gaps between its pixels.
    """
    # 1. View each tensor as a matrix: activations as (pixels, channels), filters as (kout, c).
    matrices = []
    for tensor in operands:
        try:
            matrices.append(tensor.permute(0, 2, 3, 1).view(-1, tensor.shape[1]))
        except RuntimeError:  # raised by PyTorch if no view has this shape
            return None
    # 2. Arrange the matrices as the operands of the GEMM. In wgrad, they are the input and the
    # output's gradient, and the GEMM multiplies the transposed gradient by the input.
    first, second, out = matrices
    if conv.pass_ == "fprop":
        return Operands(first, second.T, out)
    if conv.pass_ == "dgrad":
        return Operands(first, second, out)
    return Operands(second.T, first, out)


_TILED, _SPLITK, _PERSISTENT = TritonTiled(), TritonSplitK(), TritonPersistent()


def _gemm_family(config: ConvConfig) -> GemmFamily:
    """Return the GEMM family that computes a convolution whose config has ``gemm`` set."""
    if config.ctas:  # only persistent kernels have a fixed number of CTAs
        return _PERSISTENT
    return _SPLITK if config.split > 1 else _TILED


def _gemm_candidates(conv: Conv, machine: Machine) -> Iterable[ConvConfig]:
    """Yield configs of the GEMM kernels if the convolution is a GEMM, those with TMA first."""
    gemm = as_gemm(conv)
    if gemm is None:
        return
    for config in _PERSISTENT.candidates(gemm, machine):
        assert isinstance(config, PersistentConfig)
        # A ConvConfig has no fields for these settings, so each must have its default.
        if config.tma and config.flatten and not config.specialize:
            yield ConvConfig.from_gemm(config)
    for family in (_TILED, _SPLITK):
        yield from map(ConvConfig.from_gemm, family.candidates(gemm, machine))


def _stays_in_tap(conv: Conv, bn: int, bk: int) -> bool:
    """Return True if every K step stays in one tap or, for a filter's gradient, every tile does.

    Return False if an axis has more than 32 taps, because the masks have 32 bits.
    """
    channels = conv.kout if conv.pass_ == "dgrad" else conv.c
    block = bn if conv.pass_ == "wgrad" else bk
    return channels // conv.groups % block == 0 and max(conv.r, conv.s) <= _TAP_BITS


def _computed_problem(conv: Conv) -> Problem:
    """Return the problem that the kernel computes: the convolution, or a GEMM for all its phases.

    Only the input's gradient of a strided convolution has phases. They count as the batch of one
    GEMM.
    """
    phases = math.prod(conv.stride)
    if conv.pass_ != "dgrad" or phases == 1:
        return conv
    # A phase has at most this many pixels along each axis. It also has at most this many taps,
    # unless stride and dilation have a common factor: some phases then have more, and others none.
    vertical, horizontal = conv.stride
    rows, columns = ceil_div(conv.h, vertical), ceil_div(conv.w, horizontal)
    r, s = ceil_div(conv.r, vertical), ceil_div(conv.s, horizontal)
    c, kout = conv.c // conv.groups, conv.kout // conv.groups
    return Gemm(conv.n * rows * columns, c, kout * r * s, conv.dtype, "nt", conv.groups * phases)


def _parts(conv: Conv, config: ConvConfig) -> int:
    """Return the number of parts into which the sum is split."""
    return config.parts(_computed_problem(conv).implied_gemm)


def _data_call(
    problem: Conv, operands: Operands, config: ConvConfig, target: Tensor, strides: tuple[int, ...]
) -> LaunchSpec:
    """Return the launch of :func:`conv_data`, which writes ``target`` with the given strides.

    ``strides`` are (part, image, channel, row, column).
    """
    # 1. Find the kernel's arguments for the pass: the channels of a group that are summed over
    # (depth) and that the result has (width), the strides, the size of the result and the spacing
    # of the pixels of a phase, which is 1 in fprop.
    backward = problem.pass_ == "dgrad"
    source, filters, _ = operands
    c_per_group, kout_per_group = problem.c // problem.groups, problem.kout // problem.groups
    kout_stride, c_stride, r_stride, s_stride = filters.stride()
    group_stride = kout_stride * kout_per_group
    if backward:  # the two kinds of channels swap their roles
        depth, width = kout_per_group, c_per_group
        filter_stride = (group_stride, c_stride, kout_stride, r_stride, s_stride)
        out_size, spacing = (problem.h, problem.w), problem.stride
    else:
        depth, width = c_per_group, kout_per_group
        filter_stride = (group_stride, kout_stride, c_stride, r_stride, s_stride)
        out_size, spacing = (problem.p, problem.q), (1, 1)
    part_stride, image_stride, channel_stride, row_stride, column_stride = strides
    out_stride = (part_stride, image_stride, row_stride, column_stride, channel_stride)
    # 2. Find how far apart the taps are that one pixel uses: t · dilation is equal, modulo the
    # spacing, for all these taps t. In fprop, a pixel uses every tap.
    pairs = zip(spacing, problem.dilation, strict=True)
    tap_step = tuple(space // math.gcd(space, dilation) for space, dilation in pairs)
    # 3. Make the grid for the first phase, which is the largest.
    phase_rows = ceil_div(out_size[0], spacing[0])
    phase_columns = ceil_div(out_size[1], spacing[1])
    tiles = ceil_div(problem.n * phase_rows * phase_columns, config.bm)
    tiles *= ceil_div(width, config.bn)
    grid = (tiles * problem.groups * math.prod(spacing), _parts(problem, config))
    # 4. Convert sizes and strides to units.
    all_strides = (_group_strides(source, depth), filter_stride, out_stride)
    units = _stride_units(depth, width, all_strides, problem.dtype)
    depth_unit, width_unit, stride_unit = units
    arguments = (
        source, filters, target, problem.n, tuple(source.shape[2:]), out_size, depth // depth_unit,
        width // width_unit, problem.groups, (problem.r, problem.s), tap_step, problem.stride,
        problem.padding, problem.dilation, *in_units(all_strides, stride_unit),
    )  # fmt: skip
    options = {
        **_options(problem, operands, config, units),
        "BACKWARD": backward,
        "TAPS": triton.next_power_of_2(max(problem.r, problem.s)),
        "EVEN_N": width % config.bn == 0,
    }
    return LaunchSpec(conv_data, grid, arguments, options)


def _filter_call(
    problem: Conv, operands: Operands, config: ConvConfig, target: Tensor, strides: tuple[int, ...]
) -> LaunchSpec:
    """Return the launch of :func:`conv_filter`, which writes ``target`` with the given strides.

    ``strides`` are (part, channel of grad, channel of the source, r, s).
    """
    # 1. Make the grid: all tiles of all groups, for each part.
    source, grad, _ = operands
    depth, width = problem.c // problem.groups, problem.kout // problem.groups
    gemm_columns = problem.r * problem.s * depth
    tiles = ceil_div(width, config.bm) * ceil_div(gemm_columns, config.bn)
    grid = (tiles * problem.groups, _parts(problem, config))
    # 2. Convert sizes and strides to units.
    all_strides = (_group_strides(source, depth), _group_strides(grad, width), strides)
    units = _stride_units(depth, width, all_strides, problem.dtype)
    depth_unit, width_unit, stride_unit = units
    arguments = (
        source, grad, target, problem.n, tuple(source.shape[2:]), tuple(grad.shape[2:]),
        depth // depth_unit, width // width_unit, (problem.r, problem.s), problem.stride,
        problem.padding, problem.dilation, *in_units(all_strides, stride_unit),
    )  # fmt: skip
    # 3. Set the kernel's compile-time options.
    image_stride, _, row_stride, column_stride = grad.stride()
    rows_are_dense = row_stride == problem.q * column_stride
    images_are_dense = image_stride == problem.p * row_stride
    options = {
        **_options(problem, operands, config, units),
        "DENSE": rows_are_dense and images_are_dense,
    }
    return LaunchSpec(conv_filter, grid, arguments, options)


def _options(
    problem: Conv, operands: Operands, config: ConvConfig, units: tuple[int, ...]
) -> dict[str, Any]:
    """Return the compile-time arguments and options that both kernels share."""
    # The reach is the offset of a tensor's last element from its first, in the largest tensor.
    reach = 0
    for tensor in operands:
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        reach = max(reach, sum((size - 1) * abs(stride) for size, stride in axes))
    return {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP": config.group,
        "WHOLE": _stays_in_tap(problem, config.bn, config.bk),
        "PRECISION": input_precision(problem.dtype),
        # The reach is doubled, because the gather also computes addresses in the padding, which are
        # then masked.
        "WIDE": 2 * reach >= 2**31,
        "UPCAST": INTERPRETED and problem.dtype == "bf16",
        "UNITS": units,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "maxnreg": 255,  # see gemm_options
    }


def _group_strides(tensor: Tensor, group_channels: int) -> tuple[int, ...]:
    """Return the strides (group, image, row, column, channel) of a tensor."""
    image_stride, channel_stride, row_stride, column_stride = tensor.stride()
    group_stride = group_channels * channel_stride
    return group_stride, image_stride, row_stride, column_stride, channel_stride


def _stride_units(
    depth: int, width: int, strides: Iterable[tuple[int, ...]], dtype: str
) -> tuple[int, int, int]:
    """Return the units of ``depth``, of ``width`` and of strides other than 1, in elements."""
    all_strides = itertools.chain.from_iterable(strides)
    stride_unit = wide_unit(dtype, *(stride for stride in all_strides if stride != 1))
    return wide_unit(dtype, depth), wide_unit(dtype, width), stride_unit
