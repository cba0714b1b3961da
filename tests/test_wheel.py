"""The installed namespace: what the build step makes of the checkout, run from another folder.

``tests/acceptance/test_installed.py`` builds the wheel and installs it into an empty environment.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from analysis.rooftile import __version__
from sweeps.bootstrap import POINTER, POINTING_MODULE
from sweeps.wheel import (
    NAMESPACE,
    PACKAGES,
    SET_UP,
    files,
    gather,
    rewritten,
    without_comments,
)

ROOT = Path(__file__).resolve().parent.parent
MODULE = re.compile(rf"(?<![\w.])(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
RUN_AS = re.compile(rf"-m (?:{'|'.join(PACKAGES)})\b|`make |with make|`python")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the namespace in it, as in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    gather(ROOT, folder / NAMESPACE)
    return folder


def run(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", NAMESPACE, *arguments], cwd=cwd, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def modules() -> set[str]:
    """Every module and package of the checkout, by its dotted name."""
    names = {name.with_suffix("") for name in files(ROOT) if name.suffix == ".py"}
    return {".".join(name.parts).removesuffix(".__init__") for name in names}


def test_every_import_of_a_package_is_of_the_namespace(site: Path) -> None:
    for path in (site / NAMESPACE).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & set(PACKAGES), path


def test_no_string_names_a_module_of_the_checkout(site: Path) -> None:
    """Neither to import it nor to tell people to run it: `program.py` alone words commands."""
    known = modules()
    found = []
    for path in (site / NAMESPACE).rglob("*.py"):
        if path.name == "program.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = {name for name in MODULE.findall(node.value) if prefix(name) in known}
                if named or RUN_AS.search(node.value):
                    found.append(f"{path.relative_to(site)}:{node.lineno}: {node.value[:60]!r}")
    assert not found


def prefix(dotted: str) -> str:
    """The module that a dotted name begins with: at least a package and what lies in it."""
    return ".".join(dotted.split(".")[:2])


def test_the_check_of_strings_finds_some() -> None:
    assert prefix(MODULE.findall("sweeps.measuring.torch_bench:TorchBench")[0]) in modules()
    assert not MODULE.findall(":mod:`rooftile.kernels.names`")
    assert RUN_AS.search("run `python -m sweeps doctor`")


def test_every_file_has_a_place(site: Path) -> None:
    there = [path for path in (site / NAMESPACE).rglob("*") if path.is_file()]
    assert len(there) == len(list(files(ROOT)))
    assert {"__init__.py", "__main__.py", "py.typed"} <= {
        path.name for path in (site / NAMESPACE).iterdir()
    }
    assert not [path for path in there if path.name in {Path(name).name for name in SET_UP}]


def test_comments_are_left_out_and_every_statement_keeps_its_line() -> None:
    source = 'x = "# no comment"  # one\n# another\ny = """a\n# text\n"""\n'
    assert without_comments(source) == 'x = "# no comment"\n\ny = """a\n# text\n"""\n'
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        stripped = ast.parse(without_comments(text))
        assert ast.dump(stripped, include_attributes=True) == ast.dump(
            ast.parse(text), include_attributes=True
        )


def test_an_import_that_binds_a_package_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 2: `import kernels.names` cannot be rewritten"):
        rewritten("import os\nimport kernels.names\n")
    for kept in ("import numpy\nfrom .here import x\n", "kernels = 1\n"):
        assert rewritten(kept) == kept
    function = 'def f():\n    """:func:`{0}sweeps.store.x`"""\n    from {0}kernels import a, b\n'
    assert rewritten(function.format("")) == function.format("rooftile.")


