"""The time model: the estimate's formula with constants that were calibrated on measurements.

Cases are modelled in groups: an implementation, an operation with its pass, and a dtype. Each
group has its own constants, its own error figures and its own interval. A machine without
measurements gets the shipped constants of its generation, and an interval that says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.load import problems_of
from analysis.residual import Residual
from kernels.config import HAND_WRITTEN, tail_efficiency, tile_count
from kernels.constants import Constants, default_constants
from kernels.estimate import (
    ALGORITHMS,
    LIMITS,
    Array,
    Estimate,
    Shapes,
    Tiles,
    estimate,
    fastest,
)
from kernels.machine import Machine
from kernels.problem import Conv, Problem

UNCALIBRATED = (-0.7, 0.7)
"""Log ratio of measured to predicted that nine shapes in ten should keep without any measurement:
a factor of two either way. It held at least 98 % of the rows of public tables of H100, A100 and
V100, but 67 % of T4's and none of L4's."""


_DESIGN = 5  # features, the first ones
_USUAL_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256))

NEAR = 0.125
"""How much larger the larger of two neighbouring shapes may be, in each dimension."""


@dataclass(frozen=True)
class Query:
    """What a prediction is asked for: problems, and how each is computed and timed."""

    problems: Sequence[Problem]
    implementations: Sequence[str]
    configs: Sequence[str]
    cached: Sequence[bool]
    sustained: Sequence[bool]

    @classmethod
    def plain(cls, problems: Sequence[Problem], implementation: str) -> Query:
        """Problems on one implementation, its default config, operands in memory, in bursts."""
        return cls.each(problems, [implementation] * len(problems))

    @classmethod
    def each(cls, problems: Sequence[Problem], implementations: Sequence[str]) -> Query:
        """Likewise, each problem on its own implementation."""
        n = len(problems)
        return cls(problems, implementations, [""] * n, [False] * n, [False] * n)

    @classmethod
    def of_rows(cls, rows: pd.DataFrame) -> Query:
        """The cases of measured rows."""
        return cls(
            problems_of(rows),
            rows["implementation"].tolist(),
            rows["config"].tolist(),
            (rows["cache"] == "warm").tolist(),
            (rows["mode"] == "sustained").tolist(),
        )

    def groups(self) -> NDArray[Any]:
        """The group of each case."""
        pairs = zip(self.implementations, self.problems, strict=True)
        return np.array([group_of(name, problem) for name, problem in pairs], dtype=object)

    def take(self, where: NDArray[np.intp]) -> Query:
        """The cases at some positions."""
        columns = ([getattr(self, f.name)[i] for i in where] for f in fields(self))
        return Query(*columns)


def group_of(implementation: str, problem: Problem) -> str:
    """``cublas gemm bf16`` or ``cudnn dgrad bf16``."""
    what = problem.pass_ if isinstance(problem, Conv) else problem.op
    return f"{implementation} {what} {problem.dtype}"


@dataclass(frozen=True)
class Fit:
    """One group's constants and what they are worth.

    ``low`` and ``high`` bound nine in ten log ratios of measured to predicted, over the
    prediction's spread, on rows that the constants had not seen; ``median``, ``mean`` and ``p95``
    are absolute relative errors there. ``pair_low`` and ``pair_high`` bound the same for the ratio
    of two neighbouring shapes (see :data:`NEAR`), whose errors are largely the same, over the root
    of the sum of both spreads' squares; ``pairs`` is how many there were.
    """

    constants: Constants
    residual: Residual | None = None
    low: float = UNCALIBRATED[0]
    high: float = UNCALIBRATED[1]
    pair_low: float = UNCALIBRATED[0] / math.sqrt(2)
    pair_high: float = UNCALIBRATED[1] / math.sqrt(2)
    rows: int = 0
    pairs: int = 0
    median: float | None = None
    mean: float | None = None
    p95: float | None = None

    def spread(self, lo: float, hi: float) -> float:
        """The spread of a prediction, from its 90 % interval."""
        return math.log(hi / lo) / (self.high - self.low)

    def ratio_range(self, near: bool, spreads: tuple[float, float]) -> tuple[float, float]:
        """The 90 % range of a log time ratio's error: of neighbours, or of any two shapes.

        ``spreads`` are those of the two predictions: where the residual's trees disagree, both
        are less certain.
        """
        both = math.hypot(*spreads)
        if near:
            return self.pair_low * both, self.pair_high * both
        wide = (self.high - self.low) * both / math.sqrt(2)
        return -wide, wide

    def to_json(self) -> dict[str, Any]:
        """For calibration.json."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        residual = None if self.residual is None else self.residual.to_json()
        return {**plain, "constants": self.constants.to_json(), "residual": residual}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fit:
        """Inverse of :meth:`to_json`."""
        residual = data["residual"] and Residual.from_json(data["residual"])
        return cls(**{**data, "constants": Constants(**data["constants"]), "residual": residual})


