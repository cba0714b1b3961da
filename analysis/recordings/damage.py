"""Damaged lines of a recording's files: named, counted, left out, and too many of them refused."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from kernels.cli import note
from kernels.common.errors import UserError

MOST_DAMAGED = 0.1
"""Of a file's lines: if more are, something else is wrong with it, and nothing is concluded."""

_NAMED = 5  # lines, each in a sentence


def left_out(path: Path, faults: Mapping[int, str], lines: int, remedy: str) -> tuple[str, ...]:
    """A sentence for each damaged line of a file.

    Args:
        path: the file.
        faults: what is wrong, by the line's number.
        lines: how many there are below the header.
        remedy: what to do where there are too many, as a sentence.

    Raises:
        UserError: more than one line and a tenth of them are, or all.
    """
    sentences = tuple(
        f"{path.name} line {number} is damaged and left out: {why}."
        for number, why in sorted(faults.items())
    )
    if sentences and (len(faults) > max(1, MOST_DAMAGED * lines) or len(faults) == lines):
        raise UserError(
            f"{len(faults)} of {lines} lines of {path} are damaged: {sentences[0]} {remedy}"
        )
    return sentences


def say_left_out(path: Path, sentences: Sequence[str]) -> None:
    """Say on stderr which lines of a file are left out, once however often it is read."""
    for sentence in sentences[:_NAMED]:
        _say_once(f"{path.parent}: {sentence}")
    if len(sentences) > _NAMED:
        _say_once(f"{path.parent}: {len(sentences) - _NAMED} more lines of {path.name} likewise.")


@functools.cache
def _say_once(sentence: str) -> None:
    note(sentence)
