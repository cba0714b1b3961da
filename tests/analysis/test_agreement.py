"""The commands, the table, the page and Python give the same answers about the same shapes."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import rooftile
from analysis.advice.answers import Answer, answers_to
from analysis.advice.options import Question
from analysis.advice.table import QUESTIONS, build_table
from analysis.advice.times import times_of
from analysis.advice.verdict import MEASURED, PREDICTED
from analysis.model.basis import Basis, find_basis
from analysis.model.fitted import Analysis, analyse, write_predictions
from analysis.page.points import points_of
from analysis.recordings.load import load
from kernels.problem import Gemm, Problem
from tests.support.command_line import analysis as command
from tests.support.synthetic import gemm_cases, model_law, problems, random_sizes, record
from tests.support.tiers import quick_and_long

SLUG = "nvidia-h100-sxm"
SHAPES = 200


def sizes() -> list[tuple[int, int, int]]:
    """Return a hundred shapes, each followed by the same shape with a few more columns."""
    some = dict.fromkeys(random_sizes(3 * SHAPES))
    pairs = [((m, n, k), (m, n + max(8, n // 128 * 8), k)) for m, n, k in some if n >= 128]
    return list(dict.fromkeys(itertools.chain.from_iterable(pairs)))[:SHAPES]


def seconds_of(asked: list[Problem]) -> np.ndarray:
    """Return the model's times with noise that makes some neighbours clearly faster."""
    noise = np.random.default_rng(0).normal(0, 0.15, len(asked))
    return np.asarray(model_law()(asked) * np.exp(noise))


