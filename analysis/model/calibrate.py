"""Fit the time model to a machine's measurements, and say how wrong it is.

The problems are cut into folds. A fit to the others predicts each of them, so each row has a
prediction from a fit that never saw it, and the error figures are honest. The fit that is kept
comes from all rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.spatial import KDTree

from analysis.model.features import Inputs
from analysis.model.fit import NEAR, UNCALIBRATED, Fit
from analysis.model.fitting import Fitted, Way, fit_group
from analysis.model.predict import Model, Part, Prediction
from analysis.model.prior import LIBRARY, Prior
from analysis.model.query import Query
from analysis.model.residual import MANY_ROWS
from analysis.model.residual import MIN_ROWS as MIN_RESIDUAL_ROWS
from analysis.model.sums import Times, change_factors, sum_factors
from analysis.recordings.load import algorithms_of, kernels_of
from kernels.constants import Constants, default_constants
from kernels.estimate import Array, Estimate
from kernels.machine import Machine
from kernels.problem import WIDE_BYTES, Gemm, Problem

_FOLDS = 3  # of few rows: each more is another fit
_FOLDS_OF_MANY = 5  # of many rows, where a fit to two thirds is worse than the one that is kept
_TAIL = 0.05  # share of the log ratios on either side of the interval
_MIN_WIDTH = 0.02  # no interval is narrower than the measurements' scatter


@dataclass(frozen=True)
class Calibration:
    """A model fitted to a recording, and each row's prediction by a fit that never saw it."""

    model: Model
    held_back: Prediction

    def to_json(self) -> dict[str, Any]:
        """calibration.json: constants, error figures and rows used, group by group."""
        return {
            "machine": self.model.machine.slug,
            "protocol": "parts of the problems, each predicted by a fit to the others",
            "groups": {group: fit.to_json() for group, fit in self.model.fits.items()},
        }


def calibrate(
    machine: Machine,
    rows: pd.DataFrame,
    priors: Mapping[str, tuple[Prior, ...]] | None = None,
) -> Calibration:
    """Fit every group of the measured rows; all of them must be ``ok``.

    Args:
        machine: the machine that they were measured on.
        rows: rows of a recording, as loaded.
        priors: as in :func:`calibrate_query`.
    """
    seconds = rows["time_us"].to_numpy(dtype=float) * 1e-6
    query = Query.of_rows(rows)
    algorithms = algorithms_of(query.problems, kernels_of(rows))
    return calibrate_query(machine, query, seconds, algorithms=algorithms, priors=priors)


def calibrate_query(
    machine: Machine,
    query: Query,
    seconds: Array,
    folds: int | None = None,
    starts: Callable[[str], Constants] | None = None,
    algorithms: Sequence[str] | None = None,
    priors: Mapping[str, tuple[Prior, ...]] | None = None,
) -> Calibration:
    """Fit every group of a query to its measured seconds.

    Args:
        machine: the machine that they were measured on.
        query: the cases.
        seconds: the time of one launch of each case.
        folds: into how many folds the problems are cut, each predicted by a fit to the rest;
            three if None, of many rows five.
        starts: the constants to begin from and to stay near, by dtype; the shipped ones if None.
        algorithms: how each case was computed, where known (:func:`kernels.names.conv_algorithm`).
            Fits use it; predictions never do.
        priors: others' collections, by dtype: they are used where held-back rows are predicted
            better with them than without.
    """
    groups = query.groups()
    known = np.array([""] * len(seconds) if algorithms is None else algorithms, dtype=object)
    fits: dict[str, Fit] = {}
    parts: list[Part] = []
    for group in dict.fromkeys(groups):
        rows = np.flatnonzero(groups == group)
        dtype = group.split()[-1]
        start = starts(dtype) if starts else default_constants(machine.generation, dtype)
        ways = [Way(start)]
        theirs = (priors or {}).get(dtype, ())
        if theirs and group == f"{LIBRARY} gemm {dtype}":
            ways.append(Way.of(machine, dtype, theirs))
        number = folds or (_FOLDS_OF_MANY if len(rows) > MANY_ROWS else _FOLDS)
        fold = np.array([_fold_of(query.problems[int(i)], number) for i in rows])
        way, pieces = _best_way(machine, query, seconds, known, rows, fold, ways)
        fitted = fit_group(machine, query.take(rows), seconds[rows], known[rows], way)
        # Where a fold had too few rows for a residual, no held-out error tells what one is worth.
        fewest = len(rows) - max(len(at) for at, _, _ in pieces)
        if fewest < MIN_RESIDUAL_ROWS:
            fitted = fitted._replace(residual=None)
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


_Piece = tuple[NDArray[np.intp], Estimate, Array]  # rows, their estimate, and its spread


def _best_way(
    machine: Machine,
    query: Query,
    seconds: Array,
    known: NDArray[Any],
    rows: NDArray[np.intp],
    fold: NDArray[np.intp],
    ways: Sequence[Way],
) -> tuple[Way, list[_Piece]]:
    """The way to fit a group that best predicts each fold from the others, and what it predicts."""
    found: list[tuple[Way, list[_Piece]]] = []
    for way in ways:
        pieces: list[_Piece] = []
        for number in np.unique(fold):
            held_out, rest = rows[fold == number], rows[fold != number]
            others = query.take(rest), seconds[rest], known[rest]
            fitted = fit_group(machine, *others, way, part_of=len(rows))
            inputs = Inputs.of(machine, query.take(held_out))
            pieces.append((held_out, *inputs.predict(*fitted)))
        found.append((way, pieces))
    if len(found) == 1:
        return found[0]

    def error(pieces: list[_Piece]) -> float:
        logs = [np.log(seconds[at] / guess.time) for at, guess, _ in pieces]
        return float(np.mean(np.abs(np.concatenate(logs))))

    return min(found, key=lambda each: error(each[1]))


def _only_layout(problems: Sequence[Problem]) -> str:
    """The layout that all problems have, if they are single products; else empty."""
    layouts = {p.layout if isinstance(p, Gemm) and p.batch == 1 else "" for p in problems}
    return layouts.pop() if len(layouts) == 1 else ""


def _fold_of(problem: Problem, folds: int) -> int:
    """The fold of a problem, the same in every sweep: its repeats never predict one another."""
    return zlib.crc32(problem.spec().encode()) % folds


def _fit_with_errors(fitted: Fitted, log_ratio: Array, spread: Array, pair_errors: Array) -> Fit:
    """Attach the held-back error: |predicted/measured − 1| and the 90 % range of log ratios."""
    error = np.abs(np.exp(-log_ratio) - 1)
    low, high = _range(log_ratio / spread)
    # With few pairs: as if the two errors lay at opposite ends of their ranges.
    pair_low, pair_high = (low - high) / math.sqrt(2), (high - low) / math.sqrt(2)
    if len(pair_errors) + 1 >= 1 / _TAIL:
        pair_low, pair_high = _range(pair_errors)
    return Fit(
        constants=fitted.constants,
        residual=fitted.residual,
        offsets=fitted.offsets,
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
