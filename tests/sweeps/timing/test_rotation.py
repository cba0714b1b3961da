"""Tests of which memory the results of allocating launches get."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sweeps.timing import rotation
from sweeps.timing.rotation import ResultRotation


class CachingAllocator:
    """Allocator that returns the free block with the lowest address, as PyTorch's does."""

    def __init__(self) -> None:
        self.free: set[int] = set()
        self.blocks = 0

    def empty_like(self, place: Tensor) -> Tensor:
        if not self.free:
            self.free.add(self.blocks)
            self.blocks += 1
        block = min(self.free)
        self.free.remove(block)
        tensor = torch.empty_like(place)
        tensor.block = block
        weakref.finalize(tensor, self.free.add, block)
        return tensor


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> CachingAllocator:
    made = CachingAllocator()
    module = type("module", (), {"empty_like": staticmethod(made.empty_like)})
    monkeypatch.setattr(rotation, "torch", module)
    return made


def blocks_of(launch: Callable[[int], Tensor], count: int) -> list[int]:
    return [launch(index).block for index in range(count)]


def test_without_rotation_every_result_lands_in_the_same_block(allocator: CachingAllocator) -> None:
    place = torch.empty(1024)
    assert set(blocks_of(lambda index: allocator.empty_like(place), 20)) == {0}


def test_a_block_is_used_again_only_after_twice_the_cache(allocator: CachingAllocator) -> None:
    place = torch.empty(1024)
    rotating = ResultRotation(5 * place.nbytes).launch(
        lambda index: allocator.empty_like(place), place
    )
    rotating.renew(1000)
    blocks = blocks_of(rotating, 50)
    for begin in range(40):
        assert len(set(blocks[begin : begin + 10])) == 10
    assert allocator.blocks <= 11  # none is allocated while the batch is timed


def test_cases_share_one_allowance_of_memory(allocator: CachingAllocator) -> None:
    place = torch.empty(1024)
    shared = ResultRotation(5 * place.nbytes)
    for _ in range(30):
        rotating = shared.launch(lambda index: allocator.empty_like(place), place)
        rotating.renew(1000)
        blocks_of(rotating, 20)
    assert allocator.blocks <= 11
    rotating.renew(3)  # a batch of three launches needs only three blocks
    assert len(allocator.free) >= 7
