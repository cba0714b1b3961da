"""Uncertainty of sums of predicted times: the errors of GEMMs in one step are partly the same.

How strongly they are correlated differs between libraries. For each group of calibrated
measurements, sums of a few of them are therefore drawn at random and compared with the truth, in
the way that a step of a model sums its GEMMs. Groups of convolutions are treated in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.timemodel.estimate import Array

LEVEL_CORRELATION = 0.5
"""Correlation of the errors of two GEMMs' times in one step. A library's kernel that is slower than
predicted is slower for more than one shape."""

CHANGE_CORRELATION = 0.5
"""Correlation of the errors of two GEMMs' time ratios, before and after a change."""

MOST_PRODUCTS = 12
"""Largest number of distinct GEMMs in a simulated step; the smallest is :data:`FEWEST_PRODUCTS`."""

FEWEST_PRODUCTS = 3

_MOST_OFTEN = 48  # the largest number of times that a GEMM is in one step
_DRAWS = 4000
_ENOUGH = 40  # measurements; fewer make too few different steps
_TAIL = 0.05  # share of the errors beyond each end of the interval
_NARROWEST = 0.25  # the smallest factor of an interval


class Times(NamedTuple):
    """Seconds of the same GEMMs, one element each."""

    predicted: Array
    measured: Array


def half_interval_of_sum(parts: Array, correlation: float) -> Array:
    """Return half the interval of sums, given half the intervals of their parts.

    Args:
        parts: half intervals, of shape (..., parts).
        correlation: correlation of the errors of any two parts.
    """
    # Independent errors add up in quadrature, fully correlated ones directly.
    independent = (parts**2).sum(axis=-1)
    correlated = parts.sum(axis=-1) ** 2
    total: Array = np.sqrt((1 - correlation) * independent + correlation * correlated)
    return total


def simulated_counts(rng: np.random.Generator, steps: int) -> NDArray[np.int_]:
    """Draw how often each GEMM is in each of many simulated steps, 0 if it is not in the step.

    Returns:
        An array of shape (steps, :data:`MOST_PRODUCTS`).
    """
    products = rng.integers(FEWEST_PRODUCTS, MOST_PRODUCTS + 1, (steps, 1))
    counts = rng.integers(1, _MOST_OFTEN + 1, (steps, MOST_PRODUCTS))
    return np.where(np.arange(MOST_PRODUCTS) < products, counts, 0)


def sum_factors(times: Times, lo: Array, hi: Array) -> tuple[float, float]:
    """Return the factors by which a sum's interval must be wider than its parts' intervals imply.

    The parts' errors may be more or less alike than assumed, and their tails may be heavier.

    Args:
        times: times of each case, predicted by a fit that had not seen it.
        lo: lower ends of their 90% intervals.
        hi: upper ends of their 90% intervals.

    Returns:
        Factors of the half below and of the half above, such that nine sums in ten lie inside.
    """
    if len(lo) < _ENOUGH:
        return 1.0, 1.0
    rng = np.random.default_rng(0)
    counts = simulated_counts(rng, _DRAWS)
    rows = rng.integers(0, len(lo), counts.shape)
    error = (counts * (times.measured - times.predicted)[rows]).sum(axis=-1)
    below = half_interval_of_sum(counts * (times.predicted - lo)[rows], LEVEL_CORRELATION)
    above = half_interval_of_sum(counts * (hi - times.predicted)[rows], LEVEL_CORRELATION)
    return _factors(error, below, above)


def change_factors(before: Times, after: Times, less: Array, more: Array) -> tuple[float, float]:
    """Return the factors of :func:`sum_factors` for a step after promising changes of its GEMMs.

    A change is promising if the prediction for the replacement is faster.

    Args:
        before: times of each GEMM.
        after: times of the GEMM that would replace it.
        less: how much less time than predicted the replacement may take, with 90% confidence, given
            the time of the original GEMM.
        more: how much more time it may take.

    Returns:
        Factors of the two halves of the interval of a step's time after the changes.
    """
    promising = after.predicted < before.predicted
    if promising.sum() < _ENOUGH:
        return 1.0, 1.0
    # 1. Draw steps, and keep those with at least one promising change. All arrays have the shape
    #    (steps, products): which GEMM, how often it is in the step, and how often it is changed.
    rng = np.random.default_rng(0)
    counts = simulated_counts(rng, _DRAWS)
    rows = rng.integers(0, len(less), counts.shape)
    changed = np.where(promising[rows], counts, 0)
    has_change = changed.any(axis=-1)
    rows, counts, changed = rows[has_change], counts[has_change], changed[has_change]

    # 2. Sum the predicted and the measured time of each step, before and after the changes.
    def sums(before_times: Array, after_times: Array) -> tuple[Array, Array]:
        before_sum = (counts * before_times[rows]).sum(axis=-1)
        return before_sum, before_sum + (changed * (after_times - before_times)[rows]).sum(axis=-1)

    predicted_before, predicted_after = sums(before.predicted, after.predicted)
    measured_before, measured_after = sums(before.measured, after.measured)
    # 3. Compare the sums. A gain is a ratio, so the error of the predicted time before the changes
    #    does not count.
    error = predicted_before / (measured_before / measured_after) - predicted_after
    below = half_interval_of_sum(changed * less[rows], CHANGE_CORRELATION)
    above = half_interval_of_sum(changed * more[rows], CHANGE_CORRELATION)
    return _factors(error, below, above)


def _factors(error: Array, below: Array, above: Array) -> tuple[float, float]:
    """Return factors of the two halves of intervals, such that nine errors in ten lie inside."""
    relative = error / np.where(error < 0, below, above)
    low, high = np.quantile(relative, [_TAIL, 1 - _TAIL])
    return max(-float(low), _NARROWEST), max(float(high), _NARROWEST)
