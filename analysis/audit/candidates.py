"""Propose values near those of a model's dimensions that an engineer would choose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sweeps.capture.captured import Attention, Captured, Dimension

REACH = 0.125
"""Largest distance that a size may move, as a share of it."""

_MULTIPLES = (8, 16, 32, 64, 128, 256)
_OF_VOCABULARY = (512, 1024)
_VOCABULARY = 30_000


def candidates(dimension: Dimension, captured: Captured, tp: int = 1) -> list[int]:
    """Return the nearby sizes that an engineer would choose: multiples of 8 and of powers of two.

    The number of heads remains a multiple of the key/value heads that they share, and each of
    ``tp`` processes gets a whole part. A vocabulary can only grow, and so can a number of experts,
    classes, labels or input channels.
    """
    value = dimension.value
    unit, few = _unit(dimension, captured)
    low, high = math.ceil(value * (1 - REACH)), math.floor(value * (1 + REACH))
    if few:
        low, high = value - 4, value + 8
    multiples = (*_MULTIPLES, *(_OF_VOCABULARY if value >= _VOCABULARY else ()))
    # Each process has a whole part of a width, and it is this part that has to be a multiple.
    steps = {math.lcm(unit, tp if few else tp * step) for step in multiples}
    found: set[int] = set()
    for step in steps:
        found |= {value // step * step, -(-value // step) * step, (value // step + 1) * step}
    if _only_grows(dimension.name) or value >= _VOCABULARY:
        low = value
    return sorted(v for v in found if low <= v <= high and v > 0 and v != value)


def pairs_of(
    captured: Captured, dimensions: Sequence[Dimension]
) -> Iterator[dict[str, tuple[int, int]]]:
    """Yield joint changes of a hidden size and its number of heads that keep a head's width."""
    by_width = [d for d in dimensions if _slope(captured, d, "width") > 0]
    by_heads = [d for d in dimensions if _slope(captured, d, "heads") > 0]
    for hidden in by_width:
        for heads in by_heads:
            if heads is hidden or hidden.value % heads.value:
                continue
            width = hidden.value // heads.value
            # Try about an eighth of GPT-2's or Llama's heads. Adding 3 makes an odd number even.
            for count in range(heads.value - 2, heads.value + 4):
                if count > 0 and count != heads.value:
                    yield {
                        hidden.name: (hidden.value, count * width),
                        heads.name: (heads.value, count),
                    }


def _unit(dimension: Dimension, captured: Captured) -> tuple[int, bool]:
    """Return what the values of a dimension are multiples of.

    The second value is True if the dimension counts a few things, such as heads.
    """
    for (place, size), slope in dimension.slopes.items():
        work = captured.products[place].work
        if isinstance(work, Attention):
            if size == "heads":
                return work.kv_heads if work.kv_heads < work.heads else 1, True
            if size == "kv_heads":
                return 1, True
            if size == "width" and slope > 0:
                return max(1, round(2 / slope)), False  # a head has an even width
        if size == "experts":
            return 1, True
    return 1, False


def _only_grows(name: str) -> bool:
    return any(word in name for word in ("vocab", "experts", "classes", "labels", "channels_in"))


def _slope(captured: Captured, dimension: Dimension, size: str) -> float:
    """Return how much a size of attention grows per unit of a dimension; 0 if not at all."""
    return max(
        (
            slope
            for (place, name), slope in dimension.slopes.items()
            if name == size and isinstance(captured.products[place].work, Attention)
        ),
        default=0.0,
    )
