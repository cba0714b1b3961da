"""How the processes of a run end: children with their parent, parents in good order."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1
_TERMINATING = (signal.SIGTERM, signal.SIGHUP)


def die_with_parent() -> None:
    """On Linux: do not outlive a parent that was killed, least of all inside a hanging kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
    """Finish something short, such as writing a file, before a signal ends the process."""
    numbers = (*_TERMINATING, signal.SIGINT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
