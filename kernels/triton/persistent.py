"""``triton-persistent``: one CTA per SM walks over the tiles, and TMA copies whole blocks for it.

A kernel with one CTA per tile pays for the start of every tile: it computes pointers, fills an
empty pipeline and waits until the previous tile is written. Here a CTA stays on its SM for all of
its tiles. The Tensor Memory Accelerator (TMA, on Hopper and later) copies a block at a time and
needs to know only where the block begins. Threads spend no registers or instructions on the
addresses and masks of loads, and elements outside the matrix are read as zeros.

A TMA descriptor holds the address, sizes and strides of a matrix. The host builds the descriptors
of each operand set, and passes them as kernel parameters. Only a warp-specialised kernel
(``specialize=on``) builds the descriptors on the device, and therefore takes several microseconds
longer to start.

A kernel with plain loads takes the place of the TMA kernels if the config has ``tma=off``, as on
GPUs older than Hopper, or if TMA cannot read A or B (:func:`_tma_order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.config import Config, PersistentConfig, TileConfig, tile_count
from kernels.launch import Launch
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.operation import Workload
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Gemm, Problem
from kernels.triton.blocks import grouped, matrix_stride, product, store
from kernels.triton.family import LaunchSpec
from kernels.triton.gemm import (
    HOPPER_MAJOR,
    AlignmentUnits,
    GemmFamily,
    Matrices,
    gemm_options,
    read_alignment,
)

# Major versions of the compute capability.
_TMA_MAJOR = HOPPER_MAJOR  # Hopper and later GPUs have TMA
_BLACKWELL_MAJOR = 10  # datacentre Blackwell (sm_100)


@triton.jit
def make_descriptor(ptr, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                    TRANSPOSED: tl.constexpr):  # fmt: skip
    """Build, on the device, a TMA descriptor of a (rows, columns) matrix that begins at ``ptr``.

    ``stride`` is (batch, row, column) in elements; the batch stride is not used. If TRANSPOSED, the
    matrix is stored as (columns, rows). The stride of the last stored axis must be 1.
    """
    if TRANSPOSED:
        return tl.make_tensor_descriptor(ptr, [columns, rows], [stride[2], 1], [COLUMNS, ROWS])
    else:
        return tl.make_tensor_descriptor(ptr, [rows, columns], [stride[1], 1], [ROWS, COLUMNS])


@triton.jit
def fetch(matrix, z, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
          TRANSPOSED: tl.constexpr, BATCHED: tl.constexpr):  # fmt: skip
    """Load one block (ROWS, COLUMNS) through a TMA descriptor, with zeros outside the matrix.

    The block begins at (row, column) of matrix ``z`` of the batch; ``z`` is ignored unless BATCHED.
    If TRANSPOSED, the descriptor's last two axes are (columns, rows), as the matrix is stored.
    """
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
def put(matrix, z, row, column, total, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        BATCHED: tl.constexpr):  # fmt: skip
    """Store sums (ROWS, COLUMNS) as a block through a TMA descriptor, in the matrix's dtype.

    Sums outside the matrix are not stored.
    """
    result = total.to(matrix.dtype)
    if BATCHED:
        matrix.store([z, row, column], result.reshape(1, ROWS, COLUMNS))
    else:
        matrix.store([row, column], result)


@triton.jit
def matmul_persistent(
    a, b, c, batch, sizes, a_stride, b_stride, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, UNITS: tl.constexpr,
    A_T: tl.constexpr, B_T: tl.constexpr, STORE: tl.constexpr, HALVES: tl.constexpr,
    BATCHED: tl.constexpr, SPECIALIZE: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Compute C (batch, M, N) = A (batch, M, K) B (batch, K, N), with A and B read through TMA.

    Units are as in :func:`kernels.triton.tiled.matmul_tiled`.

    - A_T, B_T: the descriptor describes the stored transpose.
    - BATCHED: there are several matrices, so the descriptors have a batch axis.
    - STORE: C is stored through TMA, otherwise with plain stores.
    - HALVES: with STORE, a tile of C is stored as two blocks, each with half of the columns.
    - SPECIALIZE: the kernel is warp-specialised. It builds the descriptors from a, b and c, which
      are then pointers. Triton 3.7 divides the blocks of such a kernel among groups of warps, but
      cannot do so if the host built the descriptors.
    - FLATTEN: the loops over tiles and over K become one pipeline.

    The other options are as in :func:`kernels.triton.blocks.product` and
    :func:`kernels.triton.blocks.grouped`.
    """
    M, N, K = sizes[0] * UNITS[0], sizes[1] * UNITS[1], sizes[2] * UNITS[2]
    if SPECIALIZE:
        a = make_descriptor(a, matrix_stride(a_stride, UNITS[3]), M, K, BM, BK, A_T)
        b = make_descriptor(b, matrix_stride(b_stride, UNITS[3]), K, N, BK, BN, B_T)
        if STORE:
            c = make_descriptor(c, matrix_stride(c_stride, UNITS[4]), M, N, BM, BN, False)
    c_stride = matrix_stride(c_stride, UNITS[4])
    rows, columns, steps = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    tiles = batch * rows * columns
    # SPECIALIZE and FLATTEN exclude each other: with both, Triton 3.7 silently drops SPECIALIZE.
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
        if not STORE:
            c_tile = c + z.to(tl.int64) * c_stride[0]
            store(c_tile, c_stride[1:], m0, n0, total, M, N, BM, BN, False, WIDE)
        elif HALVES:
            # The second half is stored from the shared memory that the first one has left, which
            # makes room for another stage of the pipeline.
            half: tl.constexpr = BN // 2
            first, second = tl.split(total.reshape(BM, 2, half).permute(0, 2, 1))
            put(c, z, m0, n0, first, BM, half, BATCHED)
            put(c, z, m0, n0 + half, second, BM, half, BATCHED)
        else:
            put(c, z, m0, n0, total, BM, BN, BATCHED)


