"""Kinds of shapes whose predictions are surer or less sure than others', and by how much.

Nine in ten of all shapes lie inside an interval, but not nine in ten of each kind: few public rows
have a small N, and none a misaligned one. So the ends of an interval are widened or narrowed by
kind, as the errors of held-out collections ask for (group-conditional conformal intervals).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.problem import WIDE_BYTES, Problem
from kernels.timemodel.estimate import Array, priced_alignment

NARROW_N = 32
"""An N below this is smaller than that of any public table's aligned GEMM."""

VOCABULARY_N = 32_768
"""An N from this on is a vocabulary's."""

FEW_ROWS = 16
"""An M below this is a decode step's: the smallest tile is not filled."""

_PRIOR_WIDER = 0.5  # collections that the pooled width counts as where a kind asks for more
_PRIOR_NARROWER = 4.0  # likewise where it asks for less; a third framework may differ more
_FEWEST = 20  # rows of a kind, below which a collection tells nothing about it
_BOUNDS = (0.5, 4.0)  # of a factor
_TAIL = 0.05


def shape_group(problem: Problem) -> str:
    """The kind of a shape by its N, and by whether M is small, such as ``aligned, few M``."""
    gemm = problem.implied_gemm
    if priced_alignment(problem) < WIDE_BYTES:
        kind = "misaligned"
    elif gemm.n < NARROW_N:
        kind = "narrow"
    else:
        kind = "vocabulary" if gemm.n >= VOCABULARY_N else "aligned"
    return f"{kind}, few M" if gemm.m < FEW_ROWS else kind


class GroupErrors(NamedTuple):
    """One collection's log ratios as multiples of the interval's half on their side, negative
    below the prediction, and the kind of each shape.
    """

    relative: Array
    groups: NDArray[np.object_]


def group_factors(collections: Sequence[GroupErrors]) -> dict[str, tuple[float, float]]:
    """The factors of an interval's two ends for each kind of shape that collections have.

    Each collection counts the same. A wider interval is believed sooner than a narrower one: in
    leave-one-out over the public tables, that holds all GPUs and nearly all kinds above 80%.

    Args:
        collections: errors of predictions that had not seen them.
    """
    factors = {}
    for group in sorted({str(name) for one in collections for name in np.unique(one.groups)}):
        parts = [one.relative[one.groups == group] for one in collections]
        parts = [part for part in parts if len(part) >= _FEWEST]
        if not parts:
            continue
        weights = np.concatenate([np.full(len(part), 1 / len(part)) for part in parts])
        ends = np.quantile(
            np.concatenate(parts), [_TAIL, 1 - _TAIL], weights=weights, method="inverted_cdf"
        )
        asked = np.clip([-ends[0], ends[1]], *_BOUNDS)
        assumed = np.where(asked > 1, _PRIOR_WIDER, _PRIOR_NARROWER)
        below, above = asked ** (len(parts) / (len(parts) + assumed))
        factors[group] = (float(below), float(above))
    return factors


def factors_of(
    problems: Sequence[Problem], factors: Mapping[str, tuple[float, float]]
) -> tuple[Array, Array]:
    """The factors of the lower and of the upper end for each problem; 1 where none is known."""
    if not factors:
        return np.ones(len(problems)), np.ones(len(problems))
    pairs = np.array([factors.get(shape_group(p), (1.0, 1.0)) for p in problems])
    pairs = pairs.reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
