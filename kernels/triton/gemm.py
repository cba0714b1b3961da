"""Host code that GEMM families share: kernel arguments, candidate tiles and transposed operands."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from kernels.config import TileConfig, ceil_div
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Gemm, Problem
from kernels.triton.blocks import transpose
from kernels.triton.family import (
    INTERPRETED,
    LaunchSpec,
    TritonFamily,
    in_units,
    input_precision,
    wide_unit,
)

Stride = tuple[int, ...]

HOPPER_MAJOR = 9  # major version of Hopper's compute capability

_FEW_ROWS = 64  # largest M for which wide tiles of 16 rows are candidates


class Matrices(NamedTuple):
    """Operands with a batch dimension: A (batch, m, k), B (batch, k, n), C (batch, m, n)."""

    a: Tensor
    b: Tensor
    c: Tensor

    @classmethod
    def from_operands(cls, operands: Operands) -> Matrices:
        """Build the matrices from operands, and add a batch dimension to those without one."""
        batched = [operand if operand.dim() == 3 else operand.unsqueeze(0) for operand in operands]
        return cls(*batched)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes as (batch, m, n, k)."""
        batch, m, k = self.a.shape
        return batch, m, self.b.shape[-1], k

    @property
    def strides(self) -> tuple[Stride, ...]:
        """Strides (batch, row, column) of each matrix, in elements.

        The batch stride is 0 if the batch size is 1.
        """
        strides = []
        for matrix in self:
            batch_stride, row_stride, column_stride = matrix.stride()
            if matrix.shape[0] == 1:
                batch_stride = 0
            strides.append((batch_stride, row_stride, column_stride))
        return tuple(strides)


class AlignmentUnits(NamedTuple):
    """Units, in elements, that divide the sizes and the strides (:func:`wide_unit`)."""

    m: int
    n: int
    k: int
    read: int  # unit of the strides of A and B
    written: int  # unit of the strides of C

    @classmethod
    def from_matrices(cls, matrices: Matrices, dtype: str) -> AlignmentUnits:
        """Return the largest units that divide the sizes and all strides other than 1."""
        _, m, n, k = matrices.sizes
        a, b, c = matrices.strides
        return cls(
            m=wide_unit(dtype, m),
            n=wide_unit(dtype, n),
            k=wide_unit(dtype, k),
            read=wide_unit(dtype, *(stride for stride in (*a, *b) if stride != 1)),
            written=wide_unit(dtype, *(stride for stride in c if stride != 1)),
        )

    def arguments(self, matrices: Matrices) -> tuple[Any, ...]:
        """Return (m, n, k) and the strides (batch, row, column) of A, B and C, all in units."""
        _, m, n, k = matrices.sizes
        sizes = m // self.m, n // self.n, k // self.k
        *read, written = matrices.strides
        return sizes, *in_units(read, self.read), *in_units([written], self.written)


class GemmFamily(TritonFamily):
    """Base of the families that compute GEMMs."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Operations that the family computes: only GEMMs."""
        return ("gemm",)

    def base_tiles(
        self, problem: Problem, machine: Machine, looped: bool = False
    ) -> list[TileConfig]:
        """Return tiles of up to 128×256 for Tensor Cores, and smaller ones for fp32's plain FMAs.

        Misaligned rows, whose length is not a multiple of 16 bytes, are copied a few elements at a
        time, through registers. For such rows, a shallow K step and eight warps keep the registers
        of large tiles from spilling: a 128×128 tile with a K step of 64 elements and four warps
        spills kilobytes.

        A GEMM with few rows, as in a decode step, mostly reads weights. On Tensor Cores and with
        aligned rows, such a GEMM also gets wide tiles with a K step of 256 bytes, which keep more
        bytes in flight.

        Tiles that would spill are left out. A kernel that loops over tiles (``looped``) keeps more
        values in registers, so more tiles are left out for it.
        """
        assert isinstance(problem, Gemm)
        # 1. List the parameters of the tiles: (bm, bn, warps, largest number of stages).
        fma = problem.dtype == "fp32"
        misaligned = read_alignment(problem) < WIDE_BYTES
        if misaligned:
            params = [(64, 64, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 4, 2),
                      (16, 64, 4, 2)]  # fmt: skip
            if not fma:
                params = [(128, 128, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2), *params]
        elif fma:
            params = [(128, 64, 8, 3), (64, 128, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3),
                      (32, 64, 4, 3), (32, 32, 4, 3), (16, 64, 4, 3)]  # fmt: skip
        else:
            params = [(128, 256, 8, 4), (256, 128, 8, 4), (128, 128, 8, 4), (128, 64, 4, 4),
                      (64, 128, 4, 4), (64, 64, 4, 5), (64, 32, 4, 5), (32, 64, 4, 5),
                      (32, 32, 4, 5), (16, 64, 4, 5)]  # fmt: skip
        k_bytes = 64 if misaligned or fma else 128
        bk = k_bytes // DTYPE_BYTES[problem.dtype]
        tiles = [TileConfig(bm, bn, bk, stages, warps) for bm, bn, warps, stages in params]
        if problem.m <= _FEW_ROWS and not (misaligned or fma):
            tiles += [
                TileConfig(16, 128, 2 * bk, stages=4, warps=4),
                TileConfig(16, 256, 2 * bk, stages=4, warps=8),
            ]
        # 2. Leave out the tiles that would spill.
        if looped and misaligned:
            max_area = 64 * 32 if fma else 64 * 64
            tiles = [tile for tile in tiles if tile.bm * tile.bn <= max_area]
        tiles = [tile for tile in tiles if _has_room(tile, problem, machine, looped)]
        return [tile.fitted(problem.dtype, machine) for tile in tiles]


