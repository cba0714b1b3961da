"""Detect when Ctrl-Z, SIGSTOP, a cgroup freezer or suspension of the VM has stopped this process.

A batch during which the process was stopped says nothing about the device, and the lost time must
not be charged to the budget. The signal SIGCONT reports most stops when the process resumes. Other
stops are detected by a background thread that beats at regular intervals. A long gap between two
beats counts as a stop if the whole process used almost no CPU time during the gap.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

_INTERVAL = 0.05  # seconds between two beats
_GAP = 0.5  # seconds without a beat; a busy machine by itself does not cause such a gap
_WORKING = 0.1  # CPU time, as a share of a gap, from which the process was not stopped


class Pulse:
    """Pulse that never reports a stop."""

    def stops(self) -> int:
        """Return the number of times that the process has been stopped."""
        return 0

    def lost(self) -> float:
        """Return the total length, in seconds, of the stops that show as gaps between beats."""
        return 0.0


class BeatingPulse(Pulse):
    """Pulse that detects stops of this process after :meth:`start` has been called."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        """Create a pulse; ``cpu`` returns the CPU time of all threads in seconds."""
        self._now = now
        self._cpu = cpu
        self._lock = threading.Lock()
        self._last_beat = (now(), cpu())  # host time and CPU time, both in seconds
        self._continued = 0  # number of SIGCONT signals
        self._gaps = 0  # number of gaps that count as stops
        self._lost = 0.0  # seconds of these gaps together

    def start(self) -> None:
        """Listen for SIGCONT, and beat on a separate thread."""
        signal.signal(signal.SIGCONT, self._count_continue)
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def stops(self) -> int:
        """Return the number of stops so far.

        A stop that shows both as SIGCONT and as a gap is counted twice.
        """
        self.beat()  # the background thread may not have run since the process resumed
        return self._continued + self._gaps

    def lost(self) -> float:
        """Return the total length, in seconds, of the gaps that count as stops."""
        self.beat()
        return self._lost

    def beat(self) -> None:
        """Beat, and count a stop after a long gap with almost no CPU time."""
        with self._lock:
            # The lock keeps two threads that beat at once from counting a gap twice.
            last_time, last_cpu = self._last_beat
            this_time = self._now()
            this_cpu = self._cpu()
            self._last_beat = (this_time, this_cpu)
            gap = this_time - last_time
            if gap > _GAP and this_cpu - last_cpu < _WORKING * gap:
                self._gaps += 1
                self._lost += gap

    def _count_continue(self, number: int, frame: FrameType | None) -> None:
        # The lock is not acquired. The handler runs on the main thread, which may already hold it.
        self._continued += 1

    def _run(self) -> None:
        while True:
            time.sleep(_INTERVAL)
            self.beat()


@functools.cache
def pulse_of_this_process() -> BeatingPulse:
    """Return the pulse of this process, which the first call starts.

    The first call must be on the main thread, because it installs a signal handler.
    """
    pulse = BeatingPulse()
    pulse.start()
    return pulse
