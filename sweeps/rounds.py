"""The loop of a run: prepare some cases, visit all that are open in shuffled order, and again.

It knows a bench (which turns cases into subjects), a sampler and a budget, and tells what happens
as events. Whether the bench is a GPU or a fake of a test makes no difference here.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sweeps.case import Case
from sweeps.fold import History
from sweeps.plan import Planned
from sweeps.sampler import Sampler, Subject
from sweeps.statistics import CHECKPOINTS, finished
from sweeps.store import Event

CHUNK = 64
"""Cases prepared between two rounds: few enough that the first results come early."""
_CANARY_SECONDS = 2.0
_LEAST_SAMPLES = CHECKPOINTS[0]
_LONGEST_SHARE = 0.05
"""The plan leaves out what should take over 2 % of the budget; past this, it was mistaken."""


@dataclass(frozen=True)
class Ready:
    """A case that can be timed; ``facts`` are the columns that its preparation found."""

    case: Case
    subject: Subject
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A case that cannot be timed, and why, as a sentence."""

    case: Case
    status: str
    message: str


class PoisonedError(Exception):
    """The device's context is broken: every later call in this process would fail."""


class Bench(Protocol):
    """A device with its arena, clock and sensors, as the loop sees it."""

    sampler: Sampler
    gpu: int | None
    careful: bool
    """Do nothing for several cases at once: a process died doing that, nobody knows of which."""

    def prepare(
        self, cases: Sequence[Case], known: Mapping[str, History], visit: Visit
    ) -> Iterator[Ready | Refused]:
        """Check and warm up cases; ``visit`` is called before each that may take the process."""
        ...

    def failure(self, error: Exception) -> tuple[str, str]:
        """Status and sentence of what a case threw, once the device has recovered from it.

        Raises:
            PoisonedError: it did not recover.
        """
        ...

    def canary(self) -> Subject | None:
        """The subject that measures drift."""
        ...


Visit = Callable[[str, float], None]
"""Told the id of the case that is about to run, and the seconds that this should take."""


class Rounds:
    """One process's part of a run."""

    def __init__(
        self,
        planned: Sequence[Planned],
        known: Mapping[str, History],
        bench: Bench,
        worker: str,
        budget: float,
        spent: float,
        tell: Callable[[Event], None],
        visit: Visit,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            planned: the cases in the plan's order.
            known: what earlier processes found out; finished cases are not visited again.
            bench: where they run.
            worker: the shard's name, for the events.
            budget: seconds of measuring, over all resumes.
            spent: seconds of them that are gone.
            tell: is given every event.
            visit: is told before every visit of a case.
            seed: of the shuffles, for tests.
        """
        self._waiting = deque(e for e in planned if not _closed(known.get(e.case.id)))
        self._known = known
        self._bench = bench
        self._sampler = bench.sampler
        self._worker = worker
        self._left = budget - spent
        self._longest = _LONGEST_SHARE * budget
        self._tell = tell
        self._visit = visit
        self._random = random.Random(seed)
        self._open: list[Subject] = []
        self._failed: set[str] = set()
        self._canary: Subject | None = None
        self._canary_due = 0.0

    def run(self) -> str:
        """Go on until every case is finished (``done``) or the budget is spent (``budget``)."""
        while self._left > 0:
            if self._admit():
                self._sampler.wake()
            if not self._open:
                return "budget" if self._waiting else "done"
            self._random.shuffle(self._open)
            for subject in self._open:
                if self._left <= 0:
                    return "budget"
                self._watch_drift()
                self._take(subject)
            self._open = [s for s in self._open if not (s.finished or s.key in self._failed)]
        return "budget"

    def _admit(self) -> int:
        """Prepare the next cases whose six samples fit what is left; says how many."""
        promised = sum(max(0, _LEAST_SAMPLES - len(s.samples)) * s.cost for s in self._open)
        chosen: list[Case] = []
        skipped: deque[Planned] = deque()
        while self._waiting and len(chosen) < CHUNK:
            entry = self._waiting.popleft()
            if promised + entry.expected > self._left:
                skipped.append(entry)  # a cheaper one further on may still fit
                continue
            promised += entry.expected
            chosen.append(entry.case)
        self._waiting.extendleft(reversed(skipped))
        begin = self._sampler.now()
        for result in self._bench.prepare(chosen, self._known, self._visit):
            cost = self._sampler.now() - begin
            self._left -= cost
            begin = self._sampler.now()
            if isinstance(result, Refused):
                self._report("outcome", result.case.id, cost, status=result.status,
                             message=result.message)  # fmt: skip
                continue
            self._report("facts", result.case.id, cost, facts=dict(result.facts))
            if _LEAST_SAMPLES * result.subject.cost > self._longest:
                self._report("too-long", result.case.id, 0.0)
            else:
                self._open.append(result.subject)
        return len(chosen)

    def _take(self, subject: Subject) -> None:
        self._visit(subject.key, subject.cost)
        try:
            sample = self._sampler.sample(subject)
        except Exception as error:
            status, message = self._bench.failure(error)
            self._failed.add(subject.key)
            self._report("outcome", subject.key, 0.0, status=status, message=message)
            return
        self._left -= sample.cost
        reading = sample.reading
        sensors = {
            "sm_mhz": reading.sm_mhz, "power_w": reading.power_w, "temp_c": reading.temp_c,
            "throttled": list(reading.throttled),
        }  # fmt: skip
        self._report("sample", sample.key, sample.cost, s=sample.seconds, n=sample.launches,
                     **({} if sample.hidden else {"hidden": False}),
                     **{name: value for name, value in sensors.items() if value})  # fmt: skip

    def _watch_drift(self) -> None:
        if self._sampler.now() < self._canary_due:
            return
        if self._canary is None:
            self._canary = self._bench.canary()
        if self._canary is not None:
            self._take(self._canary)
        self._canary_due = self._sampler.now() + _CANARY_SECONDS

    def _report(self, event: str, case: str, cost: float, **more: Any) -> None:
        where = {} if self._bench.gpu is None else {"gpu": self._bench.gpu}
        self._tell(
            {"event": event, "case": case, **more, "cost": round(cost, 6), "at": time.time(),
             "worker": self._worker, **where}
        )  # fmt: skip


def _closed(history: History | None) -> bool:
    """Whether nothing is left to do for a case."""
    if history is None:
        return False
    return history.outcome is not None or history.too_long or finished(history.seconds)
