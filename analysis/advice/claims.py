"""Expected gains that stay valid when only large gains are shown.

A report shows only the measured gains that look large, so the errors of the shown gains are biased.
On simulated machines, intervals that contain 95% of all gains contain only 89–93% of the shown ones
(results/accuracy/claims.txt). This module therefore computes the expectation and the interval
of a gain from its measurement *and* from the distribution of gains on the machine. Such a statement
holds under any selection that is based on the measurements (Dawid, "Selection paradoxes of Bayesian
inference", 1994).

The distribution of gains is a mixture, after Stephens, "False discovery rates: a new deal",
Biostatistics 18, 2017. Its parts are half-normal densities on either side of zero gain, with widths
of 0.25–64%, and normal densities around gains of 1–16%, because the measured changes were chosen to
gain. The shares of the parts are fitted to all measured gains by maximum likelihood.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WIDTHS = 0.0025 * 2.0 ** np.arange(9)
_CENTRES = 0.01 * 2.0 ** np.arange(5)
_PSEUDO = 0.1  # pseudo-observations of each part, added to the measured ones
_STEPS = 300  # maximum number of iterations that fit the shares
_LEAST_ERROR = 2e-4  # smallest error of a log ratio, so that the grid resolves it
_CUT = 1  # blocks of a process that are trimmed at either end
_DEGREES = 10  # maximum degrees of freedom of an error that is estimated from many pairs


@dataclass(frozen=True)
class MeasuredRatio:
    """A measured time ratio as a logarithm, with its standard error.

    The error follows Student's distribution with ``degrees`` degrees of freedom.
    """

    log_ratio: float
    error: float
    degrees: float


@dataclass(frozen=True)
class ExpectedRatio:
    """The value that should be expected of a time ratio, with its 95% interval."""

    ratio: float
    lo: float
    hi: float


def from_processes(
    pairs: Sequence[Sequence[Sequence[float]]], between: Sequence[float], cases: Sequence[int]
) -> list[MeasuredRatio]:
    """Estimate the time ratio of each pair of cases from blocks of samples of several processes.

    All samples of a process share an error, which shows only in how far the means of the processes
    lie apart. One pair says little about this error, so it is pooled over all pairs, beyond the
    scatter of their blocks. It is also pooled with the deviation that the run found by re-timing
    cases. The run did that minutes later, so its figure includes changes that are too slow to show
    between two consecutive processes.

    Args:
        pairs: for each pair and each of its two or more processes, the log ratios of its blocks.
        between: for each pair, the standard deviation of a log time between processes, as its run
            found it.
        cases: for each pair, the number of cases that this standard deviation comes from.

    Returns:
        One ratio per pair, with its error. The ratio is the mean over processes of the mean of
        their blocks, without each process's smallest and largest block.
    """
    if not pairs:
        return []
    # 1. The squared error of each pair's mean, as the scatter of its blocks gives it. A few
    #    blocks say little about their own scatter, so it is averaged with the typical pair's.
    means = [[float(np.mean(_trimmed(blocks))) for blocks in pair] for pair in pairs]
    process_counts = np.array([len(pair) for pair in pairs])
    process_errors = [np.mean([_squared_error(blocks) for blocks in pair]) for pair in pairs]
    block_scatter = np.array(process_errors) / process_counts
    block_scatter = (block_scatter + np.median(block_scatter)) / 2
    # 2. The same squared error from how far the means of the processes lie apart. It contains
    #    the error that the samples of a process share.
    process_scatter = np.array(
        [np.var(pair_means, ddof=1) / len(pair_means) for pair_means in means]
    )
    # 3. The shared error according to the runs; a ratio has the errors of two log times. This
    #    estimate counts as ``weight`` further pairs.
    run_error = 2 * np.square(between) / process_counts
    weight = float(np.mean(cases))
    # 4. Pool both estimates of the shared error over all pairs, and add it to each pair's scatter.
    #    The estimate of the shared error may be below 0 by chance.
    shared_error = (np.sum(process_scatter - block_scatter) + weight * np.mean(run_error)) / (
        len(pairs) + weight
    )
    degrees = min(len(pairs) + weight, _DEGREES)
    errors = np.sqrt(block_scatter + max(shared_error, 0.0))
    return [
        MeasuredRatio(float(np.mean(pair_means)), float(error), degrees)
        for pair_means, error in zip(means, errors, strict=True)
    ]


def _trimmed(blocks: Sequence[float]) -> Sequence[float]:
    """Return the blocks without the smallest and the largest."""
    return sorted(blocks)[_CUT : len(blocks) - _CUT]


def _squared_error(blocks: Sequence[float]) -> float:
    """Return the squared standard error of the mean without the smallest and the largest block.

    The formula is that of Yuen, "The two-sample trimmed t for unequal population variances" (1974).
    """
    n = len(blocks)
    trimmed = _trimmed(blocks)
    # Both extremes take the value that is next to them in order of size.
    winsorized = np.clip(blocks, trimmed[0], trimmed[-1])
    squared = float(np.var(winsorized, ddof=1)) / ((1 - 2 * _CUT / n) ** 2 * n)
    return max(squared, _LEAST_ERROR**2)


def expect(measured: Sequence[MeasuredRatio]) -> list[ExpectedRatio]:
    """Return the expected value of each measured ratio. All ratios come from one machine."""
    if not measured:
        return []
    # 1. The likelihood of each measurement (rows) at each true log ratio of the grid (columns).
    grid, parts = _grid_and_parts()
    likelihood = np.array([_likelihood(ratio, grid) for ratio in measured])
    # 2. The distribution of true log ratios on this machine, fitted to all measurements.
    prior = _fit_shares(likelihood @ parts.T) @ parts
    # 3. The distribution of each true log ratio, given its measurement.
    posterior = likelihood * prior
    posterior /= posterior.sum(axis=1, keepdims=True)
    # 4. Its mean, and the 95% interval between two of its quantiles.
    ratios = np.exp(grid)
    expected = []
    for probabilities in posterior:
        cumulative = probabilities.cumsum()
        lo = float(np.exp(np.interp(0.025, cumulative, grid)))
        hi = float(np.exp(np.interp(0.975, cumulative, grid)))
        expected.append(ExpectedRatio(float(probabilities @ ratios), lo, hi))
    return expected


def _likelihood(measured: MeasuredRatio, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the likelihood of a measurement for each true log ratio of the grid."""
    error = max(measured.error, _LEAST_ERROR)
    squares = ((measured.log_ratio - grid) / error) ** 2
    # Student's density, without a factor that is the same for all parts of the mixture.
    return np.asarray((1 + squares / measured.degrees) ** (-(measured.degrees + 1) / 2))


