"""Report on a fleet, as JSON for programs and as text for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.fleet.anchors import Anchors, read_anchors
from analysis.fleet.device_verdict import KIND_WORDS, ORDINARY, SLOW, VERDICTS, DeviceVerdict, judge
from analysis.fleet.speeds import MIN_GPUS, FleetSpeeds, Interference, SpeedChange, fleet_speeds
from sweeps.store import write_json

_LISTED = 20  # the most GPUs in the table, and the most sentences about single ones
_LISTED_NODES = 5
_SENSOR_HEADS = {"sm_mhz": "MHz", "power_w": "W", "temp_c": "°C"}
_UNKNOWN = "–"


@dataclass(frozen=True)
class FleetReport:
    """A fleet, its speeds, and the verdict on each device in the order of the devices."""

    anchors: Anchors
    speeds: FleetSpeeds
    margin: float
    verdicts: tuple[DeviceVerdict, ...]

    @property
    def slowest_first(self) -> list[int]:
        """Positions of the devices sorted by speed; devices without a speed come last."""
        if not self.speeds.overall:
            return list(range(len(self.verdicts)))
        return [int(i) for i in np.argsort(self.speeds.kinds[self.speeds.overall].log)]


def make_report(folder: Path, margin: float) -> FleetReport:
    """Make the report on a recording's fleet.

    Args:
        folder: folder of the recording.
        margin: how far a speed must be below the fleet's median to count as slow, as a fraction.

    Raises:
        UserError: if the anchors cannot be read.
    """
    anchors = read_anchors(folder)
    speeds = fleet_speeds(anchors.fleet)
    return FleetReport(anchors, speeds, margin, tuple(judge(anchors.fleet, speeds, margin)))


def write_report(report: FleetReport) -> Path:
    """Write fleet.json into the recording's folder; return its path."""
    return write_json(report.anchors.recording.folder / "fleet.json", report_json(report))


def report_json(report: FleetReport) -> dict[str, Any]:
    """Return everything for JSON, with the slowest GPU first.

    Numbers are fractions, and null where they are not known. ``speed`` is the speed in the kind of
    anchors that ``speed_of`` names, which is sustained compute if there are such anchors.
    """
    speeds = report.speeds
    return {
        "machine": report.anchors.recording.machine.slug,
        "speed_of": speeds.overall or None,
        "gpus": [_gpu_json(report, i) for i in report.slowest_first],
        "spread": _known(speeds.spread),
        "margin": report.margin,
        "interference": [
            {
                "node": of_node.node,
                **_change_json(of_node.all),
                "kinds": {kind: _change_json(change) for kind, change in of_node.kinds.items()},
            }
            for of_node in speeds.interference
        ],
        "turns": report.anchors.recording.run.get("turns", []),
        "findings": findings(report),
        "damaged": len(report.anchors.damaged),
    }


def _gpu_json(report: FleetReport, i: int) -> dict[str, Any]:
    """Return one GPU for JSON: its speeds, its sensors in the overall kind, and its verdict."""
    device, verdict = report.anchors.fleet.devices[i], report.verdicts[i]
    speeds = report.speeds
    kinds = {
        kind: {
            "speed": _known(of_kind.speed[i]),
            "lo": _known(of_kind.lo[i]),
            "hi": _known(of_kind.hi[i]),
        }
        for kind, of_kind in speeds.kinds.items()
    }
    nothing = {"speed": None, "lo": None, "hi": None}
    overall = speeds.kinds.get(speeds.overall)
    sensors = {
        name: None if overall is None else _known(overall.sensors[name][i])
        for name in _SENSOR_HEADS
    }
    return {
        "gpu": device.gpu,
        "id": device.id or None,
        "node": device.node,
        "worker": device.worker,
        "name": verdict.name,
        **kinds.get(speeds.overall, nothing),
        "kinds": kinds,
        **sensors,
        "clock": None if overall is None else _known(np.exp(overall.clock[i])),
        "throttled": list(verdict.throttled),
        "verdict": verdict.verdict,
        "slow": list(verdict.slow),
        "explained": verdict.explained or None,
        "in_spread": verdict.in_spread,
        "sentence": verdict.sentence,
    }


