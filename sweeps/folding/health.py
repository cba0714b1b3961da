"""Judge the health of a run: how far its times can be trusted.

The verdict is ``quiet``, ``noisy`` or ``unusable``. The worst of these findings decides it:

| finding | noisy from | unusable from |
|---|---|---|
| variation of re-timed medians beyond their intervals | 3% | 30% |
| variation of the canary GEMM's times, if too few cases were re-timed | 5% | – |
| change of the machine's speed during the run | 3% | – |
| cases whose batches last whole scheduler ticks | 25% | 50% |
| cases in which the GPU throttled its clock, except at its power limit | 5% | – |

A run is also noisy if half of its intervals are wider than ±5% of their medians, if fewer than
eight cases have an interval, or if other processes used the GPU.

A merged recording never has a better verdict than the worst of the recordings that it combines. The
load of the host does not affect the verdict, but it may be named as a likely cause if the run is
not quiet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.common.counts import counted
from kernels.machine import Machine
from sweeps.folding.history import timed
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from sweeps.timing.speed import MachineSpeed
from sweeps.timing.telemetry import RETRY

VERDICTS = ("quiet", "noisy", "unusable")
"""Verdicts from the best to the worst."""

QUIET, NOISY, UNUSABLE = VERDICTS

HealthFinding = tuple[str, str]
"""Verdict on one aspect of a run, and the reason for the verdict: a sentence without a full
stop."""

# Common periods of the operating system's scheduler tick (1, 10/3, 4 and 10 ms) and multiples of
# them, in seconds.
_TICKS = (0.001, 0.002, 1 / 300, 0.004, 0.008, 0.010, 0.012, 0.016, 0.020)
# A batch counts as lasting whole ticks if its time is at most this far from a multiple of the tick,
# as a share of the tick. By chance, twice this share of unrelated times is as near.
_NEAR_TICK = 0.03
_MAX_TICKS = 8  # longest batch that is judged, in ticks
_MIN_AT_TICK = 8  # cases; fewer may last whole ticks by chance, because cases resemble one another
_MIN_SHARE_AT_TICK = 0.4  # share of a case's batches that must last whole ticks for it to count


@dataclass(frozen=True)
class _Limits:
    """Smallest values of a quantity at which a run is noisy or unusable."""

    noisy: float
    unusable: float = float("inf")

    def verdict(self, value: float) -> str:
        if value >= self.unusable:
            return UNUSABLE
        return NOISY if value >= self.noisy else QUIET


_BETWEEN = _Limits(0.03, 0.3)  # variation of re-timed medians beyond their intervals
_SPEED = _Limits(0.03)  # relative change of the machine's speed
_CANARY = _Limits(0.05)  # relative spread of the canary's times
_HALF_WIDTH = _Limits(0.05)  # half the width of an interval, relative to its median
_AT_TICKS = _Limits(0.25, 0.5)  # share of the cases whose batches last whole ticks
_THROTTLED = _Limits(0.05)  # share of the cases in which the GPU throttled its clock
_STEAL = 0.02  # share of the cores' time from which other virtual machines are a likely cause
_OTHERS = 0.05  # share of the cores' time from which other processes are a likely cause
_MIN_ROWS = 8  # a run in which fewer cases have an interval is noisy


def health(
    record: Mapping[str, Any],
    machine: Machine | None,
    planned: Sequence[PlanEntry],
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
    speeds: Iterable[MachineSpeed],
) -> dict[str, Any]:
    """Return the entry ``health`` of run.json: the verdict on a run, and its reasons, worst first.

    ``record`` has the entries of run.json. ``machine`` is None if its facts are not recorded, and
    ``speeds`` has one element for each worker and GPU.
    """
    measured = [row for row in rows if row["status"] == "ok"]
    host_events = [event for event in events if event["event"] == "host"]
    findings = [
        *_judge_repeats(record),
        *_judge_speed(max((speed.spread for speed in speeds), default=0.0)),
        *_judge_intervals(measured),
        *_judge_throttling(measured),
        *_judge_ticks(events, planned),
        *_judge_gpu_use(host_events),
        *_judge_merged(record),
    ]
    # Sorting keeps the order above among findings of the same verdict.
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
    """Return the verdict in words, with the variation of re-timed medians and the worst reason.

    The variation is left out if it was not measured, and the reason if the variation already
    explains the verdict. ``run`` is the content of run.json.
    """
    verdict, reasons = run["health"]["verdict"], run["health"]["reasons"]
    repeats = run.get("repeats")
    if not repeats:
        worst_reason = f"; {reasons[0]}" if reasons else ""
        return f"Health: {verdict}{worst_reason}."
    difference = f"re-timed medians differ by {repeats['between']:.0%} beyond their intervals"
    if reasons and verdict != _BETWEEN.verdict(repeats["between"]):
        return f"Health: {verdict}; {difference}, but {reasons[0]}."
    if verdict == NOISY:
        return f"Health: {verdict}; {difference}, which are widened accordingly."
    return f"Health: {verdict}; {difference}."


def _judge_repeats(record: Mapping[str, Any]) -> Iterator[HealthFinding]:
    """Judge the variation of re-timed medians, or else of the canary's times."""
    canary, repeats = record.get("canary"), record.get("repeats")
    if repeats:
        yield (
            _BETWEEN.verdict(repeats["between"]),
            f"re-timing {repeats['cases']} cases in a new process gave medians that differ by "
            f"{repeats['between']:.0%} beyond their intervals",
        )
    elif canary:
        yield (
            _CANARY.verdict(canary["spread"]),
            "the time of the canary GEMM, which runs every two seconds, varies by "
            f"{canary['spread']:.0%}",
        )


