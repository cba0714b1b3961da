"""Health of a run: how far its times can be trusted.

The verdict depends on whether medians repeat, in another process and from round to round:

- ``quiet``: they repeat, and intervals cover all of the uncertainty.
- ``noisy``: they differ, and intervals are widened by as much.
- ``unusable``: repeated medians differ by 30% or more beyond their intervals, or something other
  than the cases was timed.

How busy the host was does not affect the verdict. It is listed as the likely cause if a run is not
quiet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.machine import Machine
from sweeps.folding.history import timed
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from sweeps.timing.speed import MachineSpeed
from sweeps.timing.telemetry import RETRY

VERDICTS = ("quiet", "noisy", "unusable")
"""Verdicts from the best to the worst."""

QUIET, _, UNUSABLE = VERDICTS

HealthFinding = tuple[str, str]
"""A verdict and its reason, a sentence without its full stop."""

_TICKS = (0.001, 0.002, 1 / 300, 0.004, 0.008, 0.010, 0.012, 0.016, 0.020)
"""Common periods of the operating system's scheduler tick, in seconds."""
# Largest distance from whole ticks that counts as near them, as a share of a tick. By chance, twice
# this share of unrelated times is as near.
_NEAR_TICK = 0.03
_MAX_TICKS = 8
_MIN_AT_TICK = 8  # cases; fewer may last whole ticks by chance, because cases resemble one another


@dataclass(frozen=True)
class _Limits:
    """Thresholds from which a value makes a run noisy or unusable."""

    noisy: float
    unusable: float = float("inf")

    def verdict(self, value: float) -> str:
        """Return the verdict on a run that has this value."""
        if value >= self.unusable:
            return "unusable"
        return "noisy" if value >= self.noisy else "quiet"


_BETWEEN = _Limits(0.03, 0.3)
_SPEED = _Limits(0.03)
_CANARY = _Limits(0.05)
_HALF_WIDTH = _Limits(0.05)
_AT_TICKS = _Limits(0.25, 0.5)  # similar cases may last a whole tick by chance
_THROTTLED = _Limits(0.05)
_STEAL = 0.02
_OTHERS = 0.05
_MIN_ROWS = 8


def health(
    record: Mapping[str, Any],
    machine: Machine | None,
    planned: Sequence[PlanEntry],
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
    speeds: Iterable[MachineSpeed],
) -> dict[str, Any]:
    """Judge a run and give the reasons: the worst first, then likely causes.

    Args:
        record: the run's record, with ``canary`` and ``repeats``.
        machine: the machine's facts.
        planned: the run's cases.
        rows: the rows of its table.
        events: all of its events.
        speeds: the machine's speed over the run, one for each place.
    """
    ok = [row for row in rows if row["status"] == "ok"]
    host_events = [event for event in events if event["event"] == "host"]
    findings = [
        *_judge_repeats(record),
        *_judge_speed(max((speed.spread for speed in speeds), default=0.0)),
        *_judge_rows(ok),
        *_judge_ticks(events, planned),
        *_judge_gpu_use(host_events),
        *_judge_merged(record),
    ]
    # The worst findings come first. Sorting keeps the order above among those of one verdict.
    concerns = [(verdict, reason) for verdict, reason in findings if verdict != QUIET]
    concerns.sort(key=lambda finding: VERDICTS.index(finding[0]), reverse=True)
    if not concerns:
        return {"verdict": QUIET, "reasons": []}
    worst, _ = concerns[0]
    reasons = [reason for _, reason in concerns]
    if machine is None or machine.kind == "cpu":
        reasons += _likely_causes(host_events)
    return {"verdict": worst, "reasons": reasons}


def health_sentence(run: Mapping[str, Any]) -> str:
    """Return the verdict of :func:`health` in one line, with what it means for the intervals.

    Args:
        run: run.json, with ``health`` and ``repeats``.
    """
    verdict, reasons = run["health"]["verdict"], run["health"]["reasons"]
    text = f"Health: {verdict}"
    if repeats := run.get("repeats"):
        # The first reason is given only where the repeats do not explain the verdict.
        if verdict == "noisy" and repeats["between"] < _BETWEEN.noisy:
            text += f"; {reasons[0]}"
        text += f"; repeated medians differ by {repeats['between']:.0%}"
        if verdict == "noisy":
            text += ", and intervals are widened accordingly"
        elif verdict == UNUSABLE and repeats["between"] < _BETWEEN.unusable:
            text += f", but {reasons[0]}"
    elif reasons:
        text += f"; {reasons[0]}"
    return f"{text}."


def _judge_repeats(record: Mapping[str, Any]) -> Iterator[HealthFinding]:
    """Judge the medians that another process repeated, or the canary GEMM if there are none."""
    canary, repeats = record.get("canary"), record.get("repeats")
    if repeats:
        yield (
            _BETWEEN.verdict(repeats["between"]),
            f"re-timing {repeats['cases']} cases in a new process shows {repeats['between']:.0%} "
            "more variation than their intervals explain",
        )
    elif canary:
        yield (
            _CANARY.verdict(canary["spread"]),
            f"the canary GEMM, timed every two seconds, varies by {canary['spread']:.0%}",
        )


