"""Which tests run: ``fast`` unless told otherwise, ``all`` but the long ones, or the ``long`` part.

A slow test runs something real, such as a sweep, a browser, a Slurm or the compiler, for which no
faster test stands in. A long test takes minutes, or repeats on a larger scale what others cover.

The marks ``slow`` and ``long`` say where a test belongs. A parametrised long test is never even
collected outside of its tier: :func:`quick_and_long` leaves its values out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

TIERS = ("fast", "all", "long")
EXAMPLES = {"fast": 15, "all": 15, "long": 300}
"""Examples of each property test of hypothesis."""

PROPERTY = "property"
"""Stands for a mark of hypothesis's tests, which the long tier runs with more examples."""

tier = "fast"  # set by tests/conftest.py from the option --tier


def quick_and_long(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Parameters of a test: the first few in every tier, the others only in the long one."""
    values = list(values)
    return _marked(values if tier == "long" else values[:quick], quick, pytest.mark.long)


def quick_and_slow(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Parameters of a test of which the first few are fast enough for every run."""
    return _marked(list(values), quick, pytest.mark.slow)


def _marked(values: list[Any], quick: int, mark: pytest.MarkDecorator) -> list[Any]:
    """The values, all but the first few with a mark; a tuple is one test's several parameters."""
    rest = (value if isinstance(value, tuple) else (value,) for value in values[quick:])
    return [*values[:quick], *(pytest.param(*value, marks=mark) for value in rest)]


def left_out(marks: Iterable[str]) -> str:
    """The mark for which the tier leaves a test out; empty where it runs."""
    marks = set(marks)
    if tier == "long":
        return "" if marks & {"long", PROPERTY} else "quick"
    if "long" in marks:
        return "long"
    return "slow" if "slow" in marks and tier == "fast" else ""
