"""Raise the ceilings of a CPU (peak FLOP/s by dtype, and memory bandwidth) after a run.

A shared machine may be slow when its ceilings are measured. A run that is long enough therefore
measures the ceilings again, in the middle and at the end of the run, and the highest values are
used. A GEMM may still be faster than the peak. If the whole interval of the GEMM's speed was above
the peak in each of two processes, the peak is raised to the lower of the two measured speeds.
Without this correction, reports could show GEMMs at more than 100% of the peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernels.machine import Machine
from kernels.problem import Gemm
from sweeps.folding.history import History
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from sweeps.timing.statistics import median, median_interval


@dataclass(frozen=True)
class RaisedCeilings:
    """Machine with its ceilings raised to the run's highest values; a GPU keeps its ceilings."""

    machine: Machine
    record: Mapping[str, Any] | None
    """Entry ``ceilings`` of run.json; None for a GPU, whose ceilings are not measured."""


def raise_ceilings(
    record: Mapping[str, Any],
    machine: Machine,
    events: Iterable[Event],
    planned: Sequence[PlanEntry],
    history_by_case: Mapping[str, History],
) -> RaisedCeilings:
    """Raise a CPU's ceilings to values that the run measured or that its GEMMs reached."""
    if machine.kind != "cpu":
        return RaisedCeilings(machine, None)
    # 1. Take the highest of the measured ceilings. An earlier fold may have raised those of
    # ``machine``, so the ones measured at the start are stored separately.
    earlier_summary = record.get("ceilings") or {}
    start = earlier_summary.get("start")
    if not start:  # this is the first fold
        start = {"peaks": dict(machine.peaks), "bandwidth": machine.bandwidth}
    measured = [start, *(event for event in events if event["event"] == "ceilings")]
    bandwidth = max(ceilings["bandwidth"] for ceilings in measured)
    peaks = {
        dtype: max(ceilings["peaks"].get(dtype, 0.0) for ceilings in measured)
        for dtype in start["peaks"]
    }
    # 2. Raise each peak to what the fastest GEMM reached.
    raised = {}
    for dtype, entry in gemms_above_peak(planned, history_by_case, peaks).items():
        problem, history = entry.case.problem, history_by_case[entry.case.id]
        seconds = [sample["s"] for sample in history.trusted]
        repeated_seconds = [sample["s"] for sample in history.repeats]
        # Another process must have timed the GEMM, too, and even the longest time of its interval
        # there must exceed the peak.
        repeated_interval = median_interval(repeated_seconds)
        if repeated_interval is None:
            continue
        _, longest_repeated = repeated_interval
        if problem.flops / longest_repeated <= peaks[dtype]:
            continue
        # The peak is raised only to what both processes reached.
        raised[dtype] = {"case": str(problem), "from": peaks[dtype]}
        peaks[dtype] = problem.flops / max(median(seconds), median(repeated_seconds))
    summary: dict[str, Any] = {"start": start}
    if raised:
        summary["raised"] = raised
    return RaisedCeilings(replace(machine, peaks=peaks, bandwidth=bandwidth), summary)


def gemms_above_peak(
    planned: Sequence[PlanEntry], history_by_case: Mapping[str, History], peaks: Mapping[str, float]
) -> dict[str, PlanEntry]:
    """Return, for each dtype whose peak is exceeded, the GEMM that exceeds it the most.

    The speed of a GEMM is computed from the longest time of its interval. ``peaks`` has the FLOP/s
    of each dtype.
    """
    to_exceed = dict(peaks)
    fastest: dict[str, PlanEntry] = {}
    for entry in planned:
        problem, history = entry.case.problem, history_by_case.get(entry.case.id)
        if not isinstance(problem, Gemm) or history is None or history.outcome is not None:
            continue
        interval = median_interval([sample["s"] for sample in history.trusted])
        if interval is None:
            continue
        _, longest_seconds = interval
        speed = problem.flops / longest_seconds
        # A dtype without a peak has nothing to exceed.
        if speed > to_exceed.get(problem.dtype, math.inf):
            to_exceed[problem.dtype] = speed
            fastest[problem.dtype] = entry
    return fastest
