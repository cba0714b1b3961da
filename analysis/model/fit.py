"""One group's constants, and what they are worth on rows that they had not seen."""

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
"""Log ratio of measured to predicted that nine shapes in ten should keep without any measurement:
a factor of two either way. It held at least 98 % of the rows of public tables of H100, A100 and
V100, but 67 % of T4's and none of L4's."""

UNCALIBRATED_PAIR = (-0.2, 0.2)
"""Likewise of the time ratio of two neighbours, whose errors are largely the same. It holds nine in
ten pairs of six out of nine public tables; of V100's fp16, T4's and L4's, nine in ten reach up to
0.34 (tests/recordings/neighbours.json)."""

FP32_LIKE = (-0.1, 0.35)
"""The same for fp32 GEMMs on a GPU with the compute capability of a measured one. More than nine in
ten linear layers of sitar-lab/NeuSight lie within it on H100, A100 (40 and 80 GB) and V100; the
A100 40 GB was never fitted. Other GPUs do not get it, because T4 and L4 take twice as long as
predicted (tests/recordings/fp32-interval.json)."""

NEAR = 0.125
"""How much larger the larger of two neighbouring shapes may be, in each dimension."""


SOFTWARE_ERROR = 0.05
"""What other software than the rows came from adds to a prediction's error, as a standard deviation
of the log ratio. Trees agree about the very shapes that they grew from, and on some machines about
most, but other software differs at all of them: with less, an interval holds too few rows at the
shapes that were seen (``coverage_90_seen`` in tests/recordings/software.json)."""

_NORMAL = 1.645
"""Standard deviations on either side that hold nine in ten values of a normal law."""


