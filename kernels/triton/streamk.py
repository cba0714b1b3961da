"""``triton-streamk``: CTAs share the K steps of the last waves evenly, so that no wave is partial.

Kernels with one CTA per tile compute the tiles in waves, and a partial last wave leaves SMs idle.
Here the K steps of the partial wave, and of the whole wave before it if there is one, are divided
evenly among the CTAs. CTA i takes the i-th run of consecutive steps, which may begin and end inside
a tile. All other tiles are computed whole. This scheme is the "two-tile" hybrid of Osama et al.
(Stream-K, arXiv 2301.03598).

If a run covers only part of a tile, the fp32 sum of this part goes to memory. A second kernel adds
the parts of each such tile in order, so that the result always has the same bits. No CTA waits for
another one, because on a MIG slice the two might never run at the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.config import StreamConfig, TileConfig, tile_count
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.problem import Gemm, Problem
from kernels.triton.blocks import grouped, matrix_stride, product, store
from kernels.triton.family import LaunchSpec
from kernels.triton.gemm import AlignmentUnits, GemmFamily, Matrices, gemm_options


@triton.jit
def run_begin(cta, steps, CTAS: tl.constexpr):
    """Return the index of the first K step of a CTA's run, among the ``steps`` of all runs."""
    return tl.cast(cta, tl.int64) * steps // CTAS


