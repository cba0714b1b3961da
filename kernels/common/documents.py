"""Checks of JSON documents, which may be damaged or come from other users.

In this module, a shape describes which values are accepted. A shape is one of these:

- a type: ``str``, ``bool``, ``dict`` or ``list``,
- a :class:`Number`,
- ``[shape]`` for a list of values of one shape,
- a mapping of keys to shapes, where ``?`` at the end of a key marks it as optional,
- :class:`Each` for a mapping with any keys and with values of one shape,
- :class:`Maybe` for a value that may be null.

If a shape is a mapping of keys to shapes, all other keys of the document's mapping are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST = 1e21
"""Default limit on the absolute value of a number; no realistic count or time is larger."""

# Bounds that messages show as powers of ten.
_POWERS = {-_LARGEST: "−10²¹", 1e-18: "10⁻¹⁸", _LARGEST: "10²¹", 1e11: "10¹¹"}

_SHOWN_CHARACTERS = 40  # longest part of a value that a message repeats

_WORDS = {str: "text", bool: "true or false", dict: "a mapping", list: "a list"}


@dataclass(frozen=True)
class Number:
    """Shape of a number from ``low`` to ``high``; ``whole`` allows only integers, not 3.0."""

    low: float = -_LARGEST
    high: float = _LARGEST
    whole: bool = False

    def __str__(self) -> str:
        kind = "whole number" if self.whole else "number"
        low = _POWERS.get(self.low, f"{self.low:g}")
        high = _POWERS.get(self.high, f"{self.high:g}")
        return f"a {kind} from {low} to {high}"


POSITIVE = Number(1e-18)
NOT_NEGATIVE = Number(0)
COUNT = Number(0, whole=True)
SIZE = Number(1, whole=True)


@dataclass(frozen=True)
class Maybe:
    """Shape of a value that may also be null."""

    shape: Any


@dataclass(frozen=True)
class Each:
    """Shape of a mapping that may have any keys, and whose values have one shape."""

    shape: Any


def misfit(value: Any, shape: Any, place: str = "it") -> str:
    """Describe the first part of a value that does not fit a shape; return "" if all parts fit.

    ``place`` is the path to the value, such as ``machine.peaks``.
    """
    if isinstance(shape, Maybe):
        return "" if value is None else misfit(value, shape.shape, place)
    if isinstance(shape, Number):
        return "" if _is_number(value, shape) else f"{place} is {_shown(value)}, not {shape}"
    if isinstance(shape, type):
        fits = isinstance(value, shape)
        return "" if fits else f"{place} is {_shown(value)}, not {_WORDS[shape]}"
    if isinstance(shape, list):
        if not isinstance(value, list | tuple):
            return f"{place} is {_shown(value)}, not a list"
        faults = (misfit(item, shape[0], f"{place}[{i}]") for i, item in enumerate(value))
        return _first(faults)
    if not isinstance(value, dict):
        return f"{place} is {_shown(value)}, not a mapping"
    if isinstance(shape, Each):
        faults = (misfit(item, shape.shape, f"{place}.{key}") for key, item in value.items())
        return _first(faults)
    return _misfit_of_keys(value, shape, place)


def _first(faults: Iterable[str]) -> str:
    for fault in faults:
        if fault:
            return fault
    return ""


def _misfit_of_keys(value: Mapping[str, Any], shape: Mapping[str, Any], place: str) -> str:
    for key, inner in shape.items():
        name = key.removesuffix("?")
        if name in value:
            if fault := misfit(value[name], inner, f"{place}.{name}"):
                return fault
        elif name == key:  # a key without ``?`` must not be missing
            return f"{place} has no {name!r}"
    return ""


def _is_number(value: Any, shape: Number) -> bool:
    allowed = int if shape.whole else int | float
    # Python reads JSON's true and false as bools, which are ints, but they are not numbers here.
    if isinstance(value, bool) or not isinstance(value, allowed):
        return False
    return shape.low <= value <= shape.high  # False for NaN


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
