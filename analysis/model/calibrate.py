"""Fit the time model to a machine's measurements, and say how wrong it is.

The problems are cut into three folds. A fit to two of them predicts the third, so each row has a
prediction from a fit that never saw it, and the error figures are honest. The fit that is kept
comes from all rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.spatial import KDTree

from analysis.model.features import Inputs
from analysis.model.fit import NEAR, UNCALIBRATED, Fit
from analysis.model.predict import Model, Part, Prediction
from analysis.model.query import Query
from analysis.model.residual import MIN_ROWS as MIN_RESIDUAL_ROWS
from analysis.model.residual import Residual, fit_residual
from analysis.model.sums import Times, change_factors, sum_factors
from analysis.recordings.load import algorithms_of, kernels_of
from kernels.constants import BOUNDS, Constants, default_constants, physical_bounds
from kernels.estimate import ALGORITHMS, Array
from kernels.machine import Machine
from kernels.problem import WIDE_BYTES, Gemm, Problem

MIN_ROWS = 12
"""A group with fewer rows keeps the shipped constants, scaled to fit."""

_MAX_ROWS = 800  # per fit of constants: more cost seconds and move the error by 0.1 points
_STEP = 1e-7  # of the finite differences
_PRIOR = 0.02  # weight of staying near the shipped constants, in residuals per natural-log unit
_NOISE = 0.05  # log ratios beyond this count less: outliers do not move the constants
_TAIL = 0.05  # share of the log ratios on either side of the interval
_MIN_WIDTH = 0.02  # no interval is narrower than the measurements' scatter
_LINEAR = (
    "tail",
    "partials",
    "slow",
    "misalignment",
    "repack",
    "resident",
)  # dimensionless and often 0: fitted as they are; all other constants by their logarithm


@dataclass(frozen=True)
class Calibration:
    """A model fitted to a recording, and each row's prediction by a fit that never saw it."""

    model: Model
    held_back: Prediction

    def to_json(self) -> dict[str, Any]:
        """calibration.json: constants, error figures and rows used, group by group."""
        return {
            "machine": self.model.machine.slug,
            "protocol": "three parts of the problems, each predicted by a fit to the others",
            "groups": {group: fit.to_json() for group, fit in self.model.fits.items()},
        }


def calibrate(machine: Machine, rows: pd.DataFrame) -> Calibration:
    """Fit every group of the measured rows; all of them must be ``ok``.

    Args:
        machine: the machine that they were measured on.
        rows: rows of a recording, as loaded.
    """
    seconds = rows["time_us"].to_numpy(dtype=float) * 1e-6
    query = Query.of_rows(rows)
    algorithms = algorithms_of(query.problems, kernels_of(rows))
    return calibrate_query(machine, query, seconds, algorithms=algorithms)


