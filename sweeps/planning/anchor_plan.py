"""Plan the anchors: the few cases that every GPU of a run times, so that GPUs can be compared.

In a run on the CPUs of several nodes, every node times them.
"""

from __future__ import annotations

from kernels.machine import Machine
from sweeps.cases.spec import all_sweeps
from sweeps.planning.choice import sweep_cases
from sweeps.planning.plan import PlanEntry, make_plan

ANCHORS = ("anchors", "anchors-memory")
"""Names of the sweeps that declare the anchors."""

_STEADY_SECONDS = 5.0  # boards take one to five seconds until power and clocks are steady
_STEADY_SHARE = 1 / 12  # share of the budget, if that is less than _STEADY_SECONDS


def anchor_cases(machine: Machine) -> list[PlanEntry]:
    """Return the plan entries of a machine's anchors."""
    sweeps = all_sweeps()
    cases = {name: sweep_cases(sweeps[name], machine) for name in ANCHORS if name in sweeps}
    # The budget of 1e9 seconds admits every case.
    return list(make_plan(cases, machine, 1e9, in_order=True).planned)


def steady_seconds(budget: float) -> float:
    """Return how many seconds each sustained anchor runs, given the run's budget in seconds."""
    return min(_STEADY_SECONDS, _STEADY_SHARE * budget)
