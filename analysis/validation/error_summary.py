"""Summarise the errors of predicted times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.timemodel.estimate import Array


@dataclass(frozen=True)
class Errors:
    """Summary of the relative errors |predicted / measured − 1|, as fractions.

    ``rows`` is the number of cases, and ``p95`` is the 95th percentile. The errors are None if
    ``rows`` is 0.
    """

    rows: int
    median: float | None
    mean: float | None
    p95: float | None

    @classmethod
    def from_times(cls, predicted: Array, measured: Array) -> Errors:
        """Return the errors of ``predicted`` times; ``measured`` must have the same unit."""
        if not len(measured):
            return cls(0, None, None, None)
        error = np.abs(predicted / measured - 1)
        p95 = float(np.quantile(error, 0.95))
        return cls(len(error), float(np.median(error)), float(error.mean()), p95)
