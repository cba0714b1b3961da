"""Propose changes of a model's dimensions that can be built and that an engineer would choose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations

from sweeps.capture.captured import FORWARD, Attention, Captured, Dimension, GroupedGemm

REACH = 0.125
"""Largest distance that a width may move, as a share of it."""

HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
"""Head widths to choose from: those that fused attention kernels support."""

_MULTIPLES = (64, 128, 256)
_SMALL_MULTIPLES = (8, 16, 32)
"""Multiples that are proposed where :data:`_MULTIPLES` have none within reach."""

_OF_VOCABULARY = (512, 1024)
_VOCABULARY = 30_000
_GATED = 8 / 3
_GATED_MULTIPLE = 256
"""A gated feed-forward layer has 8/3 of the hidden size, rounded up to a multiple of 256, so that
it has as many parameters as one of 4 times the hidden size without a gate (Touvron et al. 2023)."""

Changes = dict[str, tuple[int, int]]
"""Old and new value of each dimension that changes."""

Values = Sequence[tuple[Dimension, int]]
"""Dimensions and their new values."""


@dataclass(frozen=True)
class _Heads:
    """Heads of one attention, and the width of the tokens that they are computed from.

    This width, ``hidden``, is 0 if it is not known.
    """

    heads: int
    kv_heads: int
    width: int
    hidden: int

    def can_follow(self, before: _Heads, tp: int) -> bool:
        """Return True if a model with ``before`` can be built with these heads instead."""
        if min(self.heads, self.kv_heads, self.width) < 1 or self.heads % self.kv_heads:
            return False
        if self.heads % tp or self.kv_heads % tp:
            return False
        if self.width != before.width and self.width % 8:
            return False
        divided = before.hidden and before.hidden % before.heads == 0
        return not (divided and self.hidden % self.heads)


def candidates(
    dimension: Dimension, captured: Captured, tp: int = 1, multiple: int | None = None
) -> list[int]:
    """Return the values of a dimension that can be built and that an engineer would choose.

    Widths are multiples of 64, 128 or 256 within :data:`REACH`; if there are none, of 8, 16 or 32.
    Each of ``tp`` GPUs gets an equal part. Heads divide the hidden size, key/value heads divide the
    heads, and the width of a head is a multiple of 8. A vocabulary and the numbers of experts,
    classes, labels and input channels can only grow.

    Args:
        dimension: the dimension.
        captured: the model as it is.
        tp: tensor-parallel degree.
        multiple: number that widths have to be multiples of, instead of the numbers above.
    """
    value = dimension.value
    if _grows(dimension, captured, "heads"):
        narrower = any(slope < 0 for slope in dimension.slopes.values())
        low, high = (value // 2, 2 * value) if narrower else (value - 4, value + 8)
        values = list(range(low, high + 1))
    elif _grows(dimension, captured, "kv_heads"):
        values = [value // 2, 2 * value]
    elif _is_head_width(dimension, captured):
        # Where all heads together are as wide as the hidden size, they change with their number.
        values = [] if _as_wide_as_hidden(captured) else list(HEAD_WIDTHS)
    else:
        values = _widths(dimension, captured, tp, multiple)
    if _only_grows(dimension.name) or value >= _VOCABULARY:
        values = [v for v in values if v > value]
    return sorted(
        {v for v in values if v > 0 and v != value and _fits([(dimension, v)], captured, tp)}
    )


def pairs_of(captured: Captured, dimensions: Sequence[Dimension], tp: int = 1) -> Iterator[Changes]:
    """Yield changes of dimensions that belong together.

    These are a hidden size with a number of heads of unchanged width, and a number of heads with a
    head width that leave the total width of all heads unchanged.
    """
    by_heads = [d for d in dimensions if _grows(d, captured, "heads")]
    by_kv_heads = [d for d in dimensions if _grows(d, captured, "kv_heads") and d not in by_heads]
    by_width = [d for d in dimensions if _is_head_width(d, captured)]
    by_hidden = [
        d for d in dimensions if _grows(d, captured, "width") and d not in (*by_heads, *by_width)
    ]
    attention = next(_heads_of(captured), None)
    if attention is None:
        return
    _, before = attention
    # Each key/value head serves one head, so their numbers change together.
    with_kv_heads = by_kv_heads if before.kv_heads == before.heads else []
    proposals: list[Values] = []
    for hidden, heads in combinations(by_hidden, by_heads):
        if hidden.value % heads.value == 0:
            width = hidden.value // heads.value
            # Try about an eighth of GPT-2's or Llama's heads. Adding 3 makes an odd number even.
            for count in range(heads.value - 2, heads.value + 4):
                others = [(kv_heads, count) for kv_heads in with_kv_heads]
                proposals.append([(hidden, count * width), (heads, count), *others])
    total = before.heads * before.width
    for heads in by_heads:
        narrower = any(slope < 0 for slope in heads.slopes.values())
        if narrower and not with_kv_heads:
            continue  # a candidate that changes only the number of heads has the same effect
        for width in HEAD_WIDTHS:
            if heads.value == before.heads and total % width == 0 and width != before.width:
                count = total // width
                others = [(head_width, width) for head_width in by_width]
                others += [(kv_heads, count) for kv_heads in with_kv_heads]
                proposals.append([(heads, count), *others])
    for values in proposals:
        changes = {d.name: (d.value, v) for d, v in values if v != d.value}
        if len(changes) > 1 and min(v for _, v in values) > 0 and _fits(values, captured, tp):
            yield changes


def _widths(dimension: Dimension, captured: Captured, tp: int, multiple: int | None) -> list[int]:
    """Return the widths within reach that are multiples of the preferred numbers."""
    value = dimension.value
    unit = math.lcm(1, *(max(1, round(8 / s)) for s in _slopes(dimension, captured, "width")))
    reach = math.floor(value * REACH)
    if _grows(dimension, captured, "experts"):
        return [v for v in range(value, 2 * value + 1) if v % math.lcm(8, tp) == 0]
    # Each process gets an equal part of a width, and this part has to be a multiple.
    large = (*_MULTIPLES, *(_OF_VOCABULARY if value >= _VOCABULARY else ()))
    widths: set[int] = set()
    for multiples in ((multiple,),) if multiple else (large, _SMALL_MULTIPLES):
        for step in {math.lcm(unit, tp * number) for number in multiples}:
            widths |= {value // step * step, -(-value // step) * step, (value // step + 1) * step}
            widths.add((value // step - 1) * step)
        widths = {v for v in widths if abs(v - value) <= reach and v != value}
        if widths:
            break
    if multiple is None:
        widths |= {v for v in _gated_sizes(dimension, captured) if abs(v - value) <= reach}
    return [v for v in widths if v % math.lcm(unit, tp) == 0]


def _gated_sizes(dimension: Dimension, captured: Captured) -> Iterator[int]:
    """Yield the usual width of a gated feed-forward layer, if the dimension is such a width."""
    for (place, size), slope in dimension.slopes.items():
        gated = captured.products[place]
        if gated.role in ("gate", "gate_up") and size == "n" and slope in (1.0, 2.0):
            hidden = gated.sizes["k"]
            yield math.ceil(_GATED * hidden / _GATED_MULTIPLE) * _GATED_MULTIPLE


def _fits(values: Values, captured: Captured, tp: int) -> bool:
    """Return True if the model's heads and experts can be built with other values."""
    for place, product in enumerate(captured.products):
        if isinstance(product.work, GroupedGemm) and product.of == place:
            more = _growth(values, (place, "experts"))
            if more and (product.work.experts + more) % tp:
                return False
    return all(
        (after := _changed_heads(before, places, values)) is not None
        and after.can_follow(before, tp)
        for places, before in _heads_of(captured)
    )


