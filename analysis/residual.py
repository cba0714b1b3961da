"""What the formula misses: a Gaussian process over the log of measured to predicted time.

Its kernel is exp(−d), d the distance of two shapes' features, each with a length of its own
(Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, chapters 2, 4 and 5). It is
rough on purpose: a library's choice of kernel jumps from one shape to the next. It is kept only
where it helps on rows that it has not seen, which leave-one-out tells without fitting again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernels.estimate import Array

LEAST_ROWS = 48
"""Fewer rows say too little of where the formula is wrong."""

_HELPS = 0.95  # of the error without it, or less, on rows left out
_LENGTHS_FROM = 600  # rows: more hardly move the lengths and cost with their third power
_LENGTH = 1.5  # standard deviations of a feature: where the lengths start, and their prior's centre
_JITTER = 1e-8  # of variance, so that rows alike can be told apart
_CHUNK = 2048


@dataclass(frozen=True)
class Residual:
    """A fitted process; arrays have one row a training row or one element a feature."""

    centre: Array
    scale: Array  # of a feature: its standard deviation times its length
    variance: float
    noise: float  # variance of what no feature explains
    rows: Array  # features of the training rows, centred and scaled
    weights: Array

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Log of measured over predicted time, and its spread, for each row of features.

        The spread is 1 far from every training row and less near one: what the nearest of them
        alone leaves unknown, as a standard deviation relative to that of knowing none. The whole
        posterior would cost the square of the rows for each prediction.
        """
        scaled = ((features - self.centre) / self.scale).astype(np.float32)
        rows, weights = self.rows.astype(np.float32), self.weights.astype(np.float32)
        mean, nearest = np.empty(len(scaled)), np.empty(len(scaled))
        for start in range(0, len(scaled), _CHUNK):
            part = slice(start, start + _CHUNK)
            alike = _kernel(scaled[part], rows)
            mean[part], nearest[part] = self.variance * (alike @ weights), alike.max(axis=1)
        unknown = 1 - nearest**2 * self.variance / (self.variance + self.noise)
        return mean, np.sqrt(unknown)

    def to_json(self) -> dict[str, Any]:
        """For calibration.json."""
        return {
            "centre": self.centre.tolist(),
            "scale": self.scale.tolist(),
            "variance": self.variance,
            "noise": self.noise,
            "rows": np.round(self.rows, 4).tolist(),
            "weights": np.round(self.weights, 6).tolist(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`."""
        arrays = {name: np.array(data[name]) for name in ("centre", "scale", "rows", "weights")}
        return cls(variance=data["variance"], noise=data["noise"], **arrays)


def fit_residual(features: Array, log_ratio: Array) -> Residual | None:
    """Fit the process; None where there are few rows or it does not help on rows left out.

    Args:
        features: one row a measured shape.
        log_ratio: log of measured over predicted time.
    """
    from scipy.linalg import cho_factor, cho_solve  # a third of a second that no prediction needs

    n = len(log_ratio)
    if n < LEAST_ROWS:
        return None
    centre, spread = features.mean(axis=0), features.std(axis=0) + 1e-6
    standard = (features - centre) / spread
    some = np.random.default_rng(0).permutation(n)[:_LENGTHS_FROM]
    lengths, variance, noise = _hyperparameters(standard[some], log_ratio[some])
    rows = standard / lengths
    covariance = variance * _kernel(rows, rows)
    covariance[np.diag_indices(n)] += noise + _JITTER
    factor = cho_factor(covariance, lower=True)
    weights = cho_solve(factor, log_ratio)
    # Rasmussen & Williams, equation 5.12: the error at each row by all the others.
    left_out = weights / np.diag(cho_solve(factor, np.eye(n)))
    if np.abs(left_out).mean() > _HELPS * np.abs(log_ratio).mean():
        return None
    return Residual(centre, spread * lengths, variance, noise, rows, weights)


def _kernel(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """exp(−distance) of every row of ``a`` to every row of ``b``."""
    return np.exp(-np.sqrt(_squares(a, b)))


def _squares(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """The square of the distance of every row of ``a`` to every row of ``b``."""
    squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * (a @ b.T)
    return np.maximum(squares, 0)


def _hyperparameters(rows: Array, values: Array) -> tuple[Array, float, float]:
    """Lengths, variance and noise of the largest marginal likelihood, lengths kept reasonable."""
    from scipy.linalg import cho_factor, cho_solve
    from scipy.optimize import minimize

    n, width = rows.shape
    start = np.log([_LENGTH] * width + [values.std() + 1e-9, 0.4 * values.std() + 1e-9])

    def loss(x: Array) -> tuple[float, Array]:
        lengths, variance, noise = np.exp(x[:width]), np.exp(2 * x[width]), np.exp(2 * x[-1])
        scaled = rows / lengths
        distance = np.sqrt(_squares(scaled, scaled)) + 1e-9
        covariance = variance * np.exp(-distance)
        total = covariance + (noise + _JITTER) * np.eye(n)
        try:
            factor = cho_factor(total, lower=True)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(x)
        inverse = cho_solve(factor, np.eye(n))
        weights = inverse @ values
        slope = inverse - np.outer(weights, weights)
        pull = slope * covariance / distance
        np.fill_diagonal(pull, 0)
        # Half the sum over all pairs of pull · (difference of the feature)², as products.
        own = (scaled**2 * pull.sum(axis=1)[:, None]).sum(axis=0)
        off = x[:width] - np.log(_LENGTH)
        by_length = own - (scaled * (pull @ scaled)).sum(axis=0) + off
        gradient = [*by_length, (slope * covariance).sum(), noise * np.trace(slope)]
        determinant = np.log(np.diag(factor[0])).sum()
        return 0.5 * values @ weights + determinant + 0.5 * (off**2).sum(), np.array(gradient)

    # A line search may try what no float can hold.
    bounds = [(np.log(1e-3), np.log(1e4))] * width + [(np.log(1e-6), np.log(10.0))] * 2
    found = minimize(
        loss, np.clip(start, *np.transpose(bounds)), jac=True, method="L-BFGS-B", bounds=bounds,
        options={"maxiter": 50},
    ).x  # fmt: skip
    return np.exp(found[:width]), float(np.exp(2 * found[width])), float(np.exp(2 * found[-1]))
