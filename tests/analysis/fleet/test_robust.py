"""Robust averages: what moves them, and whether their intervals hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from analysis.fleet.robust import centres, deviation, middle, spread

VALUES = st.floats(-1, 1).map(lambda x: round(x, 6))
UNKNOWN = np.full((1, 9), np.nan)


def tables(**shape: int) -> st.SearchStrategy[np.ndarray]:
    sizes = {"min_dims": 2, "max_dims": 2, "max_side": 9, **shape}
    return arrays(float, array_shapes(**sizes), elements=st.one_of(VALUES, st.just(math.nan)))


@given(tables(), st.randoms(use_true_random=False))
def test_the_order_of_columns_does_not_matter(table: np.ndarray, draw: object) -> None:
    order = list(range(table.shape[1]))
    draw.shuffle(order)  # type: ignore[attr-defined]
    one, other = (centres(part, np.abs(part)) for part in (table, table[:, order]))
    np.testing.assert_allclose(one.centre, other.centre, atol=1e-12)
    np.testing.assert_allclose(one.half_width(), other.half_width(), atol=1e-9)


@given(tables(), st.floats(-5, 5))
def test_a_shift_moves_the_centre_by_as_much_and_no_interval(table: np.ndarray, by: float) -> None:
    one, other = (centres(part, np.full(table.shape, 0.01)) for part in (table, table + by))
    np.testing.assert_allclose(one.centre + by, other.centre, atol=1e-9)
    np.testing.assert_allclose(one.half_width(), other.half_width(), atol=1e-6)


@given(tables())
def test_medians_are_numpys(table: np.ndarray) -> None:
    known = table[:, np.isfinite(table).any(axis=0)]
    np.testing.assert_allclose(middle(known), np.nanmedian(known, axis=0))
    assert np.isnan(middle(table)).sum() == table.shape[1] - known.shape[1]


@given(arrays(float, st.integers(5, 9), elements=VALUES), st.floats(-1e6, 1e6))
def test_a_wild_value_among_five_leaves_the_centre_among_the_others(
    values: np.ndarray, wild: float
) -> None:
    others = values[1:]
    (centre,) = centres(np.array([[wild, *others]]), np.full((1, len(values)), np.nan)).centre
    assert others.min() - 1e-9 <= centre <= others.max() + 1e-9


@given(tables(min_side=1), st.floats(0.001, 1))
def test_no_interval_is_narrower_than_the_values_own_say(table: np.ndarray, own: float) -> None:
    found = centres(table, np.full(table.shape, own))
    known = np.isfinite(table).sum(axis=1)
    least = 1.96 * own / np.sqrt(np.where(known, known, np.nan))
    assert (found.half_width()[known > 0] >= 0.999 * least[known > 0]).all()


def test_a_single_row_is_tukeys_and_mclaughlins() -> None:
    values = np.array([[3.0, 1.0, 2.0, 9.0, 4.0]])
    found = centres(values, UNKNOWN[:, :5])
    assert found.centre[0] == 3.0
    pulled_in = np.array([3, 2, 2, 4, 4])
    assert found.scatter[0] == pytest.approx(pulled_in.var() * 5 / (3 * 2))
    assert found.df[0] == 2


def test_what_is_lent_serves_rows_of_one_value_alone() -> None:
    one, two = np.array([[1.0], [2.0]]), np.array([[1.0, 1.2], [2.0, 2.2]])
    assert np.isnan(centres(one, np.full((2, 1), np.nan)).half_width()).all()
    assert centres(one, np.full((2, 1), np.nan), lent=0.04).half_width() == pytest.approx(
        0.2 * 1.984, rel=1e-3
    )
    assert (centres(two, np.full((2, 2), np.nan), lent=9.0).scatter < 1).all()


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 10])
def test_intervals_hold(columns: int) -> None:
    """Of normal values whose own errors are unknown; single values need what is lent."""
    draw = np.random.default_rng(columns)
    held = []
    for _ in range(60):
        values = draw.standard_normal((64, columns))
        found = centres(values, np.full(values.shape, np.nan), lent=1.0)
        held.append(np.abs(found.centre) <= found.half_width())
    assert 0.94 <= np.mean(held) <= 0.985


def test_a_row_that_scatters_more_has_a_wider_interval() -> None:
    draw = np.random.default_rng(0)
    values = draw.standard_normal((64, 8))
    values[7] *= 10
    half = centres(values, np.full(values.shape, np.nan)).half_width()
    assert half[7] > 3 * np.delete(half, 7).max()


def test_spreads_are_without_noise_and_without_what_lies_far_out() -> None:
    draw = np.random.default_rng(0)
    values = 0.03 * draw.standard_normal(4000) + 0.02 * draw.standard_normal(4000)
    noise = np.full(4000, 0.02**2)
    assert spread(values, noise) == pytest.approx(0.03, rel=0.05)
    assert spread(np.append(values, [-0.5] * 9), np.append(noise, noise[:9])) == pytest.approx(
        0.03, rel=0.05
    )
    assert spread(values, np.full(4000, 1.0)) == 0.0
    assert math.isnan(spread(values[:1], noise[:1]))
    assert math.isnan(spread(UNKNOWN[0], UNKNOWN[0]))


def test_the_deviation_of_normal_values_is_theirs() -> None:
    assert deviation(2 * np.random.default_rng(0).standard_normal(9999)) == pytest.approx(
        2, rel=0.05
    )
    assert math.isnan(deviation(UNKNOWN))
