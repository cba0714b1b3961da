"""Fit the machine's speed at each moment of a run, from the samples of the run's cases.

The logarithm of a sample's time is called its log time. It is modelled as the sum of the case's log
time, the machine's log time at the moment of the sample, and noise. The machine's log time is
assumed to be constant over short stretches of the run. The fit matters for a case whose few samples
were taken close together, because their scatter does not show how the machine's speed changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sweeps.timing.statistics import Z95, median_interval

Array = NDArray[np.float64]
Whole = NDArray[np.intp]

_STRETCH_SAMPLES = 20  # smallest number of samples in a stretch
_MAX_STRETCHES = 400
_MIN_STRETCHES = 12  # a run with fewer stretches is taken to be steady
_MIN_CASE_SAMPLES = 4  # cases with fewer samples are left out of the fit
_ITERATIONS = 12  # passes of the median polish
_SIGNIFICANT = 3.0  # standard errors by which the agreement of both halves must exceed chance
_DECORRELATED = 0.1  # correlation below which values count as independent


@dataclass(frozen=True)
class MachineSpeed:
    """Log time of the machine, relative to its mean, over stretches of a run.

    Attributes:
        until: time of the last sample of each stretch, in seconds since 1970; empty if the
            machine's speed did not change measurably.
        log_time: the machine's log time in each stretch; empty if ``until`` is empty.
        lo: lower end of the 95% interval of the log time's median over the run.
        hi: upper end of that interval.
        spread: difference between the 95th and 5th percentiles of ``log_time``.
    """

    until: Array
    log_time: Array
    lo: float = 0.0
    hi: float = 0.0
    spread: float = 0.0

    def at(self, moments: Sequence[float]) -> Array:
        """Return the machine's log time at each moment; zeros for :data:`STEADY`."""
        if not len(self.until):
            return np.zeros(len(moments))
        stretch = np.searchsorted(self.until, moments)
        # A moment after the last sample belongs to the last stretch.
        return self.log_time[np.minimum(stretch, len(self.until) - 1)]

    def interval(
        self, seconds: Sequence[float], moments: Sequence[float]
    ) -> tuple[float, float] | None:
        """Return the 95% interval of a case's median time over the run, in seconds.

        Return None for fewer than six samples. The interval includes the one computed from the
        measured samples and the one computed after correcting them for the machine's speed.

        Args:
            seconds: time per launch of each of the case's samples, in seconds.
            moments: time at which each sample was taken, in seconds since 1970.
        """
        measured = median_interval(seconds)
        if measured is None or not len(self.until):
            return measured
        measured_lo, measured_hi = measured
        # The samples are corrected to the machine's mean speed, as log times.
        corrected_logs = median_interval(list(np.log(seconds) - self.at(moments)))
        assert corrected_logs is not None  # there are as many corrected samples as measured ones
        log_lo, log_hi = corrected_logs
        # A median over the run also depends on the median of the machine's speed, so the interval
        # of that median is added. Adding it in quadrature would make the result narrower, and
        # perhaps too narrow.
        corrected_lo = math.exp(log_lo + self.lo)
        corrected_hi = math.exp(log_hi + self.hi)
        return min(measured_lo, corrected_lo), max(measured_hi, corrected_hi)


STEADY = MachineSpeed(np.empty(0), np.empty(0))
"""Machine speed that did not change measurably."""


