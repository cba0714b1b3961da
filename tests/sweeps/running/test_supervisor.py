"""Runs whose children crash, hang or fail: no case is lost, and each failure has a message."""

from __future__ import annotations

import csv
import signal
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kernels.common.errors import UserError
from kernels.problem import Gemm
from sweeps.cases.case import Case
from sweeps.folding.fold import fold
from sweeps.folding.history import histories
from sweeps.measuring.rounds import CHUNK
from sweeps.planning.plan import PlanEntry
from sweeps.running import child_process as child_module
from sweeps.running.run import Run
from sweeps.running.supervisor import carry_out
from sweeps.store import SampleLog, read_events, read_run, write_run
from sweeps.timing.statistics import CHECKPOINTS
from tests.support.fakes import Silent, planned
from tests.support.runs import a_run, carry, rows_of


def test_a_run_measures_its_plan_and_folds_it(tmp_path: Path) -> None:
    cases = planned(25)
    end, warnings = carry(a_run(tmp_path, cases))
    assert (end, warnings) == ("done", [])
    rows = rows_of(tmp_path)
    assert list(rows) == list(range(1, 26))  # the plan's order
    assert all(
        row["status"] == "ok" and int(row["samples"]) in CHECKPOINTS for row in rows.values()
    )
    counts = read_run(tmp_path)["counts"]
    assert (counts["planned"], counts["measured"], counts["not_reached"]) == (25, 25, 0)


def test_rerunning_a_finished_plan_measures_nothing(tmp_path: Path) -> None:
    cases = planned(5)
    carry(a_run(tmp_path, cases))
    before = (tmp_path / "samples" / "1-of-1.jsonl").read_bytes()
    said: list[str] = []
    assert carry_out(a_run(tmp_path, cases), Silent(), said.append) == "done"
    assert said == []
    assert (tmp_path / "samples" / "1-of-1.jsonl").read_bytes() == before


def test_a_case_that_takes_the_process_down_costs_one_row(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(6), behaviours={3: "abort", 5: "abort-in-sample"})
    end, warnings = carry(run)
    assert end == "done"
    assert len(warnings) == 4  # each is retried once
    rows = rows_of(tmp_path)
    assert {m: row["status"] for m, row in rows.items()} == {
        1: "ok", 2: "ok", 3: "error", 4: "ok", 5: "error", 6: "ok",
    }  # fmt: skip
    assert "killed by SIGABRT" in rows[3]["message"]
    assert rows[5]["time_us"] == ""


def test_a_canary_that_takes_the_process_down_costs_nothing_but_itself(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(4), canary="abort")
    end, warnings = carry(run)
    assert (end, len(warnings)) == ("done", 1)
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}
    assert read_run(tmp_path)["canary"] is None


def test_a_crash_that_does_not_come_back_costs_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(4), behaviours={2: "abort-once"}, folder=str(tmp_path))
    end, warnings = carry(run)
    assert (end, len(warnings)) == ("done", 1)
    rows = rows_of(tmp_path)
    assert {row["status"] for row in rows.values()} == {"ok"}
    crash = "the process crashed once while handling this case: killed by SIGABRT."
    assert crash in rows[2]["message"]
    assert [m for m, row in rows.items() if row["message"]] == [2]


def test_a_crash_while_several_cases_are_compiled_takes_them_one_by_one(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(4), behaviours={3: "abort-together"})
    assert carry(run)[0] == "done"
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


def test_only_those_that_died_together_are_taken_one_by_one(tmp_path: Path) -> None:
    """Case 3 ends the process of the first chunk. The second chunk is still prepared together."""
    run = a_run(tmp_path, planned(2 * CHUNK), behaviours={3: "abort-together"})
    assert carry(run)[0] == "done"
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


