"""Propose new values of a model's dimensions that are both valid and usual in practice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sweeps.capture.captured import FORWARD, Attention, Captured, Dimension, GroupedGemm

REACH = 0.125
"""Largest change of a width in :func:`candidates`, as a fraction of its current value. Head widths
may change more: they come from :data:`HEAD_WIDTHS`."""

HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
"""Head widths to choose from: those that fused attention kernels support."""

_MULTIPLES = (64, 128, 256)
_SMALL_MULTIPLES = (8, 16, 32)
"""Numbers whose multiples are proposed if no multiple of a number in :data:`_MULTIPLES` is within
:data:`REACH`."""

_OF_VOCABULARY = (512, 1024)  # further numbers whose multiples are proposed for a vocabulary
_VOCABULARY = 30_000  # smallest size at which a dimension may be assumed to be a vocabulary
_FEWER_HEADS = 4  # largest decrease of a number of heads: an eighth of the 32 heads of many models
_MORE_HEADS = 8  # largest increase: reaches the next multiple of 8, which up to 8 GPUs can share
# Largest decrease and increase of a number of heads that changes together with the hidden size. For
# GPT-2 XL, 28 heads instead of 25 are an even number, and about an eighth more (REACH).
_FEWER_JOINT_HEADS = 2
_MORE_JOINT_HEADS = 3
_GATED = 8 / 3
_GATED_MULTIPLE = 256
"""The usual width of a gated feed-forward layer is 8/3 of the hidden size, rounded up to a multiple
of 256. The layer then has about as many parameters as an ungated layer that is 4 times as wide as
the hidden size (Touvron et al. 2023)."""

Changes = dict[str, tuple[int, int]]
"""Old and new value of each dimension that changes."""

Values = Sequence[tuple[Dimension, int]]
"""Dimensions and their new values."""


@dataclass(frozen=True)
class _Heads:
    """Heads of one attention layer; ``hidden`` is the hidden size, or 0 if it is unknown."""

    heads: int
    kv_heads: int
    width: int
    hidden: int

    def can_follow(self, before: _Heads, tp: int) -> bool:
        """Return True if these heads can replace the heads ``before`` in a model on ``tp`` GPUs."""
        if min(self.heads, self.kv_heads, self.width) < 1:
            return False
        # Each key/value head serves the same number of query heads.
        if self.heads % self.kv_heads:
            return False
        # Each GPU gets the same number of heads.
        if self.heads % tp or self.kv_heads % tp:
            return False
        # In 16-bit dtypes, only a width that is a multiple of 8 is aligned to 16 bytes.
        if self.width != before.width and self.width % 8:
            return False
        # If the number of heads divides the hidden size, it must still do so after the change.
        divided_hidden = before.hidden > 0 and before.hidden % before.heads == 0
        return not divided_hidden or self.hidden % self.heads == 0


def candidates(
    dimension: Dimension, captured: Captured, tp: int = 1, multiple: int | None = None
) -> list[int]:
    """Return new values of a dimension that are valid and usual in practice, smallest first.

    How far the value may change depends on the kind of dimension. A head width becomes one of
    :data:`HEAD_WIDTHS`. Any other width, such as a hidden size, changes by at most :data:`REACH`.

    ``tp`` is the number of GPUs that share each layer. If ``multiple`` is given, each GPU's part of
    a width (except a head width) is a multiple of this number.
    """
    value = dimension.value
    if _counts(dimension, captured, "heads"):
        if narrows(dimension):
            # If there are more heads, they are narrower. Their total width does not change, so
            # their number may change a lot.
            values = list(range(value // 2, 2 * value + 1))
        else:
            # Each further head adds to the total width, so the number may change only a little.
            values = list(range(value - _FEWER_HEADS, value + _MORE_HEADS + 1))
    elif _counts(dimension, captured, "kv_heads"):
        values = [value // 2, 2 * value]
    elif _is_head_width(dimension, captured):
        # If all heads together are as wide as the hidden size, the width of a head changes only
        # together with the number of heads, in :func:`pairs_of`.
        values = [] if _as_wide_as_hidden(captured) else list(HEAD_WIDTHS)
    elif _grows(dimension, captured, "experts"):
        step = math.lcm(8, tp)
        values = [count for count in range(value, 2 * value + 1) if count % step == 0]
    else:
        values = _widths(dimension, captured, tp, multiple)
    if _only_grows(dimension.name) or _is_vocabulary(dimension, captured):
        values = [new for new in values if new > value]
    new_values = {new for new in values if new > 0 and new != value}
    return sorted(new for new in new_values if _are_valid([(dimension, new)], captured, tp))


def pairs_of(
    captured: Captured, dimensions: Sequence[Dimension], tp: int = 1, multiple: int | None = None
) -> Iterator[Changes]:
    """Yield changes of several dimensions that belong together.

    There are two kinds of such changes:

    - The hidden size and the number of heads change in the same ratio.
    - The number of heads and the width of a head change, and their product stays the same.

    If there are as many key/value heads as heads, both numbers change together.

    If ``multiple`` is given, the part of the hidden size on each of ``tp`` GPUs is a multiple of
    this number.
    """
    # 1. Sort the dimensions by what they change.
    head_counts: list[Dimension] = []
    kv_head_counts: list[Dimension] = []
    head_widths: list[Dimension] = []
    hidden_sizes: list[Dimension] = []
    for dimension in dimensions:
        is_head_count = _counts(dimension, captured, "heads")
        is_head_width = _is_head_width(dimension, captured)
        if is_head_count:
            head_counts.append(dimension)
        elif _counts(dimension, captured, "kv_heads"):
            kv_head_counts.append(dimension)
        if is_head_width:
            head_widths.append(dimension)
        # Any other dimension that makes heads wider is a hidden size.
        elif not is_head_count and _grows(dimension, captured, "width"):
            hidden_sizes.append(dimension)
    # The first layer with attention stands for all of them.
    first_layer = next(_heads_of(captured), None)
    if first_layer is None:
        return
    _, before = first_layer
    # If there are as many key/value heads as heads, both numbers change together.
    coupled_kv_heads = kv_head_counts if before.kv_heads == before.heads else []
    proposals: list[Values] = []
    # 2. Propose hidden sizes, each with a number of heads that changes in the same ratio.
    for hidden, heads in itertools.product(hidden_sizes, head_counts):
        if hidden.value % heads.value == 0:
            width = hidden.value // heads.value
            fewest_heads = heads.value - _FEWER_JOINT_HEADS
            most_heads = heads.value + _MORE_JOINT_HEADS
            for count in range(fewest_heads, most_heads + 1):
                if multiple and count * width % (tp * multiple):
                    continue
                coupled = [(kv_heads, count) for kv_heads in coupled_kv_heads]
                proposals.append([(hidden, count * width), (heads, count), *coupled])
    # 3. Propose head widths, each with the number of heads that keeps the total width.
    total_width = before.heads * before.width
    for heads in head_counts:
        if narrows(heads) and not coupled_kv_heads:
            continue  # changing only the number of heads has the same effect
        # The new number of heads is a value of this dimension only if the dimension is the number
        # of heads itself, and not, for example, a number of heads per key/value head.
        if heads.value != before.heads:
            continue
        for width in HEAD_WIDTHS:
            if total_width % width == 0 and width != before.width:
                count = total_width // width
                coupled = [(head_width, width) for head_width in head_widths]
                coupled += [(kv_heads, count) for kv_heads in coupled_kv_heads]
                proposals.append([(heads, count), *coupled])
    # 4. Yield the proposals that change several dimensions and can be built.
    for values in proposals:
        changes = {
            dimension.name: (dimension.value, value)
            for dimension, value in values
            if value != dimension.value
        }
        are_positive = all(value > 0 for _, value in values)
        if len(changes) > 1 and are_positive and _are_valid(values, captured, tp):
            yield changes


def _widths(dimension: Dimension, captured: Captured, tp: int, multiple: int | None) -> list[int]:
    """Return the widths within :data:`REACH` that :func:`candidates` considers."""
    value = dimension.value
    # 1. Head widths that grow with the dimension have to stay multiples of 8, and numbers of heads
    #    multiples of ``tp``. If such a size grows by ``slope``, the dimension grows in steps of
    #    8 / slope or tp / slope. Without heads, the unit is 1.
    steps = [8 / slope for slope in _slopes(dimension, captured, "width")]
    for size in ("heads", "kv_heads"):
        steps += [tp / slope for slope in _slopes(dimension, captured, size)]
    unit = math.lcm(1, *(max(1, round(step)) for step in steps))
    # 2. Choose the numbers to try multiples of, the preferred ones first.
    large: tuple[int, ...] = _MULTIPLES
    if _is_vocabulary(dimension, captured):
        large += _OF_VOCABULARY
    choices: list[tuple[int, ...]] = [(multiple,)] if multiple else [large, _SMALL_MULTIPLES]
    # 3. Use the first choice that has multiples within reach.
    reach = math.floor(value * REACH)
    widths: set[int] = set()
    for multiples in choices:
        for number in multiples:
            # Each GPU gets an equal part of a width, and this part has to be a multiple.
            step = math.lcm(unit, tp * number)
            below = value // step * step  # may be the current width, which is removed below
            widths |= {below - step, below, below + step}
        widths = {width for width in widths if abs(width - value) <= reach and width != value}
        if widths:
            break
    # 4. Add the usual width of a gated layer, which is a multiple of 256.
    if multiple is None:
        gated = _gated_sizes(dimension, captured)
        widths |= {width for width in gated if abs(width - value) <= reach}
    return [width for width in widths if width % math.lcm(unit, tp) == 0]


def _gated_sizes(dimension: Dimension, captured: Captured) -> Iterator[int]:
    """Yield the usual width of each gated feed-forward layer whose width is the dimension."""
    for (position, size), slope in dimension.slopes.items():
        product = captured.products[position]
        # If one GEMM computes both the gate and the up projection, it has two features for each
        # feature of the layer.
        if product.role in ("gate", "gate_up") and size == "n" and slope in (1.0, 2.0):
            hidden = product.sizes["k"]
            yield math.ceil(_GATED * hidden / _GATED_MULTIPLE) * _GATED_MULTIPLE


def _are_valid(values: Values, captured: Captured, tp: int) -> bool:
    """Return True if the model's heads and experts stay valid with new values of dimensions."""
    for position, product in enumerate(captured.products):
        # Slopes are known only for the forward pass.
        if isinstance(product.work, GroupedGemm) and product.pass_ == FORWARD:
            experts = product.work.experts + _size_change(values, (position, "experts"))
            if experts % tp:
                return False
    for places, before in _heads_of(captured):
        after = _changed_heads(before, places, values)
        if after is None or not after.can_follow(before, tp):
            return False
    return True


