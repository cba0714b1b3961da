"""The direction of imports, and what must stay importable without PyTorch and Triton.

Three packages are floors, and inside each of them rooms (sub-packages) are: nothing imports upward.
``python tests/test_architecture.py`` counts the rooms and prints the arrows between them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("kernels", "sweeps", "analysis")  # nothing imports from a floor to its right
ROOMS = {  # within a floor: nothing imports from a room to its right; "." is the ground
    "kernels": (
        "common", ".", "timemodel", "triton | library", "correctness | compiler", "__main__",
    ),
    "sweeps": (
        ".", "capture | cases | timing", "planning", "folding", "measuring", "running",
        "doctor | profiling | sharing", "merging | submitting", "__main__",
    ),
    "analysis": (
        ".", "recordings", "traces", "imports | comparing | exports", "fleet | model | slices",
        "advice | rules", "audit", "explain", "validation", "plots", "page", "recorder",
        "commands", "__main__", "rooftile",
    ),
}  # fmt: skip
ABOVE_GROUND = {  # modules on the ground that know some of the rooms above it
    "kernels.registry": {"triton", "library"},  # where the implementations are listed
    "sweeps.store": {"cases"},
}
PASSES = {"schema", "cases", "store", "timing", "folding", "capture", "process"}
"""What `analysis` may know of `sweeps`: columns, cases, statistics, captured models."""
TORCH_FREE = (
    "kernels", "kernels.problem", "kernels.machine", "kernels.config",
    "kernels.timemodel.constants", "kernels.timemodel.estimate", "kernels.names", "sweeps.schema",
    "sweeps.cases.spec", "sweeps.cases.expand", "sweeps.planning.plan", "sweeps.store",
    "sweeps.capture.captured", "sweeps.timing.sampler", "sweeps.timing.statistics",
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
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(floor: str) -> set[tuple[str, str]]:
    """Every import of one module by another of the same floor."""
    known = {name for name, _ in modules(floor)} - {floor}
    return {
        (name, module)
        for name, path in modules(floor)
        for module in imported(path)
        if module in known and module not in {other.rpartition(".")[0] for other in known}
    }


def rooms(floor: str) -> list[str]:
    return [path.parent.name for path in sorted((ROOT / floor).glob("*/__init__.py"))]


def room_of(module: str) -> str:
    """The room that a module is in; its own name where it lies on the ground."""
    floor, _, rest = module.partition(".")
    return rest.partition(".")[0] or floor


def room_arrows(floor: str) -> set[tuple[str, str]]:
    """The arrows between what lies directly in a floor: its rooms and its own modules."""
    found = {(room_of(one), room_of(other)) for one, other in arrows(floor)}
    return {(one, other) for one, other in found if one != other}


def level(floor: str, room: str) -> int:
    """How far to the right a room is; modules that are in none are on the ground."""
    places = {name: i for i, names in enumerate(ROOMS[floor]) for name in names.split(" | ")}
    return places.get(room, places["."])


@pytest.mark.parametrize("floor", FLOORS)
def test_nothing_imports_to_its_right(floor: str) -> None:
    to_the_right = FLOORS[FLOORS.index(floor) + 1 :]
    for name, path in modules(floor):
        roots = {module.split(".")[0] for module in imported(path)}
        assert not roots & set(to_the_right), name


def test_only_commands_of_analysis_start_a_run() -> None:
    starters = {"commands", "rooftile", "__main__"}
    for name, path in modules("analysis"):
        used = {room_of(module) for module in imported(path) if module.startswith("sweeps.")}
        assert room_of(name) in starters or used <= PASSES, name


@pytest.mark.parametrize("floor", FLOORS)
def test_no_room_imports_to_its_right_or_beside(floor: str) -> None:
    for one, other in sorted(arrows(floor)):
        source, target = room_of(one), room_of(other)
        if target in ABOVE_GROUND.get(one, ()) or source == target:
            continue
        here, there = level(floor, source), level(floor, target)
        assert here > there or here == there == level(floor, "."), f"{one} imports {other}"


@pytest.mark.parametrize("floor", FLOORS)
def test_every_room_is_on_the_list(floor: str) -> None:
    listed = {room for names in ROOMS[floor] for room in names.split(" | ")} - {".", "__main__"}
    assert set(rooms(floor)) == listed


@pytest.mark.parametrize("floor", FLOORS)
def test_arrows_make_no_circle(floor: str) -> None:
    left = room_arrows(floor)
    while left:
        free = {one for one, _ in left} - {other for _, other in left}
        assert free, f"a circle among {sorted(left)}"
        left = {(one, other) for one, other in left if one not in free}


def test_no_files_import_one_another_in_a_circle() -> None:
    """Not even inside a function, or for the type checker alone."""
    needs: dict[str, set[str]] = {}
    for floor in FLOORS:
        for one, other in arrows(floor):
            needs.setdefault(one, set()).add(other)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_triton_is_imported_in_kernels_alone_and_torch_never_in_analysis() -> None:
    for floor, banned in (("sweeps", {"triton"}), ("analysis", {"torch", "triton"})):
        for name, path in modules(floor):
            assert not {module.split(".")[0] for module in imported(path)} & banned, name


def test_what_is_torch_free_stays_so() -> None:
    folding = (name for name, _ in modules("sweeps") if name.startswith("sweeps.folding"))
    analysis = (name for name, _ in modules("analysis") if "__main__" not in name)
    names = [*TORCH_FREE, *folding, *analysis]
    code = (
        f"import sys, importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "    for heavy in ('torch', 'triton'):\n"
        "        assert heavy not in sys.modules, (name, heavy)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr


def test_help_is_printed_without_the_libraries_that_take_long_to_import() -> None:
    code = (
        "import sys\n"
        "import analysis.__main__, kernels.__main__, sweeps.__main__, analysis.rooftile.__main__\n"
        "heavy = {'pandas', 'pyarrow', 'scipy', 'sklearn', 'matplotlib', 'torch'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.stdout.strip() == "[]", answer.stderr


def test_the_library_of_a_cpu_is_named_without_torch() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"  # so that importing it fails
        "from analysis.model.basis import _library_of_cpu\n"
        "from kernels.machine import cpu_machine\nfrom kernels.problem import Gemm\n"
        "machine = cpu_machine({'fp32': 2e11, 'bf16': 1e11}, 3e10, 2)\n"
        "for dtype in ('fp32', 'bf16'):\n"
        "    print(_library_of_cpu(Gemm(64, 64, 64, dtype), machine))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.stdout.split() == ["mkl", "onednn"], answer.stderr


if __name__ == "__main__":
    for floor in FLOORS:
        between = room_arrows(floor)
        print(
            f"{floor}: {len(list(modules(floor)))} modules, {len(rooms(floor))} rooms, "
            f"{len(arrows(floor))} arrows between modules, {len(between)} between rooms"
        )
        for one in dict.fromkeys(sorted(source for source, _ in between)):
            print(f"  {one} -> {', '.join(sorted(to for source, to in between if source == one))}")