@dataclass(frozen=True)
class Model:
    """A machine and the fits of its groups; a group without a fit has the shipped constants."""

    machine: Machine
    fits: Mapping[str, Fit] = field(default_factory=dict)

    def fit(self, group: str) -> Fit:
        """The fit of a group."""
        if group in self.fits:
            return self.fits[group]
        return Fit(default_constants(self.machine.generation, group.split()[-1]))

    def predict(self, query: Query) -> Prediction:
        """Predict every case of a query.

        Raises:
            UserError: the machine does not compute a dtype.
        """
        groups = query.groups()
        parts = []
        for group in dict.fromkeys(groups):
            where = np.flatnonzero(groups == group)
            fit = self.fit(group)
            inputs = Inputs.of(self.machine, query.take(where))
            guess, spread = inputs.predict(fit.constants, fit.residual)
            parts.append(Part(where, guess, fit.low * spread, fit.high * spread))
        return Prediction.joined(len(groups), parts)


def model_from_json(machine: Machine, data: Mapping[str, Any]) -> Model:
    """The model that a calibration.json describes."""
    return Model(machine, {group: Fit.from_json(fit) for group, fit in data["groups"].items()})


@dataclass(frozen=True)
class Inputs:
    """One group's cases as arrays, to be estimated with one set of constants after another.

    ``tiles`` has a tile a case where their configs name them; None where the library chooses.
    ``ways`` are the same cases by each of Winograd's algorithms, where a library has them.
    ``known`` is the algorithm that each case is known to have been computed by, empty if it is not.
    """

    machine: Machine
    dtype: str
    problems: Sequence[Problem]
    shapes: Shapes
    tiles: Tiles | None
    ways: Mapping[str, Shapes]
    known: NDArray[Any]

    @classmethod
    def of(cls, machine: Machine, query: Query, known: NDArray[Any] | None = None) -> Inputs:
        """Read the cases of one group off a query."""
        in_cache = [
            warm and problem.bytes <= machine.l2_bytes
            for warm, problem in zip(query.cached, query.problems, strict=True)
        ]
        shapes = Shapes.of(query.problems, in_cache, query.sustained)
        first = query.problems[0]
        tiles = None
        config_type = HAND_WRITTEN.get(query.implementations[0])
        if config_type is not None and all(query.configs):
            configs = [config_type.parse(text) for text in query.configs]
            pairs = zip(configs, query.problems, strict=True)
            rows = [(c.bm, c.bn, c.parts(problem.implied_gemm)) for c, problem in pairs]
            tiles = Tiles(*np.array(rows, dtype=np.float64).T)
        ways = {}
        # Seen in fp32 alone: no public table names the kernels of a 16-bit convolution.
        library = config_type is None and machine.kind == "gpu"
        if library and isinstance(first, Conv) and first.dtype == "fp32":
            for name in list(ALGORITHMS)[1:]:
                ways[name] = Shapes.of(query.problems, in_cache, query.sustained, name)
        if known is None:
            known = np.array([""] * len(shapes), dtype=object)
        return cls(machine, first.dtype, query.problems, shapes, tiles, ways, known)

    @property
    def _library(self) -> Tiles:
        return Tiles.library(self.machine, self.dtype)

    def predict(self, constants: Constants, residual: Residual | None) -> tuple[Estimate, Array]:
        """The estimate with what the residual adds, and the spread of its error: 1 without one."""
        guess = self.estimate(constants)
        if residual is None:
            return guess, np.ones(len(guess.time))
        log_ratio, spread = residual.predict(self.features(constants, guess))
        return replace(guess, time=guess.time * np.exp(log_ratio)), spread

    def estimate(self, constants: Constants) -> Estimate:
        """By physics alone, with the tiles and algorithms that are known, or the fastest."""
        peak = self.machine.peak(self.dtype)
        if self.tiles is not None:
            guess = estimate(self.shapes, self.tiles, self.machine, peak, constants)
        else:
            guess = self._by(self.shapes, constants)
        for name, shapes in self.ways.items():
            other = self._by(shapes, constants)
            other = replace(other, algorithm=np.full(len(shapes), list(ALGORITHMS).index(name)))
            open_ = (self.known == "") & (other.time < guess.time)
            guess = guess.where(other, open_ | (self.known == name))
        return guess

    def settled(self, guess: Estimate) -> Inputs:
        """The same cases, each on the tile and by the algorithm that an estimate found for it."""
        shapes = self.shapes
        for name, theirs in self.ways.items():
            shapes = shapes.where(theirs, guess.algorithm == list(ALGORITHMS).index(name))
        tiles = Tiles(guess.bm, guess.bn, guess.split)
        return replace(self, shapes=shapes, tiles=tiles, ways={})

    def _by(self, shapes: Shapes, constants: Constants) -> Estimate:
        peak = self.machine.peak(self.dtype)
        return fastest(shapes, self._library, self.machine, peak, constants)

    def design(self, constants: Constants) -> Array:
        """What rows to measure are spread over: the sizes, the time and the intensity."""
        return self.features(constants, self.estimate(constants))[:, :_DESIGN]

    def features(self, constants: Constants, guess: Estimate) -> Array:
        """What a residual may depend on, a row a case.

        Logs of the sizes, of the estimate and of the intensity over the ridge point; each two
        sizes' product and ratio; what binds the estimate, and its tile, waves and efficiencies;
        what a last wave of the usual tiles leaves idle; the powers of two that divide the sizes,
        since a library looks at them. For a convolution also its images, their size, filter, stride
        and alignment, what Winograd's tiles waste, and how far its algorithms are behind.

        Args:
            constants: those of the estimate.
            guess: :meth:`estimate` by them.
        """
        s, machine = self.shapes, self.machine
        flops = 2 * s.batch * s.m * s.n * s.k * s.density
        ridge = machine.peak(self.dtype) / machine.bandwidth
        sizes = np.log2([s.m, s.n, s.k])
        columns = [*sizes, np.log(guess.time), np.log(flops / s.bytes / ridge)]
        for one, other in itertools.combinations(sizes, 2):
            columns += [one + other, one - other]
        columns += [getattr(guess, name) / guess.time for name in LIMITS]
        columns += [np.log2(part) for part in (guess.bm, guess.bn, guess.split, guess.tiles)]
        columns += [np.log2(guess.waves), guess.tile_efficiency, guess.tail_efficiency]
        for bm, bn in _USUAL_TILES:
            columns.append(tail_efficiency(tile_count(s.m, s.n, bm, bn, s.batch), machine.sms))
        columns += [_twos(size) for size in (s.m, s.n, s.k)]
        return np.column_stack([*columns, *self._conv_features(constants, guess)])

    def _conv_features(self, constants: Constants, guess: Estimate) -> list[Array]:
        if not isinstance(self.problems[0], Conv):
            return []
        sizes = [
            (c.n, c.p, c.q, c.r * c.s, c.stride[0] * c.stride[1], c.alignment)
            for c in self.problems
            if isinstance(c, Conv)
        ]
        images, height, width, *others = np.array(sizes, dtype=float).T
        columns = [np.log2(column) for column in (images, height * width, *others)]
        ways = (self.shapes, *self.ways.values())
        columns += [np.log(self._by(way, constants).time / guess.time) for way in ways]
        for tile in (ALGORITHMS[name] for name in self.ways):
            padded = np.ceil(height / tile) * np.ceil(width / tile) * tile**2
            columns.append(np.log(padded / (height * width)))
        return columns


