"""``triton-conv``: convolution as an implicit GEMM, which gathers one operand and never stores it.

This module chooses and launches the kernels of :mod:`kernels.triton.conv_kernels`. If a convolution
is a GEMM and its tensors can be viewed as matrices, a kernel of a GEMM family may compute it.

In fp32 and tf32, some passes read the filters in a slow order. If it pays off, a separate launch
transposes the filters beforehand (:func:`_should_repack`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import triton
from torch import Tensor

from kernels.config import ConvConfig, PersistentConfig, TileConfig, ceil_div, tile_count
from kernels.machine import Machine
from kernels.operands import Operands, conv_shapes
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Conv, Gemm, Problem
from kernels.timemodel.constants import Constants
from kernels.timemodel.estimate import Array
from kernels.triton.conv_kernels import TAP_BITS, conv_data, conv_filter
from kernels.triton.family import (
    INTERPRETED,
    LaunchSpec,
    TritonFamily,
    add_parts_call,
    in_units,
    input_precision,
    wide_unit,
)
from kernels.triton.gemm import MIN_USES, GemmFamily, aligned, should_repack, transpose_call
from kernels.triton.persistent import TritonPersistent
from kernels.triton.splitk import TritonSplitK
from kernels.triton.tiled import TritonTiled

SPLITS = (1, 2, 4, 8, 16, 32)
_MIN_COLUMNS = 16  # fewest channels of the result in a group for which filters are transposed


class TritonConv(TritonFamily):
    """Launcher of the convolution kernels and, for some convolutions, of GEMM kernels."""

    name = "triton-conv"
    ops = ("conv",)

    def refusal(self, problem: Problem) -> str | None:
        """Return why the kernels cannot compute a convolution, or None if they can.

        They do not support NCHW, because they would gather one element at a time.
        """
        assert isinstance(problem, Conv)
        if problem.layout != "nhwc":
            return f"{self.name} computes only channels-last convolutions; use the layout nhwc."
        if problem.n * max(problem.h * problem.w, problem.p * problem.q) >= 2**31:
            return (
                f"{self.name} counts pixels in 32 bits, but this convolution has 2³¹ pixels or "
                "more; use a smaller batch or image."
            )
        return None

    def candidates(self, problem: Problem, machine: Machine) -> list[TileConfig]:
        """Return configs with tiles of up to 128×256, without a split and with each useful split.

        A split is useful if it gives at most two waves of CTAs, and at least two K steps to each
        CTA. If the convolution is a GEMM, configs of GEMM kernels come first.

        The largest tiles of the convolution kernels depend on the dtype, the alignment and the GPU:

        - fp32: 64×64.
        - Other dtypes with misaligned channels: 128×64 and 64×128, because 128×128 would spill.
        - Other dtypes with aligned channels: 128×128, except in the next case.
        - 16-bit dtypes with aligned channels, on GPUs whose Tensor Cores read their operands from
          shared memory: 128×256 and 256×128. The condition of :func:`_stays_in_tap` must also hold,
          because the kernel otherwise computes divisions, which take too many registers.
        """
        assert isinstance(problem, Conv)
        # 1. List the parameters of the tiles: (bm, bn, warps, stages). If two tiles have the same
        # estimated time, the first of them is preferred.
        fma = problem.dtype == "fp32"
        aligned = problem.alignment == WIDE_BYTES
        element_bytes = DTYPE_BYTES[problem.dtype]
        bk = (128 if aligned and not fma else 64) // element_bytes
        params: list[tuple[int, int, int, int]] = []
        if aligned and element_bytes == 2 and machine.multiplies_from_shared:
            for bm, bn in ((128, 256), (256, 128)):
                if _stays_in_tap(problem, bn, bk):
                    params.append((bm, bn, 8, 4))
        if aligned and not fma:
            params += [(128, 128, 8, 4), (128, 32, 4, 4)]
        if not fma:
            params += [(128, 64, 8, 3), (64, 128, 8, 3)]
        params += [(64, 64, 8 if fma else 4, 3), (64, 32, 4, 3), (32, 64, 4, 3), (32, 32, 4, 3)]
        # 2. Make a config of each tile without a split, and with each useful split.
        gemm = _computed_problem(problem).implied_gemm
        repacks = _should_repack(problem, machine)
        configs: list[TileConfig] = list(_gemm_candidates(problem, machine))
        for bm, bn, warps, stages in params:
            tiles = tile_count(gemm.m, gemm.n, bm, bn, gemm.batch)
            for split in SPLITS:
                has_two_waves_at_most = tiles * split <= 2 * machine.sms
                has_two_steps = gemm.k >= 2 * bk * split
                if split == 1 or (has_two_waves_at_most and has_two_steps):
                    config = ConvConfig(bm, bn, bk, stages, warps, repack=repacks, split=split)
                    configs.append(config.fitted(problem.dtype, machine))
        return configs

    def seconds(
        self, problem: Problem, configs: Sequence[TileConfig], machine: Machine, c: Constants
    ) -> Array:
        """Estimate the seconds with each config for the problem that the kernel computes."""
        assert isinstance(problem, Conv)
        return super().seconds(_computed_problem(problem), configs, machine, c)

    def scratch(self, problem: Problem, config: TileConfig) -> tuple[int, ...]:
        """Return the shape of the dense fp32 scratch array, or () if the launches need none."""
        assert isinstance(problem, Conv)
        assert isinstance(config, ConvConfig)
        gemm = as_gemm(problem)
        if config.gemm and gemm is not None:
            return _gemm_family(config).scratch(gemm, config.gemm_config)
        repacked = _repacked_elements(problem) if config.repack and not config.gemm else 0
        elements = repacked + math.prod(self._parts_shape(problem, config) or (0,))
        return (elements,) if elements else ()

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
        """Return the launches that compute the result, or its parts and then their sum.

        A launch that transposes the filters may come first.
        """
        assert isinstance(problem, Conv)
        assert isinstance(config, ConvConfig)
        gemm = as_gemm(problem)
        if config.gemm and gemm is not None:
            matrices = _matrices(problem, operands)
            if matrices is not None:
                gemm_config = config.gemm_config
                return _gemm_family(config).calls(gemm, matrices, gemm_config, scratch)
            # A tensor has gaps between its pixels, so the kernels of this family compute the
            # result, in the same number of parts. The scratch of the GEMM kernel has at least as
            # many elements as these kernels need.
        transpositions: list[LaunchSpec] = []
        repacked = 0
        if config.repack and not config.gemm:
            operands, transpositions = _repack(problem, operands, scratch)
            repacked = _repacked_elements(problem)
        make_call = _filter_call if problem.pass_ == "wgrad" else _data_call
        parts_shape = self._parts_shape(problem, config)
        if not parts_shape:
            target_strides = (0, *operands.out.stride())
            convolve = make_call(problem, operands, config, operands.out, target_strides)
            return [*transpositions, convolve]
        parts = scratch[repacked : repacked + math.prod(parts_shape)].view(parts_shape)
        # Parts have the channels last. The kernels take strides with the channels second, like
        # those of the result.
        part_stride, outer_stride, row_stride, column_stride, channel_stride = parts.stride()
        parts_strides = (part_stride, outer_stride, channel_stride, row_stride, column_stride)
        return [
            *transpositions,
            make_call(problem, operands, config, parts, parts_strides),
            add_parts_call(parts, operands.out.permute(0, 2, 3, 1)),
        ]


def as_gemm(conv: Conv) -> Gemm | None:
    """Return the GEMM that computes a plain 1 × 1 convolution in NHWC, or None for all others."""
    has_one_tap = conv.r == 1 and conv.s == 1
    keeps_pixels = conv.stride == (1, 1) and conv.padding == (0, 0)
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
    """View the tensors as operands of :func:`as_gemm`'s GEMM; return None if that is impossible."""
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
    if config.ctas:  # only persistent kernels have a fixed number of CTAs
        return _PERSISTENT
    return _SPLITK if config.split > 1 else _TILED


