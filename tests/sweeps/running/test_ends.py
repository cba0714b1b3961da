"""Runs that are ended from outside: no measurement is lost, and none is repeated."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.common.errors import UserError
from sweeps.folding.fold import fold
from sweeps.folding.history import CANARY
from sweeps.store import read_events, read_run
from sweeps.timing.statistics import CHECKPOINTS
from tests.support.fakes import planned
from tests.support.runs import a_run, carry, rows_of
from tests.support.terminal import as_in_a_terminal
from tests.support.tiers import quick_and_long

ROOT = Path(__file__).resolve().parents[3]


def test_a_full_disk_ends_the_run_with_a_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    """The run is a process whose files may not grow beyond 20 kB."""
    code = CODE.replace("# limit", "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))")
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "40", "0", "0"], cwd=ROOT, env=ENVIRONMENT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 1, answer.stderr
    assert "could not be written" in answer.stdout
    before, damaged = read_events(tmp_path)
    assert len(before) > 50
    assert len(damaged) <= 1
    end, _ = carry(a_run(tmp_path, planned(40)))  # there is room again
    assert end == "done"
    after, _ = read_events(tmp_path)
    assert after[: len(before)] == before
    assert set(rows_of(tmp_path)) == set(range(1, 41))


CODE = """
import resource, sys
from pathlib import Path
from tests.support.fakes import Silent, planned
from tests.support.runs import a_run
from kernels.common.errors import UserError
from kernels.problem import Gemm
from sweeps.cases.case import Case
from sweeps.measuring.rounds import CHUNK
from sweeps.running.supervisor import carry_out
# limit
if __name__ == "__main__":
    folder, cases, pause = Path(sys.argv[1]), planned(int(sys.argv[2])), float(sys.argv[3])
    stalls = int(sys.argv[4])
    try:
        carry_out(a_run(folder, cases, real_seconds=pause, stalls_after=stalls), Silent(), print)
    except UserError as error:
        print(error)
        sys.exit(error.exit_code)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def start(folder: Path, count: int, pause: float, stalls: int = 0) -> subprocess.Popen[str]:
    """Start a run in another process.

    After ``stalls`` launches it waits to be killed, so that it does not finish before; 0 for never.
    """
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder), str(count), str(pause), str(stalls)], cwd=ROOT,
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=as_in_a_terminal,
    )  # fmt: skip


def count_events(folder: Path) -> int:
    path = folder / "samples" / "1-of-1.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("kills", quick_and_long([6, 20]))
def test_kills_at_random_moments_lose_nothing_and_repeat_nothing(
    kills: int, tmp_path: Path
) -> None:
    """The parent is killed by ``kill -9`` while a child measures. Every resume follows the plan."""
    rng = random.Random(1)
    cases = planned(120)
    written = 0
    for _ in range(kills):
        process = start(tmp_path, len(cases), 0.002, stalls=30)
        # Kill at a random moment of the measuring itself, not while Python starts.
        goal = count_events(tmp_path) + rng.randrange(1, 40)
        while count_events(tmp_path) < goal and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.02)
        assert process.poll() is None, process.communicate()
        process.kill()
        process.wait()
        assert count_events(tmp_path) >= written
        written = count_events(tmp_path)
    process = start(tmp_path, len(cases), 0.0)
    output, errors = process.communicate()
    assert process.returncode == 0, output + errors

    events, damaged = read_events(tmp_path)
    assert not damaged  # a line is one write
    samples = Counter(e["case"] for e in events if e["event"] == "sample")
    del samples[CANARY]
    ids = [entry.case.id for entry in cases]
    assert set(samples) == set(ids)
    assert all(count in CHECKPOINTS for count in samples.values())
    assert not [e for e in events if e["event"] in ("crash", "outcome")]
    rows = rows_of(tmp_path)
    assert list(rows) == list(range(1, 121))
    assert read_run(tmp_path)["counts"]["measured"] == 120
    first_seen = list(dict.fromkeys(e["case"] for e in events if e["event"] == "facts"))
    assert first_seen == ids  # the plan's order, over all resumes


def test_a_call_whose_time_is_over_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(20))
    assert carry(replace(run, stop_at=time.monotonic() - 1.0)) == ("time", [])
    assert read_run(tmp_path)["counts"]["measured"] == 0
    assert carry(replace(run, stop_at=time.monotonic() + 1e6)) == ("done", [])
    record = read_run(tmp_path)
    assert record["sweeps"] == {"fake": {"planned": 20, "measured": 20, "open": 0}}


def test_a_results_folder_that_is_removed_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    """Otherwise the run would write its samples into a file that nobody can find."""
    folder = tmp_path / "results"
    process = start(folder, 200, 0.005)
    while count_events(folder) < 30 and process.poll() is None:
        time.sleep(0.01)
    folder.rename(tmp_path / "elsewhere")
    output, errors = process.communicate()
    assert process.returncode == 1, errors
    assert "1-of-1.jsonl was removed while it was being written" in output
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_folds_what_there_is(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, 200, 0.005, stalls=200)
    while count_events(tmp_path) < 100 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0
    rows = rows_of(tmp_path)
    assert rows
    events, _ = read_events(tmp_path)
    assert len(rows) == len({e["case"] for e in events if e["event"] == "sample"} - {CANARY})


def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("relies on Linux's parent-death signal")
    process = start(tmp_path, 50, 0.01, stalls=20)
    while count_events(tmp_path) < 20 and process.poll() is None:
        time.sleep(0.01)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert children
    process.kill()
    process.wait()
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        alive = [pid for pid in children if Path(f"/proc/{pid}/cmdline").exists()
                 and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]  # fmt: skip
        if not alive:
            break
        time.sleep(0.05)
    assert not alive
    written = count_events(tmp_path)
    time.sleep(0.2)
    assert count_events(tmp_path) == written


def test_samples_that_are_mostly_damaged_leave_the_table_as_it_was(tmp_path: Path) -> None:
    carry(a_run(tmp_path, planned(4)))
    before = (tmp_path / "measurements.csv").read_bytes()
    path = tmp_path / "samples" / "1-of-1.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(["{}"] * 9 + lines[9:30]) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"damaged sample lines \(9\), so its tables were not"):
        fold(tmp_path)
    assert (tmp_path / "measurements.csv").read_bytes() == before
