"""A child process of a run as its parent sees it: how it starts, sends messages and ends."""

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

# Seconds of one poll. A stop of this process uses up at most this much of a child's patience.
_LISTENING_STEP = 1.0
_START_SECONDS = 300.0  # for a child to import modules, fill its arena and compile


@dataclass
class Child:
    """A process that carries out an assignment, and what it reported last."""

    process: BaseProcess
    connection: Connection
    cases: tuple[str, ...] = ()  # cases in flight, which are to blame if it dies now
    since: float = field(default_factory=time.monotonic)  # when it, or its latest visit, began
    patience: float = _START_SECONDS  # seconds without a message after which it counts as hung
    samples: int = 0
    spoke: bool = False

    @classmethod
    def start(cls, order: Assignment) -> Child:
        """Start a new child process and send it its assignment."""
        context = get_context("spawn")  # a fork would inherit CUDA's and OpenMP's state
        parent_end, child_end = context.Pipe()
        process = context.Process(
            target=work, args=(child_end,), name="rooftile-worker", daemon=True
        )
        process.start()
        child_end.close()  # an open copy here would hide the child's death from recv()
        # The assignment is not an argument of the process: passing a large one would never return
        # if the child died before reading it.
        with suppress(BrokenPipeError, ConnectionResetError):
            parent_end.send(order)
        return cls(process, parent_end)

    def sends_in_time(self) -> bool:
        """Return True if the child sends a message before its patience is used up.

        Time in which the child or this process is stopped does not count. If this process is
        stopped during a poll, the poll counts as one of normal length, however long it lasted.
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
    """Describe how a process ended, given its exit code, which is negative after a signal."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-exit_code}"