@pytest.fixture(scope="module", params=quick_and_long(["a recording", "an imported file"]))
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Return 200 shapes of an H100, from a recording or from a file that a user imported."""
    results = tmp_path_factory.mktemp("results")
    cases = gemm_cases(sizes())
    times = seconds_of(problems(cases))
    if request.param == "a recording":
        folder = record(results / SLUG, cases, times)
    else:
        own = results / "own.csv"
        with open(own, "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(["m", "n", "k", "dtype", "time_us"])
            for problem, time in zip(problems(cases), times, strict=True):
                assert isinstance(problem, Gemm)
                table.writerow([problem.m, problem.n, problem.k, problem.dtype, time * 1e6])
        told = command("import", str(own), "--machine", SLUG, "--results", str(results))
        assert told.returncode == 0, told.stderr
        folder = results / "public" / SLUG
    found = analyse(load(folder))
    write_predictions(found)
    return found


def basis_of(known: Analysis) -> Basis:
    folder = known.recording.folder
    return find_basis(SLUG, folder.parents[1] if folder.parent.name == "public" else folder.parent)


def asked(known: Analysis) -> list[Problem]:
    return problems(gemm_cases(sizes()))


@pytest.fixture(scope="module")
def answers(known: Analysis) -> dict[tuple[str, str], Answer]:
    """Return the answers of `recommend` about every shape, for both queries of the table."""
    basis = basis_of(known)
    return {
        (question.kind, answer.advice.problem.spec()): answer
        for question in QUESTIONS
        for answer in answers_to(asked(known), basis, question)
    }


def test_predict_says_the_measured_time_with_the_interval_of_a_repetition(known: Analysis) -> None:
    rows = times_of(asked(known), basis_of(known))
    assert len(rows) == SHAPES
    for row, time in zip(rows, seconds_of(asked(known)), strict=True):
        assert row["evidence"] == MEASURED
        assert row["time_us"] == pytest.approx(time * 1e6)
        assert 1 < row["hi_us"] / row["lo_us"] < 1.2  # an interval of a prediction is wider


def test_recommend_compares_measured_with_measured(
    known: Analysis, answers: dict[tuple[str, str], Answer]
) -> None:
    basis, compared = basis_of(known), 0
    for answer in answers.values():
        advice = answer.advice
        if not advice.changed or advice.evidence == PREDICTED:
            continue
        before, after = times_of([advice.problem, advice.instead], basis)
        assert before["evidence"] == after["evidence"] == MEASURED
        work = advice.instead.flops / advice.problem.flops if advice.question == "choose" else 1.0
        assert advice.gain.value == pytest.approx(work * before["time_us"] / after["time_us"] - 1)
        assert advice.gain.lo < advice.gain.value < advice.gain.hi
        compared += 1
    assert compared >= 20


def test_a_measured_better_size_is_recommended(
    known: Analysis, answers: dict[tuple[str, str], Answer]
) -> None:
    """Every shape with a neighbour whose measured time is much shorter gets a recommendation."""
    times = dict(zip(asked(known), seconds_of(asked(known)), strict=True))
    clear = 0
    for problem, time in times.items():
        assert isinstance(problem, Gemm)
        better = [
            p for p, t in times.items()
            if isinstance(p, Gemm) and (p.m, p.k) == (problem.m, problem.k)
            and problem.n < p.n <= 1.125 * problem.n and time / t > 1.15 * p.flops / problem.flops
        ]  # fmt: skip
        if better:
            assert answers["pad", problem.spec()].advice.verdict != "leave it"
            clear += 1
    assert clear >= 5


def test_the_table_and_the_page_say_what_recommend_says(
    known: Analysis, answers: dict[tuple[str, str], Answer]
) -> None:
    table = build_table(known)
    assert len(table) == len(answers)
    for listed in table:
        other = answers[listed.question, listed.problem.spec()].advice
        assert (listed.verdict, listed.evidence, listed.instead) == (
            other.verdict, other.evidence, other.instead
        )  # fmt: skip
        assert listed.gain == pytest.approx(other.gain)
    points = points_of(known).set_index("spec")["time_us"]
    for row in times_of(asked(known), basis_of(known)):
        assert points[row["problem"]] == pytest.approx(row["time_us"])


def test_python_says_what_the_commands_say(
    known: Analysis, answers: dict[tuple[str, str], Answer]
) -> None:
    folder = known.recording.folder
    results = folder.parents[1] if folder.parent.name == "public" else folder.parent
    shapes = asked(known)
    frame = rooftile.recommend(shapes, SLUG, choose=0.15, results=results)
    for row in frame.to_dict("records"):
        told = answers["choose", row["problem"]].to_json()
        assert (row["verdict"], row["instead"], row["reason"]) == (
            told["verdict"], told["instead"], told["reason"]
        )  # fmt: skip
        assert row["problem"] == Gemm(row["m"], row["n"], row["k"], row["dtype"]).spec()
        new = Gemm(row["new_m"], row["new_n"], row["new_k"], row["dtype"], row["layout"])
        assert row["instead"] == new.spec()
    predicted = rooftile.predict(shapes, SLUG, results=results)
    assert list(predicted["time_us"]) == [
        row["time_us"] for row in times_of(shapes, basis_of(known))
    ]


def test_a_public_table_s_own_times_are_compared(tmp_path: Path) -> None:
    """In a public table, an H100 took 56.19 µs for a shape, and 31.04 µs with one row less."""
    table = tmp_path / "results" / "public" / SLUG
    sizes_ = [(1281, 768, 10240), (1280, 768, 10240), *random_sizes(200)]
    cases = [replace(case, cache="warm") for case in gemm_cases(sizes_)]
    times = [56.19e-6, 31.04e-6, *model_law()(problems(cases[2:]))]
    public = {
        "source": "a framework 1.0", "package": "a package", "licence": "", "cache": "warm",
        "rows": len(cases), "how": "", "framework": "a framework", "version": "1.0",
    }  # fmt: skip
    folder = record(table, cases, times, half_width=float("nan"), public=public, protocol=0)
    rows = pd.read_csv(folder / "measurements.csv", dtype={"config": str}).fillna({"config": ""})
    rows.to_parquet(folder / "measurements.parquet", index=False)
    write_predictions(analyse(load(folder)))
    (folder / "validation.json").write_text("{}")  # an import's last file
    basis = find_basis(SLUG, tmp_path / "results")
    problem = Gemm(1281, 768, 10240, "bf16")
    (answer,) = answers_to([problem], basis, Question("choose", 0.001))
    advice = answer.advice
    assert (advice.verdict, advice.evidence) == ("likely", MEASURED)
    assert advice.change == "M 1281 → 1280"
    assert advice.gain.value == pytest.approx(56.19 / 31.04 * 1280 / 1281 - 1)
    # The interval is wide, because the ratio may differ with another framework or version.
    assert 0.1 < advice.gain.lo < 0.7 < 0.95 < advice.gain.hi
