"""The time of a problem from its shape, a tile and the machine's facts: one formula, NumPy only.

    time = launch + helpers + slowed((work⁴ + intake⁴ + memory⁴)^¼)
    work = waves × (K steps × (compute⁴ + feed⁴ + latency⁴)^¼ + epilogue)

In a K step, ``compute`` is the tile's share of an SM's peak, ``feed`` the time to read its blocks,
``latency`` the minimum of a step however small the tile. ``intake`` is the time in which all tiles
together read from the L2, ``memory`` the traffic of the device's memory over the bandwidth that the
active CTAs can draw. ``helpers`` are kernels before and after: changes of layout, the transforms of
Winograd, the quantising of fp8's A. The fourth power lets the largest term win and rounds the
corner where two are equal; a plain maximum, a sum and other powers were worse on public H100 and
A100 tables. The choice of a Triton config and the calibrated model of ``analysis`` both call this
formula.
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
"""What limits a time: the launch, the arithmetic, the reads of one SM or of all from the shared L2,
the latency of K steps that are too small to hide it, or the device's memory."""

SPLITS = (1, 2, 4, 8, 16)
"""Parts into which a library may split K. Powers of two up to 16 reduced the error most."""

ALGORITHMS = {"implicit-gemm": 0, "winograd-2x2": 2, "winograd-4x4": 4}
"""Ways to compute a convolution, and the outputs along a side of Winograd's tile."""

_STEP_BYTES = 128  # one K step of a tile: 64 elements of 16 bits, as in the libraries' kernels
_MIN_STEPS = 2  # a split that leaves fewer K steps to a CTA is never chosen
_SPLIT_WAVES = 1  # no split where the largest tiles already fill more waves than this
_SLOW_SECONDS = 2e-3  # a kernel this long begins to feel the power limit
_RESIDENT_SHARE = 0.8  # of the last-level cache, which an operand may fill and stay resident
_CHUNK = 2048  # shapes × candidates stay in the L2 cache of a core


@dataclass(frozen=True)
class Shapes:
    """Problems as arrays, one element per problem (or a column of them, to broadcast)."""

    m: Array
    n: Array
    k: Array
    batch: Array
    element: Array  # bytes of an element
    bytes: Array  # minimum traffic of the product itself
    first: Array  # bytes of A of one product; 0 for a convolution
    density: Array  # useful share of the products of m·n·k
    alignment: Array  # bytes that divide every row, at most 16
    helper_kernels: Array  # kernels before and after the product
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
        """Read the fields off the problems; a convolution is the GEMM of an algorithm.

        Where Winograd's algorithm cannot be used, it is the implied GEMM instead.
        """
        read = [_shape_row(p, ALGORITHMS[algorithm]) for p in problems]
        rows = np.array(read, dtype=np.float64).reshape(-1, 11)
        flags = (
            np.zeros(len(problems)) if flag is None else np.asarray(flag, dtype=np.float64)
            for flag in (cached, sustained)
        )
        return cls(*rows.T, *flags)

    def take(self, where: Any) -> Shapes:
        """The shapes at ``where``: a slice, an index array or ``np.newaxis`` expressions."""
        return Shapes(*(getattr(self, f.name)[where] for f in fields(self)))

    def where(self, other: Shapes, condition: NDArray[np.bool_]) -> Shapes:
        """``other`` where the condition holds, and this one elsewhere."""
        return Shapes(*_choose_fields(self, other, condition))


def _shape_row(problem: Problem, tile: int) -> tuple[float, ...]:
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
    # Tensor Core kernels compute channels-last: activations in another layout are transposed
    # before and after, by a kernel each that reads and writes them once.
    moved = problem.layout == "nchw" and problem.dtype != "fp32"
    helper_kernels, helper_bytes = (2, 2 * (x + y) * element) if moved else (0, 0)
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
    """F(2 × 2) in one kernel, its filters transformed before; F(4 × 4) in four kernels.

    The first transforms input and result inside its kernel; in the second the transformed tensors
    go through memory.
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
    """Bytes, at most 16, that divide the rows whose misalignment costs time.

    A matrix-vector product costs the same whether its output's rows are aligned or not
    (tests/recordings/misalignment.json): only its operands' rows count.
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
        """Every tile that the vendor's library has here, K whole."""
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
        parts = np.stack([getattr(self, name) for name in LIMITS])
        return np.argmax(parts, axis=0)

    def where(self, other: Estimate, condition: NDArray[np.bool_]) -> Estimate:
        """``other`` where the condition holds, and this one elsewhere."""
        return Estimate(*_choose_fields(self, other, condition))


