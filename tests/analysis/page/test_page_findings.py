"""Sentences of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.advice.headlines import UNUSABLE_LINE
from analysis.advice.verdict import CONFIRMED, LEAVE_IT, LIKELY
from analysis.model.fitted import analyse
from analysis.page import points
from analysis.page.page_findings import (
    accuracy,
    key_figures,
    neighbourhood,
    side_by_side,
    verdict,
)
from analysis.page.page_report import PageReport
from analysis.recordings.load import load
from analysis.rules.tensor_cores import TimedStep
from kernels.problem import Gemm
from sweeps.cases.case import Case
from tests.support.synthetic import gemm_cases, random_sizes, record


@pytest.mark.parametrize(
    ("health", "words"), [({"verdict": "noisy"}, "noisy run"), ({}, "run not judged")]
)
def test_the_verdict_on_a_run_is_a_phrase(health: dict[str, str], words: str) -> None:
    report: Any = SimpleNamespace(
        analysis=SimpleNamespace(recording=SimpleNamespace(public=None, health=health))
    )
    assert verdict(report) == words


def report_of(folder: Path, slow: float) -> PageReport:
    """Return a report whose only cliff is from M = 64 to 65, in batches of 8."""
    cases = gemm_cases(dict.fromkeys(random_sizes(60)))
    batched = [Case("batch", Gemm(m, 512, 512, "bf16", "tn", 8), "cublas") for m in (64, 65)]
    times = [1e-4] * len(cases)
    return PageReport(analyse(load(record(folder, [*cases, *batched], [*times, 1e-4, slow]))), [])


def test_a_cliff_names_the_batch_and_the_layout(tmp_path: Path) -> None:
    assert neighbourhood(report_of(tmp_path / "nvidia-h100-sxm", 2e-4)) == (
        "The largest measured cliff is from M = 64 to 65: the larger GEMM takes 2.00× as long as "
        "8× 64×512×512 bf16 tn."
    )


def test_all_cases_are_compared_even_if_the_charts_show_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(points, "MOST_POINTS", 10)
    reports = [report_of(tmp_path / name / "nvidia-h100-sxm", 1e-4) for name in ("a", "b")]
    assert "over 62 common cases" in side_by_side(reports)


def test_two_recordings_of_one_machine_are_told_apart(tmp_path: Path) -> None:
    reports = [report_of(tmp_path / name / "nvidia-h100-sxm", 1e-4) for name in ("a", "b")]
    assert side_by_side(reports) == (
        "The second recording is 1.00× as fast as the first recording (geometric mean over 62 "
        "common cases)."
    )


def test_an_unusable_run_is_neither_judged_nor_compared(tmp_path: Path) -> None:
    usable, other = (report_of(tmp_path / name / "nvidia-h100-sxm", 1e-4) for name in ("a", "b"))
    recording = other.analysis.recording
    run = {**recording.run, "health": {"verdict": "unusable", "reasons": []}}
    analysis = replace(other.analysis, recording=replace(recording, run=run))
    unusable = replace(other, analysis=analysis)
    assert accuracy(unusable) == UNUSABLE_LINE
    for reports in ([usable, unusable], [unusable, usable]):
        assert side_by_side(reports) == (
            "The recordings cannot be compared, because at least one of the runs is unusable."
        )


def test_a_retimed_change_may_be_likely(tmp_path: Path) -> None:
    report = report_of(tmp_path / "nvidia-h100-sxm", 1e-4)
    answers: Any = [
        SimpleNamespace(verdict=LIKELY, evidence=CONFIRMED),
        SimpleNamespace(verdict=LEAVE_IT, evidence=CONFIRMED),
    ]
    assert key_figures(replace(report, advice=answers))[-1] == (
        "changes that gain", "1 likely", "none confirmed",
    )  # fmt: skip


def test_only_profiled_recordings_have_a_sentence_about_tensor_cores(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="needs the extra `page`")
    from analysis.page.document import page_html

    plain, other = (report_of(tmp_path / name / "nvidia-h100-sxm", 1e-4) for name in ("a", "b"))
    account: Any = SimpleNamespace(operations=[], matrix_share=0.5, bound=2.0)
    profiled = replace(other, steps=[TimedStep("resnet", "bf16", "gpu", account)])
    sentence = "The profiled steps do not show whether Tensor Cores were used where possible."
    assert page_html([plain, profiled]).count(sentence) == 1
    assert sentence not in page_html([plain])
