"""Tests of the ``rooftile`` command, which has the commands of all three packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from analysis.__main__ import app as analysis
from analysis.rooftile.__main__ import GROUPS, one_command
from kernels.__main__ import app as kernels
from kernels.common.program import verb
from sweeps.__main__ import app as sweeps

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"kernels": kernels, "sweeps": sweeps, "analysis": analysis}
COMMANDS = [
    (package, str(info.name))
    for package, app in PACKAGES.items()
    for info in app.registered_commands
]


def test_no_verb_is_lost_to_another_of_its_name() -> None:
    names = [verb(*command) for command in COMMANDS]
    assert len(set(names)) == len(names)
    assert set(names) == set(get_command(one_command()).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("package", "name"), COMMANDS)
def test_a_verb_takes_the_same_options_as_in_its_package(package: str, name: str) -> None:
    mine = get_command(one_command()).commands[verb(package, name)]  # type: ignore[attr-defined]
    theirs = get_command(PACKAGES[package]).commands[name]  # type: ignore[attr-defined]
    assert [p.name for p in mine.params] == [p.name for p in theirs.params]
    assert mine.help == theirs.help


def test_its_help_fits_a_screen_and_names_every_verb() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "analysis.rooftile", "--help"], cwd=ROOT, capture_output=True,
        text=True, check=True, env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert [line.rstrip(":") for line in lines if line.endswith(":")] == [*GROUPS, "Also"]
    assert "..." not in result.stdout.partition("\n")[2]  # no help text is truncated
    words = result.stdout.replace(",", " ").replace(".", " ").split()
    assert {verb(*command) for command in COMMANDS} <= set(words)
