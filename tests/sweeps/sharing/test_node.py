"""Two workers share a real CPU: they disturb each other, and one of them is killed."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import Pipe, current_process
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import SoftFileLease

from kernels.common.errors import UserError
from kernels.device import this_cpu
from kernels.machine import Machine
from sweeps.cases.spec import all_sweeps
from sweeps.claim import SUFFIX
from sweeps.planning.choice import sweep_cases
from sweeps.planning.lines import series_of
from sweeps.planning.plan import read_plan
from sweeps.process import descendants
from sweeps.running.devices import DifferentLimitsError
from sweeps.running.request import Request
from sweeps.schema import TOGETHER
from sweeps.sharing import node as node_module
from sweeps.sharing.node import _assigned, _Parent, _shards_to_share, _Worker
from sweeps.sharing.worker import WorkerJob
from sweeps.store import Event, read_events, read_run, write_json, write_run

ROOT = Path(__file__).resolve().parents[3]
LONG = 300.0  # seconds, far more than any machine needs


def sweep(results: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sweeps", "run", "square", "cache", "--gpus", "0,1", "--device",
         "cpu", "--budget", "6s", "--results", str(results), *more],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def worker_that_measures(results: Path) -> tuple[int, str]:
    """Return the id of a process that has written a sample, and its shard's name."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        for path in results.glob("*/samples/*.jsonl"):
            if '"event":"sample"' in path.read_text(encoding="utf-8"):
                owner = SoftFileLease(path.with_name(path.name + SUFFIX)).owner
                assert owner is not None
                return owner.pid, path.stem.replace("-of-", "/")
        time.sleep(0.05)
    raise AssertionError("nothing was measured")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Kill one of a run's two workers. Return the run's folder, the worker's shard and stderr."""
    results = tmp_path_factory.mktemp("node")
    process = sweep(results)
    pid, shard = worker_that_measures(results)
    assert pid in descendants(process.pid)
    os.kill(pid, signal.SIGKILL)
    said = process.communicate(timeout=LONG)[1]
    assert process.returncode == 0, said
    (path,) = results.glob("*/run.json")
    return path.parent, shard, said


@pytest.mark.long
def test_what_a_killed_worker_leaves_another_one_finishes(killed: tuple[Path, str, str]) -> None:
    folder, _shard, said = killed
    assert re.search(r"ended before shard \d was finished \(killed by SIGKILL\)\.", said)
    assert re.search(r"Shard \d continues on worker", said)
    ends = {event["worker"]: event["why"] for event in read_events(folder)[0]
            if event["event"] == "end"}  # fmt: skip
    assert ends.keys() == {"1/2", "2/2"}
    assert {*ends.values()} <= {"done", "budget"}


