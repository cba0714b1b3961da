"""What the commands of this package share: the application, options, and loading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.model.basis import Basis, find_basis
from analysis.model.residual import can_grow
from analysis.recordings.load import Recording, find_recording, load
from analysis.recordings.problems import read_problems
from analysis.recordings.runs import load_runs
from kernels.cli import (
    new_app,
    note,
    parse_problems,
)
from kernels.errors import UserError
from kernels.problem import Problem

if TYPE_CHECKING:
    from analysis.model.fitted import Analysis

app = new_app("What the measurements mean.")

MachineOption = Annotated[
    str | None, typer.Option("--machine", help="Its slug; without it, the one measured last.")
]
ResultsOption = Annotated[Path, typer.Option("--results", help="Folder of all machines' results.")]


def problems(gemm: list[str] | None, conv: list[str] | None, file: Path | None) -> list[Problem]:
    """The command line's problems, at least one; a file's come last, in its order."""
    parsed = parse_problems(gemm, conv)
    if file is not None:
        parsed += read_problems(file)
    if not parsed:
        raise UserError("give at least one --gemm or --conv, or a --file.")
    return parsed


def basis_of(machine: str | None, results: Path) -> Basis:
    """What answers about a machine rest on, saying so where it is not calibrated yet."""
    basis = find_basis(machine, results)
    if not basis.calibrated:
        note("This recording is not calibrated yet: predictions use shipped constants.")
    return basis


def analyse_machine(machine: str | None, results: Path) -> Analysis:
    """The recording of a machine with the model fitted to it, noting a lack of scikit-learn.

    A checkout may run on a node without a package index, where scikit-learn is not.
    """
    from analysis.model.fitted import analyse

    if not can_grow():
        note(
            "scikit-learn is missing: predictions are by the formula alone. Install it, or "
            "calibrate where it is, for smaller errors."
        )
    return analyse(load_machine(machine, results))


def load_machine(machine: str | None, results: Path) -> Recording:
    """All runs of a machine, or of the one measured last, as one recording."""
    return load_runs(find_recording(machine, results))


def recording_at(place: str, results: Path) -> Recording:
    """A single run by its folder, or by a machine's slug."""
    folder = Path(place)
    if not (folder / "run.json").exists():
        if folder.is_dir() or "/" in place:
            raise UserError(f"{place} has no run.json; give the folder of a recording.")
        folder = find_recording(place, results)
    return load(folder)


def names_in(text: str | None) -> tuple[str, ...]:
    """Names with commas between, such as ``M,K``, in lower case."""
    return tuple(filter(None, (word.strip().lower() for word in (text or "").split(","))))


def parse_share(text: str, option: str = "pad") -> float:
    """Read ``12.5%`` or ``0.125`` as a fraction."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"--{option} takes a share such as 12.5% or 0.125, not {text!r}.")
    return share