def _size_change(values: Values, place: tuple[int, str]) -> float:
    """Return the increase in one size of a matrix operation if the dimensions get new values.

    ``place`` is the position of the operation and the name of the size.
    """
    return sum(
        dimension.slopes.get(place, 0.0) * (value - dimension.value) for dimension, value in values
    )


def _changed_heads(
    before: _Heads, places: Mapping[str, tuple[int, str]], values: Values
) -> _Heads | None:
    """Return the heads of an attention layer after the dimensions get new values.

    Return None if a size would not be an integer.
    """
    sizes = {
        name: getattr(before, name) + _size_change(values, place) for name, place in places.items()
    }
    width_slopes = [dimension.slopes.get(places["width"], 0.0) for dimension, _ in values]
    # If more heads are narrower, the width of a head is not linear: it is the total width over the
    # number of heads. The total width is proportional to each dimension that makes heads wider.
    if any(slope < 0 for slope in width_slopes):
        total_width = float(before.heads * before.width)
        for (dimension, value), slope in zip(values, width_slopes, strict=True):
            if slope > 0:
                total_width *= value / dimension.value
        sizes["width"] = total_width / sizes["heads"] if sizes["heads"] > 0 else 0.0
    if any(abs(size - round(size)) > 1e-6 for size in sizes.values()):
        return None
    return _Heads(**{name: round(size) for name, size in sizes.items()})


