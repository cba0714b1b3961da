"""What a run measures on: cases go in, subjects to be timed come out.

It may be a GPU, a CPU, or a fake of a test. Free of torch, which only the real one needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sweeps.cases.case import Case
from sweeps.folding.history import History
from sweeps.store import Event
from sweeps.timing.sampler import Sampler, Subject

TORCH_BENCH = f"{__package__}.torch_bench:TorchBench"
"""Module and class of the real one, which the child process imports."""


@dataclass(frozen=True)
class Ready:
    """A case that can be timed; ``facts`` are the columns that its preparation found."""

    case: Case
    subject: Subject
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """A case that cannot be timed, and why, as a sentence."""

    case: Case
    status: str
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class PoisonedError(Exception):
    """The device's context is broken: every later call in this process would fail."""


class Bench(Protocol):
    """A device with its arena, clock and sensors, as the loop sees it."""

    sampler: Sampler
    gpu: int | None
    careful: Collection[str]
    """Ids of cases to be handled one by one, because a process died handling them together."""

    def prepare(
        self, cases: Sequence[Case], known: Mapping[str, History], on_start: OnStart
    ) -> Iterator[Ready | Refusal]:
        """Check and warm up cases; ``on_start`` is called before whatever may crash the process."""
        ...

    def name(
        self, cases: Sequence[Case], on_start: OnStart
    ) -> Iterator[tuple[Case, Mapping[str, Any]]]:
        """The columns that name each case's kernels, in any order.

        A case whose records were lost is left out: another process may get them. One whose kernels
        cannot be named has an empty ``kernel``.
        """
        ...

    def failure(self, error: Exception) -> tuple[str, str]:
        """Status and message of a case's error, once the device has recovered from it.

        Raises:
            PoisonedError: it did not recover.
        """
        ...

    def canary(self) -> Subject | None:
        """The subject that measures drift."""
        ...

    def ceilings(self) -> tuple[Mapping[str, float], float] | None:
        """The device's peaks (FLOP/s by dtype) and bandwidth (bytes/s) as measured now; None where
        a datasheet has them.
        """
        ...


OnStart = Callable[[Sequence[str], float], None]
"""Called with the ids of the cases that are about to run (none where the work belongs to no case)
and the seconds that this should take."""


def make_event(bench: Bench, worker: str, event: str, case: str, cost: float, **more: Any) -> Event:
    """An event of a case: what happened, when, where and at what cost in seconds."""
    where = {} if bench.gpu is None else {"gpu": bench.gpu}
    return {
        "event": event,
        "case": case,
        **more,
        "cost": round(cost, 6),
        "at": time.time(),
        "worker": worker,
        **where,
    }
