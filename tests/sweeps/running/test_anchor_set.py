from __future__ import annotations

import csv
from pathlib import Path

from kernels.machine import known_machine, of_cpu
from sweeps.running.anchor_set import ANCHORS, anchor_cases, anchor_rows, sustained_seconds
from sweeps.store import ANCHOR_COLUMNS, read_events, read_run, write_run
from tests.support.fakes import planned
from tests.support.runs import a_run, carry, rows_of


def test_a_gpu_has_about_twenty_anchors_and_a_cpu_some() -> None:
    gpu = [entry.case for entry in anchor_cases(known_machine("nvidia-h200"))]
    assert 17 <= len(gpu) <= 22
    assert {case.sweep for case in gpu} == set(ANCHORS)
    assert [case.mode for case in gpu].count("sustained") == 1
    assert len(anchor_cases(of_cpu({"fp32": 1e11}, 3e10, 2))) >= 8
    assert (sustained_seconds(600.0), sustained_seconds(20.0)) == (5.0, 1.0)


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