def _change_json(change: SpeedChange) -> dict[str, Any]:
    return {
        "ratio": change.ratio,
        "lo": _known(change.lo),
        "hi": _known(change.hi),
        "slowed": change.slowed,
    }


def _known(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def findings(report: FleetReport) -> list[str]:
    """Describe the fleet as a whole in sentences."""
    speeds, count = report.speeds, len(report.verdicts)
    sentences = []
    if count == 1:
        sentences.append("There is only one GPU, so nothing can be compared with it.")
    elif count < MIN_GPUS:
        sentences += _pair(report)
    elif speeds.overall:
        sentences.append(_summary(report))
    sentences += _nodes(report)
    turns = report.anchors.recording.run.get("turns", [])
    return [*sentences, *_disturbed(speeds.interference, count), *_took_turns(turns)]


def _took_turns(nodes: Sequence[int]) -> Iterator[str]:
    """Say on which nodes a run let the GPUs take turns."""
    if nodes:
        which = f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes[:_LISTED_NODES]))}"
        more = f" and {len(nodes) - _LISTED_NODES} more" if len(nodes) > _LISTED_NODES else ""
        yield (
            f"The run's anchors showed that the GPUs of {which}{more} slow each other down, so "
            "they took turns: its times are of GPUs working one at a time."
        )


def _summary(report: FleetReport) -> str:
    """Say how many GPUs are slow, and how much the GPUs differ from one another."""
    speeds, count = report.speeds, len(report.verdicts)
    counts = Counter(verdict.verdict for verdict in report.verdicts)
    what = KIND_WORDS[speeds.overall]
    spread = (
        ""
        if math.isnan(speeds.spread)
        else (
            f" GPUs differ by {speeds.spread:.1%} in {what} (standard deviation between GPUs, "
            "without the noise of measuring)."
        )
    )
    clause = f"{counts[SLOW]} of {count} GPUs {'is' if counts[SLOW] == 1 else 'are'} slow"
    return f"{clause}: more than {100 * report.margin:.3g}% below the median beyond doubt.{spread}"


def _pair(report: FleetReport) -> list[str]:
    """Say which of two GPUs is slower. Two GPUs do not show which one is normal."""
    if not report.speeds.overall:
        return []
    overall = report.speeds.kinds[report.speeds.overall]
    slower, faster = report.slowest_first
    ratio = math.exp(overall.log[slower] - overall.log[faster])
    half = overall.half[slower] + overall.half[faster]
    names = [report.verdicts[i].name for i in (slower, faster)]
    what = KIND_WORDS[report.speeds.overall]
    ends = [1 - ratio * math.exp(sign * half) for sign in (1, -1)]
    if not ends[0] > 0:  # also true for unknown ends, which are NaN
        return [
            f"{names[0]} and {names[1]} are equally fast in {what}, as far as the intervals show."
        ]
    return [
        f"{names[0]} is {1 - ratio:.1%} slower than {names[1]} in {what} ({ends[0]:.1%} to "
        f"{ends[1]:.1%}); with only two GPUs, it is unknown which one is normal."
    ]


def _nodes(report: FleetReport) -> Iterator[str]:
    """Name the nodes on which all GPUs are slow."""
    slow: dict[int | None, list[bool]] = {}
    for device, verdict in zip(report.anchors.fleet.devices, report.verdicts, strict=True):
        slow.setdefault(device.node, []).append(verdict.verdict == SLOW)
    for node, flags in slow.items():
        if len(slow) > 1 and len(flags) > 1 and all(flags):
            yield f"All {len(flags)} GPUs of node {node} are slow, which points to the node."


