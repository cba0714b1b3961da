"""Test speeds and their intervals on simulated fleets, whose true speeds are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.fleet.anchors import KINDS, Fleet
from analysis.fleet.device_verdict import SLOW, judge
from analysis.fleet.speeds import _error_of_median, fleet_speeds
from tests.studies.fleets import BAD, MAIN, MARGIN, PLAIN, SETTINGS, Setting, kinds, look, simulate

FLEETS = 100
LEAST_HELD = 0.93
"""Share of the 95% intervals that must contain the true speed."""


def rearranged(fleet: Fleet, order: list[int]) -> Fleet:
    return replace(
        fleet,
        devices=tuple(fleet.devices[i] for i in order),
        log_time=fleet.log_time[:, order],
        error=fleet.error[:, order],
        sensors={name: values[:, order] for name, values in fleet.sensors.items()},
        throttled={name: seen[:, order] for name, seen in fleet.throttled.items()},
    )


def without(fleet: Fleet, *places: object) -> Fleet:
    """Return the fleet without the times at some indices of (phases, devices, anchors)."""
    log = fleet.log_time.copy()
    log[places] = np.nan  # type: ignore[index]
    return replace(fleet, log_time=log, error=np.where(np.isnan(log), np.nan, fleet.error))


def test_who_is_slow_and_who_throttles_is_named_and_nobody_else() -> None:
    found = look(MAIN, FLEETS)
    assert found.bad >= 0.95 * FLEETS
    assert found.hot >= 0.95 * FLEETS
    assert found.accused <= 0.05 * FLEETS
    assert 0.008 < found.spread / FLEETS < 0.012
    assert found.held is not None
    assert all(count >= LEAST_HELD * found.count for count in found.held.values()), found.held


@pytest.mark.parametrize("name", [name for name in SETTINGS if SETTINGS[name] is not MAIN])
def test_so_it_is_in_other_fleets(name: str) -> None:
    setting, fleets = SETTINGS[name], 30
    found = look(setting, fleets, seed=1000)
    assert found.accused <= 0.05 * fleets
    assert found.falsely_crowded <= 0.01 * fleets * setting.nodes
    for loss, count in (
        (setting.bad, found.bad), (setting.dim, found.dim), (setting.crowded, found.crowded),
        (setting.hot and setting.nvml, found.hot),
    ):  # fmt: skip
        assert not loss or count >= 0.95 * fleets
    assert found.held is not None
    assert all(count >= (LEAST_HELD - 0.02) * found.count for count in found.held.values())


def test_a_wide_spread_accuses_nobody_within_the_margin() -> None:
    """If GPUs differ by 3%, some are more than 5% slow, and the fleet's spread explains that."""
    found = look(SETTINGS["64 GPUs that differ by 3 %"], FLEETS, seed=2000)
    assert found.accused <= 0.05 * FLEETS
    assert found.named > 0.3 * found.slow
    assert found.ordinary > 0.9 * found.named
    assert 0.027 < found.spread / FLEETS < 0.033


def test_no_order_of_devices_matters() -> None:
    fleet, _ = simulate(MAIN, 0)
    order = np.random.default_rng(0).permutation(64).tolist()
    one, other = fleet_speeds(fleet), fleet_speeds(rearranged(fleet, order))
    for kind in KINDS:
        np.testing.assert_allclose(one.kinds[kind].log[order], other.kinds[kind].log, atol=1e-12)
        np.testing.assert_allclose(one.kinds[kind].half[order], other.kinds[kind].half, atol=1e-12)


def test_how_long_an_anchor_takes_does_not_matter() -> None:
    fleet, _ = simulate(MAIN, 0)
    longer = replace(fleet, log_time=fleet.log_time + np.arange(len(fleet.kinds)))
    one, other = fleet_speeds(fleet), fleet_speeds(longer)
    for kind in KINDS:
        np.testing.assert_allclose(one.kinds[kind].log, other.kinds[kind].log, atol=1e-9)


