"""Fit the time model to a machine's measurements, and cross-validate it.

The problems are split into folds, and each fold is predicted with a fit to the other folds. The
reported errors are the errors of these held-out predictions. The final fit uses all measurements.
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

_FOLDS = 3
"""Number of folds for a group of up to :data:`MANY_ROWS` measurements."""

_FOLDS_OF_MANY = 5
"""Number of folds for a group of more than :data:`MANY_ROWS` measurements. With three folds,
held-out errors would be too pessimistic: a fit to two thirds of so many measurements is clearly
worse than the final fit to all of them."""

_TAIL = 0.05  # Share of the errors beyond each end of a 90% interval.
_MIN_WIDTH = 0.02  # Smallest distance of an interval's end from 0: the scatter of measurements.
_TWO_SIDED = 10  # Smallest number of errors from which each end is estimated separately.
_PRIOR_ROWS = 5  # Weight of the prior's range in an interval, as a number of measurements.


@dataclass(frozen=True)
class Calibration:
    """A model fitted to measurements, and a held-out prediction of each measured case."""

    model: Model
    held_out: Prediction

    def to_json(self) -> dict[str, Any]:
        """Return the content of calibration.json, including the fit of each group."""
        return {
            "machine": self.model.machine.slug,
            "protocol": "each fold of the problems is predicted with a fit to the other folds",
            "groups": {group: fit.to_json() for group, fit in self.model.fits.items()},
        }


def calibrate(
    machine: Machine,
    rows: pd.DataFrame,
    priors: Mapping[str, Prior] | None = None,
) -> Calibration:
    """Fit the model to the measurements of a recording, one fit per group.

    ``rows`` are measured cases with the status ``ok``. ``priors`` is as in :func:`calibrate_query`.
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
    """Fit the model to the measured times of a query's cases, one fit per group.

    ``seconds`` has the time of one launch of each case. ``folds`` is the number of folds of every
    group. If ``folds`` is None, a group with more than :data:`MANY_ROWS` cases has five folds, and
    a smaller one has three.

    ``algorithms`` has the algorithm that computed each case, empty where it is not known
    (:func:`kernels.names.conv_algorithm`); None if no algorithm is known. Held-out predictions do
    not use the algorithms of the predicted cases.

    The fit of a group starts from the group's entry in ``priors``. Without an entry, it starts from
    the best prior that needs no imported table.
    """
    groups = query.groups()
    if algorithms is None:
        algorithms = [""] * len(seconds)
    known_algorithms = np.array(algorithms, dtype=object)
    fits: dict[str, Fit] = {}
    parts: list[PartialPrediction] = []
    for group in dict.fromkeys(groups):
        rows = np.flatnonzero(groups == group)  # positions of the group's cases in the query
        prior = priors.get(group) if priors else None
        if prior is None:
            prior = prior_without_tables(machine, group)
        default_folds = _FOLDS_OF_MANY if len(rows) > MANY_ROWS else _FOLDS
        fits[group], group_parts = _calibrate_group(
            machine, query, seconds, known_algorithms, rows, folds or default_folds, prior
        )
        parts += group_parts
    held_out = Prediction.from_parts(len(seconds), parts)
    return Calibration(Model(machine, fits), held_out)


