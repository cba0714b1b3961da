"""Merging: no case is lost or duplicated, and samples of two recordings are never pooled."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.recordings.load import load
from analysis.recordings.repetition import places_of, rounds_of
from kernels.common.errors import UserError
from kernels.machine import Machine
from sweeps.folding.fold import fold
from sweeps.folding.history import histories
from sweeps.merging import merge as merge_module
from sweeps.merging.merge import Merged, merge
from sweeps.planning.plan import read_plan
from sweeps.store import Event, read_events, read_run
from tests.support.fakes import planned
from tests.support.mergeable import CPU, change, record
from tests.support.runs import rows_of

BOTH = range(5, 13)  # numbers of the cases that both recordings have


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two recordings, ``a`` and ``b``.

    The samples of ``b`` scatter more, so that its cases have more of them.
    """
    folder = tmp_path_factory.mktemp("made")
    record(folder / "a", planned(12))
    record(folder / "b", planned(16)[4:], spread=0.02)
    return folder


@pytest.fixture
def two(made: Path, tmp_path: Path) -> Path:
    """Return a copy of both recordings, which a test may change."""
    shutil.copytree(made, tmp_path / "two")
    return tmp_path / "two"


def merged(folder: Path, *names: str) -> Merged:
    return merge([folder / name for name in names or ("a", "b")], folder / "all", folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_no_case_is_lost_and_none_is_there_twice(two: Path) -> None:
    before = contents(two)
    result = merged(two)
    rows = rows_of(result.folder)
    assert sorted(rows) == list(range(1, 17))
    with open(result.folder / "measurements.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 16
    entries = read_plan(result.record["plan"])
    assert len({entry.case.id for entry in entries}) == len(entries) == 16
    assert {entry.shard for entry in entries} == {1, 2}
    assert {m: rows[m]["worker"] for m in (*range(1, 5), *range(13, 17))} == {
        **dict.fromkeys(range(1, 5), "1/2"), **dict.fromkeys(range(13, 17), "2/2"),
    }  # fmt: skip
    assert result.record["counts"]["planned"] == result.record["counts"]["measured"] == 16
    kept = {name: content for name, content in contents(two).items() if name in before}
    assert kept == before
    assert {name.partition("/")[0] for name in contents(two).keys() - before.keys()} == {"all"}
    assert {path.name for path in two.iterdir()} == {"a", "b", "all"}


def test_every_event_of_the_sources_is_there_once(two: Path) -> None:
    result = merged(two)
    together = Counter(
        (name, event["event"], event["case"], event.get("at"), event.get("s"))
        for name, worker in (("a", "1/2"), ("b", "2/2"))
        for event in read_events(result.folder)[0]
        if event["worker"] == worker
    )
    single = Counter(
        (name, event["event"], event["case"], event.get("at"), event.get("s"))
        for name in ("a", "b")
        for event in read_events(two / name)[0]
    )
    assert together == single
    assert {path.name for path in (result.folder / "samples").glob("*.jsonl*")} == {
        "1-of-2.jsonl", "2-of-2.jsonl",
    }  # fmt: skip


def test_a_case_that_both_timed_has_the_samples_of_one(two: Path) -> None:
    result = merged(two)
    rows, own = rows_of(result.folder), [rows_of(two / name) for name in ("a", "b")]
    most = 0
    for m in BOTH:
        counts = [int(rows_of_one[m]["samples"]) for rows_of_one in own]
        which = 0 if counts[0] >= counts[1] else 1
        assert rows[m]["worker"] == f"{which + 1}/2"
        assert rows[m]["samples"] == own[which][m]["samples"]
        assert rows[m]["time_us"] == own[which][m]["time_us"]
        most += which
    assert most > 0  # the table is not simply that of the first recording
    rounds = rounds_of(load(result.folder))
    assert len(rounds) == 16
    assert all(len({place for place, _ in of}) == 1 for of in rounds.values())


def test_cases_in_several_recordings_are_counted(two: Path) -> None:
    assert len(merged(two).repeated) == len(BOTH)


def test_anchors_of_all_recordings_are_in_one_table(tmp_path: Path) -> None:
    anchors = planned(16)[12:]
    record(tmp_path / "a", planned(4), anchors=anchors)
    record(tmp_path / "b", planned(8)[4:], anchors=anchors)
    result = merged(tmp_path)
    assert not result.repeated
    with open(result.folder / "anchors.csv", encoding="utf-8") as file:
        assert {row["worker"] for row in csv.DictReader(file)} == {"1/2", "2/2"}


def test_three_recordings_become_one(tmp_path: Path) -> None:
    for name in "abc":
        record(tmp_path / name, planned(6))
    result = merged(tmp_path, "a", "b", "c")
    assert len(rows_of(result.folder)) == 6
    assert {row["worker"] for row in rows_of(result.folder).values()} <= {"1/3", "2/3", "3/3"}
    assert len(result.repeated) == 6


def test_it_is_read_as_any_recording(two: Path) -> None:
    change(two / "b", run="2026-01-05T03:04:05Z")
    result = merged(two)
    recording = load(result.folder)
    assert len(recording.ok) == 16
    assert recording.damaged == ()
    assert "measured 2026-01-02 to 2026-01-05" in recording.caption()
    assert set(places_of(recording.ok)) == {
        f" {recording.run['run']} 1/2 ", f" {recording.run['run']} 2/2 ",
    }  # fmt: skip
    again = fold(result.folder)  # as any later command would
    assert again == read_run(result.folder) == result.record


def test_another_place_fails_or_moves_on_without_touching_this_one() -> None:
    """The events of one case are from two CPUs, so only their workers differ."""

    def sample(worker: str, s: float, event: str = "sample") -> Event:
        return {"event": event, "case": "c", "worker": worker, "s": s, "at": 1.0, "checking": 0.0}

    first = [sample("1/2", 1.0) for _ in range(6)]
    outcome = {"event": "outcome", "case": "c", "worker": "2/2", "at": 1.0, "message": ""}
    many = [sample("2/2", 2.0) for _ in range(8)]

    def times(events: list[Event]) -> list[float]:
        return [e["s"] for e in histories(events)["c"].trusted]

    assert times([*first, *many]) == times([*many, *first]) == [2.0] * 8
    assert times([*first, *many, {"event": "moved", "case": "c", "worker": "2/2"}]) == [1.0] * 6
    oom = histories([*first, {**outcome, "status": "oom"}])["c"]
    assert (oom.outcome, len(oom.trusted)) == (None, 6)
    wrong = histories([*first, *many, {**outcome, "status": "wrong"}])["c"]
    assert wrong.outcome is not None
    facts = {"event": "facts", "case": "c", "worker": "1/2", "facts": {"kernel": "of the other"}}
    assert histories([*first, facts, *many])["c"].facts == {}


def test_damaged_lines_stay_damaged_and_are_counted(two: Path) -> None:
    with open(two / "a" / "samples" / "1-of-1.jsonl", "ab") as file:
        file.write(b'{"event":"sample","case":"x","s":\n')
    result = merged(two)
    assert result.record["counts"]["damaged_lines"] == 1
    assert result.record["counts"]["measured"] == 16


def test_a_cpu_has_the_highest_ceilings_and_budgets_add_up(two: Path) -> None:
    change(two / "b", machine={**CPU.to_json(), "peaks": {"fp32": 2e11}, "bandwidth": 1e10})
    result = merged(two)
    machine = Machine.from_json(result.record["machine"])
    assert (machine.peaks, machine.bandwidth) == ({"fp32": 2e11}, CPU.bandwidth)
    plan = result.record["plan"]
    assert (plan["budget_s"], plan["shards"]) == (2e5, 2)
    spent = [read_run(two / name)["spent_s"] for name in ("a", "b")]
    assert result.record["spent_s"] == pytest.approx(sum(spent), abs=1e-2)


def test_what_one_plan_left_out_and_another_has_is_not_left_out(two: Path) -> None:
    plan = read_run(two / "a")["plan"]
    change(two / "a", plan={**plan, "left_out": {"fake": 5, "other": 2}})
    result = merged(two)
    assert result.record["plan"]["left_out"] == {"fake": 1, "other": 2}  # 17 cases, 16 of them here


def test_a_disturbed_recording_does_not_hide_among_quiet_ones(two: Path) -> None:
    reasons = ["other processes had 60% of the cores' time"]
    change(two / "a", health={"verdict": "quiet", "reasons": []})
    change(two / "b", health={"verdict": "unusable", "reasons": reasons})
    health = merged(two).record["health"]
    assert health["verdict"] == "unusable"
    assert "1 unusable recording was merged into this one: 2/2" in health["reasons"]


def test_without_into_it_goes_to_the_merged_results(two: Path) -> None:
    result = merge([two / "a", two / "b"], None, two / "results")
    assert result.folder == two / "results" / "merged" / CPU.slug
    with pytest.raises(UserError, match="already exists; move it away, or choose another folder"):
        merge([two / "a", two / "b"], None, two / "results")


def full(folder: Path) -> dict[str, Any]:
    raise UserError("the disk is full.", exit_code=1)


def no_room(folder: Path) -> dict[str, Any]:
    raise OSError(28, "No space left on device")


def interrupted(folder: Path) -> dict[str, Any]:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("failing", "error", "words"),
    [
        (full, UserError, "the disk is full"),
        (no_room, UserError, "could not be created .No space left on device."),
        (interrupted, KeyboardInterrupt, None),
    ],
)
def test_nothing_is_left_of_a_failure(
    two: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: Callable[[Path], dict[str, Any]],
    error: type[BaseException],
    words: str | None,
) -> None:
    before = contents(two)
    monkeypatch.setattr(merge_module, "fold", failing)
    with pytest.raises(error, match=words):
        merge([two / "a", two / "b"], two / "new" / "deep" / "all", two)
    assert contents(two) == before
    assert {path.name for path in two.iterdir()} == {"a", "b"}
