"""The fit of one group: its constants, trees and intervals, and its errors on held-out cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from analysis.model.offsets import Offsets
from analysis.model.residual import Residual
from analysis.model.shift import Shift
from kernels.common.documents import COUNT, NOT_NEGATIVE, Each, Maybe, Number, misfit
from kernels.problem import WIDE_BYTES, Gemm, Problem
from kernels.timemodel.constants import Constants
from kernels.timemodel.estimate import Array, priced_alignment

UNCALIBRATED = (-0.7, 0.7)
"""90% range of log(measured / predicted) that is assumed before any measurement: a factor of two
either way.

It contains at least 98% of the times in public tables for H100, A100 and V100 (the lines with
``calibrated`` 0 in results/accuracy/validation.json). It contains only 72% of the fp32 times for T4
and 43% of those for L4 (results/accuracy/fp32-interval.json)."""

UNCALIBRATED_PAIR = (-0.2, 0.2)
"""90% range of log(measured / predicted) that is assumed before any measurement for the time ratio
of two neighbouring shapes. It is narrow, because the errors of the two predicted times are largely
the same.

It contains the 90% range of the measured errors in six of nine public tables. For V100 in fp16, for
L4 and for T4, the measured range extends beyond it, up to 0.34 (results/accuracy/neighbours.json).
"""

FP32_LIKE = (-0.1, 0.35)
"""Range that replaces :data:`UNCALIBRATED` for fp32 GEMMs on a GPU whose compute capability equals
that of a measured GPU.

It contains more than nine in ten of the times that sitar-lab/NeuSight measured for linear layers on
H100, A100 (40 and 80 GB) and V100, although no constants were fitted to the A100 40 GB. This range
is not used for other GPUs, because T4 and L4 take about twice as long as predicted
(results/accuracy/fp32-interval.json)."""

NEAR = 0.125
"""Largest difference between two neighbouring shapes in each dimension, as a fraction of the
smaller size."""

SOFTWARE_ERROR = 0.05
"""Standard deviation of the error that another framework adds to a prediction, as a log ratio.

