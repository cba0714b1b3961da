"""What a gain is worth once it is shown: estimates that hold for the claims that were selected.

Of many measured gains only those are shown that look large. Their errors are not fair: on made-up
machines, intervals that hold 95 % of all gains hold 89 to 93 % of those shown
(tests/recordings/claims.txt). What is claimed here is a gain's expectation and interval given its
measurement *and* how gains are distributed on this machine. Such a statement is true of any
selection by the measurements (Dawid, "Selection paradoxes of Bayesian inference", 1994).

The distribution is a mixture whose shares are fitted to all measured gains by maximum likelihood
(after Stephens, "False discovery rates: a new deal", Biostatistics 18, 2017): of half-normal
densities to either side of no gain at all, of widths from 0.25 to 64 %, and of normal densities
about gains of 1 to 16 %, because what is measured was chosen to gain.
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
_PSEUDO = 0.1  # observations of each part, beside those that are measured
_STEPS = 300  # of fitting the shares, at most
_LEAST_ERROR = 2e-4  # of a log ratio, so that the grid resolves it
_CUT = 1  # blocks of a process left out on either side
_DEGREES = 10  # of freedom of an error that many pairs tell


@dataclass(frozen=True)
class MeasuredRatio:
    """The logarithm of a measured time ratio, its standard error, and how well that is known.

    The error is of Student's distribution with so many ``degrees`` of freedom.
    """

    log_ratio: float
    error: float
    degrees: float


@dataclass(frozen=True)
class ExpectedRatio:
    """A time ratio as it should be expected, and its 95 % interval."""

    ratio: float
    lo: float
    hi: float


def from_processes(
    pairs: Sequence[Sequence[Sequence[float]]], between: Sequence[float], cases: Sequence[int]
) -> list[MeasuredRatio]:
    """The ratios of pairs of cases, each from blocks of samples of two processes or more.

    What a process's samples share shows in how far the processes' means lie apart. From one pair
    that is hardly known; so it is judged over all pairs, beyond the scatter of their blocks,
    together with what the run found by timing cases again. That was minutes later, and shows also
    what changes more slowly than two processes one after the other can see.

    Args:
        pairs: of each pair and each process, the log ratios of its blocks.
        between: of each pair, by how much its run found that a log time differs between processes.
        cases: of each pair, by how many cases it did.

    Returns:
        For each pair the mean of its processes' means without the smallest and the largest block,
        and its error.
    """
    if not pairs:
        return []
    means = [[float(np.mean(_middle(blocks))) for blocks in pair] for pair in pairs]
    counts = np.array([len(pair) for pair in pairs])
    scatter = np.array([np.mean([_squared_error(b) for b in p]) for p in pairs]) / counts
    scatter = (scatter + np.median(scatter)) / 2  # few blocks tell little of their own scatter
    apart = np.array([np.var(of, ddof=1) / len(of) for of in means])
    known = 2 * np.square(between) / counts
    weight = float(np.mean(cases))
    more = (np.sum(apart - scatter) + weight * np.mean(known)) / (len(pairs) + weight)
    degrees = min(len(pairs) + weight, _DEGREES)
    errors = np.sqrt(scatter + max(more, 0.0))
    return [
        MeasuredRatio(float(np.mean(of)), float(error), degrees)
        for of, error in zip(means, errors, strict=True)
    ]


def _middle(blocks: Sequence[float]) -> Sequence[float]:
    return sorted(blocks)[_CUT : len(blocks) - _CUT]


def _squared_error(blocks: Sequence[float]) -> float:
    """Of the mean without the smallest and the largest: Yuen, "The two-sample trimmed t for unequal
    population variances" (1974).
    """
    n, middle = len(blocks), _middle(blocks)
    winsorized = np.clip(blocks, middle[0], middle[-1])
    return max(float(np.var(winsorized, ddof=1)) / ((1 - 2 * _CUT / n) ** 2 * n), _LEAST_ERROR**2)


def expect(measured: Sequence[MeasuredRatio]) -> list[ExpectedRatio]:
    """What is to be expected of each gain, all of which were measured on one machine."""
    if not measured:
        return []
    grid, shapes = _shapes()
    likelihood = np.array([_likelihood(m, grid) for m in measured])
    prior = _fitted(likelihood @ shapes.T) @ shapes
    posterior = likelihood * prior
    posterior /= posterior.sum(axis=1, keepdims=True)
    ratios = np.exp(grid)
    below = posterior.cumsum(axis=1)
    return [
        ExpectedRatio(
            float(row @ ratios),
            *(float(np.exp(np.interp(level, sums, grid))) for level in (0.025, 0.975)),
        )
        for row, sums in zip(posterior, below, strict=True)
    ]


def _likelihood(measured: MeasuredRatio, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """How likely the measurement is for each true log ratio of the grid."""
    error = max(measured.error, _LEAST_ERROR)
    squares = ((measured.log_ratio - grid) / error) ** 2
    # Student's density up to a factor, which is the same for all parts.
    return np.asarray((1 + squares / measured.degrees) ** (-(measured.degrees + 1) / 2))


def _fitted(densities: NDArray[np.float64]) -> NDArray[np.float64]:
    """The shares of the mixture's parts that make the measurements most likely.

    By expectation and maximisation, from equal shares.

    Args:
        densities: of each measurement (rows) under each part (columns).
    """
    parts = densities.shape[1]
    shares = np.full(parts, 1 / parts)
    for _ in range(_STEPS):
        belongs = densities * shares
        belongs /= np.maximum(belongs.sum(axis=1, keepdims=True), 1e-300)
        counts = belongs.sum(axis=0) + _PSEUDO
        renewed = counts / counts.sum()
        if np.abs(renewed - shares).max() < 1e-5:
            break
        shares = renewed
    return shares


@functools.cache
def _shapes() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A grid of log ratios, finer near none, and the probability of each by each part."""
    positive = np.sinh(np.linspace(0, math.asinh(2.5 / 5e-4), 500)) * 5e-4
    grid = np.concatenate([-positive[:0:-1], positive])
    cells = np.gradient(grid)
    parts = []
    for side in (1, -1):
        for width in _WIDTHS:
            inside = np.where(side * grid >= 0, 1.0, 0.0)
            inside[len(positive) - 1] = 0.5
            part = inside * np.exp(-0.5 * (grid / width) ** 2) * cells
            parts.append(part / part.sum())
    for centre in _CENTRES:
        part = np.exp(-0.5 * ((grid - centre) / (centre / 2)) ** 2) * cells
        parts.append(part / part.sum())
    return grid, np.array(parts)
