"""One fit to some rows of a group: constants, weights of others' tables, trees to what is left."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from analysis.model.features import Inputs
from analysis.model.prior import LIBRARY, WHOLE, Growth, Offsets, Prior, Said
from analysis.model.query import Query
from analysis.model.residual import MIN_ROWS as MIN_RESIDUAL_ROWS
from analysis.model.residual import Residual, fit_residual
from kernels.constants import (
    BOUNDS,
    Constants,
    foreign_constants,
    physical_bounds,
)
from kernels.estimate import ALGORITHMS, Array
from kernels.machine import Machine
from kernels.problem import Gemm

MIN_ROWS = 12
"""A group with fewer rows keeps the shipped constants, scaled to fit."""

_MAX_ROWS = 800  # per fit of constants: more cost seconds and move the error by 0.1 points
_STEP = 1e-7  # of the finite differences
_NEAR = 0.02  # weight of staying near the shipped constants, in residuals per natural-log unit
_NEAR_THEIRS = 0.3  # likewise near others' of the machine, or of its sibling
_NEAR_WEIGHT = 0.2  # likewise of the collections' weights, per unit
_WEIGHTS = (-0.5, 1.5)  # bounds of a collection's weight
_NOISE = 0.05  # log ratios beyond this count less: outliers do not move the constants
_NOISE_LEFT = 0.02  # likewise of what others' tables leave
_LINEAR = (
    "tail",
    "partials",
    "slow",
    "misalignment",
    "repack",
    "resident",
)  # dimensionless and often 0: fitted as they are; all other constants by their logarithm


@dataclass(frozen=True)
class Way:
    """How to fit: from which constants, on top of which collections; the first is trusted most."""

    start: Constants
    priors: tuple[Prior, ...] = ()

    @classmethod
    def of(cls, machine: Machine, dtype: str, priors: tuple[Prior, ...]) -> Self:
        """On top of some collections, from the first one's constants as they are on a machine."""
        return cls(priors[0].constants_on(machine, dtype), priors)

    def own(self, machine: Machine) -> list[bool]:
        """Of each collection, whether it is of the machine itself."""
        return [prior.machine.slug == machine.slug for prior in self.priors]


class Fitted(NamedTuple):
    """What came of it, as :meth:`analysis.model.features.Inputs.predict` takes it."""

    constants: Constants
    residual: Residual | None
    offsets: Offsets | None = None


def fit_group(
    machine: Machine,
    query: Query,
    seconds: Array,
    known: NDArray[Any],
    way: Way,
    part_of: int | None = None,
) -> Fitted:
    """Fit the physical constants, then trees to what they miss, if those predict held-out rows.

    On top of others' tables, trees are shrunk instead. Rows computed by an algorithm that the
    formula does not have (an FFT) are left out of the fit of the constants; the trees see them.

    Args:
        machine: where the rows were measured.
        query: the rows, of one group.
        seconds: their times.
        known: the algorithm that each was computed by, empty where that is not known.
        way: how.
        part_of: as in :func:`analysis.model.residual.fit_residual`.
    """
    modelled = np.flatnonzero([name in ("", *ALGORITHMS) for name in known])
    modelled = np.random.default_rng(0).permutation(modelled)[:_MAX_ROWS]
    constants, _, offsets = unmeasured(machine, way)
    said, own = None, way.own(machine)
    if way.priors and len(seconds):
        said = Said.by(way.priors, Inputs.of(machine, query))
    if len(modelled):
        inputs = Inputs.of(machine, query.take(modelled), known[modelled])
        regressors = np.empty((len(modelled), 0))
        if said is not None:
            regressors = said.take(modelled).regressors(own)
        constants, weights = _solved(
            inputs, seconds[modelled], way.start, regressors, len(way.priors)
        )
        offsets = Offsets.of(way.priors, own, weights) if way.priors else None
    if len(seconds) < MIN_RESIDUAL_ROWS or query.configs[0].startswith("bm="):
        return Fitted(constants, None, offsets)
    # The trees must not be told the algorithm: no prediction will know it either.
    inputs = Inputs.of(machine, query)
    guess = inputs.estimate(constants)
    left = np.log(seconds / guess.time)
    if offsets is not None and said is not None:
        left = left - offsets.together(said)
    features = inputs.features(constants, guess, None if said is None else said.columns)
    residual = fit_residual(features, left, bool(way.priors), part_of)
    return Fitted(constants, residual, offsets)


def unmeasured(machine: Machine, way: Way) -> Fitted:
    """What others say without a row of one's own: the mean of the :func:`leaders`."""
    if not way.priors:
        return Fitted(way.start, None)
    leading = leaders(machine, [prior.machine for prior in way.priors])
    return Fitted(way.start, None, Offsets.mean(way.priors, leading))


