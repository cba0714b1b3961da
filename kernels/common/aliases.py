"""Which machine a word means: its slug, or as little of it as names it alone.

People say ``h200`` or ``rtx 4090``. A model's number is never guessed at: an L20 is no L40, so that
of two names with other numbers none is offered for the other.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from kernels.common.errors import UserError
from kernels.common.program import command

_MAKER = "nvidia-"
_SIMILAR = 0.5  # of two names, as difflib counts it: the rest of the names differs by a typing slip


def slug_meant(word: str, slugs: Iterable[str]) -> str:
    """The slug that a word means.

    Args:
        word: a slug, or words of one in any order and case: ``4090``, ``H100 PCIe``, ``rtx4090``.
        slugs: those that are known.

    Raises:
        UserError: it means none, or several.
    """
    known = list(dict.fromkeys(slugs))
    name = "-".join(_words(word))
    for exact in (word, name, _MAKER + name):
        if exact in known:
            return exact
    meant = [slug for slug in known if name and _says(slug, _words(word))]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise UserError(f"{word!r} may mean {_either(meant)}; give the full name.")
    same_numbers = [slug for slug in known if _numbers(slug) == _numbers(word)]
    close = difflib.get_close_matches(word.lower(), same_numbers, n=1, cutoff=_SIMILAR)
    hint = (
        f"did you mean {close[0]!r}?"
        if close
        else f"{command('analysis machines')} lists all machines."
    )
    raise UserError(f"machine {word!r} is not known; {hint}")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _says(slug: str, words: Iterable[str]) -> bool:
    """Whether each word is one of the slug's, or several of them in a row: ``rtx4090``.

    A memory's size may lack its unit: ``a100-sxm-80``.
    """
    parts = _words(slug)
    runs = {"".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    sizes = {part.removesuffix("gb") for part in parts if part.endswith("gb")}
    return (runs | sizes).issuperset(words)


def _numbers(name: str) -> set[str]:
    """The words with a digit: what tells one model from another."""
    return {word for word in _words(name) if any(letter.isdigit() for letter in word)}


def _either(slugs: list[str]) -> str:
    return f"{', '.join(slugs[:-1])} or {slugs[-1]}"
