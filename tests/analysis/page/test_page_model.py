"""The page's script predicts and advises what Python does, for shapes that were not measured."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import analysis.page
import analysis.page.page_model as page_model_module
from analysis.advice.measurements import Measurements
from analysis.advice.options import Question, options_of
from analysis.advice.recommend import Advice, advise
from analysis.advice.table import QUESTIONS
from analysis.model.basis import Basis, find_basis
from analysis.model.query import group_of
from analysis.page.page_model import page_groups, page_model
from analysis.recordings.load import load, problems_of
from analysis.recordings.repetition import MeasuredTime
from kernels.common.errors import UserError
from kernels.problem import PASSES, Conv, Gemm, Problem
from tests.support.browsing import CHROMIUM, need_browser
from tests.support.published import RECORDED, SLUG

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

SCRIPTS = ("formula.js", "ask.js")
TABLE = """
let table = {};
function secondsInTable(problem) { return table[specOf(problem)] ?? null; }
const percent = (share) => `${100 * share}%`;
"""
"""Stand-ins for functions of scripts that need a page: a look-up of a time, and a format."""

ASKED = """([model, specs, question, seconds]) => {
  table = seconds;
  const asked = (spec) => parseShape(spec).problem;
  return specs.map((spec) => ({
    answer: predict(asked(spec), model),
    source: sourceText(asked(spec), model),
    best: question && (neighboursOf(asked(spec), QUESTIONS[question], { model })[0] ?? null),
  }));
}"""


@contextmanager
def script() -> Iterator[Any]:
    """Yield a function that evaluates an expression with the page's model code in Chromium."""
    need_browser()
    from playwright.sync_api import sync_playwright

    folder = Path(analysis.page.__file__).parent / "script"
    code = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS) + TABLE
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(content=code)
        yield page.evaluate
        browser.close()


