"""Test the intervals of sums of predicted times."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.model.sum_errors import (
    LEVEL_CORRELATION,
    Times,
    change_factors,
    half_interval_of_sum,
    simulated_counts,
    sum_factors,
)


def test_errors_add_up_by_how_alike_they_are() -> None:
    parts = np.array([[3.0, 4.0], [5.0, 12.0]])
    assert half_interval_of_sum(parts, 0.0) == pytest.approx([5.0, 13.0])
    assert half_interval_of_sum(parts, 1.0) == pytest.approx([7.0, 17.0])
    assert 5.0 < half_interval_of_sum(parts[0], 0.5) < 7.0


def test_made_up_steps_have_three_to_twelve_products() -> None:
    counts = simulated_counts(np.random.default_rng(0), 500)
    products = (counts > 0).sum(axis=1)
    assert set(products) == set(range(3, 13))
    assert counts.max() == 48


def rows(common: float, own: float) -> tuple[Times, np.ndarray, np.ndarray]:
    """Return times with a common and a random error, and the 90% intervals of predictions."""
    rng = np.random.default_rng(3)
    predicted = np.exp(rng.uniform(-11, -7, 4000))
    error = common + own * rng.standard_normal(4000)
    half = np.quantile(np.abs(error), 0.9)
    lo, hi = predicted * np.exp(-half), predicted * np.exp(half)
    return Times(predicted, predicted * np.exp(error)), lo, hi


def test_errors_that_are_independent_narrow_the_interval_of_a_sum() -> None:
    low, high = sum_factors(*rows(common=0.0, own=0.05))
    assert 0.25 < low < 0.8
    assert 0.25 < high < 0.8


def test_errors_that_are_all_the_same_widen_it() -> None:
    low, high = sum_factors(*rows(common=0.05, own=0.005))
    assert high > 1.1
    assert low == 0.25  # no sum is faster than predicted


def test_few_rows_change_nothing() -> None:
    times, lo, hi = rows(common=0.05, own=0.0)
    few = Times(*(part[:39] for part in times))
    assert sum_factors(few, lo[:39], hi[:39]) == (1.0, 1.0)
    assert change_factors(few, few, lo[:39], hi[:39]) == (1.0, 1.0)


def test_nine_sums_in_ten_of_other_rows_lie_inside() -> None:
    times, lo, hi = rows(common=0.01, own=0.08)
    half = len(lo) // 2
    low, high = sum_factors(Times(*(part[:half] for part in times)), lo[:half], hi[:half])
    rng = np.random.default_rng(5)
    counts = simulated_counts(rng, 2000)
    which = rng.integers(half, len(lo), counts.shape)
    error = (counts * (times.measured - times.predicted)[which]).sum(axis=1)
    below = low * half_interval_of_sum(counts * (times.predicted - lo)[which], LEVEL_CORRELATION)
    above = high * half_interval_of_sum(counts * (hi - times.predicted)[which], LEVEL_CORRELATION)
    assert 0.86 < np.mean((-below <= error) & (error <= above)) < 0.94


@pytest.mark.parametrize(("flattered", "least"), [(0.0, 0.0), (0.03, 1.5)])
def test_gains_that_flatter_widen_the_interval_where_less_is_gained(
    flattered: float, least: float
) -> None:
    rng = np.random.default_rng(7)
    before = np.exp(rng.uniform(-11, -7, 3000))
    after = before * np.exp(rng.uniform(-0.1, 0.1, 3000))
    error = flattered + 0.02 * rng.standard_normal(3000)
    half = 0.02 * 1.645
    low, high = change_factors(
        Times(before, before), Times(after, after * np.exp(error)),
        after * (1 - np.exp(-half)), after * (np.exp(half) - 1),
    )  # fmt: skip
    assert (high > 1.5) == bool(flattered)
    assert least <= high < 3.5
    assert low <= 1.0
