"""Widen or narrow intervals by kind of shape (group-conditional conformal intervals).

A 90% interval contains the times of 90% of all shapes, but this share may be lower or higher for a
single kind of shape. For example, few shapes in public tables have a small N, so shapes with a
small N are predicted less accurately. For each end of the interval, log(end / predicted) is
therefore multiplied by a factor for the kind of shape. The factors are learned from prediction
errors on held-out collections: public tables to which the predicting model was not fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.problem import WIDE_BYTES, Problem
from kernels.timemodel.estimate import Array, priced_alignment

NARROW_N = 32
"""Shapes with an N below this value are narrow."""

VOCABULARY_N = 32_768
"""Shapes with an N of at least this value are assumed to be projections to a vocabulary."""

FEW_ROWS = 16
"""Shapes with an M below this value are typical of decode steps. The smallest tiles have 8
or 16 rows."""

_PRIOR_WIDER = 0.5
"""Number of imaginary collections with a factor of 1 that are averaged with the measured
collections if these require a factor above 1."""

_PRIOR_NARROWER = 4.0
"""Number of these imaginary collections if the measured collections require a factor of at most 1.
This number is larger, because a framework that was not measured may differ from the measured
frameworks more than these differ from one another."""

_FEWEST = 20  # A collection with fewer shapes of a kind does not count for that kind.
_BOUNDS = (0.5, 4.0)  # Bounds of a factor.
_TAIL = 0.05  # Share of the errors beyond each end of a 90% interval.


def shape_group(problem: Problem) -> str:
    """Return the name of a shape's kind, such as ``aligned, few M``."""
    gemm = problem.implied_gemm
    if priced_alignment(problem) < WIDE_BYTES:
        kind = "misaligned"
    elif gemm.n < NARROW_N:
        kind = "narrow"
    elif gemm.n >= VOCABULARY_N:
        kind = "vocabulary"
    else:
        kind = "aligned"
    return f"{kind}, few M" if gemm.m < FEW_ROWS else kind


class GroupErrors(NamedTuple):
    """Errors of the predictions for one collection, and the kind of each shape.

    ``relative`` is log(measured / predicted) on a scale on which the interval's ends are −1 and 1.
    ``groups`` has the kinds (:func:`shape_group`).
    """

    relative: Array
    groups: NDArray[np.object_]


def group_factors(collections: Sequence[GroupErrors]) -> dict[str, tuple[float, float]]:
    """Compute the factors of an interval's two ends for each kind of shape.

    In a leave-one-out test over the public tables, the intervals with such factors contain at least
    80% of the times in every table. In 93 of the 100 combinations of a table and a kind of shape,
    the intervals contain at least 80% of the times (``model`` in results/accuracy/software.json).

    Args:
        collections: errors of predictions by models that were not fitted to these collections.

    Returns:
        The factors of the lower and of the upper end, by kind of shape. A kind is left out if no
        collection has at least 20 shapes of that kind.
    """
    factors = {}
    groups = {str(name) for collection in collections for name in np.unique(collection.groups)}
    for group in sorted(groups):
        # 1. Find the ends between which nine in ten errors of this kind lie.
        errors = []
        for collection in collections:
            relative = collection.relative[collection.groups == group]
            if len(relative) >= _FEWEST:
                errors.append(relative)
        if not errors:
            continue
        # The weights of a collection's shapes sum to 1.
        weights = [np.full(len(relative), 1 / len(relative)) for relative in errors]
        low, high = np.quantile(
            np.concatenate(errors),
            [_TAIL, 1 - _TAIL],
            weights=np.concatenate(weights),
            method="inverted_cdf",
        )
        # 2. Errors are multiples of the ends of the common interval, so these ends are the required
        #    factors. The fewer collections show them, the closer the factors are moved to 1.
        required = np.clip([-low, high], *_BOUNDS)
        prior_weight = np.where(required > 1, _PRIOR_WIDER, _PRIOR_NARROWER)
        # An exponent below 1 moves a factor to 1 on a logarithmic scale.
        measured_share = len(errors) / (len(errors) + prior_weight)
        below, above = required**measured_share
        factors[group] = (float(below), float(above))
    return factors


def factors_of(
    problems: Sequence[Problem], factors: Mapping[str, tuple[float, float]]
) -> tuple[Array, Array]:
    """Return the factors of the lower and the upper ends of all problems' intervals, as two arrays.

    The factors are 1 for a problem whose kind of shape is not in ``factors``.
    """
    if not factors:
        return np.ones(len(problems)), np.ones(len(problems))
    pairs = [factors.get(shape_group(problem), (1.0, 1.0)) for problem in problems]
    below, above = np.array(pairs).reshape(-1, 2).T  # the shape is (0, 2) without problems
    return below, above
