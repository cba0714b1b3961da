"""Show the progress of a run: a bar on a terminal, otherwise at most one line every ten seconds."""

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
_MEASURING = "Measuring"  # a phase that samples its cases again and again


class Reporter(Protocol):
    """Interface through which a run reports its progress."""

    def begin(self, phase: str, seconds: float | None, after: float = 0.0) -> None:
        """Begin a phase.

        Args:
            phase: name that the user sees.
            seconds: longest expected duration of the phase; None if it is not known.
            after: expected seconds of all later phases together.
        """
        ...

    def update(self, done: int, total: int, left: float | None = None) -> None:
        """Report how many of the phase's ``total`` cases are done.

        ``left`` is the number of seconds that the phase may still take; None keeps the last
        estimate.
        """
        ...


class LiveReporter:
    """Show a progress bar, or print a line at most every ten seconds if stderr is not a terminal.

    The bar and the line show the phase and its progress. They also show the maximum time left,
    including later phases, unless the time is unknown.
    """

    def __init__(self, unit: str = "cases") -> None:
        """Create the display; ``unit`` is a plural that names what is counted."""
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
        self._printed_at = time.monotonic()  # moment of the last line, or of the start
        self._phase = ""
        self._after = 0.0  # expected seconds of all later phases together
        # Moment at which the call should end, including later phases; infinite if it is not known.
        self._until = math.inf

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
        """Show a phase in place of the previous phase; see :meth:`Reporter.begin`."""
        self._phase = phase
        self._after = after
        self._until = math.inf if seconds is None else time.monotonic() + seconds + after
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(phase, total=None, until=self._until)

    def update(self, done: int, total: int, left: float | None = None) -> None:
        """Show how many cases are done; see :meth:`Reporter.update`."""
        now = time.monotonic()
        if left is not None:
            self._until = now + left + self._after
        for task in self._bar.task_ids:
            self._bar.update(task, completed=done, total=total, until=self._until)
        if not self._console.is_terminal and now - self._printed_at >= _PLAIN_SECONDS:
            self._printed_at = now
            self._print_line(done, total, self._until - now)

    def _print_line(self, done: int, total: int, left: float) -> None:
        repeating = _repeats(self._phase, done, total)
        if not repeating:
            unit = self._unit.removesuffix("s") if total == 1 else self._unit
            state = f"{done:,} of {total:,} {unit}"
        elif total > 1:
            state = f"all {total:,} {self._unit} timed"
        else:
            state = "the case is timed"
        line = f"  {self._phase}: {state}"
        if time_left := _time_left_phrase(left, repeating):
            line += f", {time_left}"
        print(line, file=sys.stderr, flush=True)


def _repeats(phase: str, done: float, total: float | None) -> bool:
    """Return True if the phase is ``Measuring`` and all its cases are counted as done.

    A case is counted as done once it has a sample or has failed. When all cases are done, the count
    stays the same while the run adds samples. The display then says that cases are repeated,
    because otherwise the run would seem to hang.
    """
    return phase == _MEASURING and bool(total) and done == total


def _time_left_phrase(seconds: float, repeating: bool) -> str:
    """Return a phrase with the time left, or "" if it is unknown (``seconds`` is infinite)."""
    if seconds == math.inf:
        return ""
    at_most = f"at most {max(0.0, seconds):,.0f} s"
    return f"repeating for {at_most}" if repeating else f"{at_most} left"


class _TimeLeft(ProgressColumn):
    def render(self, task: Task) -> Text:
        repeating = _repeats(task.description, task.completed, task.total)
        return Text(_time_left_phrase(task.fields["until"] - time.monotonic(), repeating))
