"""Begin a new run or resume an old one: choose its device, folder and plan."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import USE_FRESH
from kernels.device import Device, select_device, software
from kernels.machine import Machine
from sweeps.cases.case import CONFIRM, Case
from sweeps.cases.spec import Sweep, all_sweeps
from sweeps.folding.health import UNUSABLE
from sweeps.folding.history import spent_seconds
from sweeps.planning.anchor_plan import anchor_cases, steady_seconds
from sweeps.planning.ceilings import emulated_sentence, with_measured_ceilings
from sweeps.planning.choice import choose_sweeps, is_file, sweep_cases, sweep_name
from sweeps.planning.plan import Costs, PlanEntry, make_plan, read_plan
from sweeps.running.devices import take_part
from sweeps.running.probing import probe
from sweeps.running.request import Request
from sweeps.running.run import Run
from sweeps.schema import SCHEMA
from sweeps.store import (
    Event,
    make_folder,
    planning,
    read_events,
    read_run,
    read_timed,
    refuse_if_running,
    set_aside,
    why_software_differs,
    write_run,
)
from sweeps.timing.sampler import PROTOCOL
from sweeps.timing.telemetry import is_shared

_MIN_ANCHOR_BUDGET = 60.0  # seconds of measuring; with fewer, a run on one GPU has no anchors
_UNLIMITED = 1e9  # seconds; a plan with this budget admits every case

CasesOf = Callable[[Machine], Sequence[Case]]
"""Function that returns a sweep's cases for a machine."""


@dataclass(frozen=True)
class _Opening:
    """Request, device, folder and sweeps of a run that is being opened."""

    request: Request
    device: Device
    folder: Path
    sweeps: Mapping[str, CasesOf]
    for_advice: bool
    """True if the cases of ``sweeps`` are timed for advice."""


def begin(
    request: Request,
    note: Callable[[str], None],
    advice_cases: Mapping[str, CasesOf] | None = None,
) -> Run:
    """Open a run: resume the one in the machine's folder of results, or begin a new one.

    Args:
        request: the options of the run.
        note: called with each sentence for the user.
        advice_cases: functions that return the cases to time for advice, by sweep name; None to
            measure the request's sweeps. If given, these sweeps replace the request's sweeps, and
            all their cases are planned, even if they do not fit the budget, because a candidate
            without the time of its original shape is useless.

    Raises:
        UserError: if a sweep or the device cannot be used, if no case can be planned, if the
            recorded run does not fit the request or the device, or if another process is using the
            run. Also if the recorded plan cannot be read, or if a file cannot be written.
        OSError: if a sample file cannot be read, or a file of an old run cannot be moved.
    """
    sweeps = advice_cases or cases_of(choose_sweeps(request.sweeps), request.dtypes)
    device = select_device(request.device, request.gpu)
    folder = request.results / device.machine.slug
    opening = _Opening(request, device, folder, sweeps, for_advice=bool(advice_cases))
    make_folder(folder / "samples")
    with planning(folder):
        record, reason = _record_to_resume(opening)
        if record is None:
            record = _start_over(opening, reason, note)
        else:
            extended = _extended_record(record, opening)
            if extended is not record:
                record = extended
                write_run(folder, record)
        place = take_part(folder, request, device)
    if opening.for_advice:
        return _run_for_advice(record, opening, place)
    return _run_of_sweeps(record, opening, place)


def _start_over(opening: _Opening, reason: str, note: Callable[[str], None]) -> dict[str, Any]:
    """Plan a new run, write its record, and return the record.

    ``reason`` says why the old run is set aside; it is empty without an old run.
    """
    # The old run stays in place if the new one is refused.
    record = _new_record(opening, note)
    if reason:
        old_run = set_aside(opening.folder)
        note(f"Setting the old run aside: {reason}. The old run is kept in {old_run}.")
        make_folder(opening.folder / "samples")
    write_run(opening.folder, record)
    return record


