"""Estimate a problem's time from its shape, a tile, the machine and constants, with NumPy.

    time = launch + helpers + slowed((work⁴ + intake⁴ + memory⁴)^¼)
    work = waves × (K steps × (compute⁴ + feed⁴ + latency⁴)^¼ + epilogue)

- ``compute`` is the time of a K step's arithmetic on the tile's SM.
- ``feed`` is the time to read the K step's blocks of A and B.
- ``latency`` is the minimum time of a K step, however small the tile is.
- ``epilogue`` is the time to finish a tile and write it.
- ``intake`` is the time that all tiles together take to read from the L2.
- ``memory`` is the memory traffic, divided by the bandwidth that the active CTAs reach.
- ``helpers`` is the time that helper kernels take to move their data. Helper kernels run before or
  after the main kernel: they change layouts, pad channels, compute Winograd's transforms, or
  quantise A for an fp8 GEMM.
- ``launch`` is the fixed time of a launch, plus a fixed time for each helper kernel and, if K is
  split, for the kernel that adds up the partial sums.
- ``slowed`` lengthens the time of long kernels, which run into the power limit.

The fourth powers let the largest term dominate. A plain maximum, a sum and other powers fitted
public H100 and A100 tables less well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.config import ceil_div, library_tiles, tail_efficiency, tile_count, tile_efficiency
from kernels.machine import Machine
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Conv, Gemm, Problem
from kernels.timemodel.constants import Constants

Array = NDArray[np.float64]

LIMITS = ("launch", "compute", "feed", "latency", "memory")
"""Names of the parts of an estimated time; the largest part limits the time.

``compute`` includes the epilogues, ``feed`` is never less than ``intake``, and ``memory`` includes
``helpers``. The module's docstring explains these terms.
"""

SPLITS = (1, 2, 4, 8, 16)
"""Numbers of parts into which K may be split; this list gave the smallest prediction error."""

ALGORITHMS = {"implicit-gemm": 0, "winograd-2x2": 2, "winograd-4x4": 4}
"""Convolution algorithms by name.

Each value is the number of outputs along a side of a Winograd tile, or 0 for an implicit GEMM.
"""

_STEP_BYTES = 128  # bytes along K in a K step: 64 elements of 16 bits, as in vendor kernels
_MIN_STEPS = 2  # a split that leaves fewer K steps to a CTA is never chosen
_SPLIT_WAVES = 1  # K is not split if the largest tile gives more waves than this
_SLOW_SECONDS = 2e-3  # kernels of about this time and longer are slowed by the power limit
_RESIDENT_SHARE = 0.8  # if A takes this share of the last-level cache, half of its hits are lost
_PADDING_BYTES = 12  # bytes whose traffic takes as long as padding one element, in any dtype
_CHUNK = 2048  # shapes per pass, so that shapes × candidates fit in a CPU core's L2 cache


@dataclass(frozen=True)
class Shapes:
    """Problems as arrays, one element per problem."""

    m: Array
    n: Array
    k: Array
    batch: Array
    element: Array  # bytes of an element
    bytes: Array  # minimum traffic of the GEMM itself
    a_bytes: Array  # bytes of A in one GEMM of the batch; 0 for a convolution
    density: Array  # useful share of the m·n·k multiply-adds
    alignment: Array  # bytes; what :func:`priced_alignment` returns, or what a library makes of it
    helper_kernels: Array  # number of kernels before and after the GEMM
    helper_bytes: Array  # bytes that these kernels move
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
        on_gpu_library: bool = False,
    ) -> Shapes:
        """Create the arrays from problems.

        An element of ``cached`` is True if the problem's operands are in the last-level cache. An
        element of ``sustained`` is True if the problem is launched without pauses. None means False
        for all problems. ``algorithm`` is a key of :data:`ALGORITHMS`. A convolution that
        Winograd's algorithm cannot compute is described as an implicit GEMM. ``on_gpu_library`` is
        True if cuBLAS and cuDNN compute the problems (:func:`_gpu_library_row`).
        """
        # 1. Convert each problem to a row. The number of columns is given, because it cannot be
        # derived from an empty list of rows.
        tile = ALGORITHMS[algorithm]
        row_of = _gpu_library_row if on_gpu_library else _shape_row
        rows = [row_of(problem, tile) for problem in problems]
        columns = np.array(rows, dtype=np.float64).reshape(-1, len(_ShapeRow._fields)).T
        # 2. Convert the two flags. None stands for False everywhere.
        no_flags = [False] * len(problems)
        is_cached = np.asarray(no_flags if cached is None else cached, dtype=np.float64)
        is_sustained = np.asarray(no_flags if sustained is None else sustained, dtype=np.float64)
        arrays = [*columns, is_cached, is_sustained]
        return cls(*arrays)

    def take(self, index: Any) -> Shapes:
        """Return the shapes at ``index``, which is any NumPy index of the arrays."""
        return Shapes(*(getattr(self, f.name)[index] for f in fields(self)))

    def where(self, other: Shapes, condition: NDArray[np.bool_]) -> Shapes:
        """Return ``other`` where the condition holds, and these shapes elsewhere."""
        return Shapes(*_choose_fields(self, other, condition))


class _ShapeRow(NamedTuple):
    """Fields of :class:`Shapes` for one problem, in order, except ``cached`` and ``sustained``."""

    m: int
    n: int
    k: int
    batch: int
    element: int
    bytes: int
    a_bytes: int
    density: float
    alignment: int
    helper_kernels: int
    helper_bytes: int


def _shape_row(problem: Problem, tile: int) -> _ShapeRow:
    """Return a problem's fields of :class:`Shapes`; ``tile`` is a value of :data:`ALGORITHMS`."""
    element = DTYPE_BYTES[problem.dtype]
    if isinstance(problem, Gemm):
        a_bytes = problem.operand_elements[0] * element
        quantised = problem.quantising_bytes
        return _row(
            problem,
            problem,
            problem.bytes,
            a_bytes=a_bytes,
            helper_kernels=int(quantised > 0),
            helper_bytes=quantised,
        )
    winograd = problem.winograd_gemm(tile) if tile else None
    if winograd is not None:
        return _winograd_row(problem, winograd, tile)
    helper_kernels = 0
    helper_bytes = 0
    if problem.layout == "nchw" and problem.dtype != "fp32":
        # Tensor Core kernels compute channels last. For each pass, two tensors of activations are
        # transposed before or after it, by one kernel each that reads and writes the tensor once.
        inputs, _, outputs = problem.operand_elements
        helper_kernels = 2
        helper_bytes = 2 * (inputs + outputs) * element
    gemm = problem.implied_gemm
    return _row(
        problem,
        gemm,
        problem.bytes,
        density=problem.flops / gemm.flops,
        helper_kernels=helper_kernels,
        helper_bytes=helper_bytes,
    )


