"""Expected difference in time between the framework of a public table and other frameworks.

A collection is a public table of one machine, measured with one framework. A machine's siblings are
the other GPUs of its generation. Frameworks differ in the cost of a launch and in the values of the
operands, which affect the clocks. The resulting differences in time are similar on a machine and on
its siblings. The expected difference is therefore learned from the siblings' collections, as a
function of the time of a GEMM.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from kernels.common.documents import Number, misfit
from kernels.timemodel.estimate import Array

_EDGES_US = (0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0, 1024.0, np.inf)
"""Edges of the ranges into which a table's times are divided, in µs. The expected difference is
learned separately for each range."""

_ASSUMED_SIBLINGS = 3.0
"""Number of imaginary siblings on which all frameworks take the same time. With a single measured
sibling, the expected difference is therefore a quarter of the measured difference."""

_SHAPE = {name: [Number(-50, 50)] for name in ("log_seconds", "log_ratios")}


class CollectionPair(NamedTuple):
    """Times of two collections of one machine, for the shapes that both collections contain.

    ``seconds`` has each shape's time in the first collection. ``log_ratios`` has each shape's
    log(time in the second collection / time in the first).
    """

    seconds: Array
    log_ratios: Array

    def between(self, low: float, high: float) -> CollectionPair:
        """Return the shapes with ``low`` <= time in the first collection < ``high``, in µs."""
        is_between = (low <= self.seconds * 1e6) & (self.seconds * 1e6 < high)
        return CollectionPair(self.seconds[is_between], self.log_ratios[is_between])


@dataclass(frozen=True)
class Shift:
    """Expected log ratio of two times: another framework's time over the time in a table.

    The log ratio is a piecewise linear function of log(seconds), where ``seconds`` is the time in
    the table. The function is given by its knots, and is constant before the first knot and after
    the last. Without knots, the log ratio is zero.
    """

    log_seconds: tuple[float, ...] = ()
    log_ratios: tuple[float, ...] = ()

    def applied(self, seconds: Array) -> Array:
        """Return the expected seconds with another framework, given the seconds in the table."""
        if not self.log_seconds:
            return seconds
        return seconds * np.exp(np.interp(np.log(seconds), self.log_seconds, self.log_ratios))

    @classmethod
    def learned(cls, siblings: Sequence[Sequence[CollectionPair]]) -> Self:
        """Learn a shift from the collections of a machine's siblings.

        Args:
            siblings: pairs of collections for each sibling. In each pair, the first collection was
                measured with the framework of the machine's table, and the second is another
                collection of the same sibling.
        """
        knots = []
        for low, high in itertools.pairwise(_EDGES_US):
            # Keep the pairs that have shapes in this range of times, and the siblings that have
            # such pairs.
            siblings_in_range = []
            for pairs in siblings:
                pairs_in_range = [pair.between(low, high) for pair in pairs]
                not_empty = [pair for pair in pairs_in_range if len(pair.seconds)]
                if not_empty:
                    siblings_in_range.append(not_empty)
            if siblings_in_range:
                knots.append(_knot(siblings_in_range))
        if not knots:
            return cls()
        log_seconds, log_ratios = zip(*knots, strict=True)
        return cls(log_seconds, log_ratios)

    def to_json(self) -> dict[str, Any]:
        """Return the knots as an entry of calibration.json."""
        return {"log_seconds": list(self.log_seconds), "log_ratios": list(self.log_ratios)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: if the entry is invalid.
        """
        if fault := misfit(data, _SHAPE):
            raise ValueError(fault)
        shift = cls(tuple(data["log_seconds"]), tuple(data["log_ratios"]))
        if len(shift.log_seconds) != len(shift.log_ratios):
            raise ValueError("log_seconds and log_ratios have different lengths")
        if list(shift.log_seconds) != sorted(shift.log_seconds):
            raise ValueError("log_seconds are not in ascending order")
        return shift


def _knot(siblings: Sequence[Sequence[CollectionPair]]) -> tuple[float, float]:
    """Compute the knot for one range of times, as (log(seconds), log ratio).

    ``siblings`` has the pairs of each sibling, with only the shapes in this range.
    """
    # 1. Put the shapes of all pairs into one array. The weights of a sibling's shapes sum to 1, and
    #    the pairs of a sibling have equal weights.
    seconds_by_pair: list[Array] = []
    log_ratios_by_pair: list[Array] = []
    weights_by_pair: list[Array] = []
    for pairs in siblings:
        for pair in pairs:
            shapes = len(pair.seconds)
            seconds_by_pair.append(pair.seconds)
            log_ratios_by_pair.append(pair.log_ratios)
            weights_by_pair.append(np.full(shapes, 1 / len(pairs) / shapes))
    seconds = np.concatenate(seconds_by_pair)
    log_ratios = np.concatenate(log_ratios_by_pair)
    weights = np.concatenate(weights_by_pair)
    # 2. Take the weighted median of the log ratios, and shrink it towards zero.
    median = np.quantile(log_ratios, 0.5, weights=weights, method="inverted_cdf")
    shrinkage = len(siblings) / (len(siblings) + _ASSUMED_SIBLINGS)
    return float(np.median(np.log(seconds))), shrinkage * float(median)
