"""Anchors: the same few cases on every GPU of a run, which tell how fast each one is."""

from __future__ import annotations

from kernels.machine import Machine
from sweeps.cases.spec import all_sweeps
from sweeps.planning.choice import sweep_cases
from sweeps.planning.plan import PlanEntry, make_plan

ANCHORS = ("anchors", "anchors-memory")
"""The sweeps that declare them."""

_STEADY_SECONDS = 5.0  # boards take one to five seconds until power and clocks are steady
_STEADY_SHARE = 1 / 12  # of a small budget


def anchor_cases(machine: Machine) -> list[PlanEntry]:
    """The anchors of a machine; none where no sweep declares them."""
    known = all_sweeps()
    cases = {name: sweep_cases(known[name], machine) for name in ANCHORS if name in known}
    return list(make_plan(cases, machine, 1e9, in_order=True).planned)


def steady_seconds(budget: float) -> float:
    """Seconds of work without a pause for a run with so many seconds to measure."""
    return min(_STEADY_SECONDS, _STEADY_SHARE * budget)