def _gpu_library_row(problem: Problem, tile: int) -> _ShapeRow:
    """Return the row of :func:`_shape_row`, adapted to what cuBLAS and cuDNN do on an H100.

    The names of the kernels in results/published/nvidia-h100-sxm show what the two libraries do:

    - cuBLAS treats rows that are aligned only to 8 bytes as if they were aligned to 4 bytes. In all
      but one of 218 such cases, cuBLAS chose a kernel for rows aligned to 4 bytes (``align2`` in 16
      bits, ``align1`` in tf32).
    - If the input or the output channels of an ungrouped NHWC convolution on Tensor Cores do not
      fill a multiple of 16 bytes, cuDNN runs ``nhwcAddPaddingKernel`` before the main kernel in 96%
      of the cases. The padding kernel pads the activations that the pass reads. Its median rate is
      a sixth of the memory's bandwidth in 16 bits, and a third in tf32.
    """
    # 1. Lower the alignment of a GEMM's rows from 8 bytes to 4.
    if isinstance(problem, Gemm):
        row = _shape_row(problem, tile)
        return row._replace(alignment=4) if row.alignment == 8 else row
    # 2. Pad the channels of a convolution to multiples of 16 bytes.
    if problem.dtype == "fp32" or problem.layout != "nhwc" or problem.groups > 1:
        return _shape_row(problem, tile)
    block = WIDE_BYTES // DTYPE_BYTES[problem.dtype]
    c = ceil_div(problem.c, block) * block
    kout = ceil_div(problem.kout, block) * block
    if (c, kout) == (problem.c, problem.kout):
        return _shape_row(problem, tile)
    padded = replace(problem, c=c, kout=kout)
    # 3. Add the kernel that reads the activations and writes the padded ones.
    row = _shape_row(padded, tile)
    position = 2 if problem.pass_ == "dgrad" else 0  # dgrad reads the output's gradient
    elements = problem.operand_elements[position] + padded.operand_elements[position]
    return row._replace(
        helper_kernels=row.helper_kernels + 1,
        helper_bytes=row.helper_bytes + _PADDING_BYTES * elements,
    )


