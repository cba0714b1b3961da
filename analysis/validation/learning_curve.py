"""Measure how the error falls with more calibration rows, and estimate the noise floor.

The noise floor is the scatter of the measurements themselves. No model can be expected to have a
smaller error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.imports.public import PublicRows
from analysis.validation.error_summary import Errors
from analysis.validation.holdout import validate
from kernels.common.errors import UserError
from kernels.machine import Machine
from kernels.timemodel.constants import foreign_constants

_HOLDOUTS = ("rows", "levels")
COUNTS = (32, 64, 128, 256, 512, 1024, 2048)
"""Numbers of calibration rows in a learning curve."""


@dataclass(frozen=True)
class CurvePoint:
    """Errors on held-out rows after calibration on ``count`` rows."""

    holdout: str
    count: int
    errors: Errors


def learning_curve(
    source: PublicRows, machine: Machine, seed: int = 0, counts: Sequence[int] = COUNTS
) -> list[CurvePoint]:
    """Validate the model for each number of calibration rows in ``counts``, which must ascend.

    The hold-outs ``rows`` and ``levels`` each have a curve. A curve ends before the first number
    for which the source has too few rows.

    Raises:
        UserError: if the machine is a GPU that does not support the dtype.
    """
    foreign_constants(machine, source.dtype)  # otherwise its error would end the curves below
    points = []
    for holdout in _HOLDOUTS:
        for count in counts:
            try:
                validation = validate(source, machine, count, seed, holdout)
            except UserError:  # the source has too few rows for this count
                break
            points.append(CurvePoint(holdout, count, validation.errors))
    return points


def noise_floor(first: PublicRows, second: PublicRows) -> Errors:
    """Estimate the errors of a perfect model from two measurements of the same cases.

    The error of a case is the relative difference between its two times, divided by √2.

    Raises:
        UserError: if the tables have no case in common.
    """
    second_cases = zip(second.implementations, second.problems, strict=True)
    second_times = dict(zip(second_cases, second.seconds, strict=True))
    first_cases = zip(first.implementations, first.problems, strict=True)
    times_of_both = [
        (seconds, second_times[case])
        for case, seconds in zip(first_cases, first.seconds, strict=True)
        if case in second_times
    ]
    if not times_of_both:
        raise UserError(
            f"{first.name} and {second.name} have no case in common; give --again repeated "
            f"measurements of the cases in {first.name}."
        )
    first_seconds, second_seconds = np.array(times_of_both).T  # one column per table
    # Both measurements contribute equally to the noise of the difference, so the standard deviation
    # of each is 1/√2 of that of the difference.
    noise = (second_seconds / first_seconds - 1) / math.sqrt(2)
    # Predictions of 1 + noise for times of 1 have exactly these relative errors.
    return Errors.from_times(1 + noise, np.ones(len(noise)))
