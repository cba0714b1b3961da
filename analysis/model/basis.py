"""What the answers about a machine rest on: its own recording, others' table, or constants."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from analysis.model.predict import Model, model_from_json
from analysis.recordings.load import find_recording, load_run, recorded_machines
from kernels.constants import measured_on
from kernels.errors import UserError
from kernels.machine import Machine, known_machine

_DTYPE = "bf16"  # whose constants are named where there is nothing else


@dataclass(frozen=True)
class Basis:
    """A machine's model, and where it comes from.

    ``kind`` is ``recorded`` (measured by this project's sweeps), ``public`` (an imported table of
    others), ``shipped`` (constants fitted to that very machine), ``generation`` (constants of
    another machine of its generation) or ``none`` (of another generation: a guess). ``folder`` is
    the recording's, None without one. ``warm`` says whether operands come from the cache where
    they fit it, as in others' tables.
    """

    model: Model
    kind: str
    source: str
    folder: Path | None = None
    warm: bool = False
    calibrated: bool = True


def find_basis(machine: str | None, results: Path) -> Basis:
    """The best that there is of a machine: of its own, then others' table, then constants.

    Args:
        machine: its slug; the machine that was measured last if None.
        results: the folder of all machines' results.

    Raises:
        UserError: nobody knows the machine, or its calibration cannot be read.
    """
    recorded = recorded_machines(results)
    if machine is None or machine in recorded:
        return _of_recording(find_recording(machine, results))
    return _of_constants(known_machine(machine, recorded))


def _of_recording(folder: Path) -> Basis:
    run = load_run(folder)
    machine = Machine.from_json(run["machine"])
    path = folder / "calibration.json"
    public = run.get("public")
    warm = public is not None and public["cache"] == "warm"
    kind = "public" if public else "recorded"
    source = (
        f"{public['rows']:,} public rows, {public['source']}, {public['cache']}"
        if public
        else f"measured {run['run'][:10]}"
    )
    if not path.exists():
        return Basis(Model(machine), kind, source, folder, warm, calibrated=False)
    try:
        model = model_from_json(machine, json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} cannot be read; `python -m analysis calibrate --machine {folder.name}` "
            "writes it again."
        ) from None
    return Basis(model, kind, source, folder, warm)


def _of_constants(machine: Machine) -> Basis:
    origin = measured_on(machine.generation, _DTYPE)
    if origin is None:
        return Basis(Model(machine), "none", "constants of no machine of its generation")
    if origin == machine.slug:
        return Basis(Model(machine), "shipped", "shipped constants, fitted to public rows of it")
    there = known_machine(origin)
    kind = "generation" if there.generation == machine.generation else "none"
    return Basis(Model(machine), kind, f"shipped constants of {there.name}")
