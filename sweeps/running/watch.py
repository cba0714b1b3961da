"""Record how much other processes use the host and the GPU of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict

from sweeps.process import descendants
from sweeps.store import Event
from sweeps.timing.host import HostWatch
from sweeps.timing.telemetry import other_processes_on

_LOOK_SECONDS = 10.0  # seconds between two looks at the host


class Watch:
    """Observer that watches how processes outside a run use the host and one GPU.

    On the host, this process, its peers, their parent and all their descendants belong to the run.
    """

    def __init__(
        self,
        record: Callable[[Event], None],
        worker: str,
        gpu: int | None,
        parent: int | None = None,
    ) -> None:
        """Prepare to observe; nothing is recorded yet.

        Args:
            record: called with each event.
            worker: name of the shard.
            gpu: the GPU's ordinal; None on a CPU.
            parent: id of the process that started this one and its peers; None without peers.
        """
        self._record = record
        self._worker = worker
        self._gpu = gpu
        self._parent = parent
        self._host: HostWatch | None = None

    def look_at_gpu(self) -> None:
        """Record how many other processes use the GPU, if any do.

        Call this only while no child of this process uses the GPU.
        """
        others = other_processes_on(self._gpu)
        if others:
            self._record_use(seconds=0.0, gpu_processes=others)

    def begin(self) -> None:
        """Begin to watch the host."""
        oldest = os.getpid() if self._parent is None else self._parent

        def our_processes() -> list[int]:
            # The processes that measure and compile come and go, so they are listed at every look.
            return [oldest, *descendants(oldest)]

        self._host = HostWatch(our_processes)

    def look_now_and_then(self) -> None:
        """Call :meth:`look` if at least ten seconds have passed since the last look."""
        if self._host is not None and self._host.since() >= _LOOK_SECONDS:
            self.look()

    def look(self) -> None:
        """Record how others have used the host since the last look, if their use is known.

        The others are processes outside the run, and other virtual machines. Call this while the
        measuring process is still running, so that its CPU time is known.
        """
        use = self._host.look() if self._host is not None else None
        if use is not None:
            self._record_use(**asdict(use))

    def _record_use(self, **observed: float) -> None:
        self._record(
            {
                "event": "host",
                "case": "",
                "worker": self._worker,
                "cost": 0.0,
                "at": time.time(),
                **observed,
            }
        )
