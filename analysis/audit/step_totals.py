"""Compute intervals of a step's time and of its gain from the intervals of its operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.advice.verdict import Gain
from analysis.model.sum_errors import CHANGE_CORRELATION, LEVEL_CORRELATION, half_interval_of_sum


class TimeSum(NamedTuple):
    """A sum of times and its 90% interval."""

    time: float
    lo: float
    hi: float


class SumChange(NamedTuple):
    """Total time of operations of one kind before a change, and its ratio to the time after it.

    The ratio comes with its 90% interval. ``in_sums`` are the factors by which both halves of the
    interval of the time after the change are wider in a step: first the half of shorter times, then
    the half of longer times (:func:`analysis.model.sum_errors.change_factors`).
    """

    before: float
    ratio: tuple[float, float, float]
    in_sums: tuple[float, float] = (1.0, 1.0)


def summed(parts: Sequence[tuple[float, float, float]]) -> TimeSum:
    """Add up times that are given with their intervals, as (time, lo, hi)."""
    time = math.fsum(part[0] for part in parts)
    below = half_interval_of_sum(np.array([part[0] - part[1] for part in parts]), LEVEL_CORRELATION)
    above = half_interval_of_sum(np.array([part[2] - part[0] for part in parts]), LEVEL_CORRELATION)
    return TimeSum(time, max(time - float(below), 0.0), time + float(above))


def gain_of_step(
    step: float, changes: Sequence[SumChange], more: float = 0.0, unsure: float = 0.0
) -> Gain:
    """Return the gain of a step if some of its operations change.

    Args:
        step: time of the step before the change.
        changes: changes of its operations.
        more: additional time of everything else, in the same unit.
        unsure: by how much the additional time may be wrong, either way.
    """
    # 1. The time of each operation after the change, and both halves of its interval.
    after = [change.before / change.ratio[0] for change in changes]
    both = list(zip(after, changes, strict=True))
    shorter = np.array([c.in_sums[0] * a * (1 - c.ratio[0] / c.ratio[2]) for a, c in both])
    longer = np.array([c.in_sums[1] * a * (c.ratio[0] / c.ratio[1] - 1) for a, c in both])
    # 2. The time of the step after the change, with its interval, as gains.
    step_after = step - math.fsum(change.before for change in changes) + math.fsum(after) + more
    low = math.hypot(float(half_interval_of_sum(shorter, CHANGE_CORRELATION)), unsure)
    high = math.hypot(float(half_interval_of_sum(longer, CHANGE_CORRELATION)), unsure)
    best = max(step_after - low, 1e-3 * step_after)
    return Gain(step / step_after - 1, step / (step_after + high) - 1, step / best - 1)