def _growth(values: Values, place: tuple[int, str]) -> float:
    """Return how much a size of a matrix operation grows with new values of dimensions."""
    return sum(d.slopes.get(place, 0.0) * (v - d.value) for d, v in values)


def _changed_heads(
    before: _Heads, places: Mapping[str, tuple[int, str]], values: Values
) -> _Heads | None:
    """Return an attention's heads with new values of dimensions; None if a size is fractional.

    Args:
        before: the heads as they are.
        places: position of the operation and name of the field for each size of the heads.
        values: the new values.
    """
    sizes = {name: getattr(before, name) + _growth(values, place) for name, place in places.items()}
    slopes = [d.slopes.get(places["width"], 0.0) for d, _ in values]
    if any(slope < 0 for slope in slopes):  # more heads are narrower
        total = float(before.heads * before.width)
        for (dimension, value), slope in zip(values, slopes, strict=True):
            total *= value / dimension.value if slope > 0 else 1.0
        sizes["width"] = total / sizes["heads"] if sizes["heads"] > 0 else 0.0
    if any(abs(size - round(size)) > 1e-6 for size in sizes.values()):
        return None
    return _Heads(**{name: round(size) for name, size in sizes.items()})


def _heads_of(captured: Captured) -> Iterator[tuple[dict[str, tuple[int, str]], _Heads]]:
    """Yield, for each attention, the places of its heads' sizes, and the heads."""
    hidden: tuple[int, str] = (-1, "k")
    for place, product in enumerate(captured.products):
        if product.pass_ != FORWARD:
            continue
        if product.role in ("q", "qkv"):
            hidden = (place, "k")
        if isinstance(work := product.work, Attention):
            hidden_size = captured.products[hidden[0]].sizes["k"] if hidden[0] >= 0 else 0
            places = {name: (place, name) for name in ("heads", "kv_heads", "width")}
            yield (
                {**places, "hidden": hidden},
                _Heads(work.heads, work.kv_heads, work.width, hidden_size),
            )


def _as_wide_as_hidden(captured: Captured) -> bool:
    return any(heads.heads * heads.width == heads.hidden for _, heads in _heads_of(captured))


def _is_head_width(dimension: Dimension, captured: Captured) -> bool:
    return any(
        dimension.slopes.get(places["width"]) == 1.0 and dimension.value == before.width
        for places, before in _heads_of(captured)
    )


def _only_grows(name: str) -> bool:
    return any(word in name for word in ("vocab", "experts", "classes", "labels", "channels_in"))


def _grows(dimension: Dimension, captured: Captured, size: str) -> bool:
    return bool(_slopes(dimension, captured, size))


def _slopes(dimension: Dimension, captured: Captured, size: str) -> set[float]:
    """Return the growth of a size of attention or experts per unit of a dimension, if it grows."""
    kinds = (Attention, GroupedGemm)
    return {
        slope
        for (place, name), slope in dimension.slopes.items()
        if name == size and slope > 0 and isinstance(captured.products[place].work, kinds)
    }
