"""Watch who else uses the host during a measurement: other processes and other virtual machines.

On Linux, ``/proc/stat`` gives two shares of the time of all cores: the share that the hypervisor
gave to other machines (``steal``), and the share that processes other than ours used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class HostUse:
    """Length of a span in seconds, and the shares of all cores' time that others had in it."""

    seconds: float
    steal: float
    others: float


class HostWatch:
    """Watch over the host's use between one look and the next."""

    def __init__(
        self,
        own: Callable[[], Iterable[int]],
        proc: Path = _PROC,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take a first look.

        ``own`` returns the ids of our processes. They and the children that they have reaped do not
        count as others.
        """
        self._own = own
        self._proc = proc
        self._now = now
        self._last = self._read()

    def since(self) -> float:
        """Return the seconds since the last look."""
        return self._now() - self._last[0]

    def look(self) -> HostUse | None:
        """Return the host's use since the last look.

        The result is None if the system does not tell, or if a process of ``own`` has ended
        meanwhile.
        """
        before, self._last = self._last, self._read()
        seconds = self._last[0] - before[0]
        if before[1] is None or self._last[1] is None or self._last[2].keys() < before[2].keys():
            return None
        used_ticks, stolen_ticks, all_ticks = (
            b - a for a, b in zip(before[1], self._last[1], strict=True)
        )
        if all_ticks <= 0:
            return None
        # A process that has ended left its ticks to the process that reaped it.
        own_ticks = sum(self._last[2].values()) - sum(before[2].values())
        return HostUse(
            seconds, stolen_ticks / all_ticks, max(0, used_ticks - own_ticks) / all_ticks
        )

    def _read(self) -> tuple[float, tuple[int, int, int] | None, dict[int, int]]:
        """Return the time, the ticks of all cores (used, stolen, all) and of our processes."""
        own = {pid: self._ticks_of(pid) for pid in self._own()}
        known = {pid: ticks for pid, ticks in own.items() if ticks is not None}
        return self._now(), self._all_ticks(), known

    def _all_ticks(self) -> tuple[int, int, int] | None:
        """Return the used, stolen and total ticks of all cores; None if they cannot be read."""
        try:
            first = (self._proc / "stat").read_text(encoding="ascii").splitlines()[0]
            user, nice, system, idle, iowait, irq, softirq, steal = map(int, first.split()[1:9])
        except (OSError, ValueError, IndexError):
            return None
        used = user + nice + system
        return used, steal, used + idle + iowait + irq + softirq + steal

    def _ticks_of(self, pid: int) -> int | None:
        """Return the ticks of a process and its reaped children, user and system; None if gone."""
        try:
            stat = (self._proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The fields follow the last parenthesis. The name before it may contain spaces.
        return sum(map(int, stat.rpartition(")")[2].split()[11:15]))