def _has_room(tile: TileConfig, problem: Gemm, machine: Machine, looped: bool) -> bool:
    """Return True if a tile's sums fit in registers."""
    if tile.bm * tile.bn <= 128 * 128:
        return True
    if looped:
        result_row_bytes = problem.n * DTYPE_BYTES[problem.dtype]
        return machine.major == HOPPER_MAJOR and result_row_bytes % WIDE_BYTES == 0
    # Without masks, all GPUs have room. With masks, only GPUs that multiply from shared memory do.
    needs_no_masks = problem.m % tile.bm == problem.n % tile.bn == problem.k % tile.bk == 0
    return needs_no_masks or machine.multiplies_from_shared


def read_alignment(problem: Gemm) -> int:
    """Return the alignment in bytes, at most 16, of all stored rows of A and B."""
    a_row, b_row, _ = problem.row_dimensions
    element_bytes = DTYPE_BYTES[problem.dtype]
    a_bytes = getattr(problem, a_row) * element_bytes
    b_bytes = getattr(problem, b_row) * element_bytes
    return math.gcd(WIDE_BYTES, a_bytes, b_bytes)


MIN_USES = {"fp32": 64, "tf32": 256}
"""Smallest number of uses per element, by dtype, at which a slow operand is transposed.

A GEMM uses each element of A ``n`` times, and each element of B ``m`` times. A transposition moves
8 bytes per element, which takes 3 ps at 80% of an H100's bandwidth. In a slow order, each use takes
longer, as ``triton-tiled`` shows for 4096³ in results/published/families/:

- fp32: 0.1 ps longer. ``nt`` reaches 14 TFLOP/s without a transposition (on an H100), and 43 with
  one (on an H200).
- tf32: 0.017 ps longer. On an H100, ``nn`` reaches 89 TFLOP/s, and ``nt``, which needs no
  transposition, reaches 381.

A transposition therefore pays off from about 30 uses in fp32, and from about 180 in tf32. The
values of this constant are higher, because a transposition also needs a launch."""

_TRANSPOSED_BLOCK = 64  # rows and columns of the block that one program transposes


def slow_operands(problem: Gemm) -> tuple[bool, bool]:
    """Return for A and for B whether it is in a slow order and used often enough to transpose it.

    - fp32: reading B is slow if K is contiguous. The likely cause: threads of a warp read elements
      of B that lie in the same banks of shared memory.
    - tf32: wgmma and tcgen05 need K to be contiguous. Triton transposes blocks in other orders
      while it copies them, 4 bytes at a time. Other instructions read all orders equally fast.
    - Other dtypes: no order is slow.
    """
    a_letter, b_letter = problem.layout[0], problem.layout[1]
    if problem.dtype not in MIN_USES:
        return False, False
    uses = MIN_USES[problem.dtype]
    if problem.dtype == "fp32":
        return False, b_letter == "t" and problem.m >= uses
    return a_letter == "t" and problem.n >= uses, b_letter == "n" and problem.m >= uses


