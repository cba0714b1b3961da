"""The parent of a run: it keeps the plan and the files, and children that may die.

It never touches a device. A child visits the cases and tells what happens; the parent writes it
down, watches the time, and starts another child when one has gone, minus what took it down.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from kernels.errors import UserError
from sweeps.fold import canary_report, fold_rows, histories, spent_seconds
from sweeps.plan import Planned
from sweeps.progress import Reporter
from sweeps.statistics import finished
from sweeps.store import (
    Event,
    SampleLog,
    folding,
    read_events,
    read_run,
    write_run,
    write_table,
)  # fmt: skip
from sweeps.worker import Order, work

_START_SECONDS = 300.0  # for a child to import, fill its arena and compile
_LEAST_PATIENCE = 30.0
_PATIENCE = 10.0  # times the expected seconds
_CRASHES = 2  # that a case may cause: it is retried once
_IDLE_CRASHES = 3  # of children in a row that took no sample
_TERMINATING = (signal.SIGTERM, signal.SIGHUP)


@dataclass
class Run:
    """A run of one shard: its files, its cases and where they are visited."""

    folder: Path
    planned: Sequence[Planned]
    budget: float
    bench: str = "sweeps.bench:TorchBench"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shard: tuple[int, int] = (1, 1)
    least_patience: float = _LEAST_PATIENCE

    @property
    def worker(self) -> str:
        """The shard's name in the rows."""
        return f"{self.shard[0]}/{self.shard[1]}"


@dataclass
class _Child:
    process: BaseProcess
    connection: Connection
    case: str = ""  # the one it is visiting
    since: float = field(default_factory=time.monotonic)  # when that visit began
    patience: float = _START_SECONDS
    samples: int = 0


def carry_out(run: Run, reporter: Reporter, note: Callable[[str], None]) -> str:
    """Measure until the plan is done or the budget is spent, then fold; says which it was.

    Whatever ends the run, an interrupt included, the samples are folded into the table.

    Raises:
        UserError: a second writer, a full disk, or a bench that cannot be set up.
        KeyboardInterrupt: after folding.
    """
    with SampleLog(run.folder, run.shard) as log, _terminated_as_interrupt():
        events, damaged = read_events(run.folder)
        for sentence in damaged:
            note(sentence)
        mine = [event for event in events if event["worker"] == run.worker]
        try:
            return _Supervisor(run, log, mine, reporter, note).supervise()
        finally:
            fold(run.folder)


def fold(folder: Path) -> dict[str, Any]:
    """Fold all shards' samples into the table and the counts of run.json; returns run.json."""
    with folding(folder):
        record = read_run(folder)
        planned = [Planned.from_json(row) for row in record["plan"]["cases"]]
        events, damaged = read_events(folder)
        rows = fold_rows(record["run"], planned, events)
        write_table(folder, rows)
        statuses = [row["status"] for row in rows]
        record["counts"] = {
            "planned": len(planned),
            "measured": statuses.count("ok"),
            "not_reached": len(planned) - len(rows),
            **{name: statuses.count(name) for name in ("wrong", "oom", "unsupported", "error")},
            "damaged_lines": len(damaged),
        }
        record["spent_s"] = round(spent_seconds(events), 3)
        record["canary"] = canary_report(events)
        write_run(folder, record)
        return record


class _Tally:
    """How far a shard is, kept up to date event by event."""

    def __init__(self, planned: Sequence[Planned], events: Sequence[Event]) -> None:
        self._mine = {entry.case.id for entry in planned}
        self._samples: dict[str, list[float]] = {}
        self._finished: set[str] = set()
        self.spent = 0.0
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        self.spent += event.get("cost", 0.0)
        case = event["case"]
        if case not in self._mine:
            return
        if event["event"] == "sample":
            samples = self._samples.setdefault(case, [])
            samples.append(event["s"])
            if finished(samples):
                self._finished.add(case)
        elif event["event"] in ("outcome", "too-long"):
            self._finished.add(case)

    @property
    def complete(self) -> bool:
        return self._finished == self._mine

    def report(self, reporter: Reporter, budget: float) -> None:
        seen = len(self._finished.union(self._samples))
        reporter.update(self.spent, budget, seen, len(self._finished), len(self._mine))