@triton.jit
def matmul_persistent_plain(
    a_ptr, b_ptr, c_ptr, batch, sizes, a_stride, b_stride, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Compute the GEMM of :func:`matmul_persistent` with plain loads, for any strides.

    Units and options are as in :func:`kernels.triton.tiled.matmul_tiled`.
    """
    M, N, K = sizes[0] * UNITS[0], sizes[1] * UNITS[1], sizes[2] * UNITS[2]
    a_stride, b_stride = matrix_stride(a_stride, UNITS[3]), matrix_stride(b_stride, UNITS[3])
    c_stride = matrix_stride(c_stride, UNITS[4])
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tiles = batch * rows * columns
    # Addresses hoisted out of this loop would be held, and spilled, throughout the inner loop.
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
    """Launcher of :func:`matmul_persistent` and :func:`matmul_persistent_plain`."""

    name = "triton-persistent"

    def candidates(self, problem: Problem, machine: Machine) -> list[TileConfig]:
        """Return the variants of each tile, all with one CTA per SM.

        A tile is large if it has at least 128×128 elements. Only a large tile may have a
        specialised variant, in which one warp does nothing but copy. The time model gives the
        variants of a tile the same time, so the first in the list is preferred.

        For tiles above 128×128, the preferred variant stores the result in halves, if this saves
        enough shared memory for another stage. In tf32 on sm_100, the halves take two buffers
        instead of one, so they save no memory. With TMA, large tiles also have a variant whose
        loops over tiles and over K are not fused. An iteration of the loop over K then has fewer
        instructions, but nothing is copied while a tile is stored.

        Hopper and datacentre Blackwell multiply tf32 only if K is contiguous in shared memory. TMA
        cannot transpose an operand, so on these GPUs, tf32 layouts other than ``nt`` use the kernel
        with plain loads.

        Specialised tf32 tiles above 128×128 spill on sm_100, so they are left out on all GPUs. If
        the rows of C are misaligned, specialised tiles are used only on sm_90, because they spill
        on other GPUs.
        """
        assert isinstance(problem, Gemm)
        # 1. Decide what the problem and the machine allow, for all tiles.
        tf32 = problem.dtype == "tf32"
        must_transpose = tf32 and problem.layout != "nt" and machine.multiplies_from_shared
        rows_are_aligned = read_alignment(problem) == WIDE_BYTES
        tma = machine.major >= _TMA_MAJOR and rows_are_aligned and not must_transpose
        # TMA cannot store a C with misaligned rows, which is then written with plain stores.
        plain_stores = problem.n * DTYPE_BYTES[problem.dtype] % WIDE_BYTES > 0
        may_halve = tma and not plain_stores and not (tf32 and machine.major == _BLACKWELL_MAJOR)
        has_registers = not plain_stores or machine.major == HOPPER_MAJOR
        # fp32 has no Tensor Cores to keep busy. The descriptors that a specialised kernel builds
        # describe a single matrix, so there must be no batch.
        may_specialise = tma and problem.dtype != "fp32" and problem.batch == 1 and has_registers
        # 2. List the variants of each tile, the preferred one first.
        configs: list[TileConfig] = []
        for tile in self.base_tiles(problem, machine, looped=not tma or plain_stores):
            is_above_128_squared = tile.bm * tile.bn > 128 * 128
            is_large = tile.bm * tile.bn >= 128 * 128
            whole = PersistentConfig(**vars(tile), ctas=machine.sms, tma=tma)
            whole = whole.fitted(problem.dtype, machine)
            variants = [whole]
            halves = replace(whole, halves=True, stages=whole.stages + 1)
            if may_halve and is_above_128_squared and not halves.invalid(problem.dtype, machine):
                variants.insert(0, halves)
            if tma and is_large:
                variants.append(replace(variants[0], flatten=False))
            would_spill = tf32 and is_above_128_squared
            has_loop = problem.k > tile.bk
            if may_specialise and is_large and has_loop and not would_spill:
                # Two groups of warps multiply. With four warps each, they have as many as the other
                # variants, which have eight.
                variants.append(replace(whole, specialize=True, warps=4))
            configs += variants
        return configs

    def prepare(
        self, problem: Workload, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        """Return a launch that computes the problem on any of the operand sets.

        The requirements are those of :meth:`kernels.triton.family.TritonFamily.prepare`.
        """
        launch = super().prepare(problem, operand_sets, config)
        if not isinstance(config, PersistentConfig) or not config.specialize:
            return launch

        def bare(index: int) -> Tensor:
            # A specialised kernel needs memory for the descriptors that it builds on the device.
            triton.set_allocator(_allocate)  # the allocator is per thread, so every launch sets it
            return launch.bare(index)

        return Launch(bare, launch.sets)

    def calls(
        self, problem: Problem, operands: Operands, config: TileConfig, scratch: Tensor
    ) -> list[LaunchSpec]:
        """Return one launch of ``ctas`` CTAs, or of fewer if there are fewer tiles."""
        assert isinstance(problem, Gemm)
        assert isinstance(config, PersistentConfig)
        matrices = Matrices.from_operands(operands)
        batch, m, n, _ = matrices.sizes
        grid = (min(config.ctas, tile_count(m, n, config.bm, config.bn, batch)),)
        options = gemm_options(problem, matrices, config)
        sizes, *strides = AlignmentUnits.from_matrices(matrices, problem.dtype).arguments(matrices)
        # 1. Use plain loads if TMA is off, or cannot read A or B because of an offset or a stride.
        a_order = _tma_order(matrices.a)
        b_order = _tma_order(matrices.b)
        c_order = _tma_order(matrices.c)
        if not config.tma or a_order is None or b_order is None:
            arguments = (*matrices, batch, sizes, *strides)
            return [LaunchSpec(matmul_persistent_plain, grid, arguments, options)]
        # 2. Otherwise describe the matrices for TMA. A specialised kernel does so on the device.
        a, b, c = matrices
        described: tuple[Any, ...] = (a, b, c)
        if not config.specialize:
            described = (
                _describe(a, config.bm, config.bk),
                _describe(b, config.bk, config.bn),
                _describe(c, config.bm, config.stored_columns) if c_order == "n" else c,
            )
        arguments = (*described, batch, sizes, *strides)
        # 3. Set the kernel's compile-time options.
        # TMA reads zeros outside the matrix, so this kernel has no masks to leave out.
        for name in ("EVEN", "EVEN_K"):
            del options[name]
        options |= {
            "A_T": a_order == "t",
            "B_T": b_order == "t",
            "STORE": c_order == "n",
            "HALVES": config.halves,
            "BATCHED": batch > 1,
            "SPECIALIZE": config.specialize,
            "FLATTEN": config.flatten and not config.specialize,
        }
        if config.specialize:
            del options["maxnreg"]  # the compiler then sets the registers per warp group
        return [LaunchSpec(matmul_persistent, grid, arguments, options)]


def _describe(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a TMA descriptor for reading or writing a matrix in blocks of ``rows`` × ``columns``.

    The first dimension of ``matrix`` is the batch. If the batch size is 1, the descriptor has no
    batch dimension. If the matrix is stored transposed, the descriptor describes the transpose.
    """
    if _tma_order(matrix) == "t":
        matrix, rows, columns = matrix.mT, columns, rows
    shape = [*matrix.shape]
    stride = [*matrix.stride()]
    block = [1, rows, columns]
    if matrix.shape[0] == 1:
        shape, stride, block = shape[1:], stride[1:], block[1:]
    return TensorDescriptor(matrix, shape, stride, block)


def _tma_order(matrix: Tensor) -> str | None:
    """Return ``n`` for a matrix that is stored row by row, or ``t`` for one stored transposed.

    The result is None if TMA cannot access the matrix. TMA needs contiguous rows or columns, and
    the first element, each matrix of the batch and each contiguous row or column must start at a
    multiple of 16 bytes.
    """
    element_bytes = matrix.element_size()
    batch_stride, row_stride, column_stride = matrix.stride()
    if matrix.data_ptr() % WIDE_BYTES:
        return None
    if matrix.shape[0] > 1 and batch_stride * element_bytes % WIDE_BYTES:
        return None
    if column_stride == 1 and row_stride * element_bytes % WIDE_BYTES == 0:
        return "n"
    if row_stride == 1 and column_stride * element_bytes % WIDE_BYTES == 0:
        return "t"
    return None


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate ``size`` bytes of GPU memory for Triton, which calls this function at a launch."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
