"""Decide whether a gain justifies changing a model, by the same rule for all queries.

- *do it*: the gain was measured in new samples after the change was chosen. The whole interval of
  the gain and the expected gain after costs are at least 1%.
- *likely*: the change brings a gain with a probability of at least 80%, and the expected gain after
  costs is at least 1%.
- *leave it*: all other cases.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DO_IT, LIKELY, LEAVE_IT = VERDICTS = ("do it", "likely", "leave it")

CONFIRMED, MEASURED, PREDICTED = EVIDENCE = "confirmed", "measured", "predicted"
"""Kinds of evidence for a gain: samples taken after the change was chosen, earlier samples, or a
prediction."""

MIN_GAIN = 0.01
"""Smallest gain that justifies changing a model, as a fraction."""

LEAST_PROBABILITY = 0.8
"""Smallest probability of a gain at which a change is advised."""

_PRICE = 0.1  # cost of 100% more FLOPs, as a gain: a larger size may slow down other GEMMs, too
_OUTSIDE = {CONFIRMED: 0.05, MEASURED: 0.05, PREDICTED: 0.1}  # probability outside the interval
_SUREST = 0.95
"""Largest probability that advice states. On held-out tables, GEMM advice with a stated probability
of 90% or more brought a gain in only 88% of cases (results/accuracy/reliability.json)."""


class Gain(NamedTuple):
    """An expected gain with its 95% interval, or with its 90% interval if the gain is predicted.

    Values are fractions. For a pad query, 0.12 means that the changed shape takes 1/1.12 of the
    original time. For a choose query, 0.12 means 12% more FLOPs per second.
    """

    value: float
    lo: float
    hi: float


def gain_of(ratio: tuple[float, float, float], work: float) -> Gain:
    """Convert a time ratio (old time over new time), with its interval, to a gain.

    To compare times, ``work`` is 1. To compare speeds, it is the ratio of the FLOPs, new over old.
    """
    value, lo, hi = ratio
    return Gain(value * work - 1, lo * work - 1, hi * work - 1)


def net(gain: Gain, extra_flops: float) -> float:
    """Return the expected gain after costs, which are a tenth of the additional FLOPs."""
    return gain.value - _PRICE * max(0.0, extra_flops)


def probability(gain: Gain, evidence: str) -> float:
    """Return the probability, from 5% to 95%, that a change brings any gain.

    The error of log(1 + gain) is assumed to follow a Laplace distribution, because errors of ratios
    are mostly small and occasionally large. With a normal distribution, changes of medium
    probability would bring a gain more often than stated.
    """
    middle = math.log1p(gain.value)
    # The scale follows from the end of the interval on the side of zero gain.
    end = math.log1p(gain.lo if middle > 0 else gain.hi)
    # In a Laplace distribution of scale s, the probability of a value more than x above the middle
    # is exp(-x/s) / 2. Beyond an end of the interval, it is half of _OUTSIDE.
    scale = abs(end - middle) / -math.log(_OUTSIDE[evidence])
    # The probability that the gain has the opposite sign. It is 0 if the interval has no width.
    opposite = 0.5 * math.exp(-abs(middle) / scale) if scale else 0.0
    opposite = max(opposite, 1 - _SUREST)
    return 1 - opposite if middle > 0 else opposite


def verdict(gain: Gain, evidence: str, extra_flops: float) -> str:
    """Return the verdict on a change, from :data:`VERDICTS`, by the rule of this module.

    ``extra_flops`` is a fraction of the original FLOPs.
    """
    if net(gain, extra_flops) < MIN_GAIN:
        return LEAVE_IT
    if evidence == CONFIRMED and gain.lo >= MIN_GAIN:
        return DO_IT
    return LIKELY if probability(gain, evidence) >= LEAST_PROBABILITY else LEAVE_IT


def verdict_text(verdict_word: str, gain_probability: float) -> str:
    """Format a verdict; *likely* is followed by its probability, as in ``likely (91%)``."""
    return f"{verdict_word} ({gain_probability:.0%})" if verdict_word == LIKELY else verdict_word
