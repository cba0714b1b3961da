"""Fit the model of one group to measured cases: constants, weights of public tables, then trees.

Constants and weights are the unknowns of one penalised least-squares problem. Each unknown starts
at the prior's value, and its distance from that value is penalised, as in ridge regression. The
more certain the prior is about an unknown, the larger the penalty. The prior is least certain about
the scale that all constants share, so a few measured cases mainly change this scale. With hundreds
of cases, the penalty hardly matters.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
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

_MAX_ROWS = 800
"""Maximum number of cases to which constants are fitted. With more cases, a fit would take seconds
longer, and the error would hardly change."""

_TOLERANCE = 1e-4
"""Tolerance of a fit. The fit ends when the relative change of the cost, the relative change of the
unknowns or the scaled gradient falls below this value (``ftol``, ``xtol`` and ``gtol`` of SciPy).

With SciPy's default of 1e-8, many fits move along valleys of the cost until they reach the maximum
number of evaluations. Such fits take longer, and hardly change held-out errors."""

_STEP = 1e-7  # Step of the finite differences, on the constants' fit scales.
_WEIGHT_SPREAD = 0.2  # Standard deviation of a collection's weight around the prior's weight.
_MIN_ROWS_FOR_MISFIT = 40  # Smallest number of cases from which the misfit is estimated.
_CLEARLY_LESS = 0.7  # A fit is repeated if its misfit is at most this share of the prior's misfit.
_LEAST_MISFIT = 0.01  # Smallest assumed misfit, as a log ratio.
_MAD_TO_STD = 1.48  # Ratio of normal values' standard deviation to their MAD.
_WEIGHTS = (-0.5, 1.5)  # Bounds of a collection's weight.
_OUTLIER = 0.5  # Multiple of the misfit beyond which errors count for less than their square.
_FREE = Spread(scale=10.0, shape=0.1, constants=5.0)
"""Spread that hardly constrains constants, for fits to many cases without a prior."""

_DIRECTION = np.array([-1.0 if n in RATES else 1.0 if n in DURATIONS else 0.0 for n in BOUNDS])
"""Change of each constant, on its fit scale, if the whole machine is slower by a factor of e.

The fit scale of rates and durations is logarithmic, so they change by −1 and 1."""


class Fitted(NamedTuple):
    """Result of a fit.

    The fields are the arguments of :func:`analysis.model.corrected.corrected_estimate` that follow
    ``inputs``, in the same order.
    """

    constants: Constants
    residual: Residual | None
    offsets: Offsets | None = None


def fit_group(
    machine: Machine,
    query: Query,
    seconds: Array,
    algorithms: NDArray[Any],
    prior: Prior,
    part_of: int | None = None,
) -> Fitted:
    """Update a prior with measured cases: fit constants and weights, then grow trees.

    The trees are kept only if they help to predict held-out cases
    (:func:`analysis.model.residual.fit_residual`). No trees grow for a hand-written kernel with
    known tiles, because such a kernel does not change from shape to shape.

    Cases computed by an algorithm that the formula does not describe, such as an FFT, are not used
    to fit constants and weights, but trees also grow from such cases.

    ``part_of`` is the number of all cases of the group if the given cases are only the training
    cases of a fold, otherwise None.
    """
    if not len(seconds):
        return unmeasured(prior)
    # 1. Draw a sample of the cases whose algorithm the formula describes or which is unknown.
    describable = np.flatnonzero([name in ("", *ALGORITHMS) for name in algorithms])
    sample = np.random.default_rng(0).permutation(describable)[:_MAX_ROWS]
    constants = prior.fit.constants
    offsets = prior.fit.offsets  # None if and only if the prior has no collections
    same_machine = prior.same_machine(machine)
    estimates = None
    if prior.collections:
        estimates = CollectionEstimates.from_trees(
            prior.collections, Inputs.from_query(machine, query)
        )
    # 2. Fit the constants to the sample, together with the weights of public tables.
    if len(sample):
        sample_inputs = Inputs.from_query(machine, query.take(sample), algorithms[sample])
        # Without public tables, no weights are fitted and all cases count the same.
        regressors = np.empty((len(sample), 0))
        sureness = np.ones(len(sample))
        prior_weights: list[float] = []
        if estimates is not None and offsets is not None:
            sample_estimates = estimates.take(sample)
            regressors = sample_estimates.regressors(same_machine)
            prior_weights = Offsets.weights_by_column(same_machine, prior.weights)
            # The fit weighs all errors alike. Rows whose prior spread is larger than the misfit are
            # less certain, so their errors are scaled down.
            sureness = prior.spread.misfit / prior.fit.spreads(offsets.spread(sample_estimates))
        rows = _FitRows(sample_inputs, seconds[sample], regressors, sureness)
        constants, weights = _solve(rows, constants, prior_weights, prior.spread)
        if estimates is not None:
            offsets = Offsets.from_regression(prior.collections, same_machine, weights)
    # 3. Grow trees from the remaining errors. The trees must not see the algorithms, because these
    #    are unknown for a prediction.
    inputs = Inputs.from_query(machine, query)
    if len(seconds) < MIN_RESIDUAL_ROWS or inputs.tiles is not None:
        return Fitted(constants, None, offsets)
    guess = inputs.estimate(constants)
    log_ratios = np.log(seconds / guess.time)
    if offsets is not None and estimates is not None:
        log_ratios = log_ratios - offsets.combined_offsets(estimates)
    columns = None if estimates is None else estimates.columns
    features = inputs.features(constants, guess, columns)
    residual = fit_residual(features, log_ratios, shrunk=bool(prior.collections), part_of=part_of)
    return Fitted(constants, residual, offsets)


def unmeasured(prior: Prior) -> Fitted:
    """Return the prior's constants and offsets, without trees."""
    return Fitted(prior.fit.constants, None, prior.fit.offsets)


