"""``compare``: compare two versions, or hand-written kernels with the vendor library."""

from __future__ import annotations

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
from kernels.common.errors import UserError
from kernels.common.program import RESULTS

if TYPE_CHECKING:
    from analysis.comparing.changes import CaseChanges
    from analysis.imports.benchmarks import NamePattern
    from analysis.recordings.case_times import TimedProcess
    from analysis.recordings.load import Recording


@app.command("compare")
def compare_command(
    old: Annotated[
        str | None,
        typer.Argument(
            help=(
                "Earlier results: a recording's folder or slug, another program's JSON file, or a "
                "folder with several of either."
            )
        ),
    ] = None,
    new: Annotated[str | None, typer.Argument(help="Later results, in the same form.")] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Compare one recording's hand-written kernels with the vendor library instead.",
        ),
    ] = False,
    gate: Annotated[
        str | None,
        typer.Option(
            "--gate",
            help=(
                "Largest slow-down to accept, such as 3%. Answers pass, fail or cannot tell, and "
                "exits 0, 1 or 3."
            ),
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            help=(
                "Problem in the names of cases, such as 'm{m}_n{n}_k{k}_{dtype}', by which cases "
                "are then matched."
            ),
        ),
    ] = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Compare two versions. Exits 1 if any case is slower or lost its time."""
    if kernels:
        if new is not None or gate is not None or pattern is not None:
            raise UserError(
                "--kernels is about one recording; leave the second one, --gate and --pattern out."
            )
        _compare_kernels(old, results, json)
        return
    if old is None or new is None:
        raise UserError("give two results to compare, or one recording and --kernels.")
    if gate is None and pattern is None and not (_is_named(old) or _is_named(new)):
        _compare_recordings(old, new, results, json)
        return
    _compare_by_name(old, new, gate, pattern, results, json)


def _is_named(place: str) -> bool:
    """Return True for a file, and for a folder of several results."""
    path = Path(place)
    return path.is_file() or (path.is_dir() and not (path / "run.json").exists())


def _compare_recordings(old: str, new: str, results: Path, json: bool) -> None:
    from analysis.comparing.compare import compare, comparison_json, comparison_text

    comparison = compare(*(recording_at(place, results) for place in (old, new)))
    if json:
        print_json(comparison_json(comparison))
    else:
        print(comparison_text(comparison))
    if comparison.counts()["slower"] or len(comparison.lost):
        raise typer.Exit(1)


def _compare_by_name(
    old: str, new: str, gate: str | None, pattern: str | None, results: Path, json: bool
) -> None:
    """Compare cases by name, and answer the gate's question if one was asked."""
    from analysis.comparing.by_name import compare_by_name, named_json, named_text
    from analysis.comparing.gate import EXIT_CODES, gate_json, gate_text, judge_changes

    threshold = None if gate is None else share_of(gate, "gate")
    if threshold == 0:
        raise UserError("--gate takes a slow-down above 0, such as 3%.")
    changes, lost = _estimated(old, new, pattern, results)
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
    if code := EXIT_CODES[answer.verdict]:
        raise typer.Exit(code)


def _estimated(
    old: str, new: str, pattern: str | None, results: Path
) -> tuple[CaseChanges, dict[str, str]]:
    """Read both sides; return the change of each common case, and the cases that lost their time.

    Raises:
        UserError: if a result cannot be read, or the sides have no case in common.
    """
    from analysis.comparing.changes import common_names, estimate_changes
    from analysis.imports.benchmarks import NamePattern

    names = None if pattern is None else NamePattern.parse(pattern)
    recordings: list[Recording] = []
    sides = [_processes(place, names, results, recordings) for place in (old, new)]
    processes = [process for side in sides for process in side]
    machines = dict.fromkeys(p.facts["machine"] for p in processes if p.facts.get("machine"))
    if len(machines) > 1:
        if recordings:
            raise UserError(
                f"the results are of {' and '.join(machines)}; give results of one machine."
            )
        note(f"The results name different machines: {', '.join(machines)}.")
    shared = common_names(processes)
    before, after = ({name for p in side for name in p.cases} for side in sides)
    lost = {
        name: why
        for process in sides[1]
        for name, why in process.lost.items()
        if name in before and name not in after
    }
    if not shared:
        raise UserError(
            f"{old} and {new} have no timed case in common; the first are "
            f"{next(iter(processes[0].cases))!r} and {next(iter(processes[-1].cases))!r}."
        )
    left_out = len((before | after) - set(shared) - set(lost))
    if left_out:
        note(f"Left out: {left_out} cases that not all results have.")
    changes = estimate_changes(sides[0], sides[1])
    if (changes.old == changes.new).all():
        note("All times are the same on both sides, as in copies of one result.")
    return changes, lost


def _processes(
    place: str, pattern: NamePattern | None, results: Path, recordings: list[Recording]
) -> list[TimedProcess]:
    """Read all results of one side; add those that are recordings to ``recordings``."""
    from analysis.imports.benchmarks import benchmark_files, named_by_problem, read_benchmarks
    from analysis.recordings.named_cases import timed_process

    path = Path(place)
    if path.is_file():
        return [read_benchmarks(path, pattern)]
    if not path.is_dir() or (path / "run.json").exists():
        recordings.append(recording := recording_at(place, results))
        if recording.unusable:
            note(f"{place} is an unusable run: {'; '.join(recording.health['reasons'])}")
        process = timed_process(recording)
        if pattern is None:
            return [process]
        return [replace(process, cases=named_by_problem(place, process.cases), lost={})]
    inner = sorted(file.parent for file in path.glob("*/run.json"))
    parts = [str(file) for file in (*inner, *benchmark_files(path))]
    if not parts:
        raise UserError(
            f"{place} has neither a run.json nor JSON files; give a recording or other results."
        )
    return [p for part in parts for p in _processes(part, pattern, results, recordings)]


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
