"""Test the expected difference between a table's times and those of other frameworks."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.model.fit import Fit, SoftwareRange
from analysis.model.predict import Model
from analysis.model.prior import GROUP
from analysis.model.query import Query
from analysis.model.shift import CollectionPair, Shift
from kernels.problem import Gemm
from kernels.timemodel.constants import default_constants
from tests.support.synthetic import H100

TIMES = np.geomspace(2e-6, 5e-3, 4000)


def differing(law: float, rows: int = 4000) -> CollectionPair:
    """Return a collection whose log ratio to the table is ``law`` at all shapes."""
    return CollectionPair(TIMES[:: 4000 // rows], np.full(rows, law))


def test_what_three_siblings_show_is_half_believed_and_what_one_shows_a_quarter() -> None:
    three = Shift.learned([[differing(0.08)]] * 3)
    assert three.applied(TIMES) == pytest.approx(TIMES * math.exp(0.04))
    one = Shift.learned([[differing(0.08)]])
    assert one.applied(TIMES) == pytest.approx(TIMES * math.exp(0.02))


def test_short_products_may_differ_otherwise_than_long_ones() -> None:
    law = np.where(TIMES < 10e-6, 0.06, -0.04)
    shift = Shift.learned([[CollectionPair(TIMES, law)]] * 3)
    # Beyond the first and the last knot, the shift is constant. Where the law changes, it is in
    # between.
    far = np.array([1e-9, 3e-6, 1e-4, 1.0])
    expected = np.array([0.03, 0.03, -0.02, -0.02])
    assert np.log(shift.applied(far) / far) == pytest.approx(expected)
    between = np.array([7e-6, 15e-6])
    assert np.all(np.abs(np.log(shift.applied(between) / between)) < 0.03)


def test_every_sibling_weighs_as_much_and_every_collection_of_one() -> None:
    # If all rows had the same weight, the first machine would determine the result.
    many, few = [differing(0.1), differing(0.1)], [differing(-0.1, 400)]
    assert np.log(Shift.learned([many, few, few]).applied(TIMES) / TIMES) == pytest.approx(-0.05)
    # Two of the three collections of one machine agree.
    mixed = [differing(0.1), differing(-0.1, 400), differing(-0.1, 400)]
    assert np.log(Shift.learned([mixed]).applied(TIMES) / TIMES) == pytest.approx(-0.025)


def test_siblings_weigh_as_much_in_each_range_of_times() -> None:
    short = np.full(1000, 5e-6)
    # All rows of the first collection are in the range where the second has a tenth of its rows.
    first = CollectionPair(short, np.full(1000, 0.1))
    second = CollectionPair(np.append(short[:10], np.full(90, 1e-3)), np.full(100, -0.1))
    seconds = np.array([5e-6, 1e-3])
    shift = np.log(Shift.learned([[first], [second], [second]]).applied(seconds) / seconds)
    # Only two of the three machines have long times.
    assert shift == pytest.approx([-0.1 * 3 / 6, -0.1 * 2 / 5])


def test_without_siblings_nothing_is_shifted() -> None:
    nothing = CollectionPair(np.empty(0), np.empty(0))
    assert Shift.learned([]) == Shift.learned([[], []]) == Shift.learned([[nothing]]) == Shift()
    # A machine without common shapes does not count as a sibling.
    assert Shift.learned([[differing(0.1)], [nothing]]) == Shift.learned([[differing(0.1)]])
    assert Shift().applied(TIMES) is TIMES


def test_predictions_and_their_intervals_move_together() -> None:
    query = Query.plain([Gemm(m, 4096, 4096, "bf16") for m in (1, 64, 4096)], "cublas", warm=True)
    fit = Fit(default_constants(H100.generation, "bf16"), low=-0.2, high=0.1)
    shift = Shift.learned([[differing(-0.1)]] * 3)
    moved = fit.for_software(SoftwareRange(-0.3, 0.2, -0.1, 0.1), shift)
    before, after = (Model(H100, {GROUP: each}).predict(query) for each in (fit, moved))
    assert after.estimate.time == pytest.approx(before.estimate.time * math.exp(-0.05))
    for end, times in ((moved.low, after.lo), (moved.high, after.hi)):
        ratio = np.log(times / after.estimate.time)
        assert ratio == pytest.approx(np.full(3, end * moved.typical_spread))
    again = Fit.from_json(json.loads(json.dumps(moved.to_json())))
    assert again.shift == shift
    assert again == replace(moved, constants=again.constants)


@pytest.mark.parametrize(
    "damage",
    [
        {"log_seconds": [0.0]},
        {"log_seconds": [-10.0, -11.0]},
        {"log_ratios": [math.nan, 0.0]},
        {"log_ratios": "0, 0"},
        {"log_ratios": None},
    ],
)
def test_a_damaged_shift_is_refused(damage: dict[str, object]) -> None:
    sound = {"log_seconds": [-11.0, -10.0], "log_ratios": [0.01, 0.02]}
    assert Shift.from_json(sound).to_json() == sound
    with pytest.raises(ValueError):  # noqa: PT011
        Shift.from_json({**sound, **damage})
