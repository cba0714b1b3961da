"""What a run records of others on its machine: on the host, and on the GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict

from sweeps.process import descendants
from sweeps.store import Event
from sweeps.timing.host import HostWatch
from sweeps.timing.telemetry import other_processes_on

_LOOK_SECONDS = 10.0


class Watch:
    """Looks at the host while a child measures, and at the GPU while none does."""

    def __init__(
        self,
        record: Callable[[Event], None],
        worker: str,
        gpu: int | None,
        parent: int | None = None,
    ) -> None:
        """``record`` is called with an event for every look; ``worker`` is the shard's name.

        ``parent`` has started this process and others that measure, which are no strangers.
        """
        self._record = record
        self._worker = worker
        self._gpu = gpu
        self._parent = parent
        self._host: HostWatch | None = None

    def look_at_gpu(self) -> None:
        """Record who else uses the GPU. While a process of ours does, it looks like another's."""
        others = other_processes_on(self._gpu)
        if others:
            self._tell(seconds=0.0, gpu_processes=others)

    def begin(self, child: int | None) -> None:
        """From now on, look at what others than this process and its child use of the host."""
        own = [os.getpid(), *([] if child is None else [child])]
        parent = self._parent
        self._host = HostWatch(lambda: own if parent is None else [parent, *descendants(parent)])

    def look_now_and_then(self) -> None:
        """Record the host's use if the last look is long enough ago."""
        if self._host is not None and self._host.since() >= _LOOK_SECONDS:
            self.look()

    def look(self) -> None:
        """Record the host's use since the last look; the child must still be there."""
        use = self._host.look() if self._host is not None else None
        if use is not None:
            self._tell(**asdict(use))

    def _tell(self, **seen: float) -> None:
        self._record(
            {
                "event": "host",
                "case": "",
                "worker": self._worker,
                "cost": 0.0,
                "at": time.time(),
                **seen,
            }
        )
