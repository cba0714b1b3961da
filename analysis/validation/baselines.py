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
    without_trees = {group: replace(fit, residual=None) for group, fit in model.fits.items()}
    floors = _floors(tested, machine)
    arithmetic, memory = floors
    baselines: dict[str, Array | None] = {
        "datasheet": np.maximum(arithmetic, memory),
        # Set by hand: shares of peak and bandwidth, and the seconds of a launch.
        "three_constants": np.maximum(arithmetic / 0.75, memory / 0.8) + 3e-6,
        "four_fitted": None,
        "physics": Model(machine, without_trees).predict(query).estimate.time,
    }
    if len(calibrated):
        law = _four_constants(_floors(calibrated, machine), calibrated.seconds)
        baselines["four_fitted"] = law(floors)
    return {
        name: None if seconds is None else _finite_errors(seconds, tested.seconds)
        for name, seconds in baselines.items()
    }


def _finite_errors(seconds: Array, measured: Array) -> Errors:
    """Return the errors of those predicted seconds that are finite."""
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

    Args:
        floors: seconds of each row at the datasheet's peak, and at its bandwidth.
        seconds: measured seconds of each row.

    Returns:
        Function from the floors of any rows to their predicted seconds.
    """

    # The logarithms of the constants are fitted, so that the constants stay positive.
    def law(log_constants: Array, floors: tuple[Array, Array]) -> Array:
        arithmetic, memory = floors
        peak, bandwidth, launch, power = np.exp(log_constants)
        combined = (arithmetic / peak) ** power + (memory / bandwidth) ** power
        return launch + combined ** (1 / power)

    def residuals(log_constants: Array) -> Array:
        return np.log(law(log_constants, floors) / seconds)

    fitted = least_squares(
        residuals,
        np.log([0.75, 0.8, 3e-6, 3.0]),
        loss="soft_l1",
        f_scale=0.05,
        bounds=(np.log([0.01, 0.01, 1e-7, 0.5]), np.log([1.2, 1.2, 1e-4, 30.0])),
    ).x
    return lambda any_floors: law(fitted, any_floors)
