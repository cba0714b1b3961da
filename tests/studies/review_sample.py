"""Draw sentences and functions for a reviewer, who judges the project's words and code by them.

    python -m tests.studies.review_sample SEED [--sentences 40] [--functions 25]

Sentences come from docstrings, messages, help and reports of the three packages, and functions of
at least eight lines from the same files. The same checkout and seed give the same sample.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kernels.common.program import ROOT
from tests.support.docstrings import docstrings

PACKAGES = ("analysis", "kernels", "sweeps")
LEAST_WORDS = 5
LEAST_LINES = 8


class Sample(NamedTuple):
    """A place, as ``file:line`` or ``file:first-last``, and a sentence or a function's name."""

    place: str
    text: str


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring, each on one line."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.:])\s+(?=[A-Z`])", " ".join(paragraph.split()))


def read_sentences(path: Path) -> Iterator[Sample]:
    """Yield the sentences of a file; a formatted text has its expressions in braces."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_docstrings = {*docstrings(tree)}
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    pieces = {piece for node in formatted for piece in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts = [ast.unparse(node)[2:-1]]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
            is_docstring = node in of_docstrings
            texts = [*sentences_of(node.value)] if is_docstring else [" ".join(node.value.split())]
        else:
            continue
        for text in texts:
            if len(text.split()) >= LEAST_WORDS:
                yield Sample(f"{path.relative_to(ROOT)}:{node.lineno}", text)


def read_functions(path: Path) -> Iterator[Sample]:
    """Yield the functions and methods of a file that have at least :data:`LEAST_LINES` lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            last = node.end_lineno or node.lineno
            if last - node.lineno + 1 >= LEAST_LINES:
                yield Sample(f"{path.relative_to(ROOT)}:{node.lineno}-{last}", node.name)


def main(
    seed: int,
    sentences: Annotated[int, typer.Option(help="Number of sentences.")] = 40,
    functions: Annotated[int, typer.Option(help="Number of functions.")] = 25,
) -> None:
    """Print a random sample of the project's sentences and functions."""
    files = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    all_sentences = [sample for path in files for sample in read_sentences(path)]
    all_functions = [sample for path in files for sample in read_functions(path)]
    draw = random.Random(seed)
    for number, sample in enumerate(draw.sample(all_sentences, sentences), 1):
        print(f"S{number} {sample.place}\n    {sample.text}")
    for number, sample in enumerate(draw.sample(all_functions, functions), 1):
        print(f"F{number} {sample.place} {sample.text}")
    print(f"Drawn from {len(all_sentences):,} sentences and {len(all_functions):,} functions.")


if __name__ == "__main__":
    typer.run(main)