def test_the_middle_gpu_is_at_one() -> None:
    speeds = fleet_speeds(simulate(replace(PLAIN, nodes=1, per_node=7), 0)[0])
    for of in speeds.kinds.values():
        assert np.median(of.speed) == pytest.approx(1.0, abs=1e-12)


def test_a_gpu_without_some_anchors_is_judged_by_the_others() -> None:
    fleet, truth = simulate(MAIN, 0)
    bursts = np.flatnonzero(fleet.kinds == "burst")
    part = fleet_speeds(without(fleet, slice(None), BAD, bursts[1:]))
    whole = fleet_speeds(fleet)
    burst = part.kinds["burst"]
    assert burst.log[BAD] == pytest.approx(truth.log["burst"][BAD], abs=0.015)
    assert burst.half[BAD] > whole.kinds["burst"].half[BAD]
    others = np.arange(64) != BAD
    np.testing.assert_allclose(burst.log[others], whole.kinds["burst"].log[others], atol=0.003)


def test_a_gpu_without_a_kind_has_no_speed_in_it() -> None:
    fleet, _ = simulate(MAIN, 0)
    sustained = int(np.flatnonzero(fleet.kinds == "sustained")[0])
    speeds = fleet_speeds(without(fleet, slice(None), BAD, sustained))
    assert np.isnan(speeds.kinds["sustained"].speed).tolist() == [i == BAD for i in range(64)]
    verdict = judge(fleet, speeds, MARGIN)[BAD]
    assert (verdict.verdict, verdict.slow) == (SLOW, ("burst",))


def test_without_sustained_anchors_the_speed_is_that_of_bursts() -> None:
    fleet, _ = simulate(MAIN, 0)
    assert fleet_speeds(fleet).overall == "sustained"
    few = without(fleet, slice(None), slice(0, 40), fleet.kinds == "sustained")
    assert fleet_speeds(few).overall == "burst"


def test_bursts_are_compared_in_the_phase_that_most_timed() -> None:
    fleet, _ = simulate(PLAIN, 0)
    disturbed = replace(fleet, log_time=fleet.log_time + np.array([0, 0.5])[:, None, None])
    one, other = (fleet_speeds(f).kinds["burst"].log for f in (fleet, disturbed))
    np.testing.assert_allclose(one, other)
    # The first node's GPUs have no time alone. They would seem slow if their times together were
    # compared with the other GPUs' times alone.
    crowded = without(disturbed, 0, slice(0, 8))
    assert np.isfinite(fleet_speeds(crowded).kinds["burst"].log).all()
    assert np.abs(fleet_speeds(crowded).kinds["burst"].log).max() < 0.05


def test_sustained_anchors_of_either_phase_are_compared() -> None:
    """Sustained anchors are timed alone on a node with one GPU, and together on other nodes."""
    fleet, _ = simulate(PLAIN, 0)
    swapped = fleet.log_time.copy()
    swapped[:, 0] = np.where(np.isnan(swapped[0, 0]), swapped[::-1, 0], np.nan)
    np.testing.assert_allclose(
        fleet_speeds(replace(fleet, log_time=swapped)).kinds["sustained"].log,
        fleet_speeds(fleet).kinds["sustained"].log,
    )


def test_the_few_gpus_that_timed_an_anchor_say_nothing_of_it() -> None:
    fleet, _ = simulate(PLAIN, 0)
    sustained = fleet.kinds == "sustained"
    few = without(fleet, slice(None), slice(2, 64), sustained)
    assert "sustained" not in fleet_speeds(few).kinds


def test_interference_is_said_of_the_node_and_the_kind_that_have_it() -> None:
    speeds = fleet_speeds(simulate(Setting(crowded=0.05), 0)[0])
    slowed = {(one.node, kind) for one in speeds.interference
              for kind, change in one.kinds.items() if change.slowed}  # fmt: skip
    assert slowed == {(1, "small")}
    of = speeds.interference[1].kinds["small"]
    assert of.lo < np.exp(0.05) < of.hi
    assert "sustained" not in speeds.interference[1].kinds


