"""One fit to some rows of a group: scale and constants, weights of public tables, then trees.

Scale, constants and weights are the unknowns of one penalised least-squares problem. Each unknown
starts at the prior's value and is pulled back to it in proportion to how certain the prior is. With
a single row, hardly more than the shared scale moves; with hundreds, the pull no longer matters.
This is ridge regression with a Gaussian prior, and its solution is the mode of the posterior.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import linalg
from scipy.optimize import least_squares

from analysis.model.features import Inputs
from analysis.model.offsets import (
    LIBRARY,
    WHOLE,
    CollectionEstimates,
    CollectionTrees,
    Offsets,
    TreeSettings,
)
from analysis.model.prior import Prior, Spread
from analysis.model.query import Query
from analysis.model.residual import MIN_ROWS as MIN_RESIDUAL_ROWS
from analysis.model.residual import Residual, fit_residual
from kernels.machine import Machine
from kernels.problem import Gemm
from kernels.timemodel.constants import (
    BOUNDS,
    DURATIONS,
    RATES,
    Constants,
    foreign_constants,
    from_fit_scale,
    physical_bounds,
    to_fit_scale,
)
from kernels.timemodel.estimate import ALGORITHMS, Array

_MAX_ROWS = 800  # rows per fit of constants; more cost seconds and change the error by 0.1 points
_STEP = 1e-7  # step of the finite differences
_WEIGHT_SPREAD = 0.2  # standard deviation of a collection's weight around the prior's
_MANY_ENOUGH = 40  # rows from which on they show how well the formula fits them
_CLEARLY_LESS = 0.7  # share of the usual misfit below which a fit is repeated
_LEAST_MISFIT = 0.01  # the smallest misfit, as a log ratio
_MAD_TO_STD = 1.48  # standard deviation of normal values over their median absolute deviation
_WEIGHTS = (-0.5, 1.5)  # bounds of a collection's weight
_OUTLIER = 0.5  # share of the misfit; log ratios beyond it count less than by their square
_FREE = Spread(scale=10.0, shape=0.1, constants=5.0)
"""Spread for constants that are fitted to many rows and judged separately; it hardly constrains
them."""

_DIRECTION = np.array([-1.0 if n in RATES else 1.0 if n in DURATIONS else 0.0 for n in BOUNDS])
"""Change of each constant, on its fit scale, if the whole machine is slower by a factor of e."""


class Fitted(NamedTuple):
    """Result of a fit, as :func:`analysis.model.corrected.corrected_estimate` takes it."""

    constants: Constants
    residual: Residual | None
    offsets: Offsets | None = None


def fit_group(
    machine: Machine,
    query: Query,
    seconds: Array,
    known: NDArray[Any],
    prior: Prior,
    part_of: int | None = None,
) -> Fitted:
    """Update a prior with measured rows: constants and weights, then trees for what these miss.

    Trees are kept only if they predict held-out rows; on top of public tables they are shrunk
    instead. Rows computed by an algorithm that the formula does not have, such as an FFT, are left
    out of the fit of the constants, but not of the trees.

    Args:
        machine: the machine on which the rows were measured.
        query: the rows, all of one group.
        seconds: their times.
        known: the algorithm by which each row was computed, empty where it is not known.
        prior: what the fit starts from and stays near.
        part_of: as in :func:`analysis.model.residual.fit_residual`.
    """
    if not len(seconds):
        return unmeasured(prior)
    # 1. Draw a sample of the rows that the formula can describe. An algorithm that is not known may
    #    be one that it has.
    describable = np.flatnonzero([name in ("", *ALGORITHMS) for name in known])
    sample = np.random.default_rng(0).permutation(describable)[:_MAX_ROWS]
    constants, _, offsets = unmeasured(prior)
    is_own = prior.is_own(machine)
    estimates = None
    if prior.collections:
        estimates = CollectionEstimates.from_trees(
            prior.collections, Inputs.from_query(machine, query)
        )
    # 2. Fit the constants to the sample, together with the weights of public tables.
    if len(sample):
        inputs = Inputs.from_query(machine, query.take(sample), known[sample])
        # If there are no public tables, no weights are fitted and all rows have the same weight.
        regressors = np.empty((len(sample), 0))
        sureness = np.ones(len(sample))
        prior_weights: list[float] = []
        if estimates is not None and offsets is not None:
            sampled = estimates.take(sample)
            regressors = sampled.regressors(is_own)
            prior_weights = Offsets.for_regression(is_own, prior.weights)
            sureness = prior.spread.misfit / prior.fit.spreads(offsets.spread(sampled))
        rows = _FitRows(inputs, seconds[sample], regressors, sureness)
        constants, weights = _solve(rows, constants, prior_weights, prior.spread)
        if estimates is not None:
            offsets = Offsets.from_regression(prior.collections, is_own, weights)
    # 3. Grow trees from what is left, unless there are too few rows or the kernel is hand-written.
    if len(seconds) < MIN_RESIDUAL_ROWS or query.configs[0].startswith("bm="):
        return Fitted(constants, None, offsets)
    # The trees must not see the algorithms, because predictions will not know them either.
    inputs = Inputs.from_query(machine, query)
    guess = inputs.estimate(constants)
    log_ratios = np.log(seconds / guess.time)
    if offsets is not None and estimates is not None:
        log_ratios = log_ratios - offsets.combined_offsets(estimates)
    columns = None if estimates is None else estimates.columns
    features = inputs.features(constants, guess, columns)
    residual = fit_residual(features, log_ratios, bool(prior.collections), part_of)
    return Fitted(constants, residual, offsets)


def unmeasured(prior: Prior) -> Fitted:
    """Return the prior's constants and offsets, which answer if nothing was measured."""
    return Fitted(prior.fit.constants, None, prior.fit.offsets)


