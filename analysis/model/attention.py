"""Predict the time of fused attention from the measurements in public tables.

A formula estimates the time. Its constants are fitted for each measured machine, framework and kind
of call (:data:`analysis.attention_shapes.KINDS`). If the machine's tables were imported, regression
trees correct the formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from analysis.attention_shapes import DECODE, AttentionShapes
from analysis.model.forest import Forest
from kernels.common.documents import COUNT, Each, Number, misfit
from kernels.machine import Machine
from kernels.timemodel.estimate import Array

_TILE = 128
"""Number of queries in a tile. FlashAttention-2 and -3 use 64 to 192 (Dao 2023, Shah 2024)."""

_SHARPNESS = 8  # Power with which cache hits become rare as operands outgrow the cache.
_TREES = 40  # Number of trees that correct the formula.
_LEAF_ROWS = 3  # Minimum number of calls in a leaf.
_MOST_ROWS = 8000
"""Maximum number of calls that a fit uses. With at most 8,000 calls, the mean error of a fit on
held-out calls is 2–5% for most tables (``rows`` in results/accuracy/attention.json)."""

_TRAINING_SHARE = 0.8  # Share of the calls to fit, up to _MOST_ROWS; all other calls are held out.
NINE_TENTHS = (0.05, 0.95)
"""Quantiles at the two ends of a 90% interval."""


@dataclass(frozen=True)
class AttentionConstants:
    """Constants of the formula for one kind of call, one machine and one framework.

    Attributes:
        share: share of the machine's peak that long sequences reach with a head dimension of 128.
        width: exponent of (head dimension / 128) in the factor that multiplies ``share``.
        half: number of keys per query at which half of ``share`` is reached.
        launch: fixed time of every call, in seconds.
        memory: share of the datasheet's bandwidth that a call with many bytes reaches.
        waves: 1 if a partial wave after full waves takes as long as a full one, 0 if its time is
            proportional to the number of its tiles. Values in between interpolate linearly.
        ramp: number of bytes at which a call reaches half of the bandwidth that ``memory`` gives.
        cached: ratio of the last-level cache's bandwidth to the memory's bandwidth.
        fits: number of bytes, relative to the size of the last-level cache, at which half of a
            call's bytes come from the cache.
    """

    share: float
    width: float
    half: float
    launch: float
    memory: float
    waves: float
    ramp: float
    cached: float
    fits: float

    def seconds(
        self, shapes: AttentionShapes, kind: str, machine: Machine, warm: bool = True
    ) -> Array:
        """Return the time of each call in seconds; :meth:`parts` explains the arguments."""
        return self.parts(shapes, kind, machine, warm).sum(axis=0)

    def parts(
        self, shapes: AttentionShapes, kind: str, machine: Machine, warm: bool = True
    ) -> Array:
        """Return an array of shape (3, calls): seconds for launch, arithmetic and memory accesses.

        Arithmetic and memory accesses overlap, so only the longer of the two adds to a call's time.
        The shorter time is returned as 0.

        ``kind`` is one of :data:`analysis.attention_shapes.KINDS`. If ``warm`` is true, operands
        that fit into the last-level cache are read from the cache. This holds for public tables,
        because their calls were repeated without flushing the cache. If ``warm`` is false, all
        operands come from memory. This holds when a model decodes, because other layers' keys and
        values replace the operands in the cache between two decoding steps.
        """
        # 1. Arithmetic: tiles of queries fill the SMs in waves, and more keys per query amortise
        #    the fixed cost of a tile.
        tiles = shapes.batch * shapes.heads * np.ceil(shapes.queries / _TILE)
        wave_count = tiles / machine.sms
        # Fewer tiles than SMs still take the time of one wave.
        rounded_count = self.waves * np.ceil(wave_count) + (1 - self.waves) * wave_count
        timed_count = np.maximum(rounded_count, 1.0)
        peak_share = self.share * (shapes.width / 128) ** self.width / (1 + self.half / shapes.seen)
        # wave_count / timed_count is the share of the SMs' time in which they have a tile.
        reached_flops = peak_of(machine) * peak_share * wave_count / timed_count
        arithmetic_seconds = shapes.flops(kind) / reached_flops
        # 2. Memory: a call that moves only a few bytes does not reach the full bandwidth.
        moved_bytes = shapes.bytes()
        hits: Array | float = 0.0  # share of the bytes that come from the cache
        if warm:
            hits = 1 / (1 + (moved_bytes / (self.fits * machine.l2_bytes)) ** _SHARPNESS)
        # The cache is faster than memory, so its bytes count for less.
        effective_bytes = moved_bytes * (1 - hits + hits / self.cached)
        memory_seconds = (effective_bytes + self.ramp) / (machine.bandwidth * self.memory)
        # 3. Keep the longer of the two.
        is_arithmetic_longer = arithmetic_seconds >= memory_seconds
        return np.stack(
            [
                np.full(len(moved_bytes), self.launch),
                np.where(is_arithmetic_longer, arithmetic_seconds, 0.0),
                np.where(is_arithmetic_longer, 0.0, memory_seconds),
            ]
        )


_START = AttentionConstants(0.6, 0.2, 500.0, 5e-6, 0.7, 0.5, 1e5, 3.0, 0.7)
"""Constants from which a fit starts."""
_LOW = AttentionConstants(0.01, -1.0, 1.0, 1e-7, 0.05, 0.0, 1.0, 1.0, 0.2)
"""Lower bounds of the constants."""
_HIGH = AttentionConstants(1.5, 2.0, 1e5, 1e-3, 1.2, 1.0, 1e9, 10.0, 2.0)
"""Upper bounds of the constants."""
_LEAST_BANDWIDTH = 0.6
"""Lower bound of ``memory`` for the kinds of calls ``context`` and ``full``. Few such calls are
limited by the bandwidth. With a smaller bound, ``memory`` would therefore absorb errors in the
predicted time of arithmetic."""

_FEATURE_COUNT = 13  # Number of columns that features() returns.

_LINEAR = ("width", "waves")
"""Constants that are fitted directly; all others are fitted as logarithms."""

_JSON_SHAPE = {
    "constants": Each(Number()), "low": Number(), "high": Number(), "calls": COUNT,
    "forest?": dict,
}  # fmt: skip


def peak_of(machine: Machine) -> float:
    """Return the machine's peak for 16-bit GEMMs in FLOP/s; attention computes in 16 bits."""
    return machine.peaks.get("bf16") or machine.peaks["fp16"]


