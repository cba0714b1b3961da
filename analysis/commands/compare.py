"""``compare``: compare two recordings, or hand-written kernels with the vendor library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from analysis.commands.app import (
    ResultsOption,
    app,
    load_machine,
    recording_at,
)
from analysis.words import share_of
from kernels.cli import JsonOption, print_json
from kernels.common.errors import UserError
from kernels.common.program import RESULTS


@app.command("compare")
def compare_command(
    old: Annotated[
        str | None, typer.Argument(help="Folder of the earlier recording, or its slug.")
    ] = None,
    new: Annotated[
        str | None, typer.Argument(help="Folder of the later recording, or its slug.")
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Compare one recording's hand-written kernels with the vendor library instead.",
        ),
    ] = False,
    fail_ambiguous: Annotated[
        str | None,
        typer.Option("--fail-ambiguous", help="Exit 1 also if more than this share is ambiguous."),
    ] = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Compare two recordings of one machine. Exits 1 if any case is slower or lost its time."""
    if kernels:
        if new is not None or fail_ambiguous is not None:
            raise UserError(
                "--kernels is about one recording; leave the second one and --fail-ambiguous out."
            )
        _compare_kernels(old, results, json)
        return
    if old is None or new is None:
        raise UserError("give two recordings to compare, or one and --kernels.")
    _compare_recordings(old, new, fail_ambiguous, results, json)


def _compare_recordings(
    old: str, new: str, fail_ambiguous: str | None, results: Path, json: bool
) -> None:
    from analysis.comparing.compare import compare, comparison_json, comparison_text

    share = 1.0 if fail_ambiguous is None else share_of(fail_ambiguous, "fail-ambiguous")
    comparison = compare(*(recording_at(place, results) for place in (old, new)))
    if json:
        print_json(comparison_json(comparison))
    else:
        print(comparison_text(comparison))
    counts = comparison.counts()
    unclear = counts["ambiguous"] > share * len(comparison.table)
    if counts["slower"] or len(comparison.lost) or unclear:
        raise typer.Exit(1)


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
