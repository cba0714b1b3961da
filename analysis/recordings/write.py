"""Write a table of records both as CSV and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.store import write_csv, write_json


def write_records(folder: Path, name: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Write ``name.json`` and ``name.csv``; None is null in JSON and an empty cell in CSV.

    The CSV has the columns of all records, because records of GEMMs and of convolutions have
    different columns.

    Raises:
        UserError: if a file cannot be written.
        ValueError: if a record contains a number that is not finite.
    """
    write_json(folder / f"{name}.json", list(records))
    columns = list(dict.fromkeys(column for record in records for column in record))
    write_csv(folder / f"{name}.csv", columns, records)