@dataclass(frozen=True)
class AttentionFit:
    """Constants for one kind of call, trees that correct the formula, and the range of errors.

    Attributes:
        low: 5th percentile of log(measured / predicted) on held-out calls.
        high: 95th percentile of the same log ratios.
        calls: number of measured calls.
        forest: trees that predict log(measured / formula); None for the fits that are shipped.
    """

    constants: AttentionConstants
    low: float
    high: float
    calls: int
    forest: Forest | None = None

    @classmethod
    def from_times(
        cls, shapes: AttentionShapes, seconds: Array, kind: str, machine: Machine
    ) -> Self:
        """Fit constants and trees to a random part of the calls, and judge the fit on the others.

        ``seconds`` are the measured times of at least three calls.
        """
        # 1. Draw the calls to fit at random. The fit is judged on all others.
        order = np.random.default_rng(0).permutation(len(seconds))
        training_count = min(_MOST_ROWS, round(_TRAINING_SHARE * len(seconds)))
        training, held_out = order[:training_count], order[training_count:]
        # 2. Fit the formula, then grow trees from its errors.
        training_shapes = shapes.take(training)
        constants = fit_constants(training_shapes, seconds[training], kind, machine)
        residual = np.log(seconds[training] / constants.seconds(training_shapes, kind, machine))
        forest = grow_trees(features(training_shapes, kind, machine), residual)
        # 3. Judge the fit. judged() replaces the ends of the interval, which are 0 here.
        fit = cls(constants, 0.0, 0.0, len(seconds), forest)
        return fit.judged(shapes.take(held_out), seconds[held_out], kind, machine)

    def judged(self, shapes: AttentionShapes, seconds: Array, kind: str, machine: Machine) -> Self:
        """Return a copy of the fit with the 90% range of its errors on the given calls."""
        log_ratios = np.log(seconds / self.seconds(shapes, kind, machine))
        low, high = np.quantile(log_ratios, NINE_TENTHS)
        return replace(self, low=float(low), high=float(high))

    def seconds(
        self, shapes: AttentionShapes, kind: str, machine: Machine, warm: bool = True
    ) -> Array:
        """Return the time of each call in seconds.

        :meth:`AttentionConstants.parts` explains the arguments.
        """
        time = self.constants.seconds(shapes, kind, machine, warm)
        if self.forest is None:
            return time
        log_ratios, _ = self.forest.predict(features(shapes, kind, machine))
        return time * np.exp(log_ratios)

    def to_json(self) -> dict[str, Any]:
        """Return the fit as a JSON document, with constants rounded to six significant digits."""
        constants = {name: float(f"{value:.6g}") for name, value in vars(self.constants).items()}
        document: dict[str, Any] = {
            "constants": constants,
            "low": self.low,
            "high": self.high,
            "calls": self.calls,
        }
        if self.forest is not None:
            document["forest"] = self.forest.to_json()
        return document

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Restore a fit from the document that :meth:`to_json` returned.

        Raises:
            KeyError, TypeError, ValueError: if the document is not a valid fit.
        """
        if fault := misfit(data, _JSON_SHAPE):
            raise ValueError(fault)
        forest = Forest.from_json(data["forest"]) if "forest" in data else None
        if forest is not None and forest.width != _FEATURE_COUNT:
            raise ValueError(f"the trees test {forest.width} features, not {_FEATURE_COUNT}")
        constants = AttentionConstants(**data["constants"])
        return cls(constants, data["low"], data["high"], data["calls"], forest)


def fit_constants(
    shapes: AttentionShapes, seconds: Array, kind: str, machine: Machine
) -> AttentionConstants:
    """Fit the formula's constants to measured times, by robust least squares of log ratios."""
    # SciPy is imported here because importing it takes longer than a prediction, and predictions do
    # not need it.
    from scipy.optimize import least_squares

    names = list(vars(_START))

    def to_numbers(constants: AttentionConstants) -> list[float]:
        values = vars(constants)
        return [values[name] if name in _LINEAR else math.log(values[name]) for name in names]

    def to_constants(numbers: Array) -> AttentionConstants:
        pairs = zip(names, map(float, numbers), strict=True)
        return AttentionConstants(
            **{name: number if name in _LINEAR else math.exp(number) for name, number in pairs}
        )

    def log_errors(numbers: Array) -> Array:
        return np.log(to_constants(numbers).seconds(shapes, kind, machine) / seconds)

    low = _LOW if kind == DECODE else replace(_LOW, memory=_LEAST_BANDWIDTH)
    solution = least_squares(
        log_errors,
        to_numbers(_START),
        bounds=(to_numbers(low), to_numbers(_HIGH)),
        loss="soft_l1",
        f_scale=0.1,  # errors above about 10% weigh less than their square
    )
    return to_constants(solution.x)


