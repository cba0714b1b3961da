"""Build step of the wheel: the checkout's three packages as parts of one namespace, ``rooftile``.

``kernels`` is a name that another package has in many environments, so an installation may have no
top-level name but its own. The folders are copied below ``rooftile/`` (``analysis/rooftile``
becomes the namespace itself), and their imports of one another are rewritten. Strings are not, but
for the references in docstrings, so no other string may have a module's name in it;
``tests/test_wheel.py`` looks. setuptools finds this through ``pyproject.toml``.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build_py import build_py

NAMESPACE = "rooftile"
PACKAGES = ("kernels", "sweeps", "analysis")
FRONT = "analysis.rooftile"
"""What becomes the namespace itself: what is imported from it, and its command."""

SET_UP = ("sweeps/bootstrap.py", "sweeps/editable.py", "sweeps/wheel.py")
"""The checkout's own, which no installation has."""

DATA = (".toml", ".json", ".typed", ".html", ".css", ".js")

_ROLE = re.compile(rf"(:[a-z]+:`~?)((?:{'|'.join(PACKAGES)})\.)")
"""A docstring's reference to a module, class or function."""


def in_namespace(module: str) -> str:
    """The installed name of a module of the checkout; of any other module, its own.

    >>> in_namespace("kernels.problem"), in_namespace("analysis.rooftile"), in_namespace("numpy")
    ('rooftile.kernels.problem', 'rooftile', 'numpy')
    """
    if module == FRONT or module.startswith(f"{FRONT}."):
        return NAMESPACE + module.removeprefix(FRONT)
    return f"{NAMESPACE}.{module}" if module.partition(".")[0] in PACKAGES else module


def rewritten(source: str) -> str:
    """A module's text with its imports, and the references of its docstrings, in the namespace.

    Raises:
        ValueError: an ``import kernels.x`` binds a name that it would not bind in the namespace.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if in_namespace(alias.name) != alias.name:
                    raise ValueError(f"line {node.lineno}: write `from … import` for {alias.name}.")
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            at, before = node.lineno - 1, f"from {node.module} import"
            if before not in lines[at]:
                raise ValueError(f"line {node.lineno}: write `{before}` in one line.")
            lines[at] = lines[at].replace(before, f"from {in_namespace(node.module)} import", 1)
    return _ROLE.sub(rf"\1{NAMESPACE}.\2", "".join(lines))


def gather(root: Path, target: Path) -> None:
    """Copy the modules and data files of a checkout into the folder of the namespace."""
    for name in files(root):
        installed = in_namespace(".".join(name.with_suffix("").parts)).split(".")[1:]
        copy = target.joinpath(*installed).with_suffix(name.suffix)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name.suffix == ".py":
            text = (root / name).read_text(encoding="utf-8")
            copy.write_text(rewritten(text), encoding="utf-8")
        else:
            shutil.copyfile(root / name, copy)


def files(root: Path) -> Iterator[Path]:
    """What is installed, relative to the checkout."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            name = path.relative_to(root)
            if path.suffix in (".py", *DATA) and str(name) not in SET_UP:
                yield name


class OneNamespace(build_py):
    """setuptools' step that gathers the modules."""

    def run(self) -> None:
        """Gather anew: what an earlier build left would be packed, too."""
        target = Path(self.build_lib) / NAMESPACE
        shutil.rmtree(target, ignore_errors=True)
        gather(Path(), target)

    def get_source_files(self) -> list[str]:
        """What a source distribution needs for building this again."""
        return [*map(str, files(Path())), *SET_UP, "constraints.txt"]
