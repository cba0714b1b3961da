"""Find out whether a slow GPU has a low clock, and why the clock is low.

The speed of arithmetic is proportional to the SM clock. A low clock therefore counts as the cause
if it accounts for at least half of the slowness, and if the unexplained rest of the slowness is not
larger than a margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from analysis.fleet.anchors import Array, Fleet
from analysis.fleet.speeds import AnchorSpeeds, deviation_of, median_of
from sweeps.timing.telemetry import RETRY

POWER_CAP = "sw_power_cap"
"""Reason that a GPU reports for a low clock at its power limit.

Large GEMMs often reach this limit."""

_SAME_CLOCK = 0.01  # ordinary difference between clocks of busy GPUs: one or two steps of 15 MHz
_MOST = 0.5  # share of the slowness that a clock must explain to be its cause
_MAJORITY = 0.5  # smallest share of the GPUs at which a power cap is normal for the fleet
_FULL_POWER = 0.97  # smallest share of its power limit at which a GPU counts as being at the limit
_LOWER = 0.99  # share of the fleet's median limit below which a limit counts as lower
_HOTTER = 5.0  # °C above the fleet's median at which a GPU may count as hotter
_ORDINARY = 2.0  # standard deviations of the temperature that a hotter GPU must also exceed


@dataclass(frozen=True)
class SlowCause:
    """Cause of a GPU's slowness.

    ``code`` is for programs; it is empty if nothing explains the slowness. ``words`` has sentences
    for the report, and may be empty.
    """

    code: str
    words: str


def clock_cause(fleet: Fleet, speeds: AnchorSpeeds, i: int, margin: float) -> SlowCause:
    """Judge whether device ``i`` of a fleet computes slowly because of its clock.

    ``speeds`` has the speeds in one kind of compute (sustained or burst) in which the device is
    slow. ``margin`` is the largest part of the slowness that may remain unexplained, as a fraction
    of the fleet's median speed.
    """
    # Both are log ratios to the fleet's median, so they are negative if the device is below it.
    clock, speed = float(speeds.clock[i]), float(speeds.log[i])
    # 1. An unknown or ordinary clock does not explain the slowness.
    if math.isnan(clock):
        return SlowCause("", "No clock was recorded, so the cause is unknown.")
    reported = [reason for reason in reasons(speeds, i) if reason in RETRY]
    if clock >= math.log1p(-_SAME_CLOCK):
        remark = f" Nevertheless, the device reported {', '.join(reported)}." if reported else ""
        return SlowCause(
            "",
            "Its clock is not noticeably lower than the fleet's median, so the clock is not the "
            f"cause.{remark}",
        )
    # 2. Say why the clock is lower.
    finding = f"Its clock is {-math.expm1(clock):.1%} lower than the fleet's median"
    causes = list(_clock_causes(fleet, speeds, i))
    explanation = " ".join(sentence for _, sentence in causes) or (
        "The recording does not show why the clock is lower."
    )
    # 3. The clock is the cause if it explains at least half of the slowness and leaves at most the
    #    margin unexplained.
    leaves_too_much = speed - clock < math.log1p(-margin)
    explains_too_little = clock > _MOST * speed
    if leaves_too_much or explains_too_little:
        return SlowCause("", f"{finding}, which explains only part of the slowness. {explanation}")
    codes = ", ".join(code for code, _ in causes) or "unknown reason"
    return SlowCause(f"clock: {codes}", f"{finding}, which explains the slowness. {explanation}")


def reasons(speeds: AnchorSpeeds, i: int) -> list[str]:
    """Return the throttling reasons that a device reported during the anchors of one kind."""
    return [reason for reason, seen in speeds.throttled.items() if seen[i]]


def _clock_causes(fleet: Fleet, speeds: AnchorSpeeds, i: int) -> Iterator[tuple[str, str]]:
    """Yield a code and a sentence for each finding that may explain device ``i``'s low clock."""
    # Unknown limits and readings are NaN. Comparisons with NaN are False, so an unknown value is
    # never a cause.
    device = fleet.devices[i]
    # 1. Check for a clock limit that somebody set, and for abnormal reasons that were reported.
    mhz = device.sm_limit_mhz
    usual_mhz = _usual_limit(fleet, "sm_limit_mhz")
    if mhz < _LOWER * usual_mhz:
        yield (
            "clock limit",
            f"The clock limit is {mhz:,.0f} MHz (the fleet's median is {usual_mhz:,.0f} MHz).",
        )
    for reason in reasons(speeds, i):
        if reason in RETRY:
            yield reason, f"The device reported {reason}."
    # 2. Check the power. If the power limit is unknown, a power cap that the device reported is a
    #    cause, unless at least half of all devices reported one.
    watts = device.power_limit_w
    usual_watts = _usual_limit(fleet, "power_limit_w")
    power = float(speeds.sensors["power_w"][i])
    if watts < _LOWER * usual_watts:
        yield (
            "lower power limit",
            f"The device's power limit is {watts:,.0f} W (the fleet's median is "
            f"{usual_watts:,.0f} W).",
        )
    elif power >= _FULL_POWER * watts:
        yield "power limit", f"The device is at its power limit ({power:,.0f} of {watts:,.0f} W)."
    elif math.isnan(watts) and _capped_unlike_others(speeds, i):
        yield "power cap", f"The device reported {POWER_CAP}, which most others did not."
    # 3. Check the temperature.
    temperature = speeds.sensors["temp_c"]
    hotter = temperature - median_of(temperature)
    if hotter[i] > max(_HOTTER, _ORDINARY * deviation_of(hotter)):
        yield (
            "temperature",
            f"At {temperature[i]:.0f} °C, the device is {hotter[i]:.0f} °C hotter than the fleet's "
            "median.",
        )


def _usual_limit(fleet: Fleet, name: str) -> float:
    """Return the median of the devices' known limits; NaN if no limit is known."""
    limits: Array = np.array([getattr(device, name) for device in fleet.devices], dtype=float)
    return float(median_of(limits))


def _capped_unlike_others(speeds: AnchorSpeeds, i: int) -> bool:
    """Return True if a device reported a power cap, and fewer than half of all devices did."""
    capped = speeds.throttled.get(POWER_CAP)
    return capped is not None and bool(capped[i]) and float(capped.mean()) < _MAJORITY
