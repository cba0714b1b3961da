"""Claims on files for a filelock before 3.30, as on a GPU node without a package index.

They work like :class:`filelock.SoftFileLease` for processes of one machine: the claim of a process
that is gone is taken over. A claim of another machine is never taken over.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path


class Timeout(Exception):  # noqa: N818 - filelock's name
    """Another process kept its claim."""


@dataclass(frozen=True)
class ClaimOwner:
    """Process and machine that have claimed a file."""

    pid: int
    hostname: str


class PlainLease:
    """A file that only one process can create, with its owner's process and machine in it."""

    compromise = None
    """Always None, because nobody takes a claim over from a process that lives."""

    def __init__(self, lock_file: str | os.PathLike[str], lease_duration: float, mode: int) -> None:
        """Prepare a claim. ``lease_duration`` is ignored, because nothing is renewed here."""
        self.lock_file = str(lock_file)
        self._mode = mode
        self._held = False

    @property
    def owner(self) -> ClaimOwner | None:
        """Owner of the claim; None if there is none, or if it is being written right now."""
        try:
            pid, hostname = Path(self.lock_file).read_text(encoding="utf-8").split()
            return ClaimOwner(int(pid), hostname)
        except (OSError, ValueError):
            return None

    def acquire(self, timeout: float, poll_interval: float) -> None:
        """Claim the file, waiting at most ``timeout`` seconds.

        Raises:
            Timeout: if another process keeps it.
            OSError: if nothing can be written there.
        """
        until = time.monotonic() + timeout
        while not (self._created() or self._taken_over()):
            if time.monotonic() >= until:
                raise Timeout(self.lock_file)
            time.sleep(poll_interval)
        self._held = True

    def release(self) -> None:
        """Let other processes claim the file."""
        if self._held:
            self._held = False
            Path(self.lock_file).unlink(missing_ok=True)

    def _created(self) -> bool:
        """Create the file; return False if it exists already."""
        try:
            number = os.open(self.lock_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, self._mode)
        except FileExistsError:
            return False
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(_this_process())
        return True

    def _taken_over(self) -> bool:
        """Take the claim over if its owner is gone, and return whether it was.

        Several processes may find the owner gone. The lock lets one after another look again. A
        file system that refuses locks leaves the claim where it is.
        """
        owner = self.owner
        if owner is None or owner.hostname != socket.gethostname() or not _is_gone(owner.pid):
            return False
        try:
            with open(self.lock_file, "r+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if self.owner != owner:
                    return False
                file.truncate()
                file.write(_this_process())
        except OSError:
            return False
        return True


def _this_process() -> str:
    """Return what a claim of this process has in its file."""
    return f"{os.getpid()}\n{socket.gethostname()}\n"


def _is_gone(pid: int) -> bool:
    """Return True if there is no process with this id on this machine."""
    try:
        os.kill(pid, 0)  # sends no signal, and only checks the process
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        return False
    return False
