"""Watch who else uses the host during a measurement: other processes and other virtual machines.

On Linux, ``/proc/stat`` gives two shares of the time of all cores: the share that the hypervisor
gave to other machines (``steal``), and the share that processes other than ours used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


@dataclass(frozen=True)
class HostUse:
    """Length of a span in seconds, and the shares of all cores' time that others had in it."""

    seconds: float
    steal: float
    others: float


class _HostLook(NamedTuple):
    """Findings of one look: its moment in seconds, and the ticks of CPU time up to then."""

    moment: float
    core_ticks: tuple[int, int, int] | None  # of all cores (used, stolen, all); None if unreadable
    own_ticks: dict[int, int]  # of each of our processes that is alive, by its id


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
        return self._now() - self._last.moment

    def look(self) -> HostUse | None:
        """Return the host's use since the last look.

        The result is None if the system does not tell, or if a process of ``own`` has ended
        meanwhile.
        """
        before = self._last
        now = self._last = self._read()
        if before.core_ticks is None or now.core_ticks is None:
            return None
        if now.own_ticks.keys() < before.own_ticks.keys():
            return None
        used_before, stolen_before, all_before = before.core_ticks
        used_now, stolen_now, all_now = now.core_ticks
        all_ticks = all_now - all_before
        if all_ticks <= 0:
            return None
        # A process that has ended left its ticks to the process that reaped it.
        own_ticks = sum(now.own_ticks.values()) - sum(before.own_ticks.values())
        others_ticks = max(0, used_now - used_before - own_ticks)
        return HostUse(
            seconds=now.moment - before.moment,
            steal=(stolen_now - stolen_before) / all_ticks,
            others=others_ticks / all_ticks,
        )

    def _read(self) -> _HostLook:
        """Look at the use of all cores and of our processes now."""
        own_ticks: dict[int, int] = {}
        for pid in self._own():
            ticks = self._ticks_of(pid)
            if ticks is not None:
                own_ticks[pid] = ticks
        return _HostLook(self._now(), self._core_ticks(), own_ticks)

    def _core_ticks(self) -> tuple[int, int, int] | None:
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
        fields = stat.rpartition(")")[2].split()
        # These four are the process's user and system ticks, and those of its reaped children.
        return sum(map(int, fields[11:15]))
