"""Test the value of advice on tables whose law is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.imports.public import PublicRows, read_source
from analysis.validation.advice_value import judge_advice, judge_measured
from analysis.validation.holdout import Validation, validate
from analysis.validation.validation_report import advice_text
from kernels.common.errors import UserError
from tests.support.synthetic import H100, gemm_cases, model_law, problems, record

GRID = [
    (m, n, k) for m in range(1024, 2048, 96) for n in range(1024, 2048, 96) for k in (1024, 1120)
]


def validated(folder: Path, noise: float, seed: int = 0) -> Validation:
    cases = gemm_cases(GRID)
    truth = model_law()(problems(cases))
    rng = np.random.default_rng(seed)
    noisy = truth * np.exp(noise * rng.standard_normal(len(truth)))
    source = read_source(record(folder, cases, noisy), H100)
    return validate(source, H100, 64, seed)


def test_a_model_that_knows_the_law_regrets_little_and_finds_most(tmp_path: Path) -> None:
    worth = judge_advice(validated(tmp_path, noise=0.001), draws=100)
    assert worth.neighbourhoods == worth.pads == 100
    assert worth.regret["best_guess"] < 0.25 * worth.regret["as_asked"]
    assert worth.regret["advice"] < worth.regret["as_asked"]
    assert worth.overclaimed is not None
    assert worth.overclaimed < 0.1
    for pad in worth.padding.values():
        assert pad.loss_p95 < 0.005
        assert 0 <= pad.gain <= worth.hindsight
    assert worth.padding["advice"].moved <= worth.padding["best_guess"].moved
    assert "of 100 choose queries, by rule:" in advice_text(worth)


def test_noise_is_not_followed(tmp_path: Path) -> None:
    """If times scatter by 10% from shape to shape, hardly any shape is padded."""
    worth = judge_advice(validated(tmp_path, noise=0.1), draws=100)
    assert worth.padding["advice"].moved <= 5
    assert worth.padding["advice"].loss_p95 < 0.02
    unchanged = replace(worth.padding["advice"], gain=-1e-6, loss_p95=-0.0)
    text = advice_text(replace(worth, padding={"advice": unchanged}))
    assert "The mean gain is 0.00%" in text
    assert "of the loss is 0.0%." in text
    for moved, words in ((0, "0 of 100 shapes were padded"), (1, "1 of 100 shapes was padded")):
        text = advice_text(replace(worth, padding={"advice": replace(unchanged, moved=moved)}))
        assert words in text


def test_another_implementation_of_a_shape_is_not_a_padding(tmp_path: Path) -> None:
    """The faster implementation would otherwise be the best padding of every shape."""
    cases = gemm_cases([(m, n, k) for m, n, k in GRID if k == 1024])
    source = read_source(record(tmp_path, cases, model_law()(problems(cases))), H100)
    slower = replace(source, implementations=["cutlass"] * len(source), seconds=2 * source.seconds)
    both = PublicRows.joined([source, slower])
    worth = judge_advice(validate(both, H100, 16), draws=50)
    assert worth.hindsight < 0.2
    assert worth.regret["as_asked"] < 0.2


def test_a_table_without_neighbours_says_so(tmp_path: Path) -> None:
    sizes = [(2**i, 2**j, 4096) for i in range(9, 14) for j in range(9, 14)]
    cases = gemm_cases(sizes)
    source = read_source(record(tmp_path, cases, model_law()(problems(cases))), H100)
    with pytest.raises(UserError, match="too few neighbouring shapes"):
        judge_advice(validate(source, H100, 4))


@pytest.mark.parametrize("depths", [(4096,), (4096, 4352)])
def test_a_repeated_measurement_is_not_a_neighbour(tmp_path: Path, depths: tuple[int, ...]) -> None:
    """A recording may have the same shape, or the same neighbour of a shape, in several sweeps."""
    sizes = [(2**i, 2**j, k) for i in range(9, 14) for j in range(9, 14) for k in depths]
    cases = gemm_cases(sizes)
    source = read_source(record(tmp_path, cases, model_law()(problems(cases))), H100)
    repeated = PublicRows.joined([source] * 4)
    with pytest.raises(UserError, match="too few neighbouring shapes"):
        judge_advice(validate(repeated, H100, 4))


def test_one_measured_guess_is_worth_more_than_none_and_more_are_worth_more(tmp_path: Path) -> None:
    """Times scatter by 5% from shape to shape, which the model cannot know, and noise is 0.5%."""
    cases = gemm_cases(GRID)
    law = model_law()(problems(cases))
    truth = law * np.exp(0.05 * np.random.default_rng(7).standard_normal(len(law)))
    first, second = (
        read_source(
            record(tmp_path / str(seed), cases, truth * np.exp(
                0.005 * np.random.default_rng(seed).standard_normal(len(law)))), H100)
        for seed in (0, 1)
    )  # fmt: skip
    validation = validate(first, H100, 64, 0)
    values = judge_measured(validation, second, [1, 4, 40], draws=100)
    alone = judge_advice(validation, draws=100)
    assert values[1].pad_gain > alone.padding["advice"].gain
    assert values[1].pad_gain < values[4].pad_gain <= values[40].pad_gain
    assert values[1].choose_regret > values[4].choose_regret > values[40].choose_regret
    assert values[40].choose_regret < 0.01
    assert values[40].pad_gain > 0.8 * alone.hindsight
    assert all(value.pad_loss_p95 < 0.01 for value in values.values())
    assert (
        "With the best 4 candidates measured, the mean regret of choose queries is "
        in advice_text(alone, values)
    )


def test_only_what_was_measured_twice_is_judged(tmp_path: Path) -> None:
    validation = validated(tmp_path / "one", noise=0.01)
    other = gemm_cases([(m + 1, n, k) for m, n, k in GRID])
    elsewhere = record(tmp_path / "other", other, model_law()(problems(other)))
    with pytest.raises(UserError, match="shares too few shapes with"):
        judge_measured(validation, read_source(elsewhere, H100), [1])
