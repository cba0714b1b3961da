"""What a run's events say of each case: its samples, facts and outcome."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sweeps.store import Event
from sweeps.timing.sampler import MAX_EXPOSED
from sweeps.timing.statistics import finished

CANARY = "canary"

BLOCKS = 5
"""Blocks of samples, A B B A, of a pair of cases in each process that re-times it. Their number
is fixed beforehand: stopping once a gain looks certain would make it look larger than it is."""
PROCESSES = 2
"""Processes that re-time a pair: what the samples of one share shows by how far they differ."""


@dataclass
class History:
    """Everything that is known of one case."""

    samples: dict[int | None, list[Event]] = field(default_factory=lambda: defaultdict(list))
    exposed: list[Event] = field(default_factory=list)
    """Samples in which gaps between launches may show; they enter no time."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    outcome: Event | None = None
    too_long: bool = False
    crashes: int = 0
    last_crash: str = ""
    sound: dict[int | None, int] = field(default_factory=dict)
    """By GPU: how many of its samples were taken before its latest right result."""
    verified: dict[int | None, int] = field(default_factory=dict)
    """Likewise, before its latest right result on inputs that no launch had seen."""

    repeats: list[Event] = field(default_factory=list)
    """Samples of another process, which tell how well medians repeat; they enter no time."""

    @property
    def every_sample(self) -> Iterator[Event]:
        """The samples of all GPUs."""
        return itertools.chain.from_iterable(self.samples.values())

    @property
    def best(self) -> list[Event]:
        """The samples of the GPU that took the most; samples of two GPUs are never pooled."""
        return max(self.samples.values(), key=len, default=[])

    @property
    def trusted(self) -> list[Event]:
        """Those of :attr:`best` that were followed by a right result of the case."""
        best = self.best
        return best[: self.sound.get(best[0].get("gpu"), 0)] if best else []

    @property
    def only_exposed(self) -> bool:
        """Whether launch gaps show in every sample."""
        return bool(self.exposed) and not self.best

    @property
    def closed(self) -> bool:
        """Whether nothing is left to be timed or checked."""
        if self.outcome is not None or self.too_long or len(self.exposed) >= MAX_EXPOSED:
            return True
        best = self.best
        # A crash may come between the last sample and the check after it, which is then still due.
        checked = bool(best) and self.verified.get(best[0].get("gpu")) == len(best)
        return checked and finished([s["s"] for s in best])

    @property
    def weight(self) -> tuple[bool, bool, int, bool]:
        """Which of two workers' histories of one case counts: the greater.

        A result that was found to be wrong stays wrong; then a time counts before none, and of two
        times the one with more samples.
        """
        failed = self.outcome is not None
        wrong = self.outcome is not None and self.outcome["status"] == "wrong"
        return wrong, not failed and bool(self.trusted), len(self.trusted), failed

    @property
    def unnamed(self) -> bool:
        """Whether it has a time and no attempt was made to name its kernels."""
        return bool(self.samples) and self.outcome is None and "kernel" not in self.facts

    def add(self, event: Event) -> None:
        """Add an event of the case. One that has ``moved`` starts over, on another GPU."""
        match event["event"]:
            case "sample" if event.get("hidden", True):
                self.samples[event.get("gpu")].append(event)
                if "checking" in event:
                    self._mark_sound(event)
            case "sample":
                self.exposed.append(event)
            case "repeat":
                self.repeats.append(event)
            case "right":
                self._mark_sound(event)
                self.verified[event.get("gpu")] = self.sound[event.get("gpu")]
            case "facts":
                self.facts = {**self.facts, **event["facts"]}
            case "outcome":
                self.outcome = event
            case "too-long":
                self.too_long = True
            case "moved":
                vars(self).update(vars(History()))
            case "crash":
                self.crashes += 1
                self.last_crash = str(event.get("message", ""))

    def _mark_sound(self, event: Event) -> None:
        self.sound[event.get("gpu")] = len(self.samples[event.get("gpu")])


def histories(events: Iterable[Event]) -> dict[str, History]:
    """Sort events by case. The canary is a case like any other.

    Of a case that several workers timed, as in a merged recording, the history of one counts
    (:attr:`History.weight`; the first, of equals), and nothing of another's enters it.
    """
    known: dict[str, dict[str, History]] = defaultdict(lambda: defaultdict(History))
    for event in events:
        known[event["case"]][event["worker"]].add(event)
    return {
        case: max(by_worker.values(), key=lambda history: history.weight)
        for case, by_worker in known.items()
    }


def spent_seconds(events: Iterable[Event]) -> float:
    """Measuring time of a run so far, over all its resumes."""
    return sum(event.get("cost", 0.0) for event in events)


def checking_seconds(events: Iterable[Event]) -> float:
    """The part of :func:`spent_seconds` that went into checking results."""
    return sum(event.get("checking", 0.0) for event in events)


def timed(events: Iterable[Event]) -> Iterator[Event]:
    """The samples whose time counts: no launch gaps show in them."""
    return (e for e in events if e["event"] == "sample" and e.get("hidden", True))


SamplePlace = tuple[str, int | None]
"""A worker and the GPU that it measured on: samples of different ones are not of one machine."""


def place_of(event: Event) -> SamplePlace:
    """Where a sample was taken."""
    return event["worker"], event.get("gpu")


def utc(moment: float) -> str:
    """A moment since 1970 as measurements.csv writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