def _extended_record(record: dict[str, Any], opening: _Opening) -> dict[str, Any]:
    """Return a resumed run's record, extended by what the request adds.

    If the request adds nothing, return ``record`` itself.
    """
    plan, request = record["plan"], opening.request
    if _adds(request, opening.sweeps, plan):
        return _with_sweeps(record, opening)
    if request.measuring and request.measuring > plan["budget_s"]:
        return _with_larger_budget(record, opening, request.measuring)
    if request.leave and not plan.get("left_s"):
        # The budget was planned without time for advice, so that time is added to it.
        return {**record, "plan": {**plan, "left_s": request.advice_seconds(plan["budget_s"])}}
    return record


def _with_sweeps(record: dict[str, Any], opening: _Opening) -> dict[str, Any]:
    """Return the record after adding cases of the sweeps to its plan."""
    request, sweeps = opening.request, opening.sweeps
    if opening.for_advice:
        # Measuring for advice is not part of the plan's budget, which 0.0 leaves unchanged.
        return _with_cases(record, opening, sweeps, _UNLIMITED, 0.0)
    added_seconds = request.measuring_on(opening.device.machine.kind)
    events, _ = read_events(opening.folder)
    # The time for advice, spent or left, is not part of the plan's budget.
    confirming_seconds = _confirming_seconds(record["plan"], events)
    budget = spent_seconds(events) - confirming_seconds + added_seconds
    record = _with_cases(record, opening, sweeps, added_seconds, budget)
    left_seconds = confirming_seconds + request.advice_seconds(added_seconds)
    return {**record, "plan": {**record["plan"], "left_s": left_seconds}}


def _with_larger_budget(record: dict[str, Any], opening: _Opening, budget: float) -> dict[str, Any]:
    """Return the record with a larger budget and further cases of its sweeps."""
    plan = record["plan"]
    # A sweep from a user's file is known only if the request names the file again.
    cases_by_name = {**cases_of(all_sweeps()), **opening.sweeps}
    same_sweeps = {name: cases_by_name[name] for name in plan["sweeps"] if name in cases_by_name}
    added_seconds = budget - plan["budget_s"]
    record = _with_cases(record, opening, same_sweeps, added_seconds, budget)
    return {**record, "plan": {**record["plan"], "left_s": opening.request.advice_seconds(budget)}}


def _run_of_sweeps(record: Mapping[str, Any], opening: _Opening, place: int) -> Run:
    """Return the run of the requested shard."""
    plan, request = record["plan"], opening.request
    all_planned = read_plan(plan)
    planned = all_planned
    if request.names:
        planned = [entry for entry in all_planned if entry.case.sweep in opening.sweeps]
    events, _ = read_events(opening.folder, request.shard)
    # Measuring for advice comes on top of the plan's budget.
    budget = plan["budget_s"] + _confirming_seconds(plan, events)
    run = _run(record, opening, place, planned, request.shard, budget)
    return replace(
        run,
        # Cases for advice do not count, because a shard may end without them.
        whole=len(_without_advice(planned)) == len(_without_advice(all_planned)),
        anchors=[PlanEntry.from_json(row) for row in record.get("anchors", ())],
    )


def _run_for_advice(record: Mapping[str, Any], opening: _Opening, place: int) -> Run:
    """Return the run that times the cases for advice, all of which belong to the first shard."""
    machine = Machine.from_json(record["machine"])
    shard = (1, record["plan"]["shards"])
    advice_ids: set[str] = set()
    for make_cases in opening.sweeps.values():
        advice_ids.update(case.id for case in make_cases(machine))
    all_planned = read_plan(record["plan"])
    planned = [entry for entry in all_planned if entry.case.id in advice_ids]
    events, _ = read_events(opening.folder, shard)
    budget = spent_seconds(events) + opening.request.measuring_on(machine.kind)
    run = _run(record, opening, place, planned, shard, budget)
    # Cases for advice do not count. The run therefore has all cases of the shard if the plan has no
    # others.
    return replace(run, whole=not _without_advice(all_planned))