def test_an_interference_within_one_percent_is_none() -> None:
    fleet, _ = simulate(PLAIN, 0)
    little = replace(fleet, log_time=fleet.log_time + np.array([0, 0.005])[:, None, None])
    speeds = fleet_speeds(little)
    assert not any(one.all.slowed for one in speeds.interference)
    assert any(one.all.lo > 1 for one in speeds.interference)


def test_gpus_that_change_from_one_time_to_the_next_have_wider_intervals() -> None:
    fleet, _ = simulate(PLAIN, 0)
    changing = fleet.log_time.copy()
    changing[1] += 0.02 * np.random.default_rng(0).standard_normal(64)[:, None]
    one, other = (fleet_speeds(f).kinds["sustained"].half.min()
                  for f in (fleet, replace(fleet, log_time=changing)))  # fmt: skip
    assert other > 2 * one


def test_of_two_gpus_the_difference_is_judged() -> None:
    held = 0
    for seed in range(200):
        fleet, truth = simulate(Setting(1, 2), seed)
        of = fleet_speeds(fleet).kinds["sustained"]
        assert of.log[0] == pytest.approx(-of.log[1])
        difference = truth.log["sustained"][0] - truth.log["sustained"][1]
        held += abs(of.log[0] - of.log[1] - difference) <= of.half.sum()
    assert held >= LEAST_HELD * 200


def test_the_made_up_anchors_are_of_every_kind() -> None:
    assert set(kinds()) == set(KINDS)


def test_bursts_without_intervals_leave_the_intervals_of_other_anchors() -> None:
    fleet = simulate(MAIN, 0)[0]
    bursts = np.flatnonzero(fleet.kinds == "burst")
    fleet = without(fleet, slice(None), slice(None), bursts[1:])
    error = fleet.error.copy()
    error[:, :, bursts] = np.nan
    speeds = fleet_speeds(replace(fleet, error=error))
    assert np.isfinite(speeds.kinds["sustained"].half).all()


def test_devices_without_both_phases_do_not_narrow_the_interference() -> None:
    fleet = simulate(MAIN, 0)[0]
    first_node = [i for i, device in enumerate(fleet.devices) if device.node == 0]
    one_is_left = fleet_speeds(without(fleet, 0, first_node[1:])).interference[0].all
    every_one = fleet_speeds(fleet).interference[0].all
    assert np.log(one_is_left.hi / one_is_left.lo) > 2 * np.log(every_one.hi / every_one.lo)


def test_the_error_of_two_devices_is_that_of_their_mean() -> None:
    """The median of one or two values is their mean, so it is not less precise than a mean."""
    one, two, three = (
        _error_of_median(np.full((count, 1), 0.01))[0] * math.sqrt(count) for count in (1, 2, 3)
    )
    np.testing.assert_allclose([one, two, three], [0.01, 0.01, 0.01 * math.sqrt(math.pi / 2)])


def test_the_intervals_of_anchors_on_few_gpus_do_not_matter() -> None:
    """An anchor that was timed on two GPUs only does not widen the interval of a speed."""
    fleet, _ = simulate(PLAIN, 0)
    bursts = np.flatnonzero(fleet.kinds == "burst")
    few = without(fleet, slice(None), slice(2, None), bursts[2:])
    uncertain = few.error.copy()
    uncertain[:, :, bursts[2:]] = np.where(np.isnan(few.error[:, :, bursts[2:]]), np.nan, 1.0)
    one, other = fleet_speeds(few), fleet_speeds(replace(few, error=uncertain))
    np.testing.assert_allclose(one.kinds["burst"].half[:2], other.kinds["burst"].half[:2], rtol=0.1)