def fit_collection(
    machine: Machine,
    source: str,
    gemms: Sequence[Gemm],
    seconds: Array,
    settings: TreeSettings = WHOLE,
) -> CollectionTrees:
    """Fit constants to a sample of a collection's rows, and grow trees from all of them.

    Args:
        machine: the machine that was measured.
        source: framework and version of the collection, in words.
        gemms: the GEMM of each row, all of one dtype.
        seconds: their times, with operands from the cache where they fit it.
        settings: number of trees, and minimum number of rows in a leaf.
    """
    query = Query.plain(gemms, LIBRARY, warm=True)
    sample = np.random.default_rng(0).permutation(len(gemms))[:_MAX_ROWS]
    start, _ = foreign_constants(machine, gemms[0].dtype)
    constants = fit_constants(
        Inputs.from_query(machine, query.take(sample)), seconds[sample], start
    )
    return CollectionTrees.grown(machine, source, gemms, seconds, constants, settings)


def fit_constants(inputs: Inputs, seconds: Array, start: Constants) -> Constants:
    """Fit constants within their bounds so that the log ratios are small; robust against outliers.

    Args:
        inputs: cases of one group. They should be many, because little holds the constants to the
            start.
        seconds: their measured times.
        start: constants to begin with.
    """
    no_regressors = np.empty((len(seconds), 0))
    rows = _FitRows(inputs, seconds, no_regressors, np.ones(len(seconds)))
    constants, _ = _solve(rows, start, [], _FREE)
    return constants


class _FitRows(NamedTuple):
    """Measured cases to fit.

    ``regressors`` has the factor of each collection's weight (columns) in each case (rows).
    ``sureness`` is the weight of each case: typically 1, and less where the trees of public tables
    disagree.
    """

    inputs: Inputs
    seconds: Array
    regressors: Array
    sureness: Array

    def misfit(self, constants: Constants, weights: Sequence[float]) -> float:
        """Estimate the standard deviation of the log ratios that a fit leaves, by their median."""
        log_ratios = np.log(self.inputs.estimate(constants).time / self.seconds)
        log_ratios = log_ratios + self.regressors @ np.array(weights)
        return _MAD_TO_STD * float(np.median(np.abs(self.sureness * log_ratios)))


def _solve(
    rows: _FitRows, start: Constants, prior_weights: Sequence[float], spread: Spread
) -> tuple[Constants, Sequence[float]]:
    """Find the constants and weights of public tables that together make the log ratios small.

    Args:
        rows: the measured cases.
        start: the prior's constants.
        prior_weights: the prior's weights, one for each column of the regressors.
        spread: how certain the prior is.
    """
    first = _solve_with(spread.misfit, rows, start, prior_weights, spread)
    if len(rows.seconds) < _MANY_ENOUGH:
        return first
    # If the formula fits the rows better than usual, the prior must hold the constants less.
    misfit = max(rows.misfit(*first), _LEAST_MISFIT)
    if misfit > _CLEARLY_LESS * spread.misfit:
        return first
    return _solve_with(misfit, rows, start, prior_weights, spread)