def experimental(count: int) -> list[PlanEntry]:
    """Return cases of one kernel family, of which the second half is warp-specialised."""
    configs = ("specialize=off", "specialize=on")
    return [
        PlanEntry(Case("fake", Gemm(m, 64, 64, "bf16"), "triton-persistent", config), 0.01)
        for m in range(1, count + 1)
        for config in [configs[m > count // 2]]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["hang", "abort"])
def test_one_crash_of_an_experimental_feature_is_the_last(tmp_path: Path, behaviour: str) -> None:
    """Without that rule, each of hundreds of cases could hang twice, for 30 s each time."""
    cases = experimental(40)
    # Every sample is expected to take 30 s of the fake clock and more: patience ends with case 30.
    how: dict[str, Any] = {"seconds": 30.0, "canary": "raise"}
    end, warnings = carry(a_run(tmp_path, cases, 2.0, behaviours={30: behaviour}, **how))
    assert end == "done"
    assert len(warnings) == 1
    rows = rows_of(tmp_path)
    assert rows[30]["status"] == "error"
    assert "the process ended during this case" in rows[30]["message"]
    assert all(rows[m]["status"] == "ok" for m in range(1, 21))
    later = {m for m, row in rows.items() if row["status"] == "unsupported"}
    assert later >= {*range(25, 30), *range(31, 41)}  # the other cases of its chunk and later ones
    assert "triton-persistent with warp specialisation ended the process" in rows[40]["message"]
    # Resuming does not try them again either.
    assert carry(a_run(tmp_path, cases, 2.0, **how))[1] == []


def test_what_crashed_in_an_earlier_call_is_not_tried_by_cases_planned_later(
    tmp_path: Path,
) -> None:
    cases = experimental(40)
    how: dict[str, Any] = {"seconds": 30.0, "canary": "raise"}
    carry(a_run(tmp_path, cases[:30], 2.0, behaviours={30: "abort"}, **how))
    record = read_run(tmp_path)
    record["plan"]["cases"] = [entry.to_json() for entry in cases]
    write_run(tmp_path, record)
    end, warnings = carry(a_run(tmp_path, cases, 2.0, behaviours={35: "abort"}, **how))
    assert (end, warnings) == ("done", [])
    rows = rows_of(tmp_path)
    assert {rows[m]["status"] for m in range(31, 41)} == {"unsupported"}


@pytest.mark.slow
def test_a_case_that_hangs_is_killed(tmp_path: Path) -> None:
    # Every sample is expected to take 30 s of the fake clock and more: patience ends with case 2.
    run = a_run(tmp_path, planned(4), 2.0, behaviours={2: "hang"}, seconds=30.0, canary="raise")
    end, _ = carry(run)
    assert end == "done"
    rows = rows_of(tmp_path)
    assert rows[2]["status"] == "error"
    assert "killed after hanging for 2 s" in rows[2]["message"]
    events, _ = read_events(tmp_path)
    crashes = [event["cost"] for event in events if event["event"] == "crash"]
    assert len(crashes) == 2
    assert sum(crashes) >= 2 * 2.0  # both visits count towards the budget
    assert read_run(tmp_path)["spent_s"] == pytest.approx(sum(e["cost"] for e in events), abs=1e-3)
    assert {rows[m]["status"] for m in (1, 3, 4)} == {"ok"}


def test_a_broken_context_costs_one_row(tmp_path: Path) -> None:
    end, _ = carry(a_run(tmp_path, planned(4), behaviours={2: "poison"}))
    assert end == "done"
    rows = rows_of(tmp_path)
    assert "illegal memory access" in rows[2]["message"]
    assert {rows[m]["status"] for m in (1, 3, 4)} == {"ok"}


def test_a_real_time_signal_has_no_name_and_costs_one_row(tmp_path: Path) -> None:
    end, warnings = carry(a_run(tmp_path, planned(3), behaviours={2: "real-time-signal"}))
    assert (end, len(warnings)) == ("done", 2)
    rows = rows_of(tmp_path)
    assert f"killed by signal {signal.SIGRTMIN + 1}" in rows[2]["message"]
    assert {rows[m]["status"] for m in (1, 3)} == {"ok"}


def test_half_a_character_in_an_error_costs_one_row(tmp_path: Path) -> None:
    end, _ = carry(a_run(tmp_path, planned(3), behaviours={2: "half-a-character"}))
    assert end == "done"
    rows = rows_of(tmp_path)
    assert rows[2]["message"] == "RuntimeError: no file ?.cubin"
    assert {rows[m]["status"] for m in (1, 3)} == {"ok"}


def test_failures_are_rows_with_a_sentence(tmp_path: Path) -> None:
    behaviours = {1: "wrong", 2: "oom", 3: "unsupported", 4: "raise"}
    carry(a_run(tmp_path, planned(5), behaviours=behaviours))
    rows = rows_of(tmp_path)
    statuses = [rows[m]["status"] for m in range(1, 6)]
    assert statuses == ["wrong", "oom", "unsupported", "error", "ok"]
    assert all(rows[m]["message"] and not rows[m]["time_us"] for m in range(1, 5))
    assert rows[4]["message"] == "RuntimeError: no such kernel"
    counts = read_run(tmp_path)["counts"]
    assert (counts["wrong"], counts["oom"], counts["unsupported"], counts["error"]) == (1, 1, 1, 1)


def test_a_bench_that_cannot_be_set_up_is_one_sentence(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(2), no_such_argument=1)
    with pytest.raises(UserError, match="Nothing could be measured: TypeError") as caught:
        carry(run)
    assert caught.value.exit_code == 1


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(2))
    with SampleLog(tmp_path, (1, 1)):
        with pytest.raises(UserError, match="another process is writing") as caught:
            carry(run)
        assert caught.value.exit_code == 1
        assert not (tmp_path / "measurements.csv").exists()


def test_shards_fold_into_one_table(tmp_path: Path) -> None:
    cases = planned(9)
    whole = a_run(tmp_path, cases)
    for index in (1, 2):
        part = Run(
            tmp_path, cases[index - 1 :: 2], 1e6, whole.bench, shard=(index, 2),
            min_patience=whole.min_patience,
        )  # fmt: skip
        carry(part)
    rows = rows_of(tmp_path)
    assert list(rows) == list(range(1, 10))
    assert {m: row["worker"] for m, row in rows.items()} == {
        m: ("1/2" if m % 2 else "2/2") for m in range(1, 10)
    }


def test_folding_twice_gives_the_same_table(tmp_path: Path) -> None:
    carry(a_run(tmp_path, planned(3)))
    table = (tmp_path / "measurements.csv").read_bytes()
    fold(tmp_path)
    assert (tmp_path / "measurements.csv").read_bytes() == table


@pytest.mark.slow
def test_a_child_that_is_stopped_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent's patience with a child is not used up while the child is stopped."""
    asked: list[int] = []

    def stopped(pid: int) -> bool:
        asked.append(pid)
        return len(asked) < 100  # for five seconds, ten times the patience

    monkeypatch.setattr(child_module, "is_stopped", stopped)
    monkeypatch.setattr(child_module, "_LISTENING_STEP", 0.05)
    carry(a_run(tmp_path, planned(1), 0.5, behaviours={1: "hang"}, canary="raise"))
    assert len(asked) >= 100
    assert rows_of(tmp_path)[1]["status"] == "error"


def test_a_finished_run_is_timed_again_in_part_and_once(tmp_path: Path) -> None:
    """Another process re-times the cases, and its samples do not count towards their times."""
    run = a_run(tmp_path, planned(60), repeats=True)
    carry(run)
    events, _ = read_events(tmp_path)
    repeats = Counter(event["case"] for event in events if event["event"] == "repeat")
    assert len(repeats) == 24
    assert set(repeats.values()) == {8}
    record = read_run(tmp_path)
    assert record["repeats"]["cases"] == 24
    assert record["repeats"]["between"] < 0.05
    known = histories(events)
    assert all(int(row["samples"]) == len(known[case].best) for case, row in by_case(tmp_path))
    carry(run)
    again, _ = read_events(tmp_path)
    assert sum(event["event"] == "repeat" for event in again) == sum(repeats.values())


def test_the_rounds_of_every_time_are_written(tmp_path: Path) -> None:
    carry(a_run(tmp_path, planned(20)))
    with open(tmp_path / "rounds.csv", encoding="utf-8", newline="") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    for case, row in by_case(tmp_path):
        times = [float(text) for text in rows[case]["times_us"].split()]
        numbers = [int(text) for text in rows[case]["rounds"].split()]
        assert len(times) == len(set(numbers)) == int(row["samples"])
        assert numbers == sorted(numbers)
        assert statistics.median(times) == pytest.approx(float(row["time_us"]), rel=1e-5)


def by_case(folder: Path) -> list[tuple[str, dict[str, str]]]:
    """Return the rows of measurements.csv, each with the id of its case."""
    text = (folder / "measurements.csv").read_text(encoding="utf-8")
    return [(Case.from_columns(row).id, row) for row in csv.DictReader(text.splitlines())]


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat here")
def test_what_others_used_is_watched(tmp_path: Path) -> None:
    carry(a_run(tmp_path, planned(10), real_seconds=0.002))
    looks = [e for e in read_events(tmp_path)[0] if e["event"] == "host"]
    assert looks
    assert all(look["seconds"] > 0 for look in looks)
