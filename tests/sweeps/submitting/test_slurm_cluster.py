from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm_cluster import (
    PARTITION,
    available,
    made_up_cluster,
    running_cluster,
    variables,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(available()), reason=available()),
]


class Cluster:
    """Slurm's commands for one cluster, and a folder for the files that its jobs write."""

    def __init__(self, conf: Path, folder: Path) -> None:
        self.conf, self.folder = conf, folder

    def run(self, *command: str, code: int = 0) -> str:
        """Run a command, and return what it prints on both streams."""
        answer = subprocess.run(
            command, env=variables(self.conf), cwd=self.folder, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert answer.returncode == code, answer.stdout
        return answer.stdout

    def submit(self, script: str, *options: str) -> str:
        """Submit a job that writes its files to the folder, and return the job's number."""
        path = self.folder / "script.sh"
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        return self.run("sbatch", "--parsable", *options, str(path)).strip()

    def tasks(self, job: str) -> dict[str, str]:
        """Return the tasks of an array that wait or run, each with its state."""
        lines = self.run("squeue", "--noheader", "--array", f"--jobs={job}", "--format=%i %T")
        return dict(line.split() for line in lines.splitlines())

    def wait_until(self, job: str, tasks: dict[str, str]) -> None:
        deadline = time.monotonic() + 60
        while (now := self.tasks(job)) != tasks:
            assert time.monotonic() < deadline, now
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with running_cluster(folder / "cluster") as conf:
        yield Cluster(conf, folder)


def wait_for_text(path: Path, text: str) -> None:
    while not (path.exists() and path.read_text() == text):
        time.sleep(0.1)


ARRAY = ("--array=0-3", "--nodes=1", "--ntasks=1", "--gpus-per-node=1", f"--partition={PARTITION}")


@pytest.mark.slow
def test_four_tasks_run_at_once_each_with_a_gpu_of_its_own(cluster: Cluster) -> None:
    """Each task waits for the others, so none would end if they ran one after another."""
    job = cluster.submit(
        'echo "$CUDA_VISIBLE_DEVICES" > gpu-$SLURM_ARRAY_TASK_ID\n'
        "until [ -e gpu-0 ] && [ -e gpu-1 ] && [ -e gpu-2 ] && [ -e gpu-3 ]; do sleep 0.1; done",
        *ARRAY,
    )
    cluster.wait_until(job, {})
    gpus = [(cluster.folder / f"gpu-{task}").read_text() for task in range(4)]
    assert sorted(gpus) == ["0\n", "1\n", "2\n", "3\n"]


@pytest.mark.slow
def test_one_task_is_cancelled_and_one_runs_again(cluster: Cluster) -> None:
    job = cluster.submit("echo again >> starts-$SLURM_ARRAY_TASK_ID; exec sleep 600", *ARRAY)
    cluster.wait_until(job, {f"{job}_{task}": "RUNNING" for task in range(4)})
    for task in range(4):  # a task is RUNNING before its script begins
        wait_for_text(cluster.folder / f"starts-{task}", "again\n")
    cluster.run("scancel", f"{job}_2")
    cluster.run("scontrol", "requeue", f"{job}_3")
    cluster.wait_until(job, {f"{job}_{task}": "RUNNING" for task in (0, 1, 3)})
    wait_for_text(cluster.folder / "starts-3", "again\nagain\n")
    cluster.run("scancel", job)
    cluster.wait_until(job, {})
    assert (cluster.folder / "starts-2").read_text() == "again\n"


def test_what_a_larger_cluster_would_accept(tmp_path: Path) -> None:
    with made_up_cluster(tmp_path / "cluster") as conf:
        larger = Cluster(conf, tmp_path)

        def answer(code: int, **options: object) -> str:
            asked = {
                "nodes": 1, "ntasks": 1, "gpus-per-node": 8, "array": "0-3", "cpus-per-task": 16,
                "time": 60, "partition": PARTITION, "account": "any",
            } | {name.replace("_", "-"): value for name, value in options.items()}  # fmt: skip
            given = (f"--{name}={value}" for name, value in asked.items())
            script = tmp_path / "script.sh"
            script.write_text("#!/bin/sh\n", encoding="utf-8")
            return larger.run("sbatch", "--test-only", *given, str(script), code=code)

        assert "using 16 processors on nodes node1" in answer(0)
        assert "Requested node configuration is not available" in answer(1, gpus_per_node=9)
        assert "Requested node configuration is not available" in answer(1, cpus_per_task=65)
        assert "invalid partition specified" in answer(1, partition="other")


@pytest.mark.slow
def test_no_process_outlives_an_interrupted_test(tmp_path: Path) -> None:
    """Even a process that a job has started in another session is ended."""

    def interrupted() -> None:
        with running_cluster(tmp_path / "cluster") as conf:
            own = Cluster(conf, tmp_path)
            own.submit("setsid sh -c 'echo $$ > pid; exec sleep 600' & exec sleep 600")
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                time.sleep(0.1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    states = subprocess.run(
        ["ps", "-o", "stat=", "-p", (tmp_path / "pid").read_text().strip()],
        capture_output=True, check=False, text=True,
    ).stdout  # fmt: skip
    assert states.startswith("Z") or not states  # the process has ended, or is a zombie
    assert (
        str(tmp_path)
        not in subprocess.run(
            ["ps", "-eo", "args"], capture_output=True, check=True, text=True
        ).stdout
    )


def test_a_cluster_that_does_not_start_says_how_the_logs_end(tmp_path: Path) -> None:
    """The path of a socket may have at most 107 characters."""
    with (
        pytest.raises(RuntimeError, match=r"(?s)munged ended.*munged\.log ends:.*maximum length"),
        running_cluster(tmp_path / ("long" * 30)),
    ):
        pass
