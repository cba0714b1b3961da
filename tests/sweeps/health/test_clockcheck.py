"""The clock's check, run whole on the simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.recorder.recorder import run_command
from tests.support.gpu_recording import FAKE


def test_both_timers_agree_on_a_simulated_gpu(tmp_path: Path) -> None:
    """They see the same simulated kernels, so that any difference is a fault of the comparison."""
    line = ["sweeps", "clock", "--device", "gpu", "--cases", "3", "--results", str(tmp_path)]
    code, said = run_command(FAKE, line, 3600)
    assert code == 0, said
    report = json.loads((tmp_path / "nvidia-h200" / "clock.json").read_text(encoding="utf-8"))
    assert set(report["timers"]) == {"sampler", "do_bench"}
    assert len(report["passes"]) == 2
    assert report["timers"]["do_bench"]["over_sampler"] == pytest.approx(1.0, abs=0.02)
    assert report["profiler"]
    assert report["graph_replays"]
