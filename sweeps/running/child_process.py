"""A child process of a run, as its parent sees it: started, waited for, and how it ended."""

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

_LISTENING_STEP = 1.0  # seconds; a stop of this process uses up at most this much patience
_START_SECONDS = 300.0  # for a child to import, fill its arena and compile


@dataclass
class Child:
    """A process that carries out an order, and what it was last heard to do."""

    process: BaseProcess
    connection: Connection
    cases: tuple[str, ...] = ()  # in flight: those to blame if it dies now
    since: float = field(default_factory=time.monotonic)  # when that visit began
    patience: float = _START_SECONDS
    samples: int = 0
    spoke: bool = False

    @classmethod
    def start(cls, order: Assignment) -> Child:
        """A new one."""
        context = get_context("spawn")  # a fork would inherit CUDA's and OpenMP's state
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,), name="rooftile-worker", daemon=True)
        process.start()
        theirs.close()  # an open copy here would hide the child's death from recv()
        # Not as an argument: handing over a large one never ends if the child dies before it reads.
        with suppress(BrokenPipeError, ConnectionResetError):
            ours.send(order)
        return cls(process, ours)

    def sends_in_time(self) -> bool:
        """Whether it sends a message before its patience is used up.

        Time in which it or this process is stopped does not count: a poll that lasts longer than
        its step, because this process was stopped, is counted as one step.
        """
        waited = 0.0
        while waited < self.patience:
            step = min(_LISTENING_STEP, self.patience - waited)
            if self.connection.poll(step):
                return True
            waited += 0.0 if is_stopped(self.process.pid) else step
        return False


def how_it_died(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-exit_code}"
