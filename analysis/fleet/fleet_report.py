"""Report on a fleet, as JSON for programs and as text for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.fleet.anchors import Anchors, read_anchors
from analysis.fleet.device_verdict import KIND_WORDS, ORDINARY, SLOW, VERDICTS, DeviceVerdict, judge
from analysis.fleet.speeds import MIN_GPUS, FleetSpeeds, Interference, SpeedChange, fleet_speeds
from kernels.common.counts import counted, enumerated
from sweeps.store import write_json
from sweeps.timing.statistics import TOLERANCE

_LISTED = 20  # maximum number of GPUs in the table, and of sentences about single GPUs
_LISTED_NODES = 5  # maximum number of nodes named one by one
_SENSOR_HEADS = {"sm_mhz": "MHz", "power_w": "W", "temp_c": "°C"}
_UNKNOWN = "–"


@dataclass(frozen=True)
class FleetReport:
    """Speeds of a fleet's devices, and a verdict on each device.

    Attributes:
        margin: how far below the fleet's median a slow device must be, as a fraction of the median;
            see :func:`analysis.fleet.device_verdict.judge`.
        verdicts: the verdict on each device, in the order of the devices.
    """

    anchors: Anchors
    speeds: FleetSpeeds
    margin: float
    verdicts: tuple[DeviceVerdict, ...]

    @property
    def noun(self) -> str:
        """Word for a device in sentences: GPU, or worker if a CPU was measured."""
        return "GPU" if self.anchors.recording.machine.kind == "gpu" else "worker"

    @property
    def slowest_first(self) -> list[int]:
        """Positions of the devices, the slowest first; devices without a speed come last."""
        if not self.speeds.overall:
            return list(range(len(self.verdicts)))
        # NumPy sorts NaN last.
        return [int(i) for i in np.argsort(self.speeds.kinds[self.speeds.overall].log)]


def make_report(folder: Path, margin: float) -> FleetReport:
    """Read a recording's anchors, and judge the recording's devices.

    Raises:
        UserError: if the anchors cannot be read.
    """
    anchors = read_anchors(folder)
    speeds = fleet_speeds(anchors.fleet)
    return FleetReport(anchors, speeds, margin, tuple(judge(anchors.fleet, speeds, margin)))


def write_report(report: FleetReport) -> Path:
    """Write fleet.json into the recording's folder, and return the path of the file.

    Raises:
        UserError: if the file cannot be written.
    """
    return write_json(report.anchors.recording.folder / "fleet.json", report_json(report))


def report_json(report: FleetReport) -> dict[str, Any]:
    """Return the report for JSON, with the slowest GPU first.

    Speeds are relative to the fleet's median, and unknown numbers are null. ``speed`` is the speed
    in the kind of anchor that ``speed_of`` names.
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
                "node": on_node.node,
                **_change_json(on_node.all),
                "kinds": {kind: _change_json(change) for kind, change in on_node.kinds.items()},
            }
            for on_node in speeds.interference
        ],
        "turns": report.anchors.recording.run.get("turns", []),
        "findings": findings(report),
        "damaged": len(report.anchors.damaged),
    }


def _gpu_json(report: FleetReport, i: int) -> dict[str, Any]:
    device = report.anchors.fleet.devices[i]
    verdict = report.verdicts[i]
    speeds = report.speeds
    kinds = {
        kind: {
            "speed": _known(kind_speeds.speed[i]),
            "lo": _known(kind_speeds.lo[i]),
            "hi": _known(kind_speeds.hi[i]),
        }
        for kind, kind_speeds in speeds.kinds.items()
    }
    no_speed = {"speed": None, "lo": None, "hi": None}
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
        **kinds.get(speeds.overall, no_speed),
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


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def findings(report: FleetReport) -> list[str]:
    """Describe the fleet as a whole in sentences."""
    speeds, count = report.speeds, len(report.verdicts)
    sentences = []
    if count == 1:
        sentences.append(f"Only one {report.noun} was timed, so it cannot be compared with others.")
    elif count < MIN_GPUS:
        sentences += _pair_sentences(report)
    elif speeds.overall:
        sentences.append(_summary_sentence(report))
    sentences += _slow_node_sentences(report)
    device_counts = Counter(device.node for device in report.anchors.fleet.devices)
    sentences += _interference_sentences(speeds.interference, device_counts, report.noun)
    nodes_with_turns = report.anchors.recording.run.get("turns", [])
    return [*sentences, *_turns_sentences(nodes_with_turns, report.noun)]


def _turns_sentences(nodes: Sequence[int], noun: str) -> Iterator[str]:
    """Yield a sentence about the nodes whose GPUs took turns."""
    if not nodes:
        return
    names = [str(node) for node in nodes[:_LISTED_NODES]]
    if len(nodes) > _LISTED_NODES:
        names.append(f"{len(nodes) - _LISTED_NODES:,} more")
    word = "node" if len(nodes) == 1 else "nodes"
    yield (
        f"The run's anchors showed that the {noun}s within {word} {enumerated(names)} slow each "
        f"other down. After the anchors were timed, these {noun}s therefore took turns, with only "
        f"one {noun} per node working at a time."
    )


