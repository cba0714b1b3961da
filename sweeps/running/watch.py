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
    """Observer of other processes on the machine.

    It observes the host while a child process measures, and the GPU before and after that.
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
            record: called with each event that is observed.
            worker: the shard's name.
            gpu: the GPU's ordinal; None on a CPU.
            parent: id of the process that started this one and its peers; None without peers.
                Neither that process nor its descendants are reported.
        """
        self._record = record
        self._worker = worker
        self._gpu = gpu
        self._parent = parent
        self._host: HostWatch | None = None

    def look_at_gpu(self) -> None:
        """Record how many other processes use the GPU, if any do.

        Call this while no process of this run uses the GPU, because such a process would be counted
        as well.
        """
        others = other_processes_on(self._gpu)
        if others:
            self._tell(seconds=0.0, gpu_processes=others)

    def begin(self, child: int | None) -> None:
        """Begin to watch how much of the host is used by processes outside this run.

        ``child`` is the id of the process that measures; None if it has not started.
        """
        parent = self._parent
        measuring = [os.getpid()] if child is None else [os.getpid(), child]

        def our_processes() -> list[int]:
            # The parent may start further processes, so its descendants are listed at every look.
            return measuring if parent is None else [parent, *descendants(parent)]

        self._host = HostWatch(our_processes)

    def look_now_and_then(self) -> None:
        """Record the use of the host if at least ten seconds have passed since the last look."""
        if self._host is not None and self._host.since() >= _LOOK_SECONDS:
            self.look()

    def look(self) -> None:
        """Record the use of the host since the last look. The child must still be running."""
        use = self._host.look() if self._host is not None else None
        if use is not None:
            self._tell(**asdict(use))

    def _tell(self, **observed: float) -> None:
        """Record an event with the observed values."""
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
