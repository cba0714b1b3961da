"""Parse the axes of a sweep and resolve them into values.

In TOML, an axis of sizes has one of these forms:

    1024                                  one value
    [128, 256, 1024]                      a list
    { from = 256, to = 4096, step = 256 } a range, which includes ``to`` if a step lands on it
    { from = 32, to = 4096, times = 2 }   powers: each value is the one before, multiplied by 2
    { around = 1024, by = 16, step = 2 }  a neighbourhood: steps of 2 from 1008 to 1040
    "4*m" or "m"                          a multiple of another size in the same block

An axis of words, such as ``dtype``, is one word or a list of words.

The key ``edges = "tiles"`` or ``edges = "waves"`` adds values to a range or to powers. An edge is
the largest size that needs no more than a given number of tiles or waves. Each edge and the sizes
one below and one above it are added, except for sizes below the first or above the last declared
value. Tiles have edges along m, n and k. Waves have edges along m and n, and along a linear layer's
``tokens`` except in the pass ``wgrad``.

In the functions below, ``along`` is the name of the axis, and ``location`` names the place in the
file for error messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.common.checks import check_size
from kernels.common.counts import enumerated
from kernels.common.errors import UserError, nearest
from kernels.config import ceil_div, large_tile, next_wave_edge
from kernels.machine import Machine

# Required and optional keys of a range, of powers, and of a neighbourhood (``around``).
_FORMS: tuple[tuple[set[str], set[str]], ...] = (
    ({"from", "to", "step"}, {"edges"}),
    ({"from", "to", "times"}, {"edges"}),
    ({"around", "by"}, {"step"}),
)
_KEYS = sorted(set().union(*(required | optional for required, optional in _FORMS)))
_EDGES = {"tiles": ("m", "n", "k"), "waves": ("m", "n", "tokens")}  # axes that have such edges
# Name of the size that is the result's other dimension, by pass ("" for a GEMM, which has none).
_ACROSS = {
    "m": {"": "n"},
    "n": {"": "m"},
    "tokens": {"forward": "features_out", "dgrad": "features_in"},
}
PAIRS = ("stride", "padding", "dilation")
"""Sizes of a convolution that may differ by direction.

