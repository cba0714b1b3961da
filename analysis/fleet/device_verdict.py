"""Which GPUs are slow beyond doubt, which throttled, and what is said of each.

Slow means that a whole interval is further below the fleet's median than a margin. It does not mean
that a GPU is an outlier: where GPUs differ by 3 %, one of 64 that is 6 % below the median is an
ordinary one of them, and slow all the same. So what is said of a slow GPU includes whether it is
ordinary for the fleet's spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from analysis.fleet.anchors import Fleet, FleetDevice
from analysis.fleet.causes import SlowCause, clock_cause
from analysis.fleet.speeds import MIN_GPUS, FleetSpeeds
from sweeps.timing.telemetry import RETRY

SLOW, THROTTLED, ORDINARY = "slow", "throttled", "ordinary"
VERDICTS = (SLOW, THROTTLED, ORDINARY)

KIND_WORDS = {
    "sustained": "sustained compute", "burst": "bursts of compute", "memory": "memory",
    "small": "launches",
}  # fmt: skip
COMPUTE = ("sustained", "burst")

_CHANCE = 0.05  # that one GPU or more of an ordinary fleet is as slow: below it is no part of it


@dataclass(frozen=True)
class DeviceVerdict:
    """What is said of a device.

    ``slow`` has the kinds of anchor in which it is slow, ``throttled`` the abnormal reasons that it
    ever reported; ``explained`` is empty where it is not slow or nothing explains it. ``in_spread``
    says of a slow one whether it is ordinary for the fleet's spread; None where that is not known.
    """

    name: str
    verdict: str
    slow: tuple[str, ...]
    explained: str
    throttled: tuple[str, ...]
    in_spread: bool | None
    sentence: str


def name_of(device: FleetDevice, several_nodes: bool) -> str:
    """What people call a device: ``GPU 3 (ab12cd34) of node 1``; of a CPU, who measured there."""
    node = "" if device.node is None else f"node {device.node}"
    if device.gpu is None:
        return f"worker {device.worker}" + (f" of {node}" if several_nodes and node else "")
    named = f" ({device.id})" if device.id else ""
    return f"GPU {device.gpu}{named}" + (f" of {node}" if several_nodes and node else "")


def names_of(fleet: Fleet) -> list[str]:
    """The names of all devices, with their nodes if there are several."""
    several = len({device.node for device in fleet.devices}) > 1
    return [name_of(device, several) for device in fleet.devices]


def judge(fleet: Fleet, speeds: FleetSpeeds, margin: float) -> list[DeviceVerdict]:
    """The verdict on each device, in their order.

    Args:
        fleet: what the anchors took.
        speeds: of it.
        margin: by how much slower than the fleet's median matters, as a fraction.
    """
    enough = len(fleet.devices) >= MIN_GPUS
    slow = {kind: of.beyond(margin) for kind, of in speeds.kinds.items() if enough}
    abnormal = {
        reason: np.asarray(seen.any(axis=(0, 2)))
        for reason, seen in fleet.throttled.items()
        if reason in RETRY
    }
    return [
        _verdict(
            fleet,
            speeds,
            margin,
            i,
            name,
            tuple(kind for kind in slow if slow[kind][i]),
            tuple(reason for reason in abnormal if abnormal[reason][i]),
        )
        for i, name in enumerate(names_of(fleet))
    ]


def _verdict(
    fleet: Fleet,
    speeds: FleetSpeeds,
    margin: float,
    i: int,
    name: str,
    slow: tuple[str, ...],
    throttled: tuple[str, ...],
) -> DeviceVerdict:
    if not slow:
        verdict = THROTTLED if throttled else ORDINARY
        sentence = _not_slow(speeds, i, name, len(fleet.devices) >= MIN_GPUS, throttled)
        return DeviceVerdict(name, verdict, slow, "", throttled, None, sentence)
    cause = _cause(fleet, speeds, i, slow, margin)
    first = speeds.kinds[slow[0]]
    others = (f", {1 - speeds.kinds[kind].speed[i]:.1%} in {KIND_WORDS[kind]}" for kind in slow[1:])
    sentences = [
        f"{name} is slow: {1 - first.speed[i]:.1%} below the fleet's median in "
        f"{KIND_WORDS[slow[0]]} ({1 - first.hi[i]:.1%} to {1 - first.lo[i]:.1%}){''.join(others)}."
    ]
    sentences += [cause.words] if cause.words else []
    in_spread = _in_spread(speeds, i) if speeds.overall in slow else None
    if in_spread is not None:
        count = int(np.isfinite(speeds.kinds[speeds.overall].log).sum())
        sentences.append(
            (
                f"With a spread of {speeds.spread:.1%} between GPUs, one in {count} is expected to "
                "be this slow."
            )
            if in_spread
            else f"The fleet's spread of {speeds.spread:.1%} between GPUs does not explain this."
        )
    return DeviceVerdict(name, SLOW, slow, cause.code, throttled, in_spread, " ".join(sentences))


def _cause(
    fleet: Fleet, speeds: FleetSpeeds, i: int, slow: tuple[str, ...], margin: float
) -> SlowCause:
    """Why a device is slow: by its clock where its compute is; otherwise by what alone is slow."""
    compute = [kind for kind in slow if kind in COMPUTE]
    if compute:
        return clock_cause(fleet, speeds.kinds[compute[0]], i, margin)
    known = [kind for kind, of in speeds.kinds.items() if math.isfinite(of.half[i])]
    if not set(known) & set(COMPUTE):
        return SlowCause("", "")
    if slow == ("small",):
        return SlowCause(
            "launches: the host", "Only its launches are slow, which points to its host."
        )
    only = " and ".join(KIND_WORDS[kind] for kind in slow)
    return SlowCause(
        "",
        f"Only its {only} {'are' if 'small' in slow else 'is'} slow; its compute is not, so the "
        "SM clock is not the cause.",
    )


def _in_spread(speeds: FleetSpeeds, i: int) -> bool | None:
    """Whether so slow a device is to be expected among so many of a normal spread."""
    of = speeds.kinds[speeds.overall]
    count = int(np.isfinite(of.log).sum())
    if math.isnan(speeds.spread):
        return None
    total = math.sqrt(speeds.spread**2 + float(of.variance[i]))
    return bool(count * ndtr(float(of.log[i]) / total) >= _CHANCE) if total else False


def _not_slow(
    speeds: FleetSpeeds, i: int, name: str, enough: bool, throttled: tuple[str, ...]
) -> str:
    held = f"{name} throttled ({', '.join(throttled)})" if throttled else ""
    if not enough or not speeds.overall:
        return f"{held}." if held else f"{name} has too few other GPUs to be compared with."
    of = speeds.kinds[speeds.overall]
    if not math.isfinite(of.half[i]):
        how = f"is not known to be slow: its {KIND_WORDS[speeds.overall]} has no interval."
    else:
        how = (
            f"is not clearly slow: {of.speed[i]:.1%} of the fleet's median in "
            f"{KIND_WORDS[speeds.overall]} ({of.lo[i]:.1%} to {of.hi[i]:.1%})."
        )
    return f"{held}, but {how}" if held else f"{name} {how}"
