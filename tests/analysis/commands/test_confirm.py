"""Tests of ``recommend --measure``, which measure on this machine's CPU."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from analysis.advice.options import Question
from analysis.advice.trials import Trial
from analysis.commands.confirm import measure, measure_questions
from analysis.recordings.confirmed import confirmed_pairs
from analysis.recordings.load import load
from analysis.recordings.runs import load_runs
from kernels.common.errors import UserError
from kernels.common.program import ROOT
from kernels.device import this_cpu
from kernels.problem import Gemm
from sweeps.cases.case import CONFIRM
from sweeps.running.request import Request
from sweeps.store import read_events, read_run
from tests.support.command_line import analysis
from tests.support.terminal import as_in_a_terminal

HERE = this_cpu().machine.slug
ASKED = ("recommend", "--gemm", "320,511,320,fp32", "--device", "cpu")


def answers(*arguments: object) -> Any:
    result = analysis(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def measured_or_unusable(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command that measures. It may fail if other work disturbs this machine too much."""
    result = analysis(*arguments)
    excuses = ("The new measurements are unusable.", "No case was timed within")
    assert result.returncode == 0 or any(text in result.stderr for text in excuses), result.stderr
    return result


@pytest.mark.slow
def test_a_question_is_measured_once_and_then_known(tmp_path: Path) -> None:
    where = ("--results", tmp_path)
    first = measured_or_unusable(*ASKED, "--measure", *where, "--json")
    folder = tmp_path / HERE
    rows = load(folder).rows
    assert set(rows["sweep"]) <= {CONFIRM}
    assert (rows[rows["status"] == "ok"]["samples"] > 0).all()
    if first.returncode:
        return
    assert (511, 320) in {(row["n"], row["k"]) for row in rows.to_dict("records")}
    answer = json.loads(first.stdout)
    assert answer["verdict"] in ("do it", "likely", "leave it")
    assert answer["source"].startswith("measured ") or answer["evidence"] == "predicted"
    pairs = confirmed_pairs(load(folder))
    if answer["verdict"] == "do it":
        assert answer["evidence"] == "confirmed"
        assert pairs
    # The same query without --measure gets the same answer. If pairs were re-timed, repeating
    # --measure measures nothing.
    before = len(read_events(folder)[0])
    repeated = answers("recommend", "--gemm", "320,511,320,fp32", "--machine", HERE, *where)
    assert [repeated[k] for k in ("verdict", "instead")] == [
        answer[k] for k in ("verdict", "instead")
    ]
    if pairs:
        analysis(*ASKED, "--measure", *where)
        assert len(read_events(folder)[0]) == before


@pytest.mark.long
def test_a_sweep_leaves_time_for_its_best_candidates(tmp_path: Path) -> None:
    sweep = [sys.executable, "-m", "sweeps", "run", "alignment", "--device", "cpu", "--budget",
             "20s", "--leave", "0.4", "--results", str(tmp_path)]  # fmt: skip
    subprocess.run(sweep, cwd=ROOT, check=True, capture_output=True)
    folder = tmp_path / HERE
    plan = read_run(folder)["plan"]
    assert (plan["budget_s"], plan["left_s"]) == pytest.approx((12.0, 8.0))
    result = measured_or_unusable(
        "recommend", "--measure", "--device", "cpu", "--results", tmp_path
    )
    rows = load_runs(folder).rows
    if "No candidate is measured" in result.stderr:
        assert CONFIRM not in set(rows["sweep"])
        return
    assert CONFIRM in set(rows["sweep"])
    assert read_run(folder)["plan"]["budget_s"] == 12.0  # the sweep's budget has not changed
    # The same sweep resumes with its old plan after the measurements for advice.
    before = [row["id"] for row in read_run(folder)["plan"]["cases"]]
    subprocess.run(sweep, cwd=ROOT, check=True, capture_output=True)
    assert [row["id"] for row in read_run(folder)["plan"]["cases"]] == before


def has_sample(text: str) -> bool:
    """Return True if the text of a sample log has a sample of a case other than the canary."""
    return any('"sample"' in line and '"canary"' not in line for line in text.splitlines())


def interrupted(results: Path) -> tuple[int, str] | None:
    """Send Ctrl-C to a measurement after its first sample; return its exit code and its stderr.

    Return None if the measurement ended before this process saw a sample. This may happen if there
    are fewer cores than processes.
    """
    command = [sys.executable, "-m", "analysis", *ASKED, "--measure", "--results", str(results)]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal
    )
    samples = results / HERE / "samples" / "1-of-1.jsonl"
    while not (samples.exists() and has_sample(samples.read_text(encoding="utf-8"))):
        if process.poll() is not None:
            process.communicate()
            return None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    return process.returncode, stderr


@pytest.mark.long
def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    for attempt in ("first", "second", "third"):
        ended = interrupted(tmp_path / attempt)
        if ended is not None:
            break
    assert ended is not None
    code, stderr = ended
    assert code == 130
    assert "Measurements are saved" in stderr
    assert len(load(tmp_path / attempt / HERE).rows) > 0


def test_no_answer_is_given_if_no_case_was_timed(tmp_path: Path) -> None:
    over = Request(results=tmp_path, device="cpu", stop_at=time.monotonic())
    with pytest.raises(UserError, match=r"No case was timed within \d+ s\. Try again") as raised:
        measure_questions([Gemm(320, 511, 320, "fp32")], Question(), None, over)
    assert raised.value.exit_code == 1


def test_untimed_candidates_are_not_called_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = Request(results=tmp_path, device="cpu", budget=10.0, stop_at=time.monotonic())
    original, candidate = Gemm(320, 511, 320, "fp32"), Gemm(320, 512, 320, "fp32")
    measure([Trial(original, "mkl", Question(), (candidate,))], over)
    assert (
        "No candidate was timed within the budget, so none was re-timed." in capsys.readouterr().err
    )


def test_a_published_recording_is_not_resumed(tmp_path: Path) -> None:
    published = ROOT / "results" / "published" / "cpu-intel-xeon-avx512bf16-1t"
    folder = tmp_path / "published" / HERE
    shutil.copytree(published, folder)
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    run["machine"]["slug"] = HERE
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    result = analysis("recommend", "--measure", "--device", "cpu", "--results", tmp_path)
    assert result.returncode == 2
    message = f"{tmp_path} has only an imported or published recording of {HERE}; run "
    assert message in result.stderr


def test_without_a_recording_there_is_nothing_to_confirm(tmp_path: Path) -> None:
    result = analysis("recommend", "--measure", "--device", "cpu", "--results", tmp_path)
    assert result.returncode == 2
    assert "nothing is recorded yet; run `make sweep` first" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--measure", "--machine", "nvidia-h200"), "runs on this machine"),
        (("--change", "kout", "--machine", "nvidia-h200"), "has no size KOUT"),
        (("--fix", "m,n,k", "--machine", "nvidia-h200"), "no size left to change"),
        (("--multiple", "0", "--machine", "nvidia-h200"), "--multiple"),
    ],
)
def test_wishes_that_make_no_sense_get_a_sentence(arguments: tuple[str, ...], words: str) -> None:
    result = analysis(*ASKED, *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [("--pad", "12.5%"), ("--json",), ("--machine", "h100"), ("--multiple", "64"), ("--any",)],
)
def test_without_a_shape_measuring_takes_no_question(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    result = analysis("recommend", "--measure", *words, "--device", "cpu", "--results", tmp_path)
    assert result.returncode == 2
    assert "or add --gemm, --conv or --file" in result.stderr
