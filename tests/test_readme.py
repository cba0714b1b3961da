"""Every example in a README is run, and what it prints is compared with what the page shows.

Digits are masked: a machine, a driver or a better model changes figures, never the form. Commands
run in a copy of the checkout, because some of them write beside the results that they read.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from analysis.rules.catalogue import all_rules
from kernels.config import HAND_WRITTEN
from kernels.machine import known_machines
from sweeps.planning.choice import choose_sweeps
from sweeps.wheel import FRONT
from tests.support.examples import Example, commands, masked
from tests.support.tiers import quick_and_long

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for room in ("analysis", "kernels", "results", "sweeps")
      for page in sorted((ROOT / room).rglob("*.md")) if "results/public" not in page.as_posix()),
    *sorted((ROOT / "tests").glob("[rs]*/README.md")),
]  # fmt: skip
IN_PYTHON = ("README.md", "analysis/rooftile/__init__.py", "analysis/rooftile/hidden-size.ipynb")

# The tests here only check that a target exists. This is where each one is really run:
ELSEWHERE = {
    "help": "below",
    "hooks": "by hand: it changes the checkout's git settings",
    "sweep": "CI, which reads its last lines",
    "test": "CI and everyone who runs this",
    "lint": "CI",
    "compile-check": "CI, which also compares what it writes",
    "record": "CI, and tests/analysis/recorder/test_made_up_gpu.py",
    "import": "before the examples that ask an imported table",
    "rules": "CI, and tests/analysis/recorder/test_made_up_gpu.py",
    "test-all": "CI",
    "attacks": "by hand before a release; its short part is in tests/attacks",
    "bench": "by hand; tests/benchmarks runs untimed in the suite",
    "families": "a GPU; tests/analysis/recorder/test_made_up_gpu.py",
}


def name_of(example: Example) -> str:
    return f"{example.page.relative_to(ROOT)}: {example.command}"


EXAMPLES = [example for page in PAGES for example in commands(page)]
_COPIES: list[Path] = []
# Two workers share the work, and each copies the checkout once.
COMMANDS, MAKE = pytest.mark.xdist_group("readme-commands"), pytest.mark.xdist_group("readme-make")
MODULES = [e for e in EXAMPLES if e.command.startswith(("python", "rooftile"))]
TARGETS = [e for e in EXAMPLES if e.command.startswith("make")]


@functools.cache
def checkout(with_imports: bool = False) -> Path:
    """A copy of what git tracks; imported tables have their own, since commands prefer them."""
    folder = Path(tempfile.mkdtemp(prefix="rooftile-readme-"))
    _COPIES.append(folder)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("this is no git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _no_copy_is_left() -> object:
    yield
    for folder in _COPIES:
        shutil.rmtree(folder, ignore_errors=True)
    _COPIES.clear()
    checkout.cache_clear()


def run(*command: str, with_imports: bool = False) -> subprocess.CompletedProcess[str]:
    """In the copy, without the variables of the make that may have started these tests."""
    ours = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTEST_ADDOPTS", "DEVICE", "GPU", "BUDGET",
            "SWEEPS", "MACHINE", "FRESH", "PART", "PYTEST", "WRITE"}  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        command, cwd=checkout(with_imports), capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip


@functools.cache
def make_import(machine: str) -> subprocess.CompletedProcess[str]:
    """Others' table of a machine, calibrated: a minute or two."""
    if importlib.util.find_spec("aiconfigurator_core") is None:
        pytest.skip("needs the extra `public`")
    command = [sys.executable, "-m", "analysis", "import", "--machine", machine]
    return run(*command, with_imports=True)


def test_examples_are_found() -> None:
    assert len(MODULES) >= 8
    assert {"make sweep", "make test"} <= {e.command for e in TARGETS if e.page.parent == ROOT}
    assert len([e for e in EXAMPLES if e.output]) >= 3
    assert {e.command.split()[0] for e in EXAMPLES} <= {"make", "python", "rooftile", ".ci/run"}


def as_parameter(example: Example) -> Any:
    """All pages but the first one, and a minute or two of importing, are for the long part."""
    is_long = example.imported or example.page != PAGES[0]
    marks = [pytest.mark.long] if is_long else []
    return pytest.param(example, marks=marks, id=name_of(example))


NUMBERS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
    "twenty",
)  # fmt: skip


@pytest.mark.parametrize(
    ("page", "words", "count"),
    [
        ("README.md", r"\[(\d+) rules\]", len(all_rules())),
        ("README.md", r"for (\d+) GPUs", len(known_machines())),
        ("README.md", r"(\w+) \[hand-written Triton families\]", len(HAND_WRITTEN)),
        ("kernels/README.md", r"(\w+) hand-written Triton families", len(HAND_WRITTEN)),
        ("sweeps/README.md", r"(\w+) of them are run by default", len(choose_sweeps(()))),
    ],
)  # fmt: skip
def test_counts_are_those_of_the_code(page: str, words: str, count: int) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    found = re.findall(words, text)
    assert found
    assert {int(word) if word.isdigit() else NUMBERS.index(word) for word in found} == {count}


@pytest.mark.slow
@COMMANDS
@pytest.mark.parametrize("example", [as_parameter(e) for e in MODULES])
def test_a_command_does_what_the_page_shows(example: Example) -> None:
    if example.imported:
        assert make_import(example.imported).returncode == 0
    program, *words = shlex.split(example.command)
    # As installed it is run by tests/acceptance/test_installed.py.
    arguments = ["-m", FRONT, *words] if program == "rooftile" else words
    answer = run(sys.executable, *arguments, with_imports=bool(example.imported))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    if example.output:
        assert masked(answer.stdout) == masked(example.output)


@pytest.mark.slow
@COMMANDS
@pytest.mark.parametrize("file", quick_and_long(IN_PYTHON))
def test_what_is_typed_into_python_prints_what_is_shown(file: str) -> None:
    assert ">>> " in (ROOT / file).read_text(encoding="utf-8") or file.endswith(".ipynb")
    answer = run(sys.executable, "-m", "tests.support.examples", "--checkout", file)
    assert answer.returncode == 0, answer.stderr


@MAKE
@pytest.mark.parametrize("example", TARGETS, ids=name_of)
def test_a_target_exists_and_takes_what_the_page_gives_it(example: Example) -> None:
    words = shlex.split(example.command)
    target = words[1]
    assert target in ELSEWHERE
    assert run(*words[:1], "-n", *words[1:], f"PYTHON={sys.executable}").returncode == 0
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words[2:]:  # make takes any variable, also one that no recipe reads
        assert re.search(rf"^{word.partition('=')[0]} \?=", makefile, re.MULTILINE), word


@COMMANDS
@pytest.mark.long
def test_an_import_prints_what_the_page_shows() -> None:
    (example,) = (e for e in TARGETS if e.command.startswith("make import MACHINE=") and e.output)
    answer = make_import(example.command.partition("=")[2])
    assert masked(answer.stdout) == masked(example.output)


@MAKE
def test_help_lists_every_target() -> None:
    told = run("make", "help").stdout
    targets = {shlex.split(example.command)[1] for example in TARGETS}
    assert targets - {"help"} <= {line.split()[0] for line in told.splitlines()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {anchor_of(heading) for heading in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    """GitHub drops the cells of a row that its head does not have."""
    text = re.sub(r"`[^`\n]*`|\\\|", "", page.read_text(encoding="utf-8"))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = table.splitlines()
        assert {row.count("|") for row in rows} == {rows[0].count("|")}, rows[0]


def anchor_of(heading: str) -> str:
    """As GitHub makes one: lower case, without punctuation, a hyphen for each space."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
