"""How fast the machine was over a run, from the samples of all its cases.

The log time of a sample is that of its case plus that of the machine at the moment plus noise. The
first two are fitted to all samples in turn (a median polish), with the machine's part constant over
short stretches of the run; it counts only as far as two halves of the samples agree on it. It
matters where a case's few samples lie closer together than the machine's speed changes: their own
scatter does not show it.
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

_STRETCH_SAMPLES = 20
_MAX_STRETCHES = 400
_MIN_STRETCHES = 12
_MIN_CASE_SAMPLES = 4
_ITERATIONS = 12
_SIGNIFICANT = 3.0  # standard errors by which what both halves find must exceed chance
_DECORRELATED = 0.1


@dataclass(frozen=True)
class MachineSpeed:
    """The machine's log time, relative to its mean, over stretches of a run.

    ``until`` is the last moment of each stretch, ``log_time`` its log time; empty for a machine
    whose speed did not change measurably. ``lo`` and ``hi`` are the 95 % interval of the log time's
    median over the run, ``spread`` the difference of its 95th and 5th percentile.
    """

    until: Array
    log_time: Array
    lo: float = 0.0
    hi: float = 0.0
    spread: float = 0.0

    def at(self, moments: Sequence[float]) -> Array:
        """The log time at moments of the run; 0 if the speed did not change."""
        if not len(self.until):
            return np.zeros(len(moments))
        place = np.searchsorted(self.until, moments)
        return self.log_time[np.minimum(place, len(self.until) - 1)]

    def interval(
        self, seconds: Sequence[float], moments: Sequence[float]
    ) -> tuple[float, float] | None:
        """The 95 % interval of a case's median over the run; None under six samples.

        It covers the interval that the samples have by themselves, and the one that they have when
        each is put right for the machine's speed at its moment.
        """
        plain = median_interval(seconds)
        if plain is None or not len(self.until):
            return plain
        steady = median_interval(list(np.log(seconds) - self.at(moments)))
        assert steady is not None  # as many samples
        lo, hi = math.exp(steady[0] + self.lo), math.exp(steady[1] + self.hi)
        return min(plain[0], lo), max(plain[1], hi)


STEADY = MachineSpeed(np.empty(0), np.empty(0))


def machine_speed(
    cases: Sequence[int], moments: Sequence[float], seconds: Sequence[float]
) -> MachineSpeed:
    """The machine's speed over the samples of one run on one device.

    Args:
        cases: the number of each sample's case.
        moments: when each was taken, in seconds.
        seconds: what it took.
    """
    order = np.argsort(moments, kind="stable")
    case, moment = np.asarray(cases, dtype=int)[order], np.asarray(moments, dtype=float)[order]
    log_time = np.log(np.asarray(seconds, dtype=float)[order])
    enough = np.bincount(case)[case] >= _MIN_CASE_SAMPLES if len(case) else np.zeros(0, dtype=bool)
    case, moment, log_time = case[enough], moment[enough], log_time[enough]
    count = min(_MAX_STRETCHES, len(case) // _STRETCH_SAMPLES)
    if count < _MIN_STRETCHES:
        return STEADY
    stretch = np.arange(len(case)) * count // len(case)
    slow = _common(case, stretch, log_time, count)
    # Fitted to each half of the samples, noise differs and what the machine did is the same. All
    # cases have their k-th samples in the same round, so that a half has the even ones of some
    # cases and the odd ones of the others.
    half = (_rank_in_group(case) + case) % 2 == 0
    one, other = (_common(case[h], stretch[h], log_time[h], count) for h in (half, ~half))
    real = float(np.mean((one - one.mean()) * (other - other.mean())))
    if real <= _SIGNIFICANT * one.std() * other.std() / math.sqrt(count):
        return STEADY
    slow = slow * min(1.0, real / float(slow.var()))
    until = np.array([moment[stretch == i][-1] for i in range(count)])
    lo, hi = _median_interval_of_course(slow)
    low, high = np.quantile(slow, [0.05, 0.95])
    return MachineSpeed(until, slow, lo, hi, float(high - low))


def _common(case: Whole, stretch: Whole, log_time: Array, count: int) -> Array:
    """The part of each of ``count`` stretches in the samples' log times, its mean 0."""
    of_stretch = np.zeros(count)
    for _ in range(_ITERATIONS):
        of_case = _medians(case, log_time - of_stretch[stretch])
        of_stretch = _medians(stretch, log_time - of_case[case], count)
    return of_stretch - of_stretch.mean()


def _rank_in_group(group: Whole) -> Whole:
    """How many of its group come before each element."""
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group)
    rank = np.empty(len(group), dtype=np.intp)
    rank[order] = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def _medians(group: Whole, values: Array, count: int = 0) -> Array:
    """The median of the values of each group, by its number; 0 for a number without values."""
    counts = np.bincount(group, minlength=count)
    ordered = values[np.lexsort((values, group))]
    first = np.cumsum(counts) - counts
    low, high = (
        np.minimum(first + half, len(values) - 1) for half in ((counts - 1) // 2, counts // 2)
    )
    return np.where(counts > 0, (ordered[low] + ordered[high]) / 2, 0.0)


def _median_interval_of_course(slow: Array) -> tuple[float, float]:
    """The 95 % interval of the median of a course of correlated values.

    From quantiles, by the number of values that are as good as independent; the whole range where
    that is under six, as of six samples.
    """
    centred = slow - slow.mean()
    variance = float(centred @ centred)
    length = 1.0
    for lag in range(1, len(slow) // 2):
        correlation = float(centred[lag:] @ centred[:-lag]) / variance
        if correlation < _DECORRELATED:
            break
        length += 2 * correlation
    independent = len(slow) / length
    if independent < 6:
        return float(slow.min()), float(slow.max())
    reach = Z95 * 0.5 / math.sqrt(independent)
    lo, hi = np.quantile(slow, [max(0.0, 0.5 - reach), min(1.0, 0.5 + reach)])
    return float(lo), float(hi)