@pytest.mark.long
def test_no_case_is_lost_and_none_comes_twice(killed: tuple[Path, str, str]) -> None:
    folder, _, _ = killed
    record = read_run(folder)
    planned = read_plan(record["plan"])
    with open(folder / "measurements.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert record["counts"]["planned"] == len(planned)
    assert len(rows) + record["counts"]["not_reached"] == len(planned)
    shards = {entry.case.id: f"{entry.shard}/2" for entry in planned}
    keys = Counter((row["sweep"], row["m"], row["n"], row["k"], row["dtype"], row["cache"],
                    row["layout"]) for row in rows)  # fmt: skip
    assert max(keys.values()) == 1
    for event in read_events(folder)[0]:
        if event["event"] == "sample" and event["case"] in shards:
            assert event["worker"] == shards[event["case"]]


@pytest.mark.long
def test_series_are_whole(killed: tuple[Path, str, str]) -> None:
    record = read_run(killed[0])
    shard = {entry.case.id: entry.shard for entry in read_plan(record["plan"])}
    machine = Machine.from_json(record["machine"])
    cases = [case for name in ("square", "cache")
             for case in sweep_cases(all_sweeps()[name], machine)]  # fmt: skip
    of_series = {(number, shard[case.id])
                 for number, case in zip(series_of(cases), cases, strict=True)
                 if case.id in shard}  # fmt: skip
    assert len(of_series) == len({number for number, _ in of_series}) > 1
    assert {shard for _, shard in of_series} == {1, 2}


@pytest.mark.long
def test_each_worker_timed_its_anchors_alone_and_beside_the_other(
    killed: tuple[Path, str, str],
) -> None:
    folder, _, _ = killed
    with open(folder / "anchors.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for worker in ("1/2", "2/2"):
        phases = Counter(row["phase"] for row in rows if row["worker"] == worker)
        assert phases["together"] >= phases["alone"] >= 6
    events = [event for event in read_events(folder)[0] if event["event"] == "anchor"]
    alone = [(event["at"], event["worker"]) for event in events if event["phase"] == "alone"]
    turns = [worker for _, worker in sorted(alone)]
    assert sum(a != b for a, b in itertools.pairwise(turns)) == 1
    assert max(alone)[0] < min(e["at"] for e in events if e["phase"] == "together")


@pytest.mark.long
def test_a_run_that_is_over_is_left_as_it_is(killed: tuple[Path, str, str]) -> None:
    folder, _, _ = killed
    before = {path.name: path.read_bytes() for path in (folder / "samples").glob("*.jsonl")}
    process = sweep(folder.parent, "--json")
    answer, said = process.communicate(timeout=LONG)
    assert process.returncode == 0, said
    assert json.loads(answer)["folder"] == str(folder)
    for name, text in before.items():
        now = (folder / "samples" / name).read_bytes()
        assert now.startswith(text)
        assert b'"event":"sample"' not in now[len(text) :]
        assert b'"event":"anchor"' not in now[len(text) :]


@pytest.mark.slow
def test_two_workers_share_a_run(tmp_path: Path) -> None:
    sweep = tmp_path / "mine.toml"
    sweep.write_text('question = "Why?"\nop = "gemm"\n[[block]]\n'
                     'shapes = ["64,64,64", "96,96,96"]\ndtype = "fp32"\n')  # fmt: skip
    command = [sys.executable, "-m", "sweeps", "run", str(sweep), "--gpus", "0,1", "--device",
               "cpu", "--budget", "100s", "--results", str(tmp_path), "--json"]  # fmt: skip
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    folder = Path(json.loads(answer.stdout)["folder"])
    with open(folder / "measurements.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["worker"] for row in rows) == ["1/2", "2/2"]
    assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--gpus", "0", "--gpu", "1"], "give only one of them"),
        (["--gpus", "1", "--gpu", "0"], "give only one of them"),
        (["square", "--gpus", "0,1", "--add"], "--add works only on one GPU"),
    ],
)
def test_options_that_exclude_each_other_are_a_sentence(options: list[str], sentence: str) -> None:
    answer = subprocess.run([sys.executable, "-m", "sweeps", "run", *options], cwd=ROOT,
                            capture_output=True, text=True, check=False)  # fmt: skip
    assert answer.returncode == 2
    assert sentence in answer.stderr


def test_how_many_shares_a_run_has_is_what_its_plan_says(tmp_path: Path) -> None:
    asked = Request(results=tmp_path)
    assert _shards_to_share(tmp_path, asked, nodes=4, gpus_per_node=8) == 32
    plan = {"shards": 8, "sweeps": ["cache", "square"], "cases": []}
    record = {"schema": 1, "protocol": 1, "run": "2026-11-23T12:00:00Z", "machine": None,
              "software": {}, "plan": plan}  # fmt: skip
    write_run(tmp_path, record)
    assert _shards_to_share(tmp_path, asked, nodes=1, gpus_per_node=3) == 8
    assert _shards_to_share(tmp_path, asked, nodes=4, gpus_per_node=2) == 8
    for nodes, gpus in ((3, 8), (8, 2)):
        with pytest.raises(UserError, match=r"was planned for 8 shards and cannot be shared by"):
            _shards_to_share(tmp_path, asked, nodes, gpus)
    with pytest.raises(UserError, match=r"Name exactly its sweeps \(cache, square\)"):
        _shards_to_share(tmp_path, Request(("square",), results=tmp_path), nodes=1, gpus_per_node=8)
    # A fresh run has a new number of shards. A run that began after the submission counts as fresh.
    noon = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
    fresh = Request(results=tmp_path, fresh=True)
    assert _shards_to_share(tmp_path, fresh, nodes=1, gpus_per_node=2) == 2
    for moment, shards in ((noon - 60, 8), (noon + 60, 4)):
        asked = replace(fresh, fresh_since=moment)
        assert _shards_to_share(tmp_path, asked, nodes=2, gpus_per_node=2) == shards
    write_run(tmp_path, {**record, "run": "once"})
    assert _shards_to_share(tmp_path, asked, nodes=2, gpus_per_node=2) == 4


def test_a_gpu_goes_on_with_what_it_was_measuring() -> None:
    assert _assigned({0: 0, 1: 1}, {1: None, 2: None}) == {0: 1, 1: 2}
    assert _assigned({0: 0, 1: 1}, {1: 1, 2: 0}) == {0: 2, 1: 1}
    # GPU 1 is gone. The other GPUs keep the shards that they measured, and its shard is left over.
    assert _assigned({0: 0, 2: 2}, {1: 0, 2: 1, 3: 2}) == {0: 1, 2: 3}
    # A GPU that replaces it gets a shard that nobody has begun.
    assert _assigned({0: 0, 5: 5}, {1: 0, 2: 1, 3: None}) == {0: 1, 5: 3}
    assert _assigned({0: 0, 1: 1, 2: 2}, {1: None}) == {0: 1}


def parent_of(folder: Path) -> _Parent:
    """Return the parent of one CPU worker, which has the number 1 within the run."""
    parent = _Parent.__new__(_Parent)
    parent._folder = folder
    parent._request = Request(results=folder)
    parent._gpus = {0: this_cpu()}
    parent._places = {0: 1}
    return parent


def test_a_cpu_s_turns_are_recorded_for_its_own_node(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    places = [{"gpu": i, "id": "a", "host": "b", "node": i} for i in (0, 1)]
    write_json(tmp_path / "samples" / "places.json", {"places": places})
    write_run(tmp_path, {"schema": 1, "protocol": 1, "run": "once", "machine": None,
                         "software": {}, "plan": {"cases": []}})  # fmt: skip
    parent_of(tmp_path)._record_turns()
    assert read_run(tmp_path)["turns"] == [1]


def test_a_gpu_with_another_limit_is_left_out_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise DifferentLimitsError("a power limit of 500 W", "a power limit of 700 W")

    monkeypatch.setattr(node_module, "take_part", fail)
    notes: list[str] = []
    parent = parent_of(tmp_path)
    parent._note = notes.append
    parent._places = {}
    with pytest.raises(UserError, match="1 of 1 GPU has power or clock limits that differ"):
        parent._take_part()
    words = "it has a power limit of 500 W, but the run began with a power limit of 700 W"
    assert notes == [f"worker 0 is left out: {words}."]


def test_a_full_disk_is_not_taken_for_another_power_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise UserError("run.json could not be written (No space left on device).")

    monkeypatch.setattr(node_module, "take_part", fail)
    with pytest.raises(UserError, match="No space left on device"):
        parent_of(tmp_path)._take_part()


def test_a_gpu_that_is_left_out_does_not_count_as_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[WorkerJob] = []

    def process(target: object, args: tuple[object, WorkerJob], name: str) -> SimpleNamespace:
        jobs.append(args[1])
        return SimpleNamespace(start=lambda: None)

    context = SimpleNamespace(Pipe=Pipe, Process=process)
    monkeypatch.setattr(node_module, "get_context", lambda method: context)
    parent = parent_of(tmp_path)
    parent._gpus = {0: this_cpu(), 1: this_cpu()}  # only the first one takes part
    parent._total = 1
    parent._workers = {}
    parent._start(0, 1, time_anchors=False)
    assert [job.workers for job in jobs] == [1]


def test_a_worker_that_died_at_a_gate_ends_nothing_when_it_is_let_go() -> None:
    ours, theirs = Pipe()
    theirs.close()
    parent = _Parent.__new__(_Parent)
    parent._workers = {0: _Worker(current_process(), ours, 0, 1)}
    parent._let_go([0])  # the worker's shard is handed out when its end is noticed
    with pytest.raises(EOFError):
        ours.recv()


@pytest.mark.parametrize("gpu_of_events", [0, 2])
def test_a_shard_that_moved_before_its_anchors_were_timed_times_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu_of_events: int
) -> None:
    """The second GPU, number 2 of the run, resumes a shard, perhaps one that another GPU timed."""

    def events(shard: int) -> list[Event]:
        number = {1: 1, 2: gpu_of_events}[shard]
        anchor = {"event": "anchor", "phase": TOGETHER, "gpu": number}
        return [anchor, {"event": "place", "place": {1: 1, 2: 2}[shard], "at": 2.0}]

    started: list[bool] = []
    parent = parent_of(tmp_path)
    parent._places = {0: 1, 1: 2}
    parent._budget = 1.0
    parent._idle, parent._due = {}, deque()
    monkeypatch.setattr(parent, "_take_part", lambda: None)
    monkeypatch.setattr(parent, "_events", events)
    monkeypatch.setattr(parent, "_start", lambda gpu, shard, anchors: started.append(anchors))
    follower = SimpleNamespace(look=lambda: None, unfinished=lambda budget: [1, 2])
    monkeypatch.setattr(parent, "_follower", follower, raising=False)
    parent._start_all()
    assert started == [gpu_of_events != 2] * 2