def _run(
    record: Mapping[str, Any],
    opening: _Opening,
    place: int,
    planned: Sequence[PlanEntry],
    shard: tuple[int, int],
    budget: float,
) -> Run:
    """Return a run of those ``planned`` cases that belong to the shard."""
    plan, device = record["plan"], opening.device
    return Run(
        folder=opening.folder,
        planned=[entry for entry in planned if entry.shard in (None, shard[0])],
        budget=budget,
        arguments={
            "machine": Machine.from_json(record["machine"]),
            "device": device.machine.kind,
            "gpu": device.gpu,
            "number": place,
        },
        shard=shard,
        place=place,
        anchor_options={"seconds": steady_seconds(plan["budget_s"])},
        compile_in_parallel=device.gpu is not None and is_shared(device.gpu),
        names_kernels=device.gpu is not None,
        stop_at=opening.request.stop_at,
    )


def _without_advice(planned: Sequence[PlanEntry]) -> list[PlanEntry]:
    """Return the entries of the cases that are not timed for advice."""
    return [entry for entry in planned if entry.case.sweep != CONFIRM]


def cases_of(sweeps: Mapping[str, Sweep], dtypes: Sequence[str] = ()) -> dict[str, CasesOf]:
    """Return, for each sweep, a function that makes its cases for a machine.

    If ``dtypes`` is not empty, the function makes only cases of these dtypes.
    """
    return {
        name: functools.partial(sweep_cases, sweep, dtypes=dtypes) for name, sweep in sweeps.items()
    }


def left_for_confirming(folder: Path) -> float:
    """Return the seconds that a run still has for timing cases for advice.

    The number is negative if more seconds were spent than were reserved.

    Raises:
        UserError: if the folder has no readable run.
        OSError: if a sample file cannot be read.
    """
    plan = read_run(folder)["plan"]
    reserved_seconds: float = plan.get("left_s", 0.0)
    events, _ = read_events(folder)
    return reserved_seconds - _confirming_seconds(plan, events)


def _confirming_seconds(plan: Mapping[str, Any], events: Sequence[Event]) -> float:
    """Return the seconds that were spent on cases for advice."""
    advice_ids = {row["id"] for row in plan["cases"] if row["sweep"] == CONFIRM}
    return spent_seconds(event for event in events if event["case"] in advice_ids)


def _record_to_resume(opening: _Opening) -> tuple[dict[str, Any] | None, str]:
    """Return the record of the run to resume, and an empty string.

    If no run is resumed, return None and the reason why the caller must set the old run aside. The
    reason is empty if no old run exists.

    Raises:
        UserError: if the old run cannot be read, or the request may neither resume that run nor set
            it aside.
    """
    folder, request = opening.folder, opening.request
    # 1. Find the old run, if there is one.
    has_plan = (folder / "run.json").exists()
    if not has_plan and not any((folder / "samples").glob("*.jsonl")):
        return None, ""
    # A request that sets any run aside must work even if run.json is damaged, so it is not read.
    record = read_run(folder) if has_plan and not request.sets_all_aside else None
    # 2. Resume it, unless there is a reason not to.
    if not has_plan:
        reason = "the folder has samples but no plan"
    elif record is None or request.sets_aside(record):
        reason = "a fresh run was requested"
    else:
        reason = _why_not_resumed(record, opening)
        if not reason:
            read_plan(record["plan"])  # refuses a damaged plan before anything uses it
            if not opening.for_advice:
                _check_same_plan(record["plan"], request, opening.sweeps)
            return record, ""
        # A request with the run's number of shards comes from a node that is to join the run. Other
        # nodes may be measuring it, so this node must not set it aside. A request with another
        # number of shards replaces the run.
        shards = record["plan"].get("shards", 1)
        is_to_join = shards > 1 and shards == request.shard[1]
        if is_to_join:
            raise UserError(
                f"{reason}, so this node cannot join the run in {folder}. Install the run's "
                f"versions on this node, or use {USE_FRESH} to set that run aside and start a new "
                "one.",
                exit_code=1,
            )
    # 3. Otherwise the caller sets it aside, which must not happen while a process writes to it.
    refuse_if_running(folder)
    return None, reason


