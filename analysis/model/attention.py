"""Predict the time of fused attention from measurements of public tables.

A formula with a few constants for each machine and framework gives the share of the peak, or of the
bandwidth, that a kernel reaches. If the machine's tables were imported, trees correct the formula.
Frameworks differ by more than the errors within one of them, so the interval covers all frameworks
unless one is named.

Three kinds of calls are measured and predicted separately: ``context`` is the causal attention of a
prompt, ``full`` has no mask, and ``decode`` has one query for each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from analysis.attention_shapes import DECODE, AttentionShapes
from analysis.model.forest import Forest
from kernels.machine import Machine
from kernels.timemodel.estimate import Array

_TILE = 128
"""Queries of a tile. FlashAttention-2 and -3 have 64 to 192 (Dao 2023; Shah et al. 2024)."""

_SHARP = 8  # power with which hits in the cache become rare as operands outgrow it
_TREES = 40
_LEAF = 3
_MOST_ROWS = 8000
"""Calls from which trees grow. More take longer and lower the error of 3% by less than a point."""

_TRAINING = 0.8  # share of the calls that a fit is made from; the others judge it
NINE_TENTHS = (0.05, 0.95)
"""Ends of a 90% interval."""


@dataclass(frozen=True)
class AttentionConstants:
    """Constants of the formula for one kind of calls, machine and framework.

    Attributes:
        share: share of the peak that long sequences reach with heads 128 wide.
        width: exponent by which the share grows with the width of a head.
        half: number of keys at which half of that share is reached.
        launch: fixed time of every call, in seconds.
        memory: share of the bandwidth that is reached.
        waves: 1 if a partial wave of tiles costs as much as a full one, 0 if it costs only its
            share of one; values in between interpolate.
        ramp: bytes in flight at which half of the bandwidth is reached.
        cached: speed of the last-level cache over that of memory.
        fits: share of the last-level cache up to which operands stay in it between calls.
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
        """Return the time of each call in seconds."""
        return self.parts(shapes, kind, machine, warm).sum(axis=0)

    def parts(
        self, shapes: AttentionShapes, kind: str, machine: Machine, warm: bool = True
    ) -> Array:
        """Return the seconds of the launch, of arithmetic and of memory accesses, one row each.

        Arithmetic and memory accesses overlap. Only the longer of the two counts for a call; the
        other one is 0.

        Args:
            shapes: the calls.
            kind: kind of the calls, one of :data:`analysis.attention_shapes.KINDS`.
            machine: the machine.
            warm: True if operands that fit into the last-level cache come from there, as in public
                tables, which repeat a call without flushing the cache. In a model, weights and
                other layers' keys and values have replaced them.
        """
        # 1. Arithmetic: tiles of queries fill the SMs in waves, and long sequences amortise a tile.
        tiles = shapes.batch * shapes.heads * np.ceil(shapes.queries / _TILE)
        waves = tiles / machine.sms
        # Fewer tiles than SMs still take the time of one wave.
        waves_of_time = np.maximum(self.waves * np.ceil(waves) + (1 - self.waves) * waves, 1.0)
        share = self.share * (shapes.width / 128) ** self.width / (1 + self.half / shapes.seen)
        arithmetic = shapes.flops(kind) / (peak_of(machine) * share * waves / waves_of_time)
        # 2. Memory: a few bytes do not fill the pipes to memory.
        moved_bytes = shapes.bytes()
        hits: Array | float = 0.0  # share of the bytes that come from the cache
        if warm:
            hits = 1 / (1 + (moved_bytes / (self.fits * machine.l2_bytes)) ** _SHARP)
        # Bytes from the cache count for less, because it is faster than memory.
        effective_bytes = moved_bytes * (1 - hits + hits / self.cached)
        memory = (effective_bytes + self.ramp) / (machine.bandwidth * self.memory)
        # 3. Keep the longer of the two.
        is_arithmetic_longer = arithmetic >= memory
        return np.stack(
            [
                np.full(len(moved_bytes), self.launch),
                np.where(is_arithmetic_longer, arithmetic, 0.0),
                np.where(is_arithmetic_longer, 0.0, memory),
            ]
        )


_START = AttentionConstants(0.6, 0.2, 500.0, 5e-6, 0.7, 0.5, 1e5, 3.0, 0.7)
_LOW = AttentionConstants(0.01, -1.0, 1.0, 1e-7, 0.05, 0.0, 1.0, 1.0, 0.2)
_HIGH = AttentionConstants(1.5, 2.0, 1e5, 1e-3, 1.2, 1.0, 1e9, 10.0, 2.0)
_LEAST_BANDWIDTH = 0.6
"""Smallest share of the bandwidth in a fit to prompts or encoders. Few of their times depend on it,
and a lower share would absorb the errors of the arithmetic."""

