"""Test that anchors.csv is read, and that damage in it is found."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.fleet.anchors import anchor_folders, kind_of, read_anchors
from kernels.common.errors import UserError
from kernels.operation import Layer
from kernels.problem import Gemm
from sweeps.cases.case import Case
from sweeps.store import ANCHOR_COLUMNS, write_anchors
from tests.studies.fleets import MACHINE, MAIN, Setting, record_fleet, rows_of, simulate

Rows = list[dict[str, Any]]
SMALL = Setting(2, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return record_fleet(tmp_path / MACHINE.slug, simulate(SMALL, 0)[0])


def rows_in(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "anchors.csv").read_text(encoding="utf-8"))))


def write_rows(folder: Path, rows: Rows) -> None:
    write_anchors(folder, rows)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    fleet, _ = simulate(MAIN, 0)
    read = read_anchors(record_fleet(tmp_path / MACHINE.slug, fleet))
    assert not read.damaged
    assert read.fleet.devices == fleet.devices
    one, other = (f.log_time[:, :, f.kinds == "sustained"] for f in (read.fleet, fleet))
    np.testing.assert_allclose(one, other)
    np.testing.assert_allclose(np.sort(read.fleet.log_time), np.sort(fleet.log_time))
    np.testing.assert_allclose(np.sort(read.fleet.error), np.sort(fleet.error), atol=1e-9)
    for name, values in fleet.sensors.items():
        np.testing.assert_allclose(np.sort(read.fleet.sensors[name]), np.sort(values))
    assert set(read.fleet.throttled) == {"hw_thermal_slowdown"}
    (seen,), (was,) = (f.throttled.values() for f in (read.fleet, fleet))
    assert seen.sum() == (was & np.isfinite(fleet.log_time)).sum() > 0


def test_the_latest_run_of_a_gpu_and_an_anchor_counts(folder: Path) -> None:
    rows: Rows = list(rows_in(folder))
    later = "2026-02-02T00:00:00Z"
    later_rows = [
        {**row, "run": later, "time_utc": "2026-02-02T00:01:00Z", "gpu": 5, "time_us": 123.0,
         "time_lo_us": 122.0, "time_hi_us": 124.0}
        for row in rows if row["gpu"] == "1" and row["phase"] == "alone"
    ]  # fmt: skip
    gpu = next(row["gpu_id"] for row in rows if row["gpu"] == "1")
    write_rows(folder, [*later_rows, *rows])
    fleet = read_anchors(folder).fleet
    (position,) = [i for i, device in enumerate(fleet.devices) if device.id == gpu]
    assert len(fleet.devices) == 6
    is_retimed = np.isfinite(fleet.log_time[0, position])
    assert np.allclose(fleet.log_time[0, position, is_retimed], np.log(123))
    # Only the earlier run timed them in the second phase, so they have no time there.
    assert np.isnan(fleet.log_time[1, position, is_retimed]).all()


def test_without_ids_places_tell_gpus_apart(folder: Path) -> None:
    rows: Rows = [{**row, "gpu_id": ""} for row in rows_in(folder)]
    write_rows(folder, rows)
    fleet = read_anchors(folder).fleet
    assert [device.gpu for device in fleet.devices] == list(range(6))
    assert {device.id for device in fleet.devices} == {""}
    assert {device.power_limit_w for device in fleet.devices} == {700.0}


def test_a_gpu_without_an_id_that_served_two_workers_is_one_device(folder: Path) -> None:
    rows: Rows = [{**row, "gpu_id": ""} for row in rows_in(folder)]
    resumed = [
        {**row, "worker": "2/2", "time_utc": "2026-01-02T04:00:00Z"}
        for row in rows if row["gpu"] == "0"
    ]  # fmt: skip
    write_rows(folder, [*rows, *resumed])
    devices = read_anchors(folder).fleet.devices
    assert [device.gpu for device in devices] == list(range(6))
    assert devices[0].worker == "2/2"


def test_without_gpus_nodes_tell_devices_apart(folder: Path) -> None:
    rows: Rows = [{**row, "gpu": "", "gpu_id": "", "worker": f"{int(row['node']) + 1}/2"}
                  for row in rows_in(folder) if row["gpu"] in ("0", "3")]  # fmt: skip
    write_rows(folder, rows)
    devices = read_anchors(folder).fleet.devices
    assert [(device.gpu, device.node) for device in devices] == [(None, 0), (None, 1)]


def test_run_json_may_say_nothing_of_the_gpus(tmp_path: Path) -> None:
    fleet, _ = simulate(SMALL, 0)
    bare = read_anchors(record_fleet(tmp_path / "a", fleet, gpus=[])).fleet.devices
    assert np.isnan([device.power_limit_w for device in bare]).all()
    places: Rows = [{"gpu": 0, "node": 0, "power_limit_w": None}, {"gpu": 1, "node": 0}]
    read_anchors(record_fleet(tmp_path / "b", fleet, gpus=places))
    places[0]["power_limit_w"] = "much"
    with pytest.raises(UserError, match=r"gpus\[0\].power_limit_w is 'much'"):
        read_anchors(record_fleet(tmp_path / "c", fleet, gpus=places))


@pytest.mark.parametrize(
    ("column", "cell", "why"),
    [
        ("time_us", "", "time_us is not a valid time"),
        ("time_us", "-1", "time_us is not a valid time"),
        ("time_us", "fast", "time_us is not a number"),
        ("time_us", "nan", "time_us is not a valid time"),
        ("time_lo_us", "1e9", "its interval does not contain the time"),
        ("time_hi_us", "", "its interval does not contain the time"),
        ("phase", "later", "phase is not one of alone, together"),
        ("m", "", "its columns do not describe a valid case"),
        ("op", "gem", "its columns do not describe a valid case"),
        ("mode", "sprint", "its columns do not describe a valid case"),
        ("gpu", "1.5", "gpu is not a whole number from 0 to 2,147,483,647"),
        ("node", "-2", "node is not a whole number from 0 to 2,147,483,647"),
        ("gpu_id", "GPU-12", "gpu_id is not a hexadecimal hash"),
        ("samples", "0", "it has no samples"),
        ("samples", "", "it has no samples"), ("sm_mhz", "-5", "sm_mhz is out of range"),
        ("time_utc", "today", "time_utc is not a UTC time"),
    ],
)  # fmt: skip
def test_a_damaged_row_is_named_and_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str], column: str, cell: str, why: str
) -> None:
    rows: Rows = list(rows_in(folder))
    rows[3][column] = cell
    write_rows(folder, rows)
    read = read_anchors(folder)
    assert read.damaged == (f"anchors.csv line 5 is damaged and was left out: {why}.",)
    assert why in capsys.readouterr().err
    assert np.isfinite(read.fleet.log_time).sum() == len(rows) - 1


def test_a_line_cut_in_half_is_left_out(folder: Path) -> None:
    path = folder / "anchors.csv"
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:-40], encoding="utf-8")
    (sentence,) = read_anchors(folder).damaged
    assert "its cells do not match the header" in sentence


def test_too_much_damage_is_refused(folder: Path) -> None:
    rows: Rows = list(rows_in(folder))
    for row in rows[::5]:
        row["time_us"] = "x"
    write_rows(folder, rows)
    with pytest.raises(UserError, match=r"lines of .*anchors.csv are damaged.*measure the anchors"):
        read_anchors(folder)


def test_a_missing_column_is_named(folder: Path) -> None:
    path = folder / "anchors.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("phase", "stage", 1), encoding="utf-8")
    with pytest.raises(UserError, match="has no column 'phase'"):
        read_anchors(folder)


def test_columns_that_a_later_version_adds_are_no_damage(folder: Path) -> None:
    rows = rows_in(folder)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ["slot", *ANCHOR_COLUMNS])
    writer.writeheader()
    writer.writerows({"slot": "A", **row} for row in rows)
    (folder / "anchors.csv").write_text(buffer.getvalue(), encoding="utf-8")
    assert not read_anchors(folder).damaged


@pytest.mark.parametrize("content", ["", ",".join(ANCHOR_COLUMNS) + "\n", "\x00\xff\n"])
def test_a_file_without_rows_is_refused_in_a_sentence(folder: Path, content: str) -> None:
    (folder / "anchors.csv").write_text(content, encoding="latin-1")
    with pytest.raises(UserError):
        read_anchors(folder)


def test_where_anchors_are_looked_for(folder: Path) -> None:
    assert anchor_folders(folder) == anchor_folders(folder.parent) == [folder]
    (folder / "anchors.csv").unlink()
    with pytest.raises(UserError, match="has no anchors.csv. .*sweeps run"):
        anchor_folders(folder)
    with pytest.raises(UserError, match="no recording in"):
        anchor_folders(folder.parent)
    with pytest.raises(UserError, match="no recording in"):
        anchor_folders(folder / "nowhere")


def test_kinds_follow_the_machines_ceilings() -> None:
    def kind(workload: Any, mode: str = "burst") -> str:
        return kind_of(Case("anchors", workload, "x", mode=mode), MACHINE)

    assert kind(Gemm(8192, 8192, 8192, "bf16")) == "burst"
    assert kind(Gemm(8192, 8192, 8192, "bf16"), "sustained") == "sustained"
    assert kind(Gemm(16, 14336, 4096, "bf16")) == "memory"
    assert kind(Gemm(256, 256, 256, "bf16")) == "small"
    assert kind(Layer("relu", 65536, 4096, 1, 1, "fp16")) == "memory"


CELLS = ("", "nan", "inf", "1e400", "-0.0", "²", "9" * 400, "\x00", '"', "a,b")


@pytest.mark.slow
@given(
    st.integers(0, 10_000), st.sampled_from(ANCHOR_COLUMNS),
    st.one_of(st.sampled_from(CELLS), st.text(max_size=8), st.floats().map(repr),
              st.integers().map(str)),
)  # fmt: skip
def test_no_cell_brings_the_reader_down(
    tmp_path_factory: pytest.TempPathFactory, at: int, column: str, cell: str
) -> None:
    """Each cell is read, or its line is left out, or the file is refused in a sentence."""
    folder = tmp_path_factory.mktemp("cells") / MACHINE.slug
    fleet, _ = simulate(Setting(1, 2), 0)
    record_fleet(folder, fleet)
    rows = list(rows_of(fleet))
    rows[at % len(rows)][column] = cell
    write_rows(folder, rows)
    try:
        read = read_anchors(folder)
    except UserError:
        return
    assert np.isfinite(read.fleet.log_time).sum() >= len(rows) - len(read.damaged) - 1
