"""Import tables of times: write them as recordings, with everything that is computed from them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from analysis.imports.attention_tables import find_attention_tables
from analysis.imports.public import read_public
from analysis.imports.tables import PublicTable, choose_tables, find_tables, read_table
from analysis.imports.timings import FileDefaults, read_timings
from analysis.imports.writing import is_same_file, write_collections, write_imported, write_timings
from analysis.model import attention_basis
from analysis.model.prior import software_of
from analysis.recordings.imported import (
    COLLECTIONS,
    VALIDATION,
    folder_of,
    is_complete,
    is_of_file,
    read_collections,
)
from analysis.recordings.load import load, load_run
from kernels.cli import note
from kernels.common.aliases import slug_meant
from kernels.common.counts import counted
from kernels.common.errors import UserError, nearest
from kernels.machine import known_machine, known_machines
from kernels.problem import DTYPE_BYTES, GEMM_LAYOUTS
from sweeps.store import write_json


def import_tables(files: Sequence[Path], machine: str | None, results: Path) -> None:
    """Import one table for each machine that has one, or only the table of the named machine.

    ``files`` are the Parquet files of the tables to choose from; if there are none, the tables of
    the installed package aiconfigurator-core are used. Tables that are already imported are not
    imported again.

    Raises:
        UserError: if the package is needed but not installed, if a table cannot be read or
            imported, if ``machine`` is not known or has no table, or if no table belongs to any
            machine in machines.toml.
    """
    # 1. Choose one table for each machine, or only for the named machine.
    tables = [read_table(path) for path in files] if files else find_tables()
    by_slug = choose_tables([table for table in tables if table.slug in known_machines()])
    if not by_slug:
        raise UserError(
            "none of the tables has bf16 times of a known machine; give the gemm_perf.parquet of "
            "a known machine."
        )
    chosen = by_slug
    if machine is not None:
        slug = slug_meant(machine, known_machines())
        if slug not in by_slug:
            raise UserError(
                f"no public table has bf16 times of {slug}; name one of {', '.join(by_slug)}."
            )
        chosen = {slug: by_slug[slug]}
    # 2. Import the chosen tables that are not imported yet.
    missing = {
        slug: table
        for slug, table in chosen.items()
        if not is_imported(table, folder_of(results, slug))
    }
    for slug in sorted(chosen.keys() - missing.keys()):
        purpose = " as the prior of your file" if is_of_file(folder_of(results, slug)) else ""
        note(f"{slug}: {chosen[slug].source} is already imported{purpose}.")
    if missing:
        _import_in_parallel(missing, tables, results)


def import_file(path: Path, machine: str, defaults: FileDefaults, results: Path) -> None:
    """Import a user's file as a recording.

    ``path`` is a file of times, the table of a published study, or a recording, given as its folder
    or as the measurements.csv in that folder.

    Raises:
        UserError: if an option is invalid or does not fit the file, the machine is unknown or
            already has its own recording in ``results``, or the file cannot be imported.
    """
    # 1. Check the options.
    if defaults.dtype and defaults.dtype not in DTYPE_BYTES:
        raise UserError(f"--dtype is {defaults.dtype!r}; {nearest(defaults.dtype, DTYPE_BYTES)}")
    if defaults.layout and defaults.layout not in GEMM_LAYOUTS:
        raise UserError(
            f"--layout is {defaults.layout!r}; {nearest(defaults.layout, GEMM_LAYOUTS)}"
        )
    target = known_machine(machine)
    if (results / target.slug / "run.json").exists():
        raise UserError(
            f"{target.slug} already has its own recording in {results}, and answers would use this "
            "recording instead of the import; choose another folder with --results."
        )
    # 2. Read the file, unless it is already imported. Recordings are read like public tables.
    is_recording = path.is_dir() or path.name == "measurements.csv"
    measurements = path / "measurements.csv" if path.is_dir() else path
    if is_recording and not measurements.exists():
        fault = "has no measurements.csv" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {fault}; give a CSV file with times or the folder of a recording.")
    earlier = folder_of(results, target.slug)
    if path.exists() and is_complete(earlier) and is_same_file(earlier, path, defaults):
        note(f"{target.slug}: {path} is already imported.")
        return
    timings = None if is_recording else read_timings(path, defaults)
    if timings is None:  # a recording, or the table of a published study
        timings = read_public(path, target)
        # This check comes after reading, so that a CSV file with a misspelt column gets the error
        # about its format.
        if defaults.dtype or defaults.layout:
            raise UserError(
                "--dtype and --layout are only for a CSV file that lacks dtypes or layouts, but "
                f"{path} is a recording or a published table; leave these options out."
            )
    # 3. Write the recording, and all results that are computed from it.
    folder = write_timings(timings, path, defaults, target, results)
    print(f"{target.slug}: {_write_results(folder)}")
    note(
        f"{target.slug}: the times are for {timings.cache} operands ({timings.how}) and are saved "
        f"in {folder}."
    )


def is_imported(table: PublicTable, folder: Path) -> bool:
    """Return True if a folder has a complete, up-to-date import of this table.

    If the folder has an import of a user's file, that import must be complete, and its prior must
    include the table.
    """
    files = (COLLECTIONS, attention_basis.FILE)
    if not is_complete(folder) or not all((folder / name).exists() for name in files):
        return False
    try:
        attention_basis.read_fits(folder)
    except UserError:  # a damaged file has to be rewritten
        return False
    if is_of_file(folder):
        try:
            return table.source in read_collections(folder)
        except UserError:  # a damaged file has to be rewritten
            return False
    try:
        # Range of other frameworks' times, which may have changed with the shipped constants.
        imported_range = json.loads((folder / VALIDATION).read_bytes())["software"]
    except (ValueError, KeyError, TypeError):  # a damaged file has to be rewritten
        return False
    public: dict[str, Any] = load_run(folder).get("public", {})
    is_same_table = (
        public.get("package") == table.package
        and public.get("framework") == table.framework
        and public.get("version") == table.version
    )
    return is_same_table and imported_range == software_of(table.slug).to_json()


def _import_in_parallel(
    tables: Mapping[str, PublicTable], all_tables: Sequence[PublicTable], results: Path
) -> None:
    """Import tables in parallel, at most one per core, because each import keeps a core busy."""
    machines = counted(len(tables), "machine")
    note(
        f"Calibrating on the public tables of {machines}, which takes one or two minutes per "
        "machine:"
    )
    workers = min(len(tables), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {
            pool.submit(_import_one, table, all_tables, results): slug
            for slug, table in tables.items()
        }
        for job in as_completed(jobs):
            print(f"{jobs[job]}: {job.result()}")


def _import_one(table: PublicTable, all_tables: Sequence[PublicTable], results: Path) -> str:
    """Write a table's recording and all results that are computed from it; return a summary.

    If the machine's recording was imported from a user's file, that recording is kept, and the
    table becomes part of its prior.
    """
    machine = known_machine(table.slug)
    folder = folder_of(results, table.slug)
    other_tables = [
        other for other in all_tables if other.slug == table.slug and other.path != table.path
    ]
    write_collections([table, *other_tables], machine, results)
    fits = attention_basis.fit_tables(find_attention_tables(table.slug), machine)
    write_json(folder / attention_basis.FILE, attention_basis.fits_to_json(fits))
    if not is_of_file(folder):
        write_imported(table, machine, results)
        return _write_results(folder, table, all_tables)
    return _write_results(folder)


def _write_results(
    folder: Path, table: PublicTable | None = None, all_tables: Sequence[PublicTable] = ()
) -> str:
    """Calibrate an imported recording, write its results, and return a summary of the import.

    ``table`` is the imported table, or None for a user's file. The predictions of an imported table
    are compared with the other tables of its machine in ``all_tables``.
    """
    from analysis.advice.table import build_table, write_table
    from analysis.commands.page import add_page
    from analysis.model.fitted import analyse, write_predictions
    from analysis.plots import write_plots
    from analysis.plots.cheat_sheet import write_cheat_sheet
    from analysis.rules.inputs import RuleInputs, judge_inputs
    from analysis.rules.rules_report import write_rules
    from analysis.validation.software import write_own_validation, write_validation

    # 1. Write the files of a report, and the verdicts on rules of thumb.
    analysis = analyse(load(folder))
    write_predictions(analysis)
    write_plots(analysis)
    advice = build_table(analysis)
    write_table(analysis, advice)
    rules = RuleInputs([analysis.recording], [], folder)
    judged = judge_inputs(rules)
    write_rules(rules, judged)
    write_cheat_sheet(rules, judged)
    add_page(analysis, advice)
    # 2. Write validation.json last, because it marks the import as complete.
    if table is None:
        write_own_validation(folder)
    else:
        write_validation(folder, table, all_tables)
    # 3. Summarise the import, with the errors for the operation and dtype with the most rows.
    summary = (
        f"{counted(analysis.measured, 'measurement')}, {analysis.recording.run['public']['source']}"
    )
    largest = max(analysis.model.fits.values(), key=lambda fit: fit.rows)
    if largest.median is None or largest.mean is None or largest.p95 is None:
        return f"{summary}."
    return (
        f"{summary}. Held-out errors: median {largest.median:.1%}, mean {largest.mean:.1%}, "
        f"95th percentile {largest.p95:.0%}."
    )
