"""Who may begin what, so that each GPU is timed alone first, and then all of them together.

A worker waits at a gate before each phase of its anchors and before it measures. Gates know nothing
of processes: they are told who arrives and who leaves, and answer who may go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sweeps.running.run import MEASURE
from sweeps.schema import ALONE, PHASES, TOGETHER

_ORDER = (*PHASES, MEASURE)


class Gates:
    """The gates of one node."""

    def __init__(self, workers: Iterable[int], take_turns: Callable[[], bool]) -> None:
        """
        Args:
            workers: numbers of those that are expected.
            take_turns: asked once, when all have timed their anchors: whether they slow one
                another down, so that only one at a time may measure.
        """
        # The last gate that each has come to: none yet.
        self._at = dict.fromkeys(workers, -1)
        self._waiting: set[int] = set()
        self._take_turns = take_turns
        self._turns: bool | None = None  # None: nobody has begun to measure

    def arrive(self, worker: int, gate: str) -> list[int]:
        """A worker waits at a gate, perhaps one that was not expected; returns who may go on."""
        self._at[worker] = _ORDER.index(gate)
        self._waiting.add(worker)
        return self._let_go()

    def leave(self, worker: int) -> list[int]:
        """A worker has ended, however that was; returns who may go on."""
        self._at.pop(worker, None)
        self._waiting.discard(worker)
        return self._let_go()

    def _let_go(self) -> list[int]:
        going = self._first_alone() or self._all_at(TOGETHER) or self._to_measure()
        self._waiting.difference_update(going)
        return going

    def _waiting_at(self, gate: str) -> list[int]:
        return sorted(w for w in self._waiting if self._at[w] == _ORDER.index(gate))

    def _busy_with(self, phase: str) -> bool:
        """Whether somebody has passed a gate and has not come to the next one."""
        at = _ORDER.index(phase)
        return any(w not in self._waiting and where == at for w, where in self._at.items())

    def _first_alone(self) -> list[int]:
        """One at a time, once all have prepared what they will time."""
        if -1 in self._at.values() or self._busy_with(ALONE):
            return []
        return self._waiting_at(ALONE)[:1]

    def _all_at(self, gate: str) -> list[int]:
        """All that wait at a gate, once nobody is before it."""
        at = _ORDER.index(gate)
        before = any(
            where < at or (where == at and w not in self._waiting) for w, where in self._at.items()
        )
        return [] if before else self._waiting_at(gate)

    def _to_measure(self) -> list[int]:
        if self._turns is None:
            ready = self._all_at(MEASURE)
            if not ready:
                return []
            self._turns = self._take_turns()
        if not self._turns:
            return self._waiting_at(MEASURE)
        return [] if self._busy_with(MEASURE) else self._waiting_at(MEASURE)[:1]