def fit_collection(
    machine: Machine,
    source: str,
    gemms: Sequence[Gemm],
    seconds: Array,
    settings: TreeSettings = WHOLE,
) -> CollectionTrees:
    """Fit constants to a sample of a collection's GEMMs, and grow trees from all of its GEMMs.

    All GEMMs must have the same dtype. A good fit needs hundreds of GEMMs. Their times are warm:
    operands that fit into the last-level cache were already in it.
    """
    query = Query.plain(gemms, LIBRARY, warm=True)
    sample = np.random.default_rng(0).permutation(len(gemms))[:_MAX_ROWS]
    start, _ = foreign_constants(machine, gemms[0].dtype)
    constants = fit_constants(
        Inputs.from_query(machine, query.take(sample)), seconds[sample], start
    )
    return CollectionTrees.grown(machine, source, gemms, seconds, constants, settings)


def fit_constants(inputs: Inputs, seconds: Array, start: Constants) -> Constants:
    """Fit constants, within their bounds, to measured times by robust least squares of log ratios.

    A good fit needs hundreds of cases, because hardly anything keeps the constants near ``start``.
    """
    no_regressors = np.empty((len(seconds), 0))
    rows = _FitRows(inputs, seconds, no_regressors, np.ones(len(seconds)))
    constants, _ = _solve(rows, start, [], _FREE)
    return constants


class _FitRows(NamedTuple):
    """Measured cases of one group, to which constants and weights are fitted.

    Attributes:
        regressors: matrix whose product with the collections' weights is the offset of each case.
        sureness: factor by which the fit multiplies each case's error. It is 1 without public
            tables, and smaller where the trees of public tables disagree more.
    """

    inputs: Inputs
    seconds: Array
    regressors: Array
    sureness: Array

    def misfit(self, constants: Constants, weights: Sequence[float]) -> float:
        """Estimate the standard deviation of a fit's errors from their median absolute value.

        Errors are log(predicted / measured), each multiplied by the case's sureness.
        """
        log_ratios = np.log(self.inputs.estimate(constants).time / self.seconds)
        log_ratios = log_ratios + self.regressors @ np.array(weights)
        return _MAD_TO_STD * float(np.median(np.abs(self.sureness * log_ratios)))


def _solve(
    rows: _FitRows, start: Constants, prior_weights: Sequence[float], spread: Spread
) -> tuple[Constants, Sequence[float]]:
    """Fit constants, and weights of public tables, to measured cases."""
    constants, weights = _solve_with(spread.misfit, rows, start, prior_weights, spread)
    if len(rows.seconds) < _MIN_ROWS_FOR_MISFIT:
        return constants, weights
    # If the formula fits the cases clearly better than the prior expects, each case contains more
    # information about the constants. A second fit with the smaller misfit gives the prior less
    # weight.
    misfit = max(rows.misfit(constants, weights), _LEAST_MISFIT)
    if misfit > _CLEARLY_LESS * spread.misfit:
        return constants, weights
    return _solve_with(misfit, rows, start, prior_weights, spread)


