"""Lock a run's files with claims, which also work across nodes that share a file system.

Some network file systems reject the operating system's locks (flock, lockf). On other network file
systems, a lock is visible only on the node that took the lock. A claim is therefore a file that
only one process can create (O_EXCL). That process, the owner, renews the claim regularly until the
owner releases the claim or exits. If a claim has not been renewed for a minute, any process may
take the claim over. If the owner has exited, another process on the same node may take the claim
over at once.

With versions of filelock before 3.30, the simpler claims of :mod:`sweeps.plain_lease` are used.
These claims are not renewed, and a process on another node never takes them over.
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
_POLL_SECONDS = 0.2  # not shorter, because each poll reads the file, perhaps over the network
# Claims are held for a long time: planning measures a CPU's ceilings, and folding reads all
# samples.
_LONGEST_WAIT = 900.0  # seconds


class Claim:
    """Claim of this process on a file, held until :meth:`release`."""

    def __init__(self, path: Path, refusal: str, wait: bool = False) -> None:
        """Claim a file.

        Args:
            path: the file to claim. The claim itself is a second file in the same folder, with
                :data:`SUFFIX` added to the name.
            refusal: error message if another process has claimed the file.
            wait: True to wait up to 15 minutes for the other process to release the file. If False,
                wait only for a process on another node, for up to 90 s.

        Raises:
            UserError: if another process still claims the file, or the claim cannot be written.
        """
        self._lease = SoftFileLease(
            path.with_name(path.name + SUFFIX), lease_duration=_LEASE_SECONDS, mode=0o644
        )
        if self._try_to_acquire(_LONGEST_WAIT if wait else 0.0):
            return
        if wait or not self._is_held_elsewhere():
            raise UserError(refusal, exit_code=1)
        # This node cannot see whether a process on another node still runs. If that process has
        # ended, its claim expires after _LEASE_SECONDS. This process waits half as long again, so
        # that it does not give up just before the claim expires.
        if not self._try_to_acquire(1.5 * _LEASE_SECONDS):
            raise UserError(refusal, exit_code=1)

    def _is_held_elsewhere(self) -> bool:
        owner = self._lease.owner
        return owner is not None and owner.hostname != socket.gethostname()

    def _try_to_acquire(self, seconds: float) -> bool:
        """Try for up to ``seconds`` to acquire the claim, and return True on success."""
        try:
            self._lease.acquire(timeout=seconds, poll_interval=_POLL_SECONDS)
        except Timeout:
            return False
        except OSError as error:
            raise UserError(
                f"{self._lease.lock_file} could not be written ({error.strerror or error}). Make "
                "sure that its folder is writable and has free space, or choose another folder "
                "with --results.",
                exit_code=1,
            ) from None
        return True

    @property
    def lost(self) -> bool:
        """True if the claim was taken over or removed, or could not be renewed."""
        return self._lease.compromise is not None

    def release(self) -> None:
        """Let other processes claim the file."""
        self._lease.release()


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Wait until no other process claims a file, then hold a claim on it in the ``with`` block.

    Raises:
        UserError: if another process does not release the file within 15 minutes, or the claim
            cannot be written.
    """
    claim = Claim(
        path,
        f"{path}{SUFFIX} shows that another process is using {path}. Run the same command again "
        f"when that process has ended. If there is no such process, remove {path}{SUFFIX} first.",
        wait=True,
    )
    try:
        yield
    finally:
        claim.release()
