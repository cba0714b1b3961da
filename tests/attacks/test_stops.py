"""Runs that are killed, stopped and paused at any moment lose nothing and time nothing wrong."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sweeps.timing.statistics import CHECKPOINTS
from tests.support.terminal import as_in_a_terminal
from tests.support.tiers import quick_and_long

ROOT = Path(__file__).resolve().parents[2]
BUDGET = "6s"
PAUSE = 10.0
ENDS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


def start(results: Path) -> subprocess.Popen[str]:
    """A real run, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "sweeps", "run", "square", "cache", "--budget", BUDGET,
         "--device", "cpu", "--results", str(results)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=as_in_a_terminal,
    )  # fmt: skip


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if parent == pid:
            found.append(int(path.parent.name))
    return found


def strike(process: subprocess.Popen[str], rng: random.Random, number: signal.Signals) -> str:
    """Send a signal to the run, to its children or to all of them; says to whom."""
    target = rng.choice(["parent", "child", "all"])
    try:
        if target == "all":
            os.killpg(process.pid, number)
        else:
            for pid in [process.pid] if target == "parent" else children(process.pid):
                os.kill(pid, number)
    except ProcessLookupError:
        pass
    return target


def samples(results: Path) -> list[dict[str, Any]]:
    lines = [
        line
        for path in results.glob("*/samples/*.jsonl")
        for line in path.read_bytes().split(b"\n")
    ]
    events = []
    for line in filter(None, lines):
        try:
            events.append(json.loads(line))
        except ValueError:
            continue  # cut by a kill: at most one for each
    return events


def sound(results: Path, longest: float) -> list[dict[str, str]]:
    """The rows of a run, after looking for everything that an attack could have left behind.

    ``longest``: seconds that no sample may have taken.
    """
    events = samples(results)
    taken = Counter(event["case"] for event in events if event["event"] == "sample")
    taken.pop("canary", None)
    assert all(count <= CHECKPOINTS[-1] for count in taken.values())
    moments = [(event["case"], event["at"]) for event in events if "at" in event]
    assert len(moments) == len(set(moments))  # nothing was written twice
    times = [event["s"] * event["n"] for event in events if event["event"] == "sample"]
    assert max(times, default=0.0) < longest
    (table,) = results.glob("*/measurements.csv")
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    identities = [tuple(list(row.values())[5:29]) for row in rows]
    assert len(identities) == len(set(identities))
    assert {row["status"] for row in rows} <= {"ok", "error"}
    # A case in flight may have been charged with the process's death, twice at most.
    assert sum(row["status"] == "error" for row in rows) <= 2
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick_and_long(range(40)))
def test_a_run_that_was_ended_goes_on(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    process = start(tmp_path)
    time.sleep(rng.uniform(0.5, 10.0))
    before = len(samples(tmp_path))
    strike(process, rng, ENDS[seed % len(ENDS)])
    process.communicate()
    assert len(samples(tmp_path)) >= before
    again = start(tmp_path)
    said = again.communicate()[1]
    assert again.returncode == 0, said
    assert any(row["status"] == "ok" for row in sound(tmp_path, float("inf")))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_paused_times_nothing_wrong_and_pays_nothing(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    process = start(tmp_path)
    deadline = time.monotonic() + 300
    while len(samples(tmp_path)) < 30 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    time.sleep(rng.uniform(0.0, 3.0))
    state = rng.getstate()
    strike(process, rng, signal.SIGSTOP)
    time.sleep(PAUSE)
    rng.setstate(state)
    strike(process, rng, signal.SIGCONT)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert any(row["status"] == "ok" for row in sound(tmp_path, 0.8 * PAUSE))
    (record,) = tmp_path.glob("*/run.json")
    assert json.loads(record.read_text())["spent_s"] < float(BUDGET[:-1]) + 0.8 * PAUSE
