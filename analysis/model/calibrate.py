"""Fit the time model to a machine's measurements, and measure how wrong it is.

The problems are cut into folds, and each fold is predicted by a fit to the others. Each measurement
thus has a prediction from a fit that never saw it, which keeps the error figures honest. The fit
that is kept uses all measurements.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.spatial import KDTree

from analysis.model.corrected import corrected_estimate
from analysis.model.features import Inputs
from analysis.model.fit import NEAR, Fit
from analysis.model.fitting import Fitted, fit_group
from analysis.model.predict import Model, PartialPrediction, Prediction
from analysis.model.prior import Prior, prior_without_tables
from analysis.model.query import Query
from analysis.model.residual import MANY_ROWS
from analysis.model.residual import MIN_ROWS as MIN_RESIDUAL_ROWS
from analysis.model.sum_errors import Times, change_factors, sum_factors
from analysis.recordings.load import algorithms_of, kernels_of
from kernels.machine import Machine
from kernels.problem import WIDE_BYTES, Gemm, Problem
from kernels.timemodel.estimate import Array, Estimate, priced_alignment

_FOLDS = 3  # for few measurements; each further fold costs another fit
_FOLDS_OF_MANY = 5  # for many, where a fit to two thirds is worse than the one that is kept
_TAIL = 0.05  # share of the log ratios beyond each end of the interval
_MIN_WIDTH = 0.02  # neither end of an interval is closer to 0 than the measurements' scatter
_TWO_SIDED = 10  # errors; fewer say nothing about a single side
_PRIOR_ROWS = 5  # number of measurements that the prior's range counts as


@dataclass(frozen=True)
class Calibration:
    """A model fitted to a recording, and the prediction of each case by a fit that never saw it."""

    model: Model
    held_back: Prediction

    def to_json(self) -> dict[str, Any]:
        """Return the document of calibration.json.

        It has the constants, the error figures and the number of rows of each group.
        """
        return {
            "machine": self.model.machine.slug,
            "protocol": "parts of the problems, each predicted by a fit to the others",
            "groups": {group: fit.to_json() for group, fit in self.model.fits.items()},
        }


def calibrate(
    machine: Machine,
    rows: pd.DataFrame,
    priors: Mapping[str, Prior] | None = None,
) -> Calibration:
    """Fit every group of a recording's measurements.

    Args:
        machine: the machine on which the rows were measured.
        rows: rows of a recording, as loaded, all with the status ``ok``.
        priors: as in :func:`calibrate_query`.
    """
    seconds = rows["time_us"].to_numpy(dtype=float) * 1e-6
    query = Query.from_rows(rows)
    algorithms = algorithms_of(query.problems, kernels_of(rows))
    return calibrate_query(machine, query, seconds, algorithms=algorithms, priors=priors)


def calibrate_query(
    machine: Machine,
    query: Query,
    seconds: Array,
    folds: int | None = None,
    algorithms: Sequence[str] | None = None,
    priors: Mapping[str, Prior] | None = None,
) -> Calibration:
    """Fit every group of a query to its measured times.

    Args:
        machine: the machine on which the cases were measured.
        query: the cases.
        seconds: the time of one launch of each case.
        folds: number of folds that the problems are cut into. The default is three, or five for
            many measurements.
        algorithms: how each case was computed, where this is known
            (:func:`kernels.names.conv_algorithm`). Fits use it, predictions never do.
        priors: what each group starts from. A group without an entry starts from the best prior
            that needs no imported table.
    """
    groups = query.groups()
    unknown = [""] * len(seconds)
    known_algorithms = np.array(unknown if algorithms is None else algorithms, dtype=object)
    fits: dict[str, Fit] = {}
    parts: list[PartialPrediction] = []
    for group in dict.fromkeys(groups):
        rows = np.flatnonzero(groups == group)
        prior = (priors or {}).get(group) or prior_without_tables(machine, group)
        # 1. Predict each fold by a fit to the others, then fit all measurements of the group.
        fold_count = folds or (_FOLDS_OF_MANY if len(rows) > MANY_ROWS else _FOLDS)
        fold = np.array([_fold_of(query.problems[int(i)], fold_count) for i in rows])
        by_fold = _predict_folds(machine, query, seconds, known_algorithms, rows, fold, prior)
        fitted = fit_group(machine, query.take(rows), seconds[rows], known_algorithms[rows], prior)
        # If a fit to the other folds had too few rows to grow trees, no held-out error tells what
        # trees are worth, so the group gets none.
        fewest_training_rows = len(rows) - max(len(part.where) for part in by_fold)
        if fewest_training_rows < MIN_RESIDUAL_ROWS:
            fitted = fitted._replace(residual=None)
        # 2. Turn the held-out errors of single times and of time ratios into intervals.
        where = np.concatenate([part.where for part in by_fold])
        times = Times(np.concatenate([part.estimate.time for part in by_fold]), seconds[where])
        log_ratio = np.log(times.measured / times.predicted)
        spread = np.concatenate([part.spread for part in by_fold])
        small, large = neighbours(query.take(where), times.predicted)
        pair_spread = np.hypot(spread[small], spread[large])
        ratio_errors = (log_ratio[small] - log_ratio[large]) / pair_spread
        fit = _fit_with_errors(fitted, log_ratio, spread, ratio_errors, prior)
        # 3. Measure how the errors add up in sums, and note which kinds of shapes were measured.
        problems = [query.problems[i] for i in where]
        fits[group] = replace(
            _fit_with_sum_errors(fit, times, spread, small, large),
            aligned_only=all(priced_alignment(problem) >= WIDE_BYTES for problem in problems),
            layout=_only_layout(problems),
        )
        # 4. Give each held-out prediction its interval, split by fold like the estimates.
        low, high = _leave_one_out_ranges(log_ratio / spread, *_prior_range(prior, len(rows) - 1))
        cuts = np.cumsum([len(part.where) for part in by_fold])[:-1]
        fold_lows = np.split(low * spread, cuts)
        fold_highs = np.split(high * spread, cuts)
        parts += [
            PartialPrediction(part.where, part.estimate, fold_low, fold_high)
            for part, fold_low, fold_high in zip(by_fold, fold_lows, fold_highs, strict=True)
        ]
    held_back = Prediction.from_parts(len(seconds), parts)
    return Calibration(Model(machine, fits), held_back)


class _FoldEstimate(NamedTuple):
    """Estimates of the cases of one fold, by a fit to the other folds.

    ``where`` has the positions of the cases in the query. ``spread`` is the relative spread of each
    estimate's error.
    """

    where: NDArray[np.intp]
    estimate: Estimate
    spread: Array


def _predict_folds(
    machine: Machine,
    query: Query,
    seconds: Array,
    known_algorithms: NDArray[Any],
    rows: NDArray[np.intp],
    fold: NDArray[np.intp],
    prior: Prior,
) -> list[_FoldEstimate]:
    """Predict each fold of a group's cases by a fit to the other folds.

    ``rows`` has the positions of the group's cases in the query, and ``fold`` the fold of each.
    """
    by_fold: list[_FoldEstimate] = []
    for number in np.unique(fold):
        held_out, training = rows[fold == number], rows[fold != number]
        fitted = fit_group(
            machine,
            query.take(training),
            seconds[training],
            known_algorithms[training],
            prior,
            part_of=len(rows),
        )
        inputs = Inputs.from_query(machine, query.take(held_out))
        estimate, spread = corrected_estimate(inputs, *fitted)
        by_fold.append(_FoldEstimate(held_out, estimate, spread))
    return by_fold


def _only_layout(problems: Sequence[Problem]) -> str:
    """Return the layout that all problems have if they are single GEMMs, otherwise ""."""
    layouts = {
        problem.layout if isinstance(problem, Gemm) and problem.batch == 1 else ""
        for problem in problems
    }
    return layouts.pop() if len(layouts) == 1 else ""


def _fold_of(problem: Problem, folds: int) -> int:
    """Return the fold of a problem, from 0: a hash of its spec.

    Repeats of a problem, also in other sweeps, are thus in one fold and never predict one another.
    """
    return zlib.crc32(problem.spec().encode()) % folds


def _fit_with_sum_errors(
    fit: Fit, times: Times, spread: Array, small: NDArray[np.intp], large: NDArray[np.intp]
) -> Fit:
    """Add how held-out errors add up in sums of times and in changes of such sums.

    Args:
        fit: the group's fit, with its intervals.
        times: held-out predictions and measured times.
        spread: relative spread of each prediction's error.
        small: positions of GEMMs that have a padding, as in :func:`neighbours`.
        large: positions of their paddings.
    """
    lo = times.predicted * np.exp(fit.low * spread)
    hi = times.predicted * np.exp(fit.high * spread)
    sum_low, sum_high = sum_factors(times, lo, hi)
    # The error of a pair is positive if the padding takes less time than predicted, given the time
    # of the small GEMM.
    before = Times(times.predicted[small], times.measured[small])
    after = Times(times.predicted[large], times.measured[large])
    pair_spread = np.hypot(spread[small], spread[large])
    less = after.predicted * (1 - np.exp(-fit.pair_high * pair_spread))
    more = after.predicted * (np.exp(-fit.pair_low * pair_spread) - 1)
    change_low, change_high = change_factors(before, after, less, more)
    return replace(
        fit,
        sum_low=sum_low,
        sum_high=sum_high,
        change_low=change_low,
        change_high=change_high,
    )


def _fit_with_errors(
    fitted: Fitted, log_ratio: Array, spread: Array, ratio_errors: Array, prior: Prior
) -> Fit:
    """Add the held-out errors: |predicted/measured − 1| and the 90% range of log ratios.

    Args:
        fitted: result of a fit to all measurements of the group.
        log_ratio: log of the measured over the held-out predicted time of each measurement.
        spread: relative spread of each prediction's error.
        ratio_errors: errors of time ratios, as in :func:`pair_errors`.
        prior: what the fit started from.
    """
    error = np.abs(np.exp(-log_ratio) - 1)
    low, high = _range(log_ratio / spread, *_prior_range(prior, len(log_ratio)))
    pair_low, pair_high = _range(ratio_errors, *_prior_pair_range(prior, high - low))
    # A warm prior comes from public tables. If its collections are weighted, the offsets name them.
    start = prior.source if prior.warm and not prior.collections else ""
    return Fit(
        constants=fitted.constants,
        residual=fitted.residual,
        offsets=fitted.offsets,
        low=low,
        high=high,
        pair_low=pair_low,
        pair_high=pair_high,
        rows=len(log_ratio),
        pairs=len(ratio_errors),
        start=start,
        groups=_faded(prior.fit.groups, len(log_ratio)),
        median=float(np.median(error)),
        mean=float(np.mean(error)),
        p95=float(np.quantile(error, 0.95)),
    )


def _faded(groups: Mapping[str, tuple[float, float]], rows: int) -> dict[str, tuple[float, float]]:
    """Return the prior's factors for kinds of shapes, closer to 1 the more rows were measured."""
    share = _PRIOR_ROWS / (rows + _PRIOR_ROWS)
    return {name: (below**share, above**share) for name, (below, above) in groups.items()}


