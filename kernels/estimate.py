"""The time of a problem from its shape, a tile and the machine's facts: one formula, NumPy only.

    time = launch + (work⁴ + memory⁴)^¼
    work = prologue-free waves × (K steps × (compute⁴ + feed⁴)^¼ + epilogue)

``compute`` is the tile's share of an SM's peak, ``feed`` what the SM must take in for it,
``memory`` the least traffic over the bandwidth that the active CTAs can draw. The fourth power
lets the larger term win and rounds the corner where they are equal; a plain maximum, a sum and
other powers were all worse on public H100 and A100 tables. The choice of a Triton config and the
calibrated model of ``analysis`` both call this formula.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.config import ceil_div, library_tiles, tail_efficiency, tile_count, tile_efficiency
from kernels.machine import Machine
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Conv, Problem

Array = NDArray[np.float64]

LIMITS = ("launch", "compute", "feed", "memory")
"""What binds a time: the launch, the arithmetic, the SMs' intake, or the device's memory."""

_STEP_BYTES = 128  # one K step of a tile: 64 elements of 16 bits, as the libraries' kernels have it
_MOST_SPLIT = 16
_LEAST_STEPS = 4  # a split that leaves fewer K steps to a CTA is never chosen
_CHUNK = 1024  # shapes × candidates stay in the L2 cache of a core


@dataclass(frozen=True)
class Constants:
    """What the datasheet does not say. Physical, readable, each with bounds in :data:`BOUNDS`."""

    compute: float  # share of the peak that a tile's main loop reaches
    dram: float  # share of the datasheet's bandwidth that is reached
    feed: float  # bytes/s that one SM takes in from L2
    store: float  # bytes/s at which one SM's epilogue writes its tile
    epilogue: float  # seconds a tile beside that
    launch: float  # seconds that no launch escapes
    tail: float  # 1: a started wave costs a whole one; 0: its share
    ramp: float  # CTAs in flight at which half of the bandwidth is reached
    split: float  # seconds that reducing a split K costs
    narrow: float  # work slows by (alignment / 16 bytes)^-narrow
    pack: float  # times that B is moved once more, repacked before the product; CPUs do
    cached: float  # times that bandwidth when the operands are in the last-level cache
    sustained: float  # share of the burst's rate when the machine never pauses

    def to_json(self) -> dict[str, float]:
        """By name, for calibration.json."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}


BOUNDS: dict[str, tuple[float, float]] = {
    "compute": (0.05, 1.1),
    "dram": (0.05, 1.0),
    "feed": (1e9, 1e12),
    "store": (1e8, 1e12),
    "epilogue": (0.0, 5e-6),
    "launch": (5e-7, 5e-5),
    "tail": (0.0, 1.0),
    "ramp": (0.0, 80.0),
    "split": (0.0, 2e-5),
    "narrow": (0.0, 2.0),
    "pack": (0.0, 20.0),
    "cached": (1.0, 20.0),
    "sustained": (0.3, 1.1),
}
"""What is physically possible for each constant."""


def default_constants(generation: str, dtype: str) -> Constants:
    """The shipped constants of a generation, before any calibration (``constants.toml``)."""
    table = _shipped()
    generation = table["like"].get(generation, generation)
    entry = table.get(f"{generation}-{dtype}") or table[generation]
    return Constants(**{name: value for name, value in entry.items() if name != "source"})


