"""Judge the model on measurements that it has not seen, its own or others'.

Calibration rows are chosen without looking at any time; everything reported is about other rows.
Constants that were fitted on the machine under test are never used, not even to begin from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from analysis.calibrate import calibrate_query
from analysis.design import choose_rows
from analysis.heuristics import heuristic_seconds
from analysis.model import Fit, Inputs, Model, Prediction, Query
from analysis.source import Source
from kernels.constants import foreign_constants
from kernels.errors import UserError
from kernels.estimate import Array
from kernels.machine import Machine
from kernels.problem import Gemm, Problem

HOLDOUTS = ("rows", "levels", "beyond", "folds")
_FOLDS = 5
_WITHHELD = 0.3  # of the values of M, of N and of K, where whole levels are held back
_BEYOND = 2304  # the largest M that is calibrated on, where larger ones are held back
_LARGE = 1e11  # FLOP
_CLIFF_FLOPS = 1e10
_STEP, _SMALL_STEP = 0.10, 0.05
_TIMED_SHAPES = 20_000


@dataclass(frozen=True)
class Errors:
    """|predicted / measured − 1|, as fractions; None where there is no row."""

    rows: int
    median: float | None
    mean: float | None
    p95: float | None

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> Errors:
        """Of predicted and measured seconds."""
        if not len(measured):
            return cls(0, None, None, None)
        error = np.abs(predicted / measured - 1)
        p95 = float(np.quantile(error, 0.95))
        return cls(len(error), float(np.median(error)), float(error.mean()), p95)


@dataclass(frozen=True)
class Validation:
    """What came out; ``tested`` are the rows that were held back, with their predictions."""

    machine: Machine
    source: Source
    seed: int
    holdout: str
    calibrated: NDArray[np.intp]
    tested: Source
    prediction: Prediction
    model: Model
    constants_from: str
    baselines: Mapping[str, Errors | None]
    shapes_per_second: Mapping[str, float]

    @property
    def errors(self) -> Errors:
        """Over all held-back rows."""
        return Errors.of(self.prediction.estimate.time, self.tested.seconds)

    @property
    def by_algorithm(self) -> dict[str, Errors]:
        """Errors by the algorithm that the kernels' names give away; empty where there is none."""
        names = np.array(self.tested.algorithms, dtype=object)
        times = self.prediction.estimate.time
        return {
            name: Errors.of(times[names == name], self.tested.seconds[names == name])
            for name in sorted(set(names) - {""})
        }

    @property
    def tile_agreement(self) -> float | None:
        """Share of the rows with a tile in a kernel's name that were predicted to have it."""
        e = self.prediction.estimate
        ours = [f"{bm:.0f}x{bn:.0f}" for bm, bn in zip(e.bm, e.bn, strict=True)]
        same = [a == b for a, b in zip(ours, self.tested.tiles, strict=True) if b]
        return float(np.mean(same)) if same else None

    @property
    def coverage(self) -> float:
        """Share of held-back rows inside their 90 % interval."""
        inside = (self.prediction.lo <= self.tested.seconds) & (
            self.tested.seconds <= self.prediction.hi
        )
        return float(inside.mean())

    def to_json(self) -> dict[str, Any]:
        """The document of ``analysis validate --json``."""
        flops = np.array([float(problem.flops) for problem in self.tested.problems])
        large = flops > _LARGE
        predicted = self.prediction.estimate.time
        plain = {name: None if e is None else _bare(e) for name, e in self.baselines.items()}
        return {
            "machine": self.machine.slug,
            "source": self.source.name,
            "dtype": self.source.dtype,
            "rows": len(self.tested),
            "skipped": self.source.skipped,
            "calibrated": len(self.calibrated),
            "seed": self.seed,
            "constants_from": self.constants_from,
            **_bare(self.errors),
            "coverage_90": self.coverage,
            "above_1e11": asdict(Errors.of(predicted[large], self.tested.seconds[large])),
            "holdout": self.holdout,
            "baselines": plain,
            "cliffs": cliffs(self.tested, predicted),
            "by_algorithm": {name: asdict(e) for name, e in self.by_algorithm.items()},
            "tile_agreement": self.tile_agreement,
            "shapes_per_second": dict(self.shapes_per_second),
            "constants": {name: fit.constants.to_json() for name, fit in self.model.fits.items()},
        }