def _summary_sentence(report: FleetReport) -> str:
    """Say how many GPUs are slow, and how much the GPUs differ from one another."""
    speeds, count = report.speeds, len(report.verdicts)
    slow_count = sum(verdict.verdict == SLOW for verdict in report.verdicts)
    verb = "is" if slow_count == 1 else "are"
    summary = (
        f"{slow_count:,} of {count:,} {report.noun}s {verb} slow (significantly more than "
        f"{100 * report.margin:.3g}% below the fleet's median)."
    )
    if math.isnan(speeds.spread):
        return summary
    return (
        f"{summary} The {report.noun}s differ by {speeds.spread:.1%} in "
        f"{KIND_WORDS[speeds.overall]} (standard deviation, without measurement noise)."
    )


def _pair_sentences(report: FleetReport) -> list[str]:
    """Compare the two GPUs of a fleet."""
    if not report.speeds.overall:
        return []
    overall = report.speeds.kinds[report.speeds.overall]
    slower, faster = report.slowest_first
    slower_name, faster_name = report.verdicts[slower].name, report.verdicts[faster].name
    kind = KIND_WORDS[report.speeds.overall]
    ratio = math.exp(overall.log[slower] - overall.log[faster])
    # Each speed is relative to the middle between both, so its interval is half as wide as that of
    # the ratio.
    half_width = overall.half[slower] + overall.half[faster]
    least = 1 - ratio * math.exp(half_width)
    most = 1 - ratio * math.exp(-half_width)
    if math.isnan(least):  # at least one of the speeds or intervals is unknown
        return [f"It is unknown whether {slower_name} and {faster_name} differ in speed ({kind})."]
    if least <= 0:
        return [f"{slower_name} and {faster_name} do not differ significantly in speed ({kind})."]
    return [
        f"{slower_name} is {1 - ratio:.1%} ({100 * least:.1f}–{most:.1%}) slower than "
        f"{faster_name} in {kind}. With only two {report.noun}s, it is unknown which {report.noun} "
        "is normal."
    ]


def _slow_node_sentences(report: FleetReport) -> Iterator[str]:
    """Yield a sentence for each known node that has several GPUs and whose GPUs are all slow."""
    verdicts_of_node: dict[int | None, list[str]] = {}
    for device, verdict in zip(report.anchors.fleet.devices, report.verdicts, strict=True):
        verdicts_of_node.setdefault(device.node, []).append(verdict.verdict)
    if len(verdicts_of_node) == 1:  # a single node cannot be compared with others
        return
    for node, verdicts in verdicts_of_node.items():
        if node is None:  # GPUs of unknown nodes need not be of the same node
            continue
        if len(verdicts) > 1 and all(verdict == SLOW for verdict in verdicts):
            yield (
                f"All {len(verdicts)} {report.noun}s of node {node} are slow, which points to the "
                "node."
            )


def _interference_sentences(
    interference: Sequence[Interference], device_counts: Mapping[int | None, int], noun: str
) -> list[str]:
    """Say on which nodes the GPUs slow each other down."""
    if not interference and max(device_counts.values()) == 1:
        return []
    if not interference:
        return [
            f"No node was timed both with one {noun} at a time and with all {noun}s in parallel, "
            f"so it is unknown whether the {noun}s slow each other down."
        ]
    # 1. Say which nodes are slowed, and by how much in which kinds of anchor.
    sentences: list[str] = []
    undisturbed: list[Interference] = []
    for node_change in interference:
        slowed = [
            f"{_slowdown(change)} longer in {KIND_WORDS[kind]}"
            for kind, change in node_change.kinds.items()
            if change.slowed
        ]
        node_words = _node_words(node_change.node, device_counts)
        if slowed:
            first, *others = slowed
            further = f" They also take {enumerated(others)}." if others else ""
            sentences.append(
                f"When all {noun}s of {node_words} work in parallel, they take {first} than when "
                f"one {noun} works at a time.{further}"
            )
        # The slowdown may be significant only over all kinds together.
        elif node_change.all.slowed:
            sentences.append(
                f"When all {noun}s of {node_words} work in parallel, the median anchor takes "
                f"{_slowdown(node_change.all)} longer than when one {noun} works at a time."
            )
        else:
            undisturbed.append(node_change)
    if len(sentences) > _LISTED_NODES:
        sentences = [
            *sentences[:_LISTED_NODES],
            f"The {noun}s of {counted(len(sentences) - _LISTED_NODES, 'more node')} also slow each "
            "other down.",
        ]
    # 2. Say in one sentence that the other nodes are not slowed.
    if undisturbed:
        if len(interference) == 1:
            undisturbed_nodes = _node_words(interference[0].node, device_counts)
        elif len(interference) == len(device_counts):
            undisturbed_nodes = f"{len(undisturbed)} of {len(interference)} nodes"
        else:
            undisturbed_nodes = (
                f"{len(undisturbed)} of the {len(interference)} nodes that were timed with one "
                f"{noun} at a time and with all {noun}s in parallel"
            )
        ratio = float(np.median([node_change.all.ratio for node_change in undisturbed]))
        place = "this node" if len(undisturbed) == 1 else "the median node"
        sentences.append(
            f"Working in parallel causes no significant slowdown above {TOLERANCE:.0%} for the "
            f"{noun}s on {undisturbed_nodes}. On {place}, anchors take {ratio:.3f} times as long "
            f"as when one {noun} works at a time."
        )
    return sentences


