"""Commands that inspect, run and submit sweeps, merge recordings, profile models, and check the
machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernels.cli import (
    DeviceOption,
    GpuOption,
    GpusOption,
    JsonOption,
    new_app,
    note,
    parse_seconds,
    print_json,
    run,
)
from kernels.common.checks import check_option
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, command, same_command
from kernels.problem import TIMED_DTYPES
from sweeps.cases.spec import all_sweeps, broken_sweeps
from sweeps.submitting.command import submit_command

if TYPE_CHECKING:
    from kernels.device import Device
    from kernels.machine import Machine
    from sweeps.running.request import Request

app = new_app("Run and inspect sweeps.")
app.command("submit")(submit_command)

_AGAIN_CASES = 8  # default number of cases that `doctor --again` re-times
_CLOCK_CASES = 60  # default number of cases that `doctor --clock` times
_UNLIMITED_SECONDS = 1e9  # budget that has room for every case

ResultsOption = Annotated[
    Path, typer.Option("--results", help="Folder with the results of all machines.")
]


@app.command("show")
def show_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "Sweep whose cases to show [default: list all sweeps]. With --plan: sweeps to plan "
                "[default: the default sweeps]."
            )
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Show how many cases of each sweep fit the budget, and the time that they take.",
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Measuring time to plan for, such as 90s, 10m or 2h [default: 10m; 2m on a CPU]."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            help="GPU in machines.toml whose cases or plan to show [default: this machine].",
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            "--cores",
            min=1,
            help=(
                "Number of CPU cores that the planned run may use, mostly for compiling "
                "[default: all]."
            ),
        ),
    ] = None,
    device: DeviceOption = "auto",
    gpu: GpuOption = 0,
    json: JsonOption = False,
) -> None:
    """List the sweeps, show the cases of one sweep, or count the cases that fit a budget.

    ``--device`` and ``--gpu`` are ignored with ``--machine`` and for the list of sweeps.
    """
    from kernels.machine import known_machine
    from sweeps.planning.ceilings import measured_device

    sweep_names = names or []
    if not plan and len(sweep_names) > 1:
        raise UserError("without --plan, only one sweep can be shown; name one, or add --plan.")
    if not plan and (budget or cores):
        raise UserError("--budget and --cores work only with --plan; add --plan.")
    if not plan and not sweep_names and machine:
        raise UserError("--machine needs a sweep or --plan; name a sweep, or add --plan.")
    if not plan and not sweep_names:
        _list_sweeps(json)
        return
    selected = known_machine(machine) if machine else measured_device(device, gpu).machine
    if plan:
        _show_plan(sweep_names, selected, budget, cores, json)
    else:
        _show_cases(sweep_names[0], selected, json)


def _list_sweeps(json: bool) -> None:
    """Print each sweep with the question that it answers, and warn about invalid sweep files."""
    sweeps = all_sweeps().values()
    note_broken()
    if json:
        print_json(
            [
                {"name": sweep.name, "question": sweep.question, "default": sweep.default}
                for sweep in sweeps
            ]
        )
        return
    width = max(len(sweep.name) for sweep in sweeps)
    for sweep in sweeps:
        print(f"{sweep.name:{width}} {sweep.question}")


def _show_cases(name: str, machine: Machine, json: bool) -> None:
    """Print a sweep's cases with their expected launch times, and the time to measure all cases."""
    from sweeps.planning.choice import choose_sweeps, sweep_cases
    from sweeps.planning.plan import expected_seconds, make_plan, planned_seconds

    (sweep,) = choose_sweeps([name]).values()  # one name selects exactly one sweep
    cases = sweep_cases(sweep, machine)
    launch_seconds = expected_seconds([case.problem for case in cases], machine)
    plan = make_plan({sweep.name: cases}, machine, _UNLIMITED_SECONDS)
    total_seconds = planned_seconds(plan.planned)
    if json:
        rows: list[dict[str, Any]] = [
            {**case.columns(), "bytes": case.problem.bytes, "expected_us": seconds * 1e6}
            for case, seconds in zip(cases, launch_seconds, strict=True)
        ]
        print_json(
            {
                "name": sweep.name,
                "question": sweep.question,
                "expected_s": total_seconds,
                "cases": rows,
            }
        )
        return
    print(sweep.question)
    for case, seconds in zip(cases, launch_seconds, strict=True):
        print(f"  {case!s:64} {case.problem.bytes / 1e6:10,.2f} MB {seconds * 1e6:12,.1f} µs")
    print(
        f"Measuring {counted(len(cases), 'case')} on {machine.name} takes about "
        f"{total_seconds:,.0f} s."
    )


