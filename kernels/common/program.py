"""What the program is called and where its results go: in its checkout, or installed.

Installed, the three packages are parts of one namespace, ``rooftile``, with one command of that
name; the checkout's set-up, its make targets and its tests are not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NAMESPACE = __name__.removesuffix("kernels.common.program")
"""What comes before the packages' names: nothing in the checkout, ``rooftile.`` installed."""

INSTALLED = bool(NAMESPACE)

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of the installed namespace."""

FOLDER = None if INSTALLED else ROOT
"""Where processes of the program's commands are started; None: where this one was."""

RESULTS = Path("results") if INSTALLED else ROOT / "results"
"""Folder of all machines' results, unless ``--results`` names another."""

USE_CPU = "--device cpu" if INSTALLED else "DEVICE=cpu"
USE_FRESH = "--fresh" if INSTALLED else "--fresh (FRESH=1 with make)"
OTHER_TORCH = "install a PyTorch" if INSTALLED else "point PYTHON at a PyTorch"
"""How sentences say what to do about a GPU that cannot be used, or an old run in the way."""

_VERBS = {"kernels list": "implementations"}
"""Verbs that say too little where all packages' verbs are in one list, as that calls them."""


def extra(name: str) -> str:
    """How to get what one of the project's extras needs, as the first words of a sentence."""
    if INSTALLED:
        return f"`python -m pip install 'rooftile[{name}]'` installs it"
    return f"`python3 sweeps/bootstrap.py {name}` installs it and prints the Python that has it"


def needs_extra(module: str, name: str = "measure") -> str:
    """The sentence where a package is missing that an extra has, the same everywhere."""
    called = {"torch": "PyTorch", "triton": "Triton"}.get(module, module)
    return f"This command needs {called}, which is not installed; {extra(name)}."


def verb(package: str, name: str) -> str:
    """What the one command calls a package's verb.

    >>> verb("sweeps", "run"), verb("kernels", "list")
    ('run', 'implementations')
    """
    return _VERBS.get(f"{package} {name}", name)


def command_words(words: Sequence[str]) -> Sequence[str]:
    """What runs a package's verb, after an interpreter; words of other programs run as a module.

    Installed, a module of the same name in the folder at hand is not taken for ours (``-P``).

    Args:
        words: the package, its verb and the options, such as ``["sweeps", "run", "--fresh"]``.
    """
    return ("-P", "-m", *_shown(words)) if INSTALLED else ("-m", *words)


def _shown(words: Sequence[str]) -> Sequence[str]:
    """A package's verb and its options as the one command has them."""
    package, name, *options = words
    return (NAMESPACE.rstrip("."), verb(package, name), *options)


def command(text: str) -> str:
    """A command line to show: ``sweeps doctor`` becomes `python -m sweeps doctor`, or `rooftile
    doctor` where that is the command.
    """
    return f"`{' '.join(_shown(text.split()))}`" if INSTALLED else f"`python -m {text}`"


def target(make: str, installed: str) -> str:
    """A job to show: ``sweep`` becomes `make sweep`, or `rooftile` and what it does there."""
    return f"`rooftile {installed}`" if INSTALLED else f"`make {make}`"
