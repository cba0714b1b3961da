"""Re-time pairs of cases: complete pairs count, even if other pairs fail."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweeps.folding.case_rows import confirmed_table
from sweeps.folding.history import BLOCKS, PROCESSES, History
from sweeps.measuring.extra_work import confirm_pairs, repeat_cases
from sweeps.planning.plan import PlanEntry
from sweeps.running.supervisor import confirm
from sweeps.store import CONFIRMED_COLUMNS, Event, read_events
from tests.support.fakes import FakeBench, Silent, planned
from tests.support.runs import a_run, carry, rows_of
from tests.support.tiers import quick_and_slow


def confirmed(
    folder: Path, cases: list[PlanEntry], pairs: list[tuple[int, int]], **arguments: Any
) -> tuple[list[dict[str, str]], list[str]]:
    """Re-time pairs (given by their M), and return the rows of confirmed.csv and the messages."""
    carry(a_run(folder, cases))
    said: list[str] = []
    run = a_run(folder, cases, **arguments)
    confirm(run, [(cases[a - 1], cases[b - 1]) for a, b in pairs], Silent(), said.append)
    with open(folder / "confirmed.csv", encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        assert tuple(reader.fieldnames or ()) == CONFIRMED_COLUMNS
    return rows, [text for text in said if not text.startswith("Re-timing ")]


def test_pairs_are_timed_beside_each_other_a_fixed_number_of_times(tmp_path: Path) -> None:
    cases = planned(12)
    pairs = [(m, m + 1) for m in range(1, 12)]
    rows, said = confirmed(tmp_path, cases, pairs)
    assert said == []
    ids = [entry.case.id for entry in cases]
    timed = [(ids.index(row["case"]) + 1, ids.index(row["against"]) + 1) for row in rows]
    assert sorted(timed) == sorted(pairs * PROCESSES)
    for row in rows:
        ratios = [float(text) for text in row["log_ratios"].split()]
        assert len(ratios) == BLOCKS
        m, other = ids.index(row["case"]) + 1, ids.index(row["against"]) + 1
        # The time of a fake launch is proportional to its M, with noise of 0.2%.
        assert statistics.mean(ratios) == pytest.approx(math.log(m / other), abs=0.005)


def test_they_enter_no_time_and_processes_of_their_own_take_them(tmp_path: Path) -> None:
    cases = planned(4)
    carry(a_run(tmp_path, cases))
    before = (tmp_path / "measurements.csv").read_bytes()
    confirmed(tmp_path, cases, [(2, 1)])
    assert (tmp_path / "measurements.csv").read_bytes() == before
    events, _ = read_events(tmp_path)
    blocks = [event for event in events if event["event"] == "confirm"]
    assert len({event["process"] for event in blocks}) == PROCESSES
    assert len(blocks) == PROCESSES * BLOCKS
    assert all(len(event["s"]) == 4 for event in blocks)


@pytest.mark.parametrize("behaviour", quick_and_slow(
    ["abort", "wrong-after", "abort-in-sample", "raise-in-sample", "wrong-in-batch", "oom", "hang"],
    quick=2,
))  # fmt: skip
def test_a_case_that_fails_costs_its_own_pairs(tmp_path: Path, behaviour: str) -> None:
    cases = planned(6)
    rows, said = confirmed(
        tmp_path, cases, [(1, 2), (3, 4), (4, 5), (5, 6)], behaviours={4: behaviour},
        patience=1.0 if behaviour == "hang" else 1e6,
    )  # fmt: skip
    ids = [entry.case.id for entry in cases]
    assert {(ids.index(row["case"]) + 1) for row in rows} == {1, 5}
    statuses = {m: row["status"] for m, row in rows_of(tmp_path).items()}
    expected = {"oom": "oom", "wrong-after": "wrong", "wrong-in-batch": "wrong"}
    if behaviour in ("raise-in-sample", *expected):
        # The failure replaces the correct time that the case had before.
        assert statuses[4] == expected.get(behaviour, "error")
    assert {status for m, status in statuses.items() if m != 4} == {"ok"}
    ends = behaviour.startswith("abort") or behaviour == "hang"
    assert len(said) == PROCESSES * ends


def test_a_process_that_cannot_start_is_not_tried_for_ever(tmp_path: Path) -> None:
    cases = planned(3)
    rows, said = confirmed(tmp_path, cases, [(1, 2)], behaviours={1: "abort", 2: "abort"})
    assert rows == []
    assert len(said) == PROCESSES


def test_half_a_pair_is_none_and_the_latest_whole_one_counts() -> None:
    def block(process: float, seconds: list[float]) -> dict[str, Any]:
        return {"event": "confirm", "case": "a", "against": "b", "worker": "1/1",
                "process": process, "s": seconds}  # fmt: skip

    def taken(process: float, times: float, blocks: int = BLOCKS) -> list[dict[str, Any]]:
        return [block(process, [times, 1.0, 1.0, times])] * blocks

    assert confirmed_table(taken(1.0, 2.0), {}) == []  # only one process re-timed the pair
    assert confirmed_table([*taken(1.0, 2.0), *taken(2.0, 2.0, BLOCKS - 1)], {}) == []
    other_gpu = [{**event, "gpu": 1} for event in taken(2.0, 2.0)]
    assert confirmed_table([*taken(1.0, 2.0), *other_gpu], {}) == []
    whole = [*taken(1.0, 2.0), *taken(2.0, 3.0), *taken(3.0, 4.0), *taken(4.0, 9.0, BLOCKS - 1)]
    rows = confirmed_table(whole, {})
    assert [row["process"] for row in rows] == [1, 2]
    ratios = [float(row["log_ratios"].split()[0]) for row in rows]
    assert ratios == pytest.approx([math.log(3), math.log(4)], abs=1e-5)
    assert confirmed_table(whole, {"b": History(outcome={"status": "wrong"})}) == []


def test_a_block_with_launch_gaps_is_taken_again(tmp_path: Path) -> None:
    rows, _ = confirmed(tmp_path, planned(2), [(1, 2)], exposed={1: 2})
    assert len(rows) == PROCESSES


@pytest.mark.parametrize(
    ("time_again", "kind"), [(repeat_cases, "repeat"), (confirm_pairs, "confirm")]
)
@pytest.mark.parametrize("fault", ["launch gaps", "failure"])
def test_samples_that_are_dropped_count_as_measuring_time(
    time_again: Callable[..., None], kind: str, fault: str
) -> None:
    cases = [entry.case for entry in planned(2)]
    if fault == "failure":
        bench = FakeBench(cases, behaviours={2: "wrong-in-batch"})
    else:
        bench = FakeBench(cases, exposed={2: 10**6})
    events: list[Event] = []
    time_again(cases, bench, "1/1", events.append, lambda ids, seconds: None)
    dropped = {"repeat": cases[1].id, "confirm": cases[0].id}[kind]
    costs = [
        event["cost"] for event in events if event["event"] == "aside" and event["case"] == dropped
    ]
    # The time to prepare the cases is the first of these events if it names a case.
    assert any(cost > 0 for cost in costs[kind == "confirm" :])
    assert sum(event["cost"] for event in events) == pytest.approx(bench.clock.now(), abs=1e-4)