def _calibrate_group(
    machine: Machine,
    query: Query,
    seconds: Array,
    known_algorithms: NDArray[Any],
    rows: NDArray[np.intp],
    folds: int,
    prior: Prior,
) -> tuple[Fit, list[PartialPrediction]]:
    """Fit the model to the cases of one group, and predict each fold with a fit to the others.

    ``query``, ``seconds`` and ``known_algorithms`` cover the cases of all groups. ``rows`` has the
    positions of the group's cases.
    """
    # 1. Predict each fold with a fit to the other folds, then fit all cases of the group.
    fold_numbers = np.array([_fold_of(query.problems[int(i)], folds) for i in rows])
    fold_estimates = _predict_folds(
        machine, query, seconds, known_algorithms, rows, fold_numbers, prior
    )
    fitted = fit_group(machine, query.take(rows), seconds[rows], known_algorithms[rows], prior)
    # If a fold was predicted without trees, because the other folds had too few cases to grow them,
    # held-out errors do not show how good the trees are. The group then has no trees.
    fewest_training_rows = len(rows) - max(len(part.positions) for part in fold_estimates)
    if fewest_training_rows < MIN_RESIDUAL_ROWS:
        fitted = fitted._replace(residual=None)
    # 2. Turn the held-out errors of single times and of time ratios into intervals.
    positions = np.concatenate([part.positions for part in fold_estimates])
    times = Times(
        np.concatenate([part.estimate.time for part in fold_estimates]), seconds[positions]
    )
    log_ratio = np.log(times.measured / times.predicted)
    spread = np.concatenate([part.spread for part in fold_estimates])
    # Each pair is a small GEMM and the padding of it that is predicted to be fastest.
    small, large = fastest_paddings(query.take(positions), times.predicted)
    ratio_errors = _ratio_errors(log_ratio, spread, small, large)
    fit = _fit_with_errors(fitted, log_ratio, spread, ratio_errors, prior)
    # 3. Estimate how the errors add up in sums of times, and record which alignments and layouts
    #    were measured.
    problems = [query.problems[i] for i in positions]
    fit = replace(
        _fit_with_sum_errors(fit, times, spread, small, large),
        aligned_only=all(priced_alignment(problem) >= WIDE_BYTES for problem in problems),
        layout=_only_layout(problems),
    )
    # 4. Give each held-out prediction its interval, which comes from all other cases of the group.
    #    The arrays have the cases of all folds, one fold after the other, so they are split like
    #    the estimates.
    low, high = _leave_one_out_ranges(log_ratio / spread, *_prior_range(prior, len(rows) - 1))
    cuts = np.cumsum([len(part.positions) for part in fold_estimates])[:-1]
    fold_lows = np.split(low * spread, cuts)
    fold_highs = np.split(high * spread, cuts)
    parts = [
        PartialPrediction(part.positions, part.estimate, fold_low, fold_high)
        for part, fold_low, fold_high in zip(fold_estimates, fold_lows, fold_highs, strict=True)
    ]
    return fit, parts


class _FoldEstimate(NamedTuple):
    """Estimates of the cases of one fold, from a fit to the other folds.

    ``positions`` has the position of each case in the query.
    """

    positions: NDArray[np.intp]
    estimate: Estimate
    spread: Array


def _predict_folds(
    machine: Machine,
    query: Query,
    seconds: Array,
    known_algorithms: NDArray[Any],
    rows: NDArray[np.intp],
    fold_numbers: NDArray[np.intp],
    prior: Prior,
) -> list[_FoldEstimate]:
    """Predict each fold of a group's cases with a fit to the other folds."""
    fold_estimates: list[_FoldEstimate] = []
    for number in np.unique(fold_numbers):
        held_out = rows[fold_numbers == number]
        training = rows[fold_numbers != number]
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
        fold_estimates.append(_FoldEstimate(held_out, estimate, spread))
    return fold_estimates


def _only_layout(problems: Sequence[Problem]) -> str:
    """Return the layout of the problems if all are unbatched GEMMs of one layout, otherwise ""."""
    layouts = {
        problem.layout if isinstance(problem, Gemm) and problem.batch == 1 else ""
        for problem in problems
    }
    return layouts.pop() if len(layouts) == 1 else ""


def _fold_of(problem: Problem, folds: int) -> int:
    """Return the fold of a problem.

    All measurements of a problem are in the same fold, so no problem is predicted with a fit to its
    own measurements.
    """
    return zlib.crc32(problem.spec().encode()) % folds


def _fit_with_sum_errors(
    fit: Fit, times: Times, spread: Array, small: NDArray[np.intp], large: NDArray[np.intp]
) -> Fit:
    """Add to a fit the factors that correct the intervals of summed times."""
    # 1. Sums in which nothing is replaced need the interval of each case, in seconds.
    lo = times.predicted * np.exp(fit.low * spread)
    hi = times.predicted * np.exp(fit.high * spread)
    sum_low, sum_high = sum_factors(times, lo, hi)
    # 2. Sums in which paddings replace GEMMs need the interval of each padding. The error of a pair
    #    is positive if the padding takes less time than the model predicts from the measured time
    #    of the small GEMM, so the upper end for pairs gives the lower half of the interval.
    before = Times(times.predicted[small], times.measured[small])
    after = Times(times.predicted[large], times.measured[large])
    pair_spread = np.hypot(spread[small], spread[large])
    lower_half = after.predicted * (1 - np.exp(-fit.pair_high * pair_spread))
    upper_half = after.predicted * (np.exp(-fit.pair_low * pair_spread) - 1)
    change_low, change_high = change_factors(before, after, lower_half, upper_half)
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
    """Return a fit with the errors of its held-out predictions and the resulting intervals.

    ``log_ratio`` is log(measured / held-out prediction) of each case.
    """
    error = np.abs(np.exp(-log_ratio) - 1)  # |predicted / measured − 1| of each case
    low, high = _range(log_ratio / spread, *_prior_range(prior, len(log_ratio)))
    pair_low, pair_high = _range(ratio_errors, *_prior_pair_range(prior, high - low))
    # The constants of a warm prior come from public tables. If the fit has weights for these
    # tables, its offsets already name them.
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
        groups=_weakened_factors(prior.fit.groups, len(log_ratio)),
        median=float(np.median(error)),
        mean=float(np.mean(error)),
        p95=float(np.quantile(error, 0.95)),
    )