def _gemm_candidates(conv: Conv, machine: Machine) -> Iterable[ConvConfig]:
    """Yield configs of the GEMM kernels, those with TMA first."""
    gemm = as_gemm(conv)
    if gemm is None:
        return
    # Persistent kernels do not transpose operands in a slow order.
    persistent = [] if should_repack(gemm, machine) else _PERSISTENT.candidates(gemm, machine)
    for config in persistent:
        assert isinstance(config, PersistentConfig)
        # A ConvConfig has no fields for these settings, so each must have its default.
        if config.tma and config.flatten and not config.specialize:
            yield ConvConfig.from_gemm(config)
    for family in (_TILED, _SPLITK):
        yield from map(ConvConfig.from_gemm, family.candidates(gemm, machine))


def _has_slow_filters(conv: Conv) -> bool:
    """Return True if a convolution reads its filters, stored as (kout, r, s, c), in a slow order.

    :func:`kernels.triton.gemm.slow_operands` gives the reasons:

    - ``fprop`` in fp32: the sum runs over the contiguous channels.
    - ``dgrad`` in tf32: the sum runs over other channels than the contiguous ones.
    """
    return (conv.pass_, conv.dtype) in {("fprop", "fp32"), ("dgrad", "tf32")}


def _should_repack(conv: Conv, machine: Machine) -> bool:
    """Return True if transposing slow filters pays off on this machine.

    Each filter must be used for enough pixels. In groups with few channels of the result, such as
    those of a depthwise convolution, a tile has hardly any columns whose reads could collide.
    """
    is_slow_here = conv.dtype == "fp32" or machine.multiplies_from_shared
    if not (_has_slow_filters(conv) and is_slow_here):
        return False
    result_channels = conv.kout if conv.pass_ == "fprop" else conv.c
    is_wide = result_channels // conv.groups >= _MIN_COLUMNS
    return is_wide and _computed_problem(conv).implied_gemm.m >= MIN_USES[conv.dtype]


