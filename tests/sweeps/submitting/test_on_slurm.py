"""A run shared by four jobs of a real Slurm: one is cancelled, one killed, and one requeued."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLease

from kernels.machine import Machine
from sweeps.cases.case import Case
from sweeps.claim import SUFFIX
from sweeps.planning.choice import choose_sweeps, sweep_cases
from sweeps.planning.lines import series_of
from sweeps.planning.plan import make_plan, read_plan
from sweeps.store import read_events, read_run
from tests.support.slurm_cluster import PARTITION, available, running_cluster, variables

pytest.importorskip("submitit")

ROOT = Path(__file__).resolve().parents[3]
LONG = 400.0  # seconds, far more than any machine needs

# Cases of six series, which take long enough to be disturbed, and end before their budget.
SWEEP = """
question = "What is lost when jobs die?"
op = "gemm"

[[block]]
shapes = ["256,256,256", "512,512,512", "1024,64,1024", "64,1024,1024", "1024,1024,64",
          "768,96,384"]
vary = { n = [-1, 1, 8] }
dtype = "fp32"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(available()), reason=available() or "there is a Slurm"),
]


@dataclass(frozen=True)
class Ended:
    """Exit code of a submission, and what it wrote to stderr."""

    code: int
    said: str


@dataclass(frozen=True)
class Story:
    """A submission whose jobs died, the same command twice more, and a refused submission."""

    results: Path
    first: Ended
    second: Ended
    third: Ended
    refused: Ended

    @property
    def folder(self) -> Path:
        """Folder of the run, which a refused submission does not set aside."""
        (path,) = self.results.glob("*/run.json")
        return path.parent


def submission(results: Path, conf: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sweeps", "submit", str(results / "mine.toml"), "--cluster",
         "slurm", "--nodes", "4", "--device", "cpu", "--partition", PARTITION, "--account",
         "nobody", "--time", "20", "--budget", "100h", "--results", str(results), *more],
        cwd=ROOT, env=variables(conf), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_sample(results: Path, shard: int, process: subprocess.Popen[str]) -> Path:
    """Wait until a shard has a sample, and return the path of its sample file.

    The submission ``process`` must still wait for its jobs.
    """
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        for path in results.glob(f"*/samples/{shard}-of-4.jsonl"):
            if '"event":"sample"' in path.read_text(encoding="utf-8"):
                return path
        if process.poll() is not None:
            raise AssertionError(f"the submission ended first: {process.communicate()[1]}")
        time.sleep(0.05)
    raise AssertionError(f"shard {shard} measured nothing")


def stopped(results: Path, shard: int, process: subprocess.Popen[str]) -> int:
    """Stop the process that measures a shard after its first samples, and return its id."""
    path = wait_for_sample(results, shard, process)
    owner = SoftFileLease(path.with_name(path.name + SUFFIX)).owner
    assert owner is not None, f"shard {shard} was over before it could be stopped"
    os.kill(owner.pid, signal.SIGSTOP)
    return owner.pid


