from __future__ import annotations

import pytest

from analysis.units import microseconds, percent_range, rate, signed_percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.01234"),
        (12.3456, "12.35"),
        (999.9, "999.9"),
        (999.96, "1,000"),
        (18233, "18,233"),
    ],
)
def test_times_have_four_digits(value: float, text: str) -> None:
    assert microseconds(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0391, "+3.9%"), (-0.0004, "+0.0%"), (0.0, "+0.0%"), (-0.012, "-1.2%")]
)
def test_changes_have_a_sign(share: float, text: str) -> None:
    assert signed_percent(share) == text


@pytest.mark.parametrize(
    ("tflops", "text"),
    [
        (0.4312, "431 GFLOP/s"),
        (0.9997, "1,000 GFLOP/s"),
        (788.4, "788 TFLOP/s"),
        (999.7, "1,000 TFLOP/s"),
        (1510.0, "1,510 TFLOP/s"),
    ],
)
def test_rates_have_three_digits_and_no_exponent(tflops: float, text: str) -> None:
    assert rate(tflops) == text


@pytest.mark.parametrize(
    ("lo", "hi", "text"),
    [(0.86, 0.91, "86–91%"), (-0.002, 0.05, "0–5%"), (-0.02, 0.04, "-2% to 4%")],
)
def test_an_interval_of_shares_reads_also_below_zero(lo: float, hi: float, text: str) -> None:
    assert percent_range(lo, hi) == text