def answers(
    model: dict[str, Any],
    problems: list[Problem],
    question: str = "",
    seconds: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    document = json.loads(json.dumps(model, allow_nan=False))
    specs = [problem.spec() for problem in problems]
    with script() as evaluate:
        return list(evaluate(ASKED, [document, specs, question, dict(seconds or {})]))


def random_problems(basis: Basis, count: int, seed: int = 0) -> list[Problem]:
    """Return problems of every operation and dtype that the page predicts, of random sizes."""
    rng = np.random.default_rng(seed)
    names = [group.name for group in page_groups(basis)]
    problems: list[Problem] = []
    for name in itertools.cycle(names):
        operation, dtype = name.split()
        try:
            problems.append(random_problem(rng, operation, dtype))
        except UserError:  # the filter does not fit, or the result is too large
            continue
        if len(problems) == count:
            return problems
    raise AssertionError


def random_problem(rng: np.random.Generator, operation: str, dtype: str) -> Problem:
    if operation not in PASSES:
        sizes = np.exp2(rng.uniform(0, [14, 16, 14])).astype(int)
        steps = rng.choice([1, 8, 64], 3)
        m, n, k = (np.maximum(sizes // steps, 1) * steps).tolist()
        layout = str(rng.choice(["nn", "nt", "tn", "tt"]))
        return Gemm(m, n, k, dtype, layout, int(rng.choice([1, 1, 12])))
    groups = int(rng.choice([1, 1, 4]))
    c, kout = (groups * int(size) for size in rng.choice([3, 8, 36, 64, 100], 2))
    images, height, width = (int(size) for size in rng.integers([1, 5, 5], [64, 80, 80]))
    taps = int(rng.choice([1, 3, 3, 5]))
    pairs = [(int(a), int(b)) for a, b in (rng.integers(low, 3, 2) for low in (1, 0, 1))]
    layout = str(rng.choice(["nhwc", "nchw"]))
    return Conv.build(
        (images, c, height, width, kout, taps, taps), pairs, groups, dtype, layout, operation
    )


def attention_gemms(dtype: str) -> list[Problem]:
    """Return GEMMs of attention, in which two sizes are the length of a sequence."""
    return [
        gemm
        for length in (101, 513, 577, 1030)
        for gemm in (
            Gemm(length, length, 64, dtype, "nt", 96),
            Gemm(length, 64, length, dtype, "nn", 96),
        )
    ]


MACHINES = ("nvidia-h100-sxm", "nvidia-a100-sxm-80gb", "nvidia-b200", "nvidia-v100-sxm2-16gb")


@pytest.mark.parametrize("slug", [SLUG, *MACHINES])
def test_the_script_predicts_what_python_predicts(slug: str, tmp_path: Path) -> None:
    # The first machine has a recording. The others are predicted by the shipped constants.
    basis = find_basis(slug, RECORDED.parent.parent if slug == SLUG else tmp_path)
    problems = random_problems(basis, 500)
    got = answers(page_model(basis, []), problems)
    predicted = basis.model.predict(basis.query(problems)).frame()
    for problem, answer, row in zip(
        problems, (g["answer"] for g in got), predicted.to_dict("records"), strict=True
    ):
        said = [answer[name] * 1e6 for name in ("time", "lo", "hi")]
        assert said == pytest.approx([row[f"{name}_us"] for name in ("time", "lo", "hi")], 1e-3), (
            problem
        )
        parts = (answer["limit"], answer["tiles"], answer["waves"], answer["split"])
        assert parts == (row["limit"], row["tiles"], row["waves"], row["split"]), problem
        assert f"{answer['bm']}x{answer['bn']}" == row["tile"], problem
        assert answer["bytes"] == pytest.approx(row["bytes"], 1e-6), problem
        assert answer["tailEfficiency"] == pytest.approx(row["tail_efficiency"]), problem


@pytest.mark.parametrize("slug", [SLUG, *MACHINES])
def test_the_script_says_which_shapes_are_like_measured_ones(slug: str, tmp_path: Path) -> None:
    """The example that a group is described by must not speak for the group's other shapes."""
    basis = find_basis(slug, RECORDED.parent.parent if slug == SLUG else tmp_path)
    # A fit to another layout than the example's, as if only such GEMMs had been measured.
    group = group_of(basis.library(Gemm(8, 8, 8, "fp32")), Gemm(8, 8, 8, "fp32"))
    limited = replace(basis.model.fit_of(group), rows=100, layout="nn", aligned_only=True)
    model = replace(basis.model, fits={**basis.model.fits, group: limited})
    basis = replace(basis, model=model)
    problems = [problem for problem in random_problems(basis, 100) if problem.dtype != "fp32"]
    problems += [Gemm(64, 64, 64, "fp32", layout) for layout in ("nn", "nt")]
    got = [answer["source"] for answer in answers(page_model(basis, []), problems)]
    for problem, text in zip(problems, got, strict=True):
        source, remark, _ = basis.kind_and_source(problem)[1].partition(". The shape's alignment")
        assert text.startswith(f"Source of predictions: {source} ("), problem
        assert text.count("The shape's alignment") == bool(remark), problem
    assert ["The shape's alignment" in text for text in got[-2:]] == [False, True]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.kind)
@pytest.mark.parametrize("slug", [SLUG, *MACHINES[:2]])
def test_the_script_advises_what_python_advises(
    slug: str, question: Question, tmp_path: Path
) -> None:
    basis = find_basis(slug, RECORDED.parent.parent if slug == SLUG else tmp_path)
    problems = [
        *random_problems(basis, 60, seed=1),
        *(p for p in random_problems(basis, 200, seed=2) if p.alignment < 16),
        Gemm(2048, 50257, 768, next(iter(basis.model.machine.peaks))),
        *attention_gemms(next(iter(basis.model.machine.peaks))),
    ]
    got = answers(page_model(basis, []), problems, question.kind)
    verdicts = {
        agree(problem, answer["best"], advice_on(problem, basis, question))
        for problem, answer in zip(problems, got, strict=True)
    }
    # On the recorded CPU, whose run was noisy, hardly any predicted gain is likely.
    assert slug == SLUG or verdicts == {True, False}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.kind)
def test_the_script_compares_the_times_of_a_table(question: Question, tmp_path: Path) -> None:
    # Times of a public table have no interval. The table has the shape and half of the sizes that
    # the query allows.
    basis = find_basis("nvidia-h100-sxm", tmp_path)
    problem = Gemm(1000, 4100, 2040, "bf16")
    options, frame = options_of(
        problem, basis.model, unmeasured(basis, problem), "cublas", question
    )
    rng = np.random.default_rng(0)
    seconds = frame["time_us"].to_numpy() * 1e-6 * np.exp(0.2 * rng.standard_normal(len(frame)))
    known = {
        option: {"cublas": MeasuredTime(float(time), math.nan, math.nan)}
        for option, time in zip(options[::2], seconds[::2], strict=False)
    }
    table = {option.spec(): times["cublas"].time for option, times in known.items()}
    measured = Measurements(known, warm=True)
    advice = advise(problem, basis.model, measured, "cublas", question)
    assert advice.evidence == "measured"
    (answer,) = answers(page_model(basis, []), [problem], question.kind, table)
    assert agree(problem, answer["best"], advice)
    assert answer["best"]["evidence"] == "measured"


def unmeasured(basis: Basis, problem: Problem) -> Measurements:
    return Measurements({}, warm=bool(basis.query([problem]).cached[0]))


def advice_on(problem: Problem, basis: Basis, question: Question) -> Advice:
    library = basis.library(problem)
    return advise(problem, basis.model, unmeasured(basis, problem), library, question)


def agree(problem: Problem, best: dict[str, Any] | None, advice: Advice) -> bool:
    """Assert that the script's best size is the one of the advice; return True if it is likely."""
    likely = best is not None and bool(best["isLikely"])
    assert likely == (advice.verdict == "likely"), problem
    if best is not None and likely:
        said = [best["gain"], best["gainLo"], best["gainHi"], best["probability"]]
        expected = [*advice.gain, advice.probability]
        assert said == pytest.approx(expected, rel=1e-6, abs=1e-9), problem
        assert best["flops"] == pytest.approx(advice.extra_flops), problem
    return likely


def test_smaller_trees_differ_by_no_more_than_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    basis = find_basis(SLUG, RECORDED.parent.parent)
    measured = problems_of(load(RECORDED).products)
    own = page_model(basis, measured)
    monkeypatch.setattr(page_model_module, "MOST_NODES", 1000)
    model = page_model(basis, measured)
    small = [trees for trees in model["trees"] if "spread" in trees]
    assert len(small) == len(own["trees"]) > 1
    problems = random_problems(basis, 600, seed=5)
    gemms: list[Problem] = [p for p in problems if isinstance(p, Gemm)]
    got = answers(model, gemms)
    exact = basis.model.predict(basis.query(gemms)).frame()["time_us"]
    differences = np.array([g["answer"]["time"] * 1e6 for g in got]) / exact - 1
    stated = max(trees["differs"] for trees in small)
    assert 0 < np.quantile(np.abs(differences), 0.9) < 1.5 * stated < 0.3


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "Type M,N,K,dtype"),
        ("1,2,3", "Type M,N,K,dtype"),
        ("0,8,8,bf16", "m must be a whole number of at least 1, not '0'"),
        ("8,8,8,bf17", "dtype must be one of fp32, tf32, fp16, bf16, fp8, not 'bf17'"),
        ("8,8,8,bf16,nhwc", "layout must be one of nn, nt, tn, tt, not 'nhwc'"),
        ("1,6,8,8,8,3,3,1,1,1,4,bf16", "groups must divide"),
        ("1,8,2,2,8,5,5,1,0,1,1,bf16", "does not fit into the image"),
        (
            "1,8,2,2,8,5,5,1x1x1,0,1,1,bf16",
            "stride must be one number such as 2, or two such as 2x1, not '1x1x1'",
        ),
    ],
)
def test_a_bad_shape_is_answered_by_a_sentence(text: str, fault: str) -> None:
    with script() as evaluate:
        assert fault in evaluate("text => parseShape(text).fault", text)


def test_a_shape_is_read_as_the_command_line_reads_it() -> None:
    basis = find_basis("nvidia-h100-sxm", Path("nowhere"))
    problems = random_problems(basis, 100, seed=3)
    texts = ["4096,4104,4096,bf16", "8×8×8, BF16", *(problem.spec() for problem in problems)]
    with script() as evaluate:
        specs = evaluate("texts => texts.map((text) => specOf(parseShape(text).problem))", texts)
    assert specs[:2] == ["4096,4104,4096,bf16,nt,1", "8,8,8,bf16,nt,1"]
    assert specs[2:] == texts[2:]
