"""One GPU's part of a run that several GPUs of a node share: a process of its own."""

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
    """What a worker is to do; everything in it can be pickled."""

    request: Request
    """With its shard and its GPU."""
    workers: int
    """How many share the host."""
    parent: int
    """The process that started it."""
    anchors: bool
    """Whether it times the anchors, as all others do then."""


class _Silent:
    """The parent shows the progress of all workers: it reads what they write."""

    def begin(self, phase: str, seconds: float | None, after: float = 0.0) -> None:
        """The parent tells."""

    def update(self, done: int, total: int, left: float | None = None) -> None:
        pass


def work(connection: Connection, job: WorkerJob) -> None:
    """Entry point of a worker. Sends ("note", text), ("wait", gate) and how it ended.

    After ("wait", gate) it waits for a message. It ends with ("end", why), or ("failed", sentence)
    where it could not go on.
    """
    die_with_parent()
    # Ctrl-C, and what a batch system sends before a time limit, reach all; the parent acts on them.
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
