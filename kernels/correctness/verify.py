"""Whether results are right: sampled entries against float64, the whole by Freivalds' identity."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.correctness.identity import LIMIT, remainders
from kernels.correctness.reference import TOLERANCE, check
from kernels.operands import Operands
from kernels.operation import Layer, Lstm, Workload


@dataclass(frozen=True)
class CheckVerdict:
    """``rel_error`` of the sampled entries, and what is wrong, as a sentence."""

    rel_error: float
    tolerance: float
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.message


def verify(
    problem: Workload,
    sets: Sequence[Operands],
    results: Sequence[Tensor],
    seed: int,
    side: int | None = None,
    entries: bool = True,
) -> CheckVerdict:
    """Test results: all of every one by the identity, some entries of one against float64.

    Operations that are no products (layers that move memory, an LSTM) have no identity: their
    results are only searched for infinities and NaN.

    Args:
        problem: what was computed.
        sets: the operands, one set for each result.
        results: with the problem's logical shape.
        seed: of every random choice: the result, its entries, the identity's signs.
        side: test the identity from only this side, 0 or 1; None tests both.
        entries: compare entries with float64 also where the identity tests them all.
    """
    linear = not isinstance(problem, Layer | Lstm)
    figures = math.nan, TOLERANCE[problem.dtype]
    if entries or not linear:
        which = random.Random(seed).randrange(len(results))
        sampled = check(problem, sets[which], results[which], seed)
        figures = sampled.rel_error, sampled.tolerance
        if not sampled.ok:
            return CheckVerdict(
                *figures,
                f"the result is off by {sampled.rel_error:.1e} of the largest value; "
                f"{sampled.tolerance:.0e} is allowed.",
            )
    left = remainders(problem, sets, results, seed, side)
    if left is None:
        finite = all(bool(torch.isfinite(result).all()) for result in results)
        return CheckVerdict(*figures, "" if finite else "the result contains infinities or NaNs.")
    limit = LIMIT[problem.dtype]
    worst = max(left, key=lambda one: math.inf if math.isnan(one) else one)
    if worst <= limit:
        return CheckVerdict(*figures)
    return CheckVerdict(
        *figures,
        f"sums with random signs are off by {worst:.1e} standard deviations; {limit:.0e} is "
        "allowed.",
    )
