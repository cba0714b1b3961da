from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.device import Device
from kernels.machine import known_machine
from sweeps.folding.history import History, histories
from sweeps.running import devices
from sweeps.running.devices import arrive, begun_elsewhere, has_timed_anchors, last_place
from sweeps.schema import ALONE, PHASES, TOGETHER
from tests.support.fakes import FakeNvml, planned


def gpu(index: int) -> Device:
    return Device(known_machine("nvidia-h200"), f"cuda:{index}", index)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate a node with several GPUs, whose name and limits a test may change."""
    import torch

    here = SimpleNamespace(name="node-a", nvml=FakeNvml(PowerManagementLimit=700_000))
    monkeypatch.setattr(socket, "gethostname", lambda: here.name)
    monkeypatch.setattr(devices, "open_nvml", lambda: here.nvml)
    monkeypatch.setattr(devices, "nvml_handle", lambda nvml, properties: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda index: SimpleNamespace(uuid=f"{here.name}-{index}"),
    )  # fmt: skip
    return here


def test_gpus_are_numbered_as_pytorch_does_and_then_on(
    tmp_path: Path, node: SimpleNamespace
) -> None:
    folder = tmp_path / "nvidia-h200"
    (folder / "samples").mkdir(parents=True)
    assert [arrive(folder, tmp_path, gpu(i))[0] for i in (3, 0, 3)] == [3, 0, 3]
    node.name = "node-b"
    numbers = [arrive(folder, tmp_path, gpu(i))[0] for i in (0, 1)]
    assert numbers == [4, 1]
    _, known = arrive(folder, tmp_path, gpu(1))
    assert [(place["gpu"], place["node"]) for place in known] == [(0, 0), (1, 1), (3, 0), (4, 1)]
    assert {place["power_limit_w"] for place in known} == {700.0}


@pytest.mark.parametrize("text", ["", "[]", '{"places": 1}', pytest.param("[" * 10**5, id="deep")])
def test_a_damaged_list_of_places_counts_as_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "places.json").write_text(text, encoding="utf-8")
    assert devices.read_places(tmp_path) == []


def test_a_gpu_has_one_hash_in_all_runs_and_no_name_is_kept_in_what_is_shown(
    tmp_path: Path, node: SimpleNamespace
) -> None:
    shown = []
    for run in ("one", "two"):
        (tmp_path / run / "samples").mkdir(parents=True)
        shown.append(arrive(tmp_path / run, tmp_path, gpu(0))[1])
    assert shown[0][0]["id"] == shown[1][0]["id"]
    assert "node-a" not in json.dumps(shown)
    (elsewhere := tmp_path / "other" / "run" / "samples").mkdir(parents=True)
    other = arrive(elsewhere.parent, tmp_path / "other", gpu(0))[1]
    assert other[0]["id"] != shown[0][0]["id"]  # another salt


def test_another_power_limit_is_refused(tmp_path: Path, node: SimpleNamespace) -> None:
    (tmp_path / "run" / "samples").mkdir(parents=True)
    arrive(tmp_path / "run", tmp_path, gpu(0))
    node.nvml = FakeNvml(PowerManagementLimit=500_000)
    words = "a power limit of 500 W, but the run began with .*700"
    with pytest.raises(devices.DifferentLimitsError, match=words) as caught:
        arrive(tmp_path / "run", tmp_path, gpu(1))
    assert caught.value.difference.startswith("it has a power limit of 500 W")


def test_on_another_gpu_unfinished_series_begin_anew() -> None:
    entries = planned(3)  # one series
    ids = [entry.case.id for entry in entries]
    sample = {"event": "sample", "worker": "1/2", "gpu": 0, "s": 1e-3, "cost": 0.0, "at": 1.0}
    events = [{**sample, "case": ids[0]}]
    known = {case: History() for case in ids} | histories(events)
    assert begun_elsewhere(entries, known) == [ids[0]]
    moved = histories([*events, {"event": "moved", "case": ids[0], "worker": "1/2"}])
    assert moved[ids[0]] == History()
    too_long = {"event": "too-long", "worker": "1/2"}
    done = {case: histories([{**too_long, "case": case}])[case] for case in ids}
    assert begun_elsewhere(entries, done) == []
    # The clock of the second node is behind that of the first.
    where = [{"event": "place", "at": at, "place": place} for at, place in ((2.0, 3), (1.0, 5))]
    assert (last_place(where), last_place([])) == (5, None)


def test_anchors_count_only_from_the_place_that_measured_the_shard_last() -> None:
    moves = [{"event": "place", "at": at, "place": place} for at, place in ((1.0, 3), (2.0, 5))]
    alone, together = ({"event": "anchor", "gpu": 5, "phase": phase} for phase in PHASES)
    assert has_timed_anchors([*moves, alone], 5)
    assert not has_timed_anchors([*moves, alone], 5, TOGETHER)
    assert has_timed_anchors([*moves, alone, together], 5, TOGETHER)
    assert not has_timed_anchors([*moves, alone], 3)  # the shard has left this place
    assert not has_timed_anchors([*moves, {**alone, "gpu": 3}], 5)  # timed before the move
    assert not has_timed_anchors(moves, 5)
    assert has_timed_anchors([{"event": "anchor", "phase": ALONE}], None)  # on a CPU


@pytest.mark.parametrize("damaged", [{}, {"gpu": 0}, {"gpu": "0", "id": "a", "host": "b"}, 7])
def test_a_damaged_place_is_left_out(
    tmp_path: Path, node: SimpleNamespace, damaged: object
) -> None:
    (tmp_path / "samples").mkdir()
    arrive(tmp_path, tmp_path, gpu(2))
    path = tmp_path / "samples" / "places.json"
    (place,) = json.loads(path.read_text())["places"]
    path.write_text(json.dumps({"places": [damaged, place]}))
    assert arrive(tmp_path, tmp_path, gpu(2))[0] == 2
    assert [place["gpu"] for place in arrive(tmp_path, tmp_path, gpu(0))[1]] == [0, 2]


@pytest.mark.parametrize("content", [b"", b"\xff"])
def test_a_damaged_salt_is_replaced(tmp_path: Path, node: SimpleNamespace, content: bytes) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / ".salt").write_bytes(content)
    arrive(tmp_path, tmp_path, gpu(0))
    assert len((tmp_path / ".salt").read_text()) == 32