def _choose_fields(one: Any, other: Any, condition: NDArray[np.bool_]) -> list[Array]:
    """The arrays of ``other`` where the condition holds, and those of ``one`` elsewhere."""
    names = [f.name for f in fields(one)]
    return [np.where(condition, getattr(other, name), getattr(one, name)) for name in names]


def estimate(shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants) -> Estimate:
    """The time of each shape on its tile, with all parts.

    Args:
        shapes: the problems.
        tiles: one per problem.
        machine: SM count, bandwidth and cache.
        peak: FLOP/s of the dtype on the whole machine.
        c: the constants.
    """
    work = _work(shapes, tiles, machine, peak, c)
    memory = _memory_seconds(shapes, tiles, work.count, machine, c)
    launch = c.launch + c.split * ((tiles.split > 1) + shapes.helper_kernels)
    helpers = shapes.helper_bytes / (machine.bandwidth * c.dram)
    busy = _norm4(work.total, work.intake, memory)
    slowed = _slow_long_kernels(busy, c)
    slower = np.divide(slowed, busy)  # the parts are reported as they are in the slowed kernel
    return Estimate(
        time=launch + helpers + slowed,
        launch=launch + np.zeros_like(busy),
        compute=(work.waves * (work.steps * work.compute + work.epilogue)) * slower,
        feed=np.maximum(work.waves * work.steps * work.feed, work.intake) * slower,
        latency=work.waves * work.steps * work.latency * slower,
        memory=memory * slower + helpers,
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
    """Each shape on the candidate that is fastest for it: what a good library would pick.

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
    """Seconds of every shape (rows) on every tile (columns) at the best split of K, and that split.

    The slowing of long kernels is left out: it is monotonic, so that it changes no ranking.
    """
    columns = shapes.take((slice(None), np.newaxis))
    times = _busy_seconds(columns, tiles, machine, peak, c)
    split = np.ones_like(times)
    if machine.kind == "cpu":
        return times, split
    # Splitting K pays only where tiles are few, so it is tried for those shapes alone.
    largest = int(np.argmax(tiles.bm * tiles.bn))
    few = tile_count(shapes.m, shapes.n, tiles.bm[largest], tiles.bn[largest], shapes.batch)
    rows = np.flatnonzero(few <= _SPLIT_WAVES * machine.sms)
    if not len(rows):
        return times, split
    few_tiles = columns.take((rows, slice(None)))
    best, parts = times[rows], split[rows]
    for count in SPLITS[1:]:
        split_tiles = replace(tiles, split=np.array(float(count)))
        seconds = c.split + _busy_seconds(few_tiles, split_tiles, machine, peak, c)
        deep = few_tiles.k * few_tiles.element >= _STEP_BYTES * _MIN_STEPS * count
        deep &= (few_tiles.alignment >= WIDE_BYTES) | (c.fallback_split >= 0.5)
        better = deep & (seconds < best)
        best = np.where(better, seconds, best)
        parts = np.where(better, float(count), parts)
    times[rows], split[rows] = best, parts
    return times, split


def _busy_seconds(
    shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants
) -> Array:
    """Seconds that the machine works on each shape, launch and slowing left out."""
    work = _work(shapes, tiles, machine, peak, c)
    return _norm4(work.total, work.intake, _memory_seconds(shapes, tiles, work.count, machine, c))


@dataclass(frozen=True)
class _Work:
    """The SMs' part of a time; ``compute``, ``feed`` and ``latency`` are seconds of one K step."""

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
    """What the SMs do: waves of tiles, each K steps and an epilogue.

    ``shapes`` and ``tiles`` broadcast, so that a column of shapes meets a row of candidates.
    """
    count = tile_count(shapes.m, shapes.n, tiles.bm, tiles.bn, shapes.batch, tiles.split)
    waves = _wave_count(count / machine.sms, c)
    depth = _STEP_BYTES / shapes.element
    steps = ceil_div(shapes.k, depth * tiles.split)
    # Most batches of shapes share dtype and alignment: then these factors are one number per tile
    # and the shapes × tiles array is not built for them.
    misaligned = (WIDE_BYTES / shapes.alignment) ** c.misalignment
    rate = peak / machine.sms * c.compute * np.where(shapes.sustained > 0, c.sustained, 1.0)
    compute = (
        tiles.bm * tiles.bn * _scalar_if_uniform(2 * depth * shapes.density * misaligned / rate)
    )
    fallback = np.where(shapes.alignment < WIDE_BYTES, 1 + c.fallback, 1.0)
    loading = np.maximum(misaligned, fallback)
    feed = (tiles.bm + tiles.bn) * _scalar_if_uniform(_STEP_BYTES * loading / c.feed)
    latency = _scalar_if_uniform(c.step * fallback)
    step = _norm4(compute, feed, latency)
    epilogue = c.epilogue + tiles.bm * tiles.bn * _scalar_if_uniform(shapes.element / c.store)
    total = waves * (steps * step + epilogue)
    # Every tile reads bm rows of A and bn columns of B through the L2.
    row = shapes.k * shapes.element / (c.l2 * tiles.split)
    intake = count * (tiles.bm + tiles.bn) * row
    return _Work(count, waves, steps, compute, feed, latency, epilogue, total, intake)


def _wave_count(rounds: Array, c: Constants) -> Array:
    """Waves by their cost: whole ones for ``tail`` = 1; for 0 the tiles per SM, at least one."""
    return c.tail * np.ceil(rounds) + (1 - c.tail) * np.maximum(rounds, 1.0)


def _memory_seconds(
    shapes: Shapes, tiles: Tiles, count: Array, machine: Machine, c: Constants
) -> Array:
    """Seconds of the traffic of the device's memory at the bandwidth that active CTAs reach."""
    held = _RESIDENT_SHARE * machine.l2_bytes
    ratio = (shapes.first / max(held, 1.0)) ** 4
    # A smooth step: nearly all of a small A hits the cache, nearly none of one beyond it.
    hits = shapes.first * (c.resident / (1 + ratio))
    # One row is a matrix-vector product, which reads B in place instead of repacking it.
    repacked = c.repack * shapes.batch * shapes.k * shapes.n * shapes.element * (shapes.m > 1)
    traffic = shapes.bytes - hits + repacked + c.partials * _partial_bytes(shapes, tiles)
    bandwidth = machine.bandwidth * c.dram * np.where(shapes.cached > 0, c.cached, 1.0)
    active = np.minimum(count, machine.sms)
    return traffic / bandwidth * (1 + c.ramp / active)


def _partial_bytes(shapes: Shapes, tiles: Tiles) -> Array:
    """Bytes of the fp32 partial sums of a split K, written and read once."""
    result = shapes.batch * shapes.m * shapes.n
    return np.where(tiles.split > 1, result * (2 * 4) * tiles.split, 0.0)


def _slow_long_kernels(busy: Array, c: Constants) -> Array:
    """Long kernels run into the power limit: longer by ``slow`` per e-fold over 2 ms."""
    return busy * (1 + c.slow * np.log1p(busy / _SLOW_SECONDS))


def _scalar_if_uniform(column: Array) -> Array:
    """The first element alone where all are equal, because broadcasting it costs nothing."""
    return column[:1] if column.ndim == 2 and np.ptp(column) == 0 else column


def _norm4(*terms: Array | float) -> Array:
    """(a⁴ + b⁴ + …)^¼ without the cost of a general power."""
    total: Array | float = 0.0
    for term in terms:
        square = term * term
        total = total + square * square
    return np.sqrt(np.sqrt(total))
