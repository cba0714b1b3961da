"""How much calibration helps, and how much it can: the learning curve and the noise floor."""

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
    """Errors on the rows that one kind of hold-out leaves, after calibrating on ``count``."""

    holdout: str
    count: int
    errors: Errors


def learning_curve(
    source: PublicRows, machine: Machine, seed: int = 0, counts: Sequence[int] = COUNTS
) -> list[CurvePoint]:
    """Both kinds of hold-out at every count that the source has rows for.

    Args:
        source: the measured rows.
        machine: their machine.
        seed: as in :func:`analysis.validation.holdout.validate`.
        counts: of calibration rows.
    """
    points = []
    for holdout in _HOLDOUTS:
        for count in counts:
            try:
                validation = validate(source, machine, count, seed, holdout)
            except UserError:  # fewer rows than that: the curve ends here
                break
            points.append(CurvePoint(holdout, count, validation.errors))
    return points


def noise_floor(first: PublicRows, second: PublicRows) -> Errors:
    """The error of a perfect model: the difference of two collections of a grid, over √2.

    Raises:
        UserError: the two have no problem in common.
    """
    again = dict(zip(second.problems, second.seconds, strict=True))
    pairs = [
        (seconds, again[problem])
        for problem, seconds in zip(first.problems, first.seconds, strict=True)
        if problem in again
    ]
    if not pairs:
        raise UserError(f"{first.name} and {second.name} have no shape in common.")
    ours, theirs = np.array(pairs).T
    return Errors.from_times(1 + (theirs / ours - 1) / math.sqrt(2), np.ones(len(ours)))
