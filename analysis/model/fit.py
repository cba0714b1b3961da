"""Constants of one group, and how wrong they are on measurements that they had not seen."""

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
"""Log ratio of measured to predicted time within which nine shapes in ten should lie without any
measurement: a factor of two either way. It held at least 98% of the times in public tables of H100,
A100 and V100, but 67% of those of T4 and none of those of L4."""

UNCALIBRATED_PAIR = (-0.2, 0.2)
"""The same range for the time ratio of two neighbouring shapes, whose errors are largely the same.
It holds nine in ten pairs of six out of nine public tables. For V100 in fp16, T4 and L4, the range
of nine in ten pairs reaches up to 0.34 (results/accuracy/neighbours.json)."""

FP32_LIKE = (-0.1, 0.35)
"""The same range for fp32 GEMMs on a GPU with the compute capability of a measured one. It holds
more than nine in ten linear layers of sitar-lab/NeuSight on H100, A100 (40 and 80 GB) and V100; no
constants were ever fitted to the A100 40 GB. Other GPUs do not get this range, because T4 and L4
take twice as long as predicted (results/accuracy/fp32-interval.json)."""

NEAR = 0.125
"""Share by which the larger of two neighbouring shapes may exceed the smaller one in each
dimension."""


SOFTWARE_ERROR = 0.05
"""Standard deviation of the log ratio that another framework adds to a prediction's error. Trees
agree about the shapes that they grew from, and on some machines about most shapes, but another
framework differs at all of them. With a smaller value, an interval holds too few times at the
shapes that the trees had seen (``coverage_90_seen`` in results/accuracy/software.json)."""

_NORMAL = 1.645
"""Number of standard deviations on either side that hold nine in ten values of a normal
distribution."""


@dataclass(frozen=True)
class SoftwareRange:
    """90% range of the log ratio of another framework's time to the predicted time.

    Its ends are multiples of a prediction's spread, which combines the model's own error and
    :data:`SOFTWARE_ERROR` (:meth:`Fit.for_software`). Such a range also bounds the errors of
    constants that are shipped, or carried over from another machine of the generation. ``pair_low``
    and ``pair_high`` bound the time ratios of two neighbouring shapes, as in :class:`Fit`.
    """

    low: float
    high: float
    pair_low: float
    pair_high: float

    def joined(self, other: SoftwareRange) -> SoftwareRange:
        """Return the smallest range that contains both."""
        return SoftwareRange(
            min(self.low, other.low),
            max(self.high, other.high),
            min(self.pair_low, other.pair_low),
            max(self.pair_high, other.pair_high),
        )

    def to_json(self) -> dict[str, float]:
        """Return the ends by name; :class:`Fit` has the same names."""
        return asdict(self)


