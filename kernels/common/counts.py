"""Formatting of counts in sentences."""

from __future__ import annotations


def counted(count: int, singular: str, plural: str = "") -> str:
    """Format a number of things, such as ``1 node``, ``4 nodes`` or ``1,200 cases``.

    If ``plural`` is empty, the plural is the singular with an ``s``.
    """
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
