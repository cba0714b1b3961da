"""Names of the program's commands and folders, in a checkout or in an installation.

In an installation, the packages ``analysis``, ``kernels`` and ``sweeps`` are parts of one
namespace, ``rooftile``, and the only command is also called ``rooftile``. An installation has no
set-up script, make targets or tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NAMESPACE = __name__.removesuffix("kernels.common.program")
"""Prefix of the packages' names: empty in a checkout, ``rooftile.`` when installed."""

INSTALLED = bool(NAMESPACE)

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the checkout, or of the installed namespace."""

FOLDER = None if INSTALLED else ROOT
"""Working directory of processes that run the program's commands; None keeps the current
directory."""

RESULTS = Path("results") if INSTALLED else ROOT / "results"
"""Folder of all machines' results, unless ``--results`` names another folder."""

USE_CPU = "--device cpu" if INSTALLED else "--device cpu (DEVICE=cpu with make)"
USE_FRESH = "--fresh" if INSTALLED else "--fresh (FRESH=1 with make)"
OTHER_TORCH = "install a PyTorch" if INSTALLED else "set PYTHON to an interpreter with a PyTorch"
"""Phrases for messages: how to measure the CPU, start a new run or use another PyTorch."""

_VERBS = {"kernels list": "implementations"}
"""Verbs (subcommands) of ``rooftile`` for commands whose names are unclear without the package's
name."""


def same_command(fresh: bool) -> str:
    """Return the phrase that messages use for the command that resumes a run."""
    return f"the same command without {USE_FRESH}" if fresh else "the same command"


def extra(name: str) -> str:
    """Return a clause with the command that installs one of the project's extras."""
    if INSTALLED:
        return f"`python -m pip install 'rooftile[{name}]'` installs it"
    return (
        f"`python3 sweeps/bootstrap.py {name}` installs it and prints the path of the Python that "
        "has it"
    )


def needs_extra(module: str, name: str = "measure", subject: str = "This command") -> str:
    """Return a sentence that names a missing package and the command that installs it.

    ``name`` is the extra that contains the package.
    """
    title = {"torch": "PyTorch", "triton": "Triton"}.get(module, module)
    return f"{subject} needs {title}, which is not installed; {extra(name)}."


def verb(package: str, name: str) -> str:
    """Return the verb (subcommand) of ``rooftile`` that runs a package's command.

    >>> verb("sweeps", "run"), verb("kernels", "list")
    ('run', 'implementations')
    """
    return _VERBS.get(f"{package} {name}", name)


def command_words(words: Sequence[str]) -> Sequence[str]:
    """Return the arguments with which Python runs a package's command.

    ``words`` are the package, its command and options, such as ``["sweeps", "run", "--fresh"]``.
    In an installation, ``-P`` prevents Python from running a module called ``rooftile`` in the
    current folder.
    """
    return ("-P", "-m", *_installed_words(words)) if INSTALLED else ("-m", *words)


def _installed_words(words: Sequence[str]) -> Sequence[str]:
    package, name, *options = words
    return (NAMESPACE.rstrip("."), verb(package, name), *options)


def command(text: str) -> str:
    """Return the command line for a package's command, in backquotes for a message.

    ``sweeps doctor`` becomes `python -m sweeps doctor`, or `rooftile doctor` when installed.
    """
    return f"`{' '.join(_installed_words(text.split()))}`" if INSTALLED else f"`python -m {text}`"


def target(make: str, installed: str) -> str:
    """Return the command line of ``make``, or of ``rooftile`` when installed, in backquotes."""
    return f"`rooftile {installed}`" if INSTALLED else f"`make {make}`"
