"""``compare``: compare two versions, or hand-written kernels with the vendor library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.commands.app import (
    ResultsOption,
    app,
    load_machine,
    recording_at,
)
from analysis.words import share_of
from kernels.cli import JsonOption, note, print_json
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import RESULTS

if TYPE_CHECKING:
    from analysis.comparing.changes import CaseChanges
    from analysis.imports.benchmarks import NamePattern
    from analysis.recordings.case_times import TimedProcess


@app.command("compare")
def compare_command(
    old: Annotated[
        str | None,
        typer.Argument(
            help=(
                "Earlier results: a machine's slug, the folder of a recording, a benchmark's JSON "
                "file, or a folder with several recordings or files."
            )
        ),
    ] = None,
    new: Annotated[
        str | None, typer.Argument(help="Later results, in any form that OLD can have.")
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help=(
                "Compare hand-written kernels with the vendor library, using the recording OLD "
                "[default: the recording of the machine measured last]."
            ),
        ),
    ] = False,
    gate: Annotated[
        str | None,
        typer.Option(
            "--gate",
            help=(
                "Smallest slowdown that makes a case fail, such as 3%. The answer is pass (exit "
                "code 0), fail (1) or cannot tell (3). Slower cases fail only if OLD and NEW are "
                "both folders with three or more results."
            ),
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            help=(
                "Pattern of the problem in case names, such as 'm{m}_n{n}_k{k}_{dtype}'. Cases "
                "are then matched by problem."
            ),
        ),
    ] = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Compare the results of two versions.

    The exit code is 1 if any case is slower or lost. A lost case has a time in OLD, but failed or
    was skipped in NEW. With --gate, the gate's answer sets the exit code. With --kernels, the exit
    code is 0.
    """
    if kernels:
        if new is not None or gate is not None or pattern is not None:
            raise UserError(
                "--kernels cannot be combined with a second result, --gate or --pattern; leave "
                "them out."
            )
        _compare_kernels(old, results, json)
        return
    if old is None or new is None:
        raise UserError(
            "compare needs two results; give OLD and NEW, or one recording with --kernels."
        )
    has_named_cases = _has_named_cases(old) or _has_named_cases(new)
    if gate is None and pattern is None and not has_named_cases:
        _compare_recordings(old, new, results, json)
        return
    _compare_by_name(old, new, gate, pattern, results, json)


def _has_named_cases(place: str) -> bool:
    """Return True if results have to be compared by the names of their cases."""
    path = Path(place)
    return path.is_file() or (path.is_dir() and not (path / "run.json").exists())


def _compare_recordings(old: str, new: str, results: Path, json: bool) -> None:
    from analysis.comparing.compare import compare, comparison_json, comparison_text

    comparison = compare(recording_at(old, results), recording_at(new, results))
    if json:
        print_json(comparison_json(comparison))
    else:
        print(comparison_text(comparison))
    if comparison.counts()["slower"] or len(comparison.lost):
        raise typer.Exit(1)


def _compare_by_name(
    old: str, new: str, gate: str | None, pattern: str | None, results: Path, json: bool
) -> None:
    """Compare cases by name, and print the comparison or, with ``gate``, the gate's answer."""
    from analysis.comparing.by_name import compare_by_name, named_json, named_text
    from analysis.comparing.gate import EXIT_CODES, gate_json, gate_text, judge_changes

    threshold = None if gate is None else share_of(gate, "gate")
    if threshold == 0:
        raise UserError("--gate is 0; give a slowdown above 0, such as 3%.")
    changes, lost = _read_changes(old, new, pattern, results)
    if threshold is None:
        comparison = compare_by_name(changes, lost)
        if json:
            print_json(named_json(comparison))
        else:
            print(named_text(comparison))
        if comparison.counts()["slower"] or lost:
            raise typer.Exit(1)
        return
    answer = judge_changes(changes, threshold, lost)
    if json:
        print_json(gate_json(answer))
    else:
        print(gate_text(answer))
    exit_code = EXIT_CODES[answer.verdict]
    if exit_code != 0:
        raise typer.Exit(exit_code)


