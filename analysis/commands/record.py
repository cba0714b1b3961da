"""``record``: record everything about a machine, by running other commands."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.commands.app import ResultsOption, app
from kernels.cli import DeviceOption, GpuOption, note, parse_seconds
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import FOLDER, RESULTS, command_words
from kernels.common.program import command as command_line
from kernels.machine import known_machine
from sweeps.process import terminated_as_interrupt

if TYPE_CHECKING:
    from analysis.recorder.parts import RecorderPart
    from analysis.recorder.recorder import RecorderPlace

INTERPRETER = [sys.executable]
"""Python interpreter that runs the project's commands in new processes."""

# Default budget in seconds, by kind of machine.
_BUDGET = {"gpu": 3000.0, "cpu": 300.0}

# Smallest budget in seconds, which is about the time that starting the first command takes.
_MIN_BUDGET = 30.0


@app.command("record")
def record_command(
    budget: Annotated[
        str | None,
        typer.Option(
            help=(
                "Time budget for this run of the command, such as 20m [default: 50m on a GPU, 5m "
                "on a CPU]."
            )
        ),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help=(
                "Name of a part to record, as listed by --plan; repeatable [default: all parts]."
            ),
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help=("Show the parts and their expected times, and record nothing.")
        ),
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine", help="Slug of the GPU to plan for; needs --plan [default: this machine]."
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            "--cores",
            min=1,
            help="Number of CPU cores in the GPU's host; needs --machine [default: unknown].",
        ),
    ] = None,
    device: DeviceOption = "auto",
    gpu: GpuOption = 0,
    results: ResultsOption = RESULTS,
) -> None:
    """Record everything about this machine, most valuable parts first.

    Run the same command again at any time to resume.
    """
    # The budget counts from here, because the imports below take time, too.
    began = time.monotonic()
    from analysis.recorder.parts import all_parts
    from analysis.recorder.recorder import Recorder, run_command, select_parts

    # 1. Check the options. A plan for another machine does not need this machine's device.
    results = results.resolve()  # absolute, because the commands run in another folder
    parts = select_parts(all_parts(), part or [])
    device_options = ["--device", device, "--gpu", str(gpu)]
    if not plan and (machine is not None or cores is not None):
        raise UserError(
            "--machine and --cores need --plan, because only this machine can be recorded; add "
            "--plan, or leave them out."
        )
    if cores is not None and machine is None:
        raise UserError(
            "--cores needs --machine; leave --cores out, because this machine's cores are known."
        )
    if machine is not None:
        if budget is not None:
            raise UserError(
                "a plan for another machine does not depend on a budget; leave --budget or "
                "--machine out."
            )
        note("Counting the cases and estimating their times …")
        print("\n".join(plan_lines(parts, machine, cores)))
        return
    given_seconds = parse_seconds(budget)  # before slow steps, so that a typo is reported at once
    # 2. Find the machine, and what is already recorded about it.
    place = find_place(results, device_options)
    seconds = given_seconds or _BUDGET[place.kind]
    if seconds < _MIN_BUDGET:
        raise UserError(
            f"--budget is {seconds:g} s, but starting the first command takes about "
            f"{_MIN_BUDGET:g} s; give a larger budget."
        )
    run = partial(run_command, INTERPRETER)
    recorder = Recorder(place, parts, seconds, device_options, note, run, began=began)
    if plan:
        print("\n".join(recorder.plan()))
        return
    # 3. Record, and say what is missing.
    note(f"Recording {place.name} into {place.folder}, with a budget of {seconds:,.0f} s:")
    for line in recorder.plan():
        note(f"  {line}")
    with terminated_as_interrupt():
        archive = recorder.record()
    for sentence in recorder.missing():
        note(f"  missing: {sentence}")
    if recorder.can_resume():
        note("Run the same command to resume.")
    print(archive)


def find_place(results: Path, device_options: Sequence[str]) -> RecorderPlace:
    """Ask ``sweeps doctor`` for this machine's name, kind, software and folder.

    The command runs in another process, because this process must not import PyTorch. ``results``
    has to be absolute, because the command may run in another folder.

    Raises:
        UserError: if the command fails, for example because the device cannot be used.
    """
    from analysis.recorder.recorder import RecorderPlace

    command = ["sweeps", "doctor", "--name", "--json", "--results", str(results)]
    facts = _ask_json([*command, *device_options])
    return RecorderPlace(
        slug=facts["slug"],
        name=facts["name"],
        kind=facts["kind"],
        folder=Path(facts["folder"]),
        results=results,
        software=facts["software"],
    )


def plan_lines(parts: Sequence[RecorderPart], machine: str, cores: int | None) -> list[str]:
    """Return the plan of a GPU's recording: one line for each part, each step and the total.

    ``machine`` is the GPU's slug, or an unambiguous part of it. ``cores`` is the number of CPU
    cores of the GPU's host, or None if it is unknown.

    Raises:
        UserError: if ``machine`` fits no GPU or more than one, or if the cases cannot be planned.
    """
    from analysis.recorder.recorder import part_seconds, total_line

    # Some parts have no sweep, so planning their sweeps would not show that a GPU is not known.
    known_machine(machine)
    # 1. Plan each sweep once, although several steps may run the same sweep. A budget of a day is
    #    enough for every case of every sweep.
    steps = [step for part in parts for step in part.steps]
    sweeps = list(dict.fromkeys(name for step in steps for name in step.sweeps))
    command = ["sweeps", "show", "--plan", *sweeps, "--json"]
    command += ["--machine", machine, "--budget", "24h"]
    if cores is not None:
        command += ["--cores", str(cores)]
    plan_of_sweep: dict[str, Any] = {}
    if sweeps:
        plan_of_sweep = {row["name"]: row for row in _ask_json(command)}
    # 2. Write a line for each part and for each of its steps.
    lines = []
    width = max((len(step.name) for step in steps), default=0)
    for part in parts:
        lines.append(f"{part.name}: {part_seconds(part, 'gpu'):,.0f} s; {part.purpose}")
        for step in part.steps:
            line = f"  {step.name:{width}} {step.expected('gpu'):5,.0f} s"
            if step.sweeps:
                plans = [plan_of_sweep[name] for name in dict.fromkeys(step.sweeps)]
                cases = sum(plan["cases"] for plan in plans)
                needed_s = sum(plan["expected_s"] for plan in plans)
                line += f" for {counted(cases, 'case')} ({needed_s:,.0f} s at six samples each)"
            lines.append(line)
    return [*lines, total_line(parts, "gpu")]


def _ask_json(command: Sequence[str]) -> Any:
    """Run a command in a new process, and return the JSON value that it prints."""
    finished = subprocess.run(
        [*INTERPRETER, *command_words(command)],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        lines = finished.stderr.strip().splitlines()
        if not lines:
            raise UserError(
                f"{command_line(' '.join(command))} failed without an error message; run it by "
                "itself to see why.",
                finished.returncode,
            )
        raise UserError(lines[-1], finished.returncode)  # notes may come before the error
    return json_module.loads(finished.stdout)