def calibrate_query(
    machine: Machine,
    query: Query,
    seconds: Array,
    folds: int = 3,
    starts: Callable[[str], Constants] | None = None,
    algorithms: Sequence[str] | None = None,
) -> Calibration:
    """Fit every group of a query to its measured seconds.

    Args:
        machine: the machine that they were measured on.
        query: the cases.
        seconds: the time of one launch of each case.
        folds: into how many folds the problems are cut, each predicted by a fit to the rest.
        starts: the constants to begin from and to stay near, by dtype; the shipped ones if None.
        algorithms: how each case was computed, where known (:func:`kernels.names.conv_algorithm`).
            Fits use it; predictions never do.
    """
    groups = query.groups()
    known = np.array([""] * len(seconds) if algorithms is None else algorithms, dtype=object)
    fold = np.array([_fold_of(problem, folds) for problem in query.problems])
    fits: dict[str, Fit] = {}
    parts: list[Part] = []
    for group in dict.fromkeys(groups):
        rows = np.flatnonzero(groups == group)
        dtype = group.split()[-1]
        start = starts(dtype) if starts else default_constants(machine.generation, dtype)
        pieces, fewest = [], len(seconds)
        for number in range(folds):
            held_out, rest = rows[fold[rows] == number], rows[fold[rows] != number]
            if len(held_out):
                fewest = min(fewest, len(rest))
                fitted = fit_group(machine, query.take(rest), seconds[rest], start, known[rest])
                inputs = Inputs.of(machine, query.take(held_out))
                pieces.append((held_out, *inputs.predict(*fitted)))
        fitted = fit_group(machine, query.take(rows), seconds[rows], start, known[rows])
        # Where a fold had too few rows for a residual, no held-out error tells what one is worth.
        if fewest < MIN_RESIDUAL_ROWS:
            fitted = fitted[0], None
        where = np.concatenate([at for at, _, _ in pieces])
        predicted = np.concatenate([guess.time for _, guess, _ in pieces])
        log_ratio = np.log(seconds[where] / predicted)
        spread = np.concatenate([spread for _, _, spread in pieces])
        small, large = neighbours(query.take(where), predicted)
        both = np.hypot(spread[small], spread[large])
        of_pairs = (log_ratio[small] - log_ratio[large]) / both
        problems = [query.problems[i] for i in where]
        fit = _fit_with_errors(fitted, log_ratio, spread, of_pairs)
        times = Times(predicted, seconds[where])
        lo, hi = (predicted * np.exp(end * spread) for end in (fit.low, fit.high))
        before, after = (Times(*(part[at] for part in times)) for at in (small, large))
        less = after.predicted * (1 - np.exp(-fit.pair_high * both))
        more = after.predicted * (np.exp(-fit.pair_low * both) - 1)
        sum_low, sum_high = sum_factors(times, lo, hi)
        change_low, change_high = change_factors(before, after, less, more)
        fits[group] = replace(
            fit,
            sum_low=sum_low,
            sum_high=sum_high,
            change_low=change_low,
            change_high=change_high,
            aligned_only=all(problem.alignment >= WIDE_BYTES for problem in problems),
            layout=_only_layout(problems),
        )
        # Back from the group's order to one array per fold, as the estimates are.
        cuts = np.cumsum([len(at) for at, _, _ in pieces])[:-1]
        ends = (np.split(end * spread, cuts) for end in _leave_one_out_ranges(log_ratio / spread))
        parts += [
            Part(at, guess, low, high)
            for (at, guess, _), low, high in zip(pieces, *ends, strict=True)
        ]
    held_back = Prediction.joined(len(seconds), parts)
    return Calibration(Model(machine, fits), held_back)


def _only_layout(problems: Sequence[Problem]) -> str:
    """The layout that all problems have, if they are single products; else empty."""
    layouts = {p.layout if isinstance(p, Gemm) and p.batch == 1 else "" for p in problems}
    return layouts.pop() if len(layouts) == 1 else ""


def _fold_of(problem: Problem, folds: int) -> int:
    """The fold of a problem, the same in every sweep: its repeats never predict one another."""
    return zlib.crc32(problem.spec().encode()) % folds


def fit_group(
    machine: Machine, query: Query, seconds: Array, start: Constants, known: NDArray[Any]
) -> tuple[Constants, Residual | None]:
    """Fit the physical constants, then trees to what they miss, if those predict held-out rows.

    Rows computed by an algorithm that the formula does not have (an FFT) are left out of the fit
    of the constants; the trees see them.
    """
    modelled = np.flatnonzero([name in ("", *ALGORITHMS) for name in known])
    modelled = np.random.default_rng(0).permutation(modelled)[:_MAX_ROWS]
    inputs = Inputs.of(machine, query.take(modelled), known[modelled]) if len(modelled) else None
    constants = fit_constants(inputs, seconds[modelled], start) if inputs else start
    if len(seconds) < MIN_RESIDUAL_ROWS or query.configs[0].startswith("bm="):
        return constants, None
    # The trees must not be told the algorithm: no prediction will know it either.
    inputs = Inputs.of(machine, query)
    guess = inputs.estimate(constants)
    log_ratios = np.log(seconds / guess.time)
    return constants, fit_residual(inputs.features(constants, guess), log_ratios)


