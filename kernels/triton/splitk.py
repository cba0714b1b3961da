"""``triton-splitk``: the sum over K is split into parts, so that even a few tiles fill the GPU.

If the result has fewer tiles than the GPU has SMs, some SMs have nothing to do. Here several CTAs
share a tile, each with a part of K. Their fp32 sums go to memory, and a second kernel adds them in
order, without atomics, so that the result has the same bits in every run.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.config import SplitConfig, TileConfig, tile_count
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.problem import Gemm, Problem
from kernels.triton.blocks import grouped, matrix_stride, product, store
from kernels.triton.family import LaunchSpec, add_parts_call
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

SPLITS = (2, 4, 8, 16, 32)


@triton.jit
def matmul_splitk(
    a_ptr, b_ptr, parts_ptr, batch, sizes, a_stride, b_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Compute ``parts`` (parts, batch, M, N), whose sum is A (batch, M, K) times B (batch, K, N).

    Part p is the sum over the p-th share of the K steps. The grid is (batch × tiles, parts). Units
    and options are as in :func:`kernels.triton.tiled.matmul_tiled`.
    """
    M, N, K = sizes[0] * UNITS[0], sizes[1] * UNITS[1], sizes[2] * UNITS[2]
    a_stride, b_stride = matrix_stride(a_stride, UNITS[3]), matrix_stride(b_stride, UNITS[3])
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tile, part = tl.program_id(0), tl.program_id(1)
    z = (tile // (rows * columns)).to(tl.int64)
    row, column = grouped(tile % (rows * columns), rows, columns, GROUP)
    m0, n0 = row * BM, column * BN
    steps, split = tl.cdiv(K, BK), tl.num_programs(1)
    total = product(
        a_ptr + z * a_stride[0], a_stride[1:], b_ptr + z * b_stride[0], b_stride[1:],
        m0, n0, part * steps // split, (part + 1) * steps // split, M, N, K,
        BM, BN, BK, EVEN, EVEN_K, PRECISION, WIDE, UPCAST,
    )  # fmt: skip
    parts_ptr += (part.to(tl.int64) * batch + z) * M * N
    store(parts_ptr, (N, 1), m0, n0, total, M, N, BM, BN, EVEN, WIDE)


class TritonSplitK(GemmFamily):
    """Launcher of :func:`matmul_splitk` and of the sum over its parts."""

    name = "triton-splitk"

    def candidates(self, problem: Problem, machine: Machine) -> list[TileConfig]:
        """Return each base tile with ``split`` = 2, and with the larger splits that may be useful.

        A larger split may be useful if each SM gets at most four CTAs on average, and each CTA at
        least two K steps.
        """
        assert isinstance(problem, Gemm)
        repacks = should_repack(problem, machine)
        configs: list[TileConfig] = []
        for tile in self.base_tiles(repacked_problem(problem) if repacks else problem, machine):
            tiles = tile_count(problem.m, problem.n, tile.bm, tile.bn, problem.batch)
            max_split = min(problem.k // (2 * tile.bk), 4 * machine.sms // tiles)
            splits = [split for split in SPLITS if split == SPLITS[0] or split <= max_split]
            configs += [SplitConfig(**vars(tile), repack=repacks, split=split) for split in splits]
        return configs

    def scratch(self, problem: Problem, config: TileConfig) -> tuple[int, ...]:
        """Return the shape (elements,) of the memory for transposed operands and all parts."""
        assert isinstance(problem, Gemm)
        assert isinstance(config, SplitConfig)
        repacked = repacked_elements(problem) if config.repack else 0
        return (repacked + math.prod(_parts_shape(problem, config)),)

    def calls(
        self, problem: Problem, operands: Operands, config: TileConfig, scratch: Tensor
    ) -> list[LaunchSpec]:
        """Return the launches that transpose slow operands, compute the parts and add them."""
        assert isinstance(problem, Gemm)
        assert isinstance(config, SplitConfig)
        matrices = Matrices.from_operands(operands)
        transpositions: list[LaunchSpec] = []
        repacked = 0
        if config.repack:
            matrices, transpositions = repack(problem, matrices, scratch)
            repacked = repacked_elements(problem)
        parts = scratch[repacked:].view(_parts_shape(problem, config))
        batch, m, n, _ = matrices.sizes
        grid = (tile_count(m, n, config.bm, config.bn, batch), config.parts(problem))
        a, b, c = matrices
        units = AlignmentUnits.from_matrices(matrices, problem.dtype)
        sizes, a_stride, b_stride, _ = units.arguments(matrices)
        arguments = (a, b, parts, batch, sizes, a_stride, b_stride)
        options = gemm_options(problem, matrices, config)
        compute_parts = LaunchSpec(matmul_splitk, grid, arguments, options)
        return [*transpositions, compute_parts, add_parts_call(parts, c)]


def _parts_shape(problem: Gemm, config: SplitConfig) -> tuple[int, int, int, int]:
    return config.parts(problem), problem.batch, problem.m, problem.n
