"""Runs that are killed, crash, hang, fill the disk: no case lost, none twice, one sentence each."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import Silent, planned

from kernels.errors import UserError
from kernels.problem import Gemm
from sweeps import runner as runner_module
from sweeps.case import Case
from sweeps.fold import CANARY
from sweeps.plan import Planned
from sweeps.rounds import CHUNK
from sweeps.runner import Run, carry_out, fold
from sweeps.sampler import PROTOCOL
from sweeps.schema import SCHEMA
from sweeps.statistics import CHECKPOINTS
from sweeps.store import SampleLog, read_events, read_run, write_run

ROOT = Path(__file__).resolve().parents[2]
DONE = CHECKPOINTS


def a_run(path: Path, cases: list[Planned], patience: float = 1e6, **arguments: Any) -> Run:
    """``patience``: seconds after which a visit hangs; so many that a busy machine's never does."""
    folder = path
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    if not (folder / "run.json").exists():
        plan = {"budget_s": 1e6, "shards": 1, "cases": [entry.to_json() for entry in cases]}
        versions = {"schema": SCHEMA, "protocol": PROTOCOL, "machine": {}, "software": {}}
        write_run(folder, {**versions, "run": "now", "plan": plan})
    return Run(
        folder, cases, 1e6, bench="fakes:FakeBench", arguments=arguments, least_patience=patience
    )


def carry(run: Run) -> tuple[str, list[str]]:
    """How it ended, and what was said beside the announcement of its beginning."""
    said: list[str] = []
    end = carry_out(run, Silent(), said.append)
    return end, [text for text in said if not text.startswith(("Measuring ", "Naming "))]


def rows_of(folder: Path) -> dict[int, dict[str, str]]:
    lines = (folder / "measurements.csv").read_text(encoding="utf-8").splitlines()
    header = lines[0].split(",")
    return {int(row["m"]): row for row in csv.DictReader(lines[1:], fieldnames=header)}


def test_a_run_measures_its_plan_and_folds_it(tmp_path: Path) -> None:
    cases = planned(25)
    end, warnings = carry(a_run(tmp_path, cases))
    assert (end, warnings) == ("done", [])
    rows = rows_of(tmp_path)
    assert list(rows) == list(range(1, 26))  # the plan's order
    assert all(row["status"] == "ok" and int(row["samples"]) in DONE for row in rows.values())
    counts = read_run(tmp_path)["counts"]
    assert (counts["planned"], counts["measured"], counts["not_reached"]) == (25, 25, 0)


def test_rerunning_a_finished_plan_measures_nothing(tmp_path: Path) -> None:
    cases = planned(5)
    carry(a_run(tmp_path, cases))
    before = (tmp_path / "samples" / "1-of-1.jsonl").read_bytes()
    said: list[str] = []
    assert carry_out(a_run(tmp_path, cases), Silent(), said.append) == "done"
    assert said == []
    assert (tmp_path / "samples" / "1-of-1.jsonl").read_bytes() == before


def test_a_case_that_takes_the_process_down_costs_one_row(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(6), behaviours={3: "abort", 5: "abort-in-sample"})
    end, warnings = carry(run)
    assert end == "done"
    assert len(warnings) == 4  # each is retried once
    rows = rows_of(tmp_path)
    assert {m: row["status"] for m, row in rows.items()} == {
        1: "ok", 2: "ok", 3: "error", 4: "ok", 5: "error", 6: "ok",
    }  # fmt: skip
    assert "killed by SIGABRT" in rows[3]["message"]
    assert rows[5]["time_us"] == ""


def test_a_canary_that_takes_the_process_down_costs_nothing_but_itself(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(4), canary="abort")
    end, warnings = carry(run)
    assert (end, len(warnings)) == ("done", 1)
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}
    assert read_run(tmp_path)["canary"] is None


def test_a_crash_that_does_not_come_back_costs_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(4), behaviours={2: "abort-once"}, folder=str(tmp_path))
    end, warnings = carry(run)
    assert (end, len(warnings)) == ("done", 1)
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


def test_a_crash_while_several_cases_are_compiled_takes_them_one_by_one(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(4), behaviours={3: "abort-together"})
    assert carry(run)[0] == "done"
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


