"""Recordings that are made of others' tables: written once, and read like our own.

They lie under ``results/public/<machine>/``. What the table says stands in measurements.parquet;
run.json says whose it is and how it was measured.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from analysis.recordings.tables import Table, read_rows
from kernels.checks import LARGEST_SIZE
from kernels.errors import UserError
from kernels.machine import Machine
from sweeps.schema import COLUMNS, SCHEMA
from sweeps.store import make_folder, write_run, write_whole

PLACE = "public"
MEASUREMENTS = "measurements.parquet"
VALIDATION = "validation.json"  # written last: where it is, an import is complete
CACHE = "warm"
"""The tables' replays flush nothing, so that operands which fit the cache come from it."""

OTHERS_PROTOCOL = 0
"""In place of a version of ours: no row of such a recording was measured by it."""

_HOW = "mean of 6 CUDA-graph replays, nothing flushed, clocks as they are"
_SAME = {
    "op": "gemm", "batch": 1, "dtype": "bf16", "layout": "nt", "implementation": "cublas",
    "config": "", "mode": "burst", "cache": CACHE, "fill": "", "status": "ok", "sweep": PLACE,
    "schema": SCHEMA,
}  # fmt: skip
_PANDAS = {"text": "string", "whole": "Int64", "real": "float64", "flag": "boolean"}


def folder_of(results: Path, slug: str) -> Path:
    """Where a machine's imported table lies."""
    return results / PLACE / slug


def is_complete(folder: Path) -> bool:
    """Whether a table was imported to the end; its folder is not looked at before."""
    return (folder / "run.json").exists() and (folder / VALIDATION).exists()


def write_imported(table: Table, machine: Machine, results: Path) -> Path:
    """Write a table's bf16 rows and what they are; returns the folder.

    Raises:
        UserError: the folder cannot be made, or the disk is full.
    """
    folder = folder_of(results, machine.slug)
    make_folder(folder)
    (folder / VALIDATION).unlink(missing_ok=True)  # until everything was written anew
    rows = read_rows(table)
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_pandas(rows, preserve_index=False), buffer)
    write_whole(folder / MEASUREMENTS, buffer.getvalue())
    write_run(folder, _run(table, machine, len(rows)))
    return folder


def _run(table: Table, machine: Machine, rows: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "protocol": OTHERS_PROTOCOL,
        "run": "",
        "published": False,
        "public": {
            "source": table.source, "package": table.package, "framework": table.framework,
            "version": table.version, "also_for": list(table.also_for),
            "complete": table.complete, "device": table.device, "file": table.path.name,
            "rows": rows, "licence": table.licence, "how": _HOW, "cache": CACHE,
        },
        "software": {table.framework: table.version},
        "machine": machine.to_json(),
        "plan": {"cases": []},
    }  # fmt: skip


def read_imported(folder: Path) -> pd.DataFrame:
    """The rows with all columns of measurements.csv; what the table does not tell is missing.

    Raises:
        UserError: the file cannot be read, or lacks a column.
    """
    path = folder / MEASUREMENTS
    try:
        told = pd.read_parquet(path, columns=["m", "n", "k", "time_us"])
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or ["empty"])[0]
        raise UserError(
            f"{path} cannot be read ({reason}); `python -m analysis import` writes it again."
        ) from None
    sizes, times = (
        told[["m", "n", "k"]].to_numpy(dtype=float),
        told["time_us"].to_numpy(dtype=float),
    )
    sound = ((sizes >= 1) & (sizes <= LARGEST_SIZE)).all(axis=1) & (times > 0) & (times < np.inf)
    if not sound.all():
        raise UserError(
            f"row {int(np.argmin(sound)) + 1} of {path} is no product with a time; `python -m "
            "analysis import` writes it again."
        )
    flops = 2.0 * told["m"] * told["n"] * told["k"]
    values = {**_SAME, **told, "tflops": flops / told["time_us"] / 1e6}
    columns = {
        name: pd.Series(values.get(name), index=told.index, dtype=_PANDAS[kind])
        for name, (kind, _) in COLUMNS.items()
    }
    return pd.DataFrame(columns)
