"""Verify results: compare sampled entries with float64, and test all by Freivalds' identity."""

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

    ``rel_error`` and ``tolerance`` have the same meaning as in :class:`CheckResult`. If no entries
    were compared, ``rel_error`` is NaN. ``message`` says what is wrong, and is empty if the results
    passed.
    """

    rel_error: float
    tolerance: float
    message: str = ""

    @property
    def ok(self) -> bool:
        """True if the results passed all tests."""
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

    The identity does not apply to layers and LSTMs, because they are not linear. Their entries are
    therefore always compared, and their results are searched for infinities and NaNs. For all other
    workloads, entries are compared only if ``entries`` is set. ``seed`` decides the random signs of
    the identity, and which entries of which result are compared. ``side`` is described in
    :func:`remainders`.
    """
    # 1. Compare sampled entries of one result with float64.
    has_identity = not isinstance(problem, Layer | Lstm)
    rel_error, tolerance = math.nan, TOLERANCE[problem.dtype]
    if entries or not has_identity:
        index = random.Random(seed).randrange(len(results))
        sampled = check(problem, sets[index], results[index], seed)
        rel_error, tolerance = sampled.rel_error, sampled.tolerance
        if not sampled.ok:
            message = (
                "the compared entries contain infinities or NaNs, or should all be 0 but are not."
            )
            if math.isfinite(rel_error):
                message = (
                    f"the largest error is {_digits(100 * rel_error)}% of the largest value; "
                    f"{_digits(100 * tolerance)}% is allowed."
                )
            return CheckVerdict(rel_error, tolerance, message)
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
    message = "sums of the result's elements with random signs are infinite or NaN."
    if math.isfinite(worst):
        message = (
            "sums of the result's elements with random signs are off by "
            f"{_digits(100 * worst)}% of their expected size; {_digits(100 * limit)}% is allowed."
        )
    return CheckVerdict(rel_error, tolerance, message)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
