"""The formula's estimate, corrected by public tables and by trees."""

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
    """Return the estimate of each case, and the spread of its error, which is 1 without trees.

    Args:
        inputs: the cases, all of one group.
        constants: constants of the formula.
        residual: trees that grew from what the machine's own measurements left.
        offsets: what public tables say.
    """
    guess = inputs.estimate(constants)
    log_ratio, spread, columns = np.zeros(len(guess.time)), np.ones(len(guess.time)), None
    if offsets is not None:
        estimates = offsets.at(inputs)
        columns = estimates.columns
        log_ratio, spread = offsets.combined_offsets(estimates), offsets.spread(estimates)
    if residual is not None:
        more, own = residual.predict(inputs.features(constants, guess, columns))
        log_ratio, spread = log_ratio + more, spread * own
    return replace(guess, time=guess.time * np.exp(log_ratio)), spread
