from __future__ import annotations

import itertools

import pytest
import torch

from kernels.config import Storage
from kernels.problem import Conv, Gemm, Problem
from sweeps.timing.arena import Arena, ArenaFullError, set_bytes

PROBLEMS: list[Problem] = [
    Gemm(33, 65, 17, "fp32"), Gemm(128, 64, 32, "bf16", "tt", 3),
    Conv.parse("2,3,9,9,8,3,3,1,1,1,1,fp32"),
]  # fmt: skip


def span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    reach = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return begin, begin + (reach + 1) * tensor.element_size()


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_views_do_not_overlap_and_are_aligned(problem: Problem) -> None:
    arena = Arena("cpu", 1 << 16, 1 << 22)
    arena.reserve(problem, 5)
    assert arena.capacity(problem) >= 5
    spans = []
    for operands in arena.sets(problem, 5):
        assert all(tensor.data_ptr() % 64 == 0 for tensor in operands)
        spans += [span(tensor) for tensor in operands]
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_inputs_are_normal_and_results_never_become_inputs() -> None:
    arena = Arena("cpu", 1 << 16, 1 << 24)
    problem = Gemm(256, 256, 256, "fp32")
    arena.reserve(problem, 8)
    for operands in arena.sets(problem, 8):
        operands.out.fill_(1e30)
    values = torch.cat([t.flatten() for operands in arena.sets(problem, 8) for t in operands[:2]])
    assert abs(float(values.mean())) < 0.01
    assert float(values.std()) == pytest.approx(1.0, abs=0.01)


def test_the_arena_has_a_limit_and_says_so() -> None:
    arena = Arena("cpu", 1 << 16, 1 << 20)
    small, large = Gemm(64, 64, 64, "fp32"), Gemm(1024, 1024, 1024, "fp32")
    arena.reserve(small, 10_000)
    assert arena.capacity(small) == (1 << 20) // set_bytes(small)
    with pytest.raises(ArenaFullError, match="the inputs of one operand set need"):
        arena.capacity(large)  # the arena is already allocated, and smaller


def test_a_problem_too_large_does_not_cost_the_others_their_memory() -> None:
    arena = Arena("cpu", 1 << 16, 1 << 20)
    small, large = Gemm(64, 64, 64, "fp32"), Gemm(1024, 1024, 1024, "fp32")
    arena.reserve(large, 4)
    arena.reserve(small, 3)
    assert arena.capacity(small) == 3
    with pytest.raises(ArenaFullError):
        arena.capacity(large)
    alone = Arena("cpu", 1 << 16, 1 << 20)
    with pytest.raises(ArenaFullError):
        alone.capacity(large)


def test_the_flush_is_twice_the_cache_and_reads_only() -> None:
    arena = Arena("cpu", 1 << 16, 1 << 20)
    assert arena._flush.nbytes == 2 << 16
    before = arena._flush.clone()
    arena.flush()
    assert torch.equal(arena._flush, before)


def test_tf32_shares_fp32s_memory() -> None:
    arena = Arena("cpu", 1 << 16, 1 << 20)
    a, b = (arena.sets(Gemm(8, 8, 8, dtype), 1)[0].a.data_ptr() for dtype in ("fp32", "tf32"))
    assert a == b


@pytest.mark.parametrize("problem", PROBLEMS[:2], ids=str)
def test_sets_may_share_the_first_operand_and_nothing_else(problem: Problem) -> None:
    arena = Arena("cpu", 1 << 16, 1 << 22)
    arena.reserve(problem, 5, shared_a=True)
    assert arena.capacity(problem, shared_a=True) == 5
    made = arena.sets(problem, 5, shared_a=True)
    assert len({operands.a.data_ptr() for operands in made}) == 1
    tensors = [made[0].a, *(t for operands in made for t in operands[1:])]
    spans = sorted(map(span, tensors))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_an_operand_that_is_shared_leaves_room_for_more_of_the_other() -> None:
    arena = Arena("cpu", 1 << 16, 1 << 20)
    tall = Gemm(1024, 16, 64, "fp32")  # its operands have 256 KiB and 4 KiB
    arena.reserve(tall, 1000)
    assert arena.capacity(tall) == 3
    assert arena.capacity(tall, shared_a=True) == (1024 - 256) // 4


def test_a_problem_that_was_not_announced_gets_memory_for_its_storage() -> None:
    arena = Arena("cpu", 1 << 16, 1 << 22)
    storage = Storage(offset=1, ld_multiple=64)
    assert arena.capacity(Gemm(33, 65, 17, "fp32"), storage=storage) == 1