def _bare(errors: Errors) -> dict[str, float | None]:
    return {name: value for name, value in asdict(errors).items() if name != "rows"}


def validate(
    source: Source,
    machine: Machine,
    calibrate: int = 256,
    seed: int = 0,
    holdout: str = "rows",
    constants: str | None = None,
) -> Validation:
    """Calibrate on some rows and judge on others.

    Args:
        source: the measured rows.
        machine: their machine.
        calibrate: how many rows to calibrate on; 0 for constants of another machine alone.
        seed: breaks the ties of the choice of rows, and chooses the levels that are withheld.
        holdout: ``rows``: every other row is tested. ``levels``: 30 % of the values of M, N and K
            are withheld, and rows tested of which all three are. ``beyond``: calibrated on M up to
            2304, tested above. ``folds``: each fifth of all rows is predicted by the others.
        constants: the machine to take constants from; the nearest other one if None.

    Raises:
        UserError: there are too few rows, or no constants of another machine.
    """
    query = Query.each(source.problems, source.implementations)
    start, constants_from = foreign_constants(machine, source.dtype, constants)
    pool, tested = _split(source, holdout, seed)
    if holdout == "folds":
        calibrate = len(pool)
    if calibrate > len(pool):
        raise UserError(
            f"{source.name} has {len(pool)} rows to calibrate on; give --calibrate of at most that."
        )
    chosen = np.empty(0, dtype=np.intp)
    model = Model(machine, {group: Fit(start) for group in dict.fromkeys(query.groups())})
    if calibrate:
        spread = Inputs.of(machine, query.take(pool)).design(start)
        chosen = pool[choose_rows(spread, calibrate, seed)]
        learned = calibrate_query(
            machine, query.take(chosen), source.seconds[chosen], _FOLDS, lambda dtype: start,
            source.take(chosen).algorithms,
        )  # fmt: skip
        model = replace(model, fits={**model.fits, **learned.model.fits})
    if holdout != "folds":
        tested = np.setdiff1d(tested, chosen)
    if not len(tested):
        raise UserError(f"{source.name} leaves no row to test; calibrate on fewer.")
    asked, held_back = query.take(tested), source.take(tested)
    prediction = learned.held_back if holdout == "folds" else model.predict(asked)
    baselines = _baselines(model, source.take(chosen), held_back, asked)
    if holdout == "folds":  # these were fitted to the rows that are tested
        baselines |= {"physics": None, "four_fitted": None}
    return Validation(
        machine=machine,
        source=source,
        seed=seed,
        holdout=holdout,
        calibrated=chosen,
        tested=held_back,
        prediction=prediction,
        model=model,
        constants_from="" if calibrate else constants_from,
        baselines=baselines,
        shapes_per_second=_speed(model, asked),
    )