def test_only_those_that_died_together_are_taken_one_by_one(tmp_path: Path) -> None:
    """Case 3 takes the first chunk with it; the second chunk is prepared together again."""
    run = a_run(tmp_path, planned(2 * CHUNK), behaviours={3: "abort-together"})
    assert carry(run)[0] == "done"
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


def experimental(count: int) -> list[Planned]:
    """The last ones of these are warp-specialised, and all are of the same family."""
    configs = ("specialize=off", "specialize=on")
    return [
        Planned(Case("fake", Gemm(m, 64, 64, "bf16"), "triton-persistent", config), 0.01)
        for m in range(1, count + 1)
        for config in [configs[m > count // 2]]
    ]


@pytest.mark.parametrize("behaviour", ["hang", "abort"])
def test_one_crash_of_an_experimental_feature_is_the_last(tmp_path: Path, behaviour: str) -> None:
    """Otherwise each of hundreds of cases would hang twice, for thirty seconds each time."""
    cases = experimental(40)
    # Every sample is expected to take 30 s of the fake clock and more: patience ends with case 30.
    how: dict[str, Any] = {"seconds": 30.0, "canary": "raise"}
    end, warnings = carry(a_run(tmp_path, cases, 2.0, behaviours={30: behaviour}, **how))
    assert end == "done"
    assert len(warnings) == 1
    rows = rows_of(tmp_path)
    assert rows[30]["status"] == "error"
    assert "the process ended while visiting it" in rows[30]["message"]
    assert all(rows[m]["status"] == "ok" for m in range(1, 21))
    later = {m for m, row in rows.items() if row["status"] == "unsupported"}
    assert later >= {*range(25, 30), *range(31, 41)}  # those of the third chunk, and the rest
    assert "triton-persistent with warp specialisation ended the process" in rows[40]["message"]
    # Resuming does not try them again either.
    assert carry(a_run(tmp_path, cases, 2.0, **how))[1] == []


def test_what_crashed_in_an_earlier_call_is_not_tried_by_cases_planned_later(
    tmp_path: Path,
) -> None:
    cases = experimental(40)
    how: dict[str, Any] = {"seconds": 30.0, "canary": "raise"}
    carry(a_run(tmp_path, cases[:30], 2.0, behaviours={30: "abort"}, **how))
    record = read_run(tmp_path)
    record["plan"]["cases"] = [entry.to_json() for entry in cases]
    write_run(tmp_path, record)
    end, warnings = carry(a_run(tmp_path, cases, 2.0, behaviours={35: "abort"}, **how))
    assert (end, warnings) == ("done", [])
    rows = rows_of(tmp_path)
    assert {rows[m]["status"] for m in range(31, 41)} == {"unsupported"}


def names_of(folder: Path) -> dict[int, str]:
    return {m: row["kernel"] for m, row in rows_of(folder).items()}


def test_kernels_are_named_after_timing_by_a_process_that_times_nothing(tmp_path: Path) -> None:
    carry(a_run(tmp_path, planned(5)))
    events, _ = read_events(tmp_path)
    named = [i for i, e in enumerate(events) if "kernel" in e.get("facts", {})]
    assert min(named) > max(i for i, e in enumerate(events) if e["event"] == "sample")
    (name,) = set(names_of(tmp_path).values())
    assert name.startswith("fake_kernel_")
    assert name != f"fake_kernel_{os.getpid()}"


def test_a_name_that_was_lost_is_asked_of_another_process(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(5), behaviours={2: "lose-name"}, folder=str(tmp_path))
    assert carry(run) == ("done", [])
    names = names_of(tmp_path)
    assert names[2].startswith("fake_kernel_")
    assert names[2] != names[1]  # the process says who it is


def test_a_name_that_nobody_has_is_empty_and_not_asked_for_again(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(3), behaviours={2: "lose-name-always"})
    assert carry(run) == ("done", ["The kernels of 1 cases cannot be named."])
    assert names_of(tmp_path)[2] == ""
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}
    before = (tmp_path / "samples" / "1-of-1.jsonl").read_bytes()
    carry(run)
    assert (tmp_path / "samples" / "1-of-1.jsonl").read_bytes() == before


def test_crashes_while_naming_cost_only_the_names_of_those_that_crashed(tmp_path: Path) -> None:
    crashing = dict.fromkeys((2, 4, 6, 8, 10), "abort-in-naming")
    end, warnings = carry(a_run(tmp_path, planned(12), behaviours=crashing))
    assert (end, len(warnings)) == ("done", 5)
    assert [m for m, name in names_of(tmp_path).items() if not name] == [2, 4, 6, 8, 10]


def test_a_profiler_that_fails_is_said_and_not_asked_for_ever(tmp_path: Path) -> None:
    end, warnings = carry(a_run(tmp_path, planned(4), behaviours={2: "profiler-fails"}))
    assert end == "done"
    assert warnings[0].endswith("stopped: RuntimeError: CUPTI is not permitted")
    assert warnings[-1] == "The kernels of 3 cases cannot be named."  # one was named before
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}


