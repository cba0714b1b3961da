"""By how much other software is faster or slower than the one that a table was measured with.

Of a machine itself that is unknown until somebody measures it. But frameworks differ in much the
same way on its siblings, GPUs of its generation: in what a launch costs them, in the values that
operands have, and so in clocks. So their tables say what to expect, by how long a product takes.
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
_DOUBT = 3.0  # as if so many more siblings had shown no difference: of one, a quarter is believed
_SHAPE = {name: [Number(-50, 50)] for name in ("log_seconds", "log_ratios")}


class CollectionPair(NamedTuple):
    """Two collections of one machine: seconds of shapes in its table, and the log of the other
    collection's over them.
    """

    seconds: Array
    log_ratios: Array

    def between(self, low: float, high: float) -> CollectionPair:
        """Of those shapes that take so many microseconds."""
        rows = (low <= self.seconds * 1e6) & (self.seconds * 1e6 < high)
        return CollectionPair(self.seconds[rows], self.log_ratios[rows])


@dataclass(frozen=True)
class Shift:
    """Expected log ratio of other software's time to a table's; without knots, none.

    It is linear in the log of the table's seconds between knots, and constant beyond them.
    """

    log_seconds: tuple[float, ...] = ()
    log_ratios: tuple[float, ...] = ()

    def applied(self, seconds: Array) -> Array:
        """Seconds on other software, from seconds as the table has or predicts them."""
        if not self.log_seconds:
            return seconds
        return seconds * np.exp(np.interp(np.log(seconds), self.log_seconds, self.log_ratios))

    @classmethod
    def learned(cls, siblings: Sequence[Sequence[CollectionPair]]) -> Self:
        """From what siblings show; the fewer there are, the less of it is believed.

        Args:
            siblings: of each, its other collections.
        """
        knots = []
        for low, high in itertools.pairwise(_EDGES_US):
            within = [[part.between(low, high) for part in parts] for parts in siblings]
            rows = [[part for part in parts if len(part.seconds)] for parts in within]
            if known := [parts for parts in rows if parts]:
                knots.append(_knot(known))
        return cls(*zip(*knots, strict=True)) if knots else cls()

    def to_json(self) -> dict[str, Any]:
        """For kernels/timemodel/shipped.json."""
        return {"log_seconds": list(self.log_seconds), "log_ratios": list(self.log_ratios)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: a knot lacks a number, or knots are not in order.
        """
        if fault := misfit(data, _SHAPE):
            raise ValueError(fault)
        shift = cls(tuple(data["log_seconds"]), tuple(data["log_ratios"]))
        if len(shift.log_seconds) != len(shift.log_ratios):
            raise ValueError("a shift has as many times as ratios")
        if list(shift.log_seconds) != sorted(shift.log_seconds):
            raise ValueError("a shift's times are in order")
        return shift


def _knot(siblings: Sequence[Sequence[CollectionPair]]) -> tuple[float, float]:
    """The median log of seconds in one range of times, and the log ratio that is believed there.

    That is a median in which every sibling weighs as much, and every collection of one.
    """
    weights = [
        np.full(len(part.seconds), 1 / len(parts) / len(part.seconds))
        for parts in siblings
        for part in parts
    ]
    columns = zip(*itertools.chain.from_iterable(siblings), strict=True)
    seconds, log_ratios = (np.concatenate(column) for column in columns)
    shown = np.quantile(log_ratios, 0.5, weights=np.concatenate(weights), method="inverted_cdf")
    believed = len(siblings) / (len(siblings) + _DOUBT)
    return float(np.median(np.log(seconds))), believed * float(shown)
