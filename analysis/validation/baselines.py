"""Baselines: simpler predictors that the model must beat.

They are the datasheet, constants set by hand, fitted constants, and the formula without trees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from analysis.imports.public import PublicRows
from analysis.model.predict import Model
from analysis.model.query import Query
from analysis.validation.error_summary import Errors
from kernels.machine import Machine
from kernels.timemodel.estimate import Array


def baseline_errors(
    model: Model, calibrated: PublicRows, tested: PublicRows, query: Query
) -> dict[str, Errors | None]:
    """Return the errors of simpler predictors on the tested rows; None where one does not apply.

    Args:
        model: the model to compare with.
        calibrated: the rows that the model was calibrated on.
        tested: the rows to predict.
        query: the tested rows as a query.
    """
    machine = model.machine
    physics = Model(machine, {g: replace(f, residual=None) for g, f in model.fits.items()})
    floors = _floors(tested, machine)
    baselines: dict[str, Array | None] = {
        "datasheet": np.maximum(*floors),
        "three_constants": np.maximum(floors[0] / 0.75, floors[1] / 0.8) + 3e-6,
        "four_fitted": None,
        "physics": physics.predict(query).estimate.time,
    }
    if len(calibrated):
        law = _four_constants(_floors(calibrated, machine), calibrated.seconds)
        baselines["four_fitted"] = law(floors)
    return {
        name: None if seconds is None else _where_finite(seconds, tested.seconds)
        for name, seconds in baselines.items()
    }


def _where_finite(seconds: Array, measured: Array) -> Errors:
    finite = np.isfinite(seconds)
    return Errors.from_times(seconds[finite], measured[finite])


def _floors(source: PublicRows, machine: Machine) -> tuple[Array, Array]:
    """Return the seconds of each row at the datasheet's peak, and at its bandwidth."""
    flops = np.array([float(problem.flops) for problem in source.problems])
    traffic = np.array([float(problem.bytes) for problem in source.problems])
    return flops / machine.peak(source.dtype), traffic / machine.bandwidth


def _four_constants(
    floors: tuple[Array, Array], seconds: Array
) -> Callable[[tuple[Array, Array]], Array]:
    """Fit a law of four constants, and return it.

    The constants are the shares of peak and bandwidth, the time of a launch, and the exponent that
    combines the times of arithmetic and memory.
    """

    def law(x: Array, floors: tuple[Array, Array]) -> Array:
        peak, bandwidth, launch, power = np.exp(x)
        combined = (floors[0] / peak) ** power + (floors[1] / bandwidth) ** power
        return launch + combined ** (1 / power)

    def residuals(x: Array) -> Array:
        return np.log(law(x, floors) / seconds)

    fitted = least_squares(
        residuals,
        np.log([0.75, 0.8, 3e-6, 3.0]),
        loss="soft_l1",
        f_scale=0.05,
        bounds=(np.log([0.01, 0.01, 1e-7, 0.5]), np.log([1.2, 1.2, 1e-4, 30.0])),
    ).x
    return lambda any_floors: law(fitted, any_floors)
