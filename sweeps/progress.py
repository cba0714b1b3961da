"""How a run shows its progress: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_PLAIN_SECONDS = 10.0


class Reporter(Protocol):
    """Receives a run's progress."""

    def update(self, spent: float, budget: float, open_: int, done: int, total: int) -> None:
        """Seconds measured, cases that have samples, cases that are finished, all cases."""
        ...


def _progress_text(spent: float, budget: float, open_: int, done: int, total: int) -> str:
    return f"{open_} of {total} cases measured, {done} finished"


class LiveReporter:
    """A bar of the budget with its ETA on a terminal; a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last = time.monotonic()

    def __enter__(self) -> LiveReporter:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[eta]}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=1.0, eta="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._bar is not None:
            self._bar.stop()

    def update(self, spent: float, budget: float, open_: int, done: int, total: int) -> None:
        """Redraw, or print a line if it is time for one."""
        text = _progress_text(spent, budget, open_, done, total)
        eta = f"at most {max(0.0, budget - spent):.0f} s left"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, completed=spent / budget, eta=eta)
        elif time.monotonic() - self._last >= _PLAIN_SECONDS:
            self._last = time.monotonic()
            print(f"  {text}, {eta}", file=sys.stderr, flush=True)
