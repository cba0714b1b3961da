"""Escape text for Markdown pages, because names in recordings are untrusted input."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Control characters, line separators, bidirectional controls and lone surrogates.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+"
)
# The markup to escape: backslashes, backticks and asterisks, the | between cells, the < of a tag,
# the ] before a link's target, the & of an entity, the slashes of a URL, and the dot after www,
# because GitHub makes a link of such an address. Underscores are not escaped: within a name they
# format nothing, and elsewhere they can only make text italic or bold.
_MARKUP = r"[\\`*|<]|\](?=[(\[:])|&(?=#?\w+;)|(?<=:)//|(?<=\bwww)\."
# A command in backticks stays code. It has none of the characters above.
_CODE = r"`[\w .=-]+`"
_CODE_OR_MARKUP = re.compile(f"{_CODE}|{_MARKUP}", re.IGNORECASE)


def plain(text: str) -> str:
    """Return a string on one line, with its markup escaped; commands in backticks stay code."""
    return _CODE_OR_MARKUP.sub(_escaped, printable(text))


def table_row(cells: Iterable[str]) -> str:
    """Return one row of a Markdown table, with every cell escaped."""
    return f"| {' | '.join(map(plain, cells))} |"


def printable(value: Any) -> Any:
    """Return a JSON value in which a space replaces each run of control characters.

    A control character in a recording could otherwise move a terminal's cursor.
    """
    if isinstance(value, str):
        # Nearly all texts are printable, and this test is faster than the substitution.
        return value if value.isprintable() else _UNPRINTABLE.sub(" ", value)
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(name): printable(item) for name, item in value.items()}
    return value


def _escaped(match: re.Match[str]) -> str:
    """Escape the matched markup with an HTML entity or a backslash; return code unchanged."""
    markup = match.group()
    if len(markup) > 1 and markup.startswith("`"):
        return markup
    entities = {"<": "&lt;", "&": "&amp;", "//": "&#47;&#47;"}
    return entities.get(markup, f"\\{markup}")
