"""What the program is called and where its results go: in its checkout, or installed.

Installed, the three packages are parts of one namespace, ``rooftile``, with one command of that
name; the checkout's set-up, its make targets and its tests are not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NAMESPACE = __name__.removesuffix(".program").removesuffix("kernels")
"""What comes before the packages' names: nothing in the checkout, ``rooftile.`` installed."""

INSTALLED = bool(NAMESPACE)

FOLDER = Path.cwd() if INSTALLED else Path(__file__).resolve().parents[1]
"""Where processes of the program's commands are started: they import the checkout from there."""

RESULTS = Path("results") if INSTALLED else FOLDER / "results"
"""Folder of all machines' results, unless ``--results`` names another."""

USE_CPU = "--device cpu" if INSTALLED else "DEVICE=cpu"
OTHER_TORCH = "install a PyTorch" if INSTALLED else "point PYTHON at a PyTorch"
"""How sentences about a GPU that cannot be used say what to do."""

_VERBS = {"kernels list": "implementations", "sweeps list": "sweeps"}
"""Verbs that two packages have, as the one command calls them."""


def extra(name: str) -> str:
    """How to get what one of the project's extras needs, as the first words of a sentence."""
    if INSTALLED:
        return f"`pip install 'rooftile[{name}]'` installs it"
    return f"`python3 sweeps/bootstrap.py {name}` installs it and prints the Python that has it"


def needs_extra(module: str) -> str:
    """The sentence where a module of the extra ``measure`` is missing."""
    name = {"torch": "PyTorch", "triton": "Triton"}[module]
    return f"This needs {name}, which is not installed; {extra('measure')}."


def verb(package: str, name: str) -> str:
    """What the one command calls a package's verb.

    >>> verb("sweeps", "run"), verb("sweeps", "list")
    ('run', 'sweeps')
    """
    return _VERBS.get(f"{package} {name}", name)


def module_words(words: Sequence[str]) -> Sequence[str]:
    """What follows ``python -m`` to run a package's verb; words of other programs stay.

    Args:
        words: the package, its verb and the options, such as ``["sweeps", "run", "--fresh"]``.
    """
    if not INSTALLED or words[0] not in ("kernels", "sweeps", "analysis"):
        return words
    package, name, *options = words
    return (NAMESPACE.rstrip("."), verb(package, name), *options)


def command(text: str) -> str:
    """A command line to show: ``sweeps doctor`` becomes `python -m sweeps doctor`, or `rooftile
    doctor` where that is the command.
    """
    words = " ".join(module_words(text.split()))
    return f"`{words}`" if INSTALLED else f"`python -m {words}`"


def target(make: str, installed: str) -> str:
    """A job to show: ``sweep`` becomes `make sweep`, or `rooftile` and what it does there."""
    return f"`rooftile {installed}`" if INSTALLED else f"`make {make}`"