def _disturbed(interference: Sequence[Interference], count: int) -> list[str]:
    """Say whether the GPUs of a node slow each other down."""
    if not interference and count == 1:
        return []
    if not interference:
        return [
            "No node's GPUs were timed both alone and together, so nothing shows whether they "
            "disturb each other."
        ]
    slowed_sentences, quiet = [], []
    for node_change in interference:
        slowed = [
            f"{KIND_WORDS[kind]} {change.ratio - 1:.1%} ({change.lo - 1:.1%} to "
            f"{change.hi - 1:.1%})"
            for kind, change in node_change.kinds.items()
            if change.slowed
        ]
        where = "the node" if len(interference) == 1 else f"node {node_change.node}"
        if slowed:
            slowed_sentences.append(
                f"While all GPUs of {where} work, these take longer: {', '.join(slowed)}."
            )
        else:
            quiet.append(node_change)
    if len(slowed_sentences) > _LISTED_NODES:
        slowed_sentences = [
            *slowed_sentences[:_LISTED_NODES],
            f"The same holds for {len(slowed_sentences) - _LISTED_NODES} more nodes.",
        ]
    if quiet:
        several = f"{len(quiet)} of {len(interference)} nodes"
        where = several if len(interference) > 1 else "the node"
        ratio = float(np.median([interfered.all.ratio for interfered in quiet]))
        slowed_sentences.append(
            f"Working in parallel does not slow the GPUs of {where} by more than 1% beyond the "
            f"interval: anchors take {ratio:.3f} times as long as one at a time."
        )
    return slowed_sentences


def report_text(report: FleetReport) -> str:
    """Return text for people: a line per GPU, the slowest first, then the findings."""
    recording, speeds = report.anchors.recording, report.speeds
    nodes = len({device.node for device in report.anchors.fleet.devices})
    lines = [
        f"{recording.machine.name}: {_counted(len(report.verdicts), 'GPU')} of "
        f"{_counted(nodes, 'node')}, {_counted(_anchors(report), 'anchor')}, measured "
        f"{recording.run['run'][:10]}"
    ]
    if speeds.overall:
        lines += [
            f"speed: relative to the fleet's median in {KIND_WORDS[speeds.overall]}, with its "
            "95% interval",
            "",
            *_table(report),
        ]
    notable = [report.verdicts[i] for i in report.slowest_first]
    notable = [verdict for verdict in notable if verdict.verdict != ORDINARY]
    notable.sort(key=lambda verdict: VERDICTS.index(verdict.verdict))
    lines += ["", *(f"• {verdict.sentence}" for verdict in notable[:_LISTED])]
    if len(notable) > _LISTED:
        lines.append(f"• {len(notable) - _LISTED} more of the same kind; fleet.json has them all.")
    return "\n".join([*lines, *(f"• {finding}" for finding in findings(report))])


def _anchors(report: FleetReport) -> int:
    return int(report.anchors.fleet.log_time.shape[2])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _table(report: FleetReport) -> Iterator[str]:
    """Yield the lines of the table: its head, the slowest GPUs, and a line about the others."""
    speeds = report.speeds
    overall = speeds.kinds[speeds.overall]
    others = [kind for kind in speeds.kinds if kind != speeds.overall]
    sensors = [name for name in _SENSOR_HEADS if np.isfinite(overall.sensors[name]).any()]
    order = report.slowest_first
    width = max(len(report.verdicts[i].name) for i in order[:_LISTED])
    heads = [*others, *(_SENSOR_HEADS[name] for name in sensors)]
    head = "".join(f"{name:>8}" for name in heads)
    yield f"{'':{width}}{'speed':>8}  {'95%':15}{head}  verdict"
    for i in order[:_LISTED]:
        verdict = report.verdicts[i]
        ends = f"{_percent(overall.lo[i])} – {_percent(overall.hi[i])}"
        cells = [_percent(speeds.kinds[kind].speed[i]) for kind in others]
        cells += [_whole(overall.sensors[name][i]) for name in sensors]
        row = "".join(f"{cell:>8}" for cell in cells)
        yield (
            f"{verdict.name:{width}}{_percent(overall.speed[i]):>8}  {ends:15}{row}  "
            f"{verdict.verdict}"
        )
    if unlisted := order[_LISTED:]:
        known = overall.speed[unlisted][np.isfinite(overall.speed[unlisted])]
        ends = f", from {known.min():.1%} to {known.max():.1%}" if len(known) else ""
        yield f"… and {_counted(len(unlisted), 'more GPU')}{ends}"


def _percent(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else _UNKNOWN


def _whole(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else _UNKNOWN