@functools.cache
def _shipped() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("constants.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Shapes:
    """Problems as arrays, one element a problem (or a column of them, to broadcast)."""

    m: Array
    n: Array
    k: Array
    batch: Array
    element: Array  # bytes of an element
    bytes: Array  # least traffic, layout changes included
    density: Array  # useful share of the products of m·n·k
    alignment: Array  # bytes that divide every row, at most 16
    cached: Array  # 1 where the operands are in the last-level cache, 0 where in memory
    sustained: Array  # 1 where the machine never pauses, 0 for bursts

    def __len__(self) -> int:
        return len(self.m)

    @classmethod
    def of(
        cls,
        problems: Sequence[Problem],
        cached: Sequence[bool] | None = None,
        sustained: Sequence[bool] | None = None,
    ) -> Shapes:
        """Read the fields off the problems; a convolution is its implied GEMM."""
        rows = np.array([_shape_row(p) for p in problems], dtype=np.float64).reshape(-1, 8)
        flags = (
            np.zeros(len(problems)) if flag is None else np.asarray(flag, dtype=np.float64)
            for flag in (cached, sustained)
        )
        return cls(*rows.T, *flags)

    def take(self, where: Any) -> Shapes:
        """The shapes at ``where``: a slice, an index array or ``np.newaxis`` expressions."""
        return Shapes(*(getattr(self, f.name)[where] for f in fields(self)))


def _shape_row(problem: Problem) -> tuple[float, ...]:
    gemm = problem.implied_gemm if isinstance(problem, Conv) else problem
    traffic = problem.bytes
    if isinstance(problem, Conv) and problem.layout == "nchw":
        # Libraries compute in a channels-last layout: activations are read and written once more.
        x, _, y = problem.operand_elements
        traffic += 2 * (x + y) * DTYPE_BYTES[problem.dtype]
    density = problem.flops / gemm.flops
    element = DTYPE_BYTES[problem.dtype]
    return (
        gemm.m, gemm.n, gemm.k, gemm.batch, element, traffic, density, problem.alignment
    )  # fmt: skip


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
    """Times in seconds and their parts, one element a problem."""

    time: Array
    launch: Array
    compute: Array
    feed: Array
    memory: Array
    bm: Array
    bn: Array
    split: Array
    tiles: Array
    waves: Array
    tile_efficiency: Array
    tail_efficiency: Array
    bytes: Array  # predicted device traffic

    @property
    def limit(self) -> NDArray[np.intp]:
        """Index into :data:`LIMITS` of the largest part."""
        parts = np.stack([self.launch, self.compute, self.feed, self.memory])
        return np.argmax(parts, axis=0)


def estimate(shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants) -> Estimate:
    """The time of each shape on its tile, with all parts.

    Args:
        shapes: the problems.
        tiles: a tile a problem.
        machine: SM count and bandwidth.
        peak: FLOP/s of the dtype on the whole machine.
        c: the constants.
    """
    time, launch, compute, feed, memory, count = _parts(shapes, tiles, machine, peak, c)
    return Estimate(
        time=time,
        launch=launch,
        compute=compute,
        feed=feed,
        memory=memory,
        bm=tiles.bm,
        bn=tiles.bn,
        split=tiles.split,
        tiles=count,
        waves=ceil_div(count, machine.sms),
        tile_efficiency=tile_efficiency(shapes.m, shapes.n, tiles.bm, tiles.bn),
        tail_efficiency=tail_efficiency(count, machine.sms),
        bytes=shapes.bytes + _partials(shapes, tiles),
    )


def fastest(shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants) -> Estimate:
    """Each shape on the candidate that is fastest for it: what a good library would pick.

    Candidates are the ``tiles`` as they stand and, on a GPU, with K split so far that every SM
    has work.
    """
    best = Tiles(*np.empty((3, len(shapes))))
    for start in range(0, len(shapes), _CHUNK):
        part = slice(start, start + _CHUNK)
        column = shapes.take(part).take((slice(None), np.newaxis))
        time, *_ = _parts(column, tiles, machine, peak, c)
        split = np.ones_like(time)
        if machine.kind == "gpu":
            filling = replace(tiles, split=_filling_split(column, tiles, machine))
            split_time, *_ = _parts(column, filling, machine, peak, c)
            split = np.where(split_time < time, filling.split, 1.0)
            time = np.minimum(time, split_time)
        tile = np.argmin(time, axis=1)
        best.bm[part], best.bn[part] = tiles.bm[tile], tiles.bn[tile]
        best.split[part] = split[np.arange(len(tile)), tile]
    return estimate(shapes, best, machine, peak, c)


def _filling_split(shapes: Shapes, tiles: Tiles, machine: Machine) -> Array:
    """Power of two of at most 16 by which K is split so that the tiles come near the SMs."""
    count = tile_count(shapes.m, shapes.n, tiles.bm, tiles.bn, shapes.batch)
    most = np.minimum(machine.sms / count, shapes.k * shapes.element / (_STEP_BYTES * _LEAST_STEPS))
    return np.exp2(np.floor(np.log2(np.clip(most, 1, _MOST_SPLIT))))


def _parts(
    shapes: Shapes, tiles: Tiles, machine: Machine, peak: float, c: Constants
) -> tuple[Any, ...]:
    """Time, launch, compute with epilogue, feed, memory (seconds) and the count of tiles.

    ``shapes`` and ``tiles`` broadcast, so that a column of shapes meets a row of candidates.
    """
    count = tile_count(shapes.m, shapes.n, tiles.bm, tiles.bn, shapes.batch, tiles.split)
    # Each SM works off its tiles one after another, however many it holds at once.
    rounds = count / machine.sms
    waves = c.tail * np.ceil(rounds) + (1 - c.tail) * np.maximum(rounds, 1.0)
    depth = _STEP_BYTES / shapes.element
    narrow: Array = (WIDE_BYTES / shapes.alignment) ** c.narrow
    steps = waves * ceil_div(shapes.k, depth * tiles.split)

    area = tiles.bm * tiles.bn
    rate = peak / machine.sms * c.compute * np.where(shapes.sustained > 0, c.sustained, 1.0)
    compute = steps * (area * (2 * depth * shapes.density * narrow / rate))
    feed = steps * ((tiles.bm + tiles.bn) * (_STEP_BYTES * narrow / c.feed))
    epilogue = waves * (c.epilogue + area * (shapes.element / c.store))
    active = np.minimum(count, machine.sms)
    reached = machine.bandwidth * c.dram * active / (active + c.ramp)
    reached = reached * np.where(shapes.cached > 0, c.cached, 1.0)
    # One row needs no packing: it is a matrix-vector product, read straight through.
    packed = c.pack * shapes.batch * shapes.k * shapes.n * shapes.element * (shapes.m > 1)
    memory = (shapes.bytes + packed + _partials(shapes, tiles)) / reached

    launch = c.launch + c.split * (tiles.split > 1)
    time = launch + _fourth(_fourth(compute, feed) + epilogue, memory)
    return time, launch, compute + epilogue, feed, memory, count


def _partials(shapes: Shapes, tiles: Tiles) -> Array:
    """Bytes of the fp32 partial sums of a split K, written and read once."""
    result = shapes.batch * shapes.m * shapes.n
    return np.where(tiles.split > 1, result * (2 * 4) * tiles.split, 0.0)


def _fourth(a: Array, b: Array) -> Array:
    """(a⁴ + b⁴)^¼ without the cost of a general power."""
    a2, b2 = a * a, b * b
    return np.sqrt(np.sqrt(a2 * a2 + b2 * b2))
