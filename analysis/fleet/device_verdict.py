"""Judge which GPUs are significantly slow and which were throttled, and describe each GPU.

A GPU is slow if, in at least one kind of anchor, the whole 95% interval of its speed is below the
fleet's median by more than a margin. With fewer than three GPUs, none is called slow. A slow GPU
need not be an outlier: among 64 GPUs with normally distributed speeds, one or two are expected to
be at least two standard deviations below the median. The standard deviation of the GPUs' speeds,
without measurement noise, is called the fleet's spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from analysis.fleet.anchors import Fleet, FleetDevice
from analysis.fleet.causes import SlowCause, clock_cause
from analysis.fleet.speeds import MIN_GPUS, FleetSpeeds
from kernels.common.counts import enumerated
from sweeps.timing.telemetry import RETRY

SLOW, THROTTLED, ORDINARY = "slow", "throttled", "ordinary"
VERDICTS = (SLOW, THROTTLED, ORDINARY)

KIND_WORDS = {
    "sustained": "sustained compute", "burst": "bursts of compute", "memory": "memory",
    "small": "launches",
}  # fmt: skip
COMPUTE = ("sustained", "burst")

# The fleet's spread explains a slow GPU if a fleet with normally distributed speeds is expected to
# have at least this many GPUs that are as slow.
_CHANCE = 0.05


@dataclass(frozen=True)
class DeviceVerdict:
    """Verdict on a device.

    Attributes:
        verdict: one of :data:`VERDICTS`.
        slow: kinds of anchor in which the device is slow.
        explained: code of the cause; empty if the device is not slow or the cause is unknown.
        throttled: abnormal throttling reasons that the device reported for at least one anchor.
        in_spread: whether the fleet's spread explains why the device is slow; None if the spread is
            unknown, or if the device is not slow in the kind of anchor ``FleetSpeeds.overall``.
        sentence: the verdict in words.
    """

    name: str
    verdict: str
    slow: tuple[str, ...]
    explained: str
    throttled: tuple[str, ...]
    in_spread: bool | None
    sentence: str


def name_of(device: FleetDevice, several_nodes: bool) -> str:
    """Return a device's name for reports, such as ``GPU 3 (ab12cd34) of node 1``."""
    node_text = f" of node {device.node}" if several_nodes and device.node is not None else ""
    if device.gpu is None:
        return f"worker {device.worker}{node_text}"
    id_text = f" ({device.id})" if device.id else ""
    return f"GPU {device.gpu}{id_text}{node_text}"


def names_of(fleet: Fleet) -> list[str]:
    """Return the names of all devices, with their nodes if the fleet has several nodes."""
    several = len({device.node for device in fleet.devices}) > 1
    return [name_of(device, several) for device in fleet.devices]


def judge(fleet: Fleet, speeds: FleetSpeeds, margin: float) -> list[DeviceVerdict]:
    """Return the verdict on each device, in the order of the devices.

    A device is slow if the whole interval of its speed in any kind of anchor is below the fleet's
    median by more than ``margin``, which is a fraction of the median.
    """
    # With fewer than three GPUs, nothing shows which one is normal, so none is called slow.
    is_slow: dict[str, NDArray[np.bool_]] = {}
    if len(fleet.devices) >= MIN_GPUS:
        is_slow = {kind: kind_speeds.beyond(margin) for kind, kind_speeds in speeds.kinds.items()}
    # Find which devices reported each abnormal reason in any phase and for any anchor.
    has_throttled = {
        reason: np.asarray(seen.any(axis=(0, 2)))
        for reason, seen in fleet.throttled.items()
        if reason in RETRY
    }
    verdicts = []
    for i, name in enumerate(names_of(fleet)):
        slow = tuple(kind for kind in is_slow if is_slow[kind][i])
        throttled = tuple(reason for reason in has_throttled if has_throttled[reason][i])
        verdicts.append(_verdict(fleet, speeds, margin, i, name, slow, throttled))
    return verdicts


def _verdict(
    fleet: Fleet,
    speeds: FleetSpeeds,
    margin: float,
    i: int,
    name: str,
    slow: tuple[str, ...],
    throttled: tuple[str, ...],
) -> DeviceVerdict:
    """Judge device ``i`` by the kinds of anchor in which it is slow, and by its throttling."""
    if not slow:
        verdict = THROTTLED if throttled else ORDINARY
        sentence = _not_slow_sentence(
            speeds, i, name, throttled, has_enough_devices=len(fleet.devices) >= MIN_GPUS
        )
        return DeviceVerdict(name, verdict, slow, "", throttled, None, sentence)
    cause = _cause(fleet, speeds, i, slow, margin)
    in_spread = _is_in_spread(speeds, i) if speeds.overall in slow else None
    noun = "worker" if fleet.devices[i].gpu is None else "GPU"
    sentence = _slow_sentence(speeds, i, name, noun, slow, cause.words, in_spread)
    return DeviceVerdict(name, SLOW, slow, cause.code, throttled, in_spread, sentence)


