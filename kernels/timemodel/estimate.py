"""Time of a problem from its shape, a tile and the machine's facts: one formula, NumPy only.

    time = launch + helpers + slowed((work⁴ + intake⁴ + memory⁴)^¼)
    work = waves × (K steps × (compute⁴ + feed⁴ + latency⁴)^¼ + epilogue)

In a K step, ``compute`` is the time of the tile's arithmetic on its SM, ``feed`` the time to read
its blocks, and ``latency`` the minimum of a step however small the tile. ``intake`` is the time in
which all tiles together read from the L2. ``memory`` is the traffic of the device's memory over the
bandwidth that the active CTAs can draw. ``helpers`` are kernels before and after: changes of
layout, the transforms of Winograd, the quantising of fp8's A. ``slowed`` lengthens long kernels,
which run into the power limit.

The fourth power lets the largest term win and rounds the corner where two terms are equal. A plain
maximum, a sum and other powers were worse on public H100 and A100 tables. The choice of a Triton
config and the calibrated model of ``analysis`` both call this formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.config import ceil_div, library_tiles, tail_efficiency, tile_count, tile_efficiency
from kernels.machine import Machine
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Conv, Gemm, Problem
from kernels.timemodel.constants import Constants

Array = NDArray[np.float64]

LIMITS = ("launch", "compute", "feed", "latency", "memory")
"""Names of what can limit a time.

- ``launch``: the launch.
- ``compute``: the arithmetic.
- ``feed``: the reads of one SM, or of all SMs from the shared L2.
- ``latency``: the latency of K steps that are too small to hide it.
- ``memory``: the device's memory.
"""

SPLITS = (1, 2, 4, 8, 16)
"""Parts into which a library may split K. Powers of two up to 16 reduced the error most."""

ALGORITHMS = {"implicit-gemm": 0, "winograd-2x2": 2, "winograd-4x4": 4}
"""Algorithms of a convolution, with the outputs along a side of Winograd's tile."""

_STEP_BYTES = 128  # bytes of K in a step of a tile: 64 elements of 16 bits, as in vendor kernels
_MIN_STEPS = 2  # a split that leaves fewer K steps to a CTA is never chosen
_SPLIT_WAVES = 1  # no split where the largest tiles already fill more waves than this
_SLOW_SECONDS = 2e-3  # a kernel this long begins to feel the power limit
_RESIDENT_SHARE = 0.8  # share of the last-level cache that an operand may fill and stay resident
_CHUNK = 2048  # shapes at a time, so that shapes × candidates stay in the L2 cache of a core


@dataclass(frozen=True)
class Shapes:
    """Problems as arrays, one element per problem; as columns, they broadcast against tiles."""

    m: Array
    n: Array
    k: Array
    batch: Array
    element: Array  # bytes of an element
    bytes: Array  # minimum traffic of the GEMM itself
    first: Array  # bytes of A in one GEMM of the batch; 0 for a convolution
    density: Array  # useful share of the m·n·k multiply-adds
    alignment: Array  # bytes that divide every row, at most 16
    helper_kernels: Array  # kernels before and after the GEMM
    helper_bytes: Array  # bytes that they move
    cached: Array  # 1 where the operands are in the last-level cache, 0 where in memory
    sustained: Array  # 1 where the machine never pauses, 0 for bursts

    def __len__(self) -> int:
        return len(self.m)

    @classmethod
    def from_problems(
        cls,
        problems: Sequence[Problem],
        cached: Sequence[bool] | None = None,
        sustained: Sequence[bool] | None = None,
        algorithm: str = "implicit-gemm",
    ) -> Shapes:
        """Read the arrays from problems; a convolution is the GEMM of an algorithm.

        If Winograd's algorithm cannot be used, the convolution is its implied GEMM instead.
        """
        read = [_shape_row(problem, ALGORITHMS[algorithm]) for problem in problems]
        rows = np.array(read, dtype=np.float64).reshape(-1, 11)  # also without any problem
        flags = (
            np.zeros(len(problems)) if flag is None else np.asarray(flag, dtype=np.float64)
            for flag in (cached, sustained)
        )
        return cls(*rows.T, *flags)

    def take(self, where: Any) -> Shapes:
        """Return the shapes at ``where``: a slice, an index array or ``np.newaxis`` expressions."""
        return Shapes(*(getattr(self, f.name)[where] for f in fields(self)))

    def where(self, other: Shapes, condition: NDArray[np.bool_]) -> Shapes:
        """Return ``other`` where the condition holds, and these shapes elsewhere."""
        return Shapes(*_choose_fields(self, other, condition))


