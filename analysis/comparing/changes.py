"""Estimate how the time of each case changed between the old and the new processes.

The old processes and the new ones are called the two sides. Besides a true change of the case, the
difference between its log times on the two sides has three parts:

1. **Within a process**: samples scatter. More rounds make this part smaller.
2. **Between processes, case by case**: each process places the operands at different memory
   addresses, so the time of a case may differ by a few percent from process to process. Only more
   processes make this part smaller.
3. **Between processes, all cases together**: the whole machine may be slower during some processes
   than during others. This *common shift* is estimated as a robust mean over the cases and judged
   separately. Otherwise, a slower machine would make every case look slower.

With several processes on a side, the second part is measured for each case. A variance that is
estimated from few processes is imprecise, so it is shrunk towards a usual value, as in the
moderated t test of Smyth (2004). The better the measured variances agree with the usual values, the
more they are shrunk.

With a single process on each side, the second part cannot be measured for each case. Its size for a
typical case is estimated from the ratios of all cases: it is the part of the ratios' scatter that
the scatter within processes does not explain. The estimator is robust, because a few cases may have
changed. An unusual ratio has two possible causes, which a single pair of processes cannot tell
apart: the case changed, or its time varies far more between processes than the times of other
cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from analysis.recordings.case_times import CaseTimes, TimedProcess

Reals = NDArray[np.float64]

MIN_CASES = 6
"""Minimum number of cases for estimating the common shift and the typical scatter between
processes. With fewer cases, a single changed case would distort both estimates."""

_CUT = 1.5  # standard deviations beyond which cases have less weight in the robust estimates
_CUT_SQUARE = 0.7785  # mean of min(z², 1.5²) for normal z
_EFFICIENCY = 0.725  # efficiency of the robust scale, relative to the standard deviation
_MANY = 1e6  # smallest degrees of freedom with which a t distribution counts as normal
_LEAST = 1e-18  # smallest variance of a log time: clocks do not resolve more than nine digits
_TINY = 1e-300  # smallest variance to divide by
_LEAST_EXCESS = 2e-8  # largest excess variance of log variances that counts as chance
_STEPS = 30  # maximum number of estimates of location and scale; about ten usually suffice


@dataclass(frozen=True)
class CommonShift:
    """Change that all cases have in common.

    Attributes:
        log: logarithm of the ratio, new over old.
        error: standard error of ``log``, from the scatter between processes; NaN if it is unknown.
        freedom: degrees of freedom of ``error``; NaN if ``error`` is unknown.
    """

    log: float
    error: float
    freedom: float


@dataclass(frozen=True)
class CaseChanges:
    """Change of every case that was timed in all processes; arrays have one element per case.

    Attributes:
        names: names of the cases.
        old: logarithm of the time in seconds, averaged over the old processes.
        new: logarithm of the time in seconds, averaged over the new processes.
        deviation: log ratio, new over old, without the shift that the other cases share. If
            ``shift`` is None, the deviation is the whole log ratio.
        within: part of the deviation's variance that comes from scatter within processes.
        between: rest of the deviation's variance, mainly from differences between processes; NaN if
            it is unknown.
        freedom: degrees of freedom of the whole variance; NaN if that variance is unknown.
        rounds: mean number of samples per process, on the side with the smaller mean.
        shift: change that all cases share; None for fewer than :data:`MIN_CASES` cases.
        processes: numbers of old and of new processes.
    """

    names: tuple[str, ...]
    old: Reals
    new: Reals
    deviation: Reals
    within: Reals
    between: Reals
    freedom: Reals
    rounds: Reals
    shift: CommonShift | None
    processes: tuple[int, int]

    @property
    def error(self) -> Reals:
        """Standard error of each deviation; NaN if the scatter between processes is unknown."""
        return np.sqrt(self.within + self.between)


def estimate_changes(old: Sequence[TimedProcess], new: Sequence[TimedProcess]) -> CaseChanges:
    """Estimate the change of every case that was timed in all processes of both sides.

    Each side must have at least one process.
    """
    names = common_names([*old, *new])
    old_side = _Side.from_processes(old, names)
    new_side = _Side.from_processes(new, names)
    if len(old) + len(new) > 2:
        return _from_replicates(names, old_side, new_side)
    return _from_pair(names, old_side, new_side)


def common_names(processes: Sequence[TimedProcess]) -> tuple[str, ...]:
    """Return the names of cases timed in all processes, in the order of the last process."""
    shared = set.intersection(*(set(process.cases) for process in processes))
    return tuple(name for name in processes[-1].cases if name in shared)


@dataclass(frozen=True)
class _Side:
    """Times of one side as arrays of shape (cases, processes).

    Attributes:
        logs: logarithm of the time in seconds.
        errors: standard error of each logarithm within its process.
        freedom: degrees of freedom of each standard error.
        counts: number of samples.
    """

    logs: Reals
    errors: Reals
    freedom: Reals
    counts: Reals

    @classmethod
    def from_processes(cls, processes: Sequence[TimedProcess], names: Sequence[str]) -> _Side:
        times_of_cases: list[list[CaseTimes]] = [
            [process.cases[name] for process in processes] for name in names
        ]

        def arranged(attribute: str) -> Reals:
            values = [[getattr(times, attribute) for times in row] for row in times_of_cases]
            return np.array(values, dtype=float).reshape(len(names), len(processes))

        return cls(arranged("log"), arranged("error"), arranged("freedom"), arranged("count"))

    @property
    def size(self) -> int:
        return self.logs.shape[1]

    @property
    def mean(self) -> Reals:
        return np.asarray(self.logs.mean(axis=1))

    @property
    def within(self) -> Reals:
        """Part of each mean's variance that comes from the scatter within processes."""
        return np.asarray((self.errors**2).sum(axis=1) / self.size**2)