def _slow_sentence(
    speeds: FleetSpeeds,
    i: int,
    name: str,
    noun: str,
    slow: tuple[str, ...],
    cause: str,
    in_spread: bool | None,
) -> str:
    """Describe a slow device in sentences."""
    # Only the first kind is printed with its interval.
    first_kind, *other_kinds = slow
    first = speeds.kinds[first_kind]
    sentences = [
        f"{name} is slow: its speed in {KIND_WORDS[first_kind]} is {1 - first.speed[i]:.1%} "
        f"({100 * (1 - first.hi[i]):.1f}–{1 - first.lo[i]:.1%}) below the fleet's median."
    ]
    if other_kinds:
        losses = [
            f"{1 - speeds.kinds[kind].speed[i]:.1%} in {KIND_WORDS[kind]}" for kind in other_kinds
        ]
        sentences.append(f"It is also below the median by {enumerated(losses)}.")
    if cause:
        sentences.append(cause)
    if in_spread:
        count = int(np.isfinite(speeds.kinds[speeds.overall].log).sum())
        sentences.append(
            f"With the fleet's spread of {speeds.spread:.1%}, one of {count:,} {noun}s may well be "
            "this slow."
        )
    elif in_spread is False:
        sentences.append(
            f"The fleet's spread of {speeds.spread:.1%} does not explain the slowness."
        )
    return " ".join(sentences)


def _cause(
    fleet: Fleet, speeds: FleetSpeeds, i: int, slow: tuple[str, ...], margin: float
) -> SlowCause:
    slow_compute = [kind for kind in slow if kind in COMPUTE]
    if slow_compute:
        return clock_cause(fleet, speeds.kinds[slow_compute[0]], i, margin)
    # Without a known interval, its compute may be slow, too.
    known_kinds = {
        kind for kind, kind_speeds in speeds.kinds.items() if math.isfinite(kind_speeds.half[i])
    }
    if not known_kinds & set(COMPUTE):
        return SlowCause("", "")
    if slow == ("small",):
        return SlowCause(
            "launches: the host", "Only its launches are slow, which points to its host."
        )
    slow_kinds = " and ".join(KIND_WORDS[kind] for kind in slow)
    verb = "are" if "small" in slow else "is"  # "launches" is a plural, "memory" is not
    return SlowCause(
        "",
        f"Only its {slow_kinds} {verb} slow; its compute is not, so the SM clock is not the cause.",
    )


def _is_in_spread(speeds: FleetSpeeds, i: int) -> bool | None:
    """Return True if a fleet of this size and spread plausibly has a device as slow as ``i``.

    The result is None if the spread is unknown.
    """
    if math.isnan(speeds.spread):
        return None
    overall = speeds.kinds[speeds.overall]
    count = int(np.isfinite(overall.log).sum())
    # Measured speeds differ from the median because of the spread and of measurement noise.
    deviation = math.sqrt(speeds.spread**2 + float(overall.variance[i]))
    # Without spread and noise, no device would differ from the median.
    if not deviation:
        return False
    expected_count = count * ndtr(float(overall.log[i]) / deviation)  # of devices as slow as this
    return bool(expected_count >= _CHANCE)


def _not_slow_sentence(
    speeds: FleetSpeeds,
    i: int,
    name: str,
    throttled: tuple[str, ...],
    *,
    has_enough_devices: bool,
) -> str:
    """Describe a device that is not significantly slow."""
    throttling = f"{name} was throttled ({', '.join(throttled)})" if throttled else ""
    if not has_enough_devices or not speeds.overall:
        if throttling:
            return f"{throttling}."
        return f"Too few devices were timed to judge {name}."
    overall = speeds.kinds[speeds.overall]
    if not math.isfinite(overall.half[i]):
        comparison = (
            "is not known to be slow: the 95% interval of its speed in "
            f"{KIND_WORDS[speeds.overall]} is unknown"
        )
    else:
        comparison = (
            f"is not significantly slow: its speed in {KIND_WORDS[speeds.overall]} is "
            f"{overall.speed[i]:.1%} ({100 * overall.lo[i]:.1f}–{overall.hi[i]:.1%}) of the "
            "fleet's median"
        )
    return f"{throttling}, but {comparison}." if throttling else f"{name} {comparison}."
