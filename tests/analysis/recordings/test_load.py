from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.recordings.csv_file import read_csv
from analysis.recordings.load import find_recording, load, problems_of, slug_at
from kernels.common.errors import UserError
from kernels.problem import Conv, Gemm, Problem
from sweeps.cases.case import Case
from sweeps.schema import COLUMNS
from sweeps.store import read_run, write_run, write_table
from tests.support.synthetic import gemm_cases, measured_in_turn, record, recorded

text = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), max_size=30)
real = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=50)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "message": text, "kernel": text, "time_us": real, "rel_error": real,
                "samples": st.integers(0, 100), "converged": st.booleans(),
                "m": st.integers(1, 2**40),
            }
        ),
        min_size=1, max_size=20,
    )
)  # fmt: skip
def test_everything_reads_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("table")
    write_table(folder, rows)
    kinds = {name: kind for name, (kind, _) in COLUMNS.items()}
    frame, damaged = read_csv(folder / "measurements.csv", kinds, "").sound_rows()
    assert damaged == ()
    for name in rows[0]:
        got = frame[name].tolist()
        assert got == [row[name] for row in rows], name
    assert frame["sm_mhz"].isna().all()
    assert frame["sweep"].eq("").all()
    assert list(frame.columns) == list(COLUMNS)


def test_problems_read_back(tmp_path: Path) -> None:
    problems: list[Problem] = [
        Gemm(7, 8, 9, "tf32", "tn", 5),
        Conv.parse("2,8,9,10,16,3,1,2x1,1x0,1x2,2,bf16,nchw,dgrad"),
    ]
    cases = [Case("s", problem, "cublas") for problem in problems]
    frame = load(record(tmp_path, cases, [1e-6, 2e-6])).rows
    assert problems_of(frame) == problems


CELLS = "it is not UTF-8 text, or its cells do not match the header"


def lines_of(folder: Path) -> list[str]:
    return (folder / "measurements.csv").read_text().split("\n")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda line: line[: len(line) // 2], CELLS),
        (lambda line: line.replace(",ok,", ",ok,,,,"), CELLS),
        (lambda line: line.replace(",true,", ",maybe,"), "converged is not true or false"),
        (lambda line: line.replace(",9,true", ",nine,true"), "samples is not a whole number"),
        (lambda line: "\x00\x01\x02", CELLS),
        # Python reads 1_0 as 10, but Arrow does not.
        (lambda line: line.replace(",9,true", ",1_0,true"), "samples is not a whole number"),
        (lambda line: line.replace(",ok,", ',ok,"'), CELLS),
    ],
    ids=["cut", "too many cells", "no truth", "no number", "noise", "1_0", "quote"],
)
def test_a_damaged_line_is_named_and_the_others_are_read(
    tmp_path: Path, spoil: Callable[[str], str], why: str
) -> None:
    cases = gemm_cases([(64, 64, 64), (128, 128, 128), (256, 256, 256)])
    record(tmp_path, cases, [1e-6, 2e-6, 3e-6])
    lines = lines_of(tmp_path)
    lines[2] = spoil(lines[2])
    (tmp_path / "measurements.csv").write_text("\n".join(lines))
    recording = load(tmp_path)
    assert recording.damaged == (f"measurements.csv line 3 is damaged and was left out: {why}.",)
    assert recording.rows["m"].tolist() == [64, 256]


def test_a_byte_order_mark_is_not_part_of_the_header(tmp_path: Path) -> None:
    record(tmp_path, gemm_cases([(64, 64, 64)]), [1e-6])
    path = tmp_path / "measurements.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(tmp_path).rows["m"].tolist() == [64]


def test_rows_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    cases = gemm_cases([(64, 64, 64), (128, 128, 128)])
    record(tmp_path, cases, [1e-6, 2e-6])
    whole = (tmp_path / "measurements.csv").read_text()
    (tmp_path / "measurements.csv").write_text(whole.replace("2026-01-02T03:04:05Z", "other", 1))
    with pytest.raises(UserError, match="has measurements from .*, but the run.json next to"):
        load(tmp_path)
    (tmp_path / "measurements.csv").write_text(whole.replace("\n1,2026", "\n2,2026", 1))
    with pytest.raises(UserError, match="with schema 2, but this version reads schema 1"):
        load(tmp_path)


