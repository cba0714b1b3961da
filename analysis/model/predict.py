"""The time model: a formula with fitted constants, and trees that correct the formula's errors.

A group consists of all cases with the same implementation, operation and dtype. The operation of a
convolution is its pass. Each group has separate constants, errors and intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.model.corrected import corrected_estimate
from analysis.model.features import Inputs
from analysis.model.fit import UNCALIBRATED, Fit
from analysis.model.groups import factors_of
from analysis.model.prior import prior_without_tables
from analysis.model.query import Query
from kernels.common.counts import counted
from kernels.machine import Machine
from kernels.timemodel.estimate import ALGORITHMS, LIMITS, Array, Estimate


@dataclass(frozen=True)
class Model:
    """A machine and the fits of its groups, by the group's name."""

    machine: Machine
    fits: Mapping[str, Fit] = field(default_factory=dict)

    def fit_of(self, group: str) -> Fit:
        """Return the fit of a group, or that of its prior if the model has no fit for the group.

        This prior does not use imported tables: fits that use them are already in ``fits``.
        """
        if group in self.fits:
            return self.fits[group]
        return prior_without_tables(self.machine, group).fit

    def predict(self, query: Query) -> Prediction:
        """Predict every case of a query.

        Raises:
            UserError: if the machine does not support the dtype of a case, or if another version of
                Rooftile wrote the trees of a fit.
        """
        groups = query.groups()
        parts = []
        for group in dict.fromkeys(groups):
            positions = np.flatnonzero(groups == group)
            fit = self.fit_of(group)
            # 1. Predict the times.
            inputs = Inputs.from_query(self.machine, query.take(positions))
            guess, disagreement = corrected_estimate(
                inputs, fit.constants, fit.residual, fit.offsets
            )
            guess = replace(guess, time=fit.shift.applied(guess.time))
            # 2. Compute the ends of the intervals, as log ratios to the predicted times.
            spread = fit.spreads(disagreement)
            below, above = factors_of(inputs.problems, fit.groups)
            low = fit.low * spread * below
            high = fit.high * spread * above
            # For a shape unlike all measured ones, the interval is at least as wide as without any
            # measurement.
            is_familiar = np.array([fit.has_like(problem) for problem in inputs.problems])
            low = np.where(is_familiar, low, np.minimum(low, UNCALIBRATED[0]))
            high = np.where(is_familiar, high, np.maximum(high, UNCALIBRATED[1]))
            parts.append(PartialPrediction(positions, guess, low, high))
        return Prediction.from_parts(len(groups), parts)


def model_from_json(machine: Machine, data: Mapping[str, Any]) -> Model:
    """Read a model from the JSON document in calibration.json.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: if the document is invalid.
    """
    fits = {group: Fit.from_json(fit) for group, fit in data["groups"].items()}
    if not all(len(group.split()) >= 3 for group in fits):
        raise ValueError("a group's name must have an implementation, an operation and a dtype")
    return Model(machine, fits)


@dataclass(frozen=True)
class PartialPrediction:
    """Estimates of some cases of a query, with 90% ranges of log(measured / predicted)."""

    positions: NDArray[np.intp]
    estimate: Estimate
    low: Array
    high: Array


@dataclass(frozen=True)
class Prediction:
    """Estimates of all cases of a query, with the ends of their 90% intervals in seconds."""

    estimate: Estimate
    lo: Array
    hi: Array

    @classmethod
    def from_parts(cls, cases: int, parts: Sequence[PartialPrediction]) -> Prediction:
        """Combine partial predictions that together contain each case of the query once."""
        columns = {f.name: np.empty(cases) for f in fields(Estimate)}
        lo, hi = np.empty(cases), np.empty(cases)
        for part in parts:
            for name, column in columns.items():
                column[part.positions] = getattr(part.estimate, name)
            lo[part.positions] = part.estimate.time * np.exp(part.low)
            hi[part.positions] = part.estimate.time * np.exp(part.high)
        return cls(Estimate(**columns), lo, hi)

    def frame(self) -> pd.DataFrame:
        """Return predicted.csv's columns after those that identify a case, one row per case."""
        guess = self.estimate
        tiles = [f"{bm:.0f}x{bn:.0f}" for bm, bn in zip(guess.bm, guess.bn, strict=True)]
        limit_times = {f"{name}_us": getattr(guess, name) * 1e6 for name in LIMITS}
        algorithms = np.array(list(ALGORITHMS), dtype=object)
        return pd.DataFrame(
            {
                "time_us": guess.time * 1e6,
                "lo_us": self.lo * 1e6,
                "hi_us": self.hi * 1e6,
                "limit": np.array(LIMITS, dtype=object)[guess.limit],
                **limit_times,
                "algorithm": algorithms[guess.algorithm.astype(int)],
                "tile": tiles,
                "split": guess.split.astype(int),
                "tiles": guess.tiles.astype(int),
                "waves": guess.waves.astype(int),
                "tile_efficiency": guess.tile_efficiency,
                "tail_efficiency": guess.tail_efficiency,
                "bytes": guess.bytes.astype(np.int64),
            }
        )


LIMIT_WORDS = {
    "launch": "limited by launching, which takes longer than computing",
    "compute": "limited by arithmetic",
    "feed": "limited by how fast the {cores} can load operands",
    "latency": "limited by the latency of each step along K",
    "memory": "limited by memory bandwidth",
}
"""Description of each limit, by its name in :data:`kernels.timemodel.estimate.LIMITS`."""

_CORES = {"gpu": "SMs", "cpu": "cores"}


def explain(row: Mapping[str, Any], kind: str = "gpu") -> str:
    """Describe a prediction in one line: its limit, tiles, efficiencies and traffic.

    Args:
        row: row of :meth:`Prediction.frame`.
        kind: kind of the machine, ``gpu`` or ``cpu``.
    """
    limit = LIMIT_WORDS[row["limit"]].format(cores=_CORES[kind])
    side = ALGORITHMS[row["algorithm"]]  # side of Winograd's output tile, 0 for an implicit GEMM
    algorithm = f"Winograd over {side}x{side} outputs, " if side else ""
    split = f", K split into {row['split']} parts" if row["split"] > 1 else ""
    if kind == "cpu":
        waves = f", at most {row['waves']:,} per thread"
        slots = "threads' time is"
    else:
        comma = "," if split else ""  # ends the clause about the split of K
        waves = f"{comma} in {counted(row['waves'], 'wave')}"
        slots = "waves' slots are"
    tiles = counted(row["tiles"], "tile")
    return (
        f"{limit}: {algorithm}{tiles} of {row['tile']}{split}{waves}. "
        f"{row['tail_efficiency']:.0%} of the {slots} used, "
        f"{row['tile_efficiency']:.0%} of the tiles' area is useful, "
        f"and {row['bytes'] / 1e6:,.1f} MB are moved"
    )