def _fit_with_errors(
    fitted: tuple[Constants, Residual | None], log_ratio: Array, spread: Array, pair_errors: Array
) -> Fit:
    """Attach the held-back error: |predicted/measured − 1| and the 90 % range of log ratios."""
    error = np.abs(np.exp(-log_ratio) - 1)
    low, high = _range(log_ratio / spread)
    # With few pairs: as if the two errors lay at opposite ends of their ranges.
    pair_low, pair_high = (low - high) / math.sqrt(2), (high - low) / math.sqrt(2)
    if len(pair_errors) + 1 >= 1 / _TAIL:
        pair_low, pair_high = _range(pair_errors)
    constants, residual = fitted
    return Fit(
        constants=constants,
        residual=residual,
        low=low,
        high=high,
        pair_low=pair_low,
        pair_high=pair_high,
        rows=len(log_ratio),
        pairs=len(pair_errors),
        median=float(np.median(error)),
        mean=float(np.mean(error)),
        p95=float(np.quantile(error, 0.95)),
    )


def _range(errors: Array) -> tuple[float, float]:
    """The range that one more error of the same kind stays in with 90 % (split conformal).

    Of n errors, the k-th smallest and the k-th largest with k = ⌊(n + 1)·5 %⌋. Fewer than 19 do
    not determine it: then it is at least the range of a machine without measurements.
    """
    ordered = np.sort(errors)
    k = int((len(ordered) + 1) * _TAIL)
    if k == 0:
        ends = np.concatenate([ordered, UNCALIBRATED])
        return float(ends.min()), float(ends.max())
    return min(float(ordered[k - 1]), -_MIN_WIDTH), max(float(ordered[-k]), _MIN_WIDTH)


def _leave_one_out_ranges(errors: Array) -> tuple[Array, Array]:
    """For each error the :func:`_range` of all others, so that no row widens its own interval."""
    n = len(errors)
    rank = np.argsort(np.argsort(errors, kind="stable"), kind="stable")
    ordered = np.sort(errors)
    k = int(n * _TAIL)  # ⌊(n − 1 + 1)·5 %⌋: one error is left out
    if k == 0:  # so few that each range includes the uncalibrated one
        ranges = np.array([_range(np.delete(errors, i)) for i in range(n)])
        return ranges[:, 0], ranges[:, 1]
    # Without an error among the k smallest, the k-th smallest of the rest is the (k+1)-th of all;
    # without any other one it stays the k-th. The same holds from above.
    low = np.where(rank < k, ordered[k], ordered[k - 1])
    high = np.where(rank >= n - k, ordered[-k - 1], ordered[-k])
    return np.minimum(low, -_MIN_WIDTH), np.maximum(high, _MIN_WIDTH)


def pair_errors(
    query: Query, predicted: Array, log_ratio: Array, spread: Array, min_gain: float = -1.0
) -> Array:
    """Error of the log of a time ratio, over pairs of :func:`neighbours`.

    Pairs that promise less than ``min_gain`` are left out: the more is promised, the more it is
    flattered. An error is relative to the spreads of both predictions, as if they were independent.
    """
    small, large = neighbours(query, predicted)
    promised = predicted[small] > (1 + min_gain) * predicted[large]
    small, large = small[promised], large[promised]
    return (log_ratio[small] - log_ratio[large]) / np.hypot(spread[small], spread[large])


def neighbours(query: Query, predicted: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pairs of GEMMs of which one pads the other: positions of the small ones and the large ones.

    They differ in size by up to :data:`NEAR` in every dimension and in nothing else. Of all
    measured paddings of a shape, the one that is predicted to be fastest makes the pair, because
    advice chooses it too, and with it errors that flatter it.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}  # indices of cases that differ in size alone
    for index, problem in enumerate(query.problems):
        if isinstance(problem, Gemm):
            how = (query.configs[index], query.cached[index], query.sustained[index])
            kinds.setdefault((problem.layout, problem.batch, *how), []).append(index)
    found = [(np.empty(0, dtype=np.intp),) * 2]
    for indices in kinds.values():
        members = np.array(indices, dtype=np.intp)
        sizes = np.array([[getattr(query.problems[i], d) for d in "mnk"] for i in members])
        small, large = _best_pads(sizes, predicted[members])
        found.append((members[small], members[large]))
    smalls, larges = zip(*found, strict=True)
    return np.concatenate(smalls), np.concatenate(larges)


