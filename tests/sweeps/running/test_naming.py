"""Kernels are named after timing, by processes that may fail without losing a time."""

from __future__ import annotations

import os
from pathlib import Path

from sweeps.folding.fold import fold
from sweeps.store import read_events, read_run
from tests.support.fakes import planned
from tests.support.runs import a_run, carry, rows_of


def names_of(folder: Path) -> dict[int, str]:
    return {m: row["kernel"] for m, row in rows_of(folder).items()}


def test_kernels_are_named_after_timing_by_a_process_that_times_nothing(tmp_path: Path) -> None:
    carry(a_run(tmp_path, planned(5)))
    events, _ = read_events(tmp_path)
    named = [i for i, e in enumerate(events) if "kernel" in e.get("facts", {})]
    assert min(named) > max(i for i, e in enumerate(events) if e["event"] == "sample")
    (name,) = set(names_of(tmp_path).values())
    assert name.startswith("fake_kernel_")
    assert name != f"fake_kernel_{os.getpid()}"


def test_a_name_that_was_lost_is_asked_of_another_process(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(5), behaviours={2: "lose-name"}, folder=str(tmp_path))
    assert carry(run) == ("done", [])
    names = names_of(tmp_path)
    assert names[2].startswith("fake_kernel_")
    assert names[2] != names[1]  # a fake kernel's name contains the id of its process


def test_a_name_that_nobody_has_is_empty_and_not_asked_for_again(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(3), behaviours={2: "lose-name-always"})
    assert carry(run) == ("done", ["The kernels of 1 case could not be named."])
    assert names_of(tmp_path)[2] == ""
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}
    before = (tmp_path / "samples" / "1-of-1.jsonl").read_bytes()
    carry(run)
    assert (tmp_path / "samples" / "1-of-1.jsonl").read_bytes() == before


def test_crashes_while_naming_cost_only_the_names_of_those_that_crashed(tmp_path: Path) -> None:
    crashing = dict.fromkeys((2, 4, 6, 8, 10), "abort-in-naming")
    end, warnings = carry(a_run(tmp_path, planned(12), behaviours=crashing))
    assert (end, len(warnings)) == ("done", 5)
    assert [m for m, name in names_of(tmp_path).items() if not name] == [2, 4, 6, 8, 10]


def test_a_profiler_that_fails_is_said_and_not_asked_for_ever(tmp_path: Path) -> None:
    end, warnings = carry(a_run(tmp_path, planned(4), behaviours={2: "profiler-fails"}))
    assert end == "done"
    assert warnings[0].endswith("stopped: RuntimeError: CUPTI is not permitted")
    assert warnings[-1] == "The kernels of 3 cases could not be named."  # one was named before
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


def test_a_crash_while_naming_costs_a_name_and_no_time(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(4), behaviours={2: "abort-in-naming"})
    end, warnings = carry(run)
    assert (end, len(warnings)) == ("done", 1)
    assert "names kernels ended: killed by SIGABRT" in warnings[0]
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}
    names = names_of(tmp_path)
    assert names.pop(2) == ""
    assert all(names.values())


def test_names_that_there_was_no_time_for_are_open_until_the_next_call(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(5))
    carry(run)
    path = tmp_path / "samples" / "1-of-1.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"kernel"' not in line]
    path.write_text("\n".join(lines) + "\n")
    fold(tmp_path)
    assert read_run(tmp_path)["sweeps"]["fake"] == {"planned": 5, "measured": 5, "open": 5}
    assert carry(run) == ("done", [])
    assert read_run(tmp_path)["sweeps"]["fake"]["open"] == 0
    assert all(names_of(tmp_path).values())
