"""Correct the formula's times with public tables and with trees grown from measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from analysis.model.features import Inputs
from analysis.model.offsets import Offsets
from analysis.model.residual import Residual
from kernels.timemodel.constants import Constants
from kernels.timemodel.estimate import Array, Estimate


def corrected_estimate(
    inputs: Inputs, constants: Constants, residual: Residual | None, offsets: Offsets | None = None
) -> tuple[Estimate, Array]:
    """Estimate each case with the formula, then correct the estimated time.

    ``offsets`` were learned from public tables. ``residual`` predicts the errors that remain once
    the offsets are applied. A correction that is None is not applied.

    Returns:
        The corrected estimates, and the relative spread of each estimate's error.
    """
    guess = inputs.estimate(constants)
    log_ratio = np.zeros(len(guess.time))
    spread = np.ones(len(guess.time))
    columns = None  # log ratios that the collections predict, as features of the residual's trees
    if offsets is not None:
        estimates = offsets.estimates(inputs)
        columns = estimates.columns
        log_ratio = offsets.combined_offsets(estimates)
        spread = offsets.spread(estimates)
    if residual is not None:
        correction, disagreement = residual.predict(inputs.features(constants, guess, columns))
        log_ratio = log_ratio + correction
        spread = spread * disagreement
    return replace(guess, time=guess.time * np.exp(log_ratio)), spread
