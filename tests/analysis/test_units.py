from __future__ import annotations

import pytest

from analysis.units import microseconds, signed_percent


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.01234"), (12.3456, "12.35"), (999.9, "999.9"), (18233, "18,233")],
)
def test_times_have_four_digits(value: float, text: str) -> None:
    assert microseconds(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0391, "+3.9%"), (-0.0004, "+0.0%"), (0.0, "+0.0%"), (-0.012, "-1.2%")]
)
def test_changes_have_a_sign(share: float, text: str) -> None:
    assert signed_percent(share) == text
