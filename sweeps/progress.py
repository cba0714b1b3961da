"""Show the progress of a run: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

_PLAIN_SECONDS = 10.0


class Reporter(Protocol):
    """Receiver of a run's progress."""

    def begin(self, phase: str, seconds: float | None, after: float = 0.0) -> None:
        """Begin a phase.

        Args:
            phase: what is done, such as ``Measuring``.
            seconds: how long it should take at most; None if nobody knows.
            after: seconds that later phases should take.
        """
        ...

    def update(self, done: int, total: int, left: float | None = None) -> None:
        """Report how many of the phase's cases are done, and how many seconds it may still take."""
        ...


class LiveReporter:
    """Bar with the phase, its cases and the time left. Elsewhere, a line every ten seconds.

    The time left is that of the whole call. It also counts down between two updates, and ends at 0.
    """

    def __init__(self, unit: str = "cases") -> None:
        """``unit`` names what is counted, in the plural."""
        self._unit = unit
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _TimeLeft(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._last = time.monotonic()

    def __enter__(self) -> LiveReporter:
        self.begin("Preparing", None)
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, phase: str, seconds: float | None, after: float = 0.0) -> None:
        """Show a phase in place of the one before it."""
        self._phase, self._after = phase, after
        self._until = math.inf if seconds is None else time.monotonic() + seconds + after
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(phase, total=None, until=self._until)

    def update(self, done: int, total: int, left: float | None = None) -> None:
        """Redraw, or print a line if it is time for one."""
        now = time.monotonic()
        if left is not None:
            self._until = now + left + self._after
        for task in self._bar.task_ids:
            self._bar.update(task, completed=done, total=total, until=self._until)
        if not self._console.is_terminal and now - self._last >= _PLAIN_SECONDS:
            self._last = now
            words = [
                f"  {self._phase}: {done} of {total} {self._unit}",
                seconds_left(self._until - now),
            ]
            print(", ".join(filter(None, words)), file=sys.stderr, flush=True)


def seconds_left(seconds: float) -> str:
    """Return the time left in words; empty if nobody knows it."""
    if seconds == math.inf:
        return ""
    return f"at most {max(0.0, seconds):.0f} s left"


class _TimeLeft(ProgressColumn):
    """Column that counts the time down to the moment at which everything should be over."""

    def render(self, task: Task) -> Text:
        return Text(seconds_left(task.fields["until"] - time.monotonic()))
