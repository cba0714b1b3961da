"""Test the ratios by class on recordings whose times are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from analysis.comparing.families import (
    BEST,
    _fastest,
    compare_families,
    shape_class,
    summarise,
    write_families,
)
from analysis.recordings.load import load
from kernels.common.errors import UserError
from kernels.problem import Conv, Gemm, Problem
from sweeps.cases.case import Case
from tests.support.synthetic import record

LARGE, SKINNY = Gemm(4096, 4096, 4096, "bf16"), Gemm(16, 4096, 4096, "bf16")
CONV = Conv(8, 64, 28, 28, 64, 3, 3, (1, 1), (1, 1), (1, 1), 1, "bf16", "nhwc", "wgrad")
Row = tuple[str, Problem, str, str, float]


def recording(folder: Path, rows: list[Row], unreached: int = 0, left_out: int = 0) -> Path:
    cases = [Case(sweep, problem, name, config) for sweep, problem, name, config, _ in rows]
    planned = [case.columns() for case in cases]
    planned += [{**planned[5], "config": f"bm={i}"} for i in range(unreached)]
    plan = {"cases": planned, "left_out": {"candidates": left_out} if left_out else {}}
    return record(folder, cases, [microseconds * 1e-6 for *_, microseconds in rows], plan=plan)


ROWS: list[Row] = [
    ("families", LARGE, "cublas", "", 200.0),
    ("families", LARGE, "triton-tiled", "bm=128", 250.0),
    ("families", LARGE, "triton-streamk", "bm=128", 160.0),
    ("families", SKINNY, "cublas", "", 10.0),
    ("families", SKINNY, "triton-tiled", "bm=16", 10.05),
    ("candidates", LARGE, "triton-tiled", "bm=64", 190.0),
    ("candidates", LARGE, "triton-tiled", "bm=128", 250.0),
    ("families-conv", CONV, "cudnn", "", 30.0),
    ("families-conv", CONV, "cudnn", "autotune=on", 20.0),
    ("families-conv", CONV, "triton-conv", "split=4", 25.0),
    # The vendor library has no time for this shape.
    ("families", Gemm(64, 64, 64, "bf16"), "triton-tiled", "bm=16", 3.0),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recording(tmp_path / "nvidia-h100-sxm", ROWS)


def test_ratios_are_against_the_library_at_its_best(folder: Path) -> None:
    table = compare_families(load(folder)).set_index(["problem", "family"])
    assert table.loc[(LARGE, "triton-tiled"), "ratio"] == pytest.approx(0.8)
    assert table.loc[(LARGE, "triton-streamk"), "ratio"] == pytest.approx(1.25)
    assert table.loc[(LARGE, BEST), "ratio"] == pytest.approx(1.25)
    # The library's best time is that of its autotuner, 20 µs.
    assert table.loc[(CONV, "triton-conv"), "ratio"] == pytest.approx(0.8)
    assert len(table) == 2 + 1 + 1 + 3
    skinny = table.loc[(SKINNY, "triton-tiled")]
    assert skinny["ratio_lo"] == pytest.approx(10 * 0.99 / (10.05 * 1.01))
    assert skinny["ratio_hi"] == pytest.approx(10 * 1.01 / (10.05 * 0.99))


def test_the_chosen_config_is_compared_with_the_best_candidate(folder: Path) -> None:
    table = compare_families(load(folder)).set_index(["problem", "family"])
    assert table.loc[(LARGE, "triton-tiled"), "found"] == pytest.approx(190 / 250)
    assert table.loc[(LARGE, "triton-tiled"), "best_config"] == "bm=64"
    assert table["found"].notna().sum() == 1


def test_a_config_that_the_kernel_did_not_choose_does_not_count(tmp_path: Path) -> None:
    rows: list[Row] = [*ROWS, ("warp-specialisation", LARGE, "triton-tiled", "bm=256", 100.0)]
    table = compare_families(load(recording(tmp_path / "run", rows)))
    chosen = table.set_index(["problem", "family"]).loc[(LARGE, "triton-tiled")]
    assert (chosen["config"], chosen["time_us"]) == ("bm=128", 250.0)


@pytest.mark.parametrize("unfinished", [{"unreached": 1}, {"left_out": 1}])
def test_a_search_that_was_not_finished_finds_nothing(
    tmp_path: Path, unfinished: dict[str, int]
) -> None:
    folder = recording(tmp_path / "nvidia-h100-sxm", ROWS, **unfinished)
    assert compare_families(load(folder))["found"].isna().all()


def test_an_unknown_interval_is_not_filled_by_a_slower_row() -> None:
    rows = pd.DataFrame(
        {"problem": ["a", "a"], "time_us": [2.0, 1.0], "steady_error": [0.1, math.nan]}
    )
    fastest = _fastest(rows, ["problem"])
    assert fastest.loc["a", "time_us"] == 1.0
    assert math.isnan(fastest.loc["a", "steady_error"])


def test_classes_are_summed_up(folder: Path) -> None:
    rows = {(row["family"], row["class"]): row for row in summarise(compare_families(load(folder)))}
    both = rows[("triton-tiled", "all")]
    assert (both["shapes"], both["searched"]) == (2, 1)
    assert both["ratio"] == pytest.approx((0.8 * 10 / 10.05) ** 0.5)
    assert (both["wins"], both["worst"]) == (0.0, pytest.approx(0.8))
    assert both["worst_shape"] == str(LARGE)
    assert rows[("triton-streamk", "large")]["clear_wins"] == 1.0
    assert rows[("triton-tiled", "skinny")]["found"] is None
    assert rows[("triton-conv", "wgrad wide")]["op"] == "conv"


def test_several_dtypes_are_also_summed_up_one_by_one(tmp_path: Path) -> None:
    in_fp32 = Gemm(4096, 4096, 4096, "fp32")
    rows: list[Row] = [
        *ROWS,
        ("families", in_fp32, "cublas", "", 95.0),
        ("families", in_fp32, "triton-tiled", "bm=128", 100.0),
    ]
    summary = summarise(compare_families(load(recording(tmp_path / "nvidia-h100-sxm", rows))))
    tiled = {row["class"]: row for row in summary if row["family"] == "triton-tiled"}
    assert list(tiled) == ["large", "skinny", "all fp32", "all bf16", "all"]
    assert tiled["all fp32"]["ratio"] == pytest.approx(0.95)
    assert tiled["all bf16"]["ratio"] == pytest.approx((0.8 * 10 / 10.05) ** 0.5)
    assert (tiled["all fp32"]["near"], tiled["all bf16"]["near"]) == (1.0, 0.5)
    streamk = [row["class"] for row in summary if row["family"] == "triton-streamk"]
    assert streamk == ["large", "all"]


def test_tf32_that_is_not_k_major_is_a_class_of_its_own() -> None:
    assert shape_class(Gemm(4096, 4096, 4096, "tf32", "nn")) == "tf32, not nt"
    assert shape_class(Gemm(4096, 4096, 4096, "tf32", "nt")) == "large"
    assert shape_class(Gemm(4096, 4096, 4096, "bf16", "nn")) == "large"


def test_files_are_written(folder: Path) -> None:
    table = compare_families(load(folder))
    text = write_families(load(folder), table)
    assert (folder / "families.md").read_text(encoding="utf-8") == text
    assert "| triton-tiled | large | 1 | 0.80 | 0% | 0% | 0% | 0.80 |" in text
    assert "76.0% (1 shape)" in text
    assert "vendor library was not timed (number of shapes: 1)" in text
    assert json.loads((folder / "families.json").read_text(encoding="utf-8")) == summarise(table)
    assert len((folder / "families.csv").read_text(encoding="utf-8").splitlines()) == 1 + len(table)


def test_a_shape_that_only_a_search_timed_does_not_lack_the_library(tmp_path: Path) -> None:
    shape = Gemm(128, 128, 128, "bf16")
    rows = [
        *ROWS,
        ("families", shape, "cublas", "", 4.0),
        ("candidates", shape, "triton-tiled", "bm=64", 5.0),
    ]
    folder = recording(tmp_path / "nvidia-h100-sxm", rows)
    text = write_families(load(folder), compare_families(load(folder)))
    assert "vendor library was not timed (number of shapes: 1)" in text


def test_a_recording_without_kernels_of_ours_says_what_to_do(tmp_path: Path) -> None:
    folder = recording(tmp_path / "nvidia-h100-sxm", [("square", LARGE, "cublas", "", 200.0)])
    with pytest.raises(UserError, match="run `make families` on a GPU with sm_80"):
        compare_families(load(folder))


def test_a_recording_without_a_search_has_ratios_and_no_best_config(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row[0] != "candidates"]
    loaded = load(recording(tmp_path / "nvidia-h100-sxm", rows))
    table = compare_families(loaded)
    assert "chosen/best" not in write_families(loaded, table)
    assert table["ratio"].notna().all()
    assert table["found"].isna().all()
    assert table["best_config"].isna().all()
