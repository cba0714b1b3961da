"""Expected difference in time between a table's framework and other frameworks.

The difference on the machine itself is unknown until somebody measures it. But frameworks differ in
much the same way on its siblings, the GPUs of its generation: in the cost of a launch and in the
values of operands, which affect clocks. The expected difference is therefore learned from the
siblings' tables, as a function of how long a GEMM takes.
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
_DOUBT = 3.0
"""Number of siblings without a difference that are assumed. A quarter of the difference that a
single sibling shows is therefore believed."""

_SHAPE = {name: [Number(-50, 50)] for name in ("log_seconds", "log_ratios")}


class CollectionPair(NamedTuple):
    """Two collections of one machine, at the shapes that both have.

    ``seconds`` are the times in the machine's table. ``log_ratios`` are the logs of the other
    collection's times over ``seconds``.
    """

    seconds: Array
    log_ratios: Array

    def between(self, low: float, high: float) -> CollectionPair:
        """Return the shapes that take from ``low`` to below ``high`` microseconds in the table."""
        rows = (low <= self.seconds * 1e6) & (self.seconds * 1e6 < high)
        return CollectionPair(self.seconds[rows], self.log_ratios[rows])


@dataclass(frozen=True)
class Shift:
    """Expected log ratio of another framework's time to a table's; without knots it is zero.

    The ratio is linear in the log of the table's seconds between knots, and constant beyond them.
    """

    log_seconds: tuple[float, ...] = ()
    log_ratios: tuple[float, ...] = ()

    def applied(self, seconds: Array) -> Array:
        """Return the expected seconds on another framework, given seconds on the table's."""
        if not self.log_seconds:
            return seconds
        return seconds * np.exp(np.interp(np.log(seconds), self.log_seconds, self.log_ratios))

    @classmethod
    def learned(cls, siblings: Sequence[Sequence[CollectionPair]]) -> Self:
        """Learn a shift from siblings. The more there are, the more of their difference counts.

        Args:
            siblings: for each sibling, its table paired with each of its other collections.
        """
        knots = []
        for low, high in itertools.pairwise(_EDGES_US):
            # Keep the pairs that have shapes in this range of times, and the siblings that have
            # such pairs.
            informative = []
            for pairs in siblings:
                within = [pair.between(low, high) for pair in pairs]
                if not_empty := [pair for pair in within if len(pair.seconds)]:
                    informative.append(not_empty)
            if informative:
                knots.append(_knot(informative))
        if not knots:
            return cls()
        log_seconds, log_ratios = zip(*knots, strict=True)
        return cls(log_seconds, log_ratios)

    def to_json(self) -> dict[str, Any]:
        """Return the document for kernels/timemodel/shipped.json."""
        return {"log_seconds": list(self.log_seconds), "log_ratios": list(self.log_ratios)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: if a knot lacks a number, or the knots are not in order.
        """
        if fault := misfit(data, _SHAPE):
            raise ValueError(fault)
        shift = cls(tuple(data["log_seconds"]), tuple(data["log_ratios"]))
        if len(shift.log_seconds) != len(shift.log_ratios):
            raise ValueError("log_seconds and log_ratios differ in length")
        if list(shift.log_seconds) != sorted(shift.log_seconds):
            raise ValueError("log_seconds are not in ascending order")
        return shift


def _knot(siblings: Sequence[Sequence[CollectionPair]]) -> tuple[float, float]:
    """Return the median log of the seconds in one range of times, and the log ratio believed there.

    The ratio is a weighted median. Every sibling has the same weight in it, and so has every
    collection of a sibling. Only a part of it is believed, which grows with the number of siblings.
    """
    weights = [
        np.full(len(pair.seconds), 1 / len(pairs) / len(pair.seconds))
        for pairs in siblings
        for pair in pairs
    ]
    all_pairs = list(itertools.chain.from_iterable(siblings))
    seconds = np.concatenate([pair.seconds for pair in all_pairs])
    log_ratios = np.concatenate([pair.log_ratios for pair in all_pairs])
    median = np.quantile(log_ratios, 0.5, weights=np.concatenate(weights), method="inverted_cdf")
    believed_share = len(siblings) / (len(siblings) + _DOUBT)
    return float(np.median(np.log(seconds))), believed_share * float(median)