def _why_not_resumed(record: dict[str, Any], opening: _Opening) -> str:
    """Return why the recorded run must be set aside, or "" if it can be resumed.

    Raises:
        UserError: if the recording was merged from several recordings.
    """
    if "merged" in record:
        raise UserError(
            f"the recording in {opening.folder} was merged from several recordings and cannot be "
            f"resumed. Resume one of these recordings and merge again, or use {USE_FRESH} to set "
            "the merged recording aside and start a new run."
        )
    why_outdated = _why_outdated(record, opening.device)
    if why_outdated:
        return why_outdated
    # An unusable run is measured again, but not by a request that only adds cases. A damaged plan
    # may have no sweeps. The caller refuses it.
    has_new_sweeps = not set(opening.sweeps) <= set(record["plan"].get("sweeps", ()))
    if opening.for_advice or (opening.request.add and has_new_sweeps):
        return ""
    return _why_measured_again(opening.folder, record)


def _why_measured_again(folder: Path, record: Mapping[str, Any]) -> str:
    """Return why the recorded run must be measured again, or "" if it can be resumed.

    An unusable run that was interrupted before it ended is resumed, because more samples may
    improve it. A run with several shards is also resumed, because other nodes may still be
    measuring it.
    """
    health = record.get("health") or {}
    if health.get("verdict") != UNUSABLE or record["plan"].get("shards", 1) > 1:
        return ""
    events, _ = read_events(folder)
    if not any(event["event"] == "end" for event in events):
        return ""
    # The first reason is the worst. A file that another program wrote may have no reasons.
    worst_reason = f" ({health['reasons'][0]})" if health["reasons"] else ""
    return f"the recorded run is unusable{worst_reason}"


def _why_outdated(record: dict[str, Any], device: Device) -> str:
    """Return why the installed software cannot resume the run on this device, or "" if it can."""
    if (record["schema"], record["protocol"]) != (SCHEMA, PROTOCOL):
        return "the timing protocol or the file format has changed since the recorded run"
    return why_software_differs(record["software"], software(device))


def _check_same_plan(plan: dict[str, Any], request: Request, sweeps: Mapping[str, CasesOf]) -> None:
    """Refuse a request that can neither resume the plan nor extend it."""
    shards = plan["shards"]
    adds = _adds(request, sweeps, plan)
    if adds and (shards > 1 or request.shard != (1, 1)):
        raise UserError(
            "the sweeps and dtypes of a run can be changed only if it has one shard and --shard is "
            f"left out; use {USE_FRESH} to set the old run aside and start a new one."
        )
    if request.shard[1] != shards:
        option = "leave --shard out"
        if shards > 1:
            option = f"give --gpus or a shard such as --shard 1/{shards}"
        raise UserError(
            f"the recorded run of this machine was planned for {counted(shards, 'shard')}; "
            f"{option} to resume it, or use {USE_FRESH} to set it aside and start a new one."
        )
    if adds or request.budget is None:
        return
    planned_budget = plan["budget_s"] + plan.get("left_s", 0.0)
    # Rounding may make the sum of the planned parts slightly larger than the budget that was given.
    is_equal = math.isclose(request.budget, planned_budget)
    if request.budget < planned_budget and not is_equal:
        raise UserError(
            f"a budget of {request.budget:,g} s is too small, because the recorded run of this "
            f"machine was planned with {planned_budget:,g} s. Leave the budget out to resume the "
            f"run, or use {USE_FRESH} to set it aside and start a new one."
        )


