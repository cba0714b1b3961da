"""Whether a GPU's clock explains that it is slow, and why the clock is low.

Compute that is bound by arithmetic is as fast as the clock, so a GPU whose clock is lower by as
much as its speed computes as it should. What holds a clock back are limits that somebody set, heat
and power.
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
"""Normal for large products, unless few of the fleet report it."""

_SAME_CLOCK = 0.01  # by which clocks of GPUs at work differ anyhow: a step or two of 15 MHz
_MOST = 0.5  # of the slowness that a clock has to explain, for it to be the explanation
_FULL_POWER = 0.97  # of the limit
_LOWER = 0.99  # of the others' limit
_HOTTER = 5.0  # °C above the fleet's median, and beyond what is ordinary in it
_ORDINARY = 2.0  # standard deviations


@dataclass(frozen=True)
class SlowCause:
    """What explains a slow GPU: ``code`` for programs, empty if nothing does; the words for people
    complete the sentence that says that it is slow.
    """

    code: str
    words: str


def clock_cause(fleet: Fleet, speeds: AnchorSpeeds, i: int, margin: float) -> SlowCause:
    """What the clock of a device says of its compute.

    Args:
        fleet: of which it is.
        speeds: of the kind of compute in which it is slow.
        i: which device.
        margin: what of the slowness may be left unexplained.
    """
    clock, log = float(speeds.clock[i]), float(speeds.log[i])
    if math.isnan(clock):
        return SlowCause("", "No clock was recorded, so the cause is unknown.")
    reported = [reason for reason in reasons(speeds, i) if reason in RETRY]
    if clock >= math.log1p(-_SAME_CLOCK):
        but = f", though it reported {', '.join(reported)}" if reported else ""
        return SlowCause(
            "", f"Its clock is as high as that of the others{but}, so the clock is not the cause."
        )
    lower = f"Its clock is {-math.expm1(clock):.1%} lower"
    found = list(_held_back_by(fleet, speeds, i))
    why = "; ".join(words for _, words in found) or "no reason is reported for that"
    if log - clock < math.log1p(-margin) or clock > _MOST * log:
        return SlowCause("", f"{lower}, which explains only part of it; {why}.")
    codes = ", ".join(code for code, _ in found) or "no reason reported"
    return SlowCause(f"clock: {codes}", f"{lower}, which explains it; {why}.")


def reasons(speeds: AnchorSpeeds, i: int) -> list[str]:
    """Why the clock of a device was held back while it timed a kind's anchors, as it reported."""
    return [reason for reason, seen in speeds.throttled.items() if seen[i]]


def _held_back_by(fleet: Fleet, speeds: AnchorSpeeds, i: int) -> Iterator[tuple[str, str]]:
    """Each thing that lowers the device's clock, as a code and in words."""
    device = fleet.devices[i]
    limit, usual = device.sm_limit_mhz, _usual_limit(fleet, "sm_limit_mhz")
    if limit < _LOWER * usual:
        yield "clock limit", f"it is limited to {limit:,.0f} MHz, the others to {usual:,.0f} MHz"
    for reason in reasons(speeds, i):
        if reason in RETRY:
            yield reason, f"it reported {reason}"
    limit, usual = device.power_limit_w, _usual_limit(fleet, "power_limit_w")
    power = float(speeds.sensors["power_w"][i])
    if limit < _LOWER * usual:
        yield "lower power limit", f"its power limit is {limit:.0f} W, the others' {usual:.0f} W"
    elif power >= _FULL_POWER * limit:
        yield "power limit", f"it draws its full power limit, {power:.0f} of {limit:.0f} W"
    elif math.isnan(limit) and _alone_capped(speeds, i):
        yield "power cap", f"it reported {POWER_CAP}, which most others did not"
    temperature = speeds.sensors["temp_c"]
    above = temperature - median_of(temperature)
    if above[i] > max(_HOTTER, _ORDINARY * deviation_of(above)):
        yield (
            "temperature",
            f"it is {above[i]:.0f} °C hotter than the others, {temperature[i]:.0f} °C",
        )


def _usual_limit(fleet: Fleet, name: str) -> float:
    """The median of the devices' limits."""
    limits: Array = np.array([getattr(device, name) for device in fleet.devices], dtype=float)
    return float(median_of(limits))


def _alone_capped(speeds: AnchorSpeeds, i: int) -> bool:
    capped = speeds.throttled.get(POWER_CAP)
    return capped is not None and bool(capped[i]) and float(capped.mean()) < _MOST
