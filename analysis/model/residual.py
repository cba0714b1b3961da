"""What the formula misses: trees over the log of measured to predicted time.

A library's choice of kernel jumps from one shape to the next, by a few features at a time and not
always the same ones: trees follow that. How much they disagree tells where they are to be trusted.
They are kept only where they foresee something of rows that they have not seen.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from analysis.model.forest import Forest
from kernels.estimate import Array

MIN_ROWS = 48
"""Fewer rows say too little of where the formula is wrong."""

_SURE = 2.0  # standard errors of a correlation: of pure noise one residual in 40 is kept
_MAD = 1.4826  # standard deviations of a normal law are as many median absolute deviations
_OUTLYING = 4.0  # standard deviations, estimated so
_FOLDS = 5  # of the rows, each left out once, of a fifth of the trees
_TREES = 64  # twice as many are better by a hundredth of the error
_LEAF = 2  # rows at least: one alone would be believed with all its noise
_MIN_SPREAD = 0.005  # of a log ratio: no machine repeats itself better


@dataclass(frozen=True)
class Residual:
    """Trees, and how far apart they are: standard deviations of the log ratio.

    ``seen`` is their disagreement about the rows that they grew from, and the least that any row
    gets; ``unseen`` that about others.
    """

    trees: Forest
    seen: float
    unseen: float

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Log of measured over predicted time, and its spread, for each row of features.

        The spread is the trees' disagreement, 1 where it is as usual for a row not seen.
        """
        mean, apart = self.trees.predict(features)
        return mean, np.hypot(apart, self.seen) / self.unseen

    def to_json(self) -> dict[str, Any]:
        """For calibration.json."""
        return {"trees": self.trees.to_json(), "seen": self.seen, "unseen": self.unseen}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`; older files have what the trees grow from instead.

        Raises:
            ValueError: something is no number, or these are no trees.
        """
        seen, unseen = data["seen"], data["unseen"]
        if not all(isinstance(x, float) and 0 < x < math.inf for x in (seen, unseen)):
            raise ValueError("how far trees are apart is a number above 0")
        if "trees" in data:
            return cls(Forest.from_json(data["trees"]), seen, unseen)
        features, log_ratios = np.array(data["features"]), np.array(data["log_ratios"])
        return cls(_forest(features, log_ratios), seen, unseen)


def can_grow() -> bool:
    """Whether scikit-learn is installed, which grows the trees; what has grown needs none."""
    return importlib.util.find_spec("sklearn") is not None


def fit_residual(features: Array, log_ratios: Array) -> Residual | None:
    """Grow the trees; None where rows are few, none left out is foreseen, or nothing grows.

    Args:
        features: one row a measured shape.
        log_ratios: logs of measured over predicted time.
    """
    if len(log_ratios) < MIN_ROWS or not can_grow():
        return None
    log_ratios = _tamed(log_ratios, _left_out(features, log_ratios)[0])
    foreseen, doubt = _left_out(features, log_ratios)
    if not _foresees(foreseen, log_ratios):
        return None
    grown = _forest(features, log_ratios)
    seen = max(float(np.median(grown.predict(features)[1])), _MIN_SPREAD)
    unseen = float(np.median(np.hypot(doubt, seen)))
    return Residual(grown, seen, unseen)


def _left_out(features: Array, log_ratios: Array) -> tuple[Array, Array]:
    """What trees foresee of each row that grew from others, and how far apart they are."""
    fold = np.random.default_rng(0).permutation(len(log_ratios)) % _FOLDS
    foreseen, doubt = np.empty(len(log_ratios)), np.empty(len(log_ratios))
    for own in (fold == part for part in range(_FOLDS)):
        others = _forest(features[~own], log_ratios[~own], _TREES // _FOLDS)
        foreseen[own], doubt[own] = others.predict(features[own])
    return foreseen, doubt


def _foresees(foreseen: Array, log_ratios: Array) -> bool:
    """Does what is foreseen follow what is true more closely than noise would?

    The squared error left out would be the natural question, but of a few hundred rows with mishaps
    it is too noisy an answer: it refused trees that took a seventh off the error of all others.
    """
    level = max(float(np.std(foreseen) * np.std(log_ratios)), _MIN_SPREAD**2)
    together = np.mean((foreseen - foreseen.mean()) * log_ratios)
    return bool(together >= _SURE / math.sqrt(len(foreseen)) * level)


def _tamed(log_ratios: Array, foreseen: Array) -> Array:
    """Mishaps drawn in: what is unlike most rows and unlike those around it teaches nobody."""
    usual = np.median(log_ratios)
    most = _OUTLYING * _deviation(log_ratios - usual)
    mishap = np.abs(log_ratios - foreseen) > _OUTLYING * _deviation(log_ratios - foreseen)
    return np.where(mishap, np.clip(log_ratios, usual - most, usual + most), log_ratios)


def _deviation(errors: Array) -> float:
    """The standard deviation that the middle of the errors speaks for."""
    return max(_MAD * float(np.median(np.abs(errors))), _MIN_SPREAD)


def _forest(features: Array, log_ratios: Array, trees: int = _TREES) -> Forest:
    return Forest.grown(features, log_ratios, trees, _LEAF)