def test_a_crash_while_naming_costs_a_name_and_no_time(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(4), behaviours={2: "abort-in-naming"})
    end, warnings = carry(run)
    assert (end, len(warnings)) == ("done", 1)
    assert "names kernels ended: killed by SIGABRT" in warnings[0]
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"ok"}
    names = names_of(tmp_path)
    assert names.pop(2) == ""
    assert all(names.values())


def test_a_case_that_hangs_is_killed(tmp_path: Path) -> None:
    # Every sample is expected to take 30 s of the fake clock and more: patience ends with case 2.
    run = a_run(tmp_path, planned(4), 2.0, behaviours={2: "hang"}, seconds=30.0, canary="raise")
    end, _ = carry(run)
    assert end == "done"
    rows = rows_of(tmp_path)
    assert rows[2]["status"] == "error"
    assert "hung for 2 s" in rows[2]["message"]
    events, _ = read_events(tmp_path)
    crashes = [event["cost"] for event in events if event["event"] == "crash"]
    assert len(crashes) == 2
    assert sum(crashes) >= 2 * 2.0  # two visits, on the budget
    assert read_run(tmp_path)["spent_s"] == pytest.approx(sum(e["cost"] for e in events), abs=1e-3)
    assert {rows[m]["status"] for m in (1, 3, 4)} == {"ok"}


def test_a_broken_context_costs_one_row(tmp_path: Path) -> None:
    end, _ = carry(a_run(tmp_path, planned(4), behaviours={2: "poison"}))
    assert end == "done"
    rows = rows_of(tmp_path)
    assert "illegal memory access" in rows[2]["message"]
    assert {rows[m]["status"] for m in (1, 3, 4)} == {"ok"}


def test_a_real_time_signal_has_no_name_and_costs_one_row(tmp_path: Path) -> None:
    end, warnings = carry(a_run(tmp_path, planned(3), behaviours={2: "real-time-signal"}))
    assert (end, len(warnings)) == ("done", 2)
    rows = rows_of(tmp_path)
    assert f"killed by signal {signal.SIGRTMIN + 1}" in rows[2]["message"]
    assert {rows[m]["status"] for m in (1, 3)} == {"ok"}


def test_half_a_character_in_an_error_costs_one_row(tmp_path: Path) -> None:
    end, _ = carry(a_run(tmp_path, planned(3), behaviours={2: "half-a-character"}))
    assert end == "done"
    rows = rows_of(tmp_path)
    assert rows[2]["message"] == "RuntimeError: no file ?.cubin"
    assert {rows[m]["status"] for m in (1, 3)} == {"ok"}


def test_failures_are_rows_with_a_sentence(tmp_path: Path) -> None:
    behaviours = {1: "wrong", 2: "oom", 3: "unsupported", 4: "raise"}
    carry(a_run(tmp_path, planned(5), behaviours=behaviours))
    rows = rows_of(tmp_path)
    statuses = [rows[m]["status"] for m in range(1, 6)]
    assert statuses == ["wrong", "oom", "unsupported", "error", "ok"]
    assert all(rows[m]["message"] and not rows[m]["time_us"] for m in range(1, 5))
    assert rows[4]["message"] == "RuntimeError: no such kernel"
    counts = read_run(tmp_path)["counts"]
    assert (counts["wrong"], counts["oom"], counts["unsupported"], counts["error"]) == (1, 1, 1, 1)


