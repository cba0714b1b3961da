"""``import`` and ``machines``: import tables of times, and list what is known about machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from analysis.commands.app import ResultsOption, app
from kernels.cli import JsonOption, note, print_json
from kernels.common.errors import UserError
from kernels.common.program import RESULTS

_ALL = "all"
_MACHINE_LINE = "{:32} {:10} {:>7}{:>8}{:>8}{:>8}  {}"  # slug, basis, rows, three errors, source


@app.command("import")
def import_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help=(
                "CSV file with your own times or with those of the CUTLASS profiler or "
                "TritonBench, folder of a recording, or gemm_perf.parquet files [default: the "
                "tables of the package aiconfigurator-core]."
            )
        ),
    ] = None,
    machine: Annotated[
        str,
        typer.Option("--machine", help="Slug of a machine, or all for every machine with a table."),
    ] = _ALL,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="Dtype, such as bf16, for rows of a CSV file that lack a dtype."
        ),
    ] = "",
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            help=(
                "Layout for rows of a CSV file that lack a layout: nn, nt, tn or tt, where nt is "
                "y = x Wᵀ."
            ),
        ),
    ] = "",
    results: ResultsOption = RESULTS,
) -> None:
    """Import public tables, or your own CSV file, as recordings.

    The recordings are written to public/ in the results folder. If an import is interrupted, run
    the same command to resume it.
    """
    from analysis.commands.importer import import_file, import_tables
    from analysis.imports.timings import FileDefaults

    # 1. Import a file of times by itself. Every path that does not end with .parquet is taken for a
    # file of times.
    files = files or []
    timing_files = [path for path in files if path.suffix != ".parquet"]
    if timing_files:
        if len(files) > 1:
            raise UserError(
                "a file of times has to be imported by itself, because it becomes the recording of "
                "one machine; run the command once for each file."
            )
        if machine == _ALL:
            raise UserError(
                "a file of times belongs to one machine; add --machine with the slug of the "
                f"machine on which the times in {files[0]} were measured."
            )
        import_file(files[0], machine, FileDefaults(dtype, layout), results)
        return
    if dtype or layout:
        raise UserError(
            "--dtype and --layout are only for a CSV file that lacks dtypes or layouts; leave "
            "these options out, or name the file."
        )
    # 2. Import tables.
    import_tables(files, None if machine == _ALL else machine, results)


@app.command("machines")
def machines_command(results: ResultsOption = RESULTS, json: JsonOption = False) -> None:
    """List every machine, and what the answers about it are based on."""
    from analysis.model.basis import machine_rows
    from analysis.model.prior import floor_sentences

    rows = machine_rows(results)
    if json:
        print_json(rows)
        return
    error_names = ("median", "mean", "p95")
    print(_MACHINE_LINE.format("machine", "basis", "rows", *error_names, "source of its answers"))
    for row in rows:
        count = "–" if row["rows"] is None else f"{row['rows']:,}"
        errors = ["–" if row[name] is None else f"{row[name]:.1%}" for name in error_names]
        print(_MACHINE_LINE.format(row["slug"], row["basis"], count, *errors, row["source"]))
    for sentence in floor_sentences():
        note(sentence)
