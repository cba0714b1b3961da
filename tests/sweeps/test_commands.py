"""Tests of `python -m sweeps` as a user starts it, on the real CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.store import read_run
from tests.support.command_line import ANALYSIS, SWEEPS, command

ROOT = Path(__file__).resolve().parents[2]


def sweeps(*arguments: str) -> subprocess.CompletedProcess[str]:
    return command(SWEEPS, *arguments)


# Starts `python -m sweeps` with the sweeps of a folder, also in the processes that it starts. No
# visit counts as hung, because on a busy machine even a first small GEMM may be slow.
MINE = """
import functools, runpy, sys
from pathlib import Path
from sweeps.cases import spec
from sweeps.running import opening
spec.FOLDER = Path(sys.argv.pop(1))
opening.Run = functools.partial(opening.Run, min_patience=1e6)
runpy.run_module("sweeps", run_name="__main__", alter_sys=True)
"""


# Like MINE, but the user interrupts before the first case.
INTERRUPTED = MINE.replace(
    "runpy.run_module",
    "from sweeps.running import supervisor\n"
    "def carry_out(*arguments): raise KeyboardInterrupt\n"
    "supervisor.carry_out = carry_out\n"
    "runpy.run_module",
)


# Like MINE, but the user interrupts while the run is being planned.
INTERRUPTED_EARLY = MINE.replace(
    "runpy.run_module",
    "def begin(*arguments): raise KeyboardInterrupt\nopening.begin = begin\nrunpy.run_module",
)


def run_mine(
    folder: Path, sweep: str, *more: str, script: str = MINE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a sweep that a test defines, with more time than any machine needs for it.

    The run ends when its cases are done, so that nothing depends on how fast they are. The results
    are written to the folder of the sweep's file.
    """
    (folder / "mine.toml").write_text(sweep)
    command = ("run", "mine", "--budget", "1000h", "--device", "cpu", "--results", str(folder))
    return subprocess.run(
        [sys.executable, "-c", script, str(folder), *command, *more], cwd=ROOT, capture_output=True,
        text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_a_run_tells_a_script_what_became_of_it(tmp_path: Path) -> None:
    sweep = 'question = "Why?"\nop = "gemm"\n[[block]]\nm = 8\nn = 8\nk = 8\ndtype = "fp32"\n'
    answer = run_mine(tmp_path, sweep, "--json")
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    record = read_run(Path(document["folder"]))
    assert document["machine"] == record["machine"]["slug"]
    assert document["run"] == record["run"]
    assert document["counts"]["measured"] == document["counts"]["planned"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "the same command"),
        (("--fresh",), "the same command without --fresh"),
        (("--fresh", "--gpus", "0"), "the same command without --fresh"),
    ],
)
def test_an_interrupted_run_says_how_to_resume_it(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    """With --fresh, the same command would set the interrupted run aside."""
    sweep = 'question = "Why?"\nop = "gemm"\n[[block]]\nm = 8\nn = 8\nk = 8\ndtype = "fp32"\n'
    answer = run_mine(tmp_path, sweep, *options, script=INTERRUPTED)
    assert answer.returncode == 130
    assert f"Measurements are saved. Run {words}" in answer.stderr
    assert ("without" in answer.stderr) == bool(options)


@pytest.mark.parametrize("options", [(), ("--gpus", "0")])
def test_a_run_that_is_interrupted_before_it_begins_claims_no_measurements(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The old run is not set aside yet, so --fresh is still needed."""
    sweep = 'question = "Why?"\nop = "gemm"\n[[block]]\nm = 8\nn = 8\nk = 8\ndtype = "fp32"\n'
    answer = run_mine(tmp_path, sweep, "--fresh", *options, script=INTERRUPTED_EARLY)
    assert answer.returncode == 130
    assert "Stopped before this command timed a case. Run the same command again." in answer.stderr
    assert "saved" not in answer.stderr


@pytest.mark.slow
def test_list_and_show_and_doctor() -> None:
    listed = sweeps("show", "--json")
    assert {row["name"] for row in json.loads(listed.stdout)} >= {"square", "alignment", "resnet50"}
    shown = json.loads(sweeps("show", "cache", "--device", "cpu", "--json").stdout)
    assert shown["cases"][0]["expected_us"] > 0
    assert shown["cases"][0]["bytes"] > 0
    assert shown["expected_s"] > 0
    findings = json.loads(sweeps("doctor", "--device", "cpu", "--json").stdout)
    assert any("free" in finding["text"] for finding in findings)
    strict = sweeps("doctor", "--device", "cpu", "--strict", "--json")
    assert strict.returncode == any(finding["warning"] for finding in json.loads(strict.stdout))


@pytest.mark.slow
def test_a_real_short_run_measures_resumes_and_reports(tmp_path: Path) -> None:
    sweep = (
        'question = "Why?"\nop = "gemm"\n[[block]]\nm = [8, 16, 24, 32, 48, 64]\nn = 64\nk = 64\n'
        'dtype = "fp32"\ncache = ["cold", "warm"]\n'
    )
    answer = run_mine(tmp_path, sweep)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == ""
    assert "12 of 12 cases were measured" in answer.stderr
    (folder,) = tmp_path.glob("cpu-*")
    counts = read_run(folder)["counts"]
    assert counts["measured"] == counts["planned"] == 12
    assert counts["not_reached"] == 0
    assert len((folder / "measurements.csv").read_text().splitlines()) == 1 + 12

    # Cut the samples as if the run had been stopped halfway. The same command resumes it.
    log = folder / "samples" / "1-of-1.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    half = b"".join(lines[: len(lines) // 2])
    log.write_bytes(half)
    answer = run_mine(tmp_path, sweep)
    assert answer.returncode == 0, answer.stderr
    assert "12 of 12 cases were measured" in answer.stderr
    assert log.read_bytes().startswith(half)
    assert len(log.read_bytes()) > len(half)
    assert not (folder / "runs").exists()


@pytest.mark.long
def test_recordings_of_two_days_become_one(tmp_path: Path) -> None:
    folders = []
    for day, sizes in (("monday", "[8, 16, 24]"), ("tuesday", "[24, 32]")):
        (tmp_path / day).mkdir()
        block = f'[[block]]\nm = {sizes}\nn = 64\nk = 64\ndtype = "fp32"\n'
        answer = run_mine(tmp_path / day, f'question = "Why?"\nop = "gemm"\n{block}')
        assert answer.returncode == 0, answer.stderr
        folders += [str(folder) for folder in (tmp_path / day).glob("cpu-*")]
    answer = sweeps("merge", *folders, "--into", str(tmp_path / "both"), "--json")
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert document["folder"] == str(tmp_path / "both")
    assert document["counts"]["planned"] == document["counts"]["measured"] == 4
    assert document["repeated"] == 1
    assert "Cases timed in several recordings: 1." in answer.stderr
    assert f"analysis compare {folders[0]} {folders[1]}`" in answer.stderr
    compared = command(ANALYSIS, "compare", *folders)
    assert compared.returncode in (0, 1), compared.stderr
    again = sweeps("merge", *folders, "--into", str(tmp_path / "both"))
    assert again.returncode == 2
    assert len(again.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "nothing"), "sweep 'nothing' is not known"),
        (("run", "--budget", "soon"), "--budget is 'soon'; give a time"),
        (("run", "--shard", "3/2"), "--shard takes I/N"),
        (("run", "--shard", "1/" + "9" * 5000), "--shard takes I/N"),
        (("show", "--machine", "h100"), "--machine needs a sweep or --plan"),
        (("show", "--plan", "--cores", "0"), "greater than or equal to 1"),
        (("doctor", "--again", "--cases", "0"), "greater than or equal to 1"),
        (("doctor", "--cases", "3"), "--cases works only with --again or --clock"),
        (("doctor", "--strict", "--again"), "--strict works only without"),
        (("show", "sqare"), "did you mean 'square'"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], words: str) -> None:
    answer = sweeps(*arguments)
    assert answer.returncode == 2
    assert words in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_run_without_any_time_fails(tmp_path: Path) -> None:
    """Triton does not run on a CPU, so every case of this sweep is unsupported."""
    sweep = (
        'question = "Why?"\nop = "gemm"\n[[block]]\nm = 8\nn = 8\nk = 8\n'
        'implementation = "triton-tiled"\n'
    )
    answer = run_mine(tmp_path, sweep, TRITON_INTERPRET="0")
    assert answer.returncode == 1
    assert "No case could be timed" in answer.stderr
    assert list(tmp_path.glob("cpu-*/measurements.csv"))


def test_a_file_in_place_of_the_results_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    answer = sweeps("run", "cache", "--device", "cpu", "--results", str(tmp_path / "results"))
    assert answer.returncode == 2
    assert "exists and is not a folder" in answer.stderr
