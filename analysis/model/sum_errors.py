"""Uncertainty of summed predictions, such as the total time of the GEMMs in a model's step.

The errors of the predicted times in a step are correlated, and the correlation depends on the
library. Steps are therefore simulated for each group of measured cases: a few cases are drawn at
random, and the sum of their predicted times is compared with the sum of their measured times.
Convolutions are treated like GEMMs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.timemodel.estimate import Array

LEVEL_CORRELATION = 0.5
"""Assumed correlation between the errors of the predicted times of two GEMMs in a step. A kernel
that is slower than predicted for one shape is usually slower than predicted for other shapes, too.
"""

CHANGE_CORRELATION = 0.5
"""Assumed correlation between the errors of two GEMMs' predicted time ratios. The time ratio of a
GEMM is its time before a change, divided by its time after the change."""

MOST_GEMMS = 12
"""Largest number of GEMMs drawn for a simulated step; a GEMM may be drawn several times."""

FEWEST_GEMMS = 3
"""Smallest number of GEMMs drawn for a simulated step."""

_MAX_COUNT = 48  # Largest number of times that a drawn GEMM occurs in a simulated step.
_DRAWS = 4000  # Number of simulated steps.
_MIN_CASES = 40  # With fewer measured cases, too few different steps could be drawn.
_TAIL = 0.05  # Share of the errors beyond each end of a 90% interval.
_MIN_FACTOR = 0.25  # Smallest factor of half an interval.


class Times(NamedTuple):
    """Predicted and measured seconds of the same cases."""

    predicted: Array
    measured: Array


def half_interval_of_sum(half_widths: Array, correlation: float) -> Array:
    """Return the width of the lower or the upper half of each sum's interval.

    Args:
        half_widths: width of the same half of each time's interval, as an array of shape
            (..., times in a sum).
        correlation: correlation between the errors of any two times in a sum.
    """
    # Independent errors add up in quadrature, and fully correlated errors add up directly.
    independent = (half_widths**2).sum(axis=-1)
    correlated = half_widths.sum(axis=-1) ** 2
    total: Array = np.sqrt((1 - correlation) * independent + correlation * correlated)
    return total


def simulated_counts(rng: np.random.Generator, steps: int) -> NDArray[np.int_]:
    """Choose at random how often each drawn GEMM occurs in each simulated step.

    Returns:
        Counts as an array of shape (steps, :data:`MOST_GEMMS`). The row of a step with fewer drawn
        GEMMs ends with zeros.
    """
    drawn_gemms = rng.integers(FEWEST_GEMMS, MOST_GEMMS + 1, (steps, 1))
    counts = rng.integers(1, _MAX_COUNT + 1, (steps, MOST_GEMMS))
    return np.where(np.arange(MOST_GEMMS) < drawn_gemms, counts, 0)


def sum_factors(times: Times, lo: Array, hi: Array) -> tuple[float, float]:
    """Return the factors that correct the intervals of summed times.

    The interval of a sum follows from the intervals of the individual times and an assumed
    correlation of their errors. The true correlation may be different, and errors may have heavier
    tails than a normal distribution.

    Args:
        times: times of held-out cases.
        lo: lower ends of the 90% intervals of the cases, in seconds.
        hi: upper ends of the 90% intervals of the cases, in seconds.

    Returns:
        Factors for the lower and the upper half of each sum's interval. With these factors, about
        90% of the simulated steps have a measured sum inside the interval of their predicted sum.
        With fewer than 40 cases, both factors are 1.
    """
    if len(lo) < _MIN_CASES:
        return 1.0, 1.0
    # 1. Draw steps. Both arrays have the shape (steps, cases in a step): ``rows`` are positions of
    #    cases, and ``counts`` how often each occurs in the step.
    rng = np.random.default_rng(0)
    counts = simulated_counts(rng, _DRAWS)
    rows = rng.integers(0, len(lo), counts.shape)
    # 2. Compare the error of each sum with its interval.
    error = (counts * (times.measured - times.predicted)[rows]).sum(axis=-1)
    below = half_interval_of_sum(counts * (times.predicted - lo)[rows], LEVEL_CORRELATION)
    above = half_interval_of_sum(counts * (hi - times.predicted)[rows], LEVEL_CORRELATION)
    return _factors(error, below, above)


def change_factors(
    before: Times, after: Times, lower_half: Array, upper_half: Array
) -> tuple[float, float]:
    """Return the factors that correct the intervals of sums in which some GEMMs are replaced.

    A GEMM is only replaced if its replacement is predicted to be faster.

    Args:
        before: times of held-out GEMMs.
        after: times of the held-out GEMMs that may replace those in ``before``, in the same order.
        lower_half: width of the lower half of the 90% interval of each replacement's time, in
            seconds. This interval covers only the error of the predicted time ratio; the original
            GEMM's time is taken as exact.
        upper_half: width of the upper half of the same interval, in seconds.

    Returns:
        Factors for the lower and the upper half of the interval of a step's time after the
        replacements. Both factors are 1 if fewer than 40 replacements are predicted to be faster.
    """
    is_promising = after.predicted < before.predicted
    if is_promising.sum() < _MIN_CASES:
        return 1.0, 1.0
    # 1. Draw steps, and keep those with at least one replacement. All arrays have the shape
    #    (steps, GEMMs). ``rows`` are positions of GEMMs, ``counts`` how often each occurs in the
    #    step, and ``changed`` how many of these are replaced.
    rng = np.random.default_rng(0)
    counts = simulated_counts(rng, _DRAWS)
    rows = rng.integers(0, len(lower_half), counts.shape)
    changed = np.where(is_promising[rows], counts, 0)
    has_change = changed.any(axis=-1)
    rows = rows[has_change]
    counts = counts[has_change]
    changed = changed[has_change]

    def sums_of_steps(times: Array) -> Array:
        return (counts * times[rows]).sum(axis=-1)

    def savings_in_steps(before_times: Array, after_times: Array) -> Array:
        return (changed * (before_times - after_times)[rows]).sum(axis=-1)

    # 2. Sum the predicted and the measured time of each step, before and after the replacements.
    predicted_before = sums_of_steps(before.predicted)
    predicted_after = predicted_before - savings_in_steps(before.predicted, after.predicted)
    measured_before = sums_of_steps(before.measured)
    measured_after = measured_before - savings_in_steps(before.measured, after.measured)
    # 3. Compare the sums. A gain is the ratio of the times before and after, so the error of the
    #    predicted time before the replacements must not count. The measured gain is therefore
    #    applied to this predicted time.
    measured_gain = measured_before / measured_after
    error = predicted_before / measured_gain - predicted_after
    below = half_interval_of_sum(changed * lower_half[rows], CHANGE_CORRELATION)
    above = half_interval_of_sum(changed * upper_half[rows], CHANGE_CORRELATION)
    return _factors(error, below, above)


def _factors(error: Array, below: Array, above: Array) -> tuple[float, float]:
    """Return factors with which the intervals contain about 90% of the errors.

    ``below`` and ``above`` are the widths of the lower and the upper half of each sum's interval.
    """
    relative = error / np.where(error < 0, below, above)
    low, high = np.quantile(relative, [_TAIL, 1 - _TAIL])
    return max(-float(low), _MIN_FACTOR), max(float(high), _MIN_FACTOR)
