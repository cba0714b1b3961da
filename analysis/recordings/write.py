"""A table of records as CSV and JSON, side by side."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.store import write_whole


def write_records(folder: Path, name: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Write ``name.json`` and ``name.csv``; None is null in the one and empty in the other."""
    document = json.dumps(list(records), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(folder / f"{name}.json", document + "\n")
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(records[0] if records else [])
    for record in records:
        writer.writerow(["" if value is None else value for value in record.values()])
    write_whole(folder / f"{name}.csv", buffer.getvalue())