def _node_words(node: int | None, device_counts: Mapping[int | None, int]) -> str:
    if len(device_counts) == 1:
        return "the node"
    return "an unknown node" if node is None else f"node {node}"


def _slowdown(change: SpeedChange) -> str:
    """Format a significant slowdown with its interval, such as ``3.0% (2.0–4.1%)``."""
    return f"{change.ratio - 1:.1%} ({100 * (change.lo - 1):.1f}–{change.hi - 1:.1%})"


def report_text(report: FleetReport) -> str:
    """Return the report as text: a table with the slowest GPU first, then a list of sentences."""
    recording, speeds = report.anchors.recording, report.speeds
    devices = counted(len(report.verdicts), report.noun)
    nodes = {device.node for device in report.anchors.fleet.devices}
    # Devices of unknown nodes need not be of the same node, so these nodes cannot be counted.
    of_nodes = "" if None in nodes else f" of {counted(len(nodes), 'node')}"
    anchors = counted(len(report.anchors.fleet.kinds), "anchor")
    date = recording.run["run"][:10]
    lines = [f"{recording.machine.name}: {devices}{of_nodes}, {anchors}, measured {date}"]
    if speeds.overall:
        lines += [
            "Speeds are relative to the fleet's median. "
            'The columns "speed" and "95%" show the speed in '
            f"{KIND_WORDS[speeds.overall]} and its 95% interval.",
            "",
            *_table(report),
        ]
    # The sort by verdict is stable, so devices with one verdict stay in the order of their speeds.
    slowest_first = [report.verdicts[i] for i in report.slowest_first]
    notable = [verdict for verdict in slowest_first if verdict.verdict != ORDINARY]
    notable.sort(key=lambda verdict: VERDICTS.index(verdict.verdict))
    lines += ["", *(f"• {verdict.sentence}" for verdict in notable[:_LISTED])]
    if len(notable) > _LISTED:
        unlisted = len(notable) - _LISTED
        more = counted(unlisted, f"more {report.noun} is", f"more {report.noun}s are")
        lines.append(f"• {more} slow or throttled; fleet.json lists all {report.noun}s.")
    return "\n".join([*lines, *(f"• {finding}" for finding in findings(report))])


def _table(report: FleetReport) -> Iterator[str]:
    speeds = report.speeds
    overall = speeds.kinds[speeds.overall]
    other_kinds = [kind for kind in speeds.kinds if kind != speeds.overall]
    sensors = [name for name in _SENSOR_HEADS if np.isfinite(overall.sensors[name]).any()]
    slowest_first = report.slowest_first
    listed, unlisted = slowest_first[:_LISTED], slowest_first[_LISTED:]
    # 1. Write the header: name, speed, interval, speeds in other kinds, sensors, verdict.
    name_width = max(len(report.verdicts[i].name) for i in listed)
    heads = [*other_kinds, *(_SENSOR_HEADS[name] for name in sensors)]
    widths = [max(8, len(head) + 2) for head in heads]
    header = "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    yield f"{'':{name_width}}{'speed':>8}  {'95%':15}{header}  verdict"
    # 2. Write a line for each of the slowest GPUs.
    for i in listed:
        verdict = report.verdicts[i]
        speed = _percent(overall.speed[i])
        interval = f"{_percent(overall.lo[i])} – {_percent(overall.hi[i])}"
        cells = [_percent(speeds.kinds[kind].speed[i]) for kind in other_kinds]
        cells += [_whole(overall.sensors[name][i]) for name in sensors]
        row = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        yield f"{verdict.name:{name_width}}{speed:>8}  {interval:15}{row}  {verdict.verdict}"
    # 3. Summarise the other GPUs in a line.
    if unlisted:
        speeds_of_others = overall.speed[unlisted]
        speeds_of_others = speeds_of_others[np.isfinite(speeds_of_others)]
        speed_range = ""
        if len(speeds_of_others):
            lowest = f"{100 * speeds_of_others.min():.1f}"
            highest = f"{100 * speeds_of_others.max():.1f}"
            same = lowest == highest
            speed_range = f", at {lowest}%" if same else f", at {lowest}–{highest}%"
        yield f"… and {counted(len(unlisted), f'more {report.noun}')}{speed_range}"


def _percent(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else _UNKNOWN


def _whole(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else _UNKNOWN
