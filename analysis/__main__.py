"""``python -m analysis``: predict, recommend, validate, calibrate, plot, table, compare, …"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import analysis.ask  # its commands register themselves
import analysis.record.command  # noqa: F401
from analysis.cli import MachineOption, ResultsOption, app, load_machine, recording_at
from analysis.model import Model
from analysis.source import Source
from kernels.cli import JsonOption, note, print_json, run
from kernels.errors import UserError, nearest
from kernels.machine import Machine, known_machines
from sweeps.store import RESULTS


@app.command("calibrate")
def calibrate_command(
    machine: MachineOption = None, results: ResultsOption = RESULTS, json: JsonOption = False
) -> None:
    """Fit the model to a recording; writes calibration.json and predicted.csv."""
    from analysis.tidy import analyse, write_predictions

    analysis = analyse(load_machine(machine, results))
    write_predictions(analysis)
    if json:
        print_json(analysis.calibration.to_json())
        return
    print("group                          rows  median    mean     p95  on rows not seen")
    for group, fit in analysis.model.fits.items():
        print(f"{group:28} {fit.rows:6} {fit.median:7.1%} {fit.mean:7.1%} {fit.p95:7.1%}")


@app.command("plot")
def plot_command(machine: MachineOption = None, results: ResultsOption = RESULTS) -> None:
    """Draw every plot that the recording has data for."""
    from analysis.plots import write_plots
    from analysis.tidy import analyse

    for path in write_plots(analyse(load_machine(machine, results))):
        print(path)


@app.command("table")
def table_command(machine: MachineOption = None, results: ResultsOption = RESULTS) -> None:
    """Write the recommendation table as CSV, Markdown and JSON."""
    from analysis.table import build_table, write_table
    from analysis.tidy import analyse

    analysis = analyse(load_machine(machine, results))
    write_table(analysis, build_table(analysis))
    print(analysis.recording.folder / "recommendations.md")


@app.command("families")
def families_command(
    machine: MachineOption = None, results: ResultsOption = RESULTS, json: JsonOption = False
) -> None:
    """Compare the hand-written kernels with the library, by class of shape."""
    from analysis.families import compare_families, summarise, write_families

    recording = load_machine(machine, results)
    table = compare_families(recording)
    text = write_families(recording, table)
    if json:
        print_json(summarise(table))
        return
    print(text)


@app.command("compare")
def compare_command(
    old: Annotated[str, typer.Argument(help="Folder of the earlier recording, or its slug.")],
    new: Annotated[str, typer.Argument(help="Folder of the later recording, or its slug.")],
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Compare two recordings of one machine; exits 1 if any case is slower or lost its time."""
    from analysis.compare import compare, text, to_json

    comparison = compare(*(recording_at(place, results) for place in (old, new)))
    if json:
        print_json(to_json(comparison))
    else:
        print(text(comparison))
    if comparison.counts()["slower"] or len(comparison.lost):
        raise typer.Exit(1)


@app.command("rules")
def rules_command(
    machine: MachineOption = None,
    results: ResultsOption = RESULTS,
    table: Annotated[
        Path | None,
        typer.Option("--table", help="Judge by others' table instead, of a known machine."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of that table.")] = None,
    sweeps: Annotated[
        bool, typer.Option("--sweeps", help="Only name the sweeps that rules need.")
    ] = False,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Folder to draw that table's cheat sheet in.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Judge the field's rules by what was measured; writes rules.csv, .md and .json."""
    from analysis.rulebook import evidence_of, judge_evidence, lines, write_rules, write_sheet
    from analysis.rules import Evidence, judge_all, rule_sweeps

    if sweeps:
        print(" ".join(rule_sweeps()))
        return
    if plots is not None and table is None:
        raise UserError("--plots is for --table; a recording's cheat sheet lies beside its rules.")
    if table is not None:
        here, source = _table_of(table, machine, dtype)
        rows = judge_all([Evidence.of_source(source, Model(here))])
        written = [] if plots is None else write_sheet(rows, here, source, plots)
    else:
        evident = evidence_of(machine, results)
        rows = judge_evidence(evident)
        written = write_rules(evident, rows)
    if json:
        print_json([row.to_json() for row in rows])
        return
    print(lines(rows))
    for path in written:
        print(path)


def _table_of(path: Path, machine: str | None, dtype: str | None) -> tuple[Machine, Source]:
    """A known machine, and its rows of others' table."""
    from analysis.source import read_source

    if machine is None:
        raise UserError("--table needs --machine: whose rows of it are wanted.")
    known = known_machines()
    if machine not in known:
        raise UserError(f"machine {machine!r} is not known; {nearest(machine, known)}")
    return known[machine], read_source(path, known[machine], dtype)


@app.command("tensor-cores")
def tensor_cores_command(
    machine: MachineOption = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="The cases of this sweep; else profiled models.")
    ] = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Who could use Tensor Cores, who does, and what faster matrix work could still give."""
    from analysis.rulebook import evidence_of
    from analysis.tensorcores import sweep_step, text, to_json

    evident = evidence_of(machine, results)
    steps = evident.steps
    if sweep is not None:
        having = [r for r in evident.recordings if (r.ok["sweep"] == sweep).any()]
        having = having or list(evident.recordings)
        steps = [sweep_step(having[0].ok, sweep, having[0].machine.kind)]
    elif not steps:
        raise UserError("no model is profiled on this machine; run `make rules`, or give --sweep.")
    if json:
        print_json([to_json(step) for step in steps])
        return
    print("\n".join(map(text, steps)))


@app.command("report")
def report_command(machine: MachineOption = None, results: ResultsOption = RESULTS) -> None:
    """Everything: predictions, plots, table, and the five lines that matter most."""
    from analysis.plots import write_plots
    from analysis.report import five_lines
    from analysis.table import build_table, write_table
    from analysis.tidy import analyse, write_predictions

    note("Calibrating the model, drawing plots and looking for better shapes …")
    analysis = analyse(load_machine(machine, results))
    write_predictions(analysis)
    plots = write_plots(analysis)
    advice = build_table(analysis)
    write_table(analysis, advice)
    folder = analysis.recording.folder
    print()
    for line in five_lines(analysis, advice):
        print(f"  • {line}")
    print(f"\n{len(plots)} plots: {folder / 'plots'}")
    print(f"What to pad: {folder / 'recommendations.md'}")


if __name__ == "__main__":
    run(app, "python -m analysis")
