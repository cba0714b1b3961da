"""The columnar copy beside a large table: as good as the table, or not used."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from analysis.recordings import copies
from analysis.recordings.copies import copy_path
from analysis.recordings.load import load
from tests.support.synthetic import RUN, gemm_cases, model_law, problems, random_sizes, record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording that counts as large, one line of which is damaged."""
    monkeypatch.setattr(copies, "_LARGE", 0)
    cases = gemm_cases(dict.fromkeys(random_sizes(30)))
    record(tmp_path, cases, model_law()(problems(cases)))
    path = tmp_path / "measurements.csv"
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[4] = lines[4].replace(",ok,", ",fine,")
    path.write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def test_a_copy_is_what_it_was_made_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(folder)
    assert copy_path(folder / "measurements.csv").exists()
    monkeypatch.setattr("analysis.recordings.rows.parse_measurements", None)  # it is not parsed
    again = load(folder)
    pd.testing.assert_frame_equal(first.rows, again.rows)
    assert first.damaged == again.damaged
    assert len(first.damaged) == 1


def test_a_changed_table_is_read_again(folder: Path) -> None:
    path = folder / "measurements.csv"
    before = path.stat()
    load(folder)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(",fine,", ",ok,"), encoding="utf-8")
    assert not load(folder).damaged
    path.write_text(text, encoding="utf-8")  # of the first size again, at another time
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert load(folder).damaged


def test_a_copy_of_a_stranger_is_checked_like_the_table(folder: Path) -> None:
    load(folder)
    path = folder / "measurements.csv"
    state = copies.state_of(path, RUN)
    known = copies.read_copy(path, state)
    assert known is not None
    for strange in (-1.0, "fast"):
        copies.write_copy(path, state, known[0].assign(time_us=strange), known[1])
        assert (load(folder).rows["time_us"] > 0).all()


@pytest.mark.parametrize("data", [b"", b"no feather", b"ARROW1\0\0" + b"\0" * 100])
def test_a_damaged_copy_is_as_if_there_were_none(folder: Path, data: bytes) -> None:
    load(folder)
    copy = copy_path(folder / "measurements.csv")
    copy.write_bytes(data)
    assert len(load(folder).rows) == 29
    assert len(copy.read_bytes()) > len(data)


def test_a_small_table_has_none(tmp_path: Path) -> None:
    cases = gemm_cases([(64, 64, 64)])
    record(tmp_path, cases, [1e-6])
    load(tmp_path)
    assert not copy_path(tmp_path / "measurements.csv").exists()
