"""The mechanical rules of wording, checked on every docstring and string of the product.

They catch the habits that made the first pages read translated. Whether a sentence is good is for a
reader to say.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docstrings import docstrings

ROOT = Path(__file__).resolve().parent.parent
FILES = [path for room in ("kernels", "sweeps", "analysis") for path in (ROOT / room).rglob("*.py")]

NO_SUBJECT = re.compile(
    r"(Of|By|As|At|For|From|With|In|On|Likewise|So|That|What|How|Whether|Where|Which)\b"
)
"""A docstring that begins so has neither a verb nor a thing that it describes."""

FORBIDDEN = {
    r"\banew\b": "again, or re-…",
    r"\d %(?!\()": "97%, without a space",
    r"\bothers' (tables|rows|times|figures|measurements)": "public tables",
    r"\bmade[- ]up\b": "simulated",
    r"\bgo(es)? on with\b": "resume",
    r"\b(is|are|was|were) no (multiple|product|file|JSON|CSV|number|size|time)\b": "is not a …",
    r"\b(timed|measured) beside\b": "together with, next to",
}


def faults_of(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = path.relative_to(ROOT)
    for node in docstrings(tree):
        if isinstance(node.value, str) and (found := NO_SUBJECT.match(node.value.strip())):
            yield f"{where}:{node.lineno} begins with {found[0]!r}: say what it does or is"
    for text in ast.walk(tree):
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            for pattern, better in FORBIDDEN.items():
                if found := re.search(pattern, text.value):
                    yield f"{where}:{text.lineno}: {found[0]!r}; write: {better}"


def test_wording() -> None:
    assert [fault for path in FILES for fault in faults_of(path)] == []


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("timed anew", True),
        ("a gain of 12 % means", True),
        ("N is no multiple of 8", True),
        ("it is no longer a multiple", False),
        ("no CSV file was given", False),
        ("12% of the cases", False),
    ],
)
def test_the_patterns_tell_bad_from_good(text: str, bad: bool) -> None:
    assert any(re.search(pattern, text) for pattern in FORBIDDEN) == bad


def test_public_types_have_names_of_their_own() -> None:
    """Two types of one name in two rooms cannot be told apart where both are read about."""
    names: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in names.items() if len(places) > 1}
    assert twice == {}
