"""Run cases in a child process, so that a crash does not end the run."""

from __future__ import annotations

import functools
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kernels.common.errors import UserError, error_summary
from sweeps.folding.history import History
from sweeps.measuring.anchor_timing import time_anchors
from sweeps.measuring.bench import Bench, PoisonedError
from sweeps.measuring.extra_work import confirm_pairs, name_kernels, repeat_cases
from sweeps.measuring.rounds import Rounds
from sweeps.planning.plan import PlanEntry
from sweeps.process import die_with_parent
from sweeps.store import Event


@dataclass(frozen=True)
class Assignment:
    """Work for a child process. All attributes can be pickled."""

    bench: str
    """Callable that makes the bench, as ``module:name``."""
    arguments: Mapping[str, Any]
    """Arguments of the callable in :attr:`bench`, except the cases."""
    planned: Sequence[PlanEntry]
    known: Mapping[str, History]
    """Histories from earlier processes, by case id."""
    worker: str
    budget: float
    """Seconds of measuring that this shard may use in total, however often the run is resumed."""
    spent: float
    """Seconds of the budget that are used up."""
    until: float = math.inf
    """Time on the ``time.monotonic`` clock by which measuring must end; infinite for no limit. All
    processes of a host share this clock."""
    careful: frozenset[str] = frozenset()
    """Value of :attr:`Bench.careful`."""
    work: str = "measure"
    """Kind of work: ``measure``, or one of :data:`EXTRA_WORK`."""
    longest: float | None = None
    """Seconds that six samples of a case may take; None for the default of :class:`Rounds`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the function in :data:`EXTRA_WORK`."""
    waits: bool = False
    """True if the work waits for the node's other workers."""


EXTRA_WORK: dict[str, Callable[..., None]] = {
    "anchor": time_anchors, "repeat": repeat_cases, "confirm": confirm_pairs, "name": name_kernels,
}  # fmt: skip
"""Kinds of work other than measuring the plan's cases, each with its function."""


def work(connection: Connection) -> None:
    """Run the child: receive an :class:`Assignment`, carry it out, and report to the parent.

    The child sends these messages:

    - ("event", event) for each event;
    - ("visit", ids, seconds) before any work that may crash, with the arguments of
      :data:`sweeps.measuring.bench.OnStart`;
    - ("wait", phase), after which the child waits until the parent sends a message.

    Its last message is one of these:

    - ("end", reason), where the reason is ``done``, or ``budget`` if the budget or the time does
      not suffice for the remaining cases;
    - ("failed", text) if an error ended the work;
    - ("poisoned", text) if the device's context broke.
    """
    # 1. Prepare the process, and receive the assignment.
    die_with_parent()
    # Ctrl-C, a closed terminal and a batch system send their signal to the whole process group.
    # Only the parent acts on the signal, and it also ends this process.
    for signal_number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    assignment: Assignment = connection.recv()

    # A library that a launch calls may fork this process. The copy must not send on this pipe.
    os.register_at_fork(after_in_child=functools.partial(_detach_fork, connection))

    def send(*message: object) -> None:
        """Send a message to the parent, or end this process if it is only a forked copy."""
        if connection.closed:
            os._exit(1)
        connection.send(message)

    def emit(event: Event) -> None:
        send("event", event)

    def on_start(cases: Sequence[str], seconds: float) -> None:
        send("visit", tuple(cases), seconds)

    def wait(phase: str) -> None:
        send("wait", phase)
        connection.recv()

    # 2. Do the work.
    try:
        bench = _make_bench(assignment)
        if assignment.work in EXTRA_WORK:
            extra_work = EXTRA_WORK[assignment.work]
            cases = [entry.case for entry in assignment.planned]
            options = dict(assignment.options)
            if assignment.waits:
                options["wait"] = wait
            extra_work(cases, bench, assignment.worker, emit, on_start, **options)
            send("end", "done")
            return
        # The limit is computed only now, because starting this process has already used up some of
        # the time until ``until``. Unlike the budget, that moment is fixed.
        rounds = Rounds(
            assignment.planned,
            assignment.known,
            bench,
            assignment.worker,
            budget=assignment.budget,
            spent=assignment.spent,
            emit=emit,
            on_start=on_start,
            limit=assignment.until - time.monotonic(),
            longest=assignment.longest,
        )
        send("end", rounds.run())
    except (BrokenPipeError, ConnectionResetError, EOFError):
        sys.exit(1)  # the parent is gone
    except PoisonedError as error:
        send("poisoned", _first_line(error))
    except UserError as error:
        send("failed", str(error))
    except Exception as error:
        send("failed", error_summary(error))


def _detach_fork(connection: Connection) -> None:
    """Close the pipe in a forked copy of the child, and make the copy end when the child ends.

    If the copy kept the pipe open, the parent would not notice that the real child has died.
    """
    connection.close()
    die_with_parent()  # Linux clears this setting in a forked copy


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _make_bench(assignment: Assignment) -> Bench:
    module_name, _, callable_name = assignment.bench.partition(":")
    make = getattr(importlib.import_module(module_name), callable_name)
    cases = [entry.case for entry in assignment.planned]
    bench: Bench = make(cases=cases, **assignment.arguments)
    bench.careful = assignment.careful
    return bench