def _weakened_factors(
    groups: Mapping[str, tuple[float, float]], rows: int
) -> dict[str, tuple[float, float]]:
    """Return the prior's factors for kinds of shapes; each measured case moves them closer to 1.

    ``rows`` is the number of measured cases.
    """
    prior_share = _PRIOR_ROWS / (rows + _PRIOR_ROWS)
    return {
        name: (below**prior_share, above**prior_share) for name, (below, above) in groups.items()
    }


def _prior_range(prior: Prior, rows: int) -> tuple[float, float]:
    """Return the prior's 90% range of log(measured / predicted) after a fit to ``rows`` cases."""
    spread = prior.fit.typical_spread * prior.spread.narrowing(rows)
    return prior.fit.low * spread, prior.fit.high * spread


def _prior_pair_range(prior: Prior, width: float) -> tuple[float, float]:
    """Return the 90% range that the prior implies for the errors of log time ratios.

    The ends of the range are multiples of the combined spread of a ratio's two predictions.
    Measurements of single times mostly reveal the error that all times share. This error cancels in
    a ratio of two times, so such measurements only limit how wide the range can be: two errors
    differ most if they lie at opposite ends of the 90% range for single times.

    ``width`` is the width of the 90% range for log(measured / predicted) of single times, as a
    multiple of a prediction's spread.
    """
    # Errors of pairs are multiples of the root of the sum of both squared spreads. For two equal
    # spreads, this root is √2 times one of them.
    limit = width / math.sqrt(2)
    # The prior's ends are multiples of its own spreads. The new fit's typical spread is 1.
    low = prior.fit.pair_low * prior.fit.typical_spread
    high = prior.fit.pair_high * prior.fit.typical_spread
    return max(low, -limit), min(high, limit)


def _range(errors: Array, prior_low: float, prior_high: float) -> tuple[float, float]:
    """Return a range that is expected to contain 90% of further errors of the same kind.

    The ends come from split conformal prediction, and are then averaged with the prior's ends.
    """
    if not len(errors):
        return prior_low, prior_high
    return _blended(*_conformal_ends(errors), len(errors), prior_low, prior_high)


def _conformal_ends(errors: Array) -> tuple[float, float]:
    """Return the k-th smallest and the k-th largest of n errors, with k = max(⌊(n + 1)·5%⌋, 1).

    If there are fewer than ten errors, the two ends are not estimated separately: each end is as
    far from 0 as the largest absolute error.
    """
    if len(errors) < _TWO_SIDED:
        largest = float(np.abs(errors).max())
        return -largest, largest
    k = max(int((len(errors) + 1) * _TAIL), 1)
    ordered = np.sort(errors)
    return float(ordered[k - 1]), float(ordered[-k])


def _blended(
    low: float | Array, high: float | Array, rows: int, prior_low: float, prior_high: float
) -> tuple[Any, Any]:
    """Return the weighted geometric mean of the range of measured errors and the prior's range.

    An end that is closer to 0 than :data:`_MIN_WIDTH`, or on the wrong side of 0, is first moved
    outwards to this distance.
    """
    share = rows / (rows + _PRIOR_ROWS)

    def weighted_mean(measured: float | Array, prior: float) -> Any:
        return np.maximum(measured, _MIN_WIDTH) ** share * max(prior, _MIN_WIDTH) ** (1 - share)

    return -weighted_mean(-low, -prior_low), weighted_mean(high, prior_high)


def _leave_one_out_ranges(
    errors: Array, prior_low: float, prior_high: float
) -> tuple[Array, Array]:
    """Return, for each error, the range that :func:`_range` derives from all other errors.

    The interval of a case then does not depend on the case's own error.
    """
    count = len(errors)
    # The k of _conformal_ends is ⌊(n + 1)·5%⌋ for n errors. Here one error is left out, so n is
    # ``count`` − 1.
    k = int(count * _TAIL)
    if k == 0:  # _conformal_ends has other rules for so few errors
        ranges = [_range(np.delete(errors, i), prior_low, prior_high) for i in range(count)]
        return np.array([low for low, _ in ranges]), np.array([high for _, high in ranges])
    # Sorting the sort order gives the rank of each error, from 0.
    rank = np.argsort(np.argsort(errors, kind="stable"), kind="stable")
    ordered = np.sort(errors)
    # If the error that is left out is among the k smallest, the k-th smallest of the others is the
    # (k+1)-th smallest of all errors; otherwise it is the k-th. The same holds for the largest.
    low = np.where(rank < k, ordered[k], ordered[k - 1])
    high = np.where(rank >= count - k, ordered[-k - 1], ordered[-k])
    return _blended(low, high, count - 1, prior_low, prior_high)


