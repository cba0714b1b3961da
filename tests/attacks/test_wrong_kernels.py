"""Whatever way a kernel is wrong in, it has no time; whatever else a right one does, it has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.problem import Conv, Gemm
from tests.support.attack import attack, evil
from tests.support.evil import FATAL, HARMLESS, WRONG

SQUARE = Gemm(96, 96, 80, "fp32")
OTHERS = [
    Gemm(96, 96, 80, "bf16"),
    Gemm(96, 96, 80, "fp32", "tn"),
    Gemm(1200, 1200, 33, "fp32"),
    Conv.parse("2,16,9,11,32,3,3,1,1,1,1,fp32,nhwc,fprop"),
    Conv.parse("2,16,9,11,32,3,3,1,1,1,1,fp32,nchw,dgrad"),
    Conv.parse("2,16,9,11,32,3,3,2,1,1,2,fp32,nhwc,wgrad"),
    Conv.parse("8,32,7,7,32,3,3,1,1,1,1,bf16,nhwc,fprop"),
]
# These look for what they do in a matrix that they are given a place for.
_OF_MATRICES = {
    "computes-where-it-finds-nan", "adds-to-what-is-there", "leaves-out-the-last-term",
    "last-column-missing", "a-tile-missing", "a-tile-twice",
}  # fmt: skip
# And these are right on the one set that a warm batch has.
_OF_SETS = {"another-set-s-result", "wrong-from-the-second-set-on"}


@pytest.mark.slow
def test_no_wrong_kernel_has_a_time_and_every_right_one_has(tmp_path: Path) -> None:
    harmless = [name for name in HARMLESS if "forks" not in name]
    cases = [evil(name, SQUARE) for name in [*WRONG, *harmless]]
    rows = attack(tmp_path / "run", cases)
    status = {case.implementation: rows[case.id]["status"] for case in cases}
    assert len(WRONG) >= 40
    assert {name: status[f"evil-{name}"] for name in WRONG} == dict.fromkeys(WRONG, "wrong")
    assert {name: status[f"evil-{name}"] for name in harmless} == dict.fromkeys(harmless, "ok")
    for case in cases:
        row = rows[case.id]
        assert bool(row["time_us"]) == (row["status"] == "ok")
        assert bool(row["message"]) == (row["status"] != "ok")


@pytest.mark.slow
def test_kernels_that_end_the_process_are_rows(tmp_path: Path) -> None:
    names = ["raises-half-a-character", "exits", "allocates-too-much", "right"]
    cases = [evil(name, SQUARE) for name in names]
    rows = attack(tmp_path / "run", cases)
    assert [rows[case.id]["status"] for case in cases] == ["error", "error", "oom", "ok"]


@pytest.mark.long
@pytest.mark.parametrize("how", [("cold", "burst"), ("warm", "burst")])
@pytest.mark.parametrize("problem", [SQUARE, *OTHERS], ids=str)
def test_every_wrong_kernel_on_every_kind_of_problem(
    tmp_path: Path, problem: Gemm | Conv, how: tuple[str, str]
) -> None:
    names = [name for name in WRONG if isinstance(problem, Gemm) or name not in _OF_MATRICES]
    names = [name for name in names if how[0] == "cold" or name not in _OF_SETS]
    cases = [evil(name, problem, *how) for name in [*names, "right"]]
    rows = attack(tmp_path / "run", cases)
    status = {case.implementation: rows[case.id]["status"] for case in cases}
    assert status.pop("evil-right") == "ok"
    assert status == dict.fromkeys(status, "wrong")


@pytest.mark.long
@pytest.mark.parametrize("problem", [SQUARE, OTHERS[-1]], ids=str)
def test_every_kernel_that_turns_wrong_in_sustained_work(
    tmp_path: Path, problem: Gemm | Conv
) -> None:
    names = ["wrong-later", "stops-later", "wrong-after-5-launches", "computes-each-set-once"]
    cases = [evil(name, problem, "cold", "sustained") for name in [*names, "right"]]
    rows = attack(tmp_path / "run", cases)
    assert [rows[case.id]["status"] for case in cases] == [*["wrong"] * len(names), "ok"]


@pytest.mark.long
def test_every_kernel_that_fails_is_a_row_with_a_reason(tmp_path: Path) -> None:
    cases = [evil(name, SQUARE) for name in [*FATAL, *HARMLESS]]
    rows = attack(tmp_path / "run", cases, patience=5.0)
    for case in cases:
        row = rows[case.id]
        name = case.implementation.removeprefix("evil-")
        expected = "ok" if name in HARMLESS else "oom" if name == "allocates-too-much" else "error"
        assert row["status"] == expected, name
        assert bool(row["time_us"]) == (expected == "ok")
        assert "\n" not in row["message"]
