"""Worker process that measures one shard of a run."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from kernels.common.errors import UserError
from sweeps.process import die_with_parent, terminated_as_interrupt
from sweeps.running.opening import begin
from sweeps.running.request import Request
from sweeps.running.run import NodePeers
from sweeps.running.supervisor import carry_out


@dataclass(frozen=True)
class WorkerJob:
    """Picklable job that the parent process of a node gives to a worker."""

    request: Request
    """Options of the run, with the worker's shard and GPU."""
    workers: int
    """Largest number of workers that share the host at one time."""
    parent: int
    """Id of the process that started the worker."""
    anchors: bool
    """True if the worker times the anchors."""


class _Silent:
    """Reporter that shows nothing, because the parent process shows the progress of all workers."""

    def begin(self, phase: str, seconds: float | None, after: float = 0.0) -> None:
        """Do nothing."""

    def update(self, done: int, total: int, left: float | None = None) -> None:
        """Do nothing."""


def work(connection: Connection, job: WorkerJob) -> None:
    """Measure a worker's shard, and send messages to the parent process.

    The worker sends ("note", text) for the user. At a gate, it sends ("wait", gate) and waits for
    an answer. It sends ("end", reason) when measuring ends, and ("failed", sentence) after a
    :class:`UserError`.
    """
    die_with_parent()
    # Ctrl-C, and the signal of a batch system before a time limit, reach all processes. Only the
    # parent acts on them, and it ends its workers.
    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    def note(text: str) -> None:
        connection.send(("note", text))

    def wait(gate: str) -> None:
        connection.send(("wait", gate))
        connection.recv()

    try:
        with terminated_as_interrupt():
            run = begin(job.request, note)
            peers = NodePeers(job.workers, job.parent, wait)
            run = replace(run, peers=peers, anchors=run.anchors if job.anchors else ())
            connection.send(("end", carry_out(run, _Silent(), note)))
    except UserError as error:
        connection.send(("failed", str(error)))
    except (KeyboardInterrupt, BrokenPipeError, ConnectionResetError, EOFError):
        sys.exit(130)  # interrupted with its parent, or the parent is gone
