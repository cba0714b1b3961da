"""Tests of the commands of ``sweeps`` that only show sweeps, plans and the machine."""

from __future__ import annotations

import json
from pathlib import Path

from sweeps.cases.spec import all_sweeps
from tests.support.command_line import SWEEPS, said


def answer(*arguments: object) -> str:
    told = said(SWEEPS, *map(str, arguments))
    assert (told.code, told.faults) == (0, []), told.err
    return told.out


def test_every_sweep_is_listed_with_its_question_and_can_be_shown() -> None:
    listed = answer("show", "--json")
    names = {row["name"] for row in json.loads(listed)}
    assert names == all_sweeps().keys()
    assert "cases" in answer("show", "alignment", "--device", "cpu")


def test_the_machine_and_what_may_spoil_its_timings(tmp_path: Path) -> None:
    place = ("--device", "cpu", "--results", tmp_path)
    machine = json.loads(answer("doctor", "--name", "--json", *place))
    assert machine["slug"].startswith("cpu-")
    assert answer("doctor", "--name", *place).rstrip().endswith(machine["slug"])
    assert {"text", "warning"} <= json.loads(answer("doctor", "--json", *place))[0].keys()
    assert answer("doctor", *place).strip()
    assert not list(tmp_path.iterdir())


def test_what_sweeps_would_take_on_a_gpu_that_is_not_here() -> None:
    rows = json.loads(
        answer("show", "--plan", "square", "alignment", "--machine", "nvidia-h200",
               "--budget", "10m", "--cores", "16", "--json")
    )  # fmt: skip
    assert [row["name"] for row in rows] == ["square", "alignment"]
    for row in rows:
        assert 0 < row["planned"] <= row["cases"]
        assert 0 < row["checking_s"] < row["expected_s"] < 600
