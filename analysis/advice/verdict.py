"""When a gain is worth a changed model: the one rule behind every verdict.

*do it*: the gain was re-timed after it was chosen, and its whole interval is worth a change.
*likely*: it gains with a probability of at least 80%, and the expected gain after costs is at least
1%. *leave it*: the rest. How often advice of a stated probability gains on held-out tables is
recorded in tests/recordings/reliability.json.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DO_IT, LIKELY, LEAVE_IT = VERDICTS = ("do it", "likely", "leave it")

CONFIRMED, MEASURED, PREDICTED = EVIDENCE = "confirmed", "measured", "predicted"
"""What a gain rests on: samples taken after it was chosen, those that it was chosen by, or the
model."""

MIN_GAIN = 0.01
"""A gain below one percent is not worth a changed model."""

LEAST_PROBABILITY = 0.8
"""A change that gains less surely is not advised."""

_PRICE = 0.1  # of additional FLOPs: other GEMMs of a model have the larger size, too
_OUTSIDE = {CONFIRMED: 0.05, MEASURED: 0.05, PREDICTED: 0.1}  # share beyond both ends
_SUREST = 0.95
"""The largest probability that is stated: of advice that promised more, 88% gained on held-out
tables, whatever it promised (tests/recordings/reliability.json)."""


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


def probability(gain: Gain, evidence: str) -> float:
    """The probability that a change gains anything at all, from 5% to 95%.

    The error of the log of a gain is taken to follow Laplace's law on the side of no gain, as wide
    as the interval's half there says: errors of ratios are mostly small, and now and then large.
    With a normal law, changes gain more often than stated in the middle.

    Args:
        gain: what is expected, and its interval.
        evidence: what that is known from, one of :data:`EVIDENCE`.
    """
    middle = math.log1p(gain.value)
    end = math.log1p(gain.lo if middle > 0 else gain.hi)
    scale = abs(end - middle) / -math.log(_OUTSIDE[evidence])
    beyond = 0.5 * math.exp(-abs(middle) / scale) if scale else 0.0
    beyond = max(beyond, 1 - _SUREST)
    return 1 - beyond if middle > 0 else beyond


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
    return LIKELY if probability(gain, evidence) >= LEAST_PROBABILITY else LEAVE_IT


def verdict_text(what_to_do: str, sureness: float) -> str:
    """A verdict with its probability where that is not beyond doubt: ``likely (91%)``."""
    return f"{what_to_do} ({sureness:.0%})" if what_to_do == LIKELY else what_to_do
