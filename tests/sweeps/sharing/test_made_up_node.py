"""A node with several simulated GPUs, measured by real commands and processes."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLease

from sweeps.claim import SUFFIX
from sweeps.planning.lines import series_of
from sweeps.planning.plan import read_plan
from sweeps.store import read_events, read_run

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
FAKE = ROOT / "tests" / "support" / "fake_gpu.py"
LONG = 900.0  # seconds, far more than any machine needs


def start(gpus: int, cases: int, *command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "MADE_UP_GPUS": str(gpus), "FEW_CASES": str(cases)}
    return subprocess.Popen(
        [sys.executable, str(FAKE), "-m", *command], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    answer, said = process.communicate(timeout=LONG)
    assert process.returncode == 0, said
    return answer, said


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Kill a worker of a run on two GPUs. Return the run's folder, the worker's GPU and stderr."""
    results = tmp_path_factory.mktemp("made-up")
    process = start(2, 6, "sweeps", "run", "alignment", "--gpus", "all", "--budget", "40s",
                    "--results", str(results))  # fmt: skip
    path = results / "nvidia-h200" / "samples" / "2-of-2.jsonl"
    until = time.monotonic() + LONG
    while not path.exists() or path.read_text(encoding="utf-8").count('"event":"sample"') < 3:
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    owner = SoftFileLease(path.with_name(path.name + SUFFIX)).owner
    assert owner is not None
    os.kill(owner.pid, signal.SIGKILL)
    return results / "nvidia-h200", 1, finish(process)[1]


def test_an_unfinished_series_begins_anew_on_the_gpu_that_takes_it_over(
    killed: tuple[Path, int, str],
) -> None:
    folder, dead, said = killed
    end = rf"The process of GPU {dead} ended before shard \d was finished \(killed by SIGKILL\)\."
    assert re.search(end, said)
    assert re.search(rf"Shard \d continues on GPU {1 - dead}\.", said)
    planned = read_plan(read_run(folder)["plan"])
    series = series_of([entry.case for entry in planned])
    number = dict(zip((entry.case.id for entry in planned), series, strict=True))
    events = read_events(folder)[0]
    moved = {event["case"] for event in events if event["event"] == "moved"}
    assert moved
    last: dict[str, set[int]] = defaultdict(set)
    for event in events:
        if event["event"] == "moved":
            last[event["case"]].clear()
        elif event["event"] == "sample" and event["case"] in number:
            last[event["case"]].add(event["gpu"])
    gpus: dict[int, set[int]] = defaultdict(set)
    for case, used in last.items():
        gpus[number[case]] |= used
    assert all(len(used) == 1 for used in gpus.values())
    assert all(last[case] == {1 - dead} for case in moved)


def test_every_case_has_one_row_of_the_gpu_that_measured_it_whole(
    killed: tuple[Path, int, str],
) -> None:
    folder, _, _ = killed
    record = read_run(folder)
    rows = rows_of(folder / "measurements.csv")
    assert len(rows) == record["counts"]["planned"] == record["counts"]["measured"]
    assert {int(row["samples"]) >= 6 for row in rows} == {True}
    assert {gpu["gpu"]: gpu["node"] for gpu in record["gpus"]} == {0: 0, 1: 0}
    assert len({gpu["id"] for gpu in record["gpus"]}) == 2
    assert "turns" not in record


def test_the_fleet_is_as_fast_as_it_was_made(killed: tuple[Path, int, str]) -> None:
    folder, _, _ = killed
    answer = subprocess.run([sys.executable, "-m", "analysis", "fleet", str(folder), "--json"],
                            cwd=ROOT, capture_output=True, text=True, check=True)  # fmt: skip
    speeds = {gpu["gpu"]: gpu["kinds"]["burst"]["speed"]
              for gpu in json.loads(answer.stdout)["gpus"]}  # fmt: skip
    assert speeds[1] / speeds[0] == pytest.approx(0.97, abs=0.01)


def test_shared_or_not_a_machine_gets_the_same_verdicts(tmp_path: Path) -> None:
    """One run has four GPUs whose speeds differ by 5%, the other only one of them."""
    verdicts: list[dict[tuple[str, ...], str]] = []
    for gpus, budget, how in ((4, "150s", ["--gpus", "all"]), (1, "600s", [])):
        results = tmp_path / str(gpus)
        where = ["--results", str(results)]
        finish(start(gpus, 60, "sweeps", "run", "alignment", "one-more", *how, "--budget", budget,
                     *where))  # fmt: skip
        finish(start(gpus, 60, "analysis", "table", *where))
        table = rows_of(results / "nvidia-h200" / "recommendations.csv")
        verdicts.append({(row["problem"], row["question"]): row["verdict"] for row in table})
    both: list[Any] = sorted(verdicts[0].keys() | verdicts[1].keys())
    assert len(both) > 100
    assert [verdicts[0].get(key) for key in both] == [verdicts[1].get(key) for key in both]
