"""Test the gain by confirming, on shapes whose times scatter in a way that no model can know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from analysis.advice.options import Question
from analysis.imports.public import PublicRows, read_source
from analysis.validation.holdout import validate
from kernels.problem import Problem
from sweeps.running.confirming import CANDIDATE_COST, PAIR_COST
from tests.studies.confirming_share import (
    Asked,
    Collections,
    Swept,
    confirm,
    judged,
    summary,
    worth_of,
)
from tests.support.synthetic import H100, Law, gemm_cases, model_law, problems, record

GRID = [
    (m, n, k) for m in range(1024, 2048, 96) for n in range(1024, 2048, 96) for k in (1024, 1120)
]

LAW = model_law()


def collections(folder: Path, jumps: float, noise: float, law: Law = LAW) -> Collections:
    """Measure a law with jumps from shape to shape twice, with independent noise."""
    cases = gemm_cases(GRID)
    truth = law(problems(cases))
    truth = truth * np.exp(jumps * np.random.default_rng(7).standard_normal(len(truth)))

    def measured(seed: int) -> PublicRows:
        off = noise * np.random.default_rng(seed).standard_normal(len(truth))
        return read_source(record(folder / str(seed), cases, truth * np.exp(off)), H100)

    return Collections.match(H100, measured(0), measured(1))


def test_shares_answer_the_same_questions_and_pay_for_what_they_measure(tmp_path: Path) -> None:
    of = collections(tmp_path, jumps=0.08, noise=0.003)
    budget = 60
    none, half = worth_of(of, budget, 0, (0.0, 0.5), elsewhere=20)
    assert (none.swept, none.tried, none.confirmed, none.told) == (60, 0, 0, 0)
    assert half.swept == 30
    assert half.questions == none.questions
    # Each query has at least one candidate. The problem of one query may be the candidate of
    # another.
    assert 2 <= half.tried <= 0.5 * budget / (CANDIDATE_COST + PAIR_COST)
    assert 1 <= half.told <= half.moved
    assert none.unconfirmed_gain == none.gain


def test_what_is_confirmed_gains(tmp_path: Path) -> None:
    of = collections(tmp_path, jumps=0.08, noise=0.003)
    assert of.apart == pytest.approx(0.003 * 2**0.5, rel=0.3)
    whole = validate(of.measured, H100, 60, 0)
    asked = of.asked_of(whole.calibrated)
    swept = Swept(of, whole.model, whole.calibrated, asked)
    tried, explored, pairs = confirm(of, swept.trials(asked), 300.0, np.random.default_rng(0))
    assert len(pairs) > 10
    assert 300 / (5 * CANDIDATE_COST + PAIR_COST) <= tried <= 300 / (CANDIDATE_COST + PAIR_COST)
    before, _ = swept.answers(asked, of.times(swept.rows))
    after, told = swept.answers(asked, of.times([*swept.rows, *explored], pairs))
    gain = judged(of, asked, after)[0]
    assert told.sum() > 10
    assert gain[told].min() > 0.01  # the verdict of a confirmed change promises a gain
    assert gain.mean() > judged(of, asked, before)[0].mean() + 0.001


@pytest.mark.slow
def test_noise_is_not_confirmed(tmp_path: Path) -> None:
    """All shapes have the same FLOP/s, and measurements have noise of 5%."""
    of = collections(tmp_path, jumps=0.0, noise=0.05, law=lambda of: flops(of) / 5e14)
    half = worth_of(of, 60, 0, (0.5,), elsewhere=20)[0]
    assert half.tried > 0
    assert half.told == 0


def flops(of: Sequence[Problem]) -> np.ndarray:
    return np.array([float(problem.flops) for problem in of])


def test_a_pair_agrees_with_its_times_in_the_mean(tmp_path: Path) -> None:
    of = collections(tmp_path, jumps=0.0, noise=0.01)
    contenders = ((of.measured.problems[0], "cublas"), (of.measured.problems[5], "cublas"))
    pair = of.retimed(contenders, np.random.default_rng(0))
    assert np.ptp(pair.log_ratios) > 0
    assert np.mean(pair.log_ratios) == pytest.approx(
        np.log(of.measured.seconds[0] / of.measured.seconds[5])
    )


def test_gains_are_of_the_truth(tmp_path: Path) -> None:
    of = collections(tmp_path, jumps=0.08, noise=0.003)
    rows = [0, 1, 2]
    time, flops = of.truth[rows], of.flops[rows]
    asked = [Asked(Question("pad", 0.125), rows), Asked(Question("choose", 0.15), rows)]
    gain, regret = judged(of, asked, np.array([1, 2]))
    speed = flops / time
    assert gain == pytest.approx([time[0] / time[1] - 1, speed[2] / speed[0] - 1])
    assert regret == pytest.approx([1 - time.min() / time[1], 1 - speed[2] / speed.max()])


def test_shares_are_compared_over_seeds() -> None:
    shares = [
        [{"share": share, "gain": gain + share, **dict.fromkeys(REST, 0.0)} for share in (0.0, 0.2)]
        for gain in (0.01, 0.05)
    ]
    runs = [{"budget": 64, "seed": seed, "shares": of} for seed, of in enumerate(shares)]
    text = summary(runs)
    assert "64 cases, seeds: 2" in text
    assert "+20.00% ± 0.00%" in text


REST = (
    "swept", "tried", "confirmed", "told", "moved", "unconfirmed_gain", "pad_gain", "choose_gain",
    "choose_regret", "elsewhere_pad_gain", "elsewhere_choose_regret",
)  # fmt: skip