The disagreement of trees does not show this error. Trees agree on the shapes from which they grew,
and on some machines they agree on most other shapes, but another framework's times differ for all
shapes. With a smaller value, the 90% intervals of the shapes from which the trees grew would
contain too few of the other framework's times (``coverage_90_seen`` in
results/accuracy/software.json)."""

_NORMAL = 1.645  # half-width of a normal distribution's 90% interval, in standard deviations


@dataclass(frozen=True)
class SoftwareRange:
    """90% ranges of the errors of times and time ratios that are predicted for another framework.

    Each attribute has the same unit as the attribute of that name in :class:`Fit`. The class is
    also used for other ranges of prediction errors, such as the ranges for predictions with
    constants from another machine.
    """

    low: float
    high: float
    pair_low: float
    pair_high: float

    def joined(self, other: SoftwareRange) -> SoftwareRange:
        """Return the smallest ranges that contain these ranges and those of ``other``."""
        return SoftwareRange(
            min(self.low, other.low),
            max(self.high, other.high),
            min(self.pair_low, other.pair_low),
            max(self.pair_high, other.pair_high),
        )

    def to_json(self) -> dict[str, float]:
        """Return the ends of the two ranges, by the names of the attributes."""
        return asdict(self)


_JSON_SHAPE = {
    "constants": Each(Number()), "residual": Maybe(dict), "offsets?": Maybe(dict),
    "shift?": Maybe(dict),
    **dict.fromkeys(("low", "pair_low"), Number(-10, 0)),
    **dict.fromkeys(("high", "pair_high"), Number(0, 10)),
    **dict.fromkeys(("rows", "pairs"), COUNT),
    **dict.fromkeys(("median", "mean", "p95"), Maybe(NOT_NEGATIVE)),
    "aligned_only?": bool, "layout?": str, "start?": str, "groups?": Each([Number(0.1, 10)]),
    **dict.fromkeys(
        ("scale?", "beside?", "sum_low?", "sum_high?", "change_low?", "change_high?"), NOT_NEGATIVE
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """Constants and trees of one group, with the intervals and errors of their predictions.

    The spread of a prediction is the unit of its interval. It combines the disagreement of the
    trees with the attributes ``scale`` and ``beside``:
    spread = √((``scale`` × disagreement)² + ``beside``²).

    Attributes:
        residual: trees that correct the errors that remain after ``constants`` and ``offsets``;
            None if only the formula and the offsets are used.
        low, high: ends of the 90% range of log(measured / predicted), as multiples of the
            prediction's spread.
        pair_low, pair_high: ends of the 90% range of log(measured / predicted) for the time ratio
            of two neighbouring shapes (see :data:`NEAR`), as multiples of √(a² + b²), where a and b
            are the spreads of the two predictions.
        rows: number of fitted cases that were measured on the machine itself.
        pairs: number of these cases that were paired with a padding to estimate ``pair_low`` and
            ``pair_high`` (:func:`analysis.model.calibrate.fastest_paddings`).
        median, mean, p95: median, mean and 95th percentile of |predicted / measured − 1| on
            held-out measurements; None if no measurements of the machine were fitted.
        aligned_only: True if no measured case had misaligned rows that cost time
            (:func:`kernels.timemodel.estimate.priced_alignment`).
        layout: layout of the measurements if all are unbatched GEMMs of one layout, otherwise "".
        scale: factor by which the trees' disagreement is multiplied in the spread.
        beside: standard deviation of the additional error for users of another framework.
        sum_low, sum_high: factors that correct the lower and the upper half of the interval of a
            sum of times (see :mod:`analysis.model.sum_errors`).
        change_low, change_high: the same factors for a sum in which neighbouring shapes replace
            some of the shapes.
        offsets: corrections that were learned from public tables; None if there are none.
        groups: factors of the lower and of the upper end of the interval, by kind of shape (see
            :mod:`analysis.model.groups`).
        start: source of the constants from which the fit started, in words; "" if they do not come
            from public tables, or if ``offsets`` already names the tables.
        shift: expected log ratio of another framework's time to the measured framework's time.
    """

    constants: Constants
    residual: Residual | None = None
    low: float = UNCALIBRATED[0]
    high: float = UNCALIBRATED[1]
    pair_low: float = UNCALIBRATED_PAIR[0] / math.sqrt(2)
    pair_high: float = UNCALIBRATED_PAIR[1] / math.sqrt(2)
    rows: int = 0
    pairs: int = 0
    median: float | None = None
    mean: float | None = None
    p95: float | None = None
    aligned_only: bool = False
    layout: str = ""
    scale: float = 1.0
    beside: float = 0.0
    sum_low: float = 1.0
    sum_high: float = 1.0
    change_low: float = 1.0
    change_high: float = 1.0
    offsets: Offsets | None = None
    groups: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    start: str = ""
    shift: Shift = field(default_factory=Shift)

    @property
    def is_uncalibrated(self) -> bool:
        """True if no errors are known, so that the interval is a factor of two either way."""
        return not self.rows and (self.low, self.high) == UNCALIBRATED

    def has_like(self, problem: Problem) -> bool:
        """Return False if the problem's alignment, layout or batching is known to be unmeasured."""
        if self.aligned_only and priced_alignment(problem) < WIDE_BYTES:
            return False
        if not self.layout:  # the measurements are not limited to single GEMMs of one layout
            return True
        is_single_gemm = isinstance(problem, Gemm) and problem.batch == 1
        return is_single_gemm and problem.layout == self.layout

    def for_software(self, software: SoftwareRange, shift: Shift) -> Fit:
        """Return the fit for users of a framework other than the measured one.

        This fit must have a ``scale`` of 1 and a ``beside`` of 0. ``software`` has the 90% ranges
        for other frameworks, as multiples of the returned fit's spread.
        """
        # Multiplied by this deviation, the disagreement of trees becomes the standard deviation of
        # a prediction's error. The ends are divided by it, so only ``beside`` and the range of
        # other frameworks make the interval wider than before.
        deviation = (self.high - self.low) / (2 * _NORMAL)
        adapted = replace(
            self,
            shift=shift,
            scale=deviation,
            beside=SOFTWARE_ERROR,
            low=self.low / deviation,
            high=self.high / deviation,
            pair_low=self.pair_low / deviation,
            pair_high=self.pair_high / deviation,
        )
        return adapted.widened(software)

    def widened(self, other: SoftwareRange) -> Fit:
        """Return the fit with its intervals widened as far as needed to contain ``other``."""
        return replace(
            self,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            pair_low=min(self.pair_low, other.pair_low),
            pair_high=max(self.pair_high, other.pair_high),
            # Another framework or another machine is faster or slower at many shapes at once.
            # Errors in a sum then cancel less than they do for the fitted measurements.
            sum_low=max(self.sum_low, 1.0),
            sum_high=max(self.sum_high, 1.0),
            change_low=max(self.change_low, 1.0),
            change_high=max(self.change_high, 1.0),
        )

    @property
    def range(self) -> SoftwareRange:
        """Ends of the intervals for single times and for time ratios."""
        return SoftwareRange(self.low, self.high, self.pair_low, self.pair_high)

    def stretched(self, factor: float) -> Fit:
        """Return the fit with the ends of its intervals multiplied by a factor."""
        names = ("low", "high", "pair_low", "pair_high")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def spreads(self, disagreement: Array) -> Array:
        """Return the spread of each case's prediction.

        ``disagreement`` has the relative spreads that
        :func:`analysis.model.corrected.corrected_estimate` returns.
        """
        return np.hypot(disagreement * self.scale, self.beside)

    @property
    def typical_spread(self) -> float:
        """Spread of a prediction if there are no trees, or if they disagree as much as usual."""
        return math.hypot(self.scale, self.beside)

    def spread(self, lo: float, hi: float) -> float:
        """Return the spread of a prediction, given the ends of its 90% interval in seconds.

        The result includes everything that widened this interval, such as the factors for the
        shape's kind.
        """
        return math.log(hi / lo) / (self.high - self.low)

    def ratio_range(self, near: bool, spreads: tuple[float, float]) -> tuple[float, float]:
        """Return the 90% range of log(measured / predicted) for the time ratio of two shapes.

        ``near`` is True if the two shapes are neighbours (see :data:`NEAR`).
        """
        combined = math.hypot(*spreads)
        if near:
            return self.pair_low * combined, self.pair_high * combined
        # The errors of two different shapes may lie at opposite ends of the range of single times.
        # If both spreads are equal, the combined spread is √2 times each of them.
        half = (self.high - self.low) * combined / math.sqrt(2)
        return -half, half

    def to_json(self) -> dict[str, Any]:
        """Return the fit as an entry of calibration.json."""
        attributes = {f.name: getattr(self, f.name) for f in fields(self)}
        converted = {
            "constants": self.constants.to_json(),
            "residual": None if self.residual is None else self.residual.to_json(),
            "offsets": None if self.offsets is None else self.offsets.to_json(),
            "groups": {name: list(factors) for name, factors in self.groups.items()},
            "shift": self.shift.to_json() if self.shift.log_seconds else None,
        }
        return {**attributes, **converted}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fit:
        """Inverse of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: if the entry is not a valid fit, or if an older version
                wrote it without the grown trees and scikit-learn is not installed.
        """
        if fault := misfit(data, _JSON_SHAPE):
            raise ValueError(fault)
        if data["low"] == data["high"]:
            raise ValueError("low and high are equal: the interval is empty")
        # Older files also have min_spread, which is always 0.
        attributes = {name: value for name, value in data.items() if name != "min_spread"}
        residual, offsets = data["residual"], data.get("offsets")
        groups = data.get("groups", {})
        converted = {
            "constants": Constants.from_json(data["constants"]),
            "residual": None if residual is None else Residual.from_json(residual),
            "offsets": None if offsets is None else Offsets.from_json(offsets),
            "groups": {name: (below, above) for name, (below, above) in groups.items()},
            "shift": Shift.from_json(data["shift"]) if data.get("shift") else Shift(),
        }
        return cls(**{**attributes, **converted})
