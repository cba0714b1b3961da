"""Lookup of a machine by its slug (short name) or by any unambiguous part of the slug.

Model numbers are never guessed: an L20 is not an L40, so a suggested machine always has the model
number that the user typed.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable

from kernels.common.counts import enumerated
from kernels.common.errors import UserError
from kernels.common.program import command

_MAKER = "nvidia-"
_SIMILAR = 0.5  # lowest difflib ratio at which one name counts as a misspelling of another


def slug_meant(word: str, slugs: Iterable[str]) -> str:
    """Return the known slug that a word refers to.

    ``word`` is a slug, or parts of a slug in any order and case, such as ``4090``, ``H100 PCIe`` or
    ``rtx4090``.

    Raises:
        UserError: if the word fits no known slug, or is ambiguous.
    """
    unique_slugs = list(dict.fromkeys(slugs))
    dashed = "-".join(_words(word))
    # A whole slug is never ambiguous, even if it is a part of a longer one.
    for candidate in (word, dashed, _MAKER + dashed):
        if candidate in unique_slugs:
            return candidate
    # A word without letters or digits would match every slug, so it is made to match none.
    matches = [slug for slug in unique_slugs if dashed and _matches(slug, _words(word))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{word!r} may mean {enumerated(matches, 'or')}; give the full name.")
    # Suggest only machines with the same model number, because a similar number is another model.
    same_numbers = [slug for slug in unique_slugs if _numbers(slug) == _numbers(word)]
    close = difflib.get_close_matches(word.lower(), same_numbers, n=1, cutoff=_SIMILAR)
    hint = (
        f"did you mean {close[0]!r}?"
        if close
        else f"{command('analysis machines')} lists all machines."
    )
    raise UserError(f"machine {word!r} is not known; {hint}")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _matches(slug: str, words: Iterable[str]) -> bool:
    """Return True if each word is a part of the slug, or joins adjacent parts (``rtx4090``).

    A memory size may lack its unit, as in ``a100-sxm-80``.
    """
    parts = _words(slug)
    spans = itertools.combinations(range(len(parts) + 1), 2)
    joined_parts = {"".join(parts[begin:end]) for begin, end in spans}
    sizes = {part.removesuffix("gb") for part in parts if part.endswith("gb")}
    return (joined_parts | sizes).issuperset(words)


def _numbers(name: str) -> set[str]:
    """Return the parts of a name that have a digit, because these parts distinguish models."""
    return {word for word in _words(name) if any(letter.isdigit() for letter in word)}
