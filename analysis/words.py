"""Parse names and shares as people write them, on the command line and in Python."""

from __future__ import annotations

from collections.abc import Iterable

from kernels.common.errors import UserError


def names_in(words: str | Iterable[str] | None, option: str) -> tuple[str, ...]:
    """Return the names in comma-separated text such as ``N`` or ``M,K``.

    ``words`` may also be a sequence of names, or None for no names. ``option`` is the name of the
    command-line option, without its leading dashes, for error messages.

    Raises:
        UserError: if a name is empty.
    """
    if words is None:
        return ()
    separated = words.split(",") if isinstance(words, str) else words
    names = tuple(word.strip() for word in separated)
    if not all(names):
        raise UserError(
            f"--{option} has an empty name in {words!r}; give names, separated by commas."
        )
    return names


def share_of(value: str | float, option: str, most: float = 1.0) -> float:
    """Return a share as a fraction; ``value`` is text such as ``12.5%`` or ``0.125``, or a number.

    ``option`` is the name of the command-line option, without its leading dashes, for error
    messages.

    >>> share_of("12.5%", "pad")
    0.125

    Raises:
        UserError: if ``value`` is not a share from 0 to ``most``, or is ambiguous, like ``"1"``.
    """
    text = str(value).strip()
    is_percentage = text.endswith("%")
    try:
        share = float(text.removesuffix("%")) / (100 if is_percentage else 1)
    except ValueError:
        share = -1.0  # out of range, so that it is refused below
    # On the command line, ``1`` may mean 1% or 100%. In Python, the float 1.0 can only mean 100%.
    if 1 <= share <= most and not is_percentage and not isinstance(value, float):
        raise UserError(
            f"--{option} {text} could mean {text}% or {100 * share:g}%; write one of them."
        )
    if not 0 <= share <= most:
        raise UserError(
            f"--{option} takes a share from 0% to {most:,.0%}, not {value!r}. Give a share such as "
            "12.5% or 0.125."
        )
    return share