def _solve_with(
    misfit: float, rows: _FitRows, start: Constants, prior_weights: Sequence[float], spread: Spread
) -> tuple[Constants, Sequence[float]]:
    """Solve once, for the standard deviation ``misfit`` of the errors that the best fit leaves.

    The other arguments and the result are as in :func:`_solve`.
    """
    inputs, seconds, regressors, sureness = rows
    # 1. The unknowns are the constants on their fit scales, then the weights of public tables. The
    #    pull is a row for each unknown that penalises its distance from the prior.
    names = list(BOUNDS)
    count = len(names)
    weight_count = regressors.shape[1]
    start_numbers = [to_fit_scale(name, getattr(start, name)) for name in names]
    prior_unknowns = np.array([*start_numbers, *prior_weights])
    pull = misfit * linalg.block_diag(
        _precision_root(spread), np.eye(weight_count) / _WEIGHT_SPREAD
    )
    bounds = physical_bounds(inputs.machine)
    limits = [[to_fit_scale(name, bound) for bound in bounds[name]] for name in names]
    low, high = np.array(limits + [list(_WEIGHTS)] * weight_count).T

    # 2. The residuals are the errors of the log times, then the pull.
    def as_constants(values: Any) -> Constants:
        pairs = zip(names, values, strict=True)
        return Constants(**{name: from_fit_scale(name, value) for name, value in pairs})

    def residuals(unknowns: Array) -> Array:
        guess = inputs.estimate(as_constants(unknowns[:count])).time
        errors = np.log(guess / seconds) + regressors @ unknowns[count:]
        return np.concatenate([sureness * errors, pull @ (unknowns - prior_unknowns)])

    def slopes(unknowns: Array) -> Array:
        # A step this small moves no case to another tile, so the fastest tiles are searched for
        # once and not once per constant.
        numbers = unknowns[:count]
        settled = inputs.settled(inputs.estimate(as_constants(numbers)))
        # The first row has the constants as they are; each further row moves one of them. The
        # estimate takes an array for each constant, with another axis for the cases.
        moved = np.vstack([numbers, numbers + _STEP * np.eye(count)]).T[:, :, np.newaxis]
        log_time = np.log(settled.estimate(as_constants(moved)).time)
        constant_slopes = (log_time[1:] - log_time[0]).T / _STEP
        error_slopes = sureness[:, np.newaxis] * np.hstack([constant_slopes, regressors])
        return np.vstack([error_slopes, pull])

    # 3. Solve. The solver refuses to begin on a bound.
    inside = np.clip(prior_unknowns, low + 1e-6, high - 1e-6)
    with _one_blas_thread():
        solved = least_squares(
            residuals,
            inside,
            slopes,
            bounds=(low, high),
            loss="soft_l1",
            f_scale=_OUTLIER * misfit,
            max_nfev=60,
        )
    constants = as_constants([float(value) for value in solved.x[:count]])
    # The conversion from fit scales gives NumPy's scalars; to_json makes plain floats of them.
    return Constants(**constants.to_json()), solved.x[count:].tolist()


def _precision_root(spread: Spread) -> NDArray[np.float64]:
    """Return the matrix that makes the constants' deviations from the prior independent.

    Each independent deviation has a standard deviation of 1. The covariance of the constants'
    deviations is that of a shared scale, along :data:`_DIRECTION`, plus that of a separate
    deviation of each constant. The matrix is the square root of its inverse.
    """
    # Both parts add up along the direction of the scale. Across it, each constant only has its own
    # deviation.
    size = np.linalg.norm(_DIRECTION)
    projection = np.outer(_DIRECTION, _DIRECTION) / size**2
    root_along = 1 / np.hypot(spread.constants, size * spread.scale)
    root_across = 1 / spread.constants
    root: NDArray[np.float64] = np.eye(len(BOUNDS)) / spread.constants
    return root + projection * (root_along - root_across)


def _one_blas_thread() -> AbstractContextManager[object]:
    """Return a context within which BLAS uses one thread.

    Each step of a fit decomposes a matrix of few columns. Several threads are no faster at that
    than one, and much slower if they wait for a thread whose core another process uses.
    """
    if importlib.util.find_spec("threadpoolctl") is None:
        return nullcontext()
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