``2x1`` means 2 vertically and 1 horizontally.
"""
_MAY_BE_ZERO = ("padding",)
# Largest number of values of a range or a neighbourhood, and of tiles in a range with edges.
_MAX_VALUES = 20_000
_K_BLOCK = 64  # assumed depth of a large tile, in elements along k
_MULTIPLE = re.compile(r"(?:(\d{1,20})\s*\*\s*)?([a-z_]+)")  # such as "4*m" or "m"
_PAIR = re.compile(r"\d{1,20}x\d{1,20}")


@dataclass(frozen=True)
class Multiple:
    """An axis whose value is ``factor`` times the value of another axis."""

    factor: int
    axis: str


@dataclass(frozen=True)
class Edges:
    """An axis to which values near the edges of tiles or waves are added for a given machine."""

    values: tuple[int, ...]
    kind: str
    """``tiles`` or ``waves``."""


Axis = tuple[Any, ...] | Multiple | Edges


def parse_axis(declared: Any, location: str) -> tuple[Any, ...]:
    """Parse an axis whose TOML value ``declared`` is one value or a list of values.

    Raises:
        UserError: if the axis is a table or an empty list.
    """
    if isinstance(declared, Mapping):
        raise UserError(f"{location} takes a word or a list of words, not a table.")
    if isinstance(declared, list):
        if not declared:
            raise UserError(f"{location} is an empty list; give at least one value.")
        return tuple(declared)
    return (declared,)


def parse_size_axis(declared: Any, location: str, along: str, sizes: Sequence[str]) -> Axis:
    """Parse an axis of sizes: one size, a list, a table or a multiple of another size.

    ``sizes`` has the names of the sizes that the axis may be a multiple of.

    Raises:
        UserError: if the value is not a valid axis of sizes.
    """
    if isinstance(declared, Mapping):
        return _parse_table(declared, location, along)
    multiple = _MULTIPLE.fullmatch(declared) if isinstance(declared, str) else None
    if multiple:
        factor, other_axis = multiple.groups()
        if other_axis not in sizes:
            hint = f"; {nearest(other_axis, sizes)}" if sizes else "."
            raise UserError(
                f"{location} takes whole numbers or a multiple of another size, not "
                f"{declared!r}{hint}"
            )
        _check_value(int(factor or 1), location, along)
        return Multiple(int(factor or 1), other_axis)
    values = parse_axis(declared, location)
    for value in values:
        _check_value(value, location, along)
    return values


def _check_value(value: Any, location: str, along: str) -> None:
    """Refuse a value that is neither a size nor, on an axis that takes pairs, a pair of sizes."""
    # A convolution's stride, padding and dilation may differ by direction, such as "2x1".
    takes_pairs = along in PAIRS
    is_pair = takes_pairs and isinstance(value, str) and _PAIR.fullmatch(value) is not None
    sizes = [int(word) for word in value.split("x")] if is_pair else [value]
    minimum = 0 if along in _MAY_BE_ZERO else 1
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < minimum:
            or_pairs = ' or pairs such as "2x1"' if takes_pairs else ""
            raise UserError(
                f"{location} takes whole numbers of at least {minimum}{or_pairs}, not {value!r}."
            )
        check_size(size, location)


def resolution_order(axes: Mapping[str, Axis], location: str = "") -> list[str]:
    """Return the names of the axes, each one after the axes on which its values depend.

    Raises:
        UserError: if axes depend on each other.
    """
    order: list[str] = []
    unresolved = dict(axes)
    while unresolved:
        ready = [
            name for name, axis in unresolved.items() if not _needs(axis, name) & unresolved.keys()
        ]
        if not ready:
            cyclic = _cyclic(unresolved)
            names = enumerated(sorted(cyclic))
            # An axis with edges may be in the cycle although it is given as numbers.
            has_edges = any(isinstance(unresolved[name], Edges) for name in cyclic)
            remedy = " without edges" if has_edges else ""
            raise UserError(
                f"{location}: {names} are defined in terms of one another; give at least one "
                f"of them as numbers{remedy}."
            )
        order += ready
        for name in ready:
            del unresolved[name]
    return order


def _cyclic(axes: Mapping[str, Axis]) -> set[str]:
    # Remove the axes that no remaining axis needs, until every remaining axis is needed.
    cyclic = set(axes)
    while True:
        needed: set[str] = set()
        for name in cyclic:
            needed |= _needs(axes[name], name)
        if cyclic <= needed:
            return cyclic
        cyclic &= needed


def _needs(axis: Axis, along: str) -> set[str]:
    """Return the names of the axes on which the values of the axis ``along`` depend."""
    if isinstance(axis, Multiple):
        return {axis.axis}
    if not isinstance(axis, Edges):
        return set()
    # The tile depends on the dtype.
    if axis.kind == "tiles":
        return {"dtype"}
    # A wave also depends on the result's other dimension. For a linear layer, the pass decides
    # which size that is.
    return {"dtype", "pass", *_ACROSS[along].values()}


def _parse_table(table: Mapping[str, Any], location: str, along: str) -> Axis:
    """Parse an axis that is given as a table: a range, powers or a neighbourhood."""
    # 1. Check the keys, which must be those that a form requires, with or without its optional
    # ones. A form is a candidate if all its required keys are given. For each candidate, collect
    # the given keys that do not belong to it.
    for key in table:
        if key not in _KEYS:
            raise UserError(f"{location} has an unknown key {key!r}; {nearest(key, _KEYS)}")
    keys = set(table)
    extra_keys_of_forms = [
        keys - required - optional for required, optional in _FORMS if required <= keys
    ]
    if not extra_keys_of_forms:
        raise UserError(
            f"{location} must be a range (with the keys from, to and step), powers (from, to and "
            "times) or a neighbourhood (around and by)."
        )
    if all(extra_keys_of_forms):  # no form has all the keys
        extra_keys = extra_keys_of_forms[0]
        extra = enumerated(sorted(extra_keys))
        others = enumerated(sorted(keys - extra_keys))
        raise UserError(f"{location}: {extra} cannot be combined with {others}; remove {extra}.")
    # 2. Check the numbers.
    for key, value in table.items():
        if key == "edges":  # the only key that takes a word, which is checked below
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(
                f"{location}.{key} must be a whole number of at least 1, not {value!r}."
            )
        check_size(value, f"{location}.{key}")
    # 3. Find the values, and check whether the axis can have the edges.
    values = tuple(_values_of_table(table, location))
    edges = table.get("edges")
    if edges is None:
        return values
    # The value may be a list, which cannot be looked up in a dictionary.
    if not isinstance(edges, str) or edges not in _EDGES:
        raise UserError(f"{location}.edges is {edges!r}; {nearest(str(edges), _EDGES)}")
    if along not in _EDGES[edges]:
        names = enumerated(_EDGES[edges])
        raise UserError(
            f"{location}.edges: {edges} have edges only along {names}; remove edges from this axis."
        )
    return Edges(values, edges)


def _values_of_table(table: Mapping[str, Any], location: str) -> Iterable[int]:
    """Return the values of a range, of powers or of a neighbourhood."""
    if "around" in table:
        centre = table["around"]
        distance = table["by"]
        neighbourhood = range(centre - distance, centre + distance + 1, table.get("step", 1))
        # If the distance is at least as large as the centre, some values are not sizes.
        sizes = [value for value in _checked_length(neighbourhood, location) if value > 0]
        if not sizes:
            raise UserError(f"{location} has no value of at least 1; use a smaller step.")
        return sizes
    low = table["from"]
    high = table["to"]
    if high < low:
        raise UserError(f"{location}.to is {high}, but from is {low}; swap the two values.")
    if "step" in table:
        return _checked_length(range(low, high + 1, table["step"]), location)
    if table["times"] < 2:
        raise UserError(f"{location}.times must be at least 2; otherwise the powers never end.")
    values = [low]
    while values[-1] * table["times"] <= high:
        values.append(values[-1] * table["times"])
    return values


def _checked_length(values: range, location: str) -> range:
    """Return a range unchanged, after checking that it does not have too many values.

    The length is checked before the range becomes a list, which might not fit into memory.
    """
    if len(values) > _MAX_VALUES:
        raise UserError(
            f"{location} has {len(values):,} values, but at most {_MAX_VALUES:,} are allowed; use "
            "a larger step."
        )
    return values


def resolve_axis(
    axis: Axis, resolved: Mapping[str, Any], machine: Machine, along: str
) -> list[Any]:
    """Return the values of the axis ``along``, given the values of the axes on which it depends.

    ``resolved`` maps the names of those other axes to one value each.

    Raises:
        UserError: if the axis is a multiple of a size whose value is a pair such as ``2x1``, or if
            it has edges and spans too many tiles.
    """
    if isinstance(axis, Multiple):
        return [axis.factor * single_size(resolved[axis.axis], axis.axis)]
    if isinstance(axis, Edges):
        return _near_edges(axis, resolved, machine, along)
    return list(axis)


def single_size(value: Any, name: str) -> int:
    """Return the value of the size ``name`` as a number, even if it is a string such as ``"16"``.

    Raises:
        UserError: if the size is a pair such as ``2x1``, with a number for each direction.
    """
    if _PAIR.fullmatch(str(value)):
        raise UserError(
            f"{name} is {value}, but only a single number can be multiplied or compared; give one "
            f"number, or remove each multiple and filter that uses {name}."
        )
    return int(value)


def _near_edges(
    axis: Edges, resolved: Mapping[str, Any], machine: Machine, along: str
) -> list[int]:
    """Return the values of an axis and the sizes at and around its edges, sorted and distinct."""
    low, high = axis.values[0], axis.values[-1]
    # 1. Find the tile's size along the axis, and along the result's other dimension.
    tile_rows, tile_columns = large_tile(machine.generation, resolved["dtype"])
    if along == "n":
        tile_size, other_tile_size = tile_columns, tile_rows
    elif along == "k":
        tile_size, other_tile_size = _K_BLOCK, tile_columns  # waves have no edges along k
    else:
        tile_size, other_tile_size = tile_rows, tile_columns
    # One size in each tile is enough to find all edges of waves, because waves end only at edges of
    # tiles. The sets below have a value for each tile, so a very long range is refused first.
    size_in_each_tile = range(low, high + 1, tile_size)
    if len(size_in_each_tile) > _MAX_VALUES:
        raise UserError(
            f"the axis {along} spans {len(size_in_each_tile):,} tiles, but edges can be added for "
            f"at most {_MAX_VALUES:,} tiles; shorten the axis, or remove edges."
        )
    # 2. Find the edges. The last edge may lie beyond the range.
    if axis.kind == "tiles":
        first_edge = ceil_div(low, tile_size) * tile_size
        edges = set(range(first_edge, high + 1, tile_size))
    else:
        across_name = _ACROSS[along].get(resolved.get("pass", ""))
        # In a weight gradient the tokens are the reduction dimension, along which there are no
        # waves.
        if across_name is None:
            return list(axis.values)
        across_size = int(resolved[across_name])
        edges = {
            next_wave_edge(size, across_size, tile_size, other_tile_size, machine.sms)
            for size in size_in_each_tile
        }
    # 3. Add each edge, and the values one below and one above it.
    near_edges = {edge + offset for edge in edges if edge <= high for offset in (-1, 0, 1)}
    return sorted(set(axis.values) | {size for size in near_edges if low <= size <= high})
