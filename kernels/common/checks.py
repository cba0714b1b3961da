"""Checks of problems and of command options; the check functions raise :class:`UserError`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from kernels.common.errors import UserError, nearest

LARGEST_SIZE = 2**40
"""Largest accepted size of a dimension, in elements."""

LARGEST_BYTES = 2**60
"""Upper limit on the minimum traffic of a problem, in bytes. No machine has this much memory."""

_MAX_DIGITS = 20  # digits of the longest number that is parsed


def check_word(what: str, word: str, known: Collection[str]) -> None:
    """Refuse a word that is not known; ``what`` names the kind of word, such as ``dtype``."""
    if word not in known:
        raise UserError(f"{what} {word!r} is not known; {nearest(word, known)}")


def check_option(option: str, word: str, known: Sequence[str]) -> None:
    """Refuse a word that is not a valid value of an option."""
    if word not in known:
        raise UserError(f"{option} is {word!r}; {nearest(word, known)}")


def check_folder(file: Path) -> None:
    """Refuse an output file whose path is a folder, or whose parent folder does not exist.

    Call this function before a long computation, so that a wrong path is reported at once.
    """
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file.")
    if not file.parent.is_dir():
        raise UserError(
            f"{file.parent} is not a folder, so {file.name} cannot be written there; name a file "
            "in an existing folder."
        )


def check_counts(options: object, *names: str) -> None:
    """Refuse the named attributes of ``options`` unless they are Python integers of at least 1."""
    for name in names:
        count = getattr(options, name)
        # Python's True is an int, but not a count.
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is {count!r}; it must be a whole number of at least 1.")


def check_size(value: int, what: str) -> None:
    """Refuse a size above :data:`LARGEST_SIZE`; ``what`` names the size in the message."""
    if value > LARGEST_SIZE:
        raise UserError(f"{what} is too large; the largest allowed size is {LARGEST_SIZE:,}.")


def check_positive(problem: object, names: tuple[str, ...]) -> None:
    """Refuse a problem if a named field is not a whole number from 1 to :data:`LARGEST_SIZE`.

    The problem is changed in place, even if it is frozen: NumPy integers in the fields are replaced
    by Python integers, which do not overflow.
    """
    for name in names:
        value = getattr(problem, name)
        if isinstance(value, Integral) and not isinstance(value, int):
            value = int(value)
            object.__setattr__(problem, name, value)  # the problem may be frozen
        # Python's True is an int, but not a size.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {value!r}.")
        check_size(value, name)


def check_bytes(problem: Any) -> None:
    """Refuse a problem whose minimum traffic exceeds :data:`LARGEST_BYTES`."""
    if problem.bytes > LARGEST_BYTES:
        raise UserError(
            f"{problem} needs {problem.bytes / 1e15:,.0f} PB of memory, more than any machine has; "
            "use smaller sizes."
        )


def is_whole(text: str) -> bool:
    """Return True if the text consists of 1 to 20 digits."""
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