def _rounds(old: _Side, new: _Side) -> Reals:
    return np.minimum(old.counts.mean(axis=1), new.counts.mean(axis=1))


# --- One process on each side ---------------------------------------------------------------------


def _from_pair(names: tuple[str, ...], old: _Side, new: _Side) -> CaseChanges:
    """Estimate the changes from one process on each side."""
    # 1. Compute the log ratios, and their variance within the processes.
    log_ratios = new.mean - old.mean
    within = old.within + new.within
    freedom = _pooled_freedom(old, new)
    # 2. Compare each case with the others, and estimate the total variance of its deviation.
    shift: CommonShift | None = None
    deviation = log_ratios
    if len(names) >= MIN_CASES:
        centre, _, _ = robust_centre(log_ratios, within, freedom)
        shift = CommonShift(centre, math.nan, math.nan)
        deviation, common, extra = _deviations_from_others(log_ratios, within, freedom)
        # The cases with the smallest variances dominate the estimate of the additional variance.
        # The estimate is therefore as uncertain as that of a variance as large as the harmonic mean
        # over all cases, and no case is assumed to vary less than that mean. Each row of the array
        # has the variances of all cases, given the additional variance for one of the cases.
        usual = stats.hmean(np.maximum(within + extra[:, None], _LEAST), axis=1)
        total = np.maximum(within + extra, usual) + common
        # One degree of freedom is lost for the centre, and one for the case that is left out.
        usual_freedom = _EFFICIENCY * (len(names) - 2)
    else:
        usual = np.full(len(names), np.nan)
        total = np.full(len(names), np.nan)
        usual_freedom = math.nan
    # 3. Combine the degrees of freedom of both variances (Welch–Satterthwaite).
    with np.errstate(divide="ignore", invalid="ignore"):
        total_freedom = total**2 / (within**2 / freedom + usual**2 / usual_freedom)
    return CaseChanges(
        names=names,
        old=old.mean,
        new=new.mean,
        deviation=deviation,
        within=within,
        between=total - within,
        freedom=total_freedom,
        rounds=_rounds(old, new),
        shift=shift,
        processes=(1, 1),
    )


def _pooled_freedom(old: _Side, new: _Side) -> Reals:
    """Return the degrees of freedom of the variance within both processes (Welch–Satterthwaite)."""
    variances = np.hstack([old.errors**2, new.errors**2])
    freedom = np.hstack([old.freedom, new.freedom])
    with np.errstate(divide="ignore", invalid="ignore"):
        pooled = variances.sum(axis=1) ** 2 / (variances**2 / freedom).sum(axis=1)
    return np.where(np.isfinite(pooled), pooled, np.inf)


_MAX_LEAVE_ONE_OUT = 40
"""Largest number of cases at which each case is compared with a separate robust centre, which is
computed from the other cases. With more cases, a single changed case hardly affects the weights in
a robust centre, so they are computed only once, from all cases."""


def _deviations_from_others(
    log_ratios: Reals, within: Reals, freedom: Reals
) -> tuple[Reals, Reals, Reals]:
    """Compare the log ratio of each case with the centre of the other cases.

    Return three values per case: its deviation from the centre of the other cases, the variance of
    that centre, and the variance that differences between processes add to a typical other case.
    """
    count = len(log_ratios)
    # 1. With many cases, one robust centre serves all of them.
    if count > _MAX_LEAVE_ONE_OUT:
        _, extra, weights = robust_centre(log_ratios, within, freedom)
        deviation, common = _from_others(log_ratios, weights, within + extra)
        return deviation, common, np.full(count, extra)
    # 2. Otherwise, leave each case out of the centre that it is compared with.
    deviation = np.empty(count)
    common = np.empty(count)
    extras = np.empty(count)
    for i in range(count):
        others = np.arange(count) != i
        centre, extras[i], _ = robust_centre(log_ratios[others], within[others], freedom[others])
        deviation[i] = log_ratios[i] - centre
        # The variance of the robust centre is approximated by that of a mean whose weights are the
        # inverse variances.
        common[i] = 1 / np.sum(1 / np.maximum(within[others] + extras[i], _LEAST))
    return deviation, common, extras


