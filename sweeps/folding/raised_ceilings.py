"""A CPU's ceilings over a whole run, since a shared machine may be slow at any one moment.

A run measures them at its start, middle and end, and takes the best. If a
GEMM of the run was faster still, beyond its interval and in two processes, the peak is raised to
what the GEMM reached: no share of a ceiling is then above 100%.
"""

from __future__ import annotations

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
    """The machine with the ceilings of the whole run, and what run.json says of them."""

    machine: Machine
    record: Mapping[str, Any] | None


def raise_ceilings(
    record: Mapping[str, Any],
    machine: Machine,
    events: Iterable[Event],
    planned: Sequence[PlanEntry],
    known: Mapping[str, History],
) -> RaisedCeilings:
    """Raise a CPU's ceilings to the best that the run measured, and to what its GEMMs reached.

    Args:
        record: the run's record; its ``ceilings`` tell those of the start, if it was folded before.
        machine: its facts; a GPU's stay as they are.
        events: all of the run's events.
        planned: its cases.
        known: their histories.
    """
    if machine.kind != "cpu":
        return RaisedCeilings(machine, None)
    start = (record.get("ceilings") or {}).get("start") or {
        "peaks": dict(machine.peaks),
        "bandwidth": machine.bandwidth,
    }
    measured = [start, *(event for event in events if event["event"] == "ceilings")]
    bandwidth = max(found["bandwidth"] for found in measured)
    peaks = {
        dtype: max(found["peaks"].get(dtype, 0.0) for found in measured) for dtype in start["peaks"]
    }
    raised = {}
    for dtype, entry in beyond(planned, known, peaks).items():
        history = known[entry.case.id]
        again = median_interval([sample["s"] for sample in history.repeats])
        if again is None or entry.case.problem.flops / again[1] <= peaks[dtype]:
            continue
        slower = max(median([s["s"] for s in of]) for of in (history.trusted, history.repeats))
        raised[dtype] = {"case": str(entry.case.problem), "from": peaks[dtype]}
        peaks[dtype] = entry.case.problem.flops / slower
    told = {"start": start, **({"raised": raised} if raised else {})}
    return RaisedCeilings(replace(machine, peaks=peaks, bandwidth=bandwidth), told)


def beyond(
    planned: Sequence[PlanEntry], known: Mapping[str, History], peaks: Mapping[str, float]
) -> dict[str, PlanEntry]:
    """Find the GEMM of each dtype that exceeds its peak the most, beyond its interval.

    Args:
        planned: cases.
        known: their histories.
        peaks: FLOP/s by dtype.
    """
    fastest: dict[str, tuple[float, PlanEntry]] = {}
    for entry in planned:
        problem, history = entry.case.problem, known.get(entry.case.id)
        if not isinstance(problem, Gemm) or history is None or history.outcome is not None:
            continue
        interval = median_interval([sample["s"] for sample in history.trusted])
        if interval is None:
            continue
        speed = problem.flops / interval[1]
        best, _ = fastest.get(problem.dtype, (peaks.get(problem.dtype, speed), entry))
        if speed > best:
            fastest[problem.dtype] = speed, entry
    return {dtype: entry for dtype, (_, entry) in fastest.items()}