def _heads_of(captured: Captured) -> Iterator[tuple[dict[str, tuple[int, str]], _Heads]]:
    """Yield, for each attention layer, the places of its heads' sizes, and the heads.

    A place is the position of an operation and the name of one of its sizes.
    """
    projection_position = -1  # no query projection yet
    hidden_size = 0
    for position, product in enumerate(captured.products):
        if product.pass_ != FORWARD:
            continue
        if product.role in ("q", "qkv"):
            projection_position = position
            hidden_size = product.sizes["k"]
        work = product.work
        if isinstance(work, Attention):
            places = {name: (position, name) for name in ("heads", "kv_heads", "width")}
            places["hidden"] = (projection_position, "k")
            yield places, _Heads(work.heads, work.kv_heads, work.width, hidden_size)


def _as_wide_as_hidden(captured: Captured) -> bool:
    """Return True if the heads of any attention layer are together as wide as the hidden size."""
    return any(heads.heads * heads.width == heads.hidden for _, heads in _heads_of(captured))


def _is_head_width(dimension: Dimension, captured: Captured) -> bool:
    """Return True if a dimension is the width of a head, not only a size that influences it."""
    return any(
        dimension.slopes.get(places["width"]) == 1.0 and dimension.value == before.width
        for places, before in _heads_of(captured)
    )


def _only_grows(name: str) -> bool:
    """Return True if a dimension of this name, such as a number of labels, must not shrink."""
    return any(word in name for word in ("vocab", "experts", "classes", "labels", "channels_in"))


def _is_vocabulary(dimension: Dimension, captured: Captured) -> bool:
    """Return True if a dimension is probably a vocabulary."""
    roles = {captured.products[position].role for position, _ in dimension.slopes}
    return dimension.value >= _VOCABULARY and roles.isdisjoint({"gate", "up", "gate_up", "down"})


def narrows(dimension: Dimension) -> bool:
    """Return True if any size, such as a head's width, shrinks when the dimension grows."""
    return any(slope < 0 for slope in dimension.slopes.values())


def _grows(dimension: Dimension, captured: Captured, size: str) -> bool:
    """Return True if ``size`` of attention or of a grouped GEMM grows with a dimension."""
    return bool(_slopes(dimension, captured, size))


def _counts(dimension: Dimension, captured: Captured, size: str) -> bool:
    """Return True if a dimension sets ``size``, the number of heads or of key/value heads.

    If such a dimension grows by 1, at least one head is added. A hidden size may also determine the
    number of heads, but it adds less than one head per unit.
    """
    return any(slope >= 1 for slope in _slopes(dimension, captured, size))


def _slopes(dimension: Dimension, captured: Captured, size: str) -> set[float]:
    """Return the positive slopes of a dimension for ``size``, a size of attention or grouped GEMMs.

    A slope is the increase of the size per unit of the dimension.
    """
    kinds = (Attention, GroupedGemm)
    return {
        slope
        for (position, name), slope in dimension.slopes.items()
        if name == size and slope > 0 and isinstance(captured.products[position].work, kinds)
    }
