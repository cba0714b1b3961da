"""How the processes of a run end: children with their parent, parents in good order."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_TERMINATING = (signal.SIGTERM, signal.SIGHUP)


def die_with_parent() -> None:
    """On Linux: do not outlive a parent that was killed, least of all inside a hanging kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_stopped(pid: int | None) -> bool:
    """On Linux: whether a process is stopped (SIGSTOP, Ctrl-Z) and not only slow."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return (
        stat.rpartition(")")[2].split()[0] == "T"
    )  # the name before it may contain spaces and parentheses


def descendants(pid: int) -> list[int]:
    """On Linux: the processes that a process has started, and those that they have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            stat = path.read_text(encoding="utf-8", errors="replace")
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(
                int(path.parent.name)
            )
    found: list[int] = []
    due = [pid]
    while due:
        started = children.get(due.pop(), [])
        found += started
        due += started
    return found


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM (a batch system, at a job's end) and SIGHUP (a closed terminal) are Ctrl-C too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _TERMINATING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Finish something short, such as writing a file, before a signal ends the process.

    Raises:
        KeyboardInterrupt: afterwards, if a signal came meanwhile.
    """
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda which, frame: came.append(which))
        for number in (*_TERMINATING, signal.SIGINT)
        if signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            raise KeyboardInterrupt
