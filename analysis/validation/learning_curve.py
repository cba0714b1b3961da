"""Measure how much calibration helps (the learning curve) and can help (the noise floor)."""

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

_HOLDOUTS = ("rows", "levels")
COUNTS = (32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class CurvePoint:
    """Errors on the rows that one kind of hold-out leaves, after calibrating on ``count`` rows."""

    holdout: str
    count: int
    errors: Errors


def learning_curve(
    source: PublicRows, machine: Machine, seed: int = 0, counts: Sequence[int] = COUNTS
) -> list[CurvePoint]:
    """Validate with both kinds of hold-out at every count for which the source has enough rows.

    Args:
        source: the measured rows.
        machine: the machine on which they were measured.
        seed: as in :func:`analysis.validation.holdout.validate`.
        counts: numbers of calibration rows.
    """
    points = []
    for holdout in _HOLDOUTS:
        for count in counts:
            try:
                validation = validate(source, machine, count, seed, holdout)
            except UserError:  # there are fewer rows, so the curve ends here
                break
            points.append(CurvePoint(holdout, count, validation.errors))
    return points


def noise_floor(first: PublicRows, second: PublicRows) -> Errors:
    """Return the error of a perfect model: the difference of two collections of a grid, over √2.

    Raises:
        UserError: if the two have no problem in common.
    """
    second_times = dict(zip(second.problems, second.seconds, strict=True))
    times_of_both = [
        (seconds, second_times[problem])
        for problem, seconds in zip(first.problems, first.seconds, strict=True)
        if problem in second_times
    ]
    if not times_of_both:
        raise UserError(f"{first.name} and {second.name} have no shape in common.")
    first_seconds, second_seconds = np.array(times_of_both).T
    # The noise of both collections is in the difference, so that each has 1/√2 of it. It is passed
    # on as predictions of times of 1.
    noise = (second_seconds / first_seconds - 1) / math.sqrt(2)
    return Errors.from_times(1 + noise, np.ones(len(noise)))