@dataclass(frozen=True)
class SoftwareRange:
    """Nine in ten log ratios of other software's times to predictions, over their spreads.

    A spread is the model's own error and :data:`SOFTWARE_ERROR` together: :meth:`Fit.for_software`.
    Also of constants that are shipped, or carried over from another machine of the generation. As
    in :class:`Fit`: ``pair_low`` and ``pair_high`` are of the time ratios of two neighbours.
    """

    low: float
    high: float
    pair_low: float
    pair_high: float

    def joined(self, other: SoftwareRange) -> SoftwareRange:
        """The range that contains both."""
        return SoftwareRange(
            min(self.low, other.low),
            max(self.high, other.high),
            min(self.pair_low, other.pair_low),
            max(self.pair_high, other.pair_high),
        )

    def to_json(self) -> dict[str, float]:
        """By name; the same names as a fit's."""
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
    """One group's constants and what they are worth.

    ``offsets`` are what public tables say about the machine, and ``residual`` has the trees of what
    is left. Whoever runs another framework than the rows came from gets times by ``shift``.
    ``low`` and ``high`` bound nine in ten log ratios of measured to predicted, over the
    prediction's spread, on rows that the constants had not seen; ``median``, ``mean`` and ``p95``
    are absolute relative errors there. ``pair_low`` and ``pair_high`` bound the same for the ratio
    of two neighbouring shapes (see :data:`NEAR`), whose errors are largely the same, over the root
    of the sum of both spreads' squares; ``pairs`` is how many there were. ``aligned_only`` says
    that all rows had sizes in multiples of 16 bytes: what others cost is then assumed. ``layout``
    is that of all rows, which then are single products; empty where there are several. A spread
    is √((``scale`` × the trees')² + ``beside``²): for those who run other software, a standard
    deviation of the log ratio. ``sum_low`` and ``sum_high`` are by how much the interval of a sum
    of times is wider, below and above, than their intervals make it, ``change_low`` and
    ``change_high`` likewise after some of the times were changed for those of neighbours (see
    :mod:`analysis.model.sum_errors`). ``groups`` has factors of both ends of the interval for kinds
    of shapes (:mod:`analysis.model.groups`). ``start`` says what the rows were fitted on top of.
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
        """Whether rows like this problem were measured: as aligned, of its layout and batch."""
        if self.aligned_only and priced_alignment(problem) < WIDE_BYTES:
            return False
        single = isinstance(problem, Gemm) and problem.batch == 1
        return not self.layout or (single and problem.layout == self.layout)

    def for_software(self, software: SoftwareRange, shift: Shift) -> Fit:
        """The same, for whoever runs another software than the rows came from."""
        # A prediction's spread times this is the standard deviation of its error.
        own = (self.high - self.low) / (2 * _NORMAL)
        moved = replace(
            self,
            shift=shift,
            scale=own,
            beside=SOFTWARE_ERROR,
            low=self.low / own,
            high=self.high / own,
            pair_low=self.pair_low / own,
            pair_high=self.pair_high / own,
        )
        return moved.widened(software)

    def widened(self, to: SoftwareRange) -> Fit:
        """The same with intervals of at least a range."""
        return replace(
            self,
            low=min(self.low, to.low),
            high=max(self.high, to.high),
            pair_low=min(self.pair_low, to.pair_low),
            pair_high=max(self.pair_high, to.pair_high),
            # Other software is faster or slower at many shapes at once.
            sum_low=max(self.sum_low, 1.0),
            sum_high=max(self.sum_high, 1.0),
            change_low=max(self.change_low, 1.0),
            change_high=max(self.change_high, 1.0),
        )

    @property
    def range(self) -> SoftwareRange:
        """The ends of its intervals."""
        return SoftwareRange(self.low, self.high, self.pair_low, self.pair_high)

    def stretched(self, factor: float) -> Fit:
        """The same with intervals that reach so many times as far."""
        names = ("low", "high", "pair_low", "pair_high")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def spreads(self, of_trees: Array) -> Array:
        """What intervals are multiples of, from the trees' spread, which typically is 1."""
        return np.hypot(of_trees * self.scale, self.beside)

    @property
    def typical_spread(self) -> float:
        """The spread where the trees disagree as they typically do, or where there are none."""
        return math.hypot(self.scale, self.beside)

    def spread(self, lo: float, hi: float) -> float:
        """The spread of a prediction, from its 90 % interval."""
        return math.log(hi / lo) / (self.high - self.low)

    def ratio_range(self, near: bool, spreads: tuple[float, float]) -> tuple[float, float]:
        """The 90 % range of a log time ratio's error: of neighbours, or of any two shapes.

        ``spreads`` are those of the two predictions: where the residual's trees disagree, both
        are less certain.
        """
        both = math.hypot(*spreads)
        if near:
            return self.pair_low * both, self.pair_high * both
        # The errors of unlike shapes may lie at opposite ends of their ranges.
        half = (self.high - self.low) * both / math.sqrt(2)
        return -half, half

    def to_json(self) -> dict[str, Any]:
        """For calibration.json."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        residual = None if self.residual is None else self.residual.to_json()
        offsets = None if self.offsets is None else self.offsets.to_json()
        constants = self.constants.to_json()
        shift = self.shift.to_json() if self.shift.log_seconds else None
        fitted = {"constants": constants, "residual": residual, "offsets": offsets}
        fitted["groups"] = {name: list(ends) for name, ends in self.groups.items()}
        return {**plain, **fitted, "shift": shift}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fit:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: a figure is missing or no number.
            TypeError: there are figures that no fit has.
        """
        if fault := misfit(data, _FIGURES):
            raise ValueError(fault)
        if data["low"] == data["high"]:
            raise ValueError("an interval has two ends")
        # Older files have this figure, always 0.
        data = {name: value for name, value in data.items() if name != "min_spread"}
        residual = data["residual"] and Residual.from_json(data["residual"])
        offsets = data.get("offsets") and Offsets.from_json(data["offsets"])
        constants = Constants.from_json(data["constants"])
        shift = Shift.from_json(data["shift"]) if data.get("shift") else Shift()
        groups = {name: (low, high) for name, (low, high) in data.get("groups", {}).items()}
        fitted = {"constants": constants, "residual": residual, "offsets": offsets, "shift": shift}
        return cls(**{**data, **fitted, "groups": groups})
