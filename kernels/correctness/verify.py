"""Verdict on results, from a float64 reference of sampled entries and from Freivalds' identity."""

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
    """Verdict on results.

    ``rel_error`` is the relative error of the sampled entries, and NaN if none were compared.
    ``message`` says in a sentence what is wrong, and is empty if nothing is.
    """

    rel_error: float
    tolerance: float
    message: str = ""

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.message


def verify(
    problem: Workload,
    sets: Sequence[Operands],
    results: Sequence[Tensor],
    seed: int,
    side: int | None = None,
    entries: bool = True,
) -> CheckVerdict:
    """Test whole results with Freivalds' identity, and entries of one result against float64.

    The identity does not apply to memory-bound layers and LSTMs, because they are not linear.
    Sampled entries of their results are always compared with float64, and all of their results are
    searched for infinities and NaNs.

    Args:
        problem: the workload that was computed.
        sets: the operands, one set for each result.
        results: the results, with the problem's logical shape.
        seed: seed of every random choice: which result and entries are compared, and the signs.
        side: side from which the identity is tested, 0 or 1; None tests both sides.
        entries: whether sampled entries are compared with float64 even if the identity applies.
    """
    # 1. Compare sampled entries of one result with float64.
    has_identity = not isinstance(problem, Layer | Lstm)
    rel_error, tolerance = math.nan, TOLERANCE[problem.dtype]
    if entries or not has_identity:
        index = random.Random(seed).randrange(len(results))
        sampled = check(problem, sets[index], results[index], seed)
        rel_error, tolerance = sampled.rel_error, sampled.tolerance
        if not sampled.ok:
            return CheckVerdict(
                rel_error,
                tolerance,
                f"the result is off by {sampled.rel_error:.1e} of the largest value; "
                f"{sampled.tolerance:.0e} is allowed.",
            )
    # 2. Test the whole of every result.
    errors = remainders(problem, sets, results, seed, side)
    if errors is None:
        finite = all(bool(torch.isfinite(result).all()) for result in results)
        message = "" if finite else "the result contains infinities or NaNs."
        return CheckVerdict(rel_error, tolerance, message)
    limit = LIMIT[problem.dtype]
    # A NaN counts as the largest error, because max() would otherwise overlook it: no comparison
    # with a NaN is true.
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
    if worst <= limit:
        return CheckVerdict(rel_error, tolerance)
    return CheckVerdict(
        rel_error,
        tolerance,
        f"sums with random signs are off by {worst:.1e} standard deviations; {limit:.0e} is "
        "allowed.",
    )
