"""``rules``: test common rules of thumb against measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.commands.app import MachineOption, ResultsOption, app
from kernels.cli import JsonOption, note, print_json
from kernels.common.errors import UserError
from kernels.common.program import RESULTS
from kernels.machine import known_machine

if TYPE_CHECKING:
    from analysis.rules.judge import RuleResult


@app.command("rules")
def rules_command(
    machine: MachineOption = None,
    results: ResultsOption = RESULTS,
    table: Annotated[
        Path | None,
        typer.Option(
            "--table",
            help="File with a public table to use instead of a recording; needs --machine.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Dtype of --table to use [default: bf16 if present, else the table's only dtype].",
        ),
    ] = None,
    imported: Annotated[
        bool,
        typer.Option(
            "--imported", help="Print the verdicts on the rules for every imported table."
        ),
    ] = False,
    sweeps: Annotated[
        bool,
        typer.Option(
            "--sweeps",
            help="List the sweeps that are needed to judge the rules, and exit.",
        ),
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            "--plots", help="Folder for the plots of --table or --imported [default: no plots]."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Test common rules of thumb against measurements.

    For a recording, the command also writes rules.csv, rules.md and rules.json, and a cheat sheet
    if following a rule has a significant effect.
    """
    from analysis.commands.page import renewed_page
    from analysis.rules.catalogue import rule_sweeps
    from analysis.rules.rules_report import terminal_table

    if sweeps:
        if json:
            print_json(rule_sweeps())
        else:
            print(" ".join(rule_sweeps()))
        return
    if dtype is not None and table is None:
        raise UserError("--dtype needs --table; leave --dtype out, or give --table.")
    if imported:
        if machine is not None or table is not None:
            raise UserError(
                "--imported covers all imported tables; leave --machine and --table out."
            )
        _show_imported(results, plots, json)
        return
    if plots is not None and table is None:
        raise UserError(
            "--plots needs --table or --imported; leave --plots out, because plots of a recording "
            "are written next to rules.md."
        )
    if table is not None:
        rows, written = _judge_table(table, machine, dtype, plots)
    else:
        rows, written = _judge_and_write(machine, results)
        # All files are in the recording's folder.
        page = renewed_page(written[0].parent)
        if page is not None:
            written = [*written, page]
    if json:
        print_json([row.to_json() for row in rows])
        return
    print(terminal_table(rows))
    for path in written:
        print(path)


def _show_imported(results: Path, plots: Path | None, json: bool) -> None:
    """Print each imported table's verdicts on the rules, and plot them if ``plots`` is given."""
    from analysis.plots.rules_overview import write_overview
    from analysis.rules.inputs import imported_rules

    documents = imported_rules(results)
    if json:
        print_json(documents)
    else:
        for document in documents:
            print(f"{document['name']}, {document['source']}")
            for rule in document["rules"]:
                interval = f"[{rule['lo']:.3f}, {rule['hi']:.3f}]"
                print(f"  {rule['statement']}: {rule['verdict']}, {rule['effect']:.3f} {interval}")
    if plots is not None:
        note(str(write_overview(documents, plots)))


def _judge_and_write(
    machine: str | None, results: Path
) -> tuple[Sequence[RuleResult], Sequence[Path]]:
    """Judge the rules by a machine's recordings, and write the report and the cheat sheet.

    Return the result of each rule, and the paths to print.
    """
    from analysis.plots.cheat_sheet import write_cheat_sheet
    from analysis.recordings.runs import health_reasons
    from analysis.rules.inputs import judge_inputs, rule_inputs
    from analysis.rules.rules_report import write_rules

    inputs = rule_inputs(machine, results)
    for recording in inputs.recordings:
        if recording.unusable:
            sentence = (
                f"{recording.folder} is not used to judge the rules, because its run is unusable."
            )
            note(" ".join([sentence, *health_reasons(recording)]))
    rows = judge_inputs(inputs)
    return rows, [*write_rules(inputs, rows), *write_cheat_sheet(inputs, rows)]


def _judge_table(
    path: Path, slug: str | None, dtype: str | None, plots: Path | None
) -> tuple[Sequence[RuleResult], Sequence[Path]]:
    """Judge the rules by a public table, and write the cheat sheet if ``plots`` is given.

    Return the result of each rule, and the paths to print.
    """
    from analysis.imports.public import read_source
    from analysis.model.predict import Model
    from analysis.plots.cheat_sheet import write_table_sheet
    from analysis.rules.judge import Evidence, judge_all

    if slug is None:
        raise UserError("--table needs --machine; name the machine whose measurements are used.")
    machine = known_machine(slug)
    source = read_source(path, machine, dtype)
    rows = judge_all([Evidence.from_public(source, Model(machine))])
    if plots is None:
        return rows, []
    return rows, write_table_sheet(rows, machine, source, plots)
