"""Watch who else uses the host during a measurement: other processes and other virtual machines.

The watch works only on Linux, because it reads counters of CPU time in ``/proc``. In this module,
"our" processes are those that take part in the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sweeps.process import fields_after_name

_PROC = Path("/proc")


@dataclass(frozen=True)
class HostUse:
    """Use of the host by other processes and virtual machines during a span of time.

    Attributes:
        steal: share of all cores' time that the hypervisor gave to other virtual machines, from 0
            to 1.
        others: share of all cores' time that processes other than ours used, from 0 to 1.
    """

    seconds: float
    steal: float
    others: float


class _HostLook(NamedTuple):
    """Counters of CPU time, in ticks, at one moment.

    Attributes:
        core_ticks: used, stolen and total ticks of all cores; None if they cannot be read.
        our_ticks: ticks of each of our live processes, including its reaped children, by process
            id.
    """

    moment: float
    core_ticks: tuple[int, int, int] | None
    our_ticks: dict[int, int]


class HostWatch:
    """Observer that measures how much other processes and virtual machines use the host."""

    def __init__(
        self,
        our_processes: Callable[[], Iterable[int]],
        proc: Path = _PROC,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the first look by reading the counters.

        ``our_processes`` returns the ids of our processes. The CPU time of these processes, and of
        the children that they have reaped, does not count as use by others.
        """
        self._our_processes = our_processes
        self._proc = proc
        self._now = now
        self._last = self._read()

    def since(self) -> float:
        """Return the seconds since the last look."""
        return self._now() - self._last.moment

    def look(self) -> HostUse | None:
        """Return how much other processes and virtual machines used the host since the last look.

        Return None if the use is not known, for example because one of our processes has ended.
        """
        before = self._last
        after = self._read()
        self._last = after
        if before.core_ticks is None or after.core_ticks is None:
            return None
        # ``<`` means a proper subset: a process is missing, and none is new. The ticks of the
        # missing process are lost if none of our processes has reaped it. If there is also a new
        # process, the new process is assumed to replace the missing one. The parent of both then
        # reaped the missing process first, so no ticks are lost.
        if after.our_ticks.keys() < before.our_ticks.keys():
            return None
        used_before, stolen_before, all_before = before.core_ticks
        used_after, stolen_after, all_after = after.core_ticks
        all_ticks = all_after - all_before
        if all_ticks <= 0:
            return None
        # The ticks of a process that has ended were added to those of the process that reaped it.
        our_ticks = sum(after.our_ticks.values()) - sum(before.our_ticks.values())
        others_ticks = max(0, used_after - used_before - our_ticks)
        # On some virtual machines, the counters of stolen and idle ticks may also decrease.
        stolen_ticks = max(0, stolen_after - stolen_before)
        return HostUse(
            seconds=after.moment - before.moment,
            steal=min(1.0, stolen_ticks / all_ticks),
            others=min(1.0, others_ticks / all_ticks),
        )

    def _read(self) -> _HostLook:
        our_ticks: dict[int, int] = {}
        for pid in self._our_processes():
            ticks = self._ticks_of(pid)
            if ticks is not None:
                our_ticks[pid] = ticks
        return _HostLook(self._now(), self._core_ticks(), our_ticks)

    def _core_ticks(self) -> tuple[int, int, int] | None:
        """Return the used, stolen and total ticks of all cores, or None if they cannot be read."""
        try:
            line = (self._proc / "stat").read_text(encoding="ascii").splitlines()[0]
            # The first line has the ticks of all cores, in the order of proc(5). The guest times at
            # its end are already part of ``user`` and ``nice``.
            ticks = [int(field) for field in line.split()[1:9]]
            user, nice, system, idle, iowait, irq, softirq, steal = ticks
        except (OSError, ValueError, IndexError):
            return None
        # Interrupts belong to no process, so their ticks do not count as used.
        used = user + nice + system
        total = used + idle + iowait + irq + softirq + steal
        return used, steal, total

    def _ticks_of(self, pid: int) -> int | None:
        """Return the total user and system ticks of a process and its reaped children.

        Return None if they cannot be read, usually because the process has ended.
        """
        try:
            stat = (self._proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # These four are the process's user and system ticks, and those of its reaped children. They
        # are missing if the process ends while the file is read.
        ticks = fields_after_name(stat)[11:15]
        return sum(map(int, ticks)) if ticks else None
