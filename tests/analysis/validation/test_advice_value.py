"""What advice is worth, on tables whose law is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import H100, gemm_cases, model_law, problems, record

from analysis.recordings.public import read_source
from analysis.validation.advice_value import judge_advice
from analysis.validation.holdout import Validation, validate
from analysis.validation.report import advice_text
from kernels.errors import UserError

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
    assert "neighbourhoods, mean regret: advice" in advice_text(worth)


def test_noise_is_not_followed(tmp_path: Path) -> None:
    """Where times jump by 10 % from shape to shape, nothing that is claimed is certain."""
    worth = judge_advice(validated(tmp_path, noise=0.1), draws=100)
    assert worth.padding["advice"].moved <= 5
    assert worth.padding["advice"].loss_p95 < 0.02


def test_a_table_without_neighbours_says_so(tmp_path: Path) -> None:
    sizes = [(2**i, 2**j, 4096) for i in range(9, 14) for j in range(9, 14)]
    cases = gemm_cases(sizes)
    source = read_source(record(tmp_path, cases, model_law()(problems(cases))), H100)
    with pytest.raises(UserError, match="too few neighbours"):
        judge_advice(validate(source, H100, 4))
