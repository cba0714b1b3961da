"""The examples of a page or a notebook, and how what they print is compared with what is shown.

``python tests/examples.py FILE …`` runs the code of a notebook, or the lines ``>>>`` of a page or
of a module's docstrings, and a page's commands `$ rooftile …`, as it is installed; with
``--checkout`` first, the code with what the checkout has instead. It exits 1 where something else
comes out than is shown.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl


@dataclass(frozen=True)
class Example:
    """A command as a page shows it, and the output below it, empty where the page has none.

    ``imported`` is the machine whose table is imported by an earlier line of the block.
    """

    page: Path
    command: str
    output: str
    imported: str = ""


def masked(text: str) -> str:
    """One line, every number as ``#``, with or without a sign: figures change, forms do not."""
    return re.sub(r"(?<![\w-])[-+−]?\d[\d,.]*|\d[\d,.]*", "#", " ".join(text.split()))


def blocks(page: Path) -> list[list[str]]:
    """The fenced and the indented blocks; a fence of another language than the shell's is data."""
    found: list[list[str]] = []
    fence, before, text = "", "", True  # whether text came after the last block
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
            found.append([])
        elif fence in ("```", "```sh", "```console"):
            found[-1].append(line)
        elif not fence and line.startswith("    "):
            if not before and text:  # an indented block may have empty lines
                found.append([])
            if found:
                found[-1].append(line.removeprefix("    "))
        text = not line.startswith("    ") if line else text
        before = line
    return [block for block in found if block]


def commands(page: Path) -> list[Example]:
    """Lines that begin with a prompt, with the output below them, and bare commands."""
    found: list[Example] = []
    for block in blocks(page):
        lines = "\n".join(block).replace("\\\n", " ").splitlines()
        open_ = False  # whether lines that follow are a command's output
        imported = ""
        for line in lines:
            text = line.removeprefix("$ ").strip()
            if line.startswith("$ ") or re.match(r"(make|python3?|rooftile|\.ci/run)\b", text):
                open_ = line.startswith("$ ")
                command = re.sub(r"\s+# .*", "", text)
                found.append(Example(page, " ".join(command.split()), "", imported))
                if command.startswith("make import"):
                    imported = command.partition("MACHINE=")[2]
            elif open_:
                last = found[-1]
                found[-1] = replace(last, output=f"{last.output} {text}".strip())
    return found


class _Masked(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return masked(want) == masked(got)


def differences_in_text(text: str, name: str, names: dict[str, Any]) -> str:
    """What the lines ``>>>`` of a text print that is not shown, as doctest says it; or nothing."""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    said: list[str] = []
    doctest.DocTestRunner(_Masked()).run(test, out=said.append)
    return "".join(said)


def differences_in_notebook(path: Path) -> str:
    """What the cells of a notebook evaluate to that is not shown; or nothing."""
    names: dict[str, Any] = {"__name__": "__main__"}
    said = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path.name, "exec"), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), path.name, "eval"), names)
        shown = "".join(_results(cell))
        if masked(shown) != masked("" if value is None else repr(value)):
            said.append(f"{''.join(cell['source'])}\nshown:\n{shown}\nis:\n{value!r}\n")
    return "\n".join(said)


def _results(cell: dict[str, Any]) -> Iterator[str]:
    for output in cell["outputs"]:
        if output["output_type"] == "execute_result":
            yield from output["data"]["text/plain"]


def _docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""


def _differences(path: Path, installed: bool) -> str:
    if path.suffix == ".ipynb":
        return differences_in_notebook(path)
    if path.suffix == ".py":
        names = {"rooftile": importlib.import_module("rooftile")}
        return "".join(differences_in_text(text, path.name, names) for text in _docstrings(path))
    said = differences_in_text(path.read_text(encoding="utf-8"), path.name, {})
    for example in commands(path) if installed else []:
        if example.command.startswith("rooftile "):
            answer = subprocess.run(
                shlex.split(example.command), capture_output=True, text=True, check=False
            )
            if answer.returncode or masked(answer.stdout) != masked(example.output):
                said += f"{example.command}\n{answer.stdout}{answer.stderr}"
    return said


def main(arguments: list[str]) -> str:
    """What differs in the files that are named, after ``--checkout`` or not."""
    mpl.use("Agg")
    checkout = arguments[0] == "--checkout"
    if checkout:
        sys.modules["rooftile"] = importlib.import_module("analysis.rooftile")
        arguments = arguments[1:]
    return "\n".join(filter(None, (_differences(Path(name), not checkout) for name in arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
