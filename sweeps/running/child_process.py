"""Start a child process of a run, wait for its messages, and describe how it ended."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from sweeps.measuring.child import Assignment, work
from sweeps.process import is_stopped

# Seconds of one poll. If this process is stopped (Ctrl-Z), a child loses at most this much of its
# patience.
_LISTENING_STEP = 1.0
_START_SECONDS = 300.0  # time for a child to import modules, fill its arena and compile


@dataclass
class Child:
    """Child process that carries out an assignment, and what the child has reported so far."""

    process: BaseProcess
    connection: Connection
    cases: tuple[str, ...] = ()
    """Ids of the cases that the process is running. They are the suspects if the process dies."""
    since: float = field(default_factory=time.monotonic)
    """Time when the process was started or last began to handle cases, in seconds of
    ``time.monotonic``."""
    patience: float = _START_SECONDS
    """Seconds without a message after which the process is considered hung."""
    samples: int = 0
    spoke: bool = False
    """True once the process has sent a message."""

    @classmethod
    def start(cls, assignment: Assignment) -> Child:
        """Start a new child process and send it its assignment."""
        context = get_context("spawn")  # a forked process would inherit CUDA's and OpenMP's state
        parent_end, child_end = context.Pipe()
        process = context.Process(
            target=work, args=(child_end,), name="rooftile-worker", daemon=True
        )
        process.start()
        # If this process kept the child's end open, recv() would not notice the child's death.
        child_end.close()
        # The assignment is sent through the pipe. As an argument of the process, a large one would
        # block this process forever if the child died before reading it.
        with suppress(BrokenPipeError, ConnectionResetError):
            parent_end.send(assignment)
        return cls(process, parent_end)

    def sends_in_time(self) -> bool:
        """Return True if the child sends a message or ends within :attr:`patience` seconds.

        Time during which the child is stopped, for example by Ctrl-Z, does not count.
        """
        waited = 0.0
        while waited < self.patience:
            step = min(_LISTENING_STEP, self.patience - waited)
            if self.connection.poll(step):
                return True
            if not is_stopped(self.process.pid):
                waited += step
        return False


def how_it_died(exit_code: int | None) -> str:
    """Return how a process with this exit code ended, as a phrase such as ``killed by SIGSEGV``.

    If ``exit_code`` is None, the phrase is ``exit code unknown``.
    """
    if exit_code is None:  # the process has not been joined
        return "exit code unknown"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-exit_code}"
