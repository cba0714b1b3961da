"""Verdicts on right results and wrong results, and their messages."""

from __future__ import annotations

import math
import re

import pytest
import torch

from kernels.correctness.verify import verify
from kernels.operands import Operands, random_operands
from kernels.operation import Layer
from kernels.problem import Gemm

GEMM = Gemm(200, 300, 64, "bf16")
Results = tuple[list[Operands], list[torch.Tensor]]


@pytest.fixture
def case() -> Results:
    sets = [random_operands(GEMM, "cpu", seed) for seed in range(3)]
    return sets, [(one.a.float() @ one.b.float()).bfloat16() for one in sets]


def test_right_results_have_an_error_and_no_message(case: Results) -> None:
    verdict = verify(GEMM, *case, seed=1)
    assert verdict.ok
    assert 0 < verdict.rel_error < verdict.tolerance


def test_a_whole_result_that_is_wrong_is_seen_in_its_entries(case: Results) -> None:
    sets, results = case
    verdict = verify(GEMM, sets, [result * 2 for result in results], seed=1)
    assert "of the largest value; 1.6% is allowed." in verdict.message


def test_a_wrong_row_that_is_not_sampled_is_seen_in_the_sums(case: Results) -> None:
    sets, results = case
    results[1][100] *= -1
    messages = [verify(GEMM, sets, results, seed).message for seed in range(9)]
    assert all(messages)
    assert any(
        re.fullmatch(
            r"sums of the result's elements with random signs are off by [\d.]+% of their expected "
            r"size; 3% is allowed\.",
            message,
        )
        for message in messages
    )


def test_the_seed_decides_which_entries_are_compared() -> None:
    gemm = Gemm(500, 400, 16, "fp32")
    operands = random_operands(gemm, "cpu")
    result = operands.a @ operands.b
    errors = {verify(gemm, [operands], [result], seed).rel_error for seed in range(8)}
    assert len(errors) > 1


def test_a_layer_with_an_infinity_is_wrong() -> None:
    layer = Layer("relu", 64, 32, 4, 4, "fp32")
    operands = random_operands(layer, "cpu")
    result = torch.relu(operands.a)
    assert verify(layer, [operands], [result], 0).ok
    for image in range(64):
        broken = result.clone()
        broken[image, 3, 2, 1] = math.inf
        assert not verify(layer, [operands], [broken], 0).ok
