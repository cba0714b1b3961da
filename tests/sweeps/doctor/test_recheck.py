"""Re-time some cases of a recording on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.device import this_cpu
from sweeps.doctor.recheck import time_again
from tests.support.published import RECORDED


def test_recorded_cases_are_timed_again_and_compared() -> None:
    report = time_again(this_cpu(), RECORDED, 3)
    assert 1 <= report["cases"] <= 3
    assert report["ratio"] > 0
    assert report["lo"] is None  # an interval needs six cases
    assert f"re-timed cases take {report['ratio']:.3f}×" in report["sentence"]
    assert f"(median of {counted(report['cases'], 'case')})" in report["sentence"]


def test_without_a_recording_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="so no case can be re-timed"):
        time_again(this_cpu(), tmp_path, 3)
