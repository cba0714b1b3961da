"""Measure what advice would otherwise predict, for the option ``--measure`` and after a sweep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.cli import note, parse_seconds
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import target
from kernels.problem import Problem
from sweeps.cases.case import CONFIRM

if TYPE_CHECKING:
    from analysis.advice.options import Question
    from analysis.advice.trials import Trial
    from analysis.model.basis import Basis
    from sweeps.running.request import Request

# Number of candidates to measure for each shape that the user asks about.
_CANDIDATES = 4

# Smallest time limit for timing all candidates, in seconds. A quiet machine needs far less.
_LEAST_SECONDS = 10.0

GUESSES = 2
"""Number of candidates to measure after a sweep, for each problem and query. On an H100, the second
candidate raises the mean gain of padding over all shapes from 1.2% to 1.3% (``measured`` in
results/accuracy/advice.json)."""


def measure_best_guesses(
    budget: str | None, device: str, gpu: int, gpus: str | None, results: Path
) -> None:
    """Time the best candidates for the shapes in this machine's recording.

    The measurements are added to the recording. The next call resumes an interrupted call.

    The arguments are options of ``recommend``. If ``budget`` is None, the rest of the sweep's
    budget is used. If ``gpus`` names GPUs, only the first of these GPUs is used.

    Raises:
        UserError: if an argument is invalid, ``results`` has no readable recording that was
            measured here, or the machine cannot be measured.
        OSError: if a sample file cannot be read.
        KeyboardInterrupt: if the user interrupts the call; measurements taken so far are saved.
    """
    from analysis.advice.measurements import read_measurements
    from analysis.advice.table import open_trials
    from analysis.advice.trials import affordable, pair_seconds
    from analysis.commands.app import analyse_machine
    from analysis.recordings.load import find_recording
    from analysis.recordings.runs import load_runs
    from kernels.device import select_device
    from sweeps.running.confirming import machine_here, seconds_of
    from sweeps.running.opening import left_for_confirming
    from sweeps.running.request import Request
    from sweeps.sharing.gpus import choose_gpus

    # 1. Load this machine's recording; only a usable one shows which changes are promising.
    began = time.monotonic()
    if gpus:
        gpu = next(iter(choose_gpus(gpus, device)))
    request = Request(results=results, device=device, gpu=gpu)
    slug = select_device(device, gpu).machine.slug
    folder = find_recording(slug, results)
    # A published or imported recording cannot be resumed, and nothing is ever added to it.
    if folder != results / slug:
        raise UserError(
            f"{results} has only an imported or published recording of {slug}; run "
            f"{target('sweep', 'run')} first."
        )
    recording = load_runs(folder)
    if recording.unusable:
        note("No candidate is measured: the run is unusable. Run the sweep again.")
        return
    # 2. Find trials, and estimate the time that each takes.
    whole_budget = parse_seconds(budget)  # seconds
    if whole_budget is None:
        whole_budget = left_for_confirming(results / slug)
    note("Looking for the most promising changes …")
    trials = open_trials(analyse_machine(slug, results), GUESSES)
    # Subtract the time that has passed in this call, which is mainly the time of the search. It can
    # be a large part of a CPU's small budget, so at least half of the budget is kept.
    remaining = max(whole_budget / 2, whole_budget - (time.monotonic() - began))
    rows = recording.products
    explored = read_measurements(rows[rows["sweep"] == CONFIRM], recording)
    contenders = [contender for trial in trials for contender in trial.contenders]
    seconds = seconds_of(contenders, machine_here(request))
    for contender in contenders:
        problem, implementation = contender
        # Candidates that an interrupted call has already timed are not timed again.
        if implementation in explored.times_of(problem):
            _, to_retime = seconds[contender]
            seconds[contender] = (0.0, to_retime)
    # 3. Measure the most promising trials that fit the budget, and keep time to re-time the best.
    chosen = affordable(trials, seconds, remaining)
    if not chosen:
        if trials:
            reason = "the budget is too small even for one query; give a larger --budget"
        else:
            reason = "for each query, one was already re-timed, or none is expected to bring a gain"
        note(f"No candidate is measured: {reason}.")
        return
    queries = counted(len(trials), "query", "queries")
    note(f"Measuring the best candidates for {len(chosen):,} of {queries} …")
    confirming_seconds = sum(pair_seconds(trial, seconds) for trial in chosen)
    # This budget covers only the timing of candidates. If an interrupted call has already timed all
    # of them, re-timing may need all remaining seconds, so the budget is set to at least a second.
    measure(chosen, replace(request, budget=max(remaining - confirming_seconds, 1.0)))


def measure_questions(
    problems: Sequence[Problem], question: Question, machine: str | None, request: Request
) -> Basis:
    """Time the best candidates for each problem on this machine; return the basis for the answers.

    The budget of ``request`` is not used.

    Raises:
        UserError: if ``machine`` is not this machine, this machine's recording cannot be used, the
            query does not fit a problem, the machine cannot be measured, or the new measurements
            are unusable.
        OSError: if a sample file cannot be read.
        KeyboardInterrupt: if the user interrupts the call; measurements taken so far are saved.
    """
    from analysis.advice.times import measurements_near
    from analysis.advice.trials import trial_of
    from sweeps.running.confirming import other_implementations, seconds_of

    basis = basis_here(machine, request)
    this_machine = basis.model.machine
    nearby = measurements_near(basis, problems, question.farthest_factor)
    trials = [
        trial_of(
            problem,
            basis.model,
            nearby,
            basis.library(problem),
            question,
            _CANDIDATES,
            other_implementations(problem, this_machine),
        )
        for problem in problems
    ]
    open_trials = [trial for trial in trials if trial is not None]
    if not open_trials:
        note(
            "Nothing is left to measure: for each shape, a candidate was already re-timed, or no "
            "candidate is expected to bring a gain."
        )
        return basis
    contenders = [contender for trial in open_trials for contender in trial.contenders]
    seconds = seconds_of(contenders, this_machine)
    # The limit matters only on a busy machine. A quiet machine finishes well within the limit.
    limit = max(_LEAST_SECONDS, 2 * sum(to_explore for to_explore, _ in seconds.values()))
    folder = measure(open_trials, replace(request, budget=limit), quickly=True)
    return basis_after(folder, request)


def basis_here(machine: str | None, request: Request) -> Basis:
    """Return the basis of answers about this machine before new measurements.

    Raises:
        UserError: if ``machine`` is not this machine, or the device or its recording cannot be
            used.
    """
    from analysis.model.basis import Basis, find_basis
    from analysis.model.predict import Model
    from analysis.recordings.load import recorded_machines
    from kernels.common.aliases import slug_meant
    from kernels.device import select_device
    from kernels.machine import known_machines
    from sweeps.running.confirming import machine_here

    slug = select_device(request.device, request.gpu).machine.slug
    if machine is not None and slug_meant(machine, [slug, *known_machines()]) != slug:
        raise UserError(
            f"--measure runs on this machine ({slug}), but --machine is {machine}; leave one of "
            "the two options out."
        )
    if slug in recorded_machines(request.results) | known_machines().keys():
        return find_basis(slug, request.results)
    # Nothing is known about this machine before its first measurement.
    model = Model(machine_here(request))
    return Basis(model, kind="none", source="measured now", calibrated=False)


def basis_after(folder: Path, request: Request) -> Basis:
    """Return the basis of answers after measuring; ``folder`` has the new measurements.

    Raises:
        UserError: if these measurements are unusable or cannot be read.
    """
    from analysis.model.basis import find_basis
    from analysis.recordings.runs import health_lines, load_runs

    recording = load_runs(folder)
    if recording.unusable:
        raise UserError(
            f"The new measurements are unusable. {' '.join(health_lines(recording))} Try again "
            "when the machine is idle.",
            exit_code=1,
        )
    return find_basis(recording.machine.slug, request.results)


def measure(trials: Sequence[Trial], request: Request, quickly: bool = False) -> Path:
    """Time all candidates, then re-time the best of each trial; return the recording's folder.

    The request's budget covers the timing of candidates, not the re-timing. If ``quickly`` is True,
    the naming of kernels is left to a later call, because a user is waiting.

    Raises:
        UserError: if the machine cannot be measured or, with ``quickly``, if no case was timed
            within the budget.
        OSError: if a sample file cannot be read.
        KeyboardInterrupt: if the user interrupts the call; measurements taken so far are saved.
    """
    from analysis.advice.measurements import read_measurements
    from analysis.advice.trials import pairs_to_confirm
    from analysis.recordings.load import load, problems_of
    from sweeps.running.confirming import confirm_choices, explore

    try:
        # 1. Time the candidates.
        contenders = [contender for trial in trials for contender in trial.contenders]
        run = explore(request, contenders, note, quickly=quickly)
        recording = load(run.folder)
        rows = recording.products
        timed = rows[rows["sweep"] == CONFIRM]
        candidates = {problem for problem, _ in contenders}
        nothing_timed = candidates.isdisjoint(problems_of(timed))
        if quickly and nothing_timed:
            raise UserError(
                f"No case was timed within {request.budget:,.0f} s. Try again when the machine is "
                "idle.",
                exit_code=1,
            )
        # 2. Re-time the best candidates together with the original shapes.
        explored = read_measurements(timed, recording)
        pairs = list(pairs_to_confirm(trials, explored))
        if pairs:
            confirm_choices(run, pairs, note)
        elif nothing_timed:
            note("No candidate was timed within the budget, so none was re-timed.")
        else:
            note("No candidate was clearly better, so none was re-timed.")
    except KeyboardInterrupt:
        note("Stopped. Measurements are saved. Run the same command to resume.")
        raise
    return run.folder