def _best_pads(sizes: NDArray[np.int_], predicted: Array) -> tuple[NDArray[np.intp], ...]:
    """For each shape that others pad, the one of these that is predicted to be the fastest.

    Args:
        sizes: M, N and K of each shape, one row per shape.
        predicted: seconds of each shape.

    Returns:
        Positions of the shapes, and of what pads each.
    """
    # What pads a shape lies in a cube above it in log sizes, which a k-d tree finds: comparing all
    # 35,700 rows of a public table with one another would take 20 GB.
    half = math.log(1 + NEAR) / 2
    near = KDTree(np.log(sizes)).query_ball_point(np.log(sizes) + half, half * 1.001, p=np.inf)
    small = np.repeat(np.arange(len(sizes)), [len(where) for where in near])
    large = np.concatenate([np.array(where, dtype=np.intp) for where in near])
    grown = sizes[large] / sizes[small]
    pads = ((grown >= 1) & (grown <= 1 + NEAR)).all(axis=1) & (grown > 1).any(axis=1)
    small, large = small[pads], large[pads]
    # By shape, and within a shape the fastest first; of equals the first one.
    order = np.lexsort((large, predicted[large], small))
    small, large = small[order], large[order]
    first = np.flatnonzero(np.diff(small, prepend=-1))
    return small[first], large[first]


def fit_constants(inputs: Inputs, seconds: Array, start: Constants) -> Constants:
    """Constants within :data:`BOUNDS` that make the log ratios small; robust against outliers.

    Args:
        inputs: cases of one group.
        seconds: their measured times.
        start: where to begin, and what to stay near.
    """
    names = list(BOUNDS) if len(seconds) >= MIN_ROWS else ["compute", "dram", "launch"]
    origin = np.array([_to_fit_scale(name, getattr(start, name)) for name in names])
    bounds = physical_bounds(inputs.machine)
    low, high = np.array([[_to_fit_scale(n, bound) for bound in bounds[n]] for n in names]).T

    def constants(x: Array) -> Constants:
        fitted = {name: _from_fit_scale(name, value) for name, value in zip(names, x, strict=True)}
        return Constants(**{**start.to_json(), **fitted})

    def residuals(x: Array) -> Array:
        guess = inputs.estimate(constants(x)).time
        return np.concatenate([np.log(guess / seconds), _PRIOR * (x - origin)])

    def slopes(x: Array) -> Array:
        # So small a step moves no case to another tile: the fastest tiles are searched for once,
        # not once per constant.
        settled = inputs.settled(inputs.estimate(constants(x)))
        log_time = [np.log(settled.estimate(constants(at)).time) for at in (x, *(x + steps))]
        return np.vstack([(log_time[1:] - log_time[0]).T / _STEP, _PRIOR * np.eye(len(x))])

    steps = _STEP * np.eye(len(names))
    # The solver refuses to begin on a bound.
    inside = np.clip(origin, low + 1e-6, high - 1e-6)
    solved = least_squares(
        residuals, inside, slopes, bounds=(low, high), loss="soft_l1", f_scale=_NOISE, max_nfev=60
    )
    return constants(solved.x)


def _to_fit_scale(name: str, value: float) -> float:
    """A constant on the scale on which it is fitted: its logarithm, unless it is linear."""
    return value if name in _LINEAR else float(np.log(max(value, 1e-10)))


def _from_fit_scale(name: str, value: float) -> float:
    return float(value if name in _LINEAR else np.exp(value))
