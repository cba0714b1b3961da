"""Write public tables and users' files as recordings."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from analysis.imports.tables import DTYPES, PublicTable, read_rows
from analysis.imports.timings import FileDefaults, FileTimings, name_of
from analysis.recordings.imported import (
    CACHE,
    COLLECTIONS,
    FILE,
    MEASUREMENTS,
    OTHERS_PROTOCOL,
    VALIDATION,
    folder_of,
)
from kernels.machine import Machine
from sweeps.schema import SCHEMA
from sweeps.store import make_folder, read_run, write_run, write_whole

_HOW = "mean of 6 CUDA-graph replays, cache not flushed, clocks not fixed"


def write_imported(table: PublicTable, machine: Machine, results: Path) -> Path:
    """Write a public table as a recording of the machine, and return the recording's folder.

    The ``validation.json`` of an earlier import is deleted. Without this file, the import counts as
    incomplete.

    ``results`` is the folder of all machines' results.

    Raises:
        UserError: if the machine does not support a dtype of the table, or the recording cannot be
            written.
    """
    rows = read_rows(table, *DTYPES.values())
    public = {
        "source": table.source,
        "package": table.package,
        "framework": table.framework,
        "version": table.version,
        "also_for": list(table.also_for),
        "complete": table.complete,
        "device": table.device,
        "file": table.path.name,
        "licence": table.licence,
        "how": _HOW,
        "cache": CACHE,
    }
    return _write_recording(rows, public, machine, results)


def write_timings(
    timings: FileTimings, path: Path, defaults: FileDefaults, machine: Machine, results: Path
) -> Path:
    """Write the times of a user's file as a recording, and return the recording's folder.

    The recording's run.json has a digest of the file and of ``defaults``, because different
    defaults give different rows from the same file. The ``validation.json`` of an earlier import is
    deleted.

    ``path`` is the source of the times: a file, or the folder of another recording. ``results`` is
    the folder of all machines' results.

    Raises:
        UserError: if the machine does not support a dtype in ``timings``, or the recording cannot
            be written.
    """
    name = name_of(path)
    public = {
        "source": name,
        "package": "",
        "framework": FILE,
        "version": _digest(path, defaults),
        "file": name,
        "licence": "",
        "how": timings.how,
        "cache": timings.cache,
    }
    return _write_recording(timings.rows, public, machine, results)


def is_same_file(folder: Path, path: Path, defaults: FileDefaults) -> bool:
    """Return True if the recording was imported from the content of ``path`` with these defaults.

    The file's name may have changed.

    Raises:
        UserError: if the run.json of the recording cannot be read.
    """
    public = read_run(folder).get("public") or {}
    return public.get("framework") == FILE and public.get("version") == _digest(path, defaults)


def _digest(path: Path, defaults: FileDefaults) -> str:
    """Return a hash of the file's content and the defaults, as 16 hexadecimal digits."""
    file = path if path.is_file() else path / "measurements.csv"
    content = file.read_bytes() + repr(defaults).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def write_collections(tables: Sequence[PublicTable], machine: Machine, results: Path) -> None:
    """Write the rows of a machine's public tables into one Parquet file.

    ``tables`` begins with the preferred table.

    Raises:
        UserError: if the file cannot be written.
    """
    collections = [
        read_rows(table, *DTYPES.values()).assign(source=table.source) for table in tables
    ]
    folder = folder_of(results, machine.slug)
    make_folder(folder)
    (folder / VALIDATION).unlink(missing_ok=True)  # it was made from the earlier collections
    write_whole(folder / COLLECTIONS, _as_parquet(pd.concat(collections, ignore_index=True)))


def _write_recording(
    rows: pd.DataFrame, public: dict[str, Any], machine: Machine, results: Path
) -> Path:
    """Write the rows and the run.json of an imported recording, and return its folder."""
    for dtype in rows["dtype"].unique():
        machine.peak(dtype)  # raises an error for a dtype that the machine does not support
    folder = folder_of(results, machine.slug)
    make_folder(folder)
    (folder / VALIDATION).unlink(missing_ok=True)  # without it, the import counts as incomplete
    write_whole(folder / MEASUREMENTS, _as_parquet(rows))
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
