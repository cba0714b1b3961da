"""When a gain is worth a changed model: the one rule behind every verdict.

*do it*: the gain was measured anew after the choice, and its whole interval is worth a change.
*likely*: what should be expected is worth one, and more may be gained than lost. *leave it*: the
rest. What following *likely* gains on tables of others, and loses, is judged by
``validate --advice``.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

DO_IT, LIKELY, LEAVE_IT = VERDICTS = ("do it", "likely", "leave it")

CONFIRMED, MEASURED, PREDICTED = EVIDENCE = "confirmed", "measured", "predicted"
"""What a gain rests on: samples taken anew after it was chosen, those that it was chosen by, or the
model."""

MIN_GAIN = 0.01
"""A gain below one percent is not worth a changed model."""

_PRICE = 0.1  # of additional FLOPs: other products of a model have the larger size, too
_LEAST_ODDS = 1.6  # expected gain over expected loss
_MAX_LOSS = 0.25  # which a likely gain's interval may reach
_STANDARD = {CONFIRMED: 1.96, MEASURED: 1.96, PREDICTED: 1.645}  # errors in half an interval
_NORMAL = NormalDist()


class Gain(NamedTuple):
    """A gain that should be expected, and its interval: 95 %, but 90 % of a predicted one.

    Fractions: 0.12 means 1/1.12 of the time or, to choose, 12 % more computed per second.
    """

    value: float
    lo: float
    hi: float


def gain_of(ratio: tuple[float, float, float], work: float) -> Gain:
    """The gain of a time ratio and its interval where ``work`` times as much is computed."""
    value, lo, hi = (part * work - 1 for part in ratio)
    return Gain(value, lo, hi)


def net(gain: Gain, extra_flops: float) -> float:
    """What should be gained after costs: a tenth of the additional FLOPs."""
    return gain.value - _PRICE * max(0.0, extra_flops)


def verdict(gain: Gain, evidence: str, extra_flops: float) -> str:
    """Whether to make a change, one of :data:`VERDICTS`.

    Args:
        gain: what it brings.
        evidence: what that is known from.
        extra_flops: how much more is computed, as a fraction.
    """
    if net(gain, extra_flops) < MIN_GAIN:
        return LEAVE_IT
    if evidence == CONFIRMED and gain.lo >= MIN_GAIN:
        return DO_IT
    return LIKELY if _is_good_bet(gain, evidence) else LEAVE_IT


def _is_good_bet(gain: Gain, evidence: str) -> bool:
    """Whether clearly more may be gained than lost, and nobody loses much."""
    if gain.lo < -_MAX_LOSS:
        return False
    spread = math.log((1 + gain.hi) / (1 + gain.lo)) / (2 * _STANDARD[evidence])
    if spread <= 0:
        return gain.value > 0
    # The expected positive and negative part of a normal deviate about the logarithm of the gain.
    at = math.log1p(gain.value) / spread
    density = _NORMAL.pdf(at)
    won, lost = density + at * _NORMAL.cdf(at), density - at * _NORMAL.cdf(-at)
    return won >= _LEAST_ODDS * lost
