"""Eight CPU benchmarks for the study ``gate_here``, any of them slower by an additional copy.

Run by pytest with pytest-benchmark. ``ROOFTILE_COPIES`` has the bytes that a case copies in
addition, as a JSON object by name. It is not a test: nothing is asserted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

COPIES: dict[str, int] = json.loads(os.environ.get("ROOFTILE_COPIES", "{}"))


def works() -> dict[str, Callable[[], object]]:
    """What each case computes, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    square, tall = torch.randn(256, 256), torch.randn(2048, 256)
    batch = torch.randn(16, 64, 64)
    image, weight = torch.randn(1, 16, 32, 32), torch.randn(16, 16, 3, 3)
    row = torch.randn(200_000)
    return {
        "matmul": lambda: square @ square,
        "tall": lambda: tall @ square,
        "batched": lambda: batch @ batch,
        "conv": lambda: torch.nn.functional.conv2d(image, weight, padding=1),
        "softmax": lambda: torch.softmax(tall, 1),
        "sort": lambda: torch.sort(row[:20_000]),
        "sum": lambda: tall.sum(0),
        "exp": lambda: row.exp(),
    }


def slower(work: Callable[[], object], size: int) -> Callable[[], object]:
    """The same work, and then a copy of ``size`` bytes within the caches."""
    if not size:
        return work
    source = torch.zeros(size, dtype=torch.uint8)
    target = torch.empty_like(source)

    def both() -> object:
        result = work()
        target.copy_(source)
        return result

    return both


@pytest.mark.parametrize("name", list(works()))
def test_case(benchmark: Any, name: str) -> None:
    benchmark(slower(works()[name], COPIES.get(name, 0)))
