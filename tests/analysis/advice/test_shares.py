"""Check allowances: how much larger sizes and FLOPs may become, and how users write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.advice.answers import answers_to
from analysis.advice.measurements import Measurements
from analysis.advice.options import Question, options_of, question_of
from analysis.advice.sizes import ANY_DIMENSION, SizeConstraints
from analysis.model.basis import find_basis
from analysis.model.predict import Model
from kernels.common.errors import UserError
from kernels.machine import known_machine
from kernels.problem import Gemm

MODEL = Model(known_machine("nvidia-b200"))


@given(
    st.sampled_from(["pad", "choose"]), st.floats(0.0, 3.0),
    st.tuples(*[st.integers(1, 5000)] * 3),
)  # fmt: skip
def test_no_option_uses_more_than_the_allowance(
    kind: str, allowance: float, sizes: tuple[int, int, int]
) -> None:
    problem = Gemm(*sizes, "bf16")
    question = Question(kind, allowance)
    options, _ = options_of(problem, MODEL, Measurements({}), "cublas", question)
    assert options[0] == problem
    for option in options:
        more = option.flops / problem.flops - 1
        assert more <= allowance + 1e-9
        assert more >= (-allowance if kind == "choose" else 0.0) - 1e-9


def test_a_handful_of_rows_may_become_several_times_as_many() -> None:
    few = Gemm(4, 4096, 4096, "bf16")
    question = question_of("125%", None, SizeConstraints(change=("m",), any_size=True))
    options, _ = options_of(few, MODEL, Measurements({}), "cublas", question)
    assert {option.m for option in options if isinstance(option, Gemm)} == set(range(4, 10))


@pytest.mark.parametrize("text", ["1", "2", 1, "10"])
def test_a_share_that_may_mean_two_things_is_refused(text: str | int) -> None:
    with pytest.raises(UserError, match=r"--pad \d+ could mean \d+% or \d+00%; write one of them"):
        question_of(text, None, ANY_DIMENSION)


@pytest.mark.parametrize(
    ("text", "share"), [("100%", 1.0), ("1%", 0.01), (1.0, 1.0), ("250%", 2.5)]
)
def test_a_share_that_means_one_thing_is_taken(text: str | float, share: float) -> None:
    assert question_of(text, None, ANY_DIMENSION).allowance == share


def test_nothing_is_said_against_padding_that_a_prediction_contradicts(tmp_path: Path) -> None:
    """According to the shipped constants, a B200 takes less time for nine rows than for eight."""
    basis = find_basis("nvidia-b200", tmp_path)
    eight = Gemm(8, 4096, 4096, "bf16")
    named, any_size = (
        answers_to(
            [eight], basis, Question("pad", 0.125, SizeConstraints(change=("m",), any_size=any_))
        )
        for any_ in (False, True)
    )
    assert "size within the limits" in named[0].advice.reason
    assert any_size[0].advice.change == "M 8 → 9"