def refuse_other_sweeps(folder: Path, request: Request, plan: Mapping[str, Any]) -> None:
    """Refuse a request for sweeps other than those of a recorded run's plan.

    Raises:
        UserError: if the request names sweeps, but not exactly those of the plan.
    """
    named = {sweep_name(name) for name in request.sweeps}
    # A damaged plan may have no sweeps. begin() refuses it.
    planned = [name for name in plan.get("sweeps", named) if name != CONFIRM]
    if named and named != {*planned}:
        if plan.get("shards", 1) > 1:
            refusal = "cannot be changed, because the run has several shards"
        else:
            # Only a submission refuses to change a run with one shard. It submits jobs for
            # unfinished shards, so it would submit none for new sweeps of a finished run.
            refusal = "cannot be changed by a submission"
        # A run that only measured for advice has no sweeps to name.
        remedy = f"Name exactly its sweeps ({', '.join(planned)}), or use" if planned else "Use"
        raise UserError(
            f"the sweeps of the run in {folder} {refusal}. {remedy} {USE_FRESH} to set the run "
            "aside and start a new one."
        )


def _adds(request: Request, sweeps: Mapping[str, CasesOf], plan: Mapping[str, Any]) -> bool:
    """Return True if a request adds its sweeps to a plan, with additional budget for them."""
    # The plan may lack cases of these dtypes: emulated dtypes are planned only if requested. The
    # same request must resume a run with several shards, so only dtypes without any case count.
    planned_dtypes = {row["dtype"] for row in plan["cases"]}
    names_dtypes = bool(request.dtypes) and (
        plan["shards"] == 1 or not set(request.dtypes) <= planned_dtypes
    )
    # A request that names only some of the plan's sweeps has its budget only for these.
    names_other_sweeps = bool(request.names) and set(sweeps) != {*plan["sweeps"]} - {CONFIRM}
    has_new_sweeps = not set(sweeps) <= set(plan["sweeps"])
    # A user's file may have changed since it was planned. A run with several shards ignores that.
    has_file = any(map(is_file, request.sweeps)) and plan["shards"] == 1
    return request.add or names_dtypes or names_other_sweeps or has_new_sweeps or has_file


def _with_cases(
    record: dict[str, Any],
    opening: _Opening,
    sweeps: Mapping[str, CasesOf],
    seconds: float,
    budget: float,
) -> dict[str, Any]:
    """Return the record with more cases of the sweeps, as many as fit in ``seconds``.

    The plan's budget is raised to ``budget``, unless it is already larger.
    """
    # 1. Find the cases that the record lacks.
    plan, machine = record["plan"], Machine.from_json(record["machine"])
    request = opening.request
    planned_ids = {row["id"] for row in plan["cases"]}
    begun_sweeps = {row["sweep"] for row in plan["cases"]}
    cases = {name: make_cases(machine) for name, make_cases in sweeps.items()}
    recorded_sweeps = {
        *plan["recorded_elsewhere"],
        *_recorded_sweeps(cases, request, opening.device),
    }
    # A sweep that this run has begun is resumed, even if it was recorded elsewhere in the meantime.
    elsewhere = recorded_sweeps - begun_sweeps
    lacking = {
        name: [case for case in all_cases if case.id not in planned_ids]
        for name, all_cases in cases.items()
        if name not in elsewhere
    }
    # 2. Plan those that fit, and add them to the record.
    added = make_plan(
        lacking,
        machine,
        seconds,
        plan["shards"],
        in_order=request.add,
        together=request.together,
        before=read_plan(plan),
        costs=Costs.from_json(plan.get("costs"), machine.kind),
    )
    # Cases that did not fit before were considered again, so the new counts replace the old ones.
    old_left_out = {name: count for name, count in plan["left_out"].items() if name not in sweeps}
    plan = {
        **plan,
        "budget_s": max(plan["budget_s"], budget),
        "sweeps": sorted({*plan["sweeps"], *sweeps}),
        "recorded_elsewhere": sorted(elsewhere),
        "left_out": {**old_left_out, **added.left_out},
        "cases": [*plan["cases"], *(entry.to_json() for entry in added.planned)],
    }
    return {**record, "plan": plan}


