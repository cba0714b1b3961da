"""Cases that advice asks for: they are added to the plan, with a budget of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernels.common.errors import UserError
from kernels.problem import Gemm
from sweeps.cases.case import CONFIRM, Case
from sweeps.running.opening import begin, left_for_confirming
from sweeps.running.request import Request
from sweeps.store import SampleLog, read_run
from tests.support.run_requests import ids, quiet, request

pytestmark = pytest.mark.usefixtures("quick_ceilings")


def test_what_advice_asks_for_comes_on_top_of_the_plan(tmp_path: Path) -> None:
    first = begin(request(tmp_path, leave=0.25), quiet)
    plan = read_run(first.folder)["plan"]
    assert (plan["budget_s"], plan["left_s"]) == (15.0, 5.0)
    asked = [Case(CONFIRM, Gemm(64, n, 64, "fp32"), "mkl") for n in (63, 64)]
    more = Request(budget=3.0, results=tmp_path, device="cpu", add=True)
    own = begin(more, quiet, {CONFIRM: lambda machine: asked})
    assert [entry.case for entry in own.planned] == asked
    assert own.budget == 3.0
    after = read_run(first.folder)["plan"]
    assert after["budget_s"] == 15.0
    assert left_for_confirming(first.folder) == 5.0
    with SampleLog(first.folder, (1, 1)) as log:
        where = {"case": asked[0].id, "worker": "1/1", "at": 1.0}
        log.append({"event": "sample", **where, "s": 1e-3, "cost": 2.0})
    assert left_for_confirming(first.folder) == 3.0
    assert begin(request(tmp_path, leave=0.25), quiet).budget == 17.0
    with pytest.raises(UserError, match=r"a budget of 10 s is too small.* planned with 20 s"):
        begin(replace(request(tmp_path, leave=0.25), budget=10.0), quiet)
    larger = begin(replace(request(tmp_path, leave=0.25), budget=40.0), quiet)
    assert read_run(larger.folder)["plan"]["left_s"] == 10.0
    added = begin(Request(("depthwise",), 8.0, tmp_path, device="cpu", leave=0.25), quiet)
    plan = read_run(added.folder)["plan"]
    assert plan["left_s"] == 2.0 + 2.0  # the time spent for advice, and a quarter of this budget
    assert plan["budget_s"] == 30.0  # the plan's budget does not shrink
    assert added.budget == 32.0


def test_what_advice_asks_for_is_measured_by_the_first_shard(tmp_path: Path) -> None:
    parts = [begin(request(tmp_path, shard=(i, 3)), quiet) for i in (1, 2, 3)]
    asked = [Case(CONFIRM, Gemm(m, n, 64, "fp32"), "mkl") for m in (64, 4096) for n in (63, 64)]
    more = Request(budget=3.0, results=tmp_path, device="cpu", add=True)
    own = begin(more, quiet, {CONFIRM: lambda machine: asked})
    assert {entry.case for entry in own.planned} == {*asked}
    assert own.worker == "1/3"
    again = [begin(request(tmp_path, shard=(i, 3)), quiet) for i in (2, 3)]
    assert [ids(part) for part in again] == [ids(part) for part in parts[1:]]


def test_all_cases_for_advice_are_planned_whatever_they_cost(tmp_path: Path) -> None:
    asked = [Case(CONFIRM, Gemm(256, n, 256, "fp32"), "mkl") for n in (255, 256, 264)]
    little = Request(budget=1e-3, results=tmp_path, device="cpu", add=True)
    new = begin(little, quiet, {CONFIRM: lambda machine: asked[:2]})
    assert {entry.case for entry in new.planned} == {*asked[:2]}
    resumed = begin(little, quiet, {CONFIRM: lambda machine: asked})
    assert {entry.case for entry in resumed.planned} == {*asked}
    assert not read_run(resumed.folder)["plan"]["left_out"]


def test_all_default_sweeps_are_represented_after_a_question(tmp_path: Path) -> None:
    asked = [Case(CONFIRM, Gemm(64, 64, 64, "fp32"), "mkl")]
    begin(Request(budget=3.0, results=tmp_path, device="cpu", add=True), quiet,
          {CONFIRM: lambda machine: asked})  # fmt: skip
    run = begin(Request(budget=60.0, results=tmp_path, device="cpu"), quiet)
    fresh = begin(Request(budget=60.0, results=tmp_path / "new", device="cpu"), quiet)
    assert {e.case.sweep for e in run.planned} == {e.case.sweep for e in fresh.planned} | {CONFIRM}


def test_a_plan_from_before_keeps_its_budget_and_gets_a_reserve(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    assert read_run(first.folder)["plan"]["left_s"] == 0.0
    again = begin(request(tmp_path, leave=0.2), quiet)
    plan = read_run(again.folder)["plan"]
    assert (plan["budget_s"], plan["left_s"]) == (20.0, 5.0)
    assert ids(again) == ids(first)