@pytest.mark.parametrize("version", ["schema", "protocol"])
def test_another_schema_or_protocol_is_refused(tmp_path: Path, version: str) -> None:
    record(tmp_path, gemm_cases([(64, 64, 64)]), [1e-6])
    write_run(tmp_path, {**read_run(tmp_path), version: 99})
    with pytest.raises(UserError, match="This version reads schema"):
        load(tmp_path)


def test_missing_and_broken_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run.json cannot be read"):
        load(tmp_path)
    record(tmp_path, gemm_cases([(64, 64, 64)]), [1e-6])
    (tmp_path / "measurements.csv").unlink()
    with pytest.raises(UserError, match="measurements.csv cannot be read"):
        load(tmp_path)
    (tmp_path / "measurements.csv").write_text("a,b,c\n1,2\n")
    with pytest.raises(UserError, match="has no column 'schema'"):
        load(tmp_path)


def test_a_machines_own_run_is_preferred_to_a_recording(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is recorded yet"):
        find_recording(None, tmp_path)
    record(tmp_path / "published/nvidia-h200", gemm_cases([(64, 64, 64)]), [1e-6])
    with pytest.raises(UserError, match="measured here yet; .* name a recorded machine: nvidia-h2"):
        find_recording(None, tmp_path)
    record(tmp_path / "nvidia-a100-sxm-80gb", gemm_cases([(64, 64, 64)]), [1e-6])
    assert find_recording("nvidia-h200", tmp_path) == tmp_path / "published" / "nvidia-h200"
    assert find_recording(None, tmp_path).name == "nvidia-a100-sxm-80gb"
    record(tmp_path / "nvidia-h200", gemm_cases([(64, 64, 64)]), [1e-6])
    assert find_recording("nvidia-h200", tmp_path) == tmp_path / "nvidia-h200"
    names = ["nvidia-h200", "nvidia-a100-sxm-80gb"]
    for _ in range(2):  # each machine is once the one that was measured last
        names.append(names.pop(0))
        measured_in_turn(*(tmp_path / name for name in names))
        assert find_recording(None, tmp_path).name == names[-1]
    with pytest.raises(
        UserError,
        match="nvidia-h20 has no recording; choose a recorded machine: nvidia-a100",
    ):
        find_recording("h20", tmp_path)
    assert find_recording("H200", tmp_path) == tmp_path / "nvidia-h200"


def test_a_part_of_a_cpus_slug_names_it(tmp_path: Path) -> None:
    slug = "cpu-intel-xeon-avx512bf16-1t"
    record(tmp_path / slug, gemm_cases([(64, 64, 64)]), [1e-6])
    assert slug_at(tmp_path, "cpu-intel-xeon") == slug
    assert slug_at(tmp_path, "cpu-xeon-1t") == "cpu-xeon-1t"  # a whole slug, of another CPU


def test_the_caption_has_machine_versions_and_date(tmp_path: Path) -> None:
    caption = recorded(tmp_path, 20).caption()
    assert caption == "NVIDIA H100 80GB HBM3  ·  torch 2.13.0, cuda 13.0  ·  measured 2026-01-02"


def test_rows_without_times_are_not_ok(tmp_path: Path) -> None:
    record(tmp_path, gemm_cases([(64, 64, 64), (128, 128, 128)]), [1e-6, 2e-6])
    lines = lines_of(tmp_path)
    (tmp_path / "measurements.csv").write_text("\n".join(lines).replace(",ok,", ",oom,", 1))
    recording = load(tmp_path)
    assert len(recording.rows) == 2
    assert recording.ok["m"].tolist() == [128]
    assert isinstance(recording.rows, pd.DataFrame)
    assert not math.isnan(recording.ok["time_us"].iloc[0])
