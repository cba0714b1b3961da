"""What every problem is checked for: known words, and sizes that can be computed. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any

from kernels.common.errors import UserError, nearest

LARGEST_SIZE = 2**40
"""Of any dimension, also of the GEMM that a convolution is computed as."""

LARGEST_BYTES = 2**60
"""Of a problem; products of its sizes stay within 64 bits."""

_MOST_DIGITS = 20


def check_word(what: str, word: str, known: Collection[str]) -> None:
    """Refuse a word that is not known, with the nearest that is."""
    if word not in known:
        raise UserError(f"{what} {word!r} is not known; {nearest(word, known)}")


def check_option(option: str, word: str, known: Sequence[str]) -> None:
    """Refuse a word that is none of the few that an option takes, and name these."""
    if word not in known:
        raise UserError(f"{option} takes {', '.join(known)}, not {word!r}; {nearest(word, known)}")


def check_counts(options: object, *names: str) -> None:
    """Refuse options that count something where they are no whole number of at least 1."""
    for name in names:
        count = getattr(options, name)
        if not isinstance(count, int) or count < 1:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is {count!r}; it must be a whole number of at least 1.")


def check_size(value: int, what: str) -> None:
    """Refuse sizes that no library computes."""
    if value > LARGEST_SIZE:
        raise UserError(f"{what} is too large; the largest allowed size is {LARGEST_SIZE:,}.")


def check_positive(problem: object, names: tuple[str, ...]) -> None:
    """Refuse sizes that are no whole numbers of at least 1; make NumPy's Python's own, which do not
    overflow.
    """
    for name in names:
        value = getattr(problem, name)
        if isinstance(value, Integral) and not isinstance(value, int):
            value = int(value)
            object.__setattr__(problem, name, value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {value!r}.")
        check_size(value, name)


def check_bytes(problem: Any) -> None:
    """Refuse what no machine holds."""
    if problem.bytes > LARGEST_BYTES:
        raise UserError(
            f"{problem} needs {problem.bytes:.0e} bytes, which is more than any machine has."
        )


def is_whole(text: str) -> bool:
    """Whether it is a number in the digits 0 to 9, few enough to be read."""
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