def features(shapes: AttentionShapes, kind: str, machine: Machine) -> Array:
    """Return the features that the trees test, as an array of shape (calls, features)."""
    tiles = shapes.batch * shapes.heads * np.ceil(shapes.queries / _TILE)
    columns = [
        np.log(shapes.batch),
        np.log(shapes.heads),
        np.log(shapes.kv_heads),
        np.log(shapes.heads / shapes.kv_heads),
        np.log(shapes.keys),
        np.log(shapes.seen),
        shapes.width,
        np.log(tiles / machine.sms),
        np.log(shapes.batch * shapes.kv_heads),
        np.log(shapes.batch * shapes.keys),
        np.log(shapes.flops(kind)),
        np.log(shapes.bytes()),
        np.log(shapes.bytes() / machine.l2_bytes),
    ]
    return np.stack(columns, axis=1)


def grow_trees(call_features: Array, residual: Array) -> Forest:
    """Grow trees that predict ``residual``, the log(measured / formula) of each call.

    If there are more than :data:`_MOST_ROWS` calls, only a random sample of them is used.
    """
    chosen = np.random.default_rng(0).permutation(len(call_features))[:_MOST_ROWS]
    return Forest.grown(call_features[chosen], residual[chosen], _TREES, _LEAF_ROWS)
