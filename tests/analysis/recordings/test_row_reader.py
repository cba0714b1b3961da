"""Test that each line of a measurements.csv is checked for impossible values."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from analysis.recordings.csv_file import read_csv
from analysis.recordings.load import load
from analysis.recordings.runs import health_lines
from kernels.common.errors import UserError
from kernels.problem import Conv
from sweeps.cases.case import Case
from sweeps.schema import COLUMNS
from tests.support.synthetic import gemm_cases, model_law, problems, random_sizes, record

COUNT = 24
LINE = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cases = gemm_cases(dict.fromkeys(random_sizes(COUNT - 1)))
    cases.append(Case("made-up", Conv.parse("2,64,8,8,64,3,3,1,1,1,1,bf16"), "cudnn"))
    return record(tmp_path, cases, [*model_law()(problems(cases[:-1])), 1e-5])


def changed(folder: Path, line: int, **cells: str) -> None:
    """Replace some cells in one line of the file."""
    path = folder / "measurements.csv"
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    rows[line - 2].update(cells)
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(buffer.getvalue(), encoding="utf-8")


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"m": ""}, "a size of its problem is missing"),
        ({"m": "0"}, "m must be a whole number of at least 1"),
        ({"n": "-8"}, "n must be a whole number"),
        ({"k": "99999999999999"}, "k is too large"),
        ({"batch": "2000000000", "m": "2000000000"}, "more than any machine has"),
        ({"layout": "xx"}, "GEMM layout 'xx' is not known"),
        ({"op": "foo"}, "op is not one of gemm, conv"),
        ({"dtype": "fp7"}, "dtype is not one of"),
        ({"status": "fine"}, "status is not one of ok, wrong"),
        ({"cache": ""}, "cache is not one of"),
        ({"run": "another"}, "it belongs to another run"),
        ({"schema": "7"}, "this version cannot read its schema"),
        ({"time_us": "0"}, "time_us is not a valid time"),
        ({"time_us": "-1.5"}, "time_us is not a valid time"),
        ({"time_us": "nan"}, "time_us is not a valid time"),
        ({"time_us": "inf"}, "time_us is not a valid time"),
        ({"time_us": ""}, "time_us is not a valid time"),
        ({"time_us": "1e300"}, "time_us is not a valid time"),
        ({"time_lo_us": "1e9"}, "does not contain the time"),
        ({"time_hi_us": "1e-9"}, "does not contain the time"),
        ({"time_lo_us": "-1"}, "does not contain the time"),
        ({"time_hi_us": ""}, "does not contain the time"),
        ({"samples": "-1"}, "it has no samples"),
        ({"tflops": "-3"}, "tflops is not a valid rate"),
        ({"sm_mhz": "-3"}, "sm_mhz is below 0"),
        ({"rel_error": "inf"}, "rel_error is below 0 or infinite"),
        ({"temp_c": "1e300"}, "temp_c is out of range"),
        ({"kernels": "foo"}, "kernels is not JSON"),
        ({"kernels": '[["a"]]'}, "kernels is not a list of names and shares"),
        ({"m": "²"}, "m is not a whole number"),
        ({"converged": "maybe"}, "converged is not true or false"),
    ],
)
def test_a_bad_cell_costs_its_row_and_is_named(
    folder: Path, cells: dict[str, str], why: str
) -> None:
    changed(folder, LINE, **cells)
    recording = load(folder)
    (sentence,) = recording.damaged
    assert sentence.startswith(f"measurements.csv line {LINE} is damaged and was left out: ")
    assert why in sentence
    assert len(recording.rows) == COUNT - 1
    assert "1 damaged line of measurements.csv was left out." in health_lines(recording)


@pytest.mark.parametrize("cells", [{"stride": "0"}, {"groups": "7"}, {"r": "99"}, {"pass": ""}])
def test_a_convolution_is_checked_whole(folder: Path, cells: dict[str, str]) -> None:
    changed(folder, COUNT + 1, **cells)
    recording = load(folder)
    assert [s.split(" is damaged")[0] for s in recording.damaged] == ["measurements.csv line 25"]


def test_of_a_case_that_is_there_twice_the_first_row_counts(folder: Path) -> None:
    path = folder / "measurements.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines, "", lines[2]]) + "\n", encoding="utf-8")
    recording = load(folder)
    assert len(recording.rows) == COUNT
    (sentence,) = recording.damaged
    assert sentence == (
        f"measurements.csv line {COUNT + 3} is damaged and was left out: "
        "an earlier line has the same case."
    )


def test_a_file_that_is_damaged_all_over_is_refused(folder: Path) -> None:
    for line in (3, 4, 5):
        changed(folder, line, time_us="0")
    refusal = r"3 of 24 lines of .* are damaged, such as line 3 \(.*not a valid time\)"
    with pytest.raises(UserError, match=refusal):
        load(folder)


def test_a_wrong_result_may_be_as_wrong_as_it_likes(folder: Path) -> None:
    gone = dict.fromkeys(("time_us", "time_lo_us", "time_hi_us", "samples", "tflops", "gbps"), "")
    for line in range(2, 9):
        changed(folder, line, status="wrong", rel_error="3e22", **gone)
    recording = load(folder)
    assert not recording.damaged
    assert (recording.rows["status"] == "wrong").sum() == 7


def test_a_carriage_return_ends_no_line(folder: Path) -> None:
    path = folder / "measurements.csv"
    text = path.read_text(encoding="utf-8")
    path.write_bytes(text.replace("\n", "\r\n").encode())
    assert len(load(folder).rows) == COUNT
    lines = text.splitlines()
    path.write_bytes("\n".join([*lines[:3], "\r".join(lines[3:5]), *lines[5:], ""]).encode())
    recording = load(folder)
    assert [s.split(" is damaged")[0] for s in recording.damaged] == ["measurements.csv line 4"]


def test_a_file_of_damaged_lines_alone_is_refused(folder: Path) -> None:
    path = folder / "measurements.csv"
    header, line, *_ = path.read_text(encoding="utf-8").splitlines()
    cells = line.split(",")
    cells[list(COLUMNS).index("m")] = "x"
    path.write_text("\n".join([header, *[",".join(cells)] * 30_000, ""]), encoding="utf-8")
    with pytest.raises(UserError, match="30,000 of 30,000 lines of"):
        load(folder)


@pytest.mark.parametrize("cells", ['"', 'a"b', '""""', "a\tb", "\u2028", "'"])
def test_quotation_marks_cost_no_other_line(folder: Path, cells: str) -> None:
    path = folder / "measurements.csv"
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[LINE - 1] = lines[LINE - 1].replace(",ok,,", f",ok,{cells},")
    path.write_text("\n".join(lines), encoding="utf-8")
    assert len(load(folder).rows) >= COUNT - 1


