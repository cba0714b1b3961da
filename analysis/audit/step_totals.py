"""How sure a step's time is, and what it gains by a change, from its products' intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.advice.verdict import Gain
from analysis.model.sum_errors import CHANGE_CORRELATION, LEVEL_CORRELATION, together


class TimeSum(NamedTuple):
    """A sum of times and the 90 % interval of it."""

    time: float
    lo: float
    hi: float


class SumChange(NamedTuple):
    """What products of one kind take in all before a change, and the ratio to what they take
    after it, with the 90 % interval of that.

    ``in_sums`` are by how much the halves of the interval of the time after it are wider in a step:
    where it may take less, and where more (:func:`analysis.model.sum_errors.change_factors`).
    """

    before: float
    ratio: tuple[float, float, float]
    in_sums: tuple[float, float] = (1.0, 1.0)


def summed(parts: Sequence[tuple[float, float, float]]) -> TimeSum:
    """The sum of times, each with its interval: (time, lo, hi)."""
    time = math.fsum(part[0] for part in parts)
    below = together(np.array([part[0] - part[1] for part in parts]), LEVEL_CORRELATION)
    above = together(np.array([part[2] - part[0] for part in parts]), LEVEL_CORRELATION)
    return TimeSum(time, max(time - float(below), 0.0), time + float(above))


def gain_of_step(
    step: float, changes: Sequence[SumChange], more: float = 0.0, unsure: float = 0.0
) -> Gain:
    """What a step gains by a change of some of its products.

    Args:
        step: what it takes before.
        changes: of its products.
        more: what all else takes more, in the same unit.
        unsure: by how much that may be wrong, either way.
    """
    after = [change.before / change.ratio[0] for change in changes]
    both = list(zip(after, changes, strict=True))
    less = np.array([c.in_sums[0] * a * (1 - c.ratio[0] / c.ratio[2]) for a, c in both])
    worse = np.array([c.in_sums[1] * a * (c.ratio[0] / c.ratio[1] - 1) for a, c in both])
    now = step - math.fsum(change.before for change in changes) + math.fsum(after) + more
    low = math.hypot(float(together(less, CHANGE_CORRELATION)), unsure)
    high = math.hypot(float(together(worse, CHANGE_CORRELATION)), unsure)
    best = max(now - low, 1e-3 * now)
    return Gain(step / now - 1, step / (now + high) - 1, step / best - 1)