def _prior_range(prior: Prior, rows: int) -> tuple[float, float]:
    """Return the prior's range of log ratios after ``rows`` measurements corrected its scale."""
    spread = prior.fit.typical_spread * prior.spread.narrowing(rows)
    return prior.fit.low * spread, prior.fit.high * spread


def _prior_pair_range(prior: Prior, width: float) -> tuple[float, float]:
    """Return the range of the error of a time ratio of neighbours before any pair was measured.

    This is the prior's range for pairs, because neighbours share the error of the scale. It is
    never wider than if the errors of two neighbours lay at opposite ends of the range of single
    times, which is ``width`` wide.
    """
    # Errors of pairs are multiples of the root of the sum of both squared spreads. For two equal
    # spreads, this is √2 times one of them.
    limit = width / math.sqrt(2)
    low = prior.fit.pair_low * prior.fit.typical_spread
    high = prior.fit.pair_high * prior.fit.typical_spread
    return max(low, -limit), min(high, limit)


def _range(errors: Array, prior_low: float, prior_high: float) -> tuple[float, float]:
    """Return the range that contains the next error of the same kind in 90% of cases.

    This is split conformal prediction. Each end is averaged with the prior's on a logarithmic
    scale; the prior counts as :data:`_PRIOR_ROWS` measurements.
    """
    if not len(errors):
        return prior_low, prior_high
    return _blended(*_own_ends(errors), len(errors), prior_low, prior_high)