@pytest.mark.parametrize(
    "line",
    ['a","b', '","', 'a"b,2,"5', '"a"b"c"', "\0" * 3_000_000, "x" * 3_000_000],
    ids=["two", "one", "open", "inside", "zeros", "long"],
)
def test_a_misplaced_quotation_or_a_long_line_changes_no_other_line(
    line: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"name,count\nx,1\n{line}\ny,2\nz,3\n", encoding="utf-8")
    rows, sentences = read_csv(path, {"name": "text", "count": "whole"}, "Do it.").sound_rows()
    assert rows.to_dict("list") == {"name": ["x", "y", "z"], "count": [1, 2, 3]}
    assert len(sentences) == 1


def test_a_header_with_an_unclosed_quotation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text('name,count,"other\nx,1,2\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"has a misplaced quotation mark\. Do it\."):
        read_csv(path, {"name": "text", "count": "whole"}, "Do it.")


def test_rows_without_a_schema_are_damaged(folder: Path) -> None:
    for line in range(2, COUNT + 2):
        changed(folder, line, schema="")
    with pytest.raises(UserError, match="24 of 24 lines of .*cannot read its schema"):
        load(folder)


def test_deeply_nested_kernels_cost_their_row(folder: Path) -> None:
    changed(folder, LINE, kernels="[" * 100_000)
    assert [sentence.endswith("kernels is not JSON.") for sentence in load(folder).damaged] == [
        True
    ]


def test_a_row_without_a_time_needs_none(folder: Path) -> None:
    gone = dict.fromkeys(("time_us", "time_lo_us", "time_hi_us", "samples", "tflops", "gbps"), "")
    changed(folder, LINE, status="oom", **gone)
    recording = load(folder)
    assert not recording.damaged
    assert len(recording.ok) == COUNT - 1


def test_what_is_left_out_is_said_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(folder, LINE, time_us="0")
    for _ in range(2):
        load(folder)
    said = capsys.readouterr().err
    assert said.count("line 5 is damaged and was left out: time_us is not a valid time") == 1
