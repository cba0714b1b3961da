"""One fit to some rows of a group: scale and constants, weights of public tables, then trees.

All rests on one penalised least-squares problem. Each unknown starts at the prior's value and is
pulled back to it in proportion to how surely the prior knows it: with one row hardly more than the
shared scale moves, with hundreds the pull no longer counts. This is ridge regression with a
Gaussian prior: its solution is the mode of the posterior.
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

_MAX_ROWS = 800  # per fit of constants: more cost seconds and move the error by 0.1 points
_STEP = 1e-7  # of the finite differences
_WEIGHT_SPREAD = 0.2  # standard deviation of a collection's weight about the prior's
_MANY_ENOUGH = 40  # rows that tell how well the formula fits them
_CLEARLY_LESS = 0.7  # of the usual misfit, below which a fit is repeated
_LEAST_MISFIT = 0.01  # of a log ratio
_MAD_TO_STD = 1.48  # standard deviation of a normal law over its median absolute deviation
_WEIGHTS = (-0.5, 1.5)  # bounds of a collection's weight
_OUTLIER = 0.5  # of the misfit of the best constants; log ratios beyond it count less
_FREE = Spread(scale=10.0, shape=0.1, constants=5.0)
"""For constants that are fitted to many rows and judged by themselves: hardly held."""

_DIRECTION = np.array([-1.0 if n in RATES else 1.0 if n in DURATIONS else 0.0 for n in BOUNDS])
"""How each constant, on its fit scale, changes where the whole machine is slower by a factor e."""


class Fitted(NamedTuple):
    """What came of it, as :func:`analysis.model.corrected.corrected_estimate` takes it."""

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
    """Move a prior by some rows: constants and weights first, then trees to what they miss.

    Trees are kept if they predict held-out rows; on top of public tables they are shrunk instead.
    Rows computed by an algorithm that the formula does not have (an FFT) are left out of the fit of
    the constants; the trees see them.

    Args:
        machine: where the rows were measured.
        query: the rows, of one group.
        seconds: their times.
        known: the algorithm that each was computed by, empty where that is not known.
        prior: what the fit starts from and stays near.
        part_of: as in :func:`analysis.model.residual.fit_residual`.
    """
    if not len(seconds):
        return unmeasured(prior)
    modelled = np.flatnonzero([name in ("", *ALGORITHMS) for name in known])
    modelled = np.random.default_rng(0).permutation(modelled)[:_MAX_ROWS]
    constants, _, offsets = unmeasured(prior)
    estimates, is_own = None, prior.is_own(machine)
    if prior.collections:
        estimates = CollectionEstimates.from_trees(
            prior.collections, Inputs.from_query(machine, query)
        )
    if len(modelled):
        inputs = Inputs.from_query(machine, query.take(modelled), known[modelled])
        regressors, sureness = np.empty((len(modelled), 0)), np.ones(len(modelled))
        origin: list[float] = []
        if estimates is not None and offsets is not None:
            seen = estimates.take(modelled)
            regressors = seen.regressors(is_own)
            origin = Offsets.for_regression(is_own, prior.weights)
            sureness = prior.spread.misfit / prior.fit.spreads(offsets.spread(seen))
        rows = _FitRows(inputs, seconds[modelled], regressors, sureness)
        constants, weights = _solved(rows, constants, origin, prior.spread)
        if estimates is not None:
            offsets = Offsets.from_regression(prior.collections, is_own, weights)
    if len(seconds) < MIN_RESIDUAL_ROWS or query.configs[0].startswith("bm="):
        return Fitted(constants, None, offsets)
    # The trees must not be told the algorithm: no prediction will know it either.
    inputs = Inputs.from_query(machine, query)
    guess = inputs.estimate(constants)
    left = np.log(seconds / guess.time)
    if offsets is not None and estimates is not None:
        left = left - offsets.together(estimates)
    columns = None if estimates is None else estimates.columns
    features = inputs.features(constants, guess, columns)
    residual = fit_residual(features, left, bool(prior.collections), part_of)
    return Fitted(constants, residual, offsets)


def unmeasured(prior: Prior) -> Fitted:
    """The prior itself: what answers without own measurements."""
    return Fitted(prior.fit.constants, None, prior.fit.offsets)


def fit_collection(
    machine: Machine,
    source: str,
    gemms: Sequence[Gemm],
    seconds: Array,
    settings: TreeSettings = WHOLE,
) -> CollectionTrees:
    """One collection: constants fitted to a sample of its rows, and trees grown from all of them.

    Args:
        machine: what it was measured on.
        source: whose it is, in words.
        gemms: the rows' products, all of one dtype.
        seconds: their times, with operands from the cache where they fit it.
        settings: number of trees, and of rows in a leaf.
    """
    query, dtype = Query.plain(gemms, LIBRARY, warm=True), gemms[0].dtype
    sample = np.random.default_rng(0).permutation(len(gemms))[:_MAX_ROWS]
    start, _ = foreign_constants(machine, dtype)
    constants = fit_constants(
        Inputs.from_query(machine, query.take(sample)), seconds[sample], start
    )
    return CollectionTrees.grown(machine, source, gemms, seconds, constants, settings)


def fit_constants(inputs: Inputs, seconds: Array, start: Constants) -> Constants:
    """Constants within :data:`BOUNDS` that make the log ratios small; robust against outliers.

    Args:
        inputs: cases of one group; many, since little holds the constants to the start.
        seconds: their measured times.
        start: where to begin.
    """
    rows = _FitRows(inputs, seconds, np.empty((len(seconds), 0)), np.ones(len(seconds)))
    return _solved(rows, start, [], _FREE)[0]


class _FitRows(NamedTuple):
    """What a fit is made to.

    ``regressors`` is what each collection's weight (columns) is multiplied by in each case.
    ``sureness`` is what each case counts: less where a table's trees disagree, typically 1.
    """

    inputs: Inputs
    seconds: Array
    regressors: Array
    sureness: Array

    def misfit(self, constants: Constants, weights: Sequence[float]) -> float:
        """The standard deviation of the log ratios that a fit leaves, from their median."""
        left = np.log(self.inputs.estimate(constants).time / self.seconds)
        left = left + self.regressors @ np.array(weights)
        return _MAD_TO_STD * float(np.median(np.abs(self.sureness * left)))


def _solved(
    rows: _FitRows, start: Constants, origin: Sequence[float], spread: Spread
) -> tuple[Constants, Sequence[float]]:
    """Constants, and the weights of public tables, that make the log ratios small together.

    Args:
        rows: what they are fitted to.
        start: the prior's constants.
        origin: the prior's weights.
        spread: how surely the prior knows them.
    """
    first = _solved_with(spread.misfit, rows, start, origin, spread)
    if len(rows.seconds) < _MANY_ENOUGH:
        return first
    # Rows that the formula fits better than usual hold the constants less to the prior.
    misfit = max(rows.misfit(*first), _LEAST_MISFIT)
    if misfit > _CLEARLY_LESS * spread.misfit:
        return first
    return _solved_with(misfit, rows, start, origin, spread)


def _solved_with(
    misfit: float, rows: _FitRows, start: Constants, origin: Sequence[float], spread: Spread
) -> tuple[Constants, Sequence[float]]:
    """Solve once, for a given standard deviation of what the best constants leave."""
    inputs, seconds, regressors, sureness = rows
    names, count, weights = list(BOUNDS), len(BOUNDS), regressors.shape[1]
    begin = np.array([*(to_fit_scale(n, getattr(start, n)) for n in names), *origin])
    pull = misfit * linalg.block_diag(_precision_root(spread), np.eye(weights) / _WEIGHT_SPREAD)
    bounds = physical_bounds(inputs.machine)
    limits = [[to_fit_scale(name, bound) for bound in bounds[name]] for name in names]
    low, high = np.array(limits + [list(_WEIGHTS)] * weights).T

    def as_constants(values: Any) -> Constants:
        pairs = zip(names, values, strict=True)
        return Constants(**{name: from_fit_scale(name, value) for name, value in pairs})

    def residuals(x: Array) -> Array:
        guess = inputs.estimate(as_constants(x[:count])).time
        errors = np.log(guess / seconds) + regressors @ x[count:]
        return np.concatenate([sureness * errors, pull @ (x - begin)])

    def slopes(x: Array) -> Array:
        # So small a step moves no case to another tile: the fastest tiles are searched for once,
        # not once per constant.
        x = x[:count]
        settled = inputs.settled(inputs.estimate(as_constants(x)))
        # A row for each set of constants: as they are, then with one after another moved.
        moved = np.vstack([x, x + _STEP * np.eye(count)]).T[:, :, np.newaxis]
        log_time = np.log(settled.estimate(as_constants(moved)).time)
        of_constants = (log_time[1:] - log_time[0]).T / _STEP
        of_errors = sureness[:, np.newaxis] * np.hstack([of_constants, regressors])
        return np.vstack([of_errors, pull])

    # The solver refuses to begin on a bound.
    inside = np.clip(begin, low + 1e-6, high - 1e-6)
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
    constants = Constants(**{name: float(value) for name, value in constants.to_json().items()})
    return constants, solved.x[count:].tolist()


def _precision_root(spread: Spread) -> NDArray[np.float64]:
    """The matrix that makes deviations of the constants from the prior independent, each of size 1.

    Their covariance is that of a shared scale, along :data:`_DIRECTION`, and of a deviation of each
    constant; this is the square root of its inverse.
    """
    size = np.linalg.norm(_DIRECTION)
    along = np.outer(_DIRECTION, _DIRECTION) / size**2
    of_scale = 1 / np.hypot(spread.constants, size * spread.scale)
    root: NDArray[np.float64] = np.eye(len(BOUNDS)) / spread.constants
    return root + along * (of_scale - 1 / spread.constants)


def _one_blas_thread() -> AbstractContextManager[object]:
    """Within it BLAS uses one thread.

    Each step of a fit decomposes a matrix of about ten columns. Several threads do that no sooner
    than one, and far later where they wait for one of them because another process has its core.
    """
    if importlib.util.find_spec("threadpoolctl") is None:
        return nullcontext()
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