@triton.jit
def matmul_streamk(
    a_ptr, b_ptr, c_ptr, parts_ptr, tiles, streamed, sizes, a_stride, b_stride, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, UNITS: tl.constexpr, CTAS: tl.constexpr,
):  # fmt: skip
    """Compute C (batch, M, N) = A (batch, M, K) B (batch, K, N), except for tiles that CTAs share.

    The K steps of the first ``streamed`` tiles, out of ``tiles`` in all, are divided evenly among
    the CTAs. A CTA shares at most two tiles: the tile inside which its run of steps begins, and the
    tile inside which the run ends. The CTA's sums for these tiles go to ``parts`` (CTAS, 2, BM,
    BN), in this order. If the run begins and ends inside the same tile, only the first sum is
    stored. Units and options are as in :func:`kernels.triton.tiled.matmul_tiled`.
    """
    M, N, K = sizes[0] * UNITS[0], sizes[1] * UNITS[1], sizes[2] * UNITS[2]
    a_stride, b_stride = matrix_stride(a_stride, UNITS[3]), matrix_stride(b_stride, UNITS[3])
    c_stride = matrix_stride(c_stride, UNITS[4])
    rows, columns, depth = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    cta = tl.program_id(0)
    run_steps = tl.cast(streamed, tl.int64) * depth  # K steps of all runs together
    step, end = run_begin(cta, run_steps, CTAS), run_begin(cta + 1, run_steps, CTAS)
    # A CTA first computes the pieces of its run, one for each tile that it reaches, and then whole
    # tiles. A whole tile counts as one piece.
    run_pieces = tl.where(end > step, (end - 1) // depth - step // depth + 1, 0).to(tl.int32)
    pieces = run_pieces + (tiles - streamed) // CTAS
    # Addresses hoisted out of this loop would be held, and spilled, throughout the inner loop.
    for piece in tl.range(0, pieces, disable_licm=True):
        if piece < run_pieces:
            tile = (step // depth).to(tl.int32)
            first = (step % depth).to(tl.int32)
            last = min(first + end - step, depth).to(tl.int32)
            step += last - first
        else:
            tile = streamed + cta + (piece - run_pieces) * CTAS
            first = 0
            last = depth
        z = (tile // (rows * columns)).to(tl.int64)
        row, column = grouped(tile % (rows * columns), rows, columns, GROUP)
        m0, n0 = row * BM, column * BN
        total = product(
            a_ptr + z * a_stride[0], a_stride[1:], b_ptr + z * b_stride[0], b_stride[1:],
            m0, n0, first, last, M, N, K,
            BM, BN, BK, EVEN, EVEN_K, PRECISION, WIDE, UPCAST,
        )  # fmt: skip
        if last - first == depth:
            c_tile = c_ptr + z * c_stride[0]
            store(c_tile, c_stride[1:], m0, n0, total, M, N, BM, BN, EVEN, WIDE)
        else:
            # A run that has the first step of this tile, but not all of them, ends inside it.
            part = parts_ptr + tl.cast(2 * cta + (first == 0), tl.int64) * (BM * BN)
            tl.store(part + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :], total)


@triton.jit
def add_shared(
    parts_ptr, c_ptr, streamed, sizes, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr, CTAS: tl.constexpr,
):  # fmt: skip
    """Add the parts of the tiles that several CTAs share, and store the sums in C.

    The arguments are as in :func:`matmul_streamk`. The grid has CTAS − 1 programs. Program p adds
    the parts of a tile if CTA p + 1 has the first run that begins inside that tile.
    """
    M, N, K = sizes[0] * UNITS[0], sizes[1] * UNITS[1], sizes[2] * UNITS[2]
    c_stride = matrix_stride(c_stride, UNITS[4])
    rows, columns, depth = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    cta = tl.program_id(0) + 1
    run_steps = tl.cast(streamed, tl.int64) * depth  # K steps of all runs together
    begin = run_begin(cta, run_steps, CTAS)
    tile = (begin // depth).to(tl.int32)
    tile_begin, tile_end = begin - begin % depth, begin - begin % depth + depth
    if begin > tile_begin and run_begin(cta - 1, run_steps, CTAS) <= tile_begin:
        inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        # The previous CTA's run ends inside the tile, so its sum is the second part of that CTA.
        total = tl.load(parts_ptr + tl.cast(2 * cta - 1, tl.int64) * (BM * BN) + inside)
        # All other runs begin inside the tile, so their sums are the first parts of their CTAs.
        while begin < tile_end:
            following = run_begin(cta + 1, run_steps, CTAS)
            if following > begin:  # a CTA may have no steps if there are more CTAs than steps
                total += tl.load(parts_ptr + tl.cast(2 * cta, tl.int64) * (BM * BN) + inside)
            cta += 1
            begin = following
        z = (tile // (rows * columns)).to(tl.int64)
        row, column = grouped(tile % (rows * columns), rows, columns, GROUP)
        c_tile = c_ptr + z * c_stride[0]
        store(c_tile, c_stride[1:], row * BM, column * BN, total, M, N, BM, BN, EVEN, WIDE)


class TritonStreamK(GemmFamily):
    """Launcher of :func:`matmul_streamk` and of :func:`add_shared`."""

    name = "triton-streamk"
    shares_tail = True

    def candidates(self, problem: Problem, machine: Machine) -> list[TileConfig]:
        """Return each base tile with one CTA per SM, and also with two CTAs per SM if they fit."""
        configs: list[TileConfig] = []
        for tile in self.base_tiles(problem, machine, looped=True):
            configs.append(StreamConfig(**vars(tile), ctas=machine.sms))
            # Eight warps of 255 registers fill a register file, so only four-warp tiles fit twice.
            both_bytes = 2 * (tile.shared_bytes(problem.dtype, machine) + _RESERVED)
            if tile.warps == 4 and both_bytes <= machine.shared_sm_bytes:
                configs.append(StreamConfig(**vars(tile), ctas=2 * machine.sms))
        return configs

    def scratch(self, problem: Problem, config: TileConfig) -> tuple[int, ...]:
        """Return the shape of the parts, (ctas, 2, bm, bn); see :func:`matmul_streamk`."""
        assert isinstance(config, StreamConfig)
        return config.ctas, 2, config.bm, config.bn

    def calls(
        self, problem: Problem, operands: Operands, config: TileConfig, scratch: Tensor
    ) -> list[LaunchSpec]:
        """Return the launch of :func:`matmul_streamk`.

        If CTAs may share tiles, the launch of :func:`add_shared` follows.
        """
        assert isinstance(problem, Gemm)
        assert isinstance(config, StreamConfig)
        matrices = Matrices.from_operands(operands)
        batch, m, n, _ = matrices.sizes
        tiles = tile_count(m, n, config.bm, config.bn, batch)
        streamed = streamed_tiles(tiles, config.ctas)  # 0 where the tiles fill whole waves
        options = {**gemm_options(problem, matrices, config), "CTAS": config.ctas}
        units = AlignmentUnits.from_matrices(matrices, problem.dtype)
        sizes, a_stride, b_stride, c_stride = units.arguments(matrices)
        arguments = (*matrices, scratch, tiles, streamed, sizes, a_stride, b_stride, c_stride)
        calls = [LaunchSpec(matmul_streamk, (config.ctas,), arguments, options)]
        if streamed and config.ctas > 1:
            sum_arguments = (scratch, matrices.c, streamed, sizes, c_stride)
            # The sum has no loop over K, so it has no options that only such a loop needs.
            sum_options = {key: options[key] for key in options if key not in _ONLY_PRODUCT}
            # A tile can only be shared at a border between two CTAs' runs, so each border has one
            # program.
            calls.append(LaunchSpec(add_shared, (config.ctas - 1,), sum_arguments, sum_options))
        return calls


_RESERVED = 1024  # bytes of shared memory that CUDA reserves per CTA
_ONLY_PRODUCT = ("EVEN_K", "PRECISION", "UPCAST")


def streamed_tiles(tiles: int, ctas: int) -> int:
    """Return the number of tiles whose K steps are divided among the CTAs.

    These are the tiles of the partial last wave and of the whole wave before it, if there is one.
    The number is 0 if the tiles fill whole waves.
    """
    in_last_wave = tiles % ctas
    if in_last_wave and tiles > ctas:
        # With the whole wave added, a run is at least one tile long, so that few CTAs share a tile.
        return in_last_wave + ctas
    return in_last_wave
