from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.advice.measurements import Measurements
from analysis.advice.options import Question, options_of
from analysis.advice.sizes import (
    SizeConstraints,
    SizeIndex,
    dimensions,
    sequence_dimensions,
    sizes_near,
)
from analysis.model.predict import Model
from kernels.common.errors import UserError
from kernels.machine import known_machine
from kernels.problem import Conv, Gemm, Problem

H100 = Model(known_machine("nvidia-h100-sxm"))
GEMM = Gemm(4096, 50257, 1030, "bf16")
CONV = Conv.parse("8,33,28,28,63,3,3,1,1,1,1,fp16")


def names(problem: Problem, question: Question) -> dict[str, set[int]]:
    """Return the new sizes that the options propose for each dimension."""
    options, _ = options_of(problem, H100, Measurements({}), "cublas", question)
    return {
        d: {getattr(o, d) for o in options} - {getattr(problem, d)} for d in dimensions(problem)
    }


@given(
    st.integers(1, 70_000), st.integers(1, 70_000), st.integers(1, 70_000),
    st.sampled_from(["pad", "choose"]), st.sampled_from(["fp32", "bf16"]),
)  # fmt: skip
def test_only_sizes_that_an_engineer_would_choose(
    m: int, n: int, k: int, kind: str, dtype: str
) -> None:
    problem = Gemm(m, n, k, dtype)
    for (name,), sizes in sizes_near(problem, 0.15, kind == "choose", [192]).items():
        own = getattr(problem, name)
        assert own in sizes
        for size in set(sizes) - {own}:
            assert size % (8 if size >= 16 else 4) == 0
            assert own * 0.85 - 1e-6 <= size <= own * 1.15 + 1e-6
            assert size > own or kind == "choose"


@given(st.integers(1, 70_000), st.sampled_from(["pad", "choose"]), st.floats(0.01, 3.0))
def test_the_farthest_factor_covers_every_proposed_size(
    size: int, kind: str, allowance: float
) -> None:
    question = Question(kind, allowance)
    problem = Gemm(size, size, size, "bf16")
    for sizes in sizes_near(problem, allowance, question.choose, [192]).values():
        for proposed in sizes:
            ratio = max(proposed / size, size / proposed)
            assert ratio <= question.farthest_factor * (1 + 1e-9)


@pytest.mark.parametrize("size", [800, 1600, 4480])
def test_both_ends_of_a_window_belong_to_it(size: int) -> None:
    ends = size * 85 // 100, size * 115 // 100
    index = SizeIndex([Gemm(end, 64, 64, "bf16") for end in ends])
    assert list(index.near(Gemm(size, 64, 64, "bf16"), -0.15, 0.15)) == [0, 1]


def test_never_an_odd_number_of_channels_unless_any_will_do() -> None:
    named = names(CONV, Question("choose", 0.15))
    assert named["c"] == {32}
    assert 64 in named["kout"]
    any_size = names(CONV, Question("choose", 0.15, SizeConstraints(any_size=True)))
    assert any(size % 8 for size in any_size["c"])


def test_only_the_sizes_that_may_change_do() -> None:
    for constraints in (SizeConstraints(change=("n",)), SizeConstraints(fix=("m", "k"))):
        named = names(GEMM, Question("pad", 0.125, constraints))
        assert named["m"] == named["k"] == set()
        assert 50_304 in named["n"]


def test_changed_sizes_are_multiples_of_what_is_asked_for() -> None:
    named = names(GEMM, Question("choose", 0.15, SizeConstraints(multiple=96)))
    assert all(size % 96 == 0 for sizes in named.values() for size in sizes)
    assert named["n"]


def test_a_multiple_that_is_asked_for_may_grow_to_the_next_one() -> None:
    """4608 is a multiple of 3 · 256, so that the nearest multiple of each step is 4608 itself."""
    sizes = sizes_near(Gemm(4096, 4608, 4096, "bf16"), 0.125, False, (), SizeConstraints((), (), 3))
    assert {4800, 4992} <= set(sizes[("n",)])


@pytest.mark.parametrize("kind", ["pad", "choose"])
def test_a_sequence_keeps_one_length(kind: str) -> None:
    scores = Gemm(101, 101, 64, "bf16", batch=12)  # queries × keys of attention
    options, _ = options_of(scores, H100, Measurements({}), "cublas", Question(kind, 0.15))
    lengths = {(option.implied_gemm.m, option.implied_gemm.n) for option in options}
    assert len(lengths) > 1
    assert all(m == n for m, n in lengths)


@pytest.mark.parametrize(
    ("problem", "length"),
    [
        (Gemm(100, 100, 100, "bf16", "nt", 8), ("m", "n")),
        (Gemm(100, 64, 100, "bf16", "nn", 8), ("m", "k")),
        (Gemm(64, 1000, 64, "bf16", "nt", 8), ()),
        (Gemm(100, 100, 64, "bf16", "nt", 1), ()),
        (CONV, ()),
    ],
)
def test_the_layout_tells_which_sizes_are_a_sequence(
    problem: Problem, length: tuple[str, ...]
) -> None:
    assert sequence_dimensions(problem) == length


def test_a_sequence_whose_other_side_is_fixed_changes_alone() -> None:
    scores = Gemm(101, 101, 64, "bf16", batch=12)
    named = names(scores, Question("pad", 0.15, SizeConstraints(fix=("m",))))
    assert 104 in named["n"]
    assert named["m"] == set()


def test_a_vocabulary_can_be_shared_by_eight() -> None:
    assert any(size % 1024 == 0 for size in names(GEMM, Question())["n"])
    assert any(size % 192 == 0 for size in names(GEMM, Question())["k"])  # the library's tile


@pytest.mark.parametrize(
    ("problem", "constraints", "words"),
    [
        (GEMM, SizeConstraints(change=("kout",)), "has no size KOUT; name one of M, N, K"),
        (GEMM, SizeConstraints(fix=("x",)), "has no size X"),
        (CONV, SizeConstraints(change=("n",)), "name one of C, KOUT"),
        (GEMM, SizeConstraints(change=("m",), fix=("m",)), "has no size left to change"),
    ],
)
def test_a_wish_that_does_not_fit_gets_a_sentence(
    problem: Problem, constraints: SizeConstraints, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        constraints.check(problem)
