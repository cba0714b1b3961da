"""Test that records with different columns are written into one table."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from analysis.recordings.write import write_records


def test_records_with_other_keys_keep_their_values_below_their_names(tmp_path: Path) -> None:
    records = [{"op": "gemm", "m": 3, "why": None}, {"op": "conv", "c": 64, "why": "many, small"}]
    write_records(tmp_path, "table", records)
    with open(tmp_path / "table.csv", encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"op": "gemm", "m": "3", "why": "", "c": ""},
            {"op": "conv", "m": "", "why": "many, small", "c": "64"},
        ]
    assert json.loads((tmp_path / "table.json").read_text(encoding="utf-8")) == records


def test_no_record_is_an_empty_table(tmp_path: Path) -> None:
    write_records(tmp_path, "table", [])
    assert (tmp_path / "table.csv").read_text(encoding="utf-8").strip() == ""
    assert json.loads((tmp_path / "table.json").read_text(encoding="utf-8")) == []
