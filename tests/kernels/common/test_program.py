"""Names of the program's commands in a checkout; tests/test_wheel.py tests them installed."""

from __future__ import annotations

from pathlib import Path

from kernels.common import program


def test_in_the_checkout_commands_are_modules_and_jobs_are_targets() -> None:
    assert program.command("sweeps doctor --strict") == "`python -m sweeps doctor --strict`"
    assert program.command_words(["kernels", "list"]) == ("-m", "kernels", "list")
    assert program.command_words(["x"]) == ("-m", "x")
    assert program.target("sweep FRESH=1", "run --fresh") == "`make sweep FRESH=1`"
    assert "sweeps/bootstrap.py models" in program.extra("models")
    assert program.verb("kernels", "list") == "implementations"


def test_results_are_found_from_anywhere() -> None:
    root = Path(__file__).resolve().parents[3]
    assert root == program.ROOT == program.FOLDER
    assert root / "results" == program.RESULTS
