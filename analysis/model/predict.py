"""The time model: the estimate's formula with constants that were calibrated on measurements.

Cases are modelled in groups: an implementation, an operation with its pass, and a dtype. Each group
has its own constants, error figures and interval. The prior answers for a group without
measurements (:mod:`analysis.model.prior`).
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
from kernels.machine import Machine
from kernels.timemodel.estimate import ALGORITHMS, LIMITS, Array, Estimate


@dataclass(frozen=True)
class Model:
    """A machine and the fits of its groups; a group without a fit uses its prior's fit."""

    machine: Machine
    fits: Mapping[str, Fit] = field(default_factory=dict)

    def fit(self, group: str) -> Fit:
        """Return the fit of a group, or its prior's fit if it has none."""
        if group in self.fits:
            return self.fits[group]
        return prior_without_tables(self.machine, group).fit

    def predict(self, query: Query) -> Prediction:
        """Predict every case of a query.

        Raises:
            UserError: if the machine does not compute the dtype of a case.
        """
        groups = query.groups()
        parts = []
        for group in dict.fromkeys(groups):
            where = np.flatnonzero(groups == group)
            fit = self.fit(group)
            inputs = Inputs.from_query(self.machine, query.take(where))
            guess, tree_spread = corrected_estimate(
                inputs, fit.constants, fit.residual, fit.offsets
            )
            guess = replace(guess, time=fit.shift.applied(guess.time))
            spread = fit.spreads(tree_spread)
            below, above = factors_of(inputs.problems, fit.groups)
            low = fit.low * spread * below
            high = fit.high * spread * above
            # A shape unlike all measured ones has at least the interval that it would have without
            # any measurement.
            is_familiar = np.array([fit.has_like(problem) for problem in inputs.problems])
            low = np.where(is_familiar, low, np.minimum(low, UNCALIBRATED[0]))
            high = np.where(is_familiar, high, np.maximum(high, UNCALIBRATED[1]))
            parts.append(PartialPrediction(where, guess, low, high))
        return Prediction.from_parts(len(groups), parts)


def model_from_json(machine: Machine, data: Mapping[str, Any]) -> Model:
    """Read the model from the document of a calibration.json."""
    return Model(machine, {group: Fit.from_json(fit) for group, fit in data["groups"].items()})


@dataclass(frozen=True)
class PartialPrediction:
    """Estimates of some of a query's cases, and the 90% range of their log ratios.

    ``where`` has the positions of these cases.
    """

    where: NDArray[np.intp]
    estimate: Estimate
    low: Array
    high: Array


@dataclass(frozen=True)
class Prediction:
    """Times in seconds with their 90% intervals, and the estimate that they come from."""

    estimate: Estimate
    lo: Array
    hi: Array

    @classmethod
    def from_parts(cls, cases: int, parts: Sequence[PartialPrediction]) -> Prediction:
        """Combine the groups' partial predictions in the order of the query's cases.

        ``cases`` is the number of these cases.
        """
        columns = {f.name: np.empty(cases) for f in fields(Estimate)}
        lo, hi = np.empty(cases), np.empty(cases)
        for part in parts:
            for name, column in columns.items():
                column[part.where] = getattr(part.estimate, name)
            lo[part.where] = part.estimate.time * np.exp(part.low)
            hi[part.where] = part.estimate.time * np.exp(part.high)
        return cls(Estimate(**columns), lo, hi)

    def frame(self) -> pd.DataFrame:
        """Return the columns of predicted.csv: times in microseconds, limit, tiles and traffic."""
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
"""Words for each of :data:`kernels.timemodel.estimate.LIMITS`."""


_CORES = {"gpu": "SMs", "cpu": "cores"}


def explain(row: Mapping[str, Any], kind: str = "gpu") -> str:
    """Describe a row of :meth:`Prediction.frame` in one line, for a kind of machine."""
    limit = LIMIT_WORDS[row["limit"]].format(cores=_CORES[kind])
    side = ALGORITHMS[row["algorithm"]]  # of Winograd's output tile, 0 for an implicit GEMM
    algorithm = f"Winograd over {side}x{side} outputs, " if side else ""
    split = f", K split in {row['split']}" if row["split"] > 1 else ""
    if kind == "cpu":
        waves, slots = f"at most {row['waves']} per thread", "threads' time"
    else:
        waves = "1 wave" if row["waves"] == 1 else f"{row['waves']} waves"
        slots = "waves' slots"
    tiles = "1 tile" if row["tiles"] == 1 else f"{row['tiles']} tiles"
    return (
        f"{limit}: {algorithm}{tiles} of {row['tile']}{split} in {waves}, "
        f"{row['tail_efficiency']:.0%} of the {slots} used, "
        f"{row['tile_efficiency']:.0%} of the tiles' area useful, "
        f"{row['bytes'] / 1e6:.1f} MB moved"
    )
