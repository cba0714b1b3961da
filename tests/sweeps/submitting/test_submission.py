"""Submissions without a cluster: jobs on this machine or in this process, and wrong options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.common.errors import UserError
from sweeps.running.request import Request
from sweeps.store import read_events, read_run, write_run
from sweeps.submitting.clusters import Cluster, Resources, living_in_slurm
from sweeps.submitting.node_job import NodeJob, NodeNote, jobs_folder
from sweeps.submitting.submission import _NodeRun, _Submission
from tests.support.command_line import SWEEPS, command

ROOT = Path(__file__).resolve().parents[3]

pytest.importorskip("submitit")


def submit(results: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sweeps", "submit", "--device", "cpu", "--results", str(results),
         *more],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_two_nodes_on_this_machine_take_turns_and_in_this_process_go_on(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('question = "Why?"\nop = "gemm"\n[[block]]\nm = [64, 256]\nn = "m"\nk = 64\n'
                    'dtype = "fp32"\n', encoding="utf-8")  # fmt: skip
    common = (str(mine), "--nodes", "2", "--budget", "10h", "--json")
    answer = submit(tmp_path, "--cluster", "local", *common)
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert document["missing"] == []
    (folder,) = map(Path, document["folders"])
    assert "2 of 2 cases were measured" in answer.stderr
    assert read_run(folder)["plan"]["shards"] == 2
    times = {worker: [event["at"] for event in read_events(folder)[0]
                      if event["worker"] == worker and event["event"] == "sample"]
             for worker in ("1/2", "2/2")}  # fmt: skip
    assert max(times["1/2"]) < min(times["2/2"])
    # Another kind of cluster resumes the same run, which is finished. Another number of nodes is
    # refused.
    again = submit(tmp_path, "--cluster", "debug", *common)
    assert again.returncode == 0, again.stderr
    assert "All shards are already finished." in again.stderr
    other = submit(tmp_path, "--cluster", "debug", str(mine), "--nodes", "3", "--budget", "10h")
    assert other.returncode == 1
    for node in (1, 2, 3):
        assert f"Node {node} of 3 is not finished: the run in {folder} was planned" in other.stderr
    # Other sweeps are refused at once, and only the first node begins a fresh run.
    wrong = submit(tmp_path, "--cluster", "debug", "square", "--nodes", "2")
    assert wrong.returncode == 2
    assert f"the sweeps of the run in {folder} cannot be changed" in wrong.stderr
    fresh = submit(tmp_path, "--cluster", "debug", "--fresh", *common)
    assert fresh.returncode == 0, fresh.stderr
    assert fresh.stderr.count("a fresh run was requested. The old run is kept in") == 1
    assert len([*folder.glob("runs/*/run.json")]) == 1


@pytest.mark.slow
def test_a_job_that_cannot_begin_says_why(tmp_path: Path) -> None:
    answer = submit(tmp_path, "square", "--cluster", "debug", "--budget", "0.001s")
    assert answer.returncode == 1
    assert (
        "Node 1 of 1 is not finished: no case of square fits a budget of 0.001 s" in answer.stderr
    )
    assert "cannot be read" not in answer.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cluster", "pbs"], "--cluster must be slurm, local or debug, not 'pbs'."),
        (["squrae", "--cluster", "local"], "squrae"),
        (["--budget", "soon"], "--budget is 'soon'; give a time"),
        (["--device", "tpu"], "--device 'tpu' cannot be used to submit jobs; give gpu or cpu."),
        (["--cpus-per-gpu", "6"], "--cpus-per-gpu work only with --device gpu; leave them out."),
        (["--print", "--fresh"], "--print cannot be combined with --fresh"),
        (["--print", "--json"], "--print prints a script, not JSON"),
        (["--print", "--cluster", "local"], "--print prints a script for Slurm, not for"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, options: list[str], sentence: str) -> None:
    answer = command(SWEEPS, "submit", "--device", "cpu", "--results", tmp_path, *options)
    assert answer.returncode == 2
    assert sentence in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "cpu").exists()


def test_without_slurm_or_submitit_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = Resources(8, 4, 30)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda name: None)
        with pytest.raises(
            UserError, match="sbatch is not installed on this machine: submit from a node"
        ):
            Cluster("slurm", tmp_path, resources)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"needs submitit, which is not installed; .*slurm"):
        Cluster("local", tmp_path, resources)


def test_which_jobs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(code: int, out: str, err: str = "") -> None:
        done = subprocess.CompletedProcess([], code, out, err)
        monkeypatch.setattr("subprocess.run", lambda *_, **__: done)

    answers(0, "12_0|R|None\n12_3|PD|Resources\n15_1|PD|launch failed | held\n\n")
    assert living_in_slurm(["12_0", "12_1", "15_1"]) == {"12_0": "", "15_1": "launch failed | held"}
    answers(1, "", "slurm_load_jobs error: Invalid job id specified")
    assert living_in_slurm(["12_0"]) == {}
    answers(1, "", "slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(UserError, match="squeue failed .*Unable to contact"):
        living_in_slurm(["12_0"])
    assert living_in_slurm([]) == {}

    def times_out(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired(["squeue"], 60.0)

    monkeypatch.setattr("subprocess.run", times_out)
    with pytest.raises(UserError, match="squeue did not answer within 60 s; try again later"):
        living_in_slurm(["12_0"])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"folder": 1}', '"x"', "\xff", pytest.param("[" * 10**5, id="deep")],
)
def test_a_damaged_note_of_a_node_says_nothing(tmp_path: Path, text: str) -> None:
    jobs_folder(tmp_path).mkdir()
    NodeNote.path(tmp_path, (1, 2)).write_text(text, encoding="latin-1")
    assert NodeNote.read(tmp_path, (1, 2)) == NodeNote(None, "")
    NodeNote(tmp_path / "nvidia-h200", "no room").write(tmp_path, (1, 2))
    assert NodeNote.read(tmp_path, (1, 2)) == NodeNote(tmp_path / "nvidia-h200", "no room")


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"nodes": 1, "jobs": []}', '{"nodes": 1e400, "jobs": {"1": "7"}}', '{"nodes": 1}'],
)
def test_a_damaged_list_of_jobs_counts_as_no_list(tmp_path: Path, text: str) -> None:
    jobs_folder(tmp_path).mkdir()
    (jobs_folder(tmp_path) / "jobs.json").write_text(text, encoding="utf-8")
    cluster: Any = SimpleNamespace(kind="slurm")
    reporter: Any = None
    work = NodeJob(Request(results=tmp_path), nodes=1, gpus=1)
    submission = _Submission(work, cluster, reporter, lambda text: None)
    assert submission._find_jobs() == set()


def test_a_note_of_a_run_that_was_removed_counts_as_no_run(tmp_path: Path) -> None:
    NodeNote(tmp_path / "nvidia-h200", "").write(tmp_path, (1, 2))
    run = _NodeRun(tmp_path, (1, 2))
    run.look()
    run.refuse_other_sweeps(Request(("square",)))
    assert run.folder is None
    assert run.is_open(0.0)


@pytest.mark.parametrize(
    ("shards", "reason"),
    [(1, "cannot be changed by a submission"), (2, "because the run has several shards")],
)
def test_other_sweeps_are_refused_for_the_right_reason(
    tmp_path: Path, shards: int, reason: str
) -> None:
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    write_run(
        folder,
        {"schema": 1, "protocol": 1, "run": "2026-11-25T12:00:00Z", "machine": None,
         "software": {},
         "plan": {"cases": [], "shards": shards, "sweeps": ["cache"], "budget_s": 60.0}},
    )  # fmt: skip
    run = _NodeRun(tmp_path, (1, 1))
    run.folder = folder
    run.refuse_other_sweeps(Request(("cache",)))
    with pytest.raises(UserError, match=f"{reason}. Name exactly its sweeps .cache., or use"):
        run.refuse_other_sweeps(Request(("square",)))


def test_an_unexpected_error_of_a_job_in_this_process_is_raised(tmp_path: Path) -> None:
    def fail(number: int) -> None:
        raise ZeroDivisionError(f"on node {number}")

    cluster = Cluster("debug", tmp_path, Resources(0, 4, 30))
    work: Any = fail
    ids = cluster.submit(work, [3])
    with pytest.raises(ZeroDivisionError, match="on node 3"):
        cluster.living([*ids.values()])


def test_the_failure_of_an_earlier_job_is_forgotten(tmp_path: Path) -> None:
    """Otherwise it would be reported if the new job dies before it can write why."""
    NodeNote(tmp_path / "cpu", "no room").write(tmp_path, (1, 1))
    cluster: Any = SimpleNamespace(kind="local", submit=lambda work, nodes: {1: "7"})
    reporter: Any = None
    work = NodeJob(Request(results=tmp_path), nodes=1, gpus=1)
    submission = _Submission(work, cluster, reporter, lambda text: None)
    submission._look()
    assert submission._submit_some([1], set()) == []
    assert NodeNote.read(tmp_path, (1, 1)).failure == ""