def _own_ends(errors: Array) -> tuple[float, float]:
    """Return the k-th smallest and k-th largest of n errors, k = ⌊(n + 1)·5%⌋ and at least 1.

    Fewer than ten errors say nothing about a single side. Then both ends are at the largest
    absolute error.
    """
    if len(errors) < _TWO_SIDED:
        largest = float(np.abs(errors).max())
        return -largest, largest
    k = max(int((len(errors) + 1) * _TAIL), 1)
    ordered = np.sort(errors)
    return float(ordered[k - 1]), float(ordered[-k])


def _blended(low: Any, high: Any, rows: int, prior_low: float, prior_high: float) -> Any:
    """Return the weighted geometric mean of a range from measured errors and the prior's.

    Args:
        low: lower ends from measured errors.
        high: upper ends from measured errors.
        rows: number of errors.
        prior_low: lower end of the prior's range.
        prior_high: upper end of the prior's range.
    """
    share = rows / (rows + _PRIOR_ROWS)

    def weighted_mean(measured: Any, prior: float) -> Any:
        return np.maximum(measured, _MIN_WIDTH) ** share * max(prior, _MIN_WIDTH) ** (1 - share)

    return -weighted_mean(-low, -prior_low), weighted_mean(high, prior_high)


def _leave_one_out_ranges(
    errors: Array, prior_low: float, prior_high: float
) -> tuple[Array, Array]:
    """Return for each error the :func:`_range` of all others.

    Its own error is left out so that no case widens its own interval.
    """
    n = len(errors)
    k = int(n * _TAIL)  # ⌊(n − 1 + 1)·5%⌋: one error is left out
    # For fewer than 20 errors, :func:`_own_ends` has special cases.
    if k == 0:
        ranges = [_range(np.delete(errors, i), prior_low, prior_high) for i in range(n)]
        return np.array([low for low, _ in ranges]), np.array([high for _, high in ranges])
    # Sorting the order gives the rank of each error, from 0.
    rank = np.argsort(np.argsort(errors, kind="stable"), kind="stable")
    ordered = np.sort(errors)
    # If the error that is left out is among the k smallest, the k-th smallest of the rest is the
    # (k+1)-th smallest of all; otherwise it stays the k-th. The same holds for the largest.
    low = np.where(rank < k, ordered[k], ordered[k - 1])
    high = np.where(rank >= n - k, ordered[-k - 1], ordered[-k])
    return _blended(low, high, n - 1, prior_low, prior_high)


