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
    """Write ``name.json`` and ``name.csv``; None is null in the one and empty in the other.

    The table has the columns of all records: a GEMM has other sizes than a convolution.
    """
    document = json.dumps(list(records), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(folder / f"{name}.json", document + "\n")
    buffer = io.StringIO(newline="")
    columns = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_whole(folder / f"{name}.csv", buffer.getvalue())