def _winograd_row(conv: Conv, gemm: Gemm, tile: int) -> _ShapeRow:
    """Return the row of :func:`_shape_row` for a convolution that Winograd's algorithm computes.

    In F(2 × 2), a helper kernel transforms the filters, and the main kernel transforms its input
    and its result. In F(4 × 4), helper kernels compute all transforms.
    """
    inputs, filters, outputs = conv.operand_elements
    transformed_filters = gemm.batch * gemm.k * gemm.n
    if tile == 2:
        helper_kernels = 1
        gemm_elements = inputs + transformed_filters + outputs
        helper_elements = filters + transformed_filters
    else:
        # The GEMMs read the transformed input and filters, and write the transformed result. The
        # helpers write and read the same tensors, and read and write the untransformed ones.
        helper_kernels = 3
        gemm_elements = gemm.batch * gemm.m * (gemm.k + gemm.n) + transformed_filters
        helper_elements = gemm_elements + inputs + filters + outputs
    element_bytes = DTYPE_BYTES[conv.dtype]
    return _row(
        conv,
        gemm,
        gemm_elements * element_bytes,
        helper_kernels=helper_kernels,
        helper_bytes=helper_elements * element_bytes,
    )


def priced_alignment(problem: Problem) -> int:
    """Return the alignment in bytes, at most 16, of those rows whose misalignment costs time.

    For a matrix-vector multiplication whose B is stored transposed, the rows of A and B count, but
    those of the output do not:

    - If M is 1, each output has only one row.
    - If N is 1, predictions that ignore the output's misaligned rows miss the times in the public
      tables by a median factor of only 1.12 to 1.19.

    With N = 4, by contrast, the output's rows must count: predictions without the constant
    ``fallback``, which accounts for misaligned rows, miss by a median factor of up to 2.8.
    These factors are recorded in results/accuracy/misalignment.json.
    """
    # If B is not stored transposed, its rows also have N elements, so they must count.
    if isinstance(problem, Gemm) and min(problem.m, problem.n) == 1 and problem.layout[1] == "t":
        problem = replace(problem, n=WIDE_BYTES)  # rows of this length are aligned in every dtype
    return problem.alignment


def _row(
    problem: Problem,
    gemm: Gemm,
    traffic: int,
    density: float = 1.0,
    a_bytes: int = 0,
    helper_kernels: int = 0,
    helper_bytes: int = 0,
) -> _ShapeRow:
    """Return the row of a problem that ``gemm`` computes; ``traffic`` is the field ``bytes``."""
    # Positional arguments take half of the time of named ones.
    return _ShapeRow(
        gemm.m,
        gemm.n,
        gemm.k,
        gemm.batch,
        DTYPE_BYTES[problem.dtype],
        traffic,
        a_bytes,
        density,
        priced_alignment(problem),
        helper_kernels,
        helper_bytes,
    )


@dataclass(frozen=True)
class Tiles:
    """Tiles as arrays: rows, columns, and the number of parts into which K is split."""

    bm: Array
    bn: Array
    split: Array

    @classmethod
    def library(cls, machine: Machine, dtype: str) -> Tiles:
        """Return the vendor library's tiles for a machine and a dtype, all with K unsplit."""
        pairs = np.array(library_tiles(machine.generation, dtype), dtype=np.float64)
        return cls(pairs[:, 0], pairs[:, 1], np.ones(len(pairs)))


@dataclass(frozen=True)
class Estimate:
    """Estimated times and their parts in seconds, and the tiles; one element per problem."""

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
    bytes: Array  # minimum traffic of all kernels, and the partial sums of a split K
    algorithm: Array  # index into ALGORITHMS; 0 for a GEMM

    @property
    def limit(self) -> NDArray[np.intp]:
        """Index in :data:`LIMITS` of each problem's largest part."""
        seconds = np.stack([getattr(self, name) for name in LIMITS])
        return np.argmax(seconds, axis=0)

    def where(self, other: Estimate, condition: NDArray[np.bool_]) -> Estimate:
        """Return ``other`` where the condition holds, and this estimate elsewhere."""
        return Estimate(*_choose_fields(self, other, condition))


def _choose_fields(one: Any, other: Any, condition: NDArray[np.bool_]) -> list[Array]:
    names = [f.name for f in fields(one)]
    return [np.where(condition, getattr(other, name), getattr(one, name)) for name in names]


