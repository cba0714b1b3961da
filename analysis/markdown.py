"""What goes into a Markdown page: names in recordings come from strangers and are no markup.

What a run.json says is made printable when it is read, so that it cannot move a terminal's cursor
either; matplotlib escapes what it writes into an SVG.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_UNPRINTABLE = re.compile(  # controls, line ends, changes of direction, halves of characters
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+"
)
_MARKUP = re.compile(r"[\\`*|<]|\](?=[(\[:])|&(?=#?\w+;)|(?<=:)//")


def plain(text: str) -> str:
    """The text as it is to be read: on one line, with nothing in it that is markup or a link."""
    return _MARKUP.sub(_escaped, printable(text))


def table_row(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(plain, cells))} |"


def printable(value: Any) -> Any:
    """A value out of JSON, its texts without control characters and changes of direction."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub(" ", value)
    if isinstance(value, list):
        return [printable(one) for one in value]
    if isinstance(value, dict):
        return {printable(name): printable(one) for name, one in value.items()}
    return value


def _escaped(match: re.Match[str]) -> str:
    text = match.group()
    names = {"<": "&lt;", "&": "&amp;", "//": "&#47;&#47;"}
    return names.get(text, f"\\{text}")