def machine_speed(
    cases: Sequence[int], moments: Sequence[float], seconds: Sequence[float]
) -> MachineSpeed:
    """Fit the machine's speed over the samples of one run on one device.

    Return :data:`STEADY` if there are too few samples, or if the speed did not change measurably.

    Args:
        cases: index of each sample's case.
        moments: time at which each sample was taken, in seconds since 1970.
        seconds: time per launch of each sample, in seconds.
    """
    # 1. Sort the samples by time, and leave out cases with too few of them.
    order = np.argsort(moments, kind="stable")
    case = np.asarray(cases, dtype=int)[order]
    moment = np.asarray(moments, dtype=float)[order]
    log_time = np.log(np.asarray(seconds, dtype=float)[order])
    if not len(case):
        return STEADY
    samples_of_case = np.bincount(case)
    is_kept = samples_of_case[case] >= _MIN_CASE_SAMPLES
    case, moment, log_time = case[is_kept], moment[is_kept], log_time[is_kept]
    # 2. Fit the machine's log time to stretches with equal numbers of samples.
    count = min(_MAX_STRETCHES, len(case) // _STRETCH_SAMPLES)
    if count < _MIN_STRETCHES:
        return STEADY
    stretch = np.arange(len(case)) * count // len(case)
    fitted = _common_log_time(case, stretch, log_time, count)
    # 3. Repeat the fit for each half of the samples. The halves differ in their noise, but not in
    # the machine's speed. Each half has the even samples of some cases and the odd samples of the
    # others, because the k-th samples of all cases tend to come from the same round.
    is_first = (_rank_in_group(case) + case) % 2 == 0
    first_half = _common_log_time(case[is_first], stretch[is_first], log_time[is_first], count)
    second_half = _common_log_time(case[~is_first], stretch[~is_first], log_time[~is_first], count)
    # 4. Reduce the fit to the part on which both halves agree, if that exceeds chance. The noise of
    # the halves is independent, so their covariance estimates the variance of the machine's true
    # log time. If the speed never changes, the standard error of the covariance is the product of
    # both standard deviations divided by √count.
    agreement = float(
        np.mean((first_half - first_half.mean()) * (second_half - second_half.mean()))
    )
    if agreement <= _SIGNIFICANT * first_half.std() * second_half.std() / math.sqrt(count):
        return STEADY
    reduced = fitted * min(1.0, agreement / float(fitted.var()))
    # 5. Describe each stretch, and the whole run.
    until = np.array([moment[stretch == i][-1] for i in range(count)])
    lo, hi = _series_median_interval(reduced)
    percentile_5, percentile_95 = np.quantile(reduced, [0.05, 0.95])
    return MachineSpeed(until, reduced, lo, hi, float(percentile_95 - percentile_5))


def _common_log_time(case: Whole, stretch: Whole, log_time: Array, count: int) -> Array:
    """Return the log time that the samples of each stretch have in common.

    The mean over the ``count`` stretches is 0. The method is a median polish: the cases' log times
    and the stretches' log times are fitted in turn, each to the residuals of the other.
    """
    stretch_part = np.zeros(count)
    for _ in range(_ITERATIONS):
        case_part = _medians(case, log_time - stretch_part[stretch])
        stretch_part = _medians(stretch, log_time - case_part[case], count)
    return stretch_part - stretch_part.mean()


def _rank_in_group(group: Whole) -> Whole:
    """Return each element's position within its group, counted from 0."""
    # The stable sort puts the groups one after the other and keeps the order within each of them.
    # ``first`` is where each group begins.
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group)
    first = np.cumsum(counts) - counts
    rank = np.empty(len(group), dtype=np.intp)
    rank[order] = np.arange(len(group)) - np.repeat(first, counts)
    return rank


def _medians(group: Whole, values: Array, count: int = 0) -> Array:
    """Return the median of each group's values, by group number, or 0 for an empty group.

    The result has at least ``count`` entries, even if the last groups are empty.
    """
    # Sort the values by group, and within each group by size. A group's median is the mean of its
    # two middle values, which are the same value if the group has an odd number of values.
    counts = np.bincount(group, minlength=count)
    ordered = values[np.lexsort((values, group))]
    first = np.cumsum(counts) - counts
    # The positions of an empty group may lie beyond the end, so they are limited. The value read
    # for such a group is replaced by 0 below.
    lower_middle = np.minimum(first + (counts - 1) // 2, len(values) - 1)
    upper_middle = np.minimum(first + counts // 2, len(values) - 1)
    return np.where(counts > 0, (ordered[lower_middle] + ordered[upper_middle]) / 2, 0.0)


def _series_median_interval(series: Array) -> tuple[float, float]:
    """Return the 95% interval of the median of a time series, whose values are correlated.

    The ends of the interval are quantiles of the series. The quantiles depend on the number of
    independent values that carry as much information as the series.
    """
    # 1. Sum the autocorrelations until they become negligible. ``length`` values of the series
    # carry as much information as one independent value.
    centred = series - series.mean()
    square_sum = float(centred @ centred)
    length = 1.0
    for lag in range(1, len(series) // 2):
        correlation = float(centred[lag:] @ centred[:-lag]) / square_sum
        if correlation < _DECORRELATED:
            break
        length += 2 * correlation  # twice, for the lags before and after a value
    # 2. Take the quantiles between which the true median lies. Of n independent values, a share of
    # 0.5 ± 0.5 / √n (one standard error) is below their true median.
    independent_count = len(series) / length
    # Even the whole range of fewer than six independent values covers their true median with a
    # probability below 95%, so no part of the range would be wide enough.
    if independent_count < 6:
        return float(series.min()), float(series.max())
    reach = Z95 * 0.5 / math.sqrt(independent_count)
    lo, hi = np.quantile(series, [max(0.0, 0.5 - reach), min(1.0, 0.5 + reach)])
    return float(lo), float(hi)
