"""How sure a sum of predicted times is: the errors of products in one step are partly the same.

How much so differs from library to library. So for each group of calibrated rows, sums of a few
rows each are drawn at random and compared with the truth, as steps of models are made of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.timemodel.estimate import Array

LEVEL_CORRELATION = 0.5
"""Of the errors of two products' times in one step: a library's kernel that is slower than
predicted is so for more than one shape."""

CHANGE_CORRELATION = 0.5
"""Likewise of the errors of two products' time ratios, before and after a change."""

MOST_PRODUCTS = 12
"""Distinct products of a made-up step have at least :data:`FEWEST_PRODUCTS` and at most so many."""

FEWEST_PRODUCTS = 3

_MOST_OFTEN = 48  # a product in one step
_DRAWS = 4000
_ENOUGH = 40  # rows: fewer make too few different steps
_TAIL = 0.05  # on either side of the interval
_NARROWEST = 0.25  # of the interval that is not corrected


class Times(NamedTuple):
    """Seconds of the same products, one entry each."""

    predicted: Array
    measured: Array


def together(parts: Array, correlation: float) -> Array:
    """Half an interval of sums, from those of their parts.

    Args:
        parts: of shape (..., parts).
        correlation: of the errors of any two parts.
    """
    alone = (parts**2).sum(axis=-1)
    total: Array = np.sqrt((1 - correlation) * alone + correlation * parts.sum(axis=-1) ** 2)
    return total


def made_up_counts(rng: np.random.Generator, steps: int) -> NDArray[np.int_]:
    """How often each product is in each of many made-up steps, 0 for what a step does not have.

    Returns:
        Of shape (steps, :data:`MOST_PRODUCTS`).
    """
    products = rng.integers(FEWEST_PRODUCTS, MOST_PRODUCTS + 1, (steps, 1))
    counts = rng.integers(1, _MOST_OFTEN + 1, (steps, MOST_PRODUCTS))
    return np.where(np.arange(MOST_PRODUCTS) < products, counts, 0)


def sum_factors(times: Times, lo: Array, hi: Array) -> tuple[float, float]:
    """By how much the interval of a sum has to be wider than its parts' intervals make it.

    The parts' errors may be more alike than assumed, or less, and their tails heavier.

    Args:
        times: of each row, predicted by a fit that had not seen it.
        lo: the lower ends of their 90 % intervals.
        hi: the upper ends.

    Returns:
        Factors of the half below and of the half above, such that nine sums in ten lie inside.
    """
    if len(lo) < _ENOUGH:
        return 1.0, 1.0
    rng = np.random.default_rng(0)
    counts = made_up_counts(rng, _DRAWS)
    rows = rng.integers(0, len(lo), counts.shape)
    error = (counts * (times.measured - times.predicted)[rows]).sum(axis=-1)
    below = together(counts * (times.predicted - lo)[rows], LEVEL_CORRELATION)
    above = together(counts * (hi - times.predicted)[rows], LEVEL_CORRELATION)
    return _factors(error, below, above)


def change_factors(before: Times, after: Times, less: Array, more: Array) -> tuple[float, float]:
    """Likewise of what a step takes after changes of its products that promise a gain.

    Args:
        before: of each product.
        after: of what would replace it.
        less: how much less that may take than predicted from the product, 90 %.
        more: how much more.

    Returns:
        Factors of the two halves of the interval of a step's time after the changes.
    """
    promising = after.predicted < before.predicted
    if promising.sum() < _ENOUGH:
        return 1.0, 1.0
    rng = np.random.default_rng(0)
    counts = made_up_counts(rng, _DRAWS)
    rows = rng.integers(0, len(less), counts.shape)
    changed = np.where(promising[rows], counts, 0)
    rows, counts, changed = (part[changed.any(axis=-1)] for part in (rows, counts, changed))
    step = [(counts * times[rows]).sum(axis=-1) for times in before]
    differs = [(changed * (b - a)[rows]).sum(axis=-1) for a, b in zip(before, after, strict=True)]
    now = [one + other for one, other in zip(step, differs, strict=True)]
    # A gain is a ratio: how wrong the predicted time before the change was does not count.
    error = step[0] / (step[1] / now[1]) - now[0]
    below = together(changed * less[rows], CHANGE_CORRELATION)
    above = together(changed * more[rows], CHANGE_CORRELATION)
    return _factors(error, below, above)


def _factors(error: Array, below: Array, above: Array) -> tuple[float, float]:
    """Of the halves of intervals, such that nine errors in ten lie inside."""
    low, high = np.quantile(error / np.where(error < 0, below, above), [_TAIL, 1 - _TAIL])
    return max(-float(low), _NARROWEST), max(float(high), _NARROWEST)