def _split(source: Source, holdout: str, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows that may be calibrated on, and rows that may be tested."""
    everything = np.arange(len(source), dtype=np.intp)
    if holdout in ("rows", "folds"):
        return everything, everything
    sizes = np.array([_sizes(problem) for problem in source.problems])
    if holdout == "beyond":
        large = sizes[:, 0] > _BEYOND
        return everything[~large], everything[large]
    rng = np.random.default_rng(seed)
    withheld = np.zeros(sizes.shape, dtype=bool)
    for column in range(sizes.shape[1]):
        levels = np.unique(sizes[:, column])
        unseen = rng.choice(levels, round(_WITHHELD * len(levels)), replace=False)
        withheld[:, column] = np.isin(sizes[:, column], unseen)
    return everything[~withheld.any(axis=1)], everything[withheld.all(axis=1)]


def _sizes(problem: Problem) -> tuple[int, int, int]:
    gemm = problem.implied_gemm
    return gemm.m, gemm.n, gemm.k


# --- Baselines -----------------------------------------------------------------------------------


def _baselines(
    model: Model, calibrated: Source, tested: Source, asked: Query
) -> dict[str, Errors | None]:
    """What simpler predictors miss on the same rows; None where one was not asked or cannot."""
    machine = model.machine
    physics = Model(machine, {g: replace(f, residual=None) for g, f in model.fits.items()})
    floors = _floors(tested, machine)
    baselines: dict[str, Array | None] = {
        "datasheet": np.maximum(*floors),
        "three_constants": np.maximum(floors[0] / 0.75, floors[1] / 0.8) + 3e-6,
        "four_fitted": None,
        "physics": physics.predict(asked).estimate.time,
        "nvmatmulheuristics": heuristic_seconds(machine, tested.dtype, tested.problems),
    }
    if len(calibrated):
        law = _four_constants(_floors(calibrated, machine), calibrated.seconds)
        baselines["four_fitted"] = law(floors)
    return {
        name: None if seconds is None else _where_finite(seconds, tested.seconds)
        for name, seconds in baselines.items()
    }


def _where_finite(seconds: Array, measured: Array) -> Errors:
    known = np.isfinite(seconds)
    return Errors.of(seconds[known], measured[known])


def _floors(source: Source, machine: Machine) -> tuple[Array, Array]:
    """Seconds at the datasheet's peak, and at its bandwidth."""
    flops = np.array([float(problem.flops) for problem in source.problems])
    traffic = np.array([float(problem.bytes) for problem in source.problems])
    return flops / machine.peak(source.dtype), traffic / machine.bandwidth


def _four_constants(
    floors: tuple[Array, Array], seconds: Array
) -> Callable[[tuple[Array, Array]], Array]:
    """Shares of peak and bandwidth, launch, and the exponent that joins the two, fitted."""

    def law(x: Array, floors: tuple[Array, Array]) -> Array:
        peak, bandwidth, launch, power = np.exp(x)
        together = (floors[0] / peak) ** power + (floors[1] / bandwidth) ** power
        return launch + together ** (1 / power)

    def residuals(x: Array) -> Array:
        return np.log(law(x, floors) / seconds)

    found = least_squares(
        residuals, np.log([0.75, 0.8, 3e-6, 3.0]), loss="soft_l1", f_scale=0.05,
        bounds=(np.log([0.01, 0.01, 1e-7, 0.5]), np.log([1.2, 1.2, 1e-4, 30.0])),
    ).x  # fmt: skip
    return lambda other: law(found, other)


def _speed(model: Model, asked: Query) -> dict[str, float]:
    """Shapes predicted a second on one core, as arrays: without residual, and with everything."""
    group = str(asked.groups()[0])
    some = asked.take(np.flatnonzero(asked.groups() == group)[:_TIMED_SHAPES])
    inputs, fit = Inputs.of(model.machine, some), model.fits[group]
    seconds = {}
    for name, residual in (("physics", None), ("full", fit.residual)):
        begin = time.perf_counter()
        guess, spread = inputs.predict(fit.constants, residual)
        _ = guess.time * np.exp(fit.low * spread), guess.time * np.exp(fit.high * spread)
        seconds[name] = time.perf_counter() - begin
    return {name: len(some.problems) / taken for name, taken in seconds.items()}


# --- Cliffs --------------------------------------------------------------------------------------


def cliffs(tested: Source, predicted: Array) -> dict[str, Any]:
    """Whether one more row costs what it is predicted to cost, over pairs M, M + 1.

    Pairs of more than 1e10 FLOP, both held back. ``recall``: of the real steps over 10 %, the
    share predicted over 5 %. ``precision``: of those predicted over 5 %, the share really over
    5 %. ``recall_down``: of the real steps below −5 %, the share predicted below −5 %.
    """
    place = {p: i for i, p in enumerate(tested.problems) if isinstance(p, Gemm)}
    pairs = [
        (i, place[replace(p, m=p.m + 1)])
        for p, i in place.items()
        if p.flops > _CLIFF_FLOPS and replace(p, m=p.m + 1) in place
    ]
    empty = {"recall": None, "precision": None, "rank_correlation": None, "recall_down": None}
    if not pairs:
        return {"pairs": 0, **empty}
    before, after = np.array(pairs).T
    real = tested.seconds[after] / tested.seconds[before] - 1
    foreseen = predicted[after] / predicted[before] - 1
    up, told, down = real > _STEP, foreseen > _SMALL_STEP, real < -_SMALL_STEP
    rank = spearmanr(real, foreseen).statistic if len(pairs) > 2 else np.nan
    return {
        "pairs": len(pairs),
        "recall": _share(told, up),
        "precision": _share(real > _SMALL_STEP, told),
        "rank_correlation": None if np.isnan(rank) else float(rank),
        "recall_down": _share(foreseen < -_SMALL_STEP, down),
    }


def _share(found: NDArray[np.bool_], among: NDArray[np.bool_]) -> float | None:
    return float(found[among].mean()) if among.any() else None