def _shape_row(problem: Problem, tile: int) -> tuple[float, ...]:
    """Return a problem's row of :class:`Shapes`; ``tile`` is Winograd's, or 0 without Winograd."""
    element = DTYPE_BYTES[problem.dtype]
    if isinstance(problem, Gemm):
        first = problem.operand_elements[0] * element
        quantised = problem.quantising_bytes
        return _row(
            problem,
            problem,
            problem.bytes,
            first=first,
            helper_kernels=int(quantised > 0),
            helper_bytes=quantised,
        )
    winograd = problem.winograd_gemm(tile) if tile else None
    if winograd is not None:
        return _winograd_row(problem, winograd, tile)
    x, _, y = problem.operand_elements
    # Tensor Core kernels compute channels last. Activations in another layout are transposed before
    # and after, by one kernel each that reads and writes them once.
    is_transposed = problem.layout == "nchw" and problem.dtype != "fp32"
    helper_kernels, helper_bytes = (2, 2 * (x + y) * element) if is_transposed else (0, 0)
    gemm = problem.implied_gemm
    density = problem.flops / gemm.flops
    return _row(
        problem,
        gemm,
        problem.bytes,
        density,
        helper_kernels=helper_kernels,
        helper_bytes=helper_bytes,
    )


def _winograd_row(conv: Conv, gemm: Gemm, tile: int) -> tuple[float, ...]:
    """Return the row of a convolution by Winograd's algorithm.

    F(2 × 2) is one kernel, which transforms input and result inside, after a kernel that transforms
    the filters. F(4 × 4) is four kernels, and the transformed tensors go through memory.
    """
    x, filters, y = conv.operand_elements
    points = gemm.batch
    weights = points * gemm.k * gemm.n
    if tile == 2:
        traffic, helper_kernels, helper_bytes = x + weights + y, 1, filters + weights
    else:
        traffic, helper_kernels = points * gemm.m * (gemm.k + gemm.n) + weights, 3
        helper_bytes = traffic + x + filters + y
    element = DTYPE_BYTES[conv.dtype]
    return _row(
        conv,
        gemm,
        traffic * element,
        helper_kernels=helper_kernels,
        helper_bytes=helper_bytes * element,
    )


def priced_alignment(problem: Problem) -> int:
    """Return the bytes, at most 16, that divide the rows whose misalignment costs time.

    A matrix-vector multiplication costs the same whether the rows of its output are aligned or not
    (results/accuracy/misalignment.json), so only the rows of its operands count.
    """
    if isinstance(problem, Gemm) and min(problem.m, problem.n) == 1 and problem.layout[1] == "t":
        problem = replace(problem, n=WIDE_BYTES)  # whose rows are aligned in every dtype
    return problem.alignment


def _row(
    problem: Problem,
    gemm: Gemm,
    traffic: int,
    density: float = 1.0,
    first: int = 0,
    helper_kernels: int = 0,
    helper_bytes: int = 0,
) -> tuple[float, ...]:
    """Return the first eleven fields of :class:`Shapes` for a problem, in their order.

    Args:
        problem: the problem.
        gemm: the GEMM that computes it.
        traffic: minimum traffic of that GEMM, in bytes.
        density: useful share of its multiply-adds.
        first: bytes of A in one GEMM of the batch; 0 for a convolution.
        helper_kernels: number of kernels before and after the GEMM.
        helper_bytes: bytes that they move.
    """
    return (
        gemm.m,
        gemm.n,
        gemm.k,
        gemm.batch,
        DTYPE_BYTES[problem.dtype],
        traffic,
        first,
        density,
        priced_alignment(problem),
        helper_kernels,
        helper_bytes,
    )