def test_a_bench_that_cannot_be_set_up_is_one_sentence(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(2), no_such_argument=1)
    with pytest.raises(UserError, match="Nothing could be measured: TypeError") as caught:
        carry(run)
    assert caught.value.exit_code == 1


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(2))
    with SampleLog(tmp_path, (1, 1)):
        with pytest.raises(UserError, match="another run is writing") as caught:
            carry(run)
        assert caught.value.exit_code == 1
        assert not (tmp_path / "measurements.csv").exists()


def test_shards_fold_into_one_table(tmp_path: Path) -> None:
    cases = planned(9)
    whole = a_run(tmp_path, cases)
    for index in (1, 2):
        part = Run(
            tmp_path, cases[index - 1 :: 2], 1e6, whole.bench, shard=(index, 2),
            least_patience=whole.least_patience,
        )  # fmt: skip
        carry(part)
    rows = rows_of(tmp_path)
    assert list(rows) == list(range(1, 10))
    assert {m: row["worker"] for m, row in rows.items()} == {
        m: ("1/2" if m % 2 else "2/2") for m in range(1, 10)
    }


def test_a_full_disk_ends_the_run_with_a_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    """The whole run in a process whose files may not grow past 20 kB."""
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
from test_runner import a_run, planned
from fakes import Silent
from kernels.errors import UserError
from kernels.problem import Gemm
from sweeps.case import Case
from sweeps.rounds import CHUNK
from sweeps.runner import carry_out
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
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
}


def start(folder: Path, count: int, pause: float, stalls: int = 0) -> subprocess.Popen[str]:
    """``stalls``: launches after which it waits to be killed, so that it is never done before."""
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder), str(count), str(pause), str(stalls)], cwd=ROOT,
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=_as_in_a_terminal,
    )  # fmt: skip


def _as_in_a_terminal() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so do its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def count_events(folder: Path) -> int:
    path = folder / "samples" / "1-of-1.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_twenty_kills_at_random_moments_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    """``kill -9`` of the parent while a child measures; every resume follows the plan."""
    rng = random.Random(1)
    cases = planned(120)
    written = 0
    for _ in range(20):
        process = start(tmp_path, len(cases), 0.002, stalls=30)
        # A random moment of the measuring itself, not of Python's start.
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
    assert all(count in DONE for count in samples.values())
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


def test_names_that_there_was_no_time_for_are_open_until_the_next_call(tmp_path: Path) -> None:
    run = a_run(tmp_path, planned(5))
    carry(run)
    path = tmp_path / "samples" / "1-of-1.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"kernel"' not in line]
    path.write_text("\n".join(lines) + "\n")
    fold(tmp_path)
    assert read_run(tmp_path)["sweeps"]["fake"] == {"planned": 5, "measured": 5, "open": 5}
    assert carry(run) == ("done", [])
    assert read_run(tmp_path)["sweeps"]["fake"]["open"] == 0
    assert all(names_of(tmp_path).values())


def test_a_results_folder_that_is_removed_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    """Otherwise it would measure on into a file that nobody can find."""
    folder = tmp_path / "results"
    process = start(folder, 200, 0.005)
    while count_events(folder) < 30 and process.poll() is None:
        time.sleep(0.01)
    folder.rename(tmp_path / "elsewhere")
    output, errors = process.communicate()
    assert process.returncode == 1, errors
    assert "1-of-1.jsonl was removed while it was written" in output
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


def test_folding_twice_gives_the_same_table(tmp_path: Path) -> None:
    carry(a_run(tmp_path, planned(3)))
    table = (tmp_path / "measurements.csv").read_bytes()
    fold(tmp_path)
    assert (tmp_path / "measurements.csv").read_bytes() == table


def test_a_child_that_is_stopped_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its patience does not run while it is stopped: it is there when it goes on."""
    asked: list[int] = []

    def stopped(pid: int) -> bool:
        asked.append(pid)
        return len(asked) < 100  # five seconds of them, ten times its patience

    monkeypatch.setattr(runner_module, "is_stopped", stopped)
    monkeypatch.setattr(runner_module, "_LISTENING_STEP", 0.05)
    carry(a_run(tmp_path, planned(1), 0.5, behaviours={1: "hang"}, canary="raise"))
    assert len(asked) >= 100
    assert rows_of(tmp_path)[1]["status"] == "error"