class _Supervisor:
    """Children, one after another, until the work of the shard is done."""

    def __init__(
        self, run: Run, log: SampleLog, events: list[Event], reporter: Reporter,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._run = run
        self._log = log
        self._events = events
        self._reporter = reporter
        self._note = note
        self._tally = _Tally(run.planned, events)
        self._idle_crashes = 0
        self._careful = False

    @property
    def _measured(self) -> bool:
        return any(event["event"] == "sample" for event in self._events)

    def supervise(self) -> str:
        run, announced = self._run, False
        while not self._tally.complete:
            if self._tally.spent >= run.budget:
                return "budget"
            if not announced:
                announced = True
                left = run.budget - self._tally.spent
                self._note(f"Measuring {len(run.planned)} cases for at most {left:.0f} s …")
            child = self._start()
            try:
                end = self._listen(child)
            finally:
                child.connection.close()
                child.process.kill()
                child.process.join()
            if end is not None:
                return end
        return "done"

    def _start(self) -> _Child:
        run = self._run
        order = Order(
            run.bench, run.arguments, run.planned, histories(self._events), run.worker,
            run.budget, self._tally.spent, self._careful,
        )  # fmt: skip
        context = get_context("spawn")  # a fork would share CUDA's and OpenMP's state
        ours, theirs = context.Pipe()
        process = context.Process(
            target=work, args=(theirs, order), name="rooftile-worker", daemon=True
        )
        process.start()
        theirs.close()
        return _Child(process, ours)

    def _listen(self, child: _Child) -> str | None:
        """Follow one child to its end. None: it died, and another should go on."""
        while True:
            if not child.connection.poll(child.patience):
                child.process.kill()
                self._crashed(child, f"it hung for {child.patience:.0f} s")
                return None
            try:
                kind, *content = child.connection.recv()
            except (EOFError, ConnectionResetError):
                child.process.join()
                self._crashed(child, _how_it_died(child.process.exitcode))
                return None
            match kind:
                case "visit":
                    child.case, expected = content
                    child.since = time.monotonic()
                    child.patience = max(self._run.least_patience, _PATIENCE * expected)
                case "event":
                    child.samples += content[0]["event"] == "sample"
                    self._record(content[0])
                case "end":
                    return str(content[0])
                case "poisoned":
                    self._crashed(child, str(content[0]))
                    return None
                case _:
                    what = (
                        "The measuring process stopped"
                        if self._measured
                        else "Nothing could be measured"
                    )
                    raise UserError(f"{what}: {content[0]}", exit_code=1)

    def _record(self, event: Event) -> None:
        self._log.append(event)
        self._events.append(event)
        self._tally.add(event)
        self._tally.report(self._reporter, self._run.budget)

    def _crashed(self, child: _Child, how: str) -> None:
        """Charge the case in flight; its second crash is its outcome.

        Where several cases were in flight at once, the next child takes them one by one.
        """
        self._idle_crashes = 0 if child.samples else self._idle_crashes + 1
        if not child.case:
            self._careful = True
            if self._idle_crashes >= _IDLE_CRASHES:
                raise UserError(
                    f"The measuring process ended {_IDLE_CRASHES} times before its first case "
                    f"({how}); `python -m sweeps doctor` may tell why.",
                    exit_code=1,
                )
            return
        where = {"case": child.case, "worker": self._run.worker}
        cost = round(time.monotonic() - child.since, 6)
        self._record({"event": "crash", **where, "cost": cost, "message": how})
        crashes = histories(self._events)[child.case].crashes
        self._note(f"the measuring process ended while visiting a case: {how}.")
        if crashes >= _CRASHES:
            message = f"the process ended {crashes} times while visiting it: {how}."
            self._record({"event": "outcome", **where, "cost": 0.0, "status": "error",
                          "message": message, "at": time.time()})  # fmt: skip


def _how_it_died(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM (a batch system, at a job's end) and SIGHUP (a closed terminal) are Ctrl-C too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _TERMINATING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
