"""Recordings that are made of others' tables and files: written once, and read like our own.

They lie under ``results/public/<machine>/``. The times stand in measurements.parquet; run.json says
whose they are and how they were measured. All collections of a machine that a package has lie in
collections.parquet, for whoever measures a little of that machine.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from analysis.recordings.tables import DTYPES, Table, read_rows
from analysis.recordings.timings import Timings, Told
from kernels.checks import LARGEST_SIZE
from kernels.errors import UserError
from kernels.machine import Machine
from kernels.program import command
from sweeps.schema import COLUMNS, SCHEMA
from sweeps.store import make_folder, read_run, write_run, write_whole

PLACE = "public"
MEASUREMENTS = "measurements.parquet"
COLLECTIONS = "collections.parquet"
FILE = "file"
"""In place of a framework: the times are of a file of the user's."""

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
"""What holds of each row unless the recording's own columns say otherwise."""

_PANDAS = {"text": "string", "whole": "Int64", "real": "float64", "flag": "boolean"}


def folder_of(results: Path, slug: str) -> Path:
    """Where a machine's imported table lies."""
    return results / PLACE / slug


def is_complete(folder: Path) -> bool:
    """Whether a table was imported to the end; its folder is not looked at before."""
    return (folder / "run.json").exists() and (folder / VALIDATION).exists()


def is_of_file(folder: Path) -> bool:
    """Whether an imported recording is of a file of the user's, and of no package's table."""
    if not (folder / "run.json").exists():
        return False
    return (read_run(folder).get("public") or {}).get("framework") == FILE


def write_imported(table: Table, machine: Machine, results: Path) -> Path:
    """Write a table's rows and what they are; returns the folder.

    Raises:
        UserError: the folder cannot be made, or the disk is full.
    """
    rows = read_rows(table, *DTYPES.values())
    public = {
        "source": table.source, "package": table.package, "framework": table.framework,
        "version": table.version, "also_for": list(table.also_for), "complete": table.complete,
        "device": table.device, "file": table.path.name, "licence": table.licence, "how": _HOW,
        "cache": CACHE,
    }  # fmt: skip
    return _write(rows, public, machine, results)


def write_timings(
    timings: Timings, path: Path, told: Told, machine: Machine, results: Path
) -> Path:
    """Write what a file of the user's says, and the user of it; returns the folder.

    Raises:
        UserError: the folder cannot be made, or the disk is full.
    """
    public = {
        "source": path.name, "package": "", "framework": FILE, "version": _digest(path, told),
        "file": path.name, "licence": "", "how": timings.how, "cache": timings.cache,
    }  # fmt: skip
    return _write(timings.rows, public, machine, results)


def is_same_file(folder: Path, path: Path, told: Told) -> bool:
    """Whether an imported recording was made of this very file, of which the same was told."""
    public = read_run(folder).get("public") or {}
    return (public.get("framework"), public.get("version")) == (FILE, _digest(path, told))


def _digest(path: Path, told: Told) -> str:
    data = (path if path.is_file() else path / "measurements.csv").read_bytes()
    return hashlib.sha256(data + repr(told).encode()).hexdigest()[:16]


def write_collections(tables: Sequence[Table], machine: Machine, results: Path) -> None:
    """Keep all collections of a machine, the one that its recording is made of first.

    Raises:
        UserError: the folder cannot be made, or the disk is full.
    """
    parts = [read_rows(t, *DTYPES.values()).assign(source=t.source) for t in tables]
    folder = folder_of(results, machine.slug)
    make_folder(folder)
    (folder / VALIDATION).unlink(missing_ok=True)  # what rests on them is to be made anew
    write_whole(folder / COLLECTIONS, _as_parquet(pd.concat(parts, ignore_index=True)))


def read_collections(folder: Path) -> dict[str, pd.DataFrame]:
    """The rows of each collection of a machine by its source, in their order; none without any.

    They are as :func:`analysis.recordings.tables.read_rows` returns them.
    """
    path = folder / COLLECTIONS
    if not path.exists():
        return {}
    try:
        rows = pd.read_parquet(path, columns=["source", "m", "n", "k", "dtype", "time_us"])
        sound = _are_sound(rows)
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise _unreadable(path, error) from None
    if not sound.all():
        raise _unsound(path, sound)
    return {str(source): part for source, part in rows.groupby("source", sort=False)}


def _write(rows: pd.DataFrame, public: dict[str, Any], machine: Machine, results: Path) -> Path:
    for dtype in rows["dtype"].unique():
        machine.peak(dtype)  # which refuses what the machine does not compute
    folder, data = folder_of(results, machine.slug), _as_parquet(rows)
    make_folder(folder)
    (folder / VALIDATION).unlink(missing_ok=True)  # until everything was written anew
    write_whole(folder / MEASUREMENTS, data)
    run = {
        "schema": SCHEMA,
        "protocol": OTHERS_PROTOCOL,
        "run": "",
        "published": False,
        "public": {**public, "rows": len(rows)},
        "software": {public["framework"]: public["version"]},
        "machine": machine.to_json(),
        "plan": {"cases": []},
    }
    write_run(folder, run)
    return folder


def _as_parquet(rows: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_pandas(rows, preserve_index=False), buffer)
    return buffer.getvalue()


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = (str(error).splitlines() or ["empty"])[0]
    return UserError(
        f"{path} cannot be read ({reason}); {command('analysis import')} writes it again."
    )


def _are_sound(rows: pd.DataFrame) -> NDArray[np.bool_]:
    """Whether each row is a product with a time."""
    sizes = rows[["m", "n", "k"]].to_numpy(dtype=float, na_value=np.nan)
    times = rows["time_us"].to_numpy(dtype=float, na_value=np.nan)
    whole: NDArray[np.bool_] = ((sizes >= 1) & (sizes <= LARGEST_SIZE)).all(axis=1)
    return whole & (times > 0) & (times < np.inf)


def _unsound(path: Path, sound: NDArray[np.bool_]) -> UserError:
    return UserError(
        f"row {int(np.argmin(sound)) + 1} of {path} is no product with a time; "
        f"{command('analysis import')} writes it again."
    )


def read_imported(folder: Path) -> pd.DataFrame:
    """The rows with all columns of measurements.csv; what the table does not tell is missing.

    Raises:
        UserError: the file cannot be read, or lacks a column.
    """
    path = folder / MEASUREMENTS
    try:
        told = pd.read_parquet(path)
        told = told[[name for name in told if name in COLUMNS]]
        sound = _are_sound(told)
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise _unreadable(path, error) from None
    if not sound.all():
        raise _unsound(path, sound)
    values = {**_SAME, **told}
    flops = 2.0 * told["m"] * told["n"] * told["k"] * told.get("batch", 1)
    if "op" in told:  # a convolution's batch is its images, which its M contains
        flops = flops.where(told["op"] == "gemm", np.nan)
    values["tflops"] = flops / told["time_us"] / 1e6
    columns = {
        name: pd.Series(values.get(name), index=told.index, dtype=_PANDAS[kind])
        for name, (kind, _) in COLUMNS.items()
    }
    return pd.DataFrame(columns)