def _fit_shares(densities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the shares of the mixture's parts that make the measurements most likely.

    The fit is by expectation–maximisation, starting from equal shares.

    Args:
        densities: density of each measurement (rows) under each part (columns).
    """
    parts = densities.shape[1]
    shares = np.full(parts, 1 / parts)
    for _ in range(_STEPS):
        # The probability that each measurement is of each part. A measurement far from all parts
        # has a density of 0 everywhere, which must not become a division by 0.
        membership = densities * shares
        membership /= np.maximum(membership.sum(axis=1, keepdims=True), 1e-300)
        counts = membership.sum(axis=0) + _PSEUDO
        new_shares = counts / counts.sum()
        if np.abs(new_shares - shares).max() < 1e-5:
            break
        shares = new_shares
    return shares


@functools.cache
def _grid_and_parts() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a grid of log ratios, finer near 0, and the probabilities of each part on the grid.

    The probabilities have one row per part and one column per grid point.
    """
    # The grid reaches from −2.5 to 2.5. Its points are 1e-5 apart near 0, and 0.05 at the ends.
    positive = np.sinh(np.linspace(0, math.asinh(2.5 / 5e-4), 500)) * 5e-4
    grid = np.concatenate([-positive[:0:-1], positive])
    spacing = np.gradient(grid)
    weights = []
    for side in (1, -1):
        for width in _WIDTHS:
            inside = np.where(side * grid >= 0, 1.0, 0.0)
            inside[len(positive) - 1] = 0.5  # log ratio 0 belongs to both sides
            weights.append(inside * np.exp(-0.5 * (grid / width) ** 2) * spacing)
    # A density around a gain is half as wide as the gain is large.
    weights += [
        np.exp(-0.5 * ((grid - centre) / (centre / 2)) ** 2) * spacing for centre in _CENTRES
    ]
    return grid, np.array([weight / weight.sum() for weight in weights])
