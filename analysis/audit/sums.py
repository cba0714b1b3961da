"""How sure a sum of predicted times is: the errors of products in one step are partly the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.advice.verdict import LEAVE_IT, PREDICTED, Gain, verdict

LEVEL_CORRELATION = 0.5
"""Of the errors of two products' times in one step: a library's kernel that is slower than
predicted is so for more than one shape."""

CHANGE_CORRELATION = 0.2
"""Likewise of the errors of two products' time ratios, before and after a change. Both were chosen
looking at what ``python -m analysis validate --baskets`` says of three public tables
(tests/recordings/baskets.json)."""


class Sum(NamedTuple):
    """A sum of times and the 90 % interval of it."""

    time: float
    lo: float
    hi: float


class Change(NamedTuple):
    """What products of one kind take in all before a change, and the ratio to what they take
    after it, with the 90 % interval of that.
    """

    before: float
    ratio: tuple[float, float, float]


def summed(parts: Sequence[tuple[float, float, float]]) -> Sum:
    """The sum of times, each with its interval: (time, lo, hi)."""
    time = math.fsum(part[0] for part in parts)
    below = together([part[0] - part[1] for part in parts], LEVEL_CORRELATION)
    above = together([part[2] - part[0] for part in parts], LEVEL_CORRELATION)
    return Sum(time, max(time - below, 0.0), time + above)


def gain_of_step(
    step: float, changes: Sequence[Change], more: float = 0.0, unsure: float = 0.0
) -> Gain:
    """What a step gains by a change of some of its products.

    Args:
        step: what it takes before.
        changes: of its products.
        more: what all else takes more, in the same unit.
        unsure: by how much that may be wrong, either way.
    """
    after = [change.before / change.ratio[0] for change in changes]
    less = [a * (1 - c.ratio[0] / c.ratio[2]) for a, c in zip(after, changes, strict=True)]
    worse = [a * (c.ratio[0] / c.ratio[1] - 1) for a, c in zip(after, changes, strict=True)]
    now = step - math.fsum(change.before for change in changes) + math.fsum(after) + more
    low = math.hypot(together(less, CHANGE_CORRELATION), unsure)
    high = math.hypot(together(worse, CHANGE_CORRELATION), unsure)
    best = max(now - low, 1e-3 * now)
    return Gain(step / now - 1, step / (now + high) - 1, step / best - 1)


def step_verdict(gain: Gain, more_flops: float, aligns: bool, evidence: str = PREDICTED) -> str:
    """Whether a change of a whole model is worth it, one of the three verdicts.

    The table's rule for one product is not enough: a dimension changes many, of which some are
    slower than predicted. On baskets of held-out rows with random changes, most of those that it
    would take gain and many do not; so the whole 90 % interval has to be a gain. What better
    alignment is worth is assumed where nobody measured it, and the reason then says so.
    """
    found = verdict(gain, evidence, more_flops)
    return found if gain.lo > 0 or aligns else LEAVE_IT


def together(parts: Sequence[float], correlation: float) -> float:
    """Half an interval of a sum, from those of its parts."""
    values = np.asarray(parts, dtype=float)
    alone = math.fsum(values**2)
    return math.sqrt((1 - correlation) * alone + correlation * math.fsum(values) ** 2)