def should_repack(problem: Gemm, machine: Machine) -> bool:
    """Return True if A or B should be transposed before the GEMM runs on this machine.

    :func:`slow_operands` says which of the two.
    """
    is_slow_here = problem.dtype == "fp32" or machine.multiplies_from_shared
    return is_slow_here and any(slow_operands(problem))


def repacked_problem(problem: Gemm) -> Gemm:
    """Return the problem with the layout that results from transposing the slow operands."""
    other = {"n": "t", "t": "n"}
    letters = [
        other[letter] if is_slow else letter
        for letter, is_slow in zip(problem.layout, slow_operands(problem), strict=True)
    ]
    return replace(problem, layout="".join(letters))


def repacked_elements(problem: Gemm) -> int:
    """Return the number of fp32 elements of scratch memory that :func:`repack` needs."""
    a_slow, b_slow = slow_operands(problem)
    a_elements = aligned(problem.batch * problem.m * problem.k) if a_slow else 0
    b_elements = aligned(problem.batch * problem.k * problem.n) if b_slow else 0
    return a_elements + b_elements


def aligned(elements: int) -> int:
    """Round up a number of fp32 elements, so that the next element is aligned to 16 bytes."""
    unit = WIDE_BYTES // DTYPE_BYTES["fp32"]
    return ceil_div(elements, unit) * unit


def repack(problem: Gemm, matrices: Matrices, scratch: Tensor) -> tuple[Matrices, list[LaunchSpec]]:
    """Return the matrices with transposed copies in place of slow operands, and the launches.

    The launches write the copies to ``scratch``, which has :func:`repacked_elements` fp32 elements.
    A slow operand without a contiguous dimension is not copied.
    """
    operands = [matrices.a, matrices.b]
    launches = []
    used_elements = 0
    for index, is_slow in enumerate(slow_operands(problem)):
        if not is_slow:
            continue
        # 1. View the operand such that its elements are contiguous along rows.
        is_turned = operands[index].stride(1) != 1
        source = operands[index].mT if is_turned else operands[index]
        if source.stride(1) != 1:
            continue
        # 2. Copy it to scratch memory, contiguous along columns.
        batch, rows, columns = source.shape
        copy = scratch[used_elements : used_elements + source.numel()].view(batch, rows, columns)
        used_elements += aligned(source.numel())
        launches.append(transpose_call(source, copy))
        operands[index] = copy.mT if is_turned else copy
    a, b = operands
    return Matrices(a, b, matrices.c), launches


def transpose_call(source: Tensor, copy: Tensor) -> LaunchSpec:
    """Return the launch that copies ``source`` to ``copy``, both (batch, rows, columns).

    ``source`` must be contiguous along rows, and ``copy`` along columns.
    """
    batch, rows, columns = source.shape
    blocks = batch * ceil_div(rows, _TRANSPOSED_BLOCK) * ceil_div(columns, _TRANSPOSED_BLOCK)
    strides = (source.stride(0), source.stride(2), copy.stride(0), copy.stride(1))
    arguments = (source, copy, rows, columns, *strides)
    return LaunchSpec(transpose, (blocks,), arguments, {"BLOCK": _TRANSPOSED_BLOCK, "num_warps": 4})


def gemm_options(problem: Gemm, matrices: Matrices, config: TileConfig) -> dict[str, Any]:
    """Return the compile-time arguments and options of a GEMM kernel."""
    # The reach is an upper bound of the offsets, in elements, inside a block of A, B or C.
    blocks = ((config.bm, config.bk), (config.bk, config.bn), (config.bm, config.bn))
    reach = 0
    for block, strides in zip(blocks, matrices.strides, strict=True):
        rows, columns = block
        _, row_stride, column_stride = strides
        reach = max(reach, rows * row_stride + columns * column_stride)
    _, m, n, k = matrices.sizes
    return {
        "UNITS": tuple(AlignmentUnits.from_matrices(matrices, problem.dtype)),
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP": config.group,
        "EVEN": m % config.bm == 0 and n % config.bn == 0,
        "EVEN_K": k % config.bk == 0,
        "PRECISION": input_precision(problem.dtype),
        "WIDE": reach >= 2**31,
        "UPCAST": INTERPRETED and problem.dtype == "bf16",
        "num_warps": config.warps,
        "num_stages": config.stages,
        # By default, ptxas spills registers of some tiles in order to fit more CTAs on an SM, such
        # as 8 bytes of a misaligned 128×128 tile on sm_80.
        "maxnreg": 255,
    }
