"""Claims on the files of a run, which also hold among nodes that share a file system.

Some network file systems refuse the operating system's locks (flock, lockf), and on others only one
node sees them. A claim is a file that only one process can create (O_EXCL). Its owner renews it
while it lives, and any process that finds it not renewed for a minute may take it over. On one
machine, the claim of a process that is gone is taken over at once.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels.common.errors import UserError

try:
    from filelock import SoftFileLease, Timeout
except ImportError:  # before filelock 3.30
    from sweeps.plain_lease import PlainLease as SoftFileLease  # type: ignore[assignment]
    from sweeps.plain_lease import Timeout  # type: ignore[assignment]

SUFFIX = ".claim"
_LEASE_SECONDS = 60.0  # a claim that was not renewed for this long may be taken over
_POLL_SECONDS = 0.2  # each poll looks at the file, which on a shared file system is a request
_LONGEST_WAIT = 900.0  # planning measures a CPU's ceilings, and folding reads every sample


class Claim:
    """A file that this process has claimed until :meth:`release`."""

    def __init__(self, path: Path, refusal: str, wait: bool = False) -> None:
        """Claim a file.

        Args:
            path: the file to claim. The claim lies next to it, with :data:`SUFFIX`.
            refusal: the message of the error.
            wait: True to wait until another process releases the file. If False, a claim by a
                process on this node is refused at once. A claim from another node is refused only
                after 90 s, because that process may have ended without releasing the file.

        Raises:
            UserError: if another process has claimed the file, or nothing can be written there.
        """
        self._lease = SoftFileLease(
            path.with_name(path.name + SUFFIX), lease_duration=_LEASE_SECONDS, mode=0o644
        )
        patience = _LONGEST_WAIT if wait else 0.0
        if self._acquired(patience):
            return
        if wait or not self._is_held_elsewhere():
            raise UserError(refusal, exit_code=1)
        # Nobody here can see whether that process lives. If it is gone, its claim runs out.
        if not self._acquired(1.5 * _LEASE_SECONDS):
            raise UserError(refusal, exit_code=1)

    def _is_held_elsewhere(self) -> bool:
        """Return True if a process on another node has the claim."""
        owner = self._lease.owner
        return owner is not None and owner.hostname != socket.gethostname()

    def _acquired(self, seconds: float) -> bool:
        """Try to acquire the claim for some seconds, and return whether that worked.

        Raises:
            UserError: if the claim cannot be written.
        """
        try:
            self._lease.acquire(timeout=seconds, poll_interval=_POLL_SECONDS)
        except Timeout:
            return False
        except OSError as error:
            raise UserError(
                f"{self._lease.lock_file} could not be written ({error.strerror}); free some "
                "space there, or choose another --results.",
                exit_code=1,
            ) from None
        return True

    @property
    def lost(self) -> bool:
        """True if another process took the claim over while this one was stopped for too long."""
        return self._lease.compromise is not None

    def release(self) -> None:
        """Let other processes claim the file."""
        self._lease.release()


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Let one process at a time into the block; others wait until it has finished.

    Raises:
        UserError: if another process does not finish within 15 minutes.
    """
    claim = Claim(
        path,
        f"{path}{SUFFIX} says that another process is using it. If none is, remove that file and "
        "run again.",
        wait=True,
    )
    try:
        yield
    finally:
        claim.release()