def _repacked_elements(conv: Conv) -> int:
    """Return the number of fp32 elements of scratch memory that :func:`_repack` needs."""
    return aligned(math.prod(conv_shapes(conv)["w"])) if _has_slow_filters(conv) else 0


def _repack(conv: Conv, operands: Operands, scratch: Tensor) -> tuple[Operands, list[LaunchSpec]]:
    """Return the operands with a transposed copy of slow filters, and the launch that copies them.

    The copy is a view of ``scratch`` and contiguous along the output channels. Filters that are not
    dense in channels-last order are not copied.
    """
    filters = operands.b.permute(0, 2, 3, 1)
    if not (_has_slow_filters(conv) and filters.is_contiguous()):
        return operands, []
    kout, r, s, c = filters.shape
    copy = scratch[: filters.numel()].view(1, r * s * c, kout)
    transpose_filters = transpose_call(filters.view(1, kout, r * s * c).mT, copy)
    transposed = copy.view(r, s, c, kout).permute(3, 2, 0, 1)
    return operands._replace(b=transposed), [transpose_filters]


def _stays_in_tap(conv: Conv, bn: int, bk: int) -> bool:
    """Return True if every K step stays in one tap or, for a filter's gradient, every tile does.

    The result is also False if an axis has more than 32 taps, because :func:`conv_data` keeps a bit
    for each tap in a 32-bit number.
    """
    channels = conv.kout if conv.pass_ == "dgrad" else conv.c
    block = bn if conv.pass_ == "wgrad" else bk
    return channels // conv.groups % block == 0 and max(conv.r, conv.s) <= TAP_BITS


def _computed_problem(conv: Conv) -> Problem:
    """Return the problem that the kernel computes: the convolution, or a batch of GEMMs.

    The input's gradient of a strided convolution is a batch with one GEMM for each phase of each
    group. :mod:`kernels.triton.conv_kernels` explains the phases.
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
    return config.parts(_computed_problem(conv).implied_gemm)


def _data_call(
    problem: Conv, operands: Operands, config: ConvConfig, target: Tensor, strides: tuple[int, ...]
) -> LaunchSpec:
    """Return the launch of :func:`conv_data`.

    ``strides`` are the strides of ``target``: (part, image, channel, row, column).
    """
    # 1. Find the arguments that depend on the pass. ``depth`` is the number of a group's channels
    # that are summed over, and ``width`` is the number of a group's channels in the result.
    # ``spacing`` is the distance between the pixels of a phase, which is 1 in fprop.
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
    phase_pixels = problem.n * phase_rows * phase_columns
    tiles = tile_count(phase_pixels, width, config.bm, config.bn)
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
    # 5. Set the kernel's compile-time options.
    options = {
        **_options(problem, operands, config, units),
        "BACKWARD": backward,
        "TAPS": triton.next_power_of_2(max(problem.r, problem.s)),
        "EVEN_N": width % config.bn == 0,
        "PHASES": math.prod(spacing) > 1,
    }
    return LaunchSpec(conv_data, grid, arguments, options)


def _filter_call(
    problem: Conv, operands: Operands, config: ConvConfig, target: Tensor, strides: tuple[int, ...]
) -> LaunchSpec:
    """Return the launch of :func:`conv_filter`.

    ``strides`` are the strides of ``target``: (part, channel of the output's gradient, channel of
    the input, r, s).
    """
    # 1. Make the grid: all tiles of all groups, for each part.
    source, grad, _ = operands
    depth, width = problem.c // problem.groups, problem.kout // problem.groups
    gemm_columns = problem.r * problem.s * depth
    tiles = tile_count(width, gemm_columns, config.bm, config.bn)
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