def pair_errors(
    query: Query, predicted: Array, log_ratio: Array, spread: Array, min_gain: float = -1.0
) -> Array:
    """Return the errors of log time ratios over pairs of :func:`neighbours`.

    Pairs that promise a gain of less than ``min_gain`` are left out. The more a pair promises, the
    more optimistic its prediction tends to be. Errors are multiples of the root of the sum of both
    squared spreads, as if the two predictions were independent.

    Args:
        query: the cases.
        predicted: predicted time of each case.
        log_ratio: log of the measured over the predicted time of each case.
        spread: relative spread of each prediction's error.
        min_gain: gain in time, as a fraction; the default leaves out no pair.
    """
    small, large = neighbours(query, predicted)
    promised = predicted[small] > (1 + min_gain) * predicted[large]
    small, large = small[promised], large[promised]
    return (log_ratio[small] - log_ratio[large]) / np.hypot(spread[small], spread[large])


def neighbours(query: Query, predicted: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return pairs of GEMMs, the second of which pads the first.

    They differ in size by up to :data:`NEAR` in every dimension, and in nothing else. Of all
    measured paddings of a shape, the one that is predicted to be fastest makes the pair. Advice
    chooses that padding, too, and with it the errors that make it look fast.

    Returns:
        Positions of the small GEMMs and of the large ones.
    """
    # 1. Collect the indices of cases that differ only in size.
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, problem in enumerate(query.problems):
        if isinstance(problem, Gemm):
            conditions = (query.configs[index], query.cached[index], query.sustained[index])
            kinds.setdefault((problem.layout, problem.batch, *conditions), []).append(index)
    # 2. Find the pairs in each kind. The empty pair is for a query without GEMMs.
    pairs = [(np.empty(0, dtype=np.intp),) * 2]
    for indices in kinds.values():
        members = np.array(indices, dtype=np.intp)
        sizes = np.array([[getattr(query.problems[i], d) for d in "mnk"] for i in members])
        small, large = _best_pads(sizes, predicted[members])
        pairs.append((members[small], members[large]))
    smalls, larges = zip(*pairs, strict=True)
    return np.concatenate(smalls), np.concatenate(larges)


def _best_pads(sizes: NDArray[np.int_], predicted: Array) -> tuple[NDArray[np.intp], ...]:
    """Return the shapes that have paddings, each with the padding that is predicted to be fastest.

    Args:
        sizes: M, N and K of each shape, one row per shape.
        predicted: predicted seconds of each shape.

    Returns:
        Positions of the padded shapes, and of the padding of each.
    """
    # The paddings of a shape lie in a cube above it in log sizes, which a k-d tree finds. Comparing
    # all 35,700 shapes of a public table with one another would take 20 GB.
    # The cube is a little larger, so that rounding loses no padding at its surface.
    half_edge = math.log(1 + NEAR) / 2
    candidates = KDTree(np.log(sizes)).query_ball_point(
        np.log(sizes) + half_edge, half_edge * 1.001, p=np.inf
    )
    small = np.repeat(np.arange(len(sizes)), [len(where) for where in candidates])
    large = np.concatenate([np.array(where, dtype=np.intp) for where in candidates])
    size_ratios = sizes[large] / sizes[small]
    is_near = ((size_ratios >= 1) & (size_ratios <= 1 + NEAR)).all(axis=1)
    is_padding = is_near & (size_ratios > 1).any(axis=1)
    small, large = small[is_padding], large[is_padding]
    # Sort by shape and, within a shape, the fastest padding first; of equals, the first one.
    order = np.lexsort((large, predicted[large], small))
    small, large = small[order], large[order]
    # The first row of each shape has its fastest padding.
    fastest = np.flatnonzero(np.diff(small, prepend=-1))
    return small[fastest], large[fastest]
