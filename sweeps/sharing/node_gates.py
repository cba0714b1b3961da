"""Gates of a node's workers: each GPU times its anchors with the others idle, then all at once.

A worker waits at a gate before each phase of its anchors and before it measures. Gates know nothing
of processes: they are told who arrives and who leaves, and answer who may proceed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sweeps.running.run import MEASURE
from sweeps.schema import ALONE, PHASES, TOGETHER

_ORDER = (*PHASES, MEASURE)


class Gates:
    """The gates of one node."""

    def __init__(self, workers: Iterable[int], take_turns: Callable[[], bool]) -> None:
        """Expect workers; nobody has come to a gate yet.

        Args:
            workers: the numbers of the workers that are expected.
            take_turns: called once, when all have timed their anchors. It returns True if the
                workers slow one another down, so that only one at a time may measure.
        """
        # The last gate that each worker has come to; -1 for none.
        self._at = dict.fromkeys(workers, -1)
        self._waiting: set[int] = set()
        self._take_turns = take_turns
        self._turns: bool | None = None  # None: nobody has begun to measure

    def arrive(self, worker: int, gate: str) -> list[int]:
        """Let a worker wait at a gate, even if it was not expected. Return who may proceed."""
        self._at[worker] = _ORDER.index(gate)
        self._waiting.add(worker)
        return self._let_go()

    def leave(self, worker: int) -> list[int]:
        """Forget a worker that has ended, however it did. Return who may proceed."""
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
        """Return True if a worker has passed a gate and has not come to the next one."""
        number = _ORDER.index(phase)
        return any(w not in self._waiting and where == number for w, where in self._at.items())

    def _first_alone(self) -> list[int]:
        """Return the next worker that may time its anchors with the others idle.

        They do so one at a time, once all have prepared their anchors.
        """
        if -1 in self._at.values() or self._busy_with(ALONE):
            return []
        return self._waiting_at(ALONE)[:1]

    def _all_at(self, gate: str) -> list[int]:
        """Return all workers that wait at a gate, once no worker has yet to reach it."""
        number = _ORDER.index(gate)
        is_missing = any(
            where < number or (where == number and w not in self._waiting)
            for w, where in self._at.items()
        )
        return [] if is_missing else self._waiting_at(gate)

    def _to_measure(self) -> list[int]:
        """Return the workers that may begin to measure: all, or one if they take turns."""
        if self._turns is None:
            ready = self._all_at(MEASURE)
            if not ready:
                return []
            self._turns = self._take_turns()
        if not self._turns:
            return self._waiting_at(MEASURE)
        return [] if self._busy_with(MEASURE) else self._waiting_at(MEASURE)[:1]
