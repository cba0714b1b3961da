"""Formatting of counts and enumerations for sentences."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, singular: str, plural: str = "") -> str:
    """Format a count with its noun, such as ``1 node``, ``4 nodes`` or ``1,200 cases``."""
    if count == 1:
        return f"{count:,} {singular}"
    return f"{count:,} {plural or f'{singular}s'}"


def enumerated(phrases: Sequence[str], conjunction: str = "and") -> str:
    """Join phrases as in ``a, b and c``; if there are no phrases, return an empty string."""
    if len(phrases) < 2:
        return "".join(phrases)
    return f"{', '.join(phrases[:-1])} {conjunction} {phrases[-1]}"
