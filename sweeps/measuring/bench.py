"""Interface of a bench, which turns cases into subjects that can be timed."""

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
"""Module and class of the real bench, which the child process imports."""


@dataclass(frozen=True)
class Ready:
    """A case that can be timed.

    ``facts`` has the columns of measurements.csv that were determined while the case was prepared.
    """

    case: Case
    subject: Subject
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """A case that cannot be timed.

    ``status`` is ``unsupported``, ``wrong``, ``oom`` or ``error``. ``message`` is the reason: a
    sentence, or the text of an error.
    """

    case: Case
    status: str
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class PoisonedError(Exception):
    """Raised when the device's context is broken: this process can no longer use the device."""


class Bench(Protocol):
    """Interface for timing cases on one device, and for naming their kernels."""

    sampler: Sampler
    gpu: int | None
    careful: Collection[str]
    """Ids of cases to prepare one by one, because a process died while it prepared them
    together."""

    def prepare(
        self, cases: Sequence[Case], histories: Mapping[str, History], on_start: OnStart
    ) -> Iterator[Ready | Refusal]:
        """Check and warm up cases; yield :class:`Ready` or :class:`Refusal` for each, in order.

        Raises:
            PoisonedError: if the device does not recover from an error.
        """
        ...

    def kernel_columns(
        self, cases: Sequence[Case], on_start: OnStart
    ) -> Iterator[tuple[Case, Mapping[str, Any]]]:
        """Yield cases with the columns that name their kernels.

        A case may be left out if its launch fails, or if the profiler loses records of the launch.
        The case can then be profiled again in another process. If a case is yielded although its
        kernels are not known, its column ``kernel`` is empty.

        Raises:
            PoisonedError: if the device does not recover from an error.
            Exception: any error from the profiler.
        """
        ...

    def recover_from(self, error: Exception) -> tuple[str, str]:
        """Let the device recover from a case's error, and return the case's status and a message.

        Raises:
            PoisonedError: if the device did not recover.
        """
        ...

    def canary(self) -> Subject | None:
        """Return the canary GEMM, whose times show how the machine's speed drifts.

        Return None if this bench has no canary.

        Raises:
            Exception: if the canary cannot be prepared.
        """
        ...

    def ceilings(self) -> tuple[Mapping[str, float], float] | None:
        """Measure the device's peaks (FLOP/s by dtype) and bandwidth (bytes/s) now.

        Return None for a GPU, whose ceilings are not measured.
        """
        ...


OnStart = Callable[[Sequence[str], float], None]
"""Function to call before any work that may crash, to tell the parent process what will run.

Its arguments are the ids of the cases that may be to blame for a crash, and the seconds that the
work is expected to take."""


def make_event(bench: Bench, worker: str, event: str, case: str, cost: float, **more: Any) -> Event:
    """Return an event of the kind ``event`` with the current time.

    ``case`` is the id of the case, or "" if the event belongs to no case. ``cost`` is the time in
    seconds that counts towards the budget.
    """
    gpu_entry = {} if bench.gpu is None else {"gpu": bench.gpu}
    return {
        "event": event,
        "case": case,
        **more,
        "cost": round(cost, 6),
        "at": time.time(),
        "worker": worker,
        **gpu_entry,
    }