@dataclass(frozen=True)
class Tiles:
    """Tiles as arrays: rows, columns, and the parts that K is split into."""

    bm: Array
    bn: Array
    split: Array

    @classmethod
    def library(cls, machine: Machine, dtype: str) -> Tiles:
        """Return every tile that the vendor library has for a machine and a dtype, with K whole."""
        pairs = np.array(library_tiles(machine.generation, dtype), dtype=np.float64)
        return cls(pairs[:, 0], pairs[:, 1], np.ones(len(pairs)))


@dataclass(frozen=True)
class Estimate:
    """Times in seconds and their parts, one element per problem."""

    time: Array
    launch: Array
    compute: Array
    feed: Array
    latency: Array
    memory: Array
    bm: Array
    bn: Array
    split: Array
    tiles: Array
    waves: Array
    tile_efficiency: Array
    tail_efficiency: Array
    bytes: Array  # predicted device traffic
    algorithm: Array  # index into ALGORITHMS; 0 for a GEMM

    @property
    def limit(self) -> NDArray[np.intp]:
        """Index into :data:`LIMITS` of the largest part."""
        seconds = np.stack([getattr(self, name) for name in LIMITS])
        return np.argmax(seconds, axis=0)

    def where(self, other: Estimate, condition: NDArray[np.bool_]) -> Estimate:
        """Return ``other`` where the condition holds, and this estimate elsewhere."""
        return Estimate(*_choose_fields(self, other, condition))


def _choose_fields(one: Any, other: Any, condition: NDArray[np.bool_]) -> list[Array]:
    """Return the arrays of ``other`` where the condition holds, and those of ``one`` elsewhere."""
    names = [f.name for f in fields(one)]
    return [np.where(condition, getattr(other, name), getattr(one, name)) for name in names]


def estimate(shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants) -> Estimate:
    """Estimate the time of each shape on its tile, with all parts.

    Args:
        shapes: the problems.
        tiles: tiles, one per problem.
        machine: machine whose SM count, bandwidth and cache are used.
        peak: FLOP/s of the dtype on the whole machine.
        c: the constants.
    """
    work = _work(shapes, tiles, machine, peak, c)
    memory = _memory_seconds(shapes, tiles, work.count, machine, c)
    launch = c.launch + c.split * ((tiles.split > 1) + shapes.helper_kernels)
    helpers = shapes.helper_bytes / (machine.bandwidth * c.dram)
    busy = _norm4(work.total, work.intake, memory)
    slowed = _slow_long_kernels(busy, c)
    slowdown = np.divide(slowed, busy)  # the parts are reported as they are in the slowed kernel
    return Estimate(
        time=launch + helpers + slowed,
        launch=launch + np.zeros_like(busy),
        compute=(work.waves * (work.steps * work.compute + work.epilogue)) * slowdown,
        feed=np.maximum(work.waves * work.steps * work.feed, work.intake) * slowdown,
        latency=work.waves * work.steps * work.latency * slowdown,
        memory=memory * slowdown + helpers,
        bm=tiles.bm,
        bn=tiles.bn,
        split=tiles.split,
        tiles=work.count,
        waves=ceil_div(work.count, machine.sms),
        tile_efficiency=tile_efficiency(shapes.m, shapes.n, tiles.bm, tiles.bn),
        tail_efficiency=tail_efficiency(work.count, machine.sms),
        bytes=shapes.bytes + shapes.helper_bytes + _partial_bytes(shapes, tiles),
        algorithm=np.zeros(len(shapes)),
    )