def _new_record(opening: _Opening, note: Callable[[str], None]) -> dict[str, Any]:
    """Plan a new run and return its record. On a CPU, measure ceilings and costs first."""
    request, device, sweeps = opening.request, opening.device, opening.sweeps
    # 1. Measure the ceilings of a CPU. Those of a GPU are known.
    if device.gpu is None:
        note(f"Measuring the ceilings of {device.machine.name} …")
        device = with_measured_ceilings(device)
        sentence = emulated_sentence(device.machine)
        if sentence:
            note(sentence)
    # 2. Find the cases that are not recorded elsewhere, and refuse a request that has none.
    machine = device.machine
    all_cases = {name: make_cases(machine) for name, make_cases in sweeps.items()}
    elsewhere = _recorded_sweeps(all_cases, request, device)
    cases = {
        name: cases_of_sweep for name, cases_of_sweep in all_cases.items() if name not in elsewhere
    }
    if elsewhere and not any(cases.values()):
        raise UserError(
            "Every requested sweep that has cases on this machine is already recorded.",
            exit_code=0,
        )
    if not any(cases.values()):
        has = "has" if len(sweeps) == 1 else "have"
        others = "sweeps or dtypes" if request.dtypes else "sweeps"
        raise UserError(
            f"{', '.join(sweeps)} {has} no cases for this {machine.kind.upper()} ({machine.name}); "
            f"name other {others}."
        )
    # 3. Plan these cases, and refuse a budget that none of them fits.
    budget = request.measuring_on(machine.kind)
    costs = probe(cases, machine) if device.gpu is None else Costs.default(machine.kind)
    plan = make_plan(
        cases,
        machine,
        _UNLIMITED if opening.for_advice else budget,
        request.shard[1],
        in_order=request.add,
        together=request.together,
        costs=costs,
    )
    if not plan.planned:
        # The user's budget includes the seconds that are kept for advice.
        whole_budget = budget + request.advice_seconds(budget)
        raise UserError(
            f"no case of {', '.join(sweeps)} fits a budget of {whole_budget:,g} s; use a larger "
            "--budget."
        )
    # 4. Return the record.
    return {
        "schema": SCHEMA,
        "protocol": PROTOCOL,
        "published": False,
        "run": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.to_json(),
        "software": software(device),
        "anchors": _anchors(machine, budget, request.shard[1]),
        "plan": {
            "budget_s": budget,
            "left_s": request.advice_seconds(budget),
            "shards": request.shard[1],
            "sweeps": sorted(sweeps),
            "left_out": dict(plan.left_out),
            "recorded_elsewhere": elsewhere,
            "costs": costs.to_json(),
            "cases": [entry.to_json() for entry in plan.planned],
        },
    }


def _anchors(machine: Machine, budget: float, shards: int) -> list[dict[str, Any]]:
    """Return the plan entries of the anchors: the cases that each place of a run measures first.

    A place is a GPU or, in a run on CPUs, a node. A run with one shard has no anchors if it is
    short or measures a CPU.
    """
    if shards == 1 and (machine.kind == "cpu" or budget < _MIN_ANCHOR_BUDGET):
        return []
    return [entry.to_json() for entry in anchor_cases(machine)]


def _recorded_sweeps(
    cases: Mapping[str, Sequence[Case]], request: Request, device: Device
) -> list[str]:
    """Return the sweeps that are complete in ``request.skip_recorded`` and need not be measured."""
    results = request.skip_recorded
    if results is None:
        return []
    folder = results / device.machine.slug
    if not (folder / "run.json").exists():
        return []
    record = read_run(folder, "Restore this file, or leave out --skip-recorded.")
    unusable = (record.get("health") or {}).get("verdict") == UNUSABLE
    if unusable or _why_outdated(record, device):
        return []
    timed_ids = read_timed(folder)
    incomplete = {
        sweep
        for sweep, cases_of_sweep in cases.items()
        if any(case.id not in timed_ids for case in cases_of_sweep)
    }
    # The sweeps of a group are compared within one recording. If one of them is incomplete, all of
    # them are measured here.
    needed = set(incomplete)
    for names in request.groups:
        group = {sweep_name(name) for name in names}
        if incomplete & group:
            needed |= group
    # A sweep without cases on this machine does not count as recorded.
    return [sweep for sweep in cases if cases[sweep] and sweep not in needed]