def leaders(machine: Machine, machines: Sequence[Machine]) -> list[int]:
    """Positions of the collections that answer without a row of one's own.

    That is the first of the machine itself, else the first of each sibling.

    Args:
        machine: the one that is asked about.
        machines: whose each collection is.
    """
    slugs = [each.slug for each in machines]
    if machine.slug in slugs:
        return [slugs.index(machine.slug)]
    return [slugs.index(slug) for slug in dict.fromkeys(slugs)]


def fit_prior(
    machine: Machine,
    source: str,
    gemms: Sequence[Gemm],
    seconds: Array,
    growth: Growth = WHOLE,
) -> Prior:
    """What a collection says: constants fitted to a sample of its rows, and trees from all.

    Args:
        machine: what it was measured on.
        source: whose it is, in words.
        gemms: the rows' products, all of one dtype.
        seconds: their times, with operands from the cache where they fit it.
        growth: how many trees, of how many rows.
    """
    query, dtype = Query.plain(gemms, LIBRARY, warm=True), gemms[0].dtype
    sample = np.random.default_rng(0).permutation(len(gemms))[:_MAX_ROWS]
    start, _ = foreign_constants(machine, dtype)
    constants = fit_constants(Inputs.of(machine, query.take(sample)), seconds[sample], start)
    return Prior.grown(machine, source, gemms, seconds, constants, growth)


def fit_constants(inputs: Inputs, seconds: Array, start: Constants) -> Constants:
    """Constants within :data:`BOUNDS` that make the log ratios small; robust against outliers.

    Args:
        inputs: cases of one group.
        seconds: their measured times.
        start: where to begin, and what to stay near.
    """
    return _solved(inputs, seconds, start, np.empty((len(seconds), 0)), 0)[0]


def _solved(
    inputs: Inputs, seconds: Array, start: Constants, regressors: Array, collections: int
) -> tuple[Constants, Sequence[float]]:
    """Constants, and the weights of others' tables, that make the log ratios small together.

    Args:
        inputs: cases of one group.
        seconds: their measured times.
        start: where to begin, and what to stay near.
        regressors: what each weight (columns) is multiplied by in each case.
        collections: how many they are of; the weights begin and stay near equal parts of one.
    """
    names = list(BOUNDS) if len(seconds) >= MIN_ROWS else ["compute", "dram", "launch"]
    count, weights = len(names), regressors.shape[1]
    begin = [_to_fit_scale(name, getattr(start, name)) for name in names]
    origin = np.array([*begin, *np.full(weights, 1 / max(collections, 1))])
    near, noise = (_NEAR_THEIRS, _NOISE_LEFT) if weights else (_NEAR, _NOISE)
    pull = np.array([near] * count + [_NEAR_WEIGHT] * weights)
    bounds = physical_bounds(inputs.machine)
    limits = [[_to_fit_scale(n, bound) for bound in bounds[n]] for n in names]
    low, high = np.array(limits + [list(_WEIGHTS)] * weights).T

    def constants(x: Array) -> Constants:
        pairs = zip(names, x, strict=True)
        fitted = {name: float(_from_fit_scale(name, value)) for name, value in pairs}
        return Constants(**{**start.to_json(), **fitted})

    def varied(x: Array) -> Constants:
        """Each constant as a column: as in ``x``, then with one constant after another moved."""
        at = np.vstack([x, x + _STEP * np.eye(count)])
        moved = [_from_fit_scale(name, at[:, [i]]) for i, name in enumerate(names)]
        return Constants(**{**start.to_json(), **dict(zip(names, moved, strict=True))})

    def residuals(x: Array) -> Array:
        guess = inputs.estimate(constants(x[:count])).time
        errors = np.log(guess / seconds) + regressors @ x[count:]
        return np.concatenate([errors, pull * (x - origin)])

    def slopes(x: Array) -> Array:
        # So small a step moves no case to another tile: the fastest tiles are searched for once,
        # not once per constant.
        x = x[:count]
        settled = inputs.settled(inputs.estimate(constants(x)))
        log_time = np.log(settled.estimate(varied(x)).time)  # a row for each set of constants
        of_constants = (log_time[1:] - log_time[0]).T / _STEP
        return np.vstack([np.hstack([of_constants, regressors]), np.diag(pull)])

    # The solver refuses to begin on a bound.
    inside = np.clip(origin, low + 1e-6, high - 1e-6)
    with _one_blas_thread():
        solved = least_squares(
            residuals, inside, slopes, bounds=(low, high), loss="soft_l1", f_scale=noise,
            max_nfev=60,
        )  # fmt: skip
    return constants(solved.x[:count]), solved.x[count:].tolist()


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


def _to_fit_scale(name: str, value: float) -> float:
    """A constant on the scale on which it is fitted: its logarithm, unless it is linear."""
    return value if name in _LINEAR else float(np.log(max(value, 1e-10)))


def _from_fit_scale(name: str, value: Any) -> Any:
    """Inverse of :func:`_to_fit_scale`, for a number or an array."""
    return value if name in _LINEAR else np.exp(value)
