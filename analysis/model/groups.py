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
    for group in sorted(
        {str(name) for collection in collections for name in np.unique(collection.groups)}
    ):
        parts = [collection.relative[collection.groups == group] for collection in collections]
        parts = [part for part in parts if len(part) >= _FEWEST]
        if not parts:
            continue
        weights = np.concatenate([np.full(len(part), 1 / len(part)) for part in parts])
        ends = np.quantile(
            np.concatenate(parts), [_TAIL, 1 - _TAIL], weights=weights, method="inverted_cdf"
        )
        required = np.clip([-ends[0], ends[1]], *_BOUNDS)
        prior_weight = np.where(required > 1, _PRIOR_WIDER, _PRIOR_NARROWER)
        below, above = required ** (len(parts) / (len(parts) + prior_weight))
        factors[group] = (float(below), float(above))
    return factors


def factors_of(
    problems: Sequence[Problem], factors: Mapping[str, tuple[float, float]]
) -> tuple[Array, Array]:
    """Return the factors of the lower and the upper end for each problem, 1 where none is known."""
    if not factors:
        return np.ones(len(problems)), np.ones(len(problems))
    pairs = np.array([factors.get(shape_group(p), (1.0, 1.0)) for p in problems])
    pairs = pairs.reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
