"""Typer application, and the options and loading functions that the commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernels.cli import new_app, note, parse_problems
from kernels.common.errors import UserError
from kernels.common.program import command
from kernels.problem import Problem

# A command's imports are inside its function. At the top of a module, they would slow down even
# --help, because importing pandas takes long.
if TYPE_CHECKING:
    from analysis.model.basis import Basis
    from analysis.model.fitted import Analysis
    from analysis.recordings.load import Recording

app = new_app("Analyse recordings: model, advice, plots and reports.")

MachineOption = Annotated[
    str | None,
    typer.Option(
        "--machine",
        help="Machine's slug or an unambiguous part of it [default: the machine measured last].",
    ),
]
ResultsOption = Annotated[
    Path, typer.Option("--results", help="Folder with the results of all machines.")
]


def problems_given(
    gemm: list[str] | None, conv: list[str] | None, file: Path | None
) -> list[Problem]:
    """Return the problems given by ``--gemm``, ``--conv`` and ``--file``, in this order.

    Raises:
        UserError: if no problem is given, or if an option or the file is invalid.
    """
    from analysis.imports.problems import read_problems

    parsed = parse_problems(gemm, conv)
    if file is not None:
        parsed += read_problems(file)
    if not parsed:
        raise UserError("no shape is given; add --gemm, --conv or --file.")
    return parsed


def basis_of(machine: str | None, results: Path) -> Basis:
    """Return the basis of answers about a machine; print a note if the recording is uncalibrated.

    If ``machine`` is None, the answers are about the machine that was measured last.

    Raises:
        UserError: in the same cases as :func:`analysis.model.basis.find_basis`.
    """
    from analysis.model.basis import find_basis

    basis = find_basis(machine, results)
    if not basis.calibrated:
        slug = basis.model.machine.slug
        note(
            f"The recording of {slug} is not calibrated yet, so predictions use shipped constants. "
            "To fit the model to the recording, run: "
            f"{command(f'analysis calibrate --machine {slug}')}"
        )
    return basis


def analyse_machine(machine: str | None, results: Path) -> Analysis:
    """Read a machine's recording, fit the model to the recording, and return the analysis.

    If ``machine`` is None, the machine that was measured last is analysed. If scikit-learn is not
    installed, a note is printed.

    Raises:
        UserError: if the machine has no readable recording with a case that the model can use.
    """
    from analysis.model.fitted import analyse
    from analysis.model.residual import can_grow

    if not can_grow():
        note(
            "scikit-learn is not installed, so predictions use the time formula without a learned "
            "correction. For smaller errors, install scikit-learn or calibrate on a machine that "
            "has it."
        )
    return analyse(load_machine(machine, results))


def load_machine(machine: str | None, results: Path) -> Recording:
    """Read a machine's recording, with all runs combined.

    If ``machine`` is None, read the recording of the machine that was measured last.

    Raises:
        UserError: if the machine has no recording that can be read.
    """
    from analysis.recordings.load import find_recording
    from analysis.recordings.runs import load_runs

    return load_runs(find_recording(machine, results))


def recording_at(place: str, results: Path) -> Recording:
    """Read a single run or an imported table, given a folder or the slug of a machine.

    Raises:
        UserError: if the recording does not exist or cannot be read.
    """
    from analysis.recordings.load import load, recording_folder

    return load(recording_folder(place, results))