_FIGURES = {
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
    """Constants of one group, and how wrong they are.

    :meth:`spreads` combines the spread of the trees with ``scale`` and ``beside``: √((``scale`` ×
    trees)² + ``beside``²). The ends of intervals are multiples of this spread.

    Attributes:
        constants: constants of the formula.
        residual: trees that predict what the formula and public tables miss.
        low: lower end of the range of nine in ten log ratios of measured to predicted time, on
            measurements that the constants had not seen, as a multiple of the prediction's spread.
        high: upper end of that range.
        pair_low: lower end of the same range for the time ratio of two neighbouring shapes (see
            :data:`NEAR`), whose errors are largely the same. It is a multiple of the root of the
            sum of both squared spreads.
        pair_high: upper end of that range.
        rows: number of measurements.
        pairs: number of pairs of neighbouring shapes among them.
        median: median absolute relative error on held-out measurements.
        mean: mean of these errors.
        p95: 95th percentile of these errors.
        aligned_only: True if all measurements had sizes in multiples of 16 bytes. The cost of other
            sizes is then an assumption.
        layout: layout of all measurements, which then are single GEMMs; empty if there are several.
        scale: factor of the trees' spread. For users of another framework it makes the spread a
            standard deviation of the log ratio.
        beside: standard deviation that the spread gains, in quadrature, for users of another
            framework.
        sum_low: factor by which the interval of a sum of times is wider below than the intervals of
            its parts make it (see :mod:`analysis.model.sum_errors`).
        sum_high: the same factor above.
        change_low: the same factor below, after some of the times were replaced by those of
            neighbouring shapes.
        change_high: that factor above.
        offsets: log ratios that public tables predict for the machine.
        groups: factors of both ends of the interval for kinds of shapes (see
            :mod:`analysis.model.groups`).
        start: source of the constants that the fit started from, in words, if they come from public
            tables; empty if ``offsets`` names the tables.
        shift: expected difference for users of another framework than the measurements come from.
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

    def has_like(self, problem: Problem) -> bool:
        """Return True if problems with this one's alignment, layout and batch were measured."""
        if self.aligned_only and priced_alignment(problem) < WIDE_BYTES:
            return False
        if not self.layout:  # several layouts were measured
            return True
        is_single_gemm = isinstance(problem, Gemm) and problem.batch == 1
        return is_single_gemm and problem.layout == self.layout

    def for_software(self, software: SoftwareRange, shift: Shift) -> Fit:
        """Return the fit for users of another framework than the measurements come from."""
        # The spread of a prediction times this factor is the standard deviation of its error. The
        # ends are divided by it, because they are multiples of the scaled spread.
        deviation = (self.high - self.low) / (2 * _NORMAL)
        moved = replace(
            self,
            shift=shift,
            scale=deviation,
            beside=SOFTWARE_ERROR,
            low=self.low / deviation,
            high=self.high / deviation,
            pair_low=self.pair_low / deviation,
            pair_high=self.pair_high / deviation,
        )
        return moved.widened(software)

    def widened(self, to: SoftwareRange) -> Fit:
        """Return the fit with its intervals widened as far as needed to contain a range."""
        return replace(
            self,
            low=min(self.low, to.low),
            high=max(self.high, to.high),
            pair_low=min(self.pair_low, to.pair_low),
            pair_high=max(self.pair_high, to.pair_high),
            # Another framework is faster or slower at many shapes at once, so errors do not cancel.
            sum_low=max(self.sum_low, 1.0),
            sum_high=max(self.sum_high, 1.0),
            change_low=max(self.change_low, 1.0),
            change_high=max(self.change_high, 1.0),
        )

    @property
    def range(self) -> SoftwareRange:
        """Ends of the intervals."""
        return SoftwareRange(self.low, self.high, self.pair_low, self.pair_high)

    def stretched(self, factor: float) -> Fit:
        """Return the fit with intervals that reach ``factor`` times as far."""
        names = ("low", "high", "pair_low", "pair_high")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def spreads(self, of_trees: Array) -> Array:
        """Return the spread of each case; the ends of its interval are multiples of it.

        Args:
            of_trees: spread of the trees for each case, which typically is 1.
        """
        return np.hypot(of_trees * self.scale, self.beside)

    @property
    def typical_spread(self) -> float:
        """Spread where the trees disagree as they typically do, or where there are none."""
        return math.hypot(self.scale, self.beside)

    def spread(self, lo: float, hi: float) -> float:
        """Return the spread of a prediction, given the ends of its 90% interval."""
        return math.log(hi / lo) / (self.high - self.low)

    def ratio_range(self, near: bool, spreads: tuple[float, float]) -> tuple[float, float]:
        """Return the 90% range of the error of a log time ratio.

        Args:
            near: True for a ratio of two neighbouring shapes, False for one of any two shapes.
            spreads: spreads of the two predictions. Where the residual's trees disagree, both
                predictions are less certain.
        """
        combined = math.hypot(*spreads)
        if near:
            return self.pair_low * combined, self.pair_high * combined
        # The errors of unlike shapes may lie at opposite ends of their ranges. For two equal
        # spreads, the combined one is √2 times each of them.
        half = (self.high - self.low) * combined / math.sqrt(2)
        return -half, half

    def to_json(self) -> dict[str, Any]:
        """Return the document for calibration.json."""
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
            ValueError: if a figure is missing or is not a number.
            TypeError: if there are figures that no fit has.
        """
        if fault := misfit(data, _FIGURES):
            raise ValueError(fault)
        if data["low"] == data["high"]:
            raise ValueError("low and high are equal: the interval is empty")
        # Older files have this figure, which is always 0.
        data = {name: value for name, value in data.items() if name != "min_spread"}
        residual, offsets = data["residual"], data.get("offsets")
        groups = data.get("groups", {})
        converted = {
            "constants": Constants.from_json(data["constants"]),
            "residual": residual and Residual.from_json(residual),
            "offsets": offsets and Offsets.from_json(offsets),
            "groups": {name: (below, above) for name, (below, above) in groups.items()},
            "shift": Shift.from_json(data["shift"]) if data.get("shift") else Shift(),
        }
        return cls(**{**data, **converted})
