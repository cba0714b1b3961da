"""Re-time some cases of a recording on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernels.common.counts import counted
from kernels.common.errors import UserError, WrongResultError
from kernels.device import this_cpu
from sweeps.doctor import recheck
from sweeps.doctor.recheck import time_again
from sweeps.measuring.torch_bench import open_bench
from sweeps.timing.sampler import Sample, Subject
from tests.support.published import RECORDED


def test_recorded_cases_are_timed_again_and_compared() -> None:
    report = time_again(this_cpu(), RECORDED, 3)
    assert 1 <= report["cases"] <= 3
    assert report["ratio"] > 0
    assert report["lo"] is None  # an interval needs six cases
    assert f"re-timed cases take {report['ratio']:.3f}×" in report["sentence"]
    assert f"(median of {counted(report['cases'], 'case')})" in report["sentence"]


def test_a_case_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def open_failing(*arguments: Any) -> Any:
        bench, ready = open_bench(*arguments)
        counts.append(len(ready))
        sample = bench.sampler.sample

        def fail_first(subject: Subject) -> Sample:
            if subject is ready[0].subject:
                raise WrongResultError("a check of a timed batch failed: it was wrong.")
            return sample(subject)

        monkeypatch.setattr(bench.sampler, "sample", fail_first)
        return bench, ready

    monkeypatch.setattr(recheck, "open_bench", open_failing)
    assert time_again(this_cpu(), RECORDED, 3)["cases"] == counts[0] - 1


def test_without_a_recording_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="so no case can be re-timed"):
        time_again(this_cpu(), tmp_path, 3)


def test_a_damaged_recording_gets_a_sentence(tmp_path: Path) -> None:
    lines = (RECORDED / "measurements.csv").read_text().splitlines()
    (tmp_path / "measurements.csv").write_text("\n".join([lines[0].replace("status", "x"), *lines]))
    with pytest.raises(UserError, match=r"is damaged .*; restore it, or move its folder away"):
        time_again(this_cpu(), tmp_path, 3)