def robust_centre(values: Reals, variances: Reals, freedom: Reals) -> tuple[float, float, Reals]:
    """Return the centre of the values, their additional variance, and their weights.

    The additional variance is the same for all values. It accounts for the part of their scatter
    that the known variances do not explain. The centre is the weighted mean.

    A value more than 1.5 standard deviations from the centre counts as if it were 1.5 standard
    deviations away, so that a few changed cases hardly affect the centre and the variance.

    Args:
        values: one value for each of at least two cases.
        variances: the known part of each value's variance.
        freedom: degrees of freedom of the known part.
    """

    def scores(centre: float, extra: float) -> Reals:
        """Return each value's signed distance from the centre, as a standard normal score."""
        total = np.maximum(variances + extra, _TINY)
        # A value whose variance is from few samples has the tails of a t distribution. It counts
        # as the normal value of the same probability.
        # ``extra`` counts as exact, so the total has more degrees of freedom than its known part
        # (Welch–Satterthwaite). Numbers above _MANY are as good as infinite.
        with np.errstate(divide="ignore"):
            total_over_known = np.minimum(total / variances, _MANY)
        total_freedom = np.minimum(freedom * total_over_known**2, _MANY)
        probabilities = special.stdtr(total_freedom, (values - centre) / np.sqrt(total))
        return np.asarray(special.ndtri(probabilities))

    def surplus(extra: float, centre: float) -> float:
        """Return the scatter that is left unexplained; negative if ``extra`` is too large."""
        capped = np.minimum(scores(centre, extra) ** 2, _CUT**2)
        # Estimating the centre from the same values costs one degree of freedom.
        correction = len(values) / (len(values) - 1)
        return float(correction * capped.mean() - _CUT_SQUARE)

    centre = float(np.median(values))
    extra = 0.0
    weights = np.ones(len(values))
    widest = 4 * float(np.ptp(values)) ** 2 + _TINY  # more variance than the values can have
    for _ in range(_STEPS):
        previous_centre, previous_extra = centre, extra
        # 1. Find the additional variance that explains the scatter around the current centre.
        extra = 0.0
        if surplus(0.0, centre) > 0:
            extra = float(optimize.brentq(surplus, 0.0, widest, args=(centre,), xtol=1e-14))
        # 2. Weight each value by its inverse variance, or by less if it is far from the centre.
        standard_deviations = np.sqrt(np.maximum(variances + extra, _TINY))
        distances = np.maximum(np.abs(values - centre) / standard_deviations, _CUT)
        weights = _CUT / distances / standard_deviations**2
        centre = float((weights * values).sum() / weights.sum())
        # 3. Stop when neither estimate changes any more.
        if abs(centre - previous_centre) < 1e-9 and abs(extra - previous_extra) < 1e-12:
            break
    return centre, extra, weights


def _from_others(values: Reals, weights: Reals, variances: Reals) -> tuple[Reals, Reals]:
    """Return each value's deviation from the mean of the others, and the variance of that mean.

    The value itself is excluded, because a changed case would otherwise move the mean that it is
    compared with.
    """
    weighted_sum_of_others = (weights * values).sum() - weights * values
    mean_of_others = weighted_sum_of_others / np.maximum(weights.sum() - weights, _TINY)
    # The variance is approximated by that of a mean whose weights are the inverse variances.
    precision = 1 / np.maximum(variances, _TINY)
    variance_of_mean = 1 / np.maximum(precision.sum() - precision, _TINY)
    return values - mean_of_others, variance_of_mean


# --- Several processes on a side ------------------------------------------------------------------


