"""Read a recording that is to be merged, and check that it can be merged."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.common.errors import UserError
from kernels.machine import Machine
from sweeps.folding.fold import too_damaged
from sweeps.planning.plan import PlanEntry, read_plan
from sweeps.running.devices import read_places
from sweeps.schema import SCHEMA
from sweeps.store import Event, parse_event, read_run, refuse_if_running
from sweeps.timing.sampler import PROTOCOL

_LOG = "1-of-1.jsonl"


@dataclass(frozen=True)
class MergeSource:
    """A recording without shards that is to be merged with other recordings."""

    folder: Path
    record: Mapping[str, Any]
    """Content of the recording's run.json."""
    machine: Machine
    planned: Sequence[PlanEntry]
    anchors: Sequence[PlanEntry]
    lines: Sequence[Event | bytes]
    """Lines of the recording's sample file; a line is an event or, if it is damaged, bytes."""
    places: Sequence[Mapping[str, Any]]
    """Entries of samples/places.json: one for each GPU or, in a run on CPUs, for each node.

    In each entry, ``gpu`` is the number of that GPU or node, ``id`` is its hash, and ``host`` is
    the hash of the node. Damaged entries are left out. The list is empty if the file is missing or
    cannot be read."""

    @property
    def events(self) -> list[Event]:
        """Events of the recording, in the order in which they were written."""
        return [line for line in self.lines if isinstance(line, dict)]

    @property
    def gpus(self) -> Sequence[Mapping[str, Any]]:
        """The list ``gpus`` of run.json; empty if run.json has no such list, as for a CPU."""
        gpus: Sequence[Mapping[str, Any]] = self.record.get("gpus", ())
        return gpus


def read_source(folder: Path) -> MergeSource:
    """Read a recording that is to be merged.

    Raises:
        UserError: if the folder has no recording, or if the recording cannot be read or merged, is
            damaged, or is being written.
    """
    if not os.path.exists(folder / "run.json"):
        raise UserError(f"{folder} has no run.json; give the folder of a recording.")
    refuse_if_running(folder)
    record = read_run(folder)
    if why := _why_not_merged(folder, record):
        raise UserError(f"{folder} {why}")
    try:
        machine = Machine.from_json(record["machine"])
        planned = read_plan(record["plan"])
        anchors = [PlanEntry.from_json(row) for row in record.get("anchors", ())]
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    return MergeSource(
        folder,
        record,
        machine,
        planned,
        anchors,
        _read_lines(folder / "samples" / _LOG),
        read_places(folder),
    )


def _why_not_merged(folder: Path, record: Mapping[str, Any]) -> str:
    """Return why a recording cannot be merged, as a sentence without its subject; "" if it can."""
    if "merged" in record:
        return "is itself a merged recording; give the recordings from which it was made."
    if "public" in record:
        return "is an imported table, which has no samples; give recordings of runs."
    if record["plan"].get("shards", 1) > 1:
        return (
            "was measured in shards, which already form one recording; give recordings that were "
            "measured without shards."
        )
    logs = {path.name for path in (folder / "samples").glob("*.jsonl")}
    if not logs:
        return (
            "has no samples (published recordings have none); give the folder to which the run "
            "wrote its results."
        )
    if logs != {_LOG}:
        return f"has sample files other than {_LOG}; move them away."
    if (record["schema"], record["protocol"]) != (SCHEMA, PROTOCOL):
        return (
            "was measured with a timing protocol or a file format that this version of Rooftile "
            "does not use; measure again with this version."
        )
    return ""


def _read_lines(path: Path) -> list[Event | bytes]:
    """Return the lines of a sample file, as in :attr:`MergeSource.lines`.

    Raises:
        UserError: if the file cannot be read, or if too many of its lines are damaged.
    """
    lines: list[Event | bytes] = []
    faults: list[str] = []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}). Restore it, or leave this recording out."
        ) from None
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line:
            continue
        event, fault = parse_event(line)
        if event is None:
            lines.append(line)
            faults.append(f"line {number}: {fault}")
        else:
            lines.append(event)
    if too_damaged(len(lines) - len(faults), len(faults)):
        raise UserError(
            f"{len(faults):,} of {len(lines):,} lines of {path} are damaged. The first of them is "
            f"{faults[0]}. Restore the file, or leave this recording out."
        )
    return lines
