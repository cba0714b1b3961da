"""A columnar copy beside a large table, which is read many times as fast as the table is parsed.

The copy has the rows as they were checked, and what was said of those that were left out. It is
good as long as the table's size and time are those that it was made of; otherwise, and where it is
damaged, it is as if there were none.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import feather

from kernels.common.errors import UserError
from sweeps.schema import SCHEMA
from sweeps.store import write_whole

_LARGE = 4 << 20  # bytes: a smaller table is parsed as quickly
_KEY = b"rooftile"
_VERSION = 1  # of what is checked: an older copy may have rows that are refused now


def copy_path(path: Path) -> Path:
    """Where the copy of a table lies."""
    return path.with_name(f".{path.stem}.feather")


def read_copy(path: Path, state: Mapping[str, Any]) -> tuple[pd.DataFrame, tuple[str, ...]] | None:
    """The rows and the sentences of a table's copy; None if there is no good one."""
    if not copy_path(path).exists():
        return None
    try:
        table = feather.read_table(copy_path(path), memory_map=False)
        told = json.loads((table.schema.metadata or {})[_KEY])
        if told["of"] != state:
            return None
        return table.to_pandas(), tuple(map(str, told["damaged"]))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def write_copy(
    path: Path, state: Mapping[str, Any], rows: pd.DataFrame, damaged: Sequence[str]
) -> None:
    """Write the copy of a large table. Where that is not possible, reading takes longer."""
    if state["size"] < _LARGE:
        return
    table = pa.Table.from_pandas(rows, preserve_index=False)
    told = json.dumps({"of": state, "damaged": list(damaged)}).encode()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: told})
    buffer = io.BytesIO()
    feather.write_feather(table, buffer, compression="lz4")
    try:
        write_whole(copy_path(path), buffer.getvalue())
    except UserError:  # a full disk, or a folder of somebody else's
        return


def state_of(path: Path, run: str) -> dict[str, Any]:
    """What a copy of a table is good for: the table as it is now."""
    found = os.stat(path)
    return {
        "size": found.st_size, "time_ns": found.st_mtime_ns, "run": run, "schema": SCHEMA,
        "version": _VERSION,
    }  # fmt: skip
