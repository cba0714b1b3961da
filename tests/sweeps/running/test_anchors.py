from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.machine import cpu_machine, known_machine
from sweeps.folding.anchor_rows import anchor_rows, steady_report, steady_rows
from sweeps.planning.anchor_plan import ANCHORS, anchor_cases, steady_seconds
from sweeps.planning.plan import PlanEntry
from sweeps.store import ANCHOR_COLUMNS, STEADY_COLUMNS, SampleLog, read_events, read_run, write_run
from tests.support.fakes import case, planned
from tests.support.runs import a_run, carry, rows_of


def test_a_gpu_has_about_twenty_anchors_and_a_cpu_some() -> None:
    gpu = [entry.case for entry in anchor_cases(known_machine("nvidia-h200"))]
    assert 17 <= len(gpu) <= 22
    assert {case.sweep for case in gpu} == set(ANCHORS)
    assert [case.mode for case in gpu].count("sustained") == 1
    assert len(anchor_cases(cpu_machine({"fp32": 1e11}, 3e10, 2))) >= 8
    assert (steady_seconds(60.0), steady_seconds(24.0)) == (5.0, 2.0)


def test_anchors_are_timed_before_the_cases_once_and_enter_no_row(tmp_path: Path) -> None:
    cases = planned(7)
    anchors = cases[5:]
    run = a_run(tmp_path, cases[:5])
    write_run(tmp_path, {**read_run(tmp_path), "anchors": [e.to_json() for e in anchors]})
    run.anchors, run.anchor_options, run.place = anchors, {"seconds": 1.0}, 2
    assert carry(run)[0] == "done"
    with open(tmp_path / "anchors.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == ANCHOR_COLUMNS
    assert [(int(row["m"]), row["phase"], row["worker"]) for row in rows] == [
        (6, "alone", "1/1"), (7, "alone", "1/1")
    ]  # fmt: skip
    assert all(float(row["time_us"]) > 0 and int(row["samples"]) >= 6 for row in rows)
    assert sorted(rows_of(tmp_path)) == [1, 2, 3, 4, 5]
    before = (tmp_path / "anchors.csv").read_bytes()
    carry(run)
    assert (tmp_path / "anchors.csv").read_bytes() == before
    events = read_events(tmp_path)[0]
    assert sum(event.get("cost", 0.0) for event in events if event["event"] == "anchor") == 0


def test_the_latest_times_of_a_gpu_count() -> None:
    (entry,) = planned(1)
    where = {"worker": "1/1", "gpu": 0, "case": entry.case.id, "phase": "alone", "at": 1.0}
    events = []
    for seconds in (1.0, 2.0):
        events.append({"event": "anchoring", "case": "", "worker": "1/1", "gpu": 0})
        events += [{"event": "anchor", **where, "s": seconds} for _ in range(6)]
    gpus = [{"gpu": 0, "id": "ab12cd34", "node": 3}]
    (row,) = anchor_rows("now", [entry], events, gpus)
    assert (row["time_us"], row["samples"], row["gpu_id"], row["node"]) == (2e6, 6, "ab12cd34", 3)


def test_work_without_a_pause_counts_once_it_is_steady() -> None:
    """The board slows down in the first two of six seconds, and takes 500 W."""
    held = PlanEntry(replace(case(4, "anchors"), mode="sustained"), 0.01)
    burst = PlanEntry(case(4, "anchors"), 0.01)
    where = {"event": "anchor", "worker": "1/1", "gpu": 0, "phase": "alone", "at": 1.0}
    events = [{"event": "anchoring", "case": "", "worker": "1/1", "gpu": 0}]
    events += [{**where, "case": burst.case.id, "s": 1.0} for _ in range(8)]
    for number in range(60):
        slower = 1.0 + 0.25 * min(1.0, number / 20)
        joules = None if number == 45 else 1000.0 + 50.0 * (number + 1)  # one reading failed
        events.append({
            **where, "case": held.case.id, "s": slower, "t": 0.1 * number, "n": 10,
            "power_w": 500.0, "sm_mhz": 1980 / slower, "joules": joules,
        })  # fmt: skip
    rows = anchor_rows("now", [burst, held], events, [{"gpu": 0, "id": "ab", "node": 0}])
    row = rows[1]
    assert (row["mode"], row["time_us"], row["samples"]) == ("sustained", 1.25e6, 30)
    assert row["energy_j"] == pytest.approx(5.0)
    assert rows[0]["energy_j"] is None
    series = steady_rows("now", [burst, held], events)
    assert len(series) == 60
    assert set(series[0]) <= set(STEADY_COLUMNS)
    assert series[0]["tflops"] == pytest.approx(1.25 * series[-1]["tflops"])
    (told,) = steady_report(rows)
    assert (told["gpu"], told["problem"]) == (0, str(held.case.problem))
    assert (told["share"], told["lo"], told["hi"]) == pytest.approx((0.8, 0.8, 0.8))
    assert told["sm_mhz"] == pytest.approx(1584.0)


def test_a_shard_that_moved_before_its_anchors_were_timed_times_them(tmp_path: Path) -> None:
    cases = planned(3)
    for gpu in (0, 1):
        run = a_run(tmp_path, cases, gpu=gpu)
        run.anchors, run.anchor_options, run.place = cases[2:], {"seconds": 1.0}, gpu
        run.budget = 0.0  # only the anchors are timed
        carry(run)
        # The call on GPU 1 was interrupted once, when only the move was recorded.
        with SampleLog(tmp_path, (1, 1)) as log:
            log.append({"event": "place", "case": "", "worker": "1/1", "place": 1, "at": 1e10})
    timed = {event["gpu"] for event in read_events(tmp_path)[0] if event["event"] == "anchor"}
    assert timed == {0, 1}
