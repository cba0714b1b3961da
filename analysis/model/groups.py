"""Kinds of shapes whose predictions are more or less certain than others, and by how much.

Nine in ten of all shapes lie inside an interval, but not nine in ten of each kind: few shapes of
public tables have a small N, and none has a misaligned one. Both ends of an interval are therefore
widened or narrowed by kind, as the errors of held-out collections require (group-conditional
conformal intervals).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.problem import WIDE_BYTES, Problem
from kernels.timemodel.estimate import Array, priced_alignment

NARROW_N = 32
"""Shapes with an N below this are narrow. No aligned GEMM of a public table has so small an N."""

VOCABULARY_N = 32_768
"""Shapes with an N from this value on are projections to a vocabulary."""

FEW_ROWS = 16
"""Shapes with an M below this belong to decode steps; they do not fill the smallest tile."""

_PRIOR_WIDER = 0.5  # collections that the common width counts as if a kind needs a wider one
_PRIOR_NARROWER = 4.0  # the same if it needs a narrower one; a third framework may differ more
_FEWEST = 20  # shapes of a kind; a collection with fewer says nothing about it
_BOUNDS = (0.5, 4.0)  # bounds of a factor
_TAIL = 0.05


def shape_group(problem: Problem) -> str:
    """Name the kind of a shape by its N and by whether M is small, such as ``aligned, few M``."""
    gemm = problem.implied_gemm
    if priced_alignment(problem) < WIDE_BYTES:
        kind = "misaligned"
    elif gemm.n < NARROW_N:
        kind = "narrow"
    else:
        kind = "vocabulary" if gemm.n >= VOCABULARY_N else "aligned"
    return f"{kind}, few M" if gemm.m < FEW_ROWS else kind


class GroupErrors(NamedTuple):
    """Errors of one collection, and the kind of each shape.

    ``relative`` has the log ratios as multiples of the half of the interval on their side. They are
    negative where the measured time is below the prediction.
    """

    relative: Array
    groups: NDArray[np.object_]


def group_factors(collections: Sequence[GroupErrors]) -> dict[str, tuple[float, float]]:
    """Compute the factors of an interval's two ends for each kind of shape in some collections.

    Each collection counts the same. A wider interval is believed sooner than a narrower one. In a
    leave-one-out test over the public tables, this keeps all GPUs and nearly all kinds above 80%.

    Args:
        collections: errors of predictions that had not seen the collections.
    """
    factors = {}
    groups = {str(name) for collection in collections for name in np.unique(collection.groups)}
    for group in sorted(groups):
        # 1. Find the ends between which nine in ten errors of this kind lie.
        of_group = [collection.relative[collection.groups == group] for collection in collections]
        errors = [relative for relative in of_group if len(relative) >= _FEWEST]
        if not errors:
            continue
        weights = [np.full(len(relative), 1 / len(relative)) for relative in errors]
        low, high = np.quantile(
            np.concatenate(errors),
            [_TAIL, 1 - _TAIL],
            weights=np.concatenate(weights),
            method="inverted_cdf",
        )
        # 2. Errors are multiples of the common interval's halves, so these ends are the factors
        #    that the kind requires. The fewer collections show them, the closer they move to 1.
        required = np.clip([-low, high], *_BOUNDS)
        prior_weight = np.where(required > 1, _PRIOR_WIDER, _PRIOR_NARROWER)
        below, above = required ** (len(errors) / (len(errors) + prior_weight))
        factors[group] = (float(below), float(above))
    return factors


def factors_of(
    problems: Sequence[Problem], factors: Mapping[str, tuple[float, float]]
) -> tuple[Array, Array]:
    """Return the factors of the lower and the upper end for each problem, 1 where none is known."""
    if not factors:
        return np.ones(len(problems)), np.ones(len(problems))
    pairs = [factors.get(shape_group(problem), (1.0, 1.0)) for problem in problems]
    below, above = np.array(pairs).reshape(-1, 2).T  # also without problems
    return below, above
