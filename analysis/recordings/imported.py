"""Recordings that were imported from other people's tables and files.

They lie under ``results/public/<machine>/``. The times stand in measurements.parquet; run.json says
whose they are and how they were measured. collections.parquet has all tables of that machine which
a package holds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from kernels.common.checks import LARGEST_SIZE
from kernels.common.errors import UserError
from kernels.common.program import command
from sweeps.schema import COLUMNS, SCHEMA
from sweeps.store import read_run

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


def read_collections(folder: Path) -> dict[str, pd.DataFrame]:
    """The rows of each collection of a machine by its source, in their order; none without any.

    They are as :func:`analysis.imports.tables.read_rows` returns them.
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
        f"row {int(np.argmin(sound)) + 1} of {path} is not a GEMM with a time; "
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
