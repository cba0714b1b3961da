"""Judge the baselines: simpler predictors that the model must beat.

- ``datasheet``: the time of the arithmetic at the machine's peak, or of the memory traffic at its
  bandwidth, whichever is longer.
- ``three_constants``: the longer of these two times at fixed shares of the peak and of the
  bandwidth, plus a launch time. The three constants were set by hand.
- ``four_fitted``: a formula with four constants, fitted to the calibration measurements.
- ``physics``: the model's formula and constants, without the trees that correct the formula.
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

# Constants of the baseline "three_constants", from which the fit of "four_fitted" starts.
_PEAK_SHARE = 0.75
_BANDWIDTH_SHARE = 0.8
_LAUNCH_SECONDS = 3e-6


def baseline_errors(
    model: Model, calibrated: PublicRows, tested: PublicRows, query: Query
) -> dict[str, Errors | None]:
    """Return the errors of each baseline on the held-out measurements ``tested``.

    The errors of ``four_fitted`` are None if ``calibrated`` is empty. The errors of ``physics`` are
    None if the model also has corrections that were learned from public tables, because the
    formula's constants are then valid only together with these corrections. ``query`` has the same
    cases as ``tested``.
    """
    machine = model.machine
    floors = _floors(tested, machine)
    arithmetic, memory = floors
    baselines: dict[str, Array | None] = {
        "datasheet": np.maximum(arithmetic, memory),
        "three_constants": (
            np.maximum(arithmetic / _PEAK_SHARE, memory / _BANDWIDTH_SHARE) + _LAUNCH_SECONDS
        ),
        "four_fitted": None,
        "physics": None,
    }
    if len(calibrated):
        predict_seconds = _fit_four_constants(_floors(calibrated, machine), calibrated.seconds)
        baselines["four_fitted"] = predict_seconds(floors)
    if all(fit.offsets is None for fit in model.fits.values()):
        without_trees = {group: replace(fit, residual=None) for group, fit in model.fits.items()}
        baselines["physics"] = Model(machine, without_trees).predict(query).estimate.time
    return {
        name: None if seconds is None else _finite_errors(seconds, tested.seconds)
        for name, seconds in baselines.items()
    }


def _finite_errors(seconds: Array, measured: Array) -> Errors:
    """Return the errors of predicted times; infinite and NaN predictions are left out."""
    finite = np.isfinite(seconds)
    return Errors.from_times(seconds[finite], measured[finite])


def _floors(source: PublicRows, machine: Machine) -> tuple[Array, Array]:
    """Return each case's floors, in seconds.

    The floors are the time of the arithmetic at the machine's peak, and the time of the memory
    traffic at the machine's bandwidth.
    """
    flops = np.array([float(problem.flops) for problem in source.problems])
    traffic = np.array([float(problem.bytes) for problem in source.problems])
    return flops / machine.peak(source.dtype), traffic / machine.bandwidth


def _fit_four_constants(
    floors: tuple[Array, Array], seconds: Array
) -> Callable[[tuple[Array, Array]], Array]:
    """Fit a formula with four constants, and return a function that predicts times from floors.

    The constants are the shares of peak and bandwidth, the time of a launch, and the exponent that
    combines the times of arithmetic and memory.
    """

    # The logarithms of the constants are fitted, so that the constants stay positive.
    def law(log_constants: Array, floors: tuple[Array, Array]) -> Array:
        arithmetic, memory = floors
        peak, bandwidth, launch, power = np.exp(log_constants)
        combined = (arithmetic / peak) ** power + (memory / bandwidth) ** power
        return launch + combined ** (1 / power)

    def residuals(log_constants: Array) -> Array:
        return np.log(law(log_constants, floors) / seconds)

    # Each list has the share of peak, the share of bandwidth, the launch in seconds, and the
    # exponent.
    start = [_PEAK_SHARE, _BANDWIDTH_SHARE, _LAUNCH_SECONDS, 3.0]
    lowest = [0.01, 0.01, 1e-7, 0.5]
    highest = [1.2, 1.2, 1e-4, 30.0]
    # Errors above about 5% count linearly instead of squared, so that outliers do not dominate.
    fitted = least_squares(
        residuals,
        np.log(start),
        loss="soft_l1",
        f_scale=0.05,
        bounds=(np.log(lowest), np.log(highest)),
    ).x
    return lambda any_floors: law(fitted, any_floors)
