"""Check that a sample of a very long recording is analysed, and that the reports say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.advice import table
from analysis.advice.headlines import health_of
from analysis.advice.measurements import Measurements
from analysis.advice.table import build_table, recommendations_markdown
from analysis.model import fitted
from analysis.model.fitted import analyse, write_predictions
from analysis.recordings.confirmed import Pair
from analysis.recordings.repetition import MeasuredTime
from analysis.rules.judge import Evidence
from kernels.problem import Gemm
from tests.support.synthetic import recorded


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted, "MOST_ROWS", 100)
    monkeypatch.setattr(fitted, "_SAMPLE", 60)
    monkeypatch.setattr(table, "_MOST", 50)
    monkeypatch.setattr(table, "_DRAWN", 20)


@pytest.mark.usefixtures("few_are_many")
def test_a_sample_is_analysed_and_named(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, 150))
    assert (len(analysis.table), analysis.measured) == (60, 150)
    sentence = "60 of 150 measured cases, drawn at random, are analysed, plotted and fitted."
    assert health_of(analysis)[-1] == sentence
    write_predictions(analysis)
    calibration = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert calibration["sample"] == sentence
    assert len((tmp_path / "predicted.csv").read_text(encoding="utf-8").splitlines()) == 61
    advice = build_table(analysis)
    assert len({answer.problem for answer in advice}) == 20
    page = recommendations_markdown(analysis, advice)
    assert "for 20 of 150 measured shapes (the re-timed ones, and others drawn at random)" in page


@pytest.mark.usefixtures("few_are_many")
def test_rules_predict_every_row_by_a_fit_to_the_sample(tmp_path: Path) -> None:
    recording = recorded(tmp_path, 150)
    evidence = Evidence.from_recording(recording)
    assert len(evidence.cases) == 150
    assert (evidence.predicted > 0).all()


def test_few_rows_are_all_looked_at(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, 60))
    assert analysis.sampled == ""
    page = recommendations_markdown(analysis, build_table(analysis))
    assert "drawn at random" not in page


@pytest.mark.usefixtures("few_are_many")
def test_of_very_many_rows_only_those_near_a_question_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analysis = analyse(recorded(tmp_path, 150))
    slowly = {answer.problem: answer for answer in build_table(analysis)}
    monkeypatch.setattr(table, "MOST_ROWS", 100)
    monkeypatch.setattr(table, "_DRAWN", 150)
    quickly = {answer.problem: answer for answer in build_table(analysis)}
    assert len(quickly) == 150
    assert slowly.items() <= quickly.items()
    monkeypatch.setattr(table, "_DRAWN", 20)
    advice = build_table(analysis)
    assert len({answer.problem for answer in advice}) == 20
    # The page says that only a sample was checked, even if there are few problems per row.
    monkeypatch.setattr(table, "_MOST", 1000)
    assert "drawn at random" in recommendations_markdown(analysis, advice)


@pytest.mark.usefixtures("few_are_many")
def test_a_retimed_problem_without_a_library_s_time_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recorded(tmp_path, 150)
    monkeypatch.setattr(table, "MOST_ROWS", 100)
    lost, kernel_only = Gemm(8, 8, 8, "bf16"), Gemm(16, 8, 8, "bf16")
    measured = Measurements(
        {kernel_only: {"triton-tiled": MeasuredTime(1.0, 0.9, 1.1)}},
        pairs=[
            Pair(
                (problem, "cublas"),
                (Gemm(32, 8, 8, "bf16"), "cublas"),
                ((0.1, 0.2, 0.1, 0.2),) * 2,
                between=0.01,
            )
            for problem in (lost, kernel_only)
        ],
    )
    problems = table._problems_to_answer(recording, measured)
    assert measured.retimed == {lost, kernel_only}
    assert not measured.retimed & problems.keys()