def estimate(shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants) -> Estimate:
    """Estimate the time of each shape on its tile, with all parts of the time.

    ``tiles`` has one tile per shape. ``peak`` is the whole machine's peak FLOP/s in the shapes'
    dtype.
    """
    work = _work(shapes, tiles, machine, peak, c)
    memory = _memory_seconds(shapes, tiles, work.count, machine, c)
    launch = c.launch + c.split * ((tiles.split > 1) + shapes.helper_kernels)
    helpers = shapes.helper_bytes / (machine.bandwidth * c.dram)
    busy = _norm4(work.total, work.intake, memory)
    slowed = _slow_long_kernels(busy, c)
    slowdown = np.divide(slowed, busy)  # the reported parts are lengthened like the whole kernel
    return Estimate(
        time=launch + helpers + slowed,
        launch=launch,
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
    """Estimate each shape's time on its fastest candidate tile, which a good library would choose.

    The candidates are ``tiles`` with K unsplit. On a GPU, the same tiles with K split
    (:data:`SPLITS`) are also candidates for a shape whose result has few tiles.
    """
    count = len(shapes)
    best = Tiles(bm=np.empty(count), bn=np.empty(count), split=np.empty(count))
    for start in range(0, count, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        seconds, parts = candidate_times(shapes.take(chunk), tiles, machine, peak, c)
        best_indices = np.argmin(seconds, axis=1)  # the index of a tile for each shape
        best.bm[chunk] = tiles.bm[best_indices]
        best.bn[chunk] = tiles.bn[best_indices]
        best.split[chunk] = parts[np.arange(len(best_indices)), best_indices]
    return estimate(shapes, best, machine, peak, c)


def candidate_times(
    shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants
) -> tuple[Array, Array]:
    """Return the seconds and the number of parts of K, for each shape (row) and tile (column).

    K is split only where that lowers the estimated time. The estimate then includes the time of the
    kernel that adds up the partial sums. The seconds leave out the launch, the helper kernels and
    the slowdown of long kernels, which hardly change the ranking of the tiles. ``shapes`` must not
    be empty.
    """
    # 1. Estimate the time of every candidate without splitting K.
    shape_column = shapes.take((slice(None), np.newaxis))
    seconds = _busy_seconds(shape_column, tiles, machine, peak, c)
    parts = np.ones_like(seconds)
    if machine.kind == "cpu":
        return seconds, parts
    # 2. Select the shapes with few tiles, because splitting K pays only for those.
    largest_index = int(np.argmax(tiles.bm * tiles.bn))
    bm, bn = tiles.bm[largest_index], tiles.bn[largest_index]
    tile_counts = tile_count(shapes.m, shapes.n, bm, bn, shapes.batch)
    rows = np.flatnonzero(tile_counts <= _SPLIT_WAVES * machine.sms)
    if not len(rows):
        return seconds, parts
    # 3. Estimate the time of every split of these shapes, and keep the fastest that is possible.
    split_shapes = shape_column.take((rows, slice(None)))
    best_seconds, best_parts = seconds[rows], parts[rows]
    for split in SPLITS[1:]:
        split_tiles = replace(tiles, split=np.array(float(split)))
        split_seconds = c.split + _busy_seconds(split_shapes, split_tiles, machine, peak, c)
        # K must be long enough, and kernels for misaligned rows must be able to split it. The
        # constant for that may be fitted to any number from 0 to 1, so it is rounded.
        possible = split_shapes.k * split_shapes.element >= _STEP_BYTES * _MIN_STEPS * split
        possible &= (split_shapes.alignment >= WIDE_BYTES) | (c.fallback_split >= 0.5)
        better = possible & (split_seconds < best_seconds)
        best_seconds = np.where(better, split_seconds, best_seconds)
        best_parts = np.where(better, float(split), best_parts)
    seconds[rows], parts[rows] = best_seconds, best_parts
    return seconds, parts


def _busy_seconds(
    shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants
) -> Array:
    """Return ``(work⁴ + intake⁴ + memory⁴)^¼`` of the module's formula, in seconds."""
    work = _work(shapes, tiles, machine, peak, c)
    return _norm4(work.total, work.intake, _memory_seconds(shapes, tiles, work.count, machine, c))


@dataclass(frozen=True)
class _Work:
    count: Array  # number of tiles
    waves: Array
    steps: Array  # K steps of one tile
    compute: Array  # seconds of the arithmetic of one K step
    feed: Array  # seconds of the loads of one K step
    latency: Array  # shortest time of one K step, in seconds
    epilogue: Array  # seconds per tile
    total: Array  # seconds of all waves
    intake: Array  # seconds in which all tiles together read from the L2


def _work(shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants) -> _Work:
    """Return the counts and times of the SMs' work for each shape on its tile.

    A column of shapes and a row of tiles give the work of every shape on every tile.
    """
    # 1. Count the tiles, their waves and the K steps of a tile.
    count = tile_count(shapes.m, shapes.n, tiles.bm, tiles.bn, shapes.batch, tiles.split)
    waves = _wave_count(count / machine.sms, c)
    step_depth = _STEP_BYTES / shapes.element  # elements along K of one K step
    steps = ceil_div(shapes.k, step_depth * tiles.split)
    # 2. Estimate the time of the arithmetic in a K step. The factors that depend on the shape are
    # usually the same for all shapes. They are then one number, which is cheaper to multiply. A
    # slowdown is a factor of at least 1 by which misaligned rows lengthen a time.
    arithmetic_slowdown = (WIDE_BYTES / shapes.alignment) ** c.misalignment
    rate = peak / machine.sms * c.compute * np.where(shapes.sustained > 0, c.sustained, 1.0)
    compute = (
        tiles.bm
        * tiles.bn
        * _scalar_if_uniform(2 * step_depth * shapes.density * arithmetic_slowdown / rate)
    )
    # 3. Estimate the loads of a K step and its latency. Misaligned rows cannot be loaded by bulk
    # copies, which lengthens both. Their loads are also narrower, which slows them down at least as
    # much as the arithmetic. The two causes overlap, so the larger slowdown applies.
    latency_slowdown = np.where(shapes.alignment < WIDE_BYTES, 1 + c.fallback, 1.0)
    load_slowdown = np.maximum(arithmetic_slowdown, latency_slowdown)
    feed = (tiles.bm + tiles.bn) * _scalar_if_uniform(_STEP_BYTES * load_slowdown / c.feed)
    latency = _scalar_if_uniform(c.step * latency_slowdown)
    step = _norm4(compute, feed, latency)
    # 4. Add up the K steps, the epilogue and the waves.
    epilogue = c.epilogue + tiles.bm * tiles.bn * _scalar_if_uniform(shapes.element / c.store)
    total = waves * (steps * step + epilogue)
    # 5. Estimate the reads from the L2: every tile reads bm rows of A and bn columns of B from it.
    row_seconds = shapes.k * shapes.element / (c.l2 * tiles.split)
    intake = count * (tiles.bm + tiles.bn) * row_seconds
    return _Work(count, waves, steps, compute, feed, latency, epilogue, total, intake)


def _wave_count(tiles_per_sm: Array, c: Constants) -> Array:
    """Return the time of all waves, in units of a full wave's time."""
    return c.tail * np.ceil(tiles_per_sm) + (1 - c.tail) * np.maximum(tiles_per_sm, 1.0)


def _memory_seconds(
    shapes: Shapes, tiles: Tiles, count: Array, machine: Machine, c: Constants
) -> Array:
    # 1. Add up the traffic in bytes. The share of A that hits the cache falls smoothly, from
    # ``resident`` for a small A to 0 for one that is much larger than the cache. In a batch, only
    # one A is counted; the constants were fitted in this way.
    resident_bytes = _RESIDENT_SHARE * machine.l2_bytes
    miss_odds = (shapes.a_bytes / max(resident_bytes, 1.0)) ** 4
    hit_bytes = shapes.a_bytes * (c.resident / (1 + miss_odds))
    # A GEMM with one row is a matrix-vector multiplication, which does not repack B.
    repacked_bytes = c.repack * shapes.batch * shapes.k * shapes.n * shapes.element * (shapes.m > 1)
    partial_bytes = c.partials * _partial_bytes(shapes, tiles)
    traffic = shapes.bytes - hit_bytes + repacked_bytes + partial_bytes
    # 2. Divide it by the bandwidth, of which few active CTAs reach only a part.
    bandwidth = machine.bandwidth * c.dram * np.where(shapes.cached > 0, c.cached, 1.0)
    active_ctas = np.minimum(count, machine.sms)
    return traffic / bandwidth * (1 + c.ramp / active_ctas)


def _partial_bytes(shapes: Shapes, tiles: Tiles) -> Array:
    result_elements = shapes.batch * shapes.m * shapes.n
    bytes_per_sum = 2 * 4  # four bytes, written and read
    return np.where(tiles.split > 1, result_elements * bytes_per_sum * tiles.split, 0.0)


def _slow_long_kernels(busy: Array, c: Constants) -> Array:
    """Lengthen the times of long kernels, during which the power limit lowers the clocks."""
    return busy * (1 + c.slow * np.log1p(busy / _SLOW_SECONDS))


def _scalar_if_uniform(column: Array) -> Array:
    """Shorten a column of equal elements to one element, which is cheaper to broadcast."""
    return column[:1] if column.ndim == 2 and np.ptp(column) == 0 else column


def _norm4(*terms: Array | float) -> Array:
    """Return (a⁴ + b⁴ + …)^¼ without the cost of a general power."""
    total: Array | float = 0.0
    for term in terms:
        square = term * term
        total = total + square * square
    return np.sqrt(np.sqrt(total))
