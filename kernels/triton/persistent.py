"""``triton-persistent``: one CTA per SM walks over the tiles, and TMA copies whole blocks for it.

A plain kernel pays for the start of every tile: pointers, an empty pipeline, the write of the one
before. Here a CTA stays for all its tiles. The Tensor Memory Accelerator (Hopper and later) copies
a block at a time, told only where it begins: no thread spends registers or instructions on
addresses and masks, and what lies outside the matrix arrives as zeros. With ``specialize`` a warp
of its own only copies while the others only multiply, so that the copies of the next tile run
through the epilogue of this one; without it the two loops are fused into one pipeline.

TMA describes matrices with 16-byte rows, one dimension contiguous. Others, and other GPUs, are
read with plain loads; ``tma=off`` asks for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.config import Config, PersistentConfig, TileConfig, tile_count
from kernels.launch import Launch
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.operation import Workload
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Gemm, Problem
from kernels.triton.blocks import grouped, matrix_stride, product, store
from kernels.triton.family import Call
from kernels.triton.gemm import GemmFamily, Matrices, Units, gemm_options, read_alignment

TMA_CAPABILITY = (9, 0)


@triton.jit
def described(ptr, stride, batch, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              TRANSPOSED: tl.constexpr, BATCHED: tl.constexpr):  # fmt: skip
    """TMA's description of (batch, rows, columns) in blocks of ROWS × COLUMNS, as it is stored.

    One matrix is described in two dimensions: Triton 3.7 cannot specialise warps over three.
    """
    OUTER: tl.constexpr = COLUMNS if TRANSPOSED else ROWS
    INNER: tl.constexpr = ROWS if TRANSPOSED else COLUMNS
    if TRANSPOSED:
        outer, inner, outer_stride = columns, rows, stride[2]
    else:
        outer, inner, outer_stride = rows, columns, stride[1]
    if BATCHED:
        return tl.make_tensor_descriptor(
            ptr, [batch, outer, inner], [stride[0], outer_stride, 1], [1, OUTER, INNER]
        )
    else:
        return tl.make_tensor_descriptor(ptr, [outer, inner], [outer_stride, 1], [OUTER, INNER])


@triton.jit
def fetch(matrix, z, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
          TRANSPOSED: tl.constexpr, BATCHED: tl.constexpr):  # fmt: skip
    """One block (ROWS, COLUMNS) of a described matrix; zeros where it has no elements."""
    if TRANSPOSED:
        if BATCHED:
            return matrix.load([z, column, row]).reshape(COLUMNS, ROWS).T
        else:
            return matrix.load([column, row]).T
    else:
        if BATCHED:
            return matrix.load([z, row, column]).reshape(ROWS, COLUMNS)
        else:
            return matrix.load([row, column])


@triton.jit
def matmul_persistent(
    a_ptr, b_ptr, c_ptr, batch, sizes, a_stride, b_stride, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, UNITS: tl.constexpr,
    A_T: tl.constexpr, B_T: tl.constexpr, STORE: tl.constexpr,
    BATCHED: tl.constexpr, SPECIALIZE: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """C (batch, M, N) = A (batch, M, K) B (batch, K, N), read by TMA.

    A_T, B_T: stored as the transpose. STORE: C can be described, too. Units as in
    :func:`kernels.triton.tiled.matmul_tiled`.
    """
    M, N, K = sizes[0] * UNITS[0], sizes[1] * UNITS[1], sizes[2] * UNITS[2]
    a_stride, b_stride = matrix_stride(a_stride, UNITS[3]), matrix_stride(b_stride, UNITS[3])
    c_stride = matrix_stride(c_stride, UNITS[4])
    a = described(a_ptr, a_stride, batch, M, K, BM, BK, A_T, BATCHED)
    b = described(b_ptr, b_stride, batch, K, N, BK, BN, B_T, BATCHED)
    if STORE:
        c = described(c_ptr, c_stride, batch, M, N, BM, BN, False, BATCHED)
    rows, columns, steps = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    tiles = batch * rows * columns
    # Specialised and fused loops exclude each other: Triton 3.7 drops the first without a word.
    for tile in tl.range(
        tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        z = tile // (rows * columns)
        row, column = grouped(tile % (rows * columns), rows, columns, GROUP)
        m0, n0 = row * BM, column * BN
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(steps):
            left = fetch(a, z, m0, step * BK, BM, BK, A_T, BATCHED)
            right = fetch(b, z, step * BK, n0, BK, BN, B_T, BATCHED)
            if UPCAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        if STORE:
            result = total.to(c_ptr.dtype.element_ty)
            if BATCHED:
                c.store([z, m0, n0], result.reshape(1, BM, BN))
            else:
                c.store([m0, n0], result)
        else:
            c_tile = c_ptr + z.to(tl.int64) * c_stride[0]
            store(c_tile, c_stride[1:], m0, n0, total, M, N, BM, BN, False, WIDE)


@triton.jit
def matmul_persistent_plain(
    a_ptr, b_ptr, c_ptr, batch, sizes, a_stride, b_stride, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The same with plain loads, any strides."""
    M, N, K = sizes[0] * UNITS[0], sizes[1] * UNITS[1], sizes[2] * UNITS[2]
    a_stride, b_stride = matrix_stride(a_stride, UNITS[3]), matrix_stride(b_stride, UNITS[3])
    c_stride = matrix_stride(c_stride, UNITS[4])
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = batch * rows * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), disable_licm=True):
        z = (tile // (rows * columns)).to(tl.int64)
        row, column = grouped(tile % (rows * columns), rows, columns, GROUP)
        m0, n0 = row * BM, column * BN
        total = product(
            a_ptr + z * a_stride[0], a_stride[1:], b_ptr + z * b_stride[0], b_stride[1:],
            m0, n0, 0, tl.cdiv(K, BK), M, N, K,
            BM, BN, BK, EVEN, EVEN_K, PRECISION, WIDE, UPCAST,
        )  # fmt: skip
        c_tile = c_ptr + z * c_stride[0]
        store(c_tile, c_stride[1:], m0, n0, total, M, N, BM, BN, EVEN, WIDE)


class TritonPersistent(GemmFamily):
    """The launcher of :func:`matmul_persistent`."""

    name = "triton-persistent"

    def candidates(self, problem: Problem, machine: Machine) -> list[TileConfig]:
        """Each tile with one CTA per SM; the large ones also with a warp that only copies.

        Where tf32 is not K-major in memory, the compiler transposes it in shared memory on its way
        to the Tensor Cores: room for two stages is reserved for that, and no warp is specialised,
        which Triton 3.7 then fails to compile. With specialisation, tf32 tiles above 128×128 spill
        on sm_100, as do all tiles where rows of C are odd, except on sm_90; and a single K step
        leaves no loop to specialise.
        """
        assert isinstance(problem, Gemm)
        tma = machine.capability is not None and machine.capability >= TMA_CAPABILITY
        tma = tma and read_alignment(problem) == WIDE_BYTES
        odd = problem.n * DTYPE_BYTES[problem.dtype] % WIDE_BYTES > 0  # C is written plainly
        tf32 = problem.dtype == "tf32"
        transpose_stages = 2 if tma and tf32 and problem.layout != "nt" else 0
        specialised = (
            tma and problem.dtype != "fp32" and problem.batch == 1 and not transpose_stages
        )
        specialised = specialised and (not odd or machine.capability == (9, 0))
        configs = []
        for tile in self.base_tiles(problem, machine, looped=not tma or odd):
            config = PersistentConfig(**vars(tile), ctas=machine.sms, tma=tma)
            configs.append(config)
            area = tile.bm * tile.bn
            large = area == 128 * 128 or (area > 128 * 128 and not tf32)
            if specialised and large and problem.k > tile.bk:
                configs.append(replace(config, specialize=True, warps=4))
        # fitted() does not account for the transposes: count their room as stages while it cuts
        # stages to fit shared memory, and take them off again afterwards.
        enlarged = (replace(c, stages=c.stages + transpose_stages) for c in configs)
        fitted = (config.fitted(problem.dtype, machine) for config in enlarged)
        return [replace(config, stages=config.stages - transpose_stages) for config in fitted
                if config.stages - transpose_stages >= 2]  # fmt: skip

    def prepare(
        self, problem: Workload, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        """Also give Triton an allocator, because TMA descriptors are written to device memory."""
        launch = super().prepare(problem, operand_sets, config)

        def bare(index: int) -> Tensor:
            triton.set_allocator(_allocate)  # per thread, so set again in whichever one launches
            return launch.bare(index)

        return Launch(bare, launch.sets)

    def calls(
        self, problem: Problem, operands: Operands, config: TileConfig, scratch: Tensor
    ) -> list[Call]:
        """One launch of ``ctas`` CTAs, or of as many as there are tiles."""
        assert isinstance(problem, Gemm)
        assert isinstance(config, PersistentConfig)
        matrices = Matrices.of(operands)
        batch, m, n, _ = matrices.sizes
        grid = (min(config.ctas, tile_count(m, n, config.bm, config.bn, batch)),)
        options = gemm_options(problem, matrices, config)
        arguments = (*matrices, batch, *Units.of(matrices, problem.dtype).arguments(matrices))
        a, b, c = (_tma_order(matrix) for matrix in matrices)
        # Decided by the operands at hand as well: an offset or stride may rule TMA out.
        if not config.tma or a is None or b is None:
            return [Call(matmul_persistent_plain, grid, arguments, options)]
        # TMA reads zeros outside the matrix, so this kernel has no masks to leave out.
        for name in ("EVEN", "EVEN_K"):
            del options[name]
        options |= {
            "A_T": a == "t",
            "B_T": b == "t",
            "STORE": c == "n",
            "BATCHED": batch > 1,
            "SPECIALIZE": config.specialize,
            "FLATTEN": not config.specialize,
        }
        if config.specialize:
            del options["maxnreg"]  # the compiler then sets the registers per warp group
        return [Call(matmul_persistent, grid, arguments, options)]


def _tma_order(matrix: Tensor) -> str | None:
    """How TMA can read a (batch, rows, columns) matrix: ``n``, ``t`` (transposed) or not at all."""
    bytes_ = matrix.element_size()
    start, (z, row, column) = matrix.data_ptr(), matrix.stride()
    if start % WIDE_BYTES or (matrix.shape[0] > 1 and z * bytes_ % WIDE_BYTES):
        return None
    if column == 1 and row * bytes_ % WIDE_BYTES == 0:
        return "n"
    if row == 1 and column * bytes_ % WIDE_BYTES == 0:
        return "t"
    return None


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
