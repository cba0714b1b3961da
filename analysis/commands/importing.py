"""Others' tables as recordings, and what is known of every machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from analysis.commands.app import ResultsOption, app
from analysis.model.basis import find_basis, software_of
from analysis.recordings.imported import VALIDATION, folder_of, is_complete, write_imported
from analysis.recordings.load import load, load_run, recorded_machines
from analysis.recordings.tables import Table, choose_tables, find_tables, read_table
from kernels.cli import JsonOption, note, print_json
from kernels.errors import UserError, nearest
from kernels.machine import known_machine, known_machines
from sweeps.store import RESULTS

_ALL = "all"


@app.command("import")
def import_command(
    files: Annotated[
        list[Path] | None, typer.Argument(help="gemm_perf.parquet files; else the package's.")
    ] = None,
    machine: Annotated[
        str, typer.Option("--machine", help="Its slug, or all that there are tables of.")
    ] = _ALL,
    results: ResultsOption = RESULTS,
) -> None:
    """Make recordings of others' public tables, under public/ among the results; goes on."""
    tables = [read_table(path) for path in files] if files else find_tables()
    by_slug = choose_tables([table for table in tables if table.slug in known_machines()])
    if machine != _ALL and machine not in by_slug:
        raise UserError(f"there is no table of {machine!r}; {nearest(machine, by_slug)}")
    if not by_slug:
        raise UserError("no table is of a machine that machines.toml lists.")
    wanted = by_slug if machine == _ALL else {machine: by_slug[machine]}
    todo = {slug: t for slug, t in wanted.items() if not _is_imported(t, folder_of(results, slug))}
    for slug in sorted(wanted.keys() - todo.keys()):
        note(f"{slug}: imported already, {wanted[slug].source}.")
    if todo:
        _import_all(todo, tables, results)


def _is_imported(table: Table, folder: Path) -> bool:
    """Whether the folder was made to the end, of this very table, for the intervals of today."""
    if not is_complete(folder):
        return False
    public: dict[str, Any] = load_run(folder).get("public", {})
    of_table = (table.package, table.framework, table.version)
    judged = json.loads((folder / VALIDATION).read_bytes())
    same = tuple(public.get(name) for name in ("package", "framework", "version")) == of_table
    return same and judged["software"] == software_of(table.slug).to_json()


def _import_all(tables: Mapping[str, Table], every: Sequence[Table], results: Path) -> None:
    """As many at a time as there are cores: growing the trees of one keeps one busy."""
    note(f"Calibrating on others' rows of {len(tables)} machines, a minute or two each:")
    workers = min(len(tables), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {
            pool.submit(_import_one, table, every, results): slug for slug, table in tables.items()
        }
        for job in as_completed(jobs):
            print(f"{jobs[job]}: {job.result()}")


def _import_one(table: Table, tables: Sequence[Table], results: Path) -> str:
    """Write a table's recording and everything that follows from it; returns what came of it."""
    from analysis.advice.table import build_table, write_table
    from analysis.model.fitted import analyse, write_predictions
    from analysis.plots import write_plots
    from analysis.plots.cheat_sheet import write_cheat_sheet
    from analysis.rules.inputs import RuleInputs, judge_inputs
    from analysis.rules.report import write_rules
    from analysis.validation.software import write_validation

    folder = write_imported(table, known_machine(table.slug), results)
    analysis = analyse(load(folder))
    write_predictions(analysis)
    write_plots(analysis)
    write_table(analysis, build_table(analysis))
    rules = RuleInputs([analysis.recording], [], folder)
    judged = judge_inputs(rules)
    write_rules(rules, judged)
    write_cheat_sheet(rules, judged)
    write_validation(folder, table, tables)  # last: where it is, the import is complete
    (fit,) = analysis.model.fits.values()
    return (
        f"{fit.rows:,} rows, {table.source}; on rows not seen {fit.median:.1%} in the median, "
        f"{fit.mean:.1%} in the mean, {fit.p95:.0%} at the 95th percentile"
    )


@app.command("machines")
def machines_command(results: ResultsOption = RESULTS, json: JsonOption = False) -> None:
    """Every machine, and what the answers about it rest on."""
    rows = [_machine_row(slug, results) for slug in _all_slugs(results)]
    if json:
        print_json(rows)
        return
    for row in rows:
        errors = (f"{row[name]:.1%}" if row[name] else "–" for name in ("median", "mean", "p95"))
        cells = "".join(f"{cell:>8}" for cell in errors)
        print(f"{row['slug']:32} {row['basis']:10} {row['rows'] or '–':>7}{cells}  {row['source']}")


def _all_slugs(results: Path) -> list[str]:
    return [*known_machines(), *sorted(recorded_machines(results) - known_machines().keys())]


def _machine_row(slug: str, results: Path) -> dict[str, Any]:
    """As promised of ``machines --json``; errors are of the largest group, on rows not seen."""
    basis = find_basis(slug, results)
    fit = max(basis.model.fits.values(), key=lambda f: f.rows, default=None)
    return {
        "slug": slug, "name": basis.model.machine.name, "basis": basis.kind,
        "rows": fit and fit.rows, "source": basis.source, "median": fit and fit.median,
        "mean": fit and fit.mean, "p95": fit and fit.p95,
    }  # fmt: skip