_LINEAR = ("width", "waves")
"""Constants that are fitted as they are; the others are fitted as logarithms."""


def peak_of(machine: Machine) -> float:
    """Return the machine's peak for 16-bit GEMMs in FLOP/s; attention computes in 16 bits."""
    return machine.peaks.get("bf16") or machine.peaks["fp16"]


@dataclass(frozen=True)
class AttentionFit:
    """Constants of one kind of calls, the trees that correct them, and their errors.

    ``low`` and ``high`` are the 5th and the 95th percentile of the logarithm of the true time over
    the predicted one, on held-out calls. ``calls`` is the number of measured calls. ``forest`` is
    None where only constants are shipped.
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
        """Fit constants and trees to a random part of the calls, and judge them by the rest."""
        order = np.random.default_rng(0).permutation(len(seconds))
        training_count = min(_MOST_ROWS, round(_TRAINING * len(seconds)))
        training, held_out = order[:training_count], order[training_count:]
        training_shapes = shapes.where(training)
        constants = fit_constants(training_shapes, seconds[training], kind, machine)
        residual = np.log(seconds[training] / constants.seconds(training_shapes, kind, machine))
        forest = grown(features(training_shapes, kind, machine), residual)
        # The ends of the interval are 0 until the held-out calls give them.
        fit = cls(constants, 0.0, 0.0, len(seconds), forest)
        return fit.judged(shapes.where(held_out), seconds[held_out], kind, machine)

    def judged(self, shapes: AttentionShapes, seconds: Array, kind: str, machine: Machine) -> Self:
        """Return the same fit with the 90% interval of its errors on these calls."""
        log_ratios = np.log(seconds / self.seconds(shapes, kind, machine))
        low, high = np.quantile(log_ratios, NINE_TENTHS)
        return replace(self, low=float(low), high=float(high))

    def seconds(
        self, shapes: AttentionShapes, kind: str, machine: Machine, warm: bool = True
    ) -> Array:
        """Return the time of each call in seconds; ``warm`` as in :class:`AttentionConstants`."""
        time = self.constants.seconds(shapes, kind, machine, warm)
        if self.forest is None:
            return time
        log_ratios, _ = self.forest.predict(features(shapes, kind, machine))
        return time * np.exp(log_ratios)

    def to_json(self) -> dict[str, Any]:
        """Return the fit as a document for JSON."""
        constants = {name: float(f"{value:.6g}") for name, value in vars(self.constants).items()}
        document: dict[str, Any] = {
            "constants": constants, "low": self.low, "high": self.high, "calls": self.calls,
        }  # fmt: skip
        if self.forest is not None:
            document["forest"] = self.forest.to_json()
        return document

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` returned.

        Raises:
            KeyError, TypeError, ValueError: if the document is not such a fit.
        """
        forest = Forest.from_json(data["forest"]) if "forest" in data else None
        constants = {name: float(value) for name, value in data["constants"].items()}
        low, high = float(data["low"]), float(data["high"])
        if not all(map(math.isfinite, (*constants.values(), low, high))):
            raise ValueError("a constant or an end of the interval is not finite")
        return cls(AttentionConstants(**constants), low, high, int(data["calls"]), forest)


def fit_constants(
    shapes: AttentionShapes, seconds: Array, kind: str, machine: Machine
) -> AttentionConstants:
    """Fit the formula's constants to measured times, by least squares of logarithms.

    Errors of more than about a tenth count less than by their square.
    """
    from scipy.optimize import least_squares  # takes longer to import than to predict

    names = list(vars(_START))

    def to_numbers(constants: AttentionConstants) -> list[float]:
        """Return the numbers that are fitted, most of them logarithms."""
        values = vars(constants)
        return [values[name] if name in _LINEAR else math.log(values[name]) for name in names]

    def to_constants(numbers: Array) -> AttentionConstants:
        """Inverse of ``to_numbers``."""
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
        f_scale=0.1,
    )
    return to_constants(solution.x)


def features(shapes: AttentionShapes, kind: str, machine: Machine) -> Array:
    """Return the trees' features: sizes, query heads per key head, tiles, FLOPs and bytes.

    The array has the shape (calls, features).
    """
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


def grown(rows: Array, residual: Array) -> Forest:
    """Grow trees from at most :data:`_MOST_ROWS` rows, drawn at random.

    Args:
        rows: features, one row per call.
        residual: log of the measured over the formula's time of each call.
    """
    chosen = np.random.default_rng(0).permutation(len(rows))[:_MOST_ROWS]
    return Forest.grown(rows[chosen], residual[chosen], _TREES, _LEAF)