def _read_changes(
    old: str, new: str, pattern: str | None, results: Path
) -> tuple[CaseChanges, dict[str, str]]:
    """Read the old and the new results, and estimate how each common case changed.

    Returns:
        The changes, and the reason why each lost case has no new time, by the case's name. A case
        is lost if it has a time in the old results but none in the new ones, and the new results
        state the reason.
    """
    from analysis.comparing.changes import common_names, estimate_changes
    from analysis.imports.benchmarks import NamePattern

    # 1. Read the results, and check that they come from one machine. If no result is a recording,
    # different machines are not an error.
    name_pattern = None if pattern is None else NamePattern.parse(pattern)
    old_processes = _read_processes(old, name_pattern, results)
    new_processes = _read_processes(new, name_pattern, results)
    processes = [*old_processes, *new_processes]
    machines = dict.fromkeys(
        process.facts["machine"] for process in processes if process.facts.get("machine")
    )
    if len(machines) > 1:
        # Only the facts of a recording name a run.
        if any("run" in process.facts for process in processes):
            raise UserError(
                f"the results come from different machines ({', '.join(machines)}); give results "
                "of one machine."
            )
        note(
            f"The results name different machines: {', '.join(machines)}. Check that the times can "
            "be compared."
        )
    # 2. Find the cases that all results have, and those that are no longer timed.
    shared = common_names(processes)
    old_names = {name for process in old_processes for name in process.cases}
    new_names = {name for process in new_processes for name in process.cases}
    untimed = old_names - new_names
    lost: dict[str, str] = {}
    for process in new_processes:
        lost |= {name: reason for name, reason in process.lost.items() if name in untimed}
    if not shared:
        raise _no_common_case(old, new, old_processes, new_processes)
    left_out = len((old_names | new_names) - set(shared) - set(lost))
    if left_out:
        cases_are = counted(left_out, "case that is", "cases that are")
        note(f"Left out: {cases_are} not timed in every result.")
    # 3. Estimate the changes.
    changes = estimate_changes(old_processes, new_processes)
    if (changes.old == changes.new).all():
        note(
            "Every common case has exactly the same time in the old and the new results. Check "
            "that NEW is not a copy of OLD."
        )
    return changes, lost


def _no_common_case(
    old: str,
    new: str,
    old_processes: Sequence[TimedProcess],
    new_processes: Sequence[TimedProcess],
) -> UserError:
    """Return the error to raise if no case has a time in every result."""
    old_names = {name for process in old_processes for name in process.cases}
    new_names = {name for process in new_processes for name in process.cases}
    for place, names in ((old, old_names), (new, new_names)):
        if not names:
            return UserError(
                f"{place} has no case with a time. Run its sweeps or benchmarks again."
            )
    # The first name in alphabetical order is an example that is always the same.
    common = old_names & new_names
    if common:  # with several results of a version
        example = min(common)
        processes = [*old_processes, *new_processes]
        lacking = next(process.name for process in processes if example not in process.cases)
        return UserError(
            f"no case has a time in every result: for example, {lacking} has no time for "
            f"{example!r}. Leave {lacking} out, or measure the same cases for every result."
        )
    return UserError(
        f"{old} and {new} have no timed case in common: for example, {old} has "
        f"{min(old_names)!r}, and {new} has {min(new_names)!r}. Compare results of the same "
        "cases, or give a --pattern that matches the cases of both results."
    )


def _read_processes(place: str, pattern: NamePattern | None, results: Path) -> list[TimedProcess]:
    """Read the results at one place, and treat the times of each result as those of one process.

    With a ``pattern``, cases are named after their problems. A recording states the problem of each
    case; in other results, the pattern finds the problem in the case's name.
    """
    from analysis.imports.benchmarks import benchmark_files, named_by_problem, read_benchmarks
    from analysis.recordings.named_cases import lost_by_problem, timed_process

    path = Path(place)
    if path.is_file():
        return [read_benchmarks(path, pattern)]
    # The place is a machine's slug, or the folder of one recording.
    if not path.is_dir() or (path / "run.json").exists():
        recording = recording_at(place, results)
        if recording.unusable:
            reasons = [f"- {reason}" for reason in recording.health["reasons"]]
            note("\n".join([f"The run of {place} is unusable{':' if reasons else '.'}", *reasons]))
        process = timed_process(recording)
        if pattern is None:
            return [process]
        remedy = "Leave --pattern out, so that cases are compared by name."
        cases = named_by_problem(place, process.cases, remedy)
        # Another implementation of a lost problem may have a time.
        lost = {
            problem: reason
            for problem, reason in lost_by_problem(recording).items()
            if problem not in cases
        }
        return [replace(process, cases=cases, lost=lost)]
    # The place is a folder of several results. Read them one by one.
    inner_folders = sorted(file.parent for file in path.glob("*/run.json"))
    inner_places = [str(inner) for inner in (*inner_folders, *benchmark_files(path))]
    if not inner_places:
        raise UserError(
            f"{place} has neither a recording nor a benchmark's JSON file; give the folder of a "
            "recording or of several results."
        )
    processes = []
    for inner_place in inner_places:
        processes += _read_processes(inner_place, pattern, results)
    return processes


def _compare_kernels(place: str | None, results: Path, json: bool) -> None:
    """Compare the hand-written kernels with the vendor library, by class of shape."""
    from analysis.comparing.families import compare_families, summarise, write_families

    recording = load_machine(None, results) if place is None else recording_at(place, results)
    table = compare_families(recording)
    text = write_families(recording, table)
    if json:
        print_json(summarise(table))
        return
    print(text)
