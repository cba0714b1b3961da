"""Tests of which interpreter a make target gets. They make no environment."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from sweeps import bootstrap


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace every action of the script by a record of it in the entry ``did``."""
    state: dict[str, Any] = {"lacks": [], "sees_gpu": False, "gpu": False, "did": []}
    venv = tmp_path / ".venv"
    monkeypatch.setattr(bootstrap, "VENV", venv)
    monkeypatch.setattr(bootstrap, "PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(bootstrap, "STAMP", venv / "rooftile-ready")
    monkeypatch.setattr(bootstrap, "FAILED", tmp_path / ".venv-failed")
    monkeypatch.setattr(bootstrap, "probe", lambda py, wanted: (state["lacks"], state["sees_gpu"]))
    monkeypatch.setattr(bootstrap, "needs_gpu", lambda: state["gpu"])

    def make_venv(on_top_of: str | None = None) -> bool:
        venv.mkdir(exist_ok=True)
        state["did"].append(("venv", on_top_of))
        return True

    def install(lacks: list[str], pins: Path, hurried: bool = False) -> bool:
        if state.get("no_index"):
            state["did"].append(("asked", hurried))
            return False
        pinned = [line.partition("==")[0] for line in pins.read_text().splitlines()]
        state["did"].append(
            ("install", sorted(r.partition(">=")[0] for r in lacks), "torch" in pinned)
        )
        return True

    monkeypatch.setattr(bootstrap, "make_venv", make_venv)
    monkeypatch.setattr(bootstrap, "install", install)
    return state


def run(groups: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert bootstrap.main(groups) == 0
    return capsys.readouterr().out.strip()


def test_where_nothing_is_missing_no_environment_is_made(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([], capsys) == sys.executable
    stage.update(gpu=True, sees_gpu=True)
    assert run(["test"], capsys) == sys.executable
    assert stage["did"] == []


def test_a_pytorch_that_sees_the_gpu_is_kept_and_only_the_rest_added(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stage.update(gpu=True, sees_gpu=True, lacks=["typer>=0.12", "rich>=13"])
    assert run([], capsys).endswith(".venv/bin/python")
    assert stage["did"] == [("venv", sys.executable), ("install", ["rich", "typer"], False)]


def test_a_bare_machine_gets_everything_pinned_and_only_once(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stage["lacks"] = bootstrap.requirements([])
    run([], capsys)
    (made, installed) = stage["did"]
    assert made == ("venv", None)
    assert {"torch", "triton", "pandas", "matplotlib"} <= set(installed[1])
    assert installed[2]
    run([], capsys)
    assert len(stage["did"]) == 2  # the second call does nothing
    run(["test"], capsys)
    assert stage["did"][2][1] == sorted(
        ["hypothesis", "pytest", "pytest-benchmark", "pytest-regressions", "pytest-xdist"]
    )
    run([], capsys)
    run(["test"], capsys)
    assert len(stage["did"]) == 3  # switching between the two installs nothing again
    _, installed_requirements = bootstrap.read_stamp()
    assert sorted(installed_requirements) == sorted(bootstrap.requirements(["measure", "test"]))


def test_a_gpu_that_pytorch_cannot_see_gets_the_pinned_one(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stage.update(gpu=True, sees_gpu=False, lacks=[])
    run([], capsys)
    assert stage["did"][0] == ("venv", None)
    assert "torch" in stage["did"][1][1]


def test_an_extra_that_does_not_exist_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert bootstrap.main(["pages?"]) == 2
    assert capsys.readouterr().err.startswith("The extra pages? does not exist; use one of ")


def test_a_changed_pin_makes_the_environment_anew(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage["lacks"] = bootstrap.requirements([])
    run([], capsys)
    monkeypatch.setattr(bootstrap, "_venv_digest", lambda: "another")
    run([], capsys)
    assert [step[0] for step in stage["did"]] == ["venv", "install"] * 2


def test_an_environment_that_cannot_be_made_leaves_the_old_one(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage["lacks"] = bootstrap.requirements([])
    run([], capsys)
    (bootstrap.VENV / "old").write_text("")
    monkeypatch.setattr(bootstrap, "_venv_digest", lambda: "another")
    stage["no_index"] = True
    assert bootstrap.main([]) == 1
    assert (bootstrap.VENV / "old").exists()
    stage["no_index"] = False
    assert bootstrap.main([]) == 0
    assert [path.name for path in bootstrap.VENV.parent.iterdir()] == [".venv"]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"page": null}', '{"page": 1e400}', f'{{"page": {"9" * 400}}}']
)
def test_a_damaged_file_of_failures_says_nothing(stage: dict[str, Any], content: str) -> None:
    bootstrap.FAILED.write_text(content)
    assert bootstrap.read_failed() == {}


def test_an_error_leaves_the_old_environment_too(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage["lacks"] = bootstrap.requirements([])
    run([], capsys)
    (bootstrap.VENV / "old").write_text("")

    def interrupted(*arguments: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bootstrap.replace_venv(None, stage["lacks"])
    assert (bootstrap.VENV / "old").exists()
    assert [path.name for path in bootstrap.VENV.parent.iterdir()] == [".venv"]


def test_what_is_installed_has_its_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    really_run = subprocess.run

    def pip_or_run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        if "pip" not in command:
            return really_run(command, **how)
        assert "--no-compile" in command
        (packages / "good.py").write_text("answer = 42\n")
        (packages / "bad.py").write_text("print 'Python 2'\n")  # some packages carry such files
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(subprocess, "run", pip_or_run)
    assert bootstrap.install(["good>=1"], tmp_path / "constraints.txt")
    assert [path.name.partition(".")[0] for path in packages.rglob("*.pyc")] == ["good"]


def test_asking_for_the_cpu_keeps_the_environment(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stage.update(gpu=True, lacks=bootstrap.requirements([]))
    run([], capsys)
    stage["gpu"] = False  # DEVICE=cpu
    run([], capsys)
    assert len(stage["did"]) == 2


def test_the_probe_tells_what_is_missing() -> None:
    lacks, _ = bootstrap.probe(sys.executable, ["numpy>=1.0", "numpy>=999", "no-such-thing>=1"])
    assert lacks == ["numpy>=999", "no-such-thing>=1"]


def test_everything_declared_is_pinned_for_ci() -> None:
    pins = (bootstrap.ROOT / "constraints.txt").read_text(encoding="utf-8")
    for requirement in bootstrap.requirements(["test", "lint"]):
        name = requirement.partition(">=")[0]
        assert f"\n{name}==" in pins, name


def test_without_an_index_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Answer:
        returncode = 1
        stderr = (
            "WARNING: Retrying\nERROR: No matching distribution found for torch==2.13.0\nERROR: x"
        )

    monkeypatch.setattr(subprocess, "run", lambda *a, **k: Answer())
    assert bootstrap.install(["torch>=2.11"], bootstrap.ROOT / "constraints.txt") is False
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 2  # what is installed, and what to do about the failure
    assert "No matching distribution found for torch==2.13.0" in said[1]
    assert "set PYTHON to an interpreter" in said[1]


_CONFLICT = (
    "ERROR: Cannot install bokeh>=3.6 because these package versions have conflicting dependencies."
)
_BROKEN = (
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
    "'NewConnectionError('[Errno -3] Temporary failure in name resolution')': /simple/bokeh/"
)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([_CONFLICT], "pip found no suitable version of a package, or the index did not answer"),
        ([_BROKEN, _CONFLICT], "pip could not reach the package index"),
        ([_BROKEN, "ERROR: [Errno 28] No space left on device"], "[Errno 28] No space left"),
        ([], "pip failed"),
    ],
)
def test_an_index_that_does_not_answer_is_not_called_a_conflict(
    lines: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """pip calls it a conflict of constraints if it cannot reach the index, or finds no version."""
    failed = subprocess.CompletedProcess([], 1, stderr="\n".join(lines))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    assert not bootstrap.install(["bokeh>=3.6"], bootstrap.ROOT / "constraints.txt")
    assert f"could not be installed ({reason}" in capsys.readouterr().err


@pytest.mark.parametrize("no_index", [False, True])
def test_an_extra_that_may_be_missing_is_added_to_what_is_there_or_left_out(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    no_index: bool,
) -> None:  # fmt: skip
    """Without a GPU, too, an optional extra must not replace the PyTorch that measures."""

    def probe(python: str, wanted: list[str]) -> tuple[list[str], bool]:
        return [each for each in wanted if each.startswith("bokeh")], False

    monkeypatch.setattr(bootstrap, "probe", probe)
    stage["no_index"] = no_index
    assert bootstrap.main(["page?"]) == 0
    told = capsys.readouterr()
    if no_index:
        assert told.out.strip() == sys.executable
        assert "The optional extra page could not be installed" in told.err
        # The package index is not asked again on the same day.
        asked = len(stage["did"])
        assert stage["did"][-1] == ("asked", True)
        assert bootstrap.main(["page?"]) == 0
        assert len(stage["did"]) == asked
        tomorrow = time.time() + 86_401
        monkeypatch.setattr(time, "time", lambda: tomorrow)
        assert bootstrap.main(["page?"]) == 0
        assert len(stage["did"]) > asked
    else:
        assert stage["did"] == [("venv", sys.executable), ("install", ["bokeh"], False)]
        assert told.out.strip() == str(bootstrap.PYTHON)


def test_an_environment_that_cannot_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")

    def create(path: Path, with_pip: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(venv, "create", create)
    assert not bootstrap.make_venv()
    shown = capsys.readouterr().err
    assert "could not be created (No space left on device): make sure that " in shown


def test_the_interpreter_in_venv_keeps_its_packages(
    stage: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap.VENV.mkdir()
    (bootstrap.VENV / "package-of-the-user").write_text("")
    monkeypatch.setattr(sys, "prefix", str(bootstrap.VENV))
    stage.update(gpu=True, sees_gpu=True, lacks=["bokeh>=3.6"])
    assert run([], capsys) == str(bootstrap.PYTHON)
    assert stage["did"] == [("install", ["bokeh"], True)]
    assert (bootstrap.VENV / "package-of-the-user").exists()