def pair_errors(
    query: Query, predicted: Array, log_ratio: Array, spread: Array, min_gain: float = -1.0
) -> Array:
    """Return the errors of predicted time ratios for the pairs of :func:`fastest_paddings`.

    A time ratio is the time of the GEMM divided by the time of its padding. An error is the log of
    the measured ratio minus the log of the predicted ratio. Each error is divided by the square
    root of the sum of the two squared spreads, as if the errors of the two predictions were
    independent.

    ``predicted`` is in seconds, and ``log_ratio`` is log(measured / predicted) of each case. A pair
    is included if its predicted gain exceeds ``min_gain``, a fraction of the padding's predicted
    time. The default includes all pairs.
    """
    small, large = fastest_paddings(query, predicted)
    is_included = predicted[small] > (1 + min_gain) * predicted[large]
    return _ratio_errors(log_ratio, spread, small[is_included], large[is_included])


def _ratio_errors(
    log_ratio: Array, spread: Array, small: NDArray[np.intp], large: NDArray[np.intp]
) -> Array:
    """Return the errors that :func:`pair_errors` defines, one for each pair of cases."""
    return (log_ratio[small] - log_ratio[large]) / np.hypot(spread[small], spread[large])


def fastest_paddings(query: Query, predicted: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pair each GEMM that has paddings with the padding that is predicted to be fastest.

    A padding of a GEMM is another case of the query that differs only in size: no dimension is
    smaller, and each may be larger by at most the fraction :data:`NEAR`. Advice also picks the
    padding that is predicted to be fastest, so the errors of these pairs show how optimistic such a
    pick is. All cases must have the same dtype.

    Returns:
        Positions of the GEMMs that have paddings, and positions of the paddings paired with them.
    """
    # 1. Group the cases that differ only in size.
    positions_by_conditions: dict[tuple[Any, ...], list[int]] = {}
    for position, problem in enumerate(query.problems):
        if isinstance(problem, Gemm):
            conditions = (
                problem.layout,
                problem.batch,
                query.implementations[position],
                query.configs[position],
                query.cached[position],
                query.sustained[position],
            )
            positions_by_conditions.setdefault(conditions, []).append(position)
    # 2. Find the pairs in each group. The empty arrays are for a query without GEMMs.
    small_parts = [np.empty(0, dtype=np.intp)]
    large_parts = [np.empty(0, dtype=np.intp)]
    for positions in positions_by_conditions.values():
        members = np.array(positions, dtype=np.intp)
        gemms = [query.problems[i].implied_gemm for i in positions]  # the GEMMs themselves
        sizes = np.array([(gemm.m, gemm.n, gemm.k) for gemm in gemms])
        small, large = _best_pads(sizes, predicted[members])
        small_parts.append(members[small])
        large_parts.append(members[large])
    return np.concatenate(small_parts), np.concatenate(large_parts)


def _best_pads(
    sizes: NDArray[np.int_], predicted: Array
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Find the pairs of :func:`fastest_paddings` among shapes that differ only in size.

    ``sizes`` has M, N and K (columns) of each shape (rows).
    """
    # 1. Collect candidates. In log sizes, the paddings of a shape lie in a cube with the shape at
    #    its lowest corner. A k-d tree finds them, because comparing all 35,700 shapes of a public
    #    table with one another would take more than 20 GB. The factor 1.001 makes the cube a little
    #    larger, so that rounding loses no padding at its surface.
    half_edge = math.log(1 + NEAR) / 2
    candidates = KDTree(np.log(sizes)).query_ball_point(
        np.log(sizes) + half_edge, half_edge * 1.001, p=np.inf
    )
    small = np.repeat(np.arange(len(sizes)), [len(positions) for positions in candidates])
    large = np.concatenate([np.array(positions, dtype=np.intp) for positions in candidates])
    # 2. Keep the candidates that are paddings according to their exact sizes.
    size_ratios = sizes[large] / sizes[small]
    is_near = ((size_ratios >= 1) & (size_ratios <= 1 + NEAR)).all(axis=1)
    is_padding = is_near & (size_ratios > 1).any(axis=1)
    small, large = small[is_padding], large[is_padding]
    # 3. Sort the pairs by shape, then by the predicted time of the padding, then by its position.
    order = np.lexsort((large, predicted[large], small))
    small, large = small[order], large[order]
    # The first pair of each shape has its fastest padding.
    fastest = np.flatnonzero(np.diff(small, prepend=-1))
    return small[fastest], large[fastest]