def _twos(sizes: Array) -> Array:
    """How often two divides each size, at most eight times: no tile is a multiple of more."""
    whole = sizes.astype(np.int64)
    return np.minimum(np.log2(whole & -whole), 8.0)


@dataclass(frozen=True)
class Part:
    """The estimate of some of a query's cases, and the 90 % range of its log ratios."""

    where: NDArray[np.intp]
    estimate: Estimate
    low: Array
    high: Array


@dataclass(frozen=True)
class Prediction:
    """Times in seconds with their 90 % interval, and the estimate that they come from."""

    estimate: Estimate
    lo: Array
    hi: Array

    @classmethod
    def joined(cls, count: int, parts: Sequence[Part]) -> Prediction:
        """Put the groups' estimates back into the order of the query."""
        columns = {f.name: np.empty(count) for f in fields(Estimate)}
        lo, hi = np.empty(count), np.empty(count)
        for part in parts:
            for name, column in columns.items():
                column[part.where] = getattr(part.estimate, name)
            lo[part.where] = part.estimate.time * np.exp(part.low)
            hi[part.where] = part.estimate.time * np.exp(part.high)
        return cls(Estimate(**columns), lo, hi)

    def frame(self) -> pd.DataFrame:
        """Columns as in predicted.csv: times in microseconds, the limit, tiles and traffic."""
        e = self.estimate
        tiles = [f"{bm:.0f}x{bn:.0f}" for bm, bn in zip(e.bm, e.bn, strict=True)]
        micro = {name: getattr(e, name) * 1e6 for name in LIMITS}
        return pd.DataFrame(
            {
                "time_us": e.time * 1e6,
                "lo_us": self.lo * 1e6,
                "hi_us": self.hi * 1e6,
                "limit": np.array(LIMITS, dtype=object)[e.limit],
                **{f"{name}_us": values for name, values in micro.items()},
                "algorithm": np.array(list(ALGORITHMS), dtype=object)[e.algorithm.astype(int)],
                "tile": tiles,
                "split": e.split.astype(int),
                "tiles": e.tiles.astype(int),
                "waves": e.waves.astype(int),
                "tile_efficiency": e.tile_efficiency,
                "tail_efficiency": e.tail_efficiency,
                "bytes": e.bytes.astype(np.int64),
            }
        )


def explain(row: Mapping[str, Any]) -> str:
    """One line in words for a row of :meth:`Prediction.frame`."""
    limit = {
        "launch": "launching it takes longer than computing it",
        "compute": "bound by arithmetic",
        "feed": "bound by what the SMs can take in",
        "latency": "bound by the latency of each step along K",
        "memory": "bound by memory bandwidth",
    }[row["limit"]]
    side = ALGORITHMS[row["algorithm"]]
    by = f"Winograd over {side}x{side} outputs, " if side else ""
    split = f", K split in {row['split']}" if row["split"] > 1 else ""
    waves = "1 wave" if row["waves"] == 1 else f"{row['waves']} waves"
    tiles = "1 tile" if row["tiles"] == 1 else f"{row['tiles']} tiles"
    return (
        f"{limit}: {by}{tiles} of {row['tile']}{split} in {waves}, "
        f"{_percent(row['tail_efficiency'])} of the waves' slots used, "
        f"{_percent(row['tile_efficiency'])} of the tiles' area useful, "
        f"{row['bytes'] / 1e6:.1f} MB moved"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