def _judge_speed(spread: float) -> Iterator[HealthFinding]:
    """Judge how much the machine's speed changed; ``spread`` is the change as a log ratio."""
    change = math.expm1(spread)
    yield _SPEED.verdict(change), f"the machine's speed changed by {change:.0%}"


def _judge_intervals(measured: Sequence[Mapping[str, Any]]) -> Iterator[HealthFinding]:
    # Half the width of each interval, relative to its median.
    half_widths = [
        (row["time_hi_us"] - row["time_lo_us"]) / 2 / row["time_us"]
        for row in measured
        if "time_lo_us" in row
    ]
    if len(half_widths) < _MIN_ROWS:
        yield NOISY, f"fewer than {_MIN_ROWS} cases have an interval, so the noise cannot be judged"
        return
    half_width = float(np.median(half_widths))
    yield _HALF_WIDTH.verdict(half_width), f"half of the intervals are wider than ±{half_width:.0%}"


def _judge_throttling(measured: Sequence[Mapping[str, Any]]) -> Iterator[HealthFinding]:
    throttled = [row for row in measured if not RETRY.isdisjoint(row["throttled"].split(";"))]
    share = len(throttled) / max(1, len(measured))
    yield _THROTTLED.verdict(share), f"the GPU throttled its clock in {share:.0%} of the cases"


def _judge_ticks(events: Sequence[Event], planned: Sequence[PlanEntry]) -> Iterator[HealthFinding]:
    """Judge whether a CPU's batches last whole ticks, as if launches waited for the scheduler.

    Sustained batches are left out because they are made to last 60 ms.
    """
    bursts = {entry.case.id for entry in planned if entry.case.mode == "burst"}
    batches: dict[str, list[float]] = defaultdict(list)
    for event in timed(events):
        # Without ``n``, the number of launches, the duration of the batch is not known.
        if event["case"] in bursts and event.get("gpu") is None and "n" in event:
            batches[event["case"]].append(event["s"] * event["n"])
    # Whole ticks of 16 ms are also whole ticks of 4 ms. If several periods have the same count,
    # ``max`` takes the longest one.
    case_counts = [(_cases_at_ticks(batches.values(), tick), tick) for tick in _TICKS]
    largest_count, tick = max(case_counts)
    share = largest_count / max(1, len(batches))
    yield (
        _AT_TICKS.verdict(share),
        (
            f"in {share:.0%} of the cases, batches take whole ticks of {tick * 1e3:.3g} ms, as if "
            "launches waited for the scheduler of a busy machine"
        ),
    )


def _cases_at_ticks(batches: Iterable[Sequence[float]], tick: float) -> int:
    """Count the cases in which at least 40% of the judged batches last whole ticks.

    Only batches that last between half a tick and eight ticks are judged. A case does not count if
    fewer than half of its batches are judged. Return 0 if chance could explain the count. All times
    are in seconds.
    """
    # 1. Find the share of each case's batches that last whole ticks.
    shares = []
    for batch_seconds in batches:
        judged = [seconds for seconds in batch_seconds if tick / 2 < seconds < _MAX_TICKS * tick]
        if 2 * len(judged) >= len(batch_seconds):
            ticks = np.array(judged) / tick
            is_near_tick = np.abs(ticks - np.round(ticks)) < _NEAR_TICK
            shares.append(float(np.mean(is_near_tick)))
    count = sum(share >= _MIN_SHARE_AT_TICK for share in shares)
    # 2. Compare the count with chance. The batches of a case last about equally long, so chance
    # puts a whole case near a tick about as often as a single batch: with probability
    # 2 × _NEAR_TICK. The count must be at least five standard errors above the expected one.
    expected_by_chance = 2 * _NEAR_TICK * len(shares)
    limit = expected_by_chance + 5 * math.sqrt(expected_by_chance)
    return count if count >= max(_MIN_AT_TICK, limit) else 0


def _judge_gpu_use(host_events: Sequence[Event]) -> Iterator[HealthFinding]:
    others = max((event.get("gpu_processes", 0) for event in host_events), default=0)
    if others:
        yield NOISY, f"{counted(others, 'other process', 'other processes')} used the GPU"


def _likely_causes(host_events: Sequence[Event]) -> Iterator[str]:
    """Yield a likely cause for each kind of other work that used much of the cores' time."""
    total_seconds = sum(event["seconds"] for event in host_events)
    for name, limit, who in (
        ("steal", _STEAL, "other virtual machines"),
        ("others", _OTHERS, "other processes"),
    ):
        # Each event has the share of its own time span, so shares are weighted by the spans.
        used_seconds = sum(event.get(name, 0.0) * event["seconds"] for event in host_events)
        share = used_seconds / total_seconds if total_seconds else 0.0
        if share >= limit:
            yield f"likely cause: {who} used {share:.0%} of the cores' time"


def _judge_merged(record: Mapping[str, Any]) -> Iterator[HealthFinding]:
    for verdict in VERDICTS[1:]:
        # A recording that was never folded has no health.
        workers = [
            recording["worker"]
            for recording in record.get("merged", ())
            if (recording["health"] or {}).get("verdict") == verdict
        ]
        if workers:
            recordings = counted(len(workers), f"{verdict} recording")
            verb = "was" if len(workers) == 1 else "were"
            yield verdict, f"{recordings} {verb} merged into this one: {', '.join(workers)}"
