"""Measure candidates for advice together with the original shape, then re-time the best ones.

The candidate with the shortest measured time tends to be slower than this time suggests, because
chance contributed to the choice. The best candidates are therefore re-timed in other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kernels import implementations
from kernels.config import HAND_WRITTEN
from kernels.device import select_device
from kernels.machine import Machine
from kernels.problem import Problem
from sweeps.cases.case import CONFIRM, Case, Contender
from sweeps.folding.history import BLOCKS, PROCESSES
from sweeps.planning.ceilings import measured_device
from sweeps.planning.plan import PlanEntry, make_plan
from sweeps.progress import LiveReporter
from sweeps.running.opening import begin
from sweeps.running.request import Request
from sweeps.running.run import Run
from sweeps.running.supervisor import carry_out, confirm
from sweeps.store import read_run
from sweeps.timing.statistics import CHECKPOINTS

_LARGEST_SHARE = 0.5  # share of the budget for one candidate, because there are few candidates

CANDIDATE_COST = CHECKPOINTS[1] / CHECKPOINTS[0]
"""Number of samples assumed for a candidate, divided by the six that :attr:`PlanEntry.expected`
includes.

A candidate is assumed to converge at the second checkpoint."""
# A block has two samples of each of the pair's two cases, so it has four in all.
PAIR_COST = 4 * BLOCKS * PROCESSES / CHECKPOINTS[0]
"""Number of samples of a re-timed pair, divided by the six that :attr:`PlanEntry.expected`
includes."""


def machine_here(request: Request) -> Machine:
    """Return the machine that a request would measure.

    The machine is taken from its recording. A machine without a recording is taken from the device,
    and the ceilings of a CPU are measured now.

    Raises:
        UserError: if the device cannot be used, or the machine's recording cannot be read.
    """
    slug = select_device(request.device, request.gpu).machine.slug
    folder = request.results / slug
    if (folder / "run.json").exists():
        return Machine.from_json(read_run(folder)["machine"])
    return measured_device(request.device, request.gpu).machine


def other_implementations(problem: Problem, machine: Machine) -> list[str]:
    """Return the names of the hand-written kernels that support a problem on a machine."""
    return [
        name
        for name, implementation in implementations().items()
        if name in HAND_WRITTEN and implementation.supports(problem, machine) is None
    ]


def seconds_of(
    contenders: Sequence[Contender], machine: Machine
) -> dict[Contender, tuple[float, float]]:
    """Return two expected times for each contender, in seconds.

    The first is the time to measure the contender as a candidate. The second is the contender's
    part of the time to re-time a pair. If the machine is a CPU, its ceilings must have been
    measured.
    """
    cases = {contender: _case(contender, machine) for contender in contenders}
    # The plan is only made for its expected times. Its budget of 1e9 seconds admits every case.
    plan = make_plan({CONFIRM: list(cases.values())}, machine, 1e9, in_order=True)
    expected = {entry.case.id: entry.expected for entry in plan.planned}
    return {
        contender: (CANDIDATE_COST * expected[case.id], PAIR_COST / 2 * expected[case.id])
        for contender, case in cases.items()
    }


def explore(
    request: Request,
    contenders: Sequence[Contender],
    note: Callable[[str], None],
    quickly: bool = False,
) -> Run:
    """Time original shapes and candidates, and fold the samples into the machine's recording.

    Return the run, which :func:`confirm_choices` needs. If ``quickly`` is True, the naming of
    kernels is left to a later call, because the user is waiting.

    Raises:
        UserError: if the run cannot be opened or carried out.
        OSError: if a sample file cannot be read, or a file of an old run cannot be moved.
        KeyboardInterrupt: if the user interrupts; the samples are folded first.
    """

    def cases_of_contenders(machine: Machine) -> list[Case]:
        return [_case(contender, machine) for contender in dict.fromkeys(contenders)]

    # The contenders replace the request's sweeps, and their cases are added to the recorded plan.
    run = begin(replace(request, names=(), add=True), note, {CONFIRM: cases_of_contenders})
    # How well medians repeat is a property of the machine, so it is measured only once.
    repeats_known = read_run(run.folder).get("repeats") is not None
    run = replace(
        run,
        longest=None if request.budget is None else _LARGEST_SHARE * request.budget,
        repeats=not repeats_known,
        names_kernels=run.names_kernels and not quickly,
    )
    with LiveReporter() as live:
        carry_out(run, live, note)
    return run


def confirm_choices(
    run: Run, chosen: Sequence[tuple[Contender, Contender]], note: Callable[[str], None]
) -> None:
    """Re-time pairs of an original shape and a candidate, and fold the samples.

    ``run`` is a result of :func:`explore` that includes both contenders of each pair.

    Raises:
        UserError, OSError: as in :func:`sweeps.running.supervisor.confirm`.
        KeyboardInterrupt: if the user interrupts; the samples are folded first.
    """
    entries = {entry.case.id: entry for entry in run.planned}

    def entry_of(contender: Contender) -> PlanEntry:
        return entries[_case(contender, run.arguments["machine"]).id]

    pairs = [(entry_of(original), entry_of(candidate)) for original, candidate in chosen]
    with LiveReporter() as live:
        confirm(run, pairs, live, note)


def _case(contender: Contender, machine: Machine) -> Case:
    """Return the case that times a contender with the config that its implementation prefers."""
    problem, name = contender
    preferred_config = implementations()[name].configs(problem, machine)[0]
    config_text = "" if preferred_config is None else str(preferred_config)
    return Case(CONFIRM, problem, name, config_text)
