"""Shared parts of the commands: the application, common options, and loading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.imports.problems import read_problems
from analysis.model.basis import Basis, find_basis
from analysis.model.residual import can_grow
from analysis.recordings.load import Recording, find_recording, load, recording_folder
from analysis.recordings.runs import load_runs
from kernels.cli import (
    new_app,
    note,
    parse_problems,
)
from kernels.common.errors import UserError
from kernels.common.program import command
from kernels.problem import Problem

if TYPE_CHECKING:
    from analysis.model.fitted import Analysis

app = new_app("Analyse recordings: model, advice, plots and reports.")

MachineOption = Annotated[
    str | None, typer.Option("--machine", help="Machine [default: the one measured last].")
]
ResultsOption = Annotated[
    Path, typer.Option("--results", help=("Folder with the results of all machines."))
]


def problems(gemm: list[str] | None, conv: list[str] | None, file: Path | None) -> list[Problem]:
    """Return the problems of the command line; those of a file come last, in its order.

    Raises:
        UserError: if no problem is given.
    """
    parsed = parse_problems(gemm, conv)
    if file is not None:
        parsed += read_problems(file)
    if not parsed:
        raise UserError("give at least one --gemm or --conv, or a --file.")
    return parsed


def basis_of(machine: str | None, results: Path) -> Basis:
    """Return what answers about a machine rest on; print a note if it is not calibrated yet."""
    basis = find_basis(machine, results)
    if not basis.calibrated:
        note(
            "This recording is not calibrated yet, so predictions use shipped constants. To fit "
            f"the model to it, run: {command('analysis report')}"
        )
    return basis


def analyse_machine(machine: str | None, results: Path) -> Analysis:
    """Return the recording of a machine with the model fitted to it.

    Print a note if scikit-learn is missing, as on a node without access to a package index.
    """
    from analysis.model.fitted import analyse

    if not can_grow():
        note(
            "scikit-learn is missing, so predictions use only the formula. Install it, or "
            "calibrate on a machine that has it, for smaller errors."
        )
    return analyse(load_machine(machine, results))


def load_machine(machine: str | None, results: Path) -> Recording:
    """Read all runs of a machine, or of the one measured last, as one recording."""
    return load_runs(find_recording(machine, results))


def recording_at(place: str, results: Path) -> Recording:
    """Read a single run, given its folder or the slug of its machine."""
    return load(recording_folder(place, results))
