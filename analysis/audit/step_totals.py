"""Compute the intervals of a step's time and gain from the intervals of its operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.advice.verdict import Gain
from analysis.model.sum_errors import CHANGE_CORRELATION, LEVEL_CORRELATION, half_interval_of_sum

_SHORTEST = 1e-3
"""Smallest lower end of the interval of a changed step's time, as a share of the expected time."""


class TimeSum(NamedTuple):
    """A sum of times, with the 90% interval of the sum."""

    time: float
    lo: float
    hi: float


class SumChange(NamedTuple):
    """Change in the total time of an operation's instances.

    Attributes:
        before: time before the change.
        ratio: time before the change divided by the time after the change, as (ratio, lo, hi).
            The interval from lo to hi is a 90% interval if the ratio is predicted, and a 95%
            interval if it is measured.
        in_sums: factors from :func:`analysis.model.sum_errors.change_factors`, which correct the
            lower and the upper half of the interval of ``after`` when times are summed.
    """

    before: float
    ratio: tuple[float, float, float]
    in_sums: tuple[float, float] = (1.0, 1.0)

    @property
    def after(self) -> float:
        """Total time of the instances after the change."""
        ratio, _, _ = self.ratio
        return self.before / ratio


def summed(parts: Sequence[tuple[float, float, float]]) -> TimeSum:
    """Add up times that are given with their 90% intervals, as (time, lo, hi)."""
    total = math.fsum(time for time, _, _ in parts)
    halves_below = np.array([time - lo for time, lo, _ in parts])
    halves_above = np.array([hi - time for time, _, hi in parts])
    below = float(half_interval_of_sum(halves_below, LEVEL_CORRELATION))
    above = float(half_interval_of_sum(halves_above, LEVEL_CORRELATION))
    return TimeSum(total, max(total - below, 0.0), total + above)


def gain_of_step(
    step: float, changes: Sequence[SumChange], extra_time: float = 0.0, extra_error: float = 0.0
) -> Gain:
    """Return the gain, with its interval, of a step in which some operations change.

    All times are in the same unit.

    Args:
        step: time of the step before the change.
        changes: changes of the step's operations.
        extra_time: increase in the total time of the operations that are not in ``changes``.
        extra_error: half-width of the 90% interval for the total error that is not in ``changes``.
    """
    # 1. Compute both halves of the interval of each operation's time after the change. A larger
    #    ratio means a shorter time.
    shorter, longer = [], []
    for change in changes:
        ratio, ratio_lo, ratio_hi = change.ratio
        factor_shorter, factor_longer = change.in_sums
        shorter.append(factor_shorter * change.after * (1 - ratio / ratio_hi))
        longer.append(factor_longer * change.after * (ratio / ratio_lo - 1))
    # 2. Compute the time of the step after the change and both halves of its interval.
    before = math.fsum(change.before for change in changes)
    after = math.fsum(change.after for change in changes)
    step_after = step - before + after + extra_time
    half_below = float(half_interval_of_sum(np.array(shorter), CHANGE_CORRELATION))
    half_above = float(half_interval_of_sum(np.array(longer), CHANGE_CORRELATION))
    #    The extra error is independent of the errors of the changes, so it is added in quadrature.
    below = math.hypot(half_below, extra_error)
    above = math.hypot(half_above, extra_error)
    # 3. Convert the time and its interval to a gain. A very wide interval may reach a time of 0 or
    #    less, which has no gain, so the shortest time is limited.
    shortest = max(step_after - below, _SHORTEST * step_after)
    return Gain(step / step_after - 1, step / (step_after + above) - 1, step / shortest - 1)
