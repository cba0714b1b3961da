"""Carry out a node's job, and record the run's folder and any failure in a note."""

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
    """Return the folder for the notes and the output of a submission's jobs."""
    return results / _FOLDER


@dataclass(frozen=True)
class NodeNote:
    """Message that a node's job leaves in a file for the process that follows the jobs."""

    folder: Path | None
    """Folder of the run; None if it is not known."""
    failure: str
    """Sentence that says why the job failed; empty if no failure is known."""

    @staticmethod
    def path(results: Path, node: tuple[int, int]) -> Path:
        """Return the path of a node's note.

        ``node`` is a pair: the number of the node, counted from 1, and the number of nodes.
        """
        return jobs_folder(results) / f"{node[0]}-of-{node[1]}.json"

    @classmethod
    def read(cls, results: Path, node: tuple[int, int]) -> NodeNote:
        """Return the note of a node, or an empty note if the file cannot be read."""
        try:
            document = json.loads(cls.path(results, node).read_text(encoding="utf-8"))
            name = document["folder"]
            folder = results / str(name) if name else None
            return cls(folder, str(document["failure"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return cls(None, "")

    def write(self, results: Path, node: tuple[int, int]) -> None:
        """Write the note of a node, replacing an old one.

        Raises:
            UserError: if the note cannot be written.
        """
        name = None if self.folder is None else self.folder.name
        make_folder(jobs_folder(results))
        write_json(self.path(results, node), {"folder": name, "failure": self.failure})


@dataclass(frozen=True)
class NodeJob:
    """Picklable job that is called with the number of its node and measures the node's shards.

    If Slurm requeues the job, the job resumes from the run's files.
    """

    request: Request
    nodes: int
    """Number of nodes that share the run."""
    gpus: int
    """Largest number of GPUs that the job uses; 1 for a run on CPUs."""
    visible: str | None = None
    """Value to restore in CUDA_VISIBLE_DEVICES, which submitit changes for local jobs; None to
    leave the variable unchanged."""

    def __call__(self, number: int) -> None:
        """Measure the shards of node ``number``, counted from 1.

        If measuring fails with a :class:`UserError`, print the error and write it to the node's
        note.

        Raises:
            SystemExit: with exit code 130, if an interrupt stops the measuring.
            UserError: if the error cannot be written to the note.
        """
        if self.visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible
        # CUDA reads the variable when it is first used, so these modules are imported only now.
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
            # The note keeps its folder, because the samples there count even after a failure.
            earlier = NodeNote.read(results, node)
            NodeNote(earlier.folder, str(error)).write(results, node)

    def checkpoint(self, number: int) -> DelayedSubmission:
        """Return the call that submitit makes when the job starts again after a requeue."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)