def test_it_answers_as_the_checkout_does(site: Path, tmp_path: Path) -> None:
    question = ("predict", "--machine", "h200", "--gemm", "2048,2176,4096,bf16", "--json")
    theirs = run(site, tmp_path, *question)
    assert theirs.returncode == 0, theirs.stderr
    ours = subprocess.run(
        [sys.executable, "-m", "analysis", *question, "--results", str(tmp_path)], cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(theirs.stdout) == json.loads(ours.stdout)


@pytest.mark.slow
def test_its_sentences_name_its_own_command(site: Path, tmp_path: Path) -> None:
    told = run(site, tmp_path, "report")
    assert told.returncode == 2
    assert told.stderr.splitlines()[-1] == "nothing is recorded yet; run `rooftile run` first."
    told = run(site, tmp_path, "frobnicate")
    assert told.returncode == 2
    assert "See `rooftile --help`." in told.stderr


def test_a_module_of_the_same_name_at_hand_is_not_ours(site: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from rooftile.kernels.common.program import command_words\n"
        "print(*command_words(sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    told = subprocess.run(
        [sys.executable, "-c", code, "sweeps", "show", "--json"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert told == ["-P", "-m", "rooftile", "show", "--json"]
    (tmp_path / "rooftile.py").write_text("print('mine')", encoding="utf-8")
    answer = subprocess.run([sys.executable, *told], cwd=tmp_path, env=environment,
                            capture_output=True, text=True, check=True)  # fmt: skip
    assert json.loads(answer.stdout)


@pytest.mark.slow
def test_installed_it_records_without_the_checkouts_tests(site: Path, tmp_path: Path) -> None:
    told = run(site, tmp_path, "record", "--plan", "--machine", "h200")
    assert told.returncode == 0, told.stderr
    assert "sweep-families" in told.stdout
    assert "gpu-tests" not in told.stdout


def test_the_version_is_one(site: Path, tmp_path: Path) -> None:
    assert run(site, tmp_path, "--version").stdout.strip() == __version__


POINTED = "import rooftile; print(rooftile.__file__); print(rooftile.machines().columns[0])"


def test_a_module_that_points_at_the_checkout_is_its_front_door(tmp_path: Path) -> None:
    """What the make targets put into their environment."""
    module = tmp_path / POINTING_MODULE
    module.parent.mkdir()
    module.write_text(POINTER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", POINTED], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    front, column = told.stdout.split()
    assert Path(front) == ROOT / "analysis" / "rooftile" / "__init__.py"
    assert column == "slug"


@pytest.mark.slow
def test_an_editable_wheel_has_the_pointer_the_command_and_nothing_else(tmp_path: Path) -> None:
    build = "import sys; from sweeps import editable; print(editable.build_editable(sys.argv[1]))"
    told = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if "No module named 'setuptools'" in told.stderr:
        pytest.skip("needs setuptools")
    assert told.returncode == 0, told.stderr
    with zipfile.ZipFile(tmp_path / told.stdout.split()[-1]) as wheel:
        names = wheel.namelist()
        scripts = next(name for name in names if name.endswith("entry_points.txt"))
        assert b"rooftile = rooftile.__main__:main" in wheel.read(scripts)
        recorded = wheel.read(next(name for name in names if name.endswith("RECORD"))).decode()
    assert [name for name in names if ".dist-info/" not in name] == [POINTING_MODULE]
    assert {line.partition(",")[0] for line in recorded.splitlines()} == set(names)


def test_lines_are_counted_as_python_counts_them() -> None:
    """A form feed or another of Unicode's separators does not end a line of Python."""
    source = 'x = "\f\u2028"  # one\nfrom kernels.names import read_name\n'
    expected = 'x = "\f\u2028"\nfrom rooftile.kernels.names import read_name\n'
    assert rewritten(source) == expected


def test_a_reference_to_the_front_is_to_the_namespace_itself() -> None:
    reference = '""":func:`analysis.rooftile.predict`"""\n'
    assert rewritten(reference) == reference.replace("analysis.", "")


def test_a_data_file_may_have_dots_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "table-1.5.json").write_text("{}", encoding="utf-8")
    gather(tmp_path, tmp_path / NAMESPACE)
    assert (tmp_path / NAMESPACE / "kernels" / "table-1.5.json").is_file()
