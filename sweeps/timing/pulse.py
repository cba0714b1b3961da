"""Whether this process has been running: Ctrl-Z, SIGSTOP, a freezer or a suspended machine stop it.

A batch that was stopped halfway says nothing about the device, and nobody used the time. SIGCONT
tells of most stops; of the others a gap in the beats of a thread, in which the process used next to
no CPU time either (one that only waited, or was kept from its thread, used some).
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

_INTERVAL = 0.05  # seconds between two beats
_GAP = 0.5  # seconds without a beat that a busy machine does not explain
_WORKING = 0.1  # of such a gap, spent on the CPU: then it was the thread that had to wait


class Pulse:
    """Of a process that is never stopped, as in a test that makes up its time."""

    def stops(self) -> int:
        """How often the process has been stopped."""
        return 0

    def lost(self) -> float:
        """Seconds that it was stopped for, in all; those of stops too short to be seen left out."""
        return 0.0


class BeatingPulse(Pulse):
    """Of this process, from now on."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        """``now`` and ``cpu`` are clocks, in seconds: of the host, and of all threads together."""
        self._now, self._cpu = now, cpu
        self._lock = threading.Lock()
        self._beat = now(), cpu()
        self._continued = self._gaps = 0
        self._lost = 0.0

    def start(self) -> None:
        """Listen to SIGCONT, and beat on a thread of its own."""
        signal.signal(signal.SIGCONT, self._go_on)
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def stops(self) -> int:
        """How often the process has been stopped; one stop may count twice."""
        self.beat()
        return self._continued + self._gaps

    def lost(self) -> float:
        """Seconds that it was stopped for, in all."""
        self.beat()
        return self._lost

    def beat(self) -> None:
        """See what has gone by since the last beat."""
        with self._lock:
            (last, used), self._beat = self._beat, (self._now(), self._cpu())
            gap = self._beat[0] - last
            if gap > _GAP and self._beat[1] - used < _WORKING * gap:
                self._gaps += 1
                self._lost += gap

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        self._continued += 1

    def _run(self) -> None:
        while True:
            time.sleep(_INTERVAL)
            self.beat()


@functools.cache
def pulse_of_this_process() -> BeatingPulse:
    """The one that beats here; first asked for on the main thread."""
    pulse = BeatingPulse()
    pulse.start()
    return pulse
