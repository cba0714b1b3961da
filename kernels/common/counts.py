"""Formatting of counts in sentences."""

from __future__ import annotations


def counted(count: int, singular: str, plural: str = "") -> str:
    """Format a number of things, such as ``1 node``, ``4 nodes`` or ``1,200 cases``.

    If ``plural`` is empty, the plural is the singular with an ``s``.
    """
    if count == 1:
        return f"{count:,} {singular}"
    return f"{count:,} {plural or f'{singular}s'}"