def fastest(shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants) -> Estimate:
    """Estimate each shape on its fastest candidate, which is what a good library would pick.

    Candidates are the ``tiles`` and, on a GPU, each of them with K split (:data:`SPLITS`).
    """
    best = Tiles(*np.empty((3, len(shapes))))
    for start in range(0, len(shapes), _CHUNK):
        part = slice(start, start + _CHUNK)
        times, split = candidate_times(shapes.take(part), tiles, machine, peak, c)
        tile = np.argmin(times, axis=1)
        best.bm[part], best.bn[part] = tiles.bm[tile], tiles.bn[tile]
        best.split[part] = split[np.arange(len(tile)), tile]
    return estimate(shapes, best, machine, peak, c)


def candidate_times(
    shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants
) -> tuple[Array, Array]:
    """Return the seconds of every shape (rows) on every tile (columns), and the split of K.

    Each tile has the split that is best for the shape. The slowing of long kernels is left out: it
    is monotonic, so it changes no ranking.
    """
    # 1. Time every candidate with K whole.
    columns = shapes.take((slice(None), np.newaxis))
    times = _busy_seconds(columns, tiles, machine, peak, c)
    split = np.ones_like(times)
    if machine.kind == "cpu":
        return times, split
    # 2. Select the shapes with few tiles: splitting K pays only for those.
    largest = int(np.argmax(tiles.bm * tiles.bn))
    tile_counts = tile_count(shapes.m, shapes.n, tiles.bm[largest], tiles.bn[largest], shapes.batch)
    rows = np.flatnonzero(tile_counts <= _SPLIT_WAVES * machine.sms)
    if not len(rows):
        return times, split
    # 3. Time every split of these shapes, and keep it where it is possible and faster.
    few_tiles = columns.take((rows, slice(None)))
    best_seconds, best_parts = times[rows], split[rows]
    for parts in SPLITS[1:]:
        split_tiles = replace(tiles, split=np.array(float(parts)))
        seconds = c.split + _busy_seconds(few_tiles, split_tiles, machine, peak, c)
        # K must be long enough, and a kernel for misaligned rows must be able to split it.
        possible = few_tiles.k * few_tiles.element >= _STEP_BYTES * _MIN_STEPS * parts
        possible &= (few_tiles.alignment >= WIDE_BYTES) | (c.fallback_split >= 0.5)
        better = possible & (seconds < best_seconds)
        best_seconds = np.where(better, seconds, best_seconds)
        best_parts = np.where(better, float(parts), best_parts)
    times[rows], split[rows] = best_seconds, best_parts
    return times, split


def _busy_seconds(
    shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants
) -> Array:
    """Return the seconds that the machine works on each shape, without launch and slowing."""
    work = _work(shapes, tiles, machine, peak, c)
    return _norm4(work.total, work.intake, _memory_seconds(shapes, tiles, work.count, machine, c))


@dataclass(frozen=True)
class _Work:
    """Work of the SMs; ``compute``, ``feed`` and ``latency`` are seconds of one K step."""

    count: Array
    waves: Array
    steps: Array
    compute: Array
    feed: Array
    latency: Array
    epilogue: Array
    total: Array
    intake: Array


