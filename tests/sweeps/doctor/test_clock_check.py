"""The comparison of timers, by parts on the real CPU and completely on a simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.recorder.recorder import run_command
from kernels.machine import cpu_machine
from sweeps.doctor.clock_check import _around_a_profiler, _one_pass, in_rounds, summarise
from sweeps.timing.sampler import Sampler, Subject
from tests.support.fakes import FakeClock
from tests.support.gpu_recording import FAKE


def test_passes_are_compared_over_the_cases_that_all_of_them_have() -> None:
    sampler = {"seconds": 2.0, "medians_us": {"a": 10.0, "b": 20.0, "lost": 1.0}}
    slower = {"seconds": 6.0, "medians_us": {"a": 11.0, "b": 22.0}}
    again = {"seconds": 2.0, "medians_us": {"a": 10.2, "b": 20.4}}
    timers = summarise([
        {"timers": {"sampler": sampler, "do_bench": slower}},
        {"timers": {"sampler": again, "do_bench": slower}},
    ])  # fmt: skip
    assert timers["sampler"]["passes_differ"] == pytest.approx(0.02)
    assert timers["sampler"]["over_sampler"] == 1.0
    assert timers["do_bench"]["passes_differ"] == 0.0
    assert timers["do_bench"]["over_sampler"] == pytest.approx(1.1)
    assert timers["do_bench"]["seconds_per_case"] == pytest.approx(6.0 / 2)


def test_a_cpu_s_timers_and_a_profiler_between_two_measurements() -> None:
    """The passes run in this process here. The command runs each one in a new process."""
    cpu = cpu_machine({"fp32": 1e11}, 2e10, 1)
    timers = _one_pass(cpu, None, 2)["timers"]
    assert set(timers) == {"sampler", "blocked_autorange"}
    for timer in timers.values():
        assert len(timer["medians_us"]) == 2
        assert timer["seconds"] > 0
    (row,) = _around_a_profiler(cpu, None, 1)
    assert row["before_us"] > 0
    assert row["after_us"] > 0


def test_the_comparison_renews_the_results_of_a_subject() -> None:
    """Results of rotating launches would otherwise be kept without a limit."""
    renewed: list[int] = []
    subject = Subject("a", lambda index: 1e-4, renew=renewed.append, samples=[1.0])
    medians, _ = in_rounds(Sampler(FakeClock()), [subject])
    assert medians == {"a": pytest.approx(1e-4)}
    assert subject.samples == [1.0]
    assert renewed


@pytest.mark.long
def test_both_timers_agree_on_a_simulated_gpu(tmp_path: Path) -> None:
    """Both time the same simulated kernels, so any difference is a fault of the comparison."""
    line = [
        "sweeps",
        "doctor",
        "--clock",
        "--device",
        "gpu",
        "--cases",
        "3",
        "--results",
        str(tmp_path),
    ]
    code, said = run_command(FAKE, line, 3600)
    assert code == 0, said
    report = json.loads((tmp_path / "nvidia-h200" / "clock.json").read_text(encoding="utf-8"))
    assert set(report["timers"]) == {"sampler", "do_bench"}
    assert len(report["passes"]) == 2
    assert report["timers"]["do_bench"]["over_sampler"] == pytest.approx(1.0, abs=0.02)
    assert report["profiler"]
    assert report["graph_replays"]
