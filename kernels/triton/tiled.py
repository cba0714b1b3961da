"""``triton-tiled``: one CTA per tile, numbered so that concurrent CTAs share blocks in L2.

The loads of the next K steps run while the current step multiplies, because Triton pipelines the
loop in ``num_stages`` stages. Sums are fp32 for every dtype.

In fp32 and tf32, some layouts are slow to read. A separate launch transposes an operand in such a
layout before the GEMM, if the operand's elements are used often enough for the transposition to
pay off (:func:`kernels.triton.gemm.slow_operands`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.config import TileConfig, TiledConfig, tile_count
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.problem import Gemm, Problem
from kernels.triton.blocks import grouped, matrix_stride, product, store
from kernels.triton.family import LaunchSpec
from kernels.triton.gemm import (
    AlignmentUnits,
    GemmFamily,
    Matrices,
    gemm_options,
    repack,
    repacked_elements,
    repacked_problem,
    should_repack,
)


@triton.jit
def matmul_tiled(
    a_ptr, b_ptr, c_ptr, sizes, a_stride, b_stride, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Compute C (batch, M, N) = A (batch, M, K) B (batch, K, N), for any strides.

    Strides are (batch, row, column). ``sizes`` (M, N, K) are in units of UNITS[:3], the strides of
    A and B in units of UNITS[3], and the strides of C in units of UNITS[4]. A stride of None means
    1. The other options are those of :func:`kernels.triton.blocks.product` and
    :func:`kernels.triton.blocks.grouped`.
    """
    M, N, K = sizes[0] * UNITS[0], sizes[1] * UNITS[1], sizes[2] * UNITS[2]
    a_stride, b_stride = matrix_stride(a_stride, UNITS[3]), matrix_stride(b_stride, UNITS[3])
    c_stride = matrix_stride(c_stride, UNITS[4])
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tile = tl.program_id(0)
    z = (tile // (rows * columns)).to(tl.int64)
    row, column = grouped(tile % (rows * columns), rows, columns, GROUP)
    m0, n0 = row * BM, column * BN
    total = product(
        a_ptr + z * a_stride[0], a_stride[1:], b_ptr + z * b_stride[0], b_stride[1:],
        m0, n0, 0, tl.cdiv(K, BK), M, N, K,
        BM, BN, BK, EVEN, EVEN_K, PRECISION, WIDE, UPCAST,
    )  # fmt: skip
    store(c_ptr + z * c_stride[0], c_stride[1:], m0, n0, total, M, N, BM, BN, EVEN, WIDE)


class TritonTiled(GemmFamily):
    """Launcher of :func:`matmul_tiled`."""

    name = "triton-tiled"

    def candidates(self, problem: Problem, machine: Machine) -> list[TileConfig]:
        """Return the base tiles, with ``repack`` on if A or B should be transposed."""
        assert isinstance(problem, Gemm)
        repacks = should_repack(problem, machine)
        tiles = self.base_tiles(repacked_problem(problem) if repacks else problem, machine)
        return [TiledConfig(**vars(tile), repack=repacks) for tile in tiles]

    def scratch(self, problem: Problem, config: TileConfig) -> tuple[int, ...]:
        """Return the shape (elements,) of the scratch array for transposed operands.

        The shape is () if no operand is transposed.
        """
        assert isinstance(problem, Gemm)
        assert isinstance(config, TiledConfig)
        return (repacked_elements(problem),) if config.repack else ()

    def calls(
        self, problem: Problem, operands: Operands, config: TileConfig, scratch: Tensor
    ) -> list[LaunchSpec]:
        """Return the launches that transpose slow operands, then one launch with a CTA per tile."""
        assert isinstance(problem, Gemm)
        assert isinstance(config, TiledConfig)
        matrices = Matrices.from_operands(operands)
        transpositions: list[LaunchSpec] = []
        if config.repack:
            matrices, transpositions = repack(problem, matrices, scratch)
        batch, m, n, _ = matrices.sizes
        tiles = tile_count(m, n, config.bm, config.bn, batch)
        units = AlignmentUnits.from_matrices(matrices, problem.dtype)
        arguments = (*matrices, *units.arguments(matrices))
        options = gemm_options(problem, matrices, config)
        return [*transpositions, LaunchSpec(matmul_tiled, (tiles,), arguments, options)]
