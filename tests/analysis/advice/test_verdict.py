from __future__ import annotations

import math

import pytest

from analysis.advice.verdict import (
    CONFIRMED,
    DO_IT,
    LEAVE_IT,
    LIKELY,
    MEASURED,
    PREDICTED,
    Gain,
    gain_of,
    probability,
    verdict,
    verdict_text,
)


@pytest.mark.parametrize(
    ("gain", "evidence", "extra_flops", "expected"),
    [
        (Gain(0.08, 0.05, 0.11), CONFIRMED, 0.01, DO_IT),
        (Gain(0.08, 0.05, 0.11), MEASURED, 0.01, LIKELY),  # not re-timed
        (Gain(0.08, 0.05, 0.11), PREDICTED, 0.01, LIKELY),
        (Gain(0.08, 0.009, 0.16), CONFIRMED, 0.0, LIKELY),  # the interval begins below 1%
        (Gain(0.08, -0.02, 0.15), PREDICTED, 0.0, LIKELY),
        (Gain(0.08, -0.13, 0.3), PREDICTED, 0.0, LEAVE_IT),  # it gains in three of four cases
        (Gain(0.009, 0.008, 0.01), CONFIRMED, 0.0, LEAVE_IT),  # not worth it
        (Gain(0.02, 0.015, 0.025), CONFIRMED, 0.12, LEAVE_IT),  # below 1% after costs
        (Gain(0.02, 0.015, 0.025), CONFIRMED, -0.12, DO_IT),  # a smaller size costs nothing
        (Gain(0.02, -0.3, 0.5), PREDICTED, 0.0, LEAVE_IT),  # it gains in one of two cases
        (Gain(0.01, -0.2, 0.27), PREDICTED, 0.0, LEAVE_IT),  # it loses nearly as often
        (Gain(-0.05, -0.06, -0.04), CONFIRMED, 0.0, LEAVE_IT),
        (Gain(0.05, 0.05, 0.05), PREDICTED, 0.0, LIKELY),
    ],
)  # fmt: skip
def test_what_to_do(gain: Gain, evidence: str, extra_flops: float, expected: str) -> None:
    assert verdict(gain, evidence, extra_flops) == expected


def test_a_gain_counts_the_work() -> None:
    assert gain_of((1.1, 1.0, 1.2), 1.0) == pytest.approx((0.1, 0.0, 0.2))
    assert gain_of((1.1, 1.0, 1.2), 0.9) == pytest.approx((-0.01, -0.1, 0.08))


def test_the_probability_follows_from_the_half_of_the_interval_towards_no_gain() -> None:
    # If the interval begins at zero gain, half of the probability outside it is that of a loss.
    assert probability(Gain(0.1, 0.0, 0.21), PREDICTED) == pytest.approx(0.95)
    # At half that distance, the Laplace distribution has √0.1 / 2 of its probability, a sixth.
    half = Gain(math.sqrt(1.1) - 1, math.sqrt(1.1) / 1.1 - 1, 0.5)
    assert probability(half, PREDICTED) == pytest.approx(1 - math.sqrt(0.1) / 2)
    assert probability(half, MEASURED) == pytest.approx(1 - math.sqrt(0.05) / 2)
    assert probability(Gain(0.0, -0.1, 0.1), PREDICTED) == pytest.approx(0.5)
    # The probability of an expected loss follows from the upper half of the interval.
    lost = probability(Gain(-0.1, -0.12, 0.0), PREDICTED)
    assert lost == pytest.approx(0.05)
    # No probability is stated that exceeds the reliability on held-out tables.
    assert probability(Gain(0.5, 0.4, 0.6), CONFIRMED) == 0.95
    assert probability(Gain(-0.5, -0.5, -0.5), PREDICTED) == pytest.approx(0.05)


def test_a_likely_gain_is_told_with_its_probability() -> None:
    assert verdict_text(LIKELY, 0.914) == "likely (91%)"
    assert verdict_text(DO_IT, 0.99) == "do it"
