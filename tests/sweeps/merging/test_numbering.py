"""Numbers of GPUs and nodes in a merged recording: each card has exactly one, which is unique."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from analysis.fleet.anchors import read_anchors
from sweeps.merging.merge import merge
from sweeps.merging.numbering import renumbered
from sweeps.store import read_events, read_run
from tests.support.fakes import planned
from tests.support.mergeable import H200, place, record
from tests.support.runs import rows_of

ANCHORS = planned(10)[8:]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    record(folder / "a", planned(4), machine=H200, anchors=ANCHORS, gpu=0)
    record(folder / "b", planned(8)[4:], machine=H200, anchors=ANCHORS, gpu=0)
    return folder


@pytest.fixture
def two(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "two")
    return tmp_path / "two"


def gpu(number: int = 0, node: int = 0, **more: str) -> dict[str, Any]:
    return {"gpu": number, "node": node, "power_limit_w": 700.0, "sm_limit_mhz": None, **more}


def merged(two: Path) -> tuple[list[Any], dict[str, set[Any]]]:
    """Merge two recordings. Return the GPUs of run.json, and the GPU numbers of each worker."""
    result = merge([two / "a", two / "b"], two / "all", two)
    numbers: dict[str, set[Any]] = {}
    for event in read_events(result.folder)[0]:
        if "gpu" in event:
            numbers.setdefault(event["worker"], set()).add(event["gpu"])
    rows = rows_of(result.folder)
    assert {m: {int(row["gpu"])} for m, row in rows.items()} == {
        m: numbers["1/2" if m <= 4 else "2/2"] for m in range(1, 9)
    }
    shown = read_run(result.folder).get("gpus", [])
    return [(p["gpu"], p["node"], p.get("id")) for p in shown], numbers


def test_two_cards_of_two_nodes_get_two_numbers(two: Path) -> None:
    place(two / "a", [gpu(id="aaaa0000")], ["11112222"])
    place(two / "b", [gpu(id="bbbb0000")], ["33334444"])
    shown, numbers = merged(two)
    assert shown == [(0, 0, "aaaa0000"), (1, 1, "bbbb0000")]
    assert numbers == {"1/2": {0}, "2/2": {1}}
    fleet = read_anchors(two / "all").fleet
    assert [(d.id, d.gpu, d.node, d.worker) for d in fleet.devices] == [
        ("aaaa0000", 0, 0, "1/2"), ("bbbb0000", 1, 1, "2/2"),
    ]  # fmt: skip
    assert {event["place"] for event in read_events(two / "all")[0] if "place" in event} == {0, 1}


def test_one_card_on_two_days_keeps_its_number(two: Path) -> None:
    for name in ("a", "b"):
        place(two / name, [gpu(id="aaaa0000")], ["11112222"])
    assert merged(two) == ([(0, 0, "aaaa0000")], {"1/2": {0}, "2/2": {0}})


def test_two_cards_of_one_node_are_on_one_node(two: Path) -> None:
    place(two / "a", [gpu(id="aaaa0000")], ["11112222"])
    place(two / "b", [gpu(id="bbbb0000")], ["11112222"])
    assert merged(two)[0] == [(0, 0, "aaaa0000"), (1, 0, "bbbb0000")]


def test_without_hashes_cards_of_two_recordings_are_two(two: Path) -> None:
    for name in ("a", "b"):
        place(two / name, [gpu()])
    assert merged(two) == ([(0, 0, None), (1, 1, None)], {"1/2": {0}, "2/2": {1}})


def test_a_hash_that_is_not_to_be_shown_tells_cards_apart_and_stays_hidden(two: Path) -> None:
    for name in ("a", "b"):
        place(two / name, [gpu(hidden="aaaa0000")], ["11112222"])
    shown, numbers = merged(two)
    assert (shown, numbers["2/2"]) == ([(0, 0, None)], {0})
    assert "aaaa0000" not in (two / "all" / "run.json").read_text()


def test_recordings_from_before_places_were_kept(two: Path) -> None:
    assert merged(two) == ([], {"1/2": {0}, "2/2": {1}})


def test_what_lies_beside_the_samples_may_be_nonsense(two: Path) -> None:
    place(two / "a", [gpu()])
    place(two / "b", [gpu(id="bbbb0000")])
    nonsense = [{"gpu": []}, {"id": "x"}, {"gpu": 0, "host": 7}]
    (two / "a" / "samples" / "places.json").write_text(json.dumps({"places": nonsense}))
    assert merged(two)[1] == {"1/2": {0}, "2/2": {1}}


def test_an_event_of_no_gpu_stays_of_none() -> None:
    event = {"event": "outcome", "case": "c", "worker": "1/1", "gpu": None}
    assert renumbered(event, "2/3", {0: 4}) == {**event, "worker": "2/3"}
    assert renumbered({"event": "place", "place": 0}, "2/3", {0: 4})["place"] == 4
    assert renumbered({"event": "place", "place": 1}, "2/3", {})["place"] == 1  # a CPU's node
