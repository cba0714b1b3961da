"""Freivalds' identity: the remainder is small for right results and large for a wrong element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import correctness
from kernels.correctness import identity
from kernels.correctness.identity import LIMIT, remainders
from kernels.library.calls import conv_call
from kernels.operands import Operands, random_operands
from kernels.operation import Layer, Lstm
from kernels.problem import GEMM_LAYOUTS, Conv, Gemm, Problem

CONVS = [
    "2,8,9,11,16,3,3,1,1,1,1", "1,3,17,19,8,7,7,2,3,1,1", "2,8,10,9,8,3,3,2x1,1x0,1x2,2",
    "3,4,7,7,4,3,3,1,1,2,4", "1,1,5,5,1,1,1,1,0,1,1", "6,5,4,4,7,2,2,2,0,1,1",
]  # fmt: skip


def right(problem: Problem, operands: Operands) -> Tensor:
    if isinstance(problem, Gemm):
        return (operands.a.double() @ operands.b.double()).to(operands.out.dtype)
    return conv_call(problem, [operands])(0)


def remainder(problem: Problem, operands: Operands, result: Tensor, seed: int = 0) -> float:
    found = remainders(problem, [operands], [result], seed)
    assert found is not None
    return found[0]


sizes = st.integers(1, 40)
gemms = st.builds(
    Gemm, sizes, sizes, sizes, st.sampled_from(["fp32", "fp16", "bf16"]),
    st.sampled_from(GEMM_LAYOUTS), st.sampled_from([1, 1, 3]),
)  # fmt: skip
convs = st.builds(
    lambda shape, dtype, layout, pass_: Conv.parse(f"{shape},{dtype},{layout},{pass_}"),
    st.sampled_from(CONVS), st.sampled_from(["fp32", "bf16"]), st.sampled_from(["nhwc", "nchw"]),
    st.sampled_from(["fprop", "dgrad", "wgrad"]),
)  # fmt: skip


@given(gemms | convs, st.integers(0, 99))
@settings(max_examples=150)
def test_a_right_result_is_within_the_limit(problem: Problem, seed: int) -> None:
    operands = random_operands(problem, "cpu", seed)
    assert remainder(problem, operands, right(problem, operands), seed) < LIMIT[problem.dtype]


@given(gemms | convs, st.integers(0, 99), st.data())
@settings(max_examples=150)
def test_one_wrong_number_is_found_wherever_it_is(
    problem: Problem, seed: int, data: st.DataObject
) -> None:
    operands = random_operands(problem, "cpu", seed)
    result = right(problem, operands).clone()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in result.shape)
    length = problem.flops / 2 / result.numel()
    result[place] += 4 * math.sqrt(length) + 1
    assert not remainder(problem, operands, result, seed) < LIMIT[problem.dtype]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("text", CONVS)
def test_an_infinity_or_a_nan_is_found(text: str, value: float) -> None:
    conv = Conv.parse(f"{text},fp32,nhwc,fprop")
    operands = random_operands(conv, "cpu")
    result = right(conv, operands)
    result[-1, -1, -1, -1] = value
    assert not remainder(conv, operands, result) <= LIMIT["fp32"]


@pytest.mark.parametrize("problem", [Gemm(8, 8, 8, "fp32"), Conv.parse(f"{CONVS[0]},fp32")])
def test_operands_of_zeros_make_only_zeros_right(problem: Problem) -> None:
    operands = random_operands(problem, "cpu")
    zeros = operands._replace(a=operands.a * 0)
    assert remainder(problem, zeros, right(problem, zeros)) == 0
    assert remainder(problem, zeros, right(problem, operands)) == math.inf


def test_a_wrong_row_has_its_known_size() -> None:
    """The elements of another row differ from the right ones by √2 standard deviations."""
    gemm = Gemm(64, 1024, 512, "bf16")
    operands = random_operands(gemm, "cpu")
    result = right(gemm, operands)
    result[17] = result[18]
    # A whole block has √1024 = 32 standard deviations, and 4 more are allowed for a large element.
    expected = math.sqrt(2) * 32 / (32 + 4)
    assert remainder(gemm, operands, result) == pytest.approx(expected, rel=0.5)


@pytest.mark.parametrize("place", [(0, 0), (3, 1500), (99, 2499)])
def test_each_sum_covers_only_one_block(place: tuple[int, int]) -> None:
    """In a sum over all columns, the rounding of right elements would hide a wrong one."""
    gemm = Gemm(100, 2500, 64, "bf16")
    operands = random_operands(gemm, "cpu")
    result = right(gemm, operands)
    assert remainder(gemm, operands, result) < 0.01
    result[place] += 3 * 8  # three standard deviations
    assert remainder(gemm, operands, result) > LIMIT["bf16"]


@pytest.mark.parametrize(
    "problem",
    [Gemm(70, 50, 33, "bf16", "tn", 2), *(
        Conv.parse(f"6,8,9,11,16,3,3,1,1,1,1,bf16,{layout},{pass_}")
        for layout in ("nhwc", "nchw") for pass_ in ("fprop", "dgrad", "wgrad")
    )],
    ids=str,
)  # fmt: skip
def test_operands_that_do_not_fit_in_fp32_are_taken_in_pieces(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = random_operands(problem, "cpu")
    result = right(problem, operands)
    whole = remainder(problem, operands, result)
    monkeypatch.setattr(identity, "_MAX_ELEMENTS", 700)
    assert remainder(problem, operands, result) == pytest.approx(whole, rel=1e-3)


def test_each_of_many_sets_has_its_own_remainder(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = Gemm(20, 30, 40, "fp32")
    sets = [random_operands(gemm, "cpu", seed) for seed in range(7)]
    results = [right(gemm, operands) for operands in sets]
    results[4][3, 3] += 30
    for together in (1 << 22, 3 * (20 * 30 + 20 * 40 + 30 * 40), 1):
        monkeypatch.setattr(correctness, "STACKED_ELEMENTS", together)
        found = remainders(gemm, sets, results, 1) or []
        assert [value > LIMIT["fp32"] for value in found] == [False] * 4 + [True] + [False] * 2


def test_either_side_finds_a_wrong_row() -> None:
    gemm = Gemm(64, 64, 64, "fp32")
    operands = random_operands(gemm, "cpu")
    result = right(gemm, operands)
    result[5] *= -1
    for seed in range(4):
        (found,) = remainders(gemm, [operands], [result], seed, side=seed % 2) or [0.0]
        assert found > LIMIT["fp32"]


def test_rounding_of_subnormal_numbers_is_within_the_limit() -> None:
    gemm = Gemm(50, 1, 1, "fp16")
    operands = random_operands(gemm, "cpu")
    operands.a.mul_(1e-2)
    assert remainder(gemm, operands, right(gemm, operands)) < LIMIT["fp16"]


@pytest.mark.parametrize(("size", "stride"), [(8, 1), (8, 2), (9, 2), (9, 3)])
@pytest.mark.parametrize("channels", [2, 16])
def test_the_library_s_own_faults_do_not_make_a_right_filter_gradient_wrong(
    size: int, stride: int, channels: int
) -> None:
    """oneDNN 3.12 computes some gradients of 1×1 filters wrong, which the identity also uses."""
    conv = Conv.parse(f"2,{channels},{size},{size},32,1,1,{stride},0,1,1,fp32,nhwc,wgrad")
    operands = random_operands(conv, "cpu", seed=1)
    read = operands.a[:, :, ::stride, ::stride].double()
    gradient = torch.einsum("nchw,nkhw->kc", read, operands.b.double())[:, :, None, None]
    for seed in range(8):
        assert remainder(conv, operands, gradient.float(), seed) < LIMIT["fp32"] / 10


def test_operations_that_are_not_linear_have_no_identity() -> None:
    for operation in (Layer("relu", 2, 3, 4, 4, "fp32"), Lstm(2, 3, 4, 5, "fp32")):
        operands = random_operands(operation, "cpu")
        assert remainders(operation, [operands], [operands.out], 0) is None


def test_reduced_precision_is_told_from_full() -> None:
    """A result of inputs that were truncated to tf32 exceeds the limit of fp32."""
    gemm = Gemm(128, 128, 256, "fp32")
    a, b, out = random_operands(gemm, "cpu")
    short = [(x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    assert remainder(gemm, Operands(a, b, out), short[0] @ short[1]) > LIMIT["fp32"]
