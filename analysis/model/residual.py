"""Residual of the estimate: trees that predict log(measured / estimate).

The estimate comes from the time formula (:mod:`kernels.timemodel.estimate`). Offsets learned from
public tables (:mod:`analysis.model.offsets`) may already correct it. A vendor library may choose
different kernels for two similar shapes, so the error of the estimate may change abruptly from one
shape to the next. Trees can model such jumps.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from analysis.model.forest import Forest
from kernels.common.documents import Number, misfit
from kernels.timemodel.estimate import Array

MIN_ROWS = 48
"""Smallest number of measurements from which trees grow. Fewer measurements do not show where the
formula is wrong."""

MANY_ROWS = 10_000
"""Number of measurements above which trees are judged on a sample, and outliers are not clipped.

Among so many measurements, similar shapes usually confirm an unusually long or short time."""

_MIN_CORRELATION = 2.0  # Smallest correlation, in standard errors; noise passes about once in 40.
_MAD_TO_STD = 1.4826  # Ratio of normal values' standard deviation to their MAD.
_MAX_DEVIATIONS = 4.0  # Robust standard deviations beyond which a measurement is an outlier.
_LARGE_ERROR = 0.05  # Log ratio above which an error counts for less than its square.
_FOLDS = 5  # Number of folds of the cross-validation.
_TREES = 64  # Number of trees; twice as many would hardly reduce the error.
_TREES_OF_A_FOLD = 48  # Number of trees in a fold of many measurements, where growing takes long.

_FEATURES_OF_MANY = 0.6
"""Share of the features that a node tries if there are more than :data:`MANY_ROWS` measurements.
With this share, trees grow in about half the time, and the error hardly increases."""

_MIN_LEAF_ROWS = 2  # A leaf of one row would reproduce all of its noise.
_MIN_SPREAD = 0.005  # Smallest spread, as a log ratio: no machine repeats a time more precisely.


@dataclass(frozen=True)
class Residual:
    """Trees of one group, and their typical disagreement.

    The disagreement about a row is the standard deviation of the trees' log ratios.

    Attributes:
        trees: trees that predict log(measured / estimate).
        seen: median disagreement about rows from which the trees grew, but at least
            :data:`_MIN_SPREAD`.
        unseen: median of √(disagreement² + ``seen``²) over held-out rows.
    """

    trees: Forest
    seen: float
    unseen: float

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Predict log(measured / estimate) for each row of features.

        Returns:
            The log ratios, and the relative uncertainty of each of them:
            √(disagreement² + ``seen``²) / ``unseen``. This quotient is typically 1 for new rows,
            and ``seen`` keeps it above 0 where the trees agree by chance.

        Raises:
            UserError: if the rows do not have as many features as the trees use, because another
                version of Rooftile wrote the trees.
        """
        mean, deviation = self.trees.predict(features)
        return mean, np.hypot(deviation, self.seen) / self.unseen

    def to_json(self) -> dict[str, Any]:
        """Return the residual as an entry of calibration.json."""
        return {"trees": self.trees.to_json(), "seen": self.seen, "unseen": self.unseen}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        An entry that an older version of Rooftile wrote has features and log ratios instead of
        trees. The trees are then grown from these features and log ratios.

        Raises:
            KeyError, TypeError, ValueError: if the entry is invalid, or if its trees must be grown
                but scikit-learn is not installed.
        """
        seen, unseen = data["seen"], data["unseen"]
        # A recording may come from an untrusted source, so its numbers are checked.
        for number in (seen, unseen):
            if not isinstance(number, float) or not 0 < number < math.inf:
                raise ValueError("seen or unseen is not a finite number above 0")
        if "trees" in data:
            return cls(Forest.from_json(data["trees"]), seen, unseen)
        if not can_grow():
            raise ValueError(
                "the entry has no trees, because an older version of Rooftile wrote it; growing "
                "the trees needs scikit-learn, which is not installed"
            )
        if fault := misfit(data, {"features": [[Number()]], "log_ratios": [Number()]}):
            raise ValueError(fault)
        features, log_ratios = np.array(data["features"]), np.array(data["log_ratios"])
        return cls(_grow(features, log_ratios), seen, unseen)


def can_grow() -> bool:
    """Return True if scikit-learn is installed. Growing trees needs it, but predicting does not."""
    return importlib.util.find_spec("sklearn") is not None


def fit_residual(
    features: Array, log_ratios: Array, shrunk: bool = False, part_of: int | None = None
) -> Residual | None:
    """Grow trees from measured cases, and return them if they help to predict held-out cases.

    The result is None if the trees do not help, if there are fewer than :data:`MIN_ROWS` cases, or
    if scikit-learn is not installed.

    Args:
        features: array of shape (measured cases, features).
        log_ratios: log(measured / estimate) of each case.
        shrunk: False to return the trees if their predictions of held-out cases correlate with the
            log ratios more than noise would. True to shrink all predictions of the trees by the
            factor from 0 to 1 with which held-out predictions fit best, and to return the trees
            unless this factor is 0. Callers pass True if offsets from public tables already correct
            the estimate, because a few hundred cases then cannot show whether trees help.
        part_of: number of cases in the whole group if the given cases are only the training cases
            of a fold, otherwise None. This number then decides whether the group has more than
            :data:`MANY_ROWS` measurements.
    """
    count = len(log_ratios)
    if count < MIN_ROWS or not can_grow():
        return None
    # 1. Predict held-out rows. To decide only whether to keep the trees, without shrinking them, a
    #    fifth of the trees is enough.
    judging_trees = _TREES if shrunk else _TREES // _FOLDS
    final_trees = _TREES
    share_of_features = 1.0
    cases_of_group = count if part_of is None else part_of
    if cases_of_group > MANY_ROWS:
        if part_of is not None:
            final_trees = _TREES_OF_A_FOLD
        share_of_features = _FEATURES_OF_MANY
        sample = np.random.default_rng(0).permutation(count)[:MANY_ROWS]
        judged_rows, training_rows = np.split(sample, [len(sample) // _FOLDS])
        judging_forest = _grow(
            features[training_rows], log_ratios[training_rows], judging_trees, share_of_features
        )
        predicted, deviation = judging_forest.predict(features[judged_rows])
    else:
        judged_rows = np.arange(count)
        # A first cross-validation finds outliers. They are clipped before the second one.
        first_predicted, _ = _predict_held_out(features, log_ratios, judging_trees)
        log_ratios = _clip_outliers(log_ratios, first_predicted)
        predicted, deviation = _predict_held_out(features, log_ratios, judging_trees)
    # 2. Decide whether to keep the trees, and by which factor to shrink their predictions.
    truth = log_ratios[judged_rows]
    if shrunk:
        factor = _best_factor(predicted, truth)
        is_kept = factor > 0
    else:
        factor = 1.0
        is_kept = _beats_noise(predicted, truth)
    if not is_kept:
        return None
    # 3. Grow the final trees from all rows, and measure their disagreement.
    forest = _grow(features, log_ratios, final_trees, share_of_features).scaled(factor)
    _, deviation_when_seen = forest.predict(features[judged_rows])
    seen = max(float(np.median(deviation_when_seen)), _MIN_SPREAD)
    unseen = float(np.median(np.hypot(factor * deviation, seen)))
    return Residual(forest, seen, unseen)


def _predict_held_out(features: Array, log_ratios: Array, trees: int) -> tuple[Array, Array]:
    """Predict each row with trees that grew from the other folds."""
    fold = np.random.default_rng(0).permutation(len(log_ratios)) % _FOLDS
    predicted, deviation = np.empty(len(log_ratios)), np.empty(len(log_ratios))
    for number in range(_FOLDS):
        held_out = fold == number
        forest = _grow(features[~held_out], log_ratios[~held_out], trees)
        predicted[held_out], deviation[held_out] = forest.predict(features[held_out])
    return predicted, deviation


def _beats_noise(predicted: Array, log_ratios: Array) -> bool:
    """Return True if held-out predictions correlate with the true log ratios more than noise would.

    Squared errors with and without trees are not compared, because outliers among a few hundred
    rows might make such a comparison reject helpful trees.
    """
    # Constant predictions have a covariance and a scale of 0. Without this minimum of the scale,
    # they would pass.
    scale = max(float(np.std(predicted) * np.std(log_ratios)), _MIN_SPREAD**2)
    covariance = np.mean((predicted - predicted.mean()) * log_ratios)
    # A correlation of n independent pairs has a standard error of 1/√n.
    return bool(covariance >= _MIN_CORRELATION / math.sqrt(len(predicted)) * scale)


def _best_factor(predicted: Array, log_ratios: Array) -> float:
    """Return the factor from 0 to 1 that makes held-out predictions fit the log ratios best.

    The factor comes from a weighted least-squares fit without a constant term. The weights make a
    large error count in proportion to its size, not to its square.
    """
    weight = 1 / np.hypot(1, (log_ratios - predicted) / _LARGE_ERROR)
    covariance = float(np.sum(weight * predicted * log_ratios))
    variance = float(np.sum(weight * predicted * predicted))
    return min(max(covariance / max(variance, _MIN_SPREAD**2), 0.0), 1.0)


def _clip_outliers(log_ratios: Array, predicted: Array) -> Array:
    """Clip log ratios that are far from both the median and their held-out predictions.

    A log ratio far from the median but near its prediction is kept, because rows with similar
    features confirm it.
    """
    median = np.median(log_ratios)
    limit = _MAX_DEVIATIONS * _robust_deviation(log_ratios - median)
    error = log_ratios - predicted
    is_outlier = np.abs(error) > _MAX_DEVIATIONS * _robust_deviation(error)
    # An outlier near the median is within the limit, so it keeps its value.
    clipped = np.clip(log_ratios, median - limit, median + limit)
    return np.where(is_outlier, clipped, log_ratios)


def _robust_deviation(errors: Array) -> float:
    return max(_MAD_TO_STD * float(np.median(np.abs(errors))), _MIN_SPREAD)


def _grow(
    features: Array, log_ratios: Array, trees: int = _TREES, share_of_features: float = 1.0
) -> Forest:
    return Forest.grown(features, log_ratios, trees, _MIN_LEAF_ROWS, share_of_features)
