"""The direction of imports, and what must stay importable without PyTorch and Triton."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("kernels", "sweeps", "analysis")  # nothing imports from a floor to its right
TORCH_FREE = (
    "kernels", "kernels.problem", "kernels.machine", "kernels.config", "kernels.constants",
    "kernels.estimate", "kernels.names", "sweeps.schema", "sweeps.spec", "sweeps.expand",
    "sweeps.plan", "sweeps.store", "sweeps.fold", "sweeps.sampler", "sweeps.statistics",
)  # fmt: skip


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("floor", FLOORS)
def test_nothing_imports_to_its_right(floor: str) -> None:
    to_the_right = FLOORS[FLOORS.index(floor) + 1 :]
    for name, path in modules(floor):
        roots = {module.split(".")[0] for module in imported(path)}
        assert not roots & set(to_the_right), name


def test_triton_is_imported_in_kernels_alone_and_torch_never_in_analysis() -> None:
    for floor, banned in (("sweeps", {"triton"}), ("analysis", {"torch", "triton"})):
        for name, path in modules(floor):
            assert not {module.split(".")[0] for module in imported(path)} & banned, name


def test_what_is_torch_free_stays_so() -> None:
    names = [*TORCH_FREE, *(name for name, _ in modules("analysis") if "__main__" not in name)]
    code = (
        f"import sys, importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "    for heavy in ('torch', 'triton'):\n"
        "        assert heavy not in sys.modules, (name, heavy)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr


def test_no_module_is_too_long_for_one_sitting() -> None:
    for floor in FLOORS:
        for name, path in modules(floor):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, name
