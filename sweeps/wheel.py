"""Copy the checkout's packages into the namespace ``rooftile``, as a build step of the wheel.

Many environments have another package that is called ``kernels``, so the wheel must use only one
top-level name. The packages are copied into ``rooftile/`` (``analysis/rooftile`` becomes the
namespace itself), and their imports of one another are rewritten. Strings are not rewritten, except
for the references in docstrings. ``tests/test_wheel.py`` checks that other strings do not contain a
module's name, except in ``kernels/common/program.py``.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import tokenize
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build_py import build_py

NAMESPACE = "rooftile"
PACKAGES = ("kernels", "sweeps", "analysis")
FRONT = "analysis.rooftile"
"""Package that becomes the namespace itself: it has the public functions and the command."""

SET_UP = ("sweeps/bootstrap.py", "sweeps/editable.py", "sweeps/wheel.py")
"""Files that are not installed, because only a checkout needs them."""

DATA = (".toml", ".json", ".typed", ".html", ".css", ".js")
"""Suffixes of the data files that are installed."""

_ROLE = re.compile(rf"(:[a-z]+:`~?)((?:{'|'.join(PACKAGES)})\.[\w.]+)")
"""Pattern of a docstring's reference to a module of these packages, or to something in it."""


def in_namespace(module: str) -> str:
    """Return the name under which a module is installed; only the checkout's modules are renamed.

    >>> in_namespace("kernels.problem"), in_namespace("analysis.rooftile"), in_namespace("numpy")
    ('rooftile.kernels.problem', 'rooftile', 'numpy')
    """
    if module == FRONT or module.startswith(f"{FRONT}."):
        return NAMESPACE + module.removeprefix(FRONT)
    return f"{NAMESPACE}.{module}" if module.partition(".")[0] in PACKAGES else module


def rewritten(source: str) -> str:
    """Return a module's source without comments, with imports and docstring references rewritten.

    Raises:
        ValueError: if an import cannot be rewritten.
    """
    lines = _lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if in_namespace(alias.name) != alias.name:
                    raise ValueError(
                        f"line {node.lineno}: `import {alias.name}` cannot be rewritten. "
                        "Write `from … import` instead."
                    )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            index = node.lineno - 1
            statement = f"from {node.module} import"
            if statement not in lines[index]:
                raise ValueError(
                    f"line {node.lineno}: this import cannot be rewritten. "
                    f"Write `{statement}` on one line."
                )
            lines[index] = lines[index].replace(
                statement, f"from {in_namespace(node.module)} import", 1
            )
    text = without_comments("".join(lines))
    return _ROLE.sub(lambda match: match[1] + in_namespace(match[2]), text)


def without_comments(source: str) -> str:
    """Return a module's source without its comments, which would take 8% of the wheel.

    Every statement keeps its line, so tracebacks name the same lines as in the checkout.
    """
    lines = _lines(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
    return "".join(lines)


def _lines(source: str) -> list[str]:
    """Return the lines as Python counts them; str.splitlines would also split at a form feed."""
    return io.StringIO(source).readlines()


def gather(root: Path, target: Path) -> None:
    """Fill the namespace's folder with a checkout's data files and rewritten modules.

    Raises:
        ValueError: if a module has an import that cannot be rewritten.
    """
    for relative_path in files(root):
        source = root / relative_path
        package = ".".join(relative_path.parent.parts)
        # The first part is the namespace itself, for which the target folder stands.
        _, *parts_below = in_namespace(package).split(".")
        copy = target.joinpath(*parts_below, relative_path.name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".py":
            text = source.read_text(encoding="utf-8")
            try:
                new_text = rewritten(text)
            except ValueError as error:
                raise ValueError(f"{relative_path}, {error}") from None
            copy.write_text(new_text, encoding="utf-8")
        else:
            shutil.copyfile(source, copy)


def files(root: Path) -> Iterator[Path]:
    """Yield the paths of the files that are installed, relative to the checkout."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            relative_path = path.relative_to(root)
            if path.suffix in (".py", *DATA) and str(relative_path) not in SET_UP:
                yield relative_path


class OneNamespace(build_py):
    """Build command of setuptools that copies the checkout's modules into the namespace."""

    def run(self) -> None:
        """Delete the files of an earlier build, and write the namespace."""
        target = Path(self.build_lib) / NAMESPACE
        shutil.rmtree(target, ignore_errors=True)
        gather(Path(), target)

    def get_source_files(self) -> list[str]:
        """Return the files of a source distribution: packages, set-up files and constraints."""
        return [*map(str, files(Path())), *SET_UP, "constraints.txt"]
