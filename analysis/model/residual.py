"""Residual of the formula: trees that predict the log of measured over predicted time.

A library's choice of kernel jumps from one shape to the next, depending on a few features that are
not always the same. Trees can follow such jumps. Where the trees disagree, their prediction is less
certain. They are kept only if they predict held-out rows better than noise would.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from analysis.model.forest import Forest
from kernels.timemodel.estimate import Array

MIN_ROWS = 48
"""Number of rows below which no trees grow: they would say too little about where the formula is
wrong."""

MANY_ROWS = 10_000
"""Number of rows above which a part of them is enough to judge trees, and none counts as an
outlier. A row that looks like one, such as a weight whose size is a power of two and lies well in a
cache, has neighbours that agree with it."""

_MIN_CORRELATION = 2.0  # standard errors of a correlation; pure noise passes once in 40
_MAD_TO_STD = 1.4826  # standard deviation of normal values over their median absolute deviation
_MAX_DEVIATIONS = 4.0  # robust standard deviations beyond which a row is an outlier
_LARGE = 0.05  # log-ratio error from which on errors count less than by their square
_FOLDS = 5  # each row is held out once; a fold's forest has a fifth of the trees
_TREES = 64  # twice as many reduce the error by a hundredth
_TREES_OF_A_PART = 48  # for a fold of many rows, because each fold grows its own trees
_FEATURES_OF_MANY = 0.6  # share that a node tries: halves the time, costs hundredths of the error
_MIN_LEAF_ROWS = 2  # a leaf of one row would reproduce all of its noise
_MIN_SPREAD = 0.005  # log ratio; no machine repeats itself more closely


@dataclass(frozen=True)
class Residual:
    """Trees, and how much they disagree, as standard deviations of the log ratio.

    ``seen`` is the median disagreement about rows that the trees grew from. It is added in
    quadrature to the disagreement about each row. ``unseen`` is the median of that sum over
    held-out rows.
    """

    trees: Forest
    seen: float
    unseen: float

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Predict the log of measured over predicted time, and its spread, for each row.

        The spread is the trees' disagreement over its median for held-out rows, so it is typically
        1.
        """
        mean, deviation = self.trees.predict(features)
        return mean, np.hypot(deviation, self.seen) / self.unseen

    def to_json(self) -> dict[str, Any]:
        """Return the document for calibration.json."""
        return {"trees": self.trees.to_json(), "seen": self.seen, "unseen": self.unseen}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`; older files have the rows to grow the trees from instead.

        Raises:
            ValueError: if a disagreement is not a positive number, or the arrays do not form trees.
        """
        seen, unseen = data["seen"], data["unseen"]
        # A recording may come from a stranger, so its numbers are checked.
        if not all(isinstance(x, float) and 0 < x < math.inf for x in (seen, unseen)):
            raise ValueError("seen or unseen is not a number above 0")
        if "trees" in data:
            return cls(Forest.from_json(data["trees"]), seen, unseen)
        features, log_ratios = np.array(data["features"]), np.array(data["log_ratios"])
        return cls(_grow(features, log_ratios), seen, unseen)


def can_grow() -> bool:
    """Return True if scikit-learn is installed; growing trees needs it, predicting does not."""
    return importlib.util.find_spec("sklearn") is not None


def fit_residual(
    features: Array, log_ratios: Array, shrunk: bool = False, part_of: int | None = None
) -> Residual | None:
    """Grow the trees, and return them if they are worth keeping.

    The result is None if there are too few rows, if scikit-learn is missing, or if the trees
    predict held-out rows no better than noise.

    Args:
        features: one row per measured shape.
        log_ratios: logs of measured over predicted time.
        shrunk: multiply the trees' predictions by the share of them that held-out rows confirm,
            instead of keeping all of them or none. On top of public tables, a few hundred rows
            confirm so little that the choice between all and none would be a matter of luck.
        part_of: number of all rows, if the given rows are those outside one fold. It decides
            whether there are many rows, so that the trees of a fold grow in the same way as the
            trees that are kept.
    """
    count = len(log_ratios)
    if count < MIN_ROWS or not can_grow():
        return None
    # 1. Predict held-out rows.
    trees = _TREES if shrunk else _TREES // _FOLDS
    kept_trees, share_of_features = _TREES, 1.0
    if (part_of or count) > MANY_ROWS:
        if part_of:
            kept_trees = _TREES_OF_A_PART
        share_of_features = _FEATURES_OF_MANY
        sample = np.random.default_rng(0).permutation(count)[:MANY_ROWS]
        judged_rows, training_rows = np.split(sample, [len(sample) // _FOLDS])
        forest = _grow(features[training_rows], log_ratios[training_rows], trees, share_of_features)
        predicted, deviation = forest.predict(features[judged_rows])
    else:
        judged_rows = np.arange(count)
        # A first cross-validation finds outliers, which then cannot pull the second one.
        first_predicted, _ = _predict_held_out(features, log_ratios, trees)
        log_ratios = _clip_outliers(log_ratios, first_predicted)
        predicted, deviation = _predict_held_out(features, log_ratios, trees)
    # 2. Decide whether to keep the trees, and which share of their predictions.
    truth = log_ratios[judged_rows]
    confirmed = _confirmed_share(predicted, truth) if shrunk else 1.0
    if confirmed <= 0 or not (shrunk or _beats_noise(predicted, truth)):
        return None
    # 3. Grow the trees that are kept from all rows.
    forest = _grow(features, log_ratios, kept_trees, share_of_features).scaled(confirmed)
    _, deviation_when_seen = forest.predict(features[judged_rows])
    seen = max(float(np.median(deviation_when_seen)), _MIN_SPREAD)
    unseen = float(np.median(np.hypot(confirmed * deviation, seen)))
    return Residual(forest, seen, unseen)


def _predict_held_out(features: Array, log_ratios: Array, trees: int) -> tuple[Array, Array]:
    """Predict each row by trees that grew from the other folds; also return their disagreement."""
    fold = np.random.default_rng(0).permutation(len(log_ratios)) % _FOLDS
    predicted, deviation = np.empty(len(log_ratios)), np.empty(len(log_ratios))
    for number in range(_FOLDS):
        held_out = fold == number
        forest = _grow(features[~held_out], log_ratios[~held_out], trees)
        predicted[held_out], deviation[held_out] = forest.predict(features[held_out])
    return predicted, deviation


def _beats_noise(predicted: Array, log_ratios: Array) -> bool:
    """Return True if held-out predictions correlate with the truth more than noise would.

    Comparing squared errors would be more direct, but it is too noisy over a few hundred rows with
    outliers: it rejected trees that reduced the error on all other rows by a seventh.
    """
    # Without the floor, constant predictions, whose covariance and scale are 0, would pass.
    scale = max(float(np.std(predicted) * np.std(log_ratios)), _MIN_SPREAD**2)
    covariance = np.mean((predicted - predicted.mean()) * log_ratios)
    # A correlation of n independent pairs has a standard error of 1/√n.
    return bool(covariance >= _MIN_CORRELATION / math.sqrt(len(predicted)) * scale)


def _confirmed_share(predicted: Array, log_ratios: Array) -> float:
    """Return the factor from 0 to 1 that brings held-out predictions closest to the truth.

    It is a least-squares fit without a constant term, in which a large error counts by its size and
    not by its square.
    """
    weight = 1 / np.hypot(1, (log_ratios - predicted) / _LARGE)
    confirmed = float(np.sum(weight * predicted * log_ratios))
    predicted_square = float(np.sum(weight * predicted * predicted))
    return min(max(confirmed / max(predicted_square, _MIN_SPREAD**2), 0.0), 1.0)


def _clip_outliers(log_ratios: Array, predicted: Array) -> Array:
    """Clip rows that are far from both the median and their held-out prediction.

    A row that is only far from the median may be right, because rows with similar features confirm
    it through the prediction.
    """
    median = np.median(log_ratios)
    limit = _MAX_DEVIATIONS * _robust_deviation(log_ratios - median)
    error = log_ratios - predicted
    outlier = np.abs(error) > _MAX_DEVIATIONS * _robust_deviation(error)
    return np.where(outlier, np.clip(log_ratios, median - limit, median + limit), log_ratios)


def _robust_deviation(errors: Array) -> float:
    """Estimate the standard deviation from the median absolute error."""
    return max(_MAD_TO_STD * float(np.median(np.abs(errors))), _MIN_SPREAD)


def _grow(
    features: Array, log_ratios: Array, trees: int = _TREES, share_of_features: float = 1.0
) -> Forest:
    """Grow trees whose nodes try ``share_of_features`` of the features."""
    return Forest.grown(features, log_ratios, trees, _MIN_LEAF_ROWS, share_of_features)
