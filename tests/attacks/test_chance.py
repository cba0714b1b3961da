"""A kernel that is wrong now and then escapes with the chance that is stated, and no more often.

If each launch is wrong with probability p and the results of R launches are looked at, it has a
time with probability (1 − p)^R. R is one before the samples, one after them, and in one sample of
six the results that are still there when the batch ends: of a product, one for each place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from kernels import implementations
from kernels.correctness.verify import CheckVerdict, verify
from kernels.operands import Operands
from kernels.problem import Gemm
from sweeps.measuring import checking
from sweeps.measuring import torch_bench as bench
from sweeps.measuring.rounds import Rounds
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from tests.support.attack import cpu, evil
from tests.support.evil import CHANCES, evil_bench

PROBLEM = Gemm(64, 64, 48, "fp32")


def trial(name: str, seed: int) -> bool:
    """Whether a case of the kernel has a time."""
    case = evil(name, PROBLEM)
    one = evil_bench([case], machine=cpu(), device="cpu", gpu=None)
    events: list[Event] = []
    Rounds(
        [PlanEntry(case, 0.01)], {}, one, "1/1", 1e6, 0.0, events.append, lambda ids, s: None, seed
    ).run()
    return not any(event["event"] == "outcome" for event in events)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many results every call looked at."""
    counts: list[int] = []

    def counted(problem: Gemm, sets: Sequence[Operands], *more: Any) -> CheckVerdict:
        counts.append(len(sets))
        return verify(problem, sets, *more)

    monkeypatch.setattr(checking, "verify", counted)
    monkeypatch.setattr(bench, "implementations", implementations)  # evil_bench adds to them
    return counts


@pytest.mark.long
@pytest.mark.parametrize("name", list(CHANCES))
def test_it_escapes_as_often_as_is_stated(name: str, looked_at: list[int]) -> None:
    trials, expected = 25, []
    for seed in range(trials):
        looked_at.clear()
        assert trial("right", seed)
        expected.append((1 - CHANCES[name]) ** sum(looked_at))
    escaped = sum(trial(name, seed) for seed in range(trials))
    mean, variance = sum(expected), sum(p * (1 - p) for p in expected)
    assert escaped <= mean + 4 * math.sqrt(variance) + 1


def test_how_many_results_are_looked_at(looked_at: list[int]) -> None:
    """One before the samples, those of the first, and those of a late one or one after all."""
    assert trial("right", 0)
    before, first, *others = looked_at
    assert before == 1
    assert first >= 1
    assert others
