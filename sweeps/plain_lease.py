"""Replacement for :class:`filelock.SoftFileLease`, which filelock before version 3.30 lacks.

A GPU node without access to a package index may have an older version of filelock. If the owner of
a claim has ended, another process on the same machine may take the claim over, provided that the
file system supports locks (flock). A process on another machine never takes the claim over. See
:mod:`sweeps.claim` for what a claim is.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path


class Timeout(Exception):  # noqa: N818 - filelock's name
    """Raised if another process does not release its claim in time."""


@dataclass(frozen=True)
class ClaimOwner:
    """Process that has claimed a file, and the name of the machine that it runs on."""

    pid: int
    hostname: str


class PlainLease:
    """Claim on a file, stored in a second file that only one process can create."""

    compromise = None
    """Reason why the claim was lost; always None, because no claim is lost while its owner runs."""

    def __init__(self, lock_file: str | os.PathLike[str], lease_duration: float, mode: int) -> None:
        """Prepare a claim; ``lease_duration`` is ignored, because these claims are not renewed."""
        self.lock_file = str(lock_file)
        self._mode = mode
        self._held = False

    @property
    def owner(self) -> ClaimOwner | None:
        """Owner of the claim; None if the claim's file cannot be read or names no owner."""
        try:
            pid, hostname = Path(self.lock_file).read_text(encoding="utf-8").split()
            return ClaimOwner(int(pid), hostname)
        except (OSError, ValueError):
            return None

    def acquire(self, timeout: float, poll_interval: float) -> None:
        """Claim the file, trying every ``poll_interval`` seconds for about ``timeout`` seconds.

        Raises:
            Timeout: if the file is still claimed at the last try.
            OSError: if the claim cannot be written.
        """
        deadline = time.monotonic() + timeout
        while not (self._create() or self._take_over()):
            if time.monotonic() >= deadline:
                raise Timeout(self.lock_file)
            time.sleep(poll_interval)
        self._held = True

    def release(self) -> None:
        """Let other processes claim the file."""
        if self._held:
            self._held = False
            Path(self.lock_file).unlink(missing_ok=True)

    def _create(self) -> bool:
        """Create the claim's file and return True, or return False if it exists already."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            descriptor = os.open(self.lock_file, flags, self._mode)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(_claim_text())
        except OSError:
            # An empty file has no owner, so no process could ever take the claim over.
            Path(self.lock_file).unlink(missing_ok=True)
            raise
        return True

    def _take_over(self) -> bool:
        """Take the claim over if its owner has ended; return True if this process now owns it.

        Several processes may notice at once that the owner has ended. A lock on the claim's file
        makes them check again one after the other, so that only the first takes the claim over.
        """
        owner = self.owner
        if owner is None or owner.hostname != socket.gethostname() or not _is_gone(owner.pid):
            return False
        try:
            with open(self.lock_file, "r+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if self.owner != owner:
                    return False
                # The old text is overwritten before its rest is cut off, so that the file is never
                # empty. If the disk became full in between, an empty file would have no owner.
                file.write(_claim_text())
                file.truncate()
        except OSError:
            return False
        return True


def _claim_text() -> str:
    """Return the content of this process's claim: the process id and the name of the machine."""
    return f"{os.getpid()}\n{socket.gethostname()}\n"


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 is not delivered; it only checks that the process exists
    except (ProcessLookupError, OverflowError):  # a damaged id may be too large
        return True
    except PermissionError:  # the process exists and belongs to another user
        return False
    return False