def _work(shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants) -> _Work:
    """Return the work of the SMs: waves of tiles, each with K steps and an epilogue.

    ``shapes`` and ``tiles`` broadcast, so that a column of shapes meets a row of candidates.
    """
    # 1. Count the tiles, their waves and the K steps of a tile.
    count = tile_count(shapes.m, shapes.n, tiles.bm, tiles.bn, shapes.batch, tiles.split)
    waves = _wave_count(count / machine.sms, c)
    depth = _STEP_BYTES / shapes.element
    steps = ceil_div(shapes.k, depth * tiles.split)
    # 2. Time the arithmetic of a K step. Most batches of shapes share dtype and alignment: then
    # these factors are one number per tile and the shapes × tiles array is not built for them.
    misaligned = (WIDE_BYTES / shapes.alignment) ** c.misalignment
    rate = peak / machine.sms * c.compute * np.where(shapes.sustained > 0, c.sustained, 1.0)
    compute = (
        tiles.bm * tiles.bn * _scalar_if_uniform(2 * depth * shapes.density * misaligned / rate)
    )
    # 3. Time the loads of a K step and its latency, which are longer without bulk copies.
    fallback = np.where(shapes.alignment < WIDE_BYTES, 1 + c.fallback, 1.0)
    loading = np.maximum(misaligned, fallback)
    feed = (tiles.bm + tiles.bn) * _scalar_if_uniform(_STEP_BYTES * loading / c.feed)
    latency = _scalar_if_uniform(c.step * fallback)
    step = _norm4(compute, feed, latency)
    # 4. Add the K steps, the epilogue and the waves.
    epilogue = c.epilogue + tiles.bm * tiles.bn * _scalar_if_uniform(shapes.element / c.store)
    total = waves * (steps * step + epilogue)
    # 5. Time the reads from the L2: every tile reads bm rows of A and bn columns of B through it.
    row = shapes.k * shapes.element / (c.l2 * tiles.split)
    intake = count * (tiles.bm + tiles.bn) * row
    return _Work(count, waves, steps, compute, feed, latency, epilogue, total, intake)


def _wave_count(rounds: Array, c: Constants) -> Array:
    """Count waves by their cost.

    With ``tail`` = 1 the result is the number of whole waves. With 0 it is the tiles per SM, or 1
    if there are fewer tiles than SMs.
    """
    return c.tail * np.ceil(rounds) + (1 - c.tail) * np.maximum(rounds, 1.0)


def _memory_seconds(
    shapes: Shapes, tiles: Tiles, count: Array, machine: Machine, c: Constants
) -> Array:
    """Return the seconds of the device memory's traffic at the bandwidth that active CTAs reach."""
    resident_bytes = _RESIDENT_SHARE * machine.l2_bytes
    ratio = (shapes.first / max(resident_bytes, 1.0)) ** 4
    # The transition is smooth: nearly all of a small A hits the cache, and nearly none of one
    # beyond it.
    hits = shapes.first * (c.resident / (1 + ratio))
    # One row is a matrix-vector multiplication, which reads B in place instead of repacking it.
    repacked = c.repack * shapes.batch * shapes.k * shapes.n * shapes.element * (shapes.m > 1)
    traffic = shapes.bytes - hits + repacked + c.partials * _partial_bytes(shapes, tiles)
    bandwidth = machine.bandwidth * c.dram * np.where(shapes.cached > 0, c.cached, 1.0)
    active = np.minimum(count, machine.sms)
    return traffic / bandwidth * (1 + c.ramp / active)


def _partial_bytes(shapes: Shapes, tiles: Tiles) -> Array:
    """Return the bytes of a split K's fp32 partial sums, which are written and read once."""
    result = shapes.batch * shapes.m * shapes.n
    return np.where(tiles.split > 1, result * (2 * 4) * tiles.split, 0.0)


def _slow_long_kernels(busy: Array, c: Constants) -> Array:
    """Lengthen long kernels, which run into the power limit, by ``slow`` per e-fold over 2 ms."""
    return busy * (1 + c.slow * np.log1p(busy / _SLOW_SECONDS))


def _scalar_if_uniform(column: Array) -> Array:
    """Return only the first element if all are equal, because broadcasting it costs nothing."""
    return column[:1] if column.ndim == 2 and np.ptp(column) == 0 else column


def _norm4(*terms: Array | float) -> Array:
    """Return (a⁴ + b⁴ + …)^¼ without the cost of a general power."""
    total: Array | float = 0.0
    for term in terms:
        square = term * term
        total = total + square * square
    return np.sqrt(np.sqrt(total))
