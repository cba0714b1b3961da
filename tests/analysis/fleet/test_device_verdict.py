"""Test the verdict, the explanation and the sentence about each GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis.fleet.anchors import Fleet, FleetDevice
from analysis.fleet.device_verdict import ORDINARY, SLOW, THROTTLED, DeviceVerdict, judge, name_of
from analysis.fleet.speeds import fleet_speeds
from tests.studies.fleets import MARGIN, PLAIN, Setting, simulate

I = 5  # noqa: E741  position of the GPU that is changed


def changed(
    speed: dict[str, float] | None = None, clock: float = 1.0, sensors: Callable[..., None] | None
    = None, reasons: tuple[str, ...] = (), setting: Setting = PLAIN, **device: Any,
) -> Fleet:  # fmt: skip
    """Simulate a fleet in which one GPU is changed.

    Args:
        speed: factors on the GPU's speed, by kind of anchor.
        clock: factor on its clock.
        sensors: changes the readings of sensors.
        reasons: reasons for a lower clock that the GPU reports.
        setting: how the other GPUs are simulated.
        device: attributes of the GPU to replace.
    """
    fleet, _ = simulate(setting, 1)
    log = fleet.log_time.copy()
    for kind, factor in (speed or {}).items():
        log[:, I, fleet.kinds == kind] -= math.log(factor)
    values = {name: array.copy() for name, array in fleet.sensors.items()}
    values["sm_mhz"][:, I] *= clock
    values["power_w"][:, I] = 500.0  # below the power limit
    if sensors is not None:
        sensors(values)
    seen = dict(fleet.throttled)
    for reason in reasons:
        seen[reason] = np.zeros(log.shape, dtype=bool)
        seen[reason][:, I] = True
    devices = list(fleet.devices)
    devices[I] = replace(devices[I], **device)
    return replace(fleet, log_time=log, sensors=values, throttled=seen, devices=tuple(devices))


def verdict_of(fleet: Fleet, margin: float = MARGIN) -> DeviceVerdict:
    verdicts = judge(fleet, fleet_speeds(fleet), margin)
    others = [verdict for i, verdict in enumerate(verdicts) if i != I]
    assert {verdict.verdict for verdict in others} == {ORDINARY}
    return verdicts[I]


def hot(values: dict[str, np.ndarray]) -> None:
    values["temp_c"][:, I] += 25


def at_limit(values: dict[str, np.ndarray]) -> None:
    values["power_w"][:, I] = 699.0


COMPUTE = {"sustained": 0.9, "burst": 0.9}


@pytest.mark.parametrize(
    ("options", "explained", "words"),
    [
        ({"reasons": ("hw_thermal_slowdown",)}, "clock: hw_thermal_slowdown", "device reported hw"),
        ({"sensors": hot}, "clock: temperature", r"25 °C hotter|24 °C hotter|26 °C hotter"),
        ({"sensors": at_limit}, "clock: power limit", "at its power limit (699 of 700 W)"),
        ({"power_limit_w": 500.0}, "clock: lower power limit", "500 W (the fleet's median is 700"),
        ({"sm_limit_mhz": 1350.0}, "clock: clock limit", "1,350 MHz (the fleet's median is 1,980"),
        ({}, "clock: unknown reason", "The recording does not show why"),
        ({"reasons": ("sw_power_cap",), "power_limit_w": math.nan}, "clock: power cap",
         "which most others did not"),
        ({"reasons": ("sw_power_cap",)}, "clock: unknown reason", "explains the slowness"),
        ({"sensors": hot, "reasons": ("sw_thermal_slowdown",)},
         "clock: sw_thermal_slowdown, temperature", "hotter"),
    ],
)  # fmt: skip
def test_a_low_clock_explains_and_its_reason_is_named(
    options: dict[str, Any], explained: str, words: str
) -> None:
    verdict = verdict_of(changed(COMPUTE, clock=0.9, **options))
    assert verdict.verdict == SLOW
    assert verdict.explained == explained
    assert "which explains the slowness" in verdict.sentence
    assert any(word in verdict.sentence for word in words.split("|"))


def test_a_high_clock_does_not_explain() -> None:
    verdict = verdict_of(changed(COMPUTE))
    assert (verdict.verdict, verdict.slow, verdict.explained) == (SLOW, ("sustained", "burst"), "")
    assert "not noticeably lower than the fleet's median, so the clock" in verdict.sentence
    held = verdict_of(changed(COMPUTE, reasons=("hw_slowdown",)))
    assert "Nevertheless, the device reported hw_slowdown." in held.sentence
    assert not held.explained


def test_a_slightly_lower_clock_explains_a_part() -> None:
    verdict = verdict_of(changed({"sustained": 0.85, "burst": 0.85}, clock=0.95))
    assert not verdict.explained
    assert "explains only part" in verdict.sentence


def test_what_the_margin_leaves_is_not_the_clocks() -> None:
    """A 2% lower clock is not the cause if a GPU is 6.5% slow, although the rest is within 5%."""
    verdict = verdict_of(changed({"sustained": 0.935, "burst": 0.935}, clock=0.98))
    assert verdict.verdict == SLOW
    assert not verdict.explained


def test_without_clocks_nothing_is_explained() -> None:
    verdict = verdict_of(changed(COMPUTE, setting=Setting(nvml=False)))
    assert not verdict.explained
    assert "No clock was recorded" in verdict.sentence


def test_only_memory_and_only_launches() -> None:
    memory = verdict_of(changed({"memory": 0.9}))
    assert (memory.slow, memory.explained) == (("memory",), "")
    assert "Only its memory is slow" in memory.sentence
    small = verdict_of(changed({"small": 0.9}))
    assert (small.slow, small.explained) == (("small",), "launches: the host")
    both = verdict_of(changed({"small": 0.9, "memory": 0.9}))
    assert "Only its memory and launches are slow" in both.sentence
    every = verdict_of(changed(dict.fromkeys(("sustained", "burst", "memory", "small"), 0.9)))
    assert "nly its" not in every.sentence


def test_who_throttled_is_named_even_if_not_slow() -> None:
    verdict = verdict_of(changed(reasons=("hw_slowdown", "sw_power_cap", "sync_boost")))
    assert verdict.verdict == THROTTLED
    assert verdict.throttled == ("hw_slowdown",)
    assert "throttled (hw_slowdown), but is not significantly slow" in verdict.sentence


def test_the_power_cap_is_no_throttling() -> None:
    assert verdict_of(changed(reasons=("sw_power_cap",))).verdict == ORDINARY


@pytest.mark.parametrize(
    ("loss", "margin", "slow"),
    [(0.05, 0.05, False), (0.055, 0.05, False), (0.08, 0.05, True), (0.08, 0.1, False),
     (0.04, 0.02, True), (0.5, 1.0, False)],
)  # fmt: skip
def test_slow_is_beyond_the_margin_and_the_interval(loss: float, margin: float, slow: bool) -> None:
    """A GPU that is 5.5% slow may really be 5% slow: its whole interval must exceed the margin."""
    steady = replace(PLAIN, spread=0.0)
    fleet = changed({"sustained": 1 - loss, "burst": 1 - loss}, setting=steady)
    assert (judge(fleet, fleet_speeds(fleet), margin)[I].verdict == SLOW) is slow


def test_what_is_ordinary_for_the_spread_is_said() -> None:
    fleet = changed({"sustained": 0.89, "burst": 0.89}, setting=replace(PLAIN, spread=0.03))
    narrow = verdict_of(changed(COMPUTE))
    assert narrow.in_spread is False
    assert "spread of" in narrow.sentence
    slow = [v for v in judge(fleet, fleet_speeds(fleet), 0.02) if v.verdict == SLOW]
    assert any(v.in_spread and "GPUs may well be this slow" in v.sentence for v in slow)
    few = changed(COMPUTE, setting=Setting(1, 7))
    assert judge(few, fleet_speeds(few), MARGIN)[I].in_spread is None


@pytest.mark.parametrize("count", [1, 2])
def test_of_fewer_than_three_nobody_is_slow(count: int) -> None:
    fleet, _ = simulate(Setting(1, count, bad=0.3), 0)
    verdicts = judge(fleet, fleet_speeds(fleet), MARGIN)
    assert {verdict.verdict for verdict in verdicts} == {ORDINARY}
    assert "Too few devices" in verdicts[0].sentence


def test_names() -> None:
    assert name_of(FleetDevice(3, "ab12cd34", 1, "4/8"), True) == "GPU 3 (ab12cd34) of node 1"
    assert name_of(FleetDevice(3, "", 1, "4/8"), False) == "GPU 3"
    assert name_of(FleetDevice(None, "", 2, "1/4"), True) == "worker 1/4 of node 2"
    assert name_of(FleetDevice(None, "", None, "1/4"), False) == "worker 1/4"
