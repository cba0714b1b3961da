"""Compute expected gains that stay valid even if only the large gains are shown.

A report shows only the measured gains that look large, so on average these gains are overestimated.
On simulated machines, a 95% interval that is computed only from a gain's own measurements contains
the true gain in 89–93% of the reported changes (results/accuracy/claims.txt). This module therefore
computes the expectation and the interval of a gain from its measurement *and* from the distribution
of gains on the machine. The expectation and the interval then stay valid for any selection that is
based on the measurements (Dawid, "Selection paradoxes of Bayesian inference", 1994).

The distribution of gains is a mixture, as in Stephens, "False discovery rates: a new deal",
Biostatistics 18, 2017. Most components are half-normal densities on either side of zero gain, with
scale parameters of 0.25–64%. The other components are normal densities around gains of 1–16%,
because the measured changes were chosen for their expected gains.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WIDTHS = 0.0025 * 2.0 ** np.arange(9)  # scale parameters of the half-normal components
_CENTRES = 0.01 * 2.0 ** np.arange(5)  # log gains around which the normal components lie
_PSEUDO = 0.1  # pseudo-observations that are added to those of each component
_ITERATIONS = 300  # maximum number of iterations that fit the weights
_CONVERGED = 1e-5  # the fit ends once every weight changes by less than this in one iteration
_LEAST_ERROR = 2e-4  # smallest standard error of a log ratio
_FARTHEST = 5.0  # log ratios are expected to lie between this value and its negative
_CUT = 1  # number of sorted blocks of a process that are left out at each end
# Maximum degrees of freedom of an error that is estimated from many pairs. A larger number would
# make large errors of single pairs too improbable.
_DEGREES = 10


@dataclass(frozen=True)
class MeasuredRatio:
    """Logarithm of a measured time ratio, with its standard error.

    The actual error of the logarithm, divided by ``error``, is assumed to follow Student's t
    distribution with ``degrees`` degrees of freedom.
    """

    log_ratio: float
    error: float
    degrees: float


@dataclass(frozen=True)
class ExpectedRatio:
    """Expected value of a time ratio, with its 95% interval."""

    ratio: float
    lo: float
    hi: float


def from_processes(
    pairs: Sequence[Sequence[Sequence[float]]], between: Sequence[float], cases: Sequence[int]
) -> list[MeasuredRatio]:
    """Estimate the time ratio of each re-timed pair from samples of several processes.

    All samples of a process share an error, which shows only in the differences between processes.
    One pair is not enough to estimate this error, so the estimates from all pairs are averaged. The
    average also includes an estimate from ``between``, because the processes of a pair follow each
    other too closely to show a slow drift of the machine.

    Args:
        pairs: log ratios by pair, process and block, with at least two processes per pair and three
            blocks per process.
        between: for each pair, the standard deviation of log times between processes in the pair's
            run.
        cases: for each pair, the number of cases from which this standard deviation was computed.

    Returns:
        One log ratio per pair: the mean of the trimmed means of its processes.
    """
    if not pairs:
        return []
    # 1. Estimate the squared error of each pair's mean from the scatter of its blocks. A few blocks
    #    say little about their scatter, so the estimate is averaged with the median of all pairs.
    means = [[float(np.mean(_trimmed(blocks))) for blocks in pair] for pair in pairs]
    process_counts = np.array([len(pair) for pair in pairs])
    mean_variances = [np.mean([_squared_error(blocks) for blocks in pair]) for pair in pairs]
    block_variance = np.array(mean_variances) / process_counts
    block_variance = (block_variance + np.median(block_variance)) / 2
    # 2. Estimate the same squared error from the scatter of the processes' means, which includes
    #    the error that all samples of a process share.
    process_variance = np.array(
        [np.var(pair_means, ddof=1) / len(pair_means) for pair_means in means]
    )
    # 3. Take the squared shared error from the runs. It is doubled, because a ratio has the errors
    #    of two log times. This estimate counts as ``weight`` further pairs.
    run_variance = 2 * np.square(between) / process_counts
    weight = float(np.mean(cases))
    # 4. Pool both estimates of the squared shared error over all pairs, and add the result to each
    #    pair's own squared error. By chance, the result may be below 0; it then counts as 0.
    shared_variance = (
        np.sum(process_variance - block_variance) + weight * np.mean(run_variance)
    ) / (len(pairs) + weight)
    degrees = min(len(pairs) + weight, _DEGREES)
    errors = np.sqrt(block_variance + max(shared_variance, 0.0))
    return [
        MeasuredRatio(float(np.mean(pair_means)), float(error), degrees)
        for pair_means, error in zip(means, errors, strict=True)
    ]


def _trimmed(blocks: Sequence[float]) -> Sequence[float]:
    return sorted(blocks)[_CUT : len(blocks) - _CUT]


def _squared_error(blocks: Sequence[float]) -> float:
    """Return the squared standard error of the blocks' trimmed mean.

    The formula is from Wilcox, "Introduction to Robust Estimation and Hypothesis Testing".
    """
    block_count = len(blocks)
    kept_share = 1 - 2 * _CUT / block_count
    trimmed = _trimmed(blocks)
    # The smallest and the largest block are replaced by the values next to them in sorted order.
    winsorized = np.clip(blocks, trimmed[0], trimmed[-1])
    squared_error = float(np.var(winsorized, ddof=1)) / (kept_share**2 * block_count)
    return max(squared_error, _LEAST_ERROR**2)


def expect(measured: Sequence[MeasuredRatio]) -> list[ExpectedRatio]:
    """Return the expected value of each ratio, with its 95% interval.

    All ratios have to come from one machine, because one distribution is fitted to all of them.
    The true log ratios are assumed to lie between −5 and 5.
    """
    if not measured:
        return []
    # 1. Compute the likelihood of each measurement at several log ratios that may be the true one,
    #    and the densities of the components there.
    grids = [_log_ratios_around(ratio) for ratio in measured]
    likelihoods = [
        _likelihood(ratio, grid) * np.gradient(grid)
        for ratio, grid in zip(measured, grids, strict=True)
    ]
    densities = [_component_densities(grid) for grid in grids]
    # 2. Fit the distribution of true log ratios on this machine to all measurements.
    weights = _fit_weights(
        np.array([d @ likelihood for d, likelihood in zip(densities, likelihoods, strict=True)])
    )
    # 3. Compute the distribution of each true log ratio, given its measurement. Report its mean,
    #    and the 95% interval between its quantiles.
    expected = []
    for grid, likelihood, density in zip(grids, likelihoods, densities, strict=True):
        probabilities = likelihood * (weights @ density)
        probabilities /= probabilities.sum()
        # Half of the probability of a grid point lies below the point.
        cumulative = probabilities.cumsum() - probabilities / 2
        lo, hi = np.exp(np.interp((0.025, 0.975), cumulative, grid))
        expected.append(ExpectedRatio(float(probabilities @ np.exp(grid)), float(lo), float(hi)))
    return expected


def _log_ratios_around(measured: MeasuredRatio) -> NDArray[np.float64]:
    """Return increasing log ratios, which are densest around the measurement and around 0.

    One grid for all measurements would be too coarse far from 0, because even a ratio of 9 may have
    an error below 1%.
    """
    error = max(measured.error, _LEAST_ERROR)
    # The steps are 0.03 errors around the measurement, and a twentieth of the distance far from it.
    around = np.clip(measured.log_ratio + error * _sinh_spaced(0.5, 1e4), -_FARTHEST, _FARTHEST)
    return np.union1d(around, _sinh_spaced(5e-4, _FARTHEST))


@functools.cache
def _sinh_spaced(scale: float, end: float) -> NDArray[np.float64]:
    """Return 401 increasing values from ``-end`` to ``end``, which are densest around 0."""
    positive = np.sinh(np.linspace(0, math.asinh(end / scale), 201)) * scale
    # The negative half mirrors the positive one without its 0.
    return np.concatenate([-positive[:0:-1], positive])


def _likelihood(measured: MeasuredRatio, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    error = max(measured.error, _LEAST_ERROR)
    squares = ((measured.log_ratio - grid) / error) ** 2
    # Density of Student's t distribution without its constant factor, which cancels when the
    # posterior is normalised.
    return np.asarray((1 + squares / measured.degrees) ** (-(measured.degrees + 1) / 2))


def _fit_weights(densities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit the weights of the mixture's components with expectation–maximisation.

    Each component gets :data:`_PSEUDO` additional observations, so that no weight becomes 0.
    ``densities`` has one row per measurement and one column per component.
    """
    component_count = densities.shape[1]
    weights = np.full(component_count, 1 / component_count)
    for _ in range(_ITERATIONS):
        # The probability that each measurement belongs to each component.
        membership = densities * weights
        membership /= membership.sum(axis=1, keepdims=True)
        counts = membership.sum(axis=0) + _PSEUDO
        new_weights = counts / counts.sum()
        if np.abs(new_weights - weights).max() < _CONVERGED:
            break
        weights = new_weights
    return weights


def _component_densities(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the density of each component (rows) at each log ratio of ``grid`` (columns)."""
    # Log ratio 0 belongs half to the components on either side of it.
    above = np.heaviside(grid, 0.5)
    half_normals = 2 * _normal_density(grid, 0.0, _WIDTHS[:, None])
    # The standard deviation of a density around a gain is half that gain.
    around_gains = _normal_density(grid, _CENTRES[:, None], _CENTRES[:, None] / 2)
    return np.concatenate([half_normals * above, half_normals * (1 - above), around_gains])


def _normal_density(
    values: NDArray[np.float64],
    mean: float | NDArray[Any],
    deviation: NDArray[Any],
) -> NDArray[np.float64]:
    # Every command would take half a second longer to import scipy.stats for this formula.
    scaled = (values - mean) / deviation
    return np.exp(-(scaled**2) / 2) / (math.sqrt(2 * math.pi) * deviation)
