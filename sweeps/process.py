"""End the processes of a run in an orderly way, children together with their parent."""

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
    """Make Linux kill this process when its parent is killed, even if it hangs inside a kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_stopped(pid: int | None) -> bool:
    """Return True if a process is stopped (SIGSTOP, Ctrl-Z); always False except on Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The state follows the process's name, which may contain spaces and parentheses.
    return stat.rpartition(")")[2].split()[0] == "T"


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started.

    The list is empty on systems other than Linux.
    """
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # the process has ended meanwhile
            stat = path.read_text(encoding="utf-8", errors="replace")
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(
                int(path.parent.name)
            )
    pids: list[int] = []
    due = [pid]
    while due:
        started = children.get(due.pop(), [])
        pids += started
        due += started
    return pids


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM (a batch system, at a job's end) and SIGHUP (a closed terminal) as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old_handlers = {number: signal.signal(number, interrupt) for number in _TERMINATING}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals until a short block, such as one that writes a file, has finished.

    Raises:
        KeyboardInterrupt: after the block, if a signal came during it.
    """
    received: list[int] = []
    old_handlers = {
        number: signal.signal(number, lambda which, frame: received.append(which))
        for number in (*_TERMINATING, signal.SIGINT)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP
    }
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        if received:
            raise KeyboardInterrupt
