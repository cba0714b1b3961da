"""A job's work on its node, and its note about where it does that work."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.cli import note
from kernels.common.errors import UserError
from sweeps.progress import LiveReporter
from sweeps.running.request import Request
from sweeps.store import make_folder, write_json

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

_FOLDER = ".submitted"


def jobs_folder(results: Path) -> Path:
    """Return the folder of a submission's notes and of its jobs' output."""
    return results / _FOLDER


@dataclass(frozen=True)
class NodeNote:
    """Note of a node's latest job: the folder of its run, and why it failed, if it did."""

    folder: Path | None
    failure: str

    @staticmethod
    def path(results: Path, node: tuple[int, int]) -> Path:
        """Return the path of the note of the I-th of N nodes."""
        return jobs_folder(results) / f"{node[0]}-of-{node[1]}.json"

    @classmethod
    def read(cls, results: Path, node: tuple[int, int]) -> NodeNote:
        """Read the note of a node; return an empty one if it cannot be read."""
        try:
            document = json.loads(cls.path(results, node).read_text(encoding="utf-8"))
            name = document["folder"]
            folder = results / str(name) if name else None
            return cls(folder, str(document["failure"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(None, "")

    def write(self, results: Path, node: tuple[int, int]) -> None:
        """Replace the note of a node."""
        name = None if self.folder is None else self.folder.name
        make_folder(jobs_folder(results))
        write_json(self.path(results, node), {"folder": name, "failure": self.failure})


@dataclass(frozen=True)
class NodeJob:
    """Job that carries out a node's shares of a run. It can be pickled.

    The job is called on the node with the node's number. If it is stopped before its end, because
    its time is over or somebody else needs the node, it is called again from the beginning and
    resumes from what it has written.
    """

    request: Request
    nodes: int
    gpus: int
    """Largest number of visible GPUs that the job uses."""
    visible: str | None = None
    """Value of CUDA_VISIBLE_DEVICES to restore where submitit would replace it."""

    def __call__(self, number: int) -> None:
        """Carry out the shares of a node, counted from 1. Write a failure to the node's note."""
        if self.visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible
        from sweeps.sharing.gpus import ALL, choose_gpus
        from sweeps.sharing.node import share

        node = (number, self.nodes)
        results = self.request.results

        def note_folder(folder: Path) -> None:
            NodeNote(folder, "").write(results, node)

        try:
            visible_gpus = choose_gpus(ALL, self.request.device)
            gpus = dict(itertools.islice(visible_gpus.items(), self.gpus))
            with LiveReporter() as live:
                share(self.request, gpus, node, live, note, note_folder)
        except KeyboardInterrupt:
            note("Stopped. Measurements are saved.")
            sys.exit(130)
        except UserError as error:
            note(str(error))
            # The note keeps its folder, whose samples count even after a failure.
            earlier = NodeNote.read(results, node)
            NodeNote(earlier.folder, str(error)).write(results, node)

    def checkpoint(self, number: int) -> DelayedSubmission:
        """Return what to call after a requeue.

        submitit asks for it before it ends this process.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)
