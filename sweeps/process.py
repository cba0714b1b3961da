"""Handle signals and the exit of the parent process, and find a process's state and descendants."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_TERMINATING = (signal.SIGTERM, signal.SIGHUP)


def die_with_parent() -> None:
    """Make Linux kill this process when its parent ends, even if this process hangs.

    On other systems, do nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_stopped(pid: int | None) -> bool:
    """Return True if a process is stopped, for example by SIGSTOP or Ctrl-Z.

    Return False if ``pid`` is None or the process has ended, and on systems without /proc.
    """
    if pid is None:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The list has no fields if the process ends while the file is read.
    return fields_after_name(stat)[:1] == ["T"]


def fields_after_name(stat: str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` that follow the name: state, parent, …"""
    # The name is in parentheses, and may itself contain parentheses. The last one ends it.
    return stat.rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, or an empty list on systems without /proc."""
    # 1. Collect the children of every process.
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # the process has ended meanwhile
            stat = path.read_text(encoding="utf-8", errors="replace")
            parent = int(fields_after_name(stat)[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    # 2. Follow the children from the given process.
    descendant_ids: list[int] = []
    unvisited = [pid]
    while unvisited:
        child_ids = children.get(unvisited.pop(), [])
        descendant_ids += child_ids
        unvisited += child_ids
    return descendant_ids


@contextmanager
def _handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Let ``handler`` handle signals during the block, except those that are ignored."""
    old_handlers = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, old_handler in old_handlers.items():
            signal.signal(number, old_handler)


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM (end of a batch job) and SIGHUP (closed terminal) like Ctrl-C during the block.

    A signal that is ignored, such as SIGHUP under nohup, stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling(_TERMINATING, interrupt):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP until a short block, such as a file write, has ended.

    Raises:
        KeyboardInterrupt: after the block, if one of these signals arrived.
    """
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)

    try:
        with _handling((*_TERMINATING, signal.SIGINT), remember):
            yield
    finally:
        if received:
            raise KeyboardInterrupt