def _judge_speed(spread: float) -> Iterator[HealthFinding]:
    """Judge how much the machine's speed changed from round to round, as all cases show it.

    Intervals cover these changes.
    """
    change = math.expm1(spread)
    yield _SPEED.verdict(change), f"the machine's speed changed by {change:.0%}"


def _judge_rows(ok: Sequence[Mapping[str, Any]]) -> Iterator[HealthFinding]:
    """Judge how wide the intervals are and how often the clock was throttled.

    ``ok`` are the rows of cases with a time.
    """
    widths = [
        (row["time_hi_us"] - row["time_lo_us"]) / 2 / row["time_us"]
        for row in ok
        if "time_lo_us" in row
    ]
    if len(widths) < _MIN_ROWS:
        yield "noisy", f"only {len(widths)} times have an interval, too few to judge the noise"
        return
    half_width = float(np.median(widths))
    yield _HALF_WIDTH.verdict(half_width), f"half of the intervals are wider than ±{half_width:.0%}"
    throttled = [row for row in ok if not RETRY.isdisjoint(row["throttled"].split(";"))]
    share = len(throttled) / len(ok)
    yield _THROTTLED.verdict(share), f"the GPU throttled its clock in {share:.0%} of the cases"


def _judge_ticks(events: Sequence[Event], planned: Sequence[PlanEntry]) -> Iterator[HealthFinding]:
    """Judge whether a CPU's batches last whole scheduler ticks.

    Launches then waited for the scheduler. Sustained batches are left out because they are made to
    last 60 ms. Batches of a GPU are left out because a GPU has its own clock.
    """
    bursts = {entry.case.id for entry in planned if entry.case.mode == "burst"}
    batches: dict[str, list[float]] = defaultdict(list)
    for event in timed(events):
        if event["case"] in bursts and event.get("gpu") is None and "n" in event:
            batches[event["case"]].append(event["s"] * event["n"])
    # Whole ticks of 16 ms are also whole ticks of 4 ms. If several ticks have the same count, the
    # longest one is reported.
    counts = [(_cases_at_ticks(batches.values(), tick), tick) for tick in _TICKS]
    count, tick = max(counts)
    share = count / max(1, len(batches))
    yield (
        _AT_TICKS.verdict(share),
        (
            f"in {share:.0%} of the cases, batches last whole ticks of {tick * 1e3:.3g} ms: "
            "launches waited for the scheduler, as on a busy machine"
        ),
    )


def _cases_at_ticks(batches: Iterable[Sequence[float]], tick: float) -> int:
    """Count the cases in which at least 40% of the batches last whole ticks.

    Only batches between half a tick and eight ticks are judged, and only cases that have mostly
    such batches. The count is 0 if as many cases are expected by chance.
    """
    shares = []  # of the judged batches that last whole ticks, for each case
    for seconds in batches:
        judged = [s for s in seconds if tick / 2 < s < _MAX_TICKS * tick]
        if 2 * len(judged) >= len(seconds):
            ticks = np.array(judged) / tick
            shares.append(float(np.mean(np.abs(ticks - np.round(ticks)) < _NEAR_TICK)))
    count = sum(share >= 0.4 for share in shares)
    # This many cases would be near a tick by chance. The count must exceed that by five standard
    # errors.
    chance = 2 * _NEAR_TICK * len(shares)
    return count if count >= max(_MIN_AT_TICK, chance + 5 * math.sqrt(chance)) else 0


def _judge_gpu_use(host_events: Sequence[Event]) -> Iterator[HealthFinding]:
    """Report other processes that used the GPU during the run."""
    others = max((look.get("gpu_processes", 0) for look in host_events), default=0)
    if others:
        yield "noisy", f"{others} other process{'es' if others > 1 else ''} used the GPU"


def _likely_causes(host_events: Sequence[Event]) -> Iterator[str]:
    """Name who else used the CPU's cores during the run."""
    total_seconds = sum(event["seconds"] for event in host_events)
    for name, limit, who in (
        ("steal", _STEAL, "other virtual machines"),
        ("others", _OTHERS, "other processes"),
    ):
        # The events have shares of spans that are not equally long.
        used_seconds = sum(event.get(name, 0.0) * event["seconds"] for event in host_events)
        share = used_seconds / max(total_seconds, 1e-9)
        if share >= limit:
            yield f"likely cause: {who} used {share:.0%} of the cores' time"


def _judge_merged(record: Mapping[str, Any]) -> Iterator[HealthFinding]:
    """Report the verdicts on the recordings that this one was merged from.

    A disturbed recording might otherwise go unnoticed among quiet ones.
    """
    for verdict in VERDICTS[1:]:
        workers = [
            recording["worker"]
            for recording in record.get("merged", ())
            if (recording["health"] or {}).get("verdict") == verdict
        ]
        if workers:
            yield verdict, f"{verdict} recordings were merged into this one: {', '.join(workers)}"
