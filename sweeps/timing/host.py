"""Who else used the host while it was measured: other processes, and other virtual machines.

On Linux, from ``/proc/stat``: of the time of all cores, the share that the hypervisor gave to
others (``steal``), and the share that was used by processes other than ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class HostUse:
    """Seconds of a span, and the shares of all cores' time in it that others had."""

    seconds: float
    steal: float
    others: float


class HostWatch:
    """What happened on the host since the last look."""

    def __init__(
        self,
        own: Callable[[], Iterable[int]],
        proc: Path = _PROC,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``own`` are the processes (with their reaped children) that are not others."""
        self._own = own
        self._proc = proc
        self._now = now
        self._last = self._read()

    def since(self) -> float:
        """Seconds since the last look."""
        return self._now() - self._last[0]

    def look(self) -> HostUse | None:
        """The host's use since the last look; None where the system does not tell, or if a process
        that was asked about has ended meanwhile.
        """
        before, self._last = self._last, self._read()
        seconds = self._last[0] - before[0]
        if before[1] is None or self._last[1] is None or self._last[2].keys() < before[2].keys():
            return None
        used, stolen, everything = (b - a for a, b in zip(before[1], self._last[1], strict=True))
        if everything <= 0:
            return None
        # The ticks of one that has ended are now among those of the process that reaped it.
        own = sum(self._last[2].values()) - sum(before[2].values())
        return HostUse(seconds, stolen / everything, max(0, used - own) / everything)

    def _read(self) -> tuple[float, tuple[int, int, int] | None, dict[int, int]]:
        """The moment, ticks of all cores (used, stolen, all), and those of our own processes."""
        own = {pid: self._ticks_of(pid) for pid in self._own()}
        known = {pid: ticks for pid, ticks in own.items() if ticks is not None}
        return self._now(), self._all_ticks(), known

    def _all_ticks(self) -> tuple[int, int, int] | None:
        try:
            first = (self._proc / "stat").read_text(encoding="ascii").splitlines()[0]
            user, nice, system, idle, iowait, irq, softirq, steal = map(int, first.split()[1:9])
        except (OSError, ValueError, IndexError):
            return None
        used = user + nice + system
        return used, steal, used + idle + iowait + irq + softirq + steal

    def _ticks_of(self, pid: int) -> int | None:
        """Of a process and its reaped children, user and system; None if it is gone."""
        try:
            stat = (self._proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The name before the last parenthesis may contain spaces.
        return sum(map(int, stat.rpartition(")")[2].split()[11:15]))