def _solve_with(
    misfit: float, rows: _FitRows, start: Constants, prior_weights: Sequence[float], spread: Spread
) -> tuple[Constants, Sequence[float]]:
    """Solve the least-squares problem of :func:`_solve`, given the expected misfit.

    ``misfit`` is the expected standard deviation of the log ratios that remain with the best
    constants. The larger it is, the more weight the prior has.
    """
    inputs, seconds, regressors, sureness = rows
    # 1. The unknowns are the constants on their fit scales, then the weights of public tables. The
    #    rows of the matrix ``penalty`` penalise the distance of the unknowns from the prior.
    names = list(BOUNDS)
    count = len(names)
    weight_count = regressors.shape[1]
    start_numbers = [to_fit_scale(name, getattr(start, name)) for name in names]
    prior_unknowns = np.array([*start_numbers, *prior_weights])
    penalty = misfit * linalg.block_diag(
        _precision_root(spread), np.eye(weight_count) / _WEIGHT_SPREAD
    )
    bounds = physical_bounds(inputs.machine)
    limits = [[to_fit_scale(name, bound) for bound in bounds[name]] for name in names]
    limits += [list(_WEIGHTS)] * weight_count
    low, high = np.array(limits).T

    # 2. The residuals are the errors of the log times, then the penalties.
    def as_constants(values: Iterable[Any]) -> Constants:
        pairs = zip(names, values, strict=True)
        return Constants(**{name: from_fit_scale(name, value) for name, value in pairs})

    def residuals(unknowns: Array) -> Array:
        guess = inputs.estimate(as_constants(unknowns[:count])).time
        errors = np.log(guess / seconds) + regressors @ unknowns[count:]
        return np.concatenate([sureness * errors, penalty @ (unknowns - prior_unknowns)])

    def jacobian(unknowns: Array) -> Array:
        # A step this small does not change which tile is fastest for a case. The tiles are
        # therefore searched once, and not once for each constant.
        numbers = unknowns[:count]
        settled = inputs.settled(inputs.estimate(as_constants(numbers)))
        # The first set of constants is unchanged, and each further set has one constant changed.
        # The estimate takes an array of shape (sets, 1) for each constant, where the second axis
        # is that of the cases.
        moved = np.vstack([numbers, numbers + _STEP * np.eye(count)]).T[:, :, np.newaxis]
        log_time = np.log(settled.estimate(as_constants(moved)).time)
        constant_slopes = (log_time[1:] - log_time[0]).T / _STEP
        error_slopes = sureness[:, np.newaxis] * np.hstack([constant_slopes, regressors])
        return np.vstack([error_slopes, penalty])

    # 3. Solve. SciPy refuses to start on a bound, so the start is kept 1e-6 inside the bounds.
    inside = np.clip(prior_unknowns, low + 1e-6, high - 1e-6)
    with _one_blas_thread():
        solved = least_squares(
            residuals,
            inside,
            jacobian,
            bounds=(low, high),
            loss="soft_l1",
            f_scale=_OUTLIER * misfit,
            ftol=_TOLERANCE,
            xtol=_TOLERANCE,
            gtol=_TOLERANCE,
            max_nfev=60,
        )
    constants = as_constants([float(value) for value in solved.x[:count]])
    # The conversion from fit scales returns NumPy scalars; to_json converts them to plain floats.
    return Constants(**constants.to_json()), solved.x[count:].tolist()


def _precision_root(spread: Spread) -> NDArray[np.float64]:
    """Return the square root of the constants' inverse covariance matrix under the prior.

    The constants deviate from the prior for two reasons: the error of the shared scale, which moves
    them along :data:`_DIRECTION`, and a separate error of each constant. The returned matrix turns
    the deviations into independent numbers with a standard deviation of 1.
    """
    # Along the direction of the scale, both variances add up. Perpendicular to it, only the
    # separate deviations remain.
    size = np.linalg.norm(_DIRECTION)
    projection = np.outer(_DIRECTION, _DIRECTION) / size**2
    root_along = 1 / np.hypot(spread.constants, size * spread.scale)
    root_perpendicular = 1 / spread.constants
    root: NDArray[np.float64] = np.eye(len(BOUNDS)) * root_perpendicular
    return root + projection * (root_along - root_perpendicular)


def _one_blas_thread() -> AbstractContextManager[object]:
    """Return a context that limits BLAS to one thread, or does nothing without threadpoolctl.

    Each step of a fit decomposes a matrix with few columns. For such a matrix, several threads are
    not faster than one, and they are much slower if another process uses one of their cores.
    """
    if importlib.util.find_spec("threadpoolctl") is None:
        return nullcontext()
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