def _from_replicates(names: tuple[str, ...], old: _Side, new: _Side) -> CaseChanges:
    """Estimate the changes from several processes on at least one side."""
    freedom = float((old.size - 1) + (new.size - 1))
    # Variance of the difference between both sides' means, if each process has the variance 1.
    variance_factor = 1 / old.size + 1 / new.size
    log_ratios = new.mean - old.mean
    within = np.hstack([old.errors**2, new.errors**2]).mean(axis=1)
    # Differences of the processes from the mean of their side, of shape (cases, all processes).
    residuals = np.hstack([old.logs - old.mean[:, None], new.logs - new.mean[:, None]])
    shift: CommonShift | None = None
    deviation = log_ratios
    prior_freedom = 0.0
    common = np.zeros(len(names))  # variance of the centre that a case is compared with
    if len(names) >= MIN_CASES:
        # 1. Remove from each process the change that all its cases share.
        levels = np.median(residuals, axis=0)
        residuals = residuals - levels
        # 2. Shrink each case's variance towards the usual one. The factor makes up for the levels,
        #    which are estimated from the same cases.
        factor = len(names) / (len(names) - 1)
        variances, prior_freedom = moderated(
            factor * (residuals**2).sum(axis=1) / freedom, freedom, within
        )
        # 3. Compare each case with the others.
        centre, _, weights = robust_centre(
            log_ratios, variance_factor * variances, np.full(len(names), np.inf)
        )
        deviation, common = _from_others(log_ratios, weights, variance_factor * variances)
        # 4. Estimate the error of the common shift: how much the levels of the processes differ
        #    within a side. It is unknown if a side has only one process.
        shift = CommonShift(centre, math.nan, math.nan)
        if min(old.size, new.size) > 1:
            squares = 0.0
            for side_levels in np.split(levels, [old.size]):
                squares += float(((side_levels - side_levels.mean()) ** 2).sum())
            error = math.sqrt(variance_factor * squares / freedom)
            shift = CommonShift(centre, error, freedom)
    else:
        # The scatter of the samples within processes is a part of this variance, so an estimate
        # below that part is due to chance.
        variances = np.maximum((residuals**2).sum(axis=1) / freedom, within)
    variances = np.maximum(variances, _LEAST)
    # Divide the variance of each case into the part within processes and the rest. If a shrunk
    # variance is smaller than the measured part within processes, all of it counts as that part.
    between = np.maximum(variances - within, 0.0)
    return CaseChanges(
        names=names,
        old=old.mean,
        new=new.mean,
        deviation=deviation,
        within=variance_factor * np.minimum(within, variances),
        between=variance_factor * between + common,
        # No variance has more degrees of freedom than all cases together.
        freedom=np.full(len(names), min(freedom + prior_freedom, freedom * len(names))),
        rounds=_rounds(old, new),
        shift=shift,
        processes=(old.size, new.size),
    )


def moderated(variances: Reals, freedom: float, within: Reals) -> tuple[Reals, float]:
    """Shrink each case's variance, which is estimated from few processes, towards its usual value.

    The usual variance of a case is its variance within a process plus the variance that differences
    between processes add to a typical case. The usual variances have less weight if the measured
    variances scatter around them more than chance explains.

    Args:
        variances: measured variance of each case's log time between processes; it includes the
            variance within a process.
        freedom: degrees of freedom of each measured variance.
        within: variance of each case's log time within a process.

    Returns:
        The shrunk variances, and the degrees of freedom of each usual variance. The degrees of
        freedom are infinite if chance explains the scatter of the measured variances.
    """
    # The logarithm of a measured variance differs from that of the true variance by this bias on
    # average, and scatters by chance with this variance.
    bias = float(special.digamma(freedom / 2) - math.log(freedom / 2))
    chance_variance = float(special.polygamma(1, freedom / 2))
    logs = np.log(np.maximum(variances, _TINY))

    # 1. Find the variance that processes add to a typical case: with it, the measured variances
    #    differ from the usual ones on average only by the bias.
    def excess(added: float) -> float:
        """Return the mean log ratio of measured to usual variances, minus the bias."""
        return float((logs - np.log(within + added)).mean()) - bias

    #    Search from practically 0 to a thousand times the largest variance. At the upper end, the
    #    usual variances are certainly too large. If all variances are 0, the 1e-12 prevents an
    #    empty range.
    largest = max(float(variances.max()), float(within.max()), 1e-12) * 1e3
    added = largest * 1e-12
    if excess(added) > 0:
        added = float(optimize.brentq(excess, added, largest, xtol=1e-18))
    usual = within + added
    # 2. Estimate how far the ratios of measured to usual variances scatter beyond chance.
    spread = float(np.var(logs - np.log(usual), ddof=1)) - chance_variance
    if spread <= _LEAST_EXCESS:
        return usual, np.inf

    # 3. Find the degrees of freedom of a usual variance that would scatter as much. Between the
    #    limits of the search, this scatter falls from 1e6 to 1e-8, which is below _LEAST_EXCESS.
    def spread_difference(half_freedom: float) -> float:
        """Return the scatter for ``2 * half_freedom`` degrees of freedom, minus ``spread``."""
        return float(special.polygamma(1, half_freedom)) - spread

    prior = 2 * float(optimize.brentq(spread_difference, 1e-3, 1e8))
    # 4. Average both variances, weighted by their degrees of freedom. The usual variance is a mean
    #    of logarithms, and the scale corrects it for their bias.
    scale = math.exp(float(special.digamma(prior / 2)) - math.log(prior / 2))
    return (prior * scale * usual + freedom * variances) / (prior + freedom), prior
