"""Gates at which a node's workers wait before they time the anchors and before they measure.

Anchors are a few cases that every GPU times. They are timed in two phases, on one GPU at a time and
then on all GPUs at once. Each phase has a gate of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sweeps.running.run import MEASURE
from sweeps.schema import ALONE, PHASES, TOGETHER

_ORDER = (*PHASES, MEASURE)  # gates in the order in which a worker comes to them


class Gates:
    """Gates at which the workers of one node wait for one another.

    The caller reports each worker that arrives or leaves, and learns which workers may proceed.
    """

    def __init__(self, workers: Iterable[int], take_turns: Callable[[], bool]) -> None:
        """Prepare gates for the expected workers.

        ``take_turns`` is called when all workers have come to the gate ``MEASURE``. It returns True
        if only one worker at a time may measure.
        """
        # Position in _ORDER of the last gate that each worker has come to; -1 for none.
        self._last_gate = dict.fromkeys(workers, -1)
        self._waiting: set[int] = set()
        self._take_turns = take_turns
        # Result of take_turns(); None as long as no worker may measure.
        self._turns: bool | None = None

    def arrive(self, worker: int, gate: str) -> list[int]:
        """Register that a worker has come to a gate, even if the worker was not expected.

        Return the workers that may proceed now.
        """
        self._last_gate[worker] = _ORDER.index(gate)
        self._waiting.add(worker)
        return self._let_go()

    def leave(self, worker: int) -> list[int]:
        """Forget a worker that has ended, and return the workers that may proceed now."""
        self._last_gate.pop(worker, None)
        self._waiting.discard(worker)
        return self._let_go()

    def _let_go(self) -> list[int]:
        """Return the workers that may proceed now, and mark them as no longer waiting."""
        proceeding = self._next_alone()
        if not proceeding:
            proceeding = self._all_at(TOGETHER)
        if not proceeding:
            proceeding = self._to_measure()
        self._waiting.difference_update(proceeding)
        return proceeding

    def _waiting_at(self, gate: str) -> list[int]:
        """Return the workers that wait at a gate."""
        position = _ORDER.index(gate)
        return sorted(worker for worker in self._waiting if self._last_gate[worker] == position)

    def _busy_with(self, gate: str) -> bool:
        """Return True if a worker has passed a gate and has not come to the next one."""
        position = _ORDER.index(gate)
        return any(
            last == position and worker not in self._waiting
            for worker, last in self._last_gate.items()
        )

    def _next_alone(self) -> list[int]:
        """Return the next worker that may time its anchors alone, as a list of at most one.

        No worker may begin while another one is still preparing or is timing its anchors alone,
        because the activity of the other worker would disturb the times.
        """
        someone_prepares = -1 in self._last_gate.values()
        if someone_prepares or self._busy_with(ALONE):
            return []
        return self._waiting_at(ALONE)[:1]

    def _all_at(self, gate: str) -> list[int]:
        """Return all workers that wait at a gate, or an empty list if they may not pass it yet."""
        position = _ORDER.index(gate)
        someone_is_before = any(last < position for last in self._last_gate.values())
        if someone_is_before or self._busy_with(gate):
            return []
        return self._waiting_at(gate)

    def _to_measure(self) -> list[int]:
        """Return the workers that may begin to measure, at most one if they take turns."""
        if self._turns is None:
            if not self._all_at(MEASURE):
                return []
            self._turns = self._take_turns()
        ready = self._waiting_at(MEASURE)
        if not self._turns:
            return ready
        if self._busy_with(MEASURE):
            return []
        return ready[:1]