def wait_for_signal(pid: int, number: signal.Signals) -> None:
    """Wait until a stopped process has a signal pending, or has ended."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        except (FileNotFoundError, ProcessLookupError):
            return
        pending = [int(line.split()[1], 16) for line in status.splitlines()
                   if line.startswith(("SigPnd", "ShdPnd"))]  # fmt: skip
        if any(mask >> (number - 1) & 1 for mask in pending):
            return
        time.sleep(0.05)
    raise AssertionError(f"no {number.name} reached process {pid}")


def job_of(results: Path, node: int) -> str:
    jobs = json.loads((results / ".submitted" / "jobs.json").read_text(encoding="utf-8"))
    return str(jobs["jobs"][str(node)])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    results = tmp_path_factory.mktemp("cluster")
    (results / "mine.toml").write_text(SWEEP, encoding="utf-8")
    # The path of munge's socket may have 107 characters.
    with running_cluster(tmp_path_factory.mktemp("s")) as conf:
        process = submission(results, conf)
        env = variables(conf)
        # All three are stopped first, so that none finishes its shard before it is killed.
        must_leave, cancelled, killed = (stopped(results, node, process) for node in (4, 2, 3))
        subprocess.run(["scancel", "--signal=USR2", job_of(results, 4)], env=env, check=True)
        wait_for_signal(must_leave, signal.SIGUSR2)
        os.kill(must_leave, signal.SIGCONT)
        subprocess.run(["scancel", job_of(results, 2)], env=env, check=True)
        wait_for_signal(cancelled, signal.SIGTERM)  # Slurm itself continues it, so that it ends
        os.kill(killed, signal.SIGKILL)
        ended: list[Ended] = []
        for more in ([], [], [], ["--fresh", "--partition", "nowhere"]):
            process = submission(results, conf, *more) if ended else process
            said = process.communicate(timeout=LONG)[1]
            ended.append(Ended(process.returncode, said))
        yield Story(results, *ended)


def test_what_is_not_done_is_named_and_the_same_command_does_it(story: Story) -> None:
    assert story.first.code == 1, story.first.said
    for node in (2, 3):
        assert f"Node {node} of 4 is not finished: its job ended too early;" in story.first.said
    for node in (1, 4):
        assert f"Node {node} of 4 is not finished" not in story.first.said
    assert story.second.code == 0, story.second.said
    assert "Submitted jobs for nodes 2, 3 of 4" in story.second.said
    assert story.third.code == 0, story.third.said
    assert "All shards are already finished." in story.third.said
    assert "Submitted" not in story.third.said


def test_a_job_that_must_leave_its_node_is_queued_again(story: Story) -> None:
    """Slurm may end the process as soon as the process has asked to be requeued."""
    (path,) = (story.results / ".submitted" / "output").glob("*_3_0_log.out")
    log = path.read_text(encoding="utf-8")
    assert log.count("Starting with JobEnvironment") == 2
    first, second = log.split("Starting with JobEnvironment")[1:]
    assert "Caught signal SIGUSR2" in first
    assert "Job completed successfully" in second


def all_cases(record: dict[str, Any], results: Path) -> list[Case]:
    machine = Machine.from_json(record["machine"])
    (sweep,) = choose_sweeps([str(results / "mine.toml")]).values()
    return sweep_cases(sweep, machine)


def test_no_case_is_lost_none_comes_twice_and_series_are_whole(story: Story) -> None:
    record = read_run(story.folder)
    cases = all_cases(record, story.results)
    unsharded = make_plan({"mine": cases}, Machine.from_json(record["machine"]), 360_000.0)
    planned = read_plan(record["plan"])
    assert sorted(e.case.id for e in planned) == sorted(e.case.id for e in unsharded.planned)
    with open(story.folder / "measurements.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows} == {"ok"}
    assert sorted(Case.from_columns(row).id for row in rows) == sorted(case.id for case in cases)
    shard = {entry.case.id: entry.shard for entry in planned}
    of_series = {(number, shard[case.id])
                 for number, case in zip(series_of(cases), cases, strict=True)}  # fmt: skip
    assert len(of_series) == len({number for number, _ in of_series}) >= 4
    for row in rows:
        assert row["worker"] == f"{shard[Case.from_columns(row).id]}/4"


def test_no_sample_is_of_two_workers_or_written_twice(story: Story) -> None:
    events, damaged = read_events(story.folder)
    assert len(damaged) <= 1  # the line that kill -9 cut
    samples = [(e["case"], e["worker"], e["at"]) for e in events if e["event"] == "sample"]
    assert len(samples) == len({*samples})
    ends = [event["worker"] for event in events if event["event"] == "end"]
    assert sorted(ends) == ["1/4", "2/4", "3/4", "4/4"]


def test_a_cluster_that_refuses_says_why(story: Story) -> None:
    assert story.refused.code == 2
    last = story.refused.said.strip().splitlines()[-1]
    assert last.startswith("The cluster refused the jobs: ")
    assert "invalid partition" in last.lower()