def _show_plan(
    names: Sequence[str], machine: Machine, budget: str | None, cores: int | None, json: bool
) -> None:
    """Print how many cases of each sweep fit the budget, and their expected measuring time."""
    from sweeps.planning.choice import plan_rows
    from sweeps.running.request import DEFAULT_BUDGET

    budget_seconds = parse_seconds(budget) or DEFAULT_BUDGET[machine.kind]
    rows, total_seconds = plan_rows(names, machine, budget_seconds, cores)
    if json:
        print_json(rows)
        return
    for row in rows:
        noun = "case, " if row["cases"] == 1 else "cases,"  # equally long, to align the columns
        print(
            f"{row['name']:20} {row['cases']:5,} {noun} {row['planned']:5,} in the plan, "
            f"about {row['expected_s']:6,.0f} s"
        )
    checking_seconds = sum(row["checking_s"] for row in rows)
    share_text = ""
    if total_seconds:
        share_text = f", including {checking_seconds / total_seconds:.1%} for checking results"
    print(f"{total_seconds:,.0f} s in total at six samples per case{share_text}.")


@app.command("doctor")
def doctor_command(
    name_only: Annotated[
        bool, typer.Option("--name", help="Print only this machine's name and results folder.")
    ] = False,
    clock: Annotated[
        bool,
        typer.Option(
            "--clock",
            help=(
                "Compare the sampler with Triton's do_bench or, on a CPU, with PyTorch's "
                "blocked_autorange, and write clock.json."
            ),
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Re-time recorded cases to see whether the machine's speed has changed."
        ),
    ] = False,
    cases: Annotated[
        int | None,
        typer.Option(
            "--cases",
            min=1,
            help=(
                f"Number of cases to time with --again [default: {_AGAIN_CASES}] or with --clock "
                f"[default: {_CLOCK_CASES}; all 11 on a CPU]."
            ),
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 1 if there is a warning.")
    ] = False,
    device: DeviceOption = "auto",
    gpu: GpuOption = 0,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Describe this machine and what may spoil its timings. No setting is changed."""
    from kernels.device import select_device
    from sweeps.doctor.doctor import examine

    if [name_only, clock, again].count(True) > 1:
        raise UserError("give only one of --name, --clock and --again.")
    if cases and not (clock or again):
        raise UserError("--cases works only with --again or --clock; add one of them.")
    if strict and (name_only or clock or again):
        raise UserError("--strict works only without --name, --clock and --again; leave it out.")
    if clock:
        _check_clock(cases or _CLOCK_CASES, device, gpu, results, json)
        return
    selected = select_device(device, gpu)
    if name_only:
        _name_machine(selected, results, json)
        return
    if again:
        _recheck(selected, cases or _AGAIN_CASES, results, json)
        return
    findings = examine(selected, results)
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{'warning: ' if finding.warning else ''}{finding.text}")
    if strict and any(finding.warning for finding in findings):
        raise typer.Exit(1)


def _name_machine(selected: Device, results: Path, json: bool) -> None:
    from kernels.device import software

    machine = selected.machine
    folder = results / machine.slug
    if json:
        print_json(
            {
                "slug": machine.slug,
                "name": machine.name,
                "kind": machine.kind,
                "gpu": selected.gpu,
                "folder": str(folder),
                "software": software(selected),
            }
        )
        return
    print(f"{machine.name} ({machine.slug}): {folder}")


def _check_clock(cases: int, device: str, gpu: int, results: Path, json: bool) -> None:
    """Compare the sampler with a standard timer, write clock.json, and print the comparison."""
    from sweeps.doctor.clock_check import check_clock
    from sweeps.planning.ceilings import measured_device
    from sweeps.store import make_folder, write_json

    selected = measured_device(device, gpu)
    folder = results / selected.machine.slug
    make_folder(folder)
    report = check_clock(selected, cases, note)
    write_json(folder / "clock.json", report)
    if json:
        print_json(report)
        return
    for name, timer in report["timers"].items():
        print(
            f"{name:18} {timer['seconds_per_case'] * 1e3:8.1f} ms per case; the median difference "
            f"between its passes is {timer['passes_differ']:.2%}, and the median ratio of its "
            f"times to the sampler's is {timer['over_sampler']:.3f}"
        )


def _recheck(selected: Device, cases: int, results: Path, json: bool) -> None:
    from sweeps.doctor.recheck import time_again

    report = time_again(selected, results / selected.machine.slug, cases)
    if json:
        print_json(report)
        return
    print(report["sentence"])


@app.command("run")
def run_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "Names of sweeps or paths of sweep files; a,b measures sweeps a and b on the same "
                "GPU [default: the default sweeps]."
            )
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Measuring time of the run, such as 90s, 10m or 2h [default: 10m; 2m on a CPU]."
        ),
    ] = None,
    results: ResultsOption = RESULTS,
    shard: Annotated[
        str,
        typer.Option(
            help=(
                "Shard to measure: I/N, with I from 1 to N. With --gpus, I is the number of this "
                "node, and N the number of nodes."
            )
        ),
    ] = "1/1",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set an old run aside and start a new one.")
    ] = False,
    device: DeviceOption = "auto",
    gpu: Annotated[
        int | None,
        typer.Option(
            "--gpu",
            help="Number of the GPU to use, counted from 0 [default: 0].",
            show_default=False,
        ),
    ] = None,
    gpus: GpusOption = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            help=(
                "Dtype to measure, even if emulated; repeatable [default: the dtypes that each "
                "sweep selects]."
            ),
        ),
    ] = None,
    skip_recorded: Annotated[
        Path | None,
        typer.Option(
            "--skip-recorded", help="Results folder whose complete sweeps are not measured again."
        ),
    ] = None,
    add: Annotated[
        bool,
        typer.Option(
            "--add", help="Add the named sweeps to the existing recording; measure only these."
        ),
    ] = False,
    leave: Annotated[
        float,
        typer.Option(
            "--leave",
            min=0.0,
            max=0.9,
            help="Share of the budget reserved for confirming advice.",
        ),
    ] = 0.0,
    stop_after: Annotated[
        str | None,
        typer.Option(
            "--stop-after",
            help=(
                "Time after which this command stops, such as 30m [default: none]. Run the same "
                "command without --fresh to resume."
            ),
        ),
    ] = None,
    gpu_ids: Annotated[
        bool,
        typer.Option(
            "--gpu-ids/--no-gpu-ids", help="Record in run.json a hash that identifies each GPU."
        ),
    ] = True,
    json: JsonOption = False,
) -> None:
    """Measure cases. An earlier run of the same plan is resumed where it stopped."""
    # --stop-after counts from here, because the imports below take seconds.
    began = time.monotonic()
    from sweeps.folding.counts import counts_sentence
    from sweeps.folding.health import health_sentence
    from sweeps.running.request import Request
    from sweeps.store import read_run

    # 1. Check the options.
    if gpus and gpu is not None:
        raise UserError("--gpu and --gpus cannot be combined; give only one of them.")
    if gpus and add:
        raise UserError(
            "--add works only on one GPU; leave out --gpus, or leave out --add and start a new run "
            "of all the sweeps that you need."
        )
    if add and not names:
        raise UserError("--add needs at least one sweep; give the names of the sweeps to add.")
    stop_after_seconds = parse_seconds(stop_after, "stop-after")
    stop_at = None if stop_after_seconds is None else began + stop_after_seconds
    for dtype_name in dtype or ():
        check_option("--dtype", dtype_name, TIMED_DTYPES)
    request = Request(
        names=tuple(names or ()),
        budget=parse_seconds(budget),
        results=results,
        shard=parse_shard(shard),
        fresh=fresh,
        device=device,
        gpu=gpu or 0,
        dtypes=tuple(dtype or ()),
        skip_recorded=skip_recorded,
        add=add,
        stop_at=stop_at,
        leave=leave,
        identify=gpu_ids,
    )
    # 2. Plan or resume the run, and measure.
    note_broken()
    folder = _measure(request, gpus)
    # 3. Report the outcome.
    record = read_run(folder)
    note(counts_sentence(record))
    note(health_sentence(record))
    # A call that --stop-after ended early may have measured nothing yet.
    was_stopped = stop_at is not None and time.monotonic() >= stop_at
    if not record["counts"]["measured"] and not was_stopped:
        raise UserError(
            f"No case could be timed. {folder / 'measurements.csv'} gives the reasons; "
            f"{command('sweeps doctor')} may show more.",
            exit_code=1,
        )
    note(f"Results are in {folder}")
    if json:
        summary = {name: record[name] for name in ("run", "counts", "spent_s", "health")}
        print_json({"machine": record["machine"]["slug"], "folder": str(folder), **summary})


def _measure(request: Request, gpus: str | None) -> Path:
    """Begin or resume a run, measure its cases, and return its folder.

    ``gpus`` selects devices as in :func:`sweeps.sharing.gpus.choose_gpus`; None selects only the
    device of the request. If the user interrupts the run, print the command that resumes it.
    """
    from kernels.device import select_device
    from sweeps.progress import LiveReporter
    from sweeps.running.opening import begin
    from sweeps.running.supervisor import carry_out
    from sweeps.sharing.gpus import choose_gpus
    from sweeps.sharing.node import share

    folders: list[Path] = []  # the folder of the run, once the run has begun
    try:
        with LiveReporter() as live:
            if gpus:
                devices = choose_gpus(gpus, request.device)
                # All GPUs of a run are of one model, so one of them is examined for all.
                _print_warnings(next(iter(devices.values())), request.results)
                share(request, devices, request.shard, live, note, folders.append)
            else:
                device = select_device(request.device, request.gpu)
                run = begin(request, note)
                folders.append(run.folder)
                _print_warnings(device, request.results)
                carry_out(run, live, note)
    except KeyboardInterrupt:
        # Until a run has begun, the old one is not set aside, so --fresh is still needed.
        next_command = same_command(request.fresh and bool(folders))
        if folders:
            note(f"Stopped. Measurements are saved. Run {next_command} to resume.")
        else:
            note(f"Stopped before this command timed a case. Run {next_command} again.")
        raise
    return folders[-1]


def _print_warnings(device: Device, results: Path) -> None:
    """Print what may disturb measurements on a device."""
    from sweeps.doctor.doctor import examine

    for finding in examine(device, results):
        if finding.warning:
            note(f"warning: {finding.text}")


@app.command("merge")
def merge_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders of the recordings to merge.")],
    into: Annotated[
        Path | None,
        typer.Option(
            "--into", help="Folder to create [default: merged/<machine> in the results folder]."
        ),
    ] = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Merge recordings of one machine, from several nodes or several days, into one recording."""
    from sweeps.folding.counts import counts_sentence
    from sweeps.folding.health import health_sentence
    from sweeps.merging.merge import merge

    merged = merge(folders, into, results)
    folder, record = merged.folder, merged.record
    if merged.repeated:
        note(
            f"Cases timed in several recordings: {len(merged.repeated):,}. For each of them, the "
            "merged table has the time from the recording with the most samples, or no time if a "
            "recording has a wrong result. To see whether the times agree, compare two recordings "
            "at a time: "
            f"{command(f'analysis compare {folders[0]} {folders[1]}')}"
        )
    note(counts_sentence(record))
    note(health_sentence(record))
    report_command = command(f"analysis report --machine {folder.name} --results {folder.parent}")
    note(f"The merged recording is in {folder}. For plots and advice, run: {report_command}")
    if json:
        summary = {name: record[name] for name in ("run", "counts", "spent_s", "health")}
        summary |= {"machine": record["machine"]["slug"], "folder": str(folder)}
        print_json({**summary, "repeated": len(merged.repeated)})


@app.command("profile")
def profile_command(
    results: ResultsOption = RESULTS,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Profile again, even if current profiles exist.")
    ] = False,
    device: DeviceOption = "auto",
    gpu: GpuOption = 0,
) -> None:
    """Profile a training step of ResNet-50 and of a GPT-2 block, unless current profiles exist."""
    from kernels.device import select_device
    from sweeps.profiling.profile import TRACES, is_profiled, profile_models, write_models
    from sweeps.store import make_folder

    selected = select_device(device, gpu)
    folder = results / selected.machine.slug
    if is_profiled(folder, selected) and not fresh:
        note(f"The profiles in {folder} are current; use --fresh to profile the models again.")
        return
    make_folder(folder)
    path = write_models(folder, profile_models(selected, folder, note))
    note(f"The step times are in {path}. The traces are in {folder / TRACES}.")


def note_broken() -> None:
    """Print a warning about each invalid file in ``sweeps/specs``."""
    for error in broken_sweeps().values():
        note(f"warning: {error} Other sweeps are not affected.")


def parse_shard(text: str) -> tuple[int, int]:
    """Parse ``2/4`` into the number of a shard and the number of shards.

    Raises:
        UserError: if the text does not name a shard.
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is not None:
        number = int(match.group(1))
        count = int(match.group(2))
        if 1 <= number <= count:
            return number, count
    raise UserError(f"--shard takes I/N with I from 1 to N, such as 1/2, not {text!r}.")


if __name__ == "__main__":
    run(app, f"python -m {__package__}")
