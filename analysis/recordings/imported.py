"""Read recordings that were imported from public tables or from users' files.

The imported recording of a machine is stored in ``results/public/<machine>/``. Its file
measurements.parquet has the times, and its run.json says where these times come from. The file
collections.parquet has the rows of the machine's public tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from analysis.recordings.csv_file import FRAME_TYPES
from kernels.common.checks import LARGEST_SIZE
from kernels.common.errors import UserError
from kernels.common.program import command
from sweeps.schema import COLUMNS, SCHEMA, problem_of
from sweeps.store import read_run

PLACE = "public"
MEASUREMENTS = "measurements.parquet"
COLLECTIONS = "collections.parquet"
FILE = "file"
"""Value of ``framework`` in run.json if the times come from a user's file."""

VALIDATION = "validation.json"  # written last; if it exists, the import is complete
CACHE = "warm"
"""Cache state in which public tables were measured. CUDA graphs were replayed without flushing the
cache, so operands that fit in the cache were read from it."""

OTHERS_PROTOCOL = 0
"""Protocol version of imported recordings, which may have been measured with another protocol."""

_DEFAULTS = {
    "op": "gemm", "batch": 1, "dtype": "bf16", "layout": "nt", "implementation": "cublas",
    "config": "", "mode": "burst", "cache": CACHE, "fill": "", "status": "ok", "sweep": PLACE,
    "schema": SCHEMA,
}  # fmt: skip
"""Default values of columns that an imported table may lack."""


def folder_of(results: Path, slug: str) -> Path:
    """Return the folder of a machine's imported table."""
    return results / PLACE / slug


def is_complete(folder: Path) -> bool:
    """Return True if the import into a folder was finished."""
    return (folder / "run.json").exists() and (folder / VALIDATION).exists()


def is_of_file(folder: Path) -> bool:
    """Return True if a folder has a recording that was imported from a user's file.

    Raises:
        UserError: if the folder's run.json is damaged or cannot be read.
    """
    if not (folder / "run.json").exists():
        return False
    return (read_run(folder).get("public") or {}).get("framework") == FILE


def read_collections(folder: Path) -> dict[str, pd.DataFrame]:
    """Return a machine's public tables, called collections, by the name of their source.

    The result is empty if the folder has no collections. Each table has the columns ``source``,
    ``m``, ``n``, ``k``, ``dtype`` and ``time_us``.

    Raises:
        UserError: if the file of collections cannot be read, or has an invalid row.
    """
    path = folder / COLLECTIONS
    if not path.exists():
        return {}
    try:
        rows = pd.read_parquet(path, columns=["source", "m", "n", "k", "dtype", "time_us"])
        sound = _are_sound(rows)
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None
    if not sound.all():
        raise _unsound(path, sound)
    return {str(source): collection for source, collection in rows.groupby("source", sort=False)}


def import_again(folder: Path) -> str:
    """Return the sentences that say how to replace a damaged import.

    A finished import is not repeated, so its folder has to be moved away first.
    """
    again = command(f"analysis import --machine {folder.name}")
    return (
        f"Move {folder} away; then run {again}. If you imported a file of your own, add its path "
        "to the command."
    )


def _unreadable(path: Path, error: Exception) -> UserError:
    lines = str(error).splitlines()
    reason = lines[0] if lines else type(error).__name__
    return UserError(f"{path} cannot be read ({reason}). {import_again(path.parent)}")


def _are_sound(rows: pd.DataFrame) -> NDArray[np.bool_]:
    """Return a mask of the rows with valid sizes and a valid time; a missing value is not valid.

    Raises:
        KeyError: if the table lacks a required column.
        ValueError, TypeError: if a size or a time is not a number.
    """
    size_columns = ["m", "n", "k"]
    if "batch" in rows:
        size_columns.append("batch")
    sizes = rows[size_columns].to_numpy(dtype=float, na_value=np.nan)
    times = rows["time_us"].to_numpy(dtype=float, na_value=np.nan)
    valid: NDArray[np.bool_] = ((sizes >= 1) & (sizes <= LARGEST_SIZE)).all(axis=1)
    return valid & (times > 0) & (times < np.inf)


def _unsound(path: Path, sound: NDArray[np.bool_]) -> UserError:
    first_unsound = int(np.argmin(sound))  # position of the first False
    return UserError(
        f"row {first_unsound + 1} of {path} has an invalid size or time. "
        f"{import_again(path.parent)}"
    )


def read_imported(folder: Path) -> pd.DataFrame:
    """Read an imported table, and return its rows with all columns of measurements.csv.

    A column that the table lacks gets its default value, or missing values if it has no default.
    The column ``tflops`` is computed from the sizes and the times.

    Raises:
        UserError: if the file cannot be read as a table of times, or has an invalid row.
    """
    path = folder / MEASUREMENTS
    try:
        table = pd.read_parquet(path)
        table = table[[name for name in table if name in COLUMNS]]
        sound = _are_sound(table)
        # A table with an unsound row is not converted, because the conversion could fail with an
        # error that does not name the row.
        rows = _with_all_columns(table) if sound.all() else None
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None
    # A UserError is a ValueError, so it has to be raised outside the ``try`` statement.
    if rows is None:
        raise _unsound(path, sound)
    return rows


def _with_all_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Convert an imported table as :func:`read_imported` describes, and give each column its type.

    Raises:
        KeyError, TypeError, ValueError: if a value cannot be converted to the type of its column,
            or if a row that is not a GEMM does not describe a valid problem.
    """
    # 1. Take the columns of the table, and defaults for the columns that it lacks. A column without
    # a default gets missing values.
    values: dict[str, Any] = {**_DEFAULTS, **{name: table[name] for name in table}}
    columns = {
        name: pd.Series(values.get(name), index=table.index, dtype=FRAME_TYPES[kind])
        for name, (kind, _) in COLUMNS.items()
    }
    rows = pd.DataFrame(columns)
    # 2. Compute the speeds. A table may have very many GEMMs, so their FLOPs are computed at once.
    is_gemm = rows["op"] == "gemm"
    flops = 2.0 * rows["m"] * rows["n"] * rows["k"] * rows["batch"]
    other_rows = rows[~is_gemm].to_dict("records")
    flops[~is_gemm] = [float(problem_of(row).flops) for row in other_rows]
    rows["tflops"] = (flops / rows["time_us"] / 1e6).astype(rows["tflops"].dtype)
    return rows
