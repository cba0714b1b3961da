"""Histories of cases: the samples, facts and outcome that a run's events contain."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sweeps.store import Event
from sweeps.timing.sampler import MAX_EXPOSED
from sweeps.timing.statistics import finished, median

CANARY = "canary"

SENSORS = ("sm_mhz", "power_w", "temp_c")
"""Columns with the readings of a device's sensors.

If a sensor was not read, the sensor's column is None or is missing from the sample."""

BLOCKS = 5
"""Number of blocks of samples that each process takes when it re-times a pair of cases, A and B.

A block has four samples, in the order A, B, B, A. The number of blocks is fixed in advance, because
stopping as soon as a gain looks certain would overstate the gain."""
PROCESSES = 2
"""Number of processes that re-time a pair.

All samples of one process share an error that only the samples of another process can reveal."""


@dataclass
class History:
    """Everything that a run's events say about one case."""

    samples: dict[int | None, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """Samples without visible gaps between launches, by GPU. Only these samples are used for the
    case's time."""
    exposed: list[Event] = field(default_factory=list)
    """Samples in which gaps between launches may show."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Columns that the ``facts`` events report, such as the kernel's name."""
    outcome: Event | None = None
    """Event with the reason why the case was refused or failed; None if neither has happened."""
    too_long: bool = False
    """True if six samples would take more time than one case may take."""
    crashes: int = 0
    """Number of processes that crashed while they ran this case and no other."""
    last_crash: str = ""
    """Description of how the process ended in the last crash, such as ``killed by SIGSEGV``."""
    sound: dict[int | None, int] = field(default_factory=dict)
    """Number of samples that checks have confirmed, by GPU."""
    verified: dict[int | None, int] = field(default_factory=dict)
    """Number of samples at the latest ``right`` event, by GPU.

    The event records a correct result on inputs that the process had not used before."""
    repeats: list[Event] = field(default_factory=list)
    """Samples from another process, which show how well medians repeat."""

    @property
    def every_sample(self) -> Iterator[Event]:
        """All :attr:`samples`, from every GPU."""
        return itertools.chain.from_iterable(self.samples.values())

    @property
    def best(self) -> list[Event]:
        """Samples from the GPU with the most samples. Samples from two GPUs are never pooled."""
        return max(self.samples.values(), key=len, default=[])

    @property
    def trusted(self) -> list[Event]:
        """Samples of :attr:`best` that checks have confirmed."""
        best = self.best
        if not best:
            return []
        sound_count = self.sound.get(best[0].get("gpu"), 0)
        return best[:sound_count]

    @property
    def only_exposed(self) -> bool:
        """True if the case has samples, and gaps between launches may show in all of them."""
        return bool(self.exposed) and not self.best

    @property
    def closed(self) -> bool:
        """True if nothing is left to be timed or checked."""
        if self.outcome is not None or self.too_long or len(self.exposed) >= MAX_EXPOSED:
            return True
        best = self.best
        if not best:
            return False
        # A crash may come between the last sample and the check after it. The case must then still
        # be checked.
        is_checked = self.verified.get(best[0].get("gpu")) == len(best)
        return is_checked and finished([sample["s"] for sample in best])

    @property
    def rank(self) -> tuple[bool, bool, int, bool, int]:
        """Key that ranks several workers' histories of a case; the highest-ranked history is used.

        A wrong result ranks highest, because a time from another worker must not hide the error.
        """
        failed = self.outcome is not None
        wrong = self.outcome is not None and self.outcome["status"] == "wrong"
        has_time = not failed and bool(self.trusted)
        sample_count = len(self.best) + len(self.exposed)
        return wrong, has_time, len(self.trusted), failed, sample_count

    @property
    def unnamed(self) -> bool:
        """True if the case has :attr:`samples`, has not failed, and has no recorded kernel name.

        An empty name counts as recorded: naming has failed, and is not tried again.
        """
        return bool(self.best) and self.outcome is None and "kernel" not in self.facts

    def add(self, event: Event) -> None:
        """Add an event of the case.

        After a ``moved`` event, the case starts over on another GPU.
        """
        match event["event"]:
            # ``hidden`` is False if gaps between launches may show, and missing otherwise.
            case "sample" if event.get("hidden", True):
                self.samples[event.get("gpu")].append(event)
                # Only a sample whose results were checked has ``checking``, the check's seconds. A
                # wrong result would have become an outcome instead of a sample.
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
                # Every attribute gets its initial value, in this object, which others refer to.
                vars(self).update(vars(History()))
            case "crash":
                self.crashes += 1
                self.last_crash = str(event.get("message", ""))

    def _mark_sound(self, event: Event) -> None:
        self.sound[event.get("gpu")] = len(self.samples[event.get("gpu")])


def histories(events: Iterable[Event]) -> dict[str, History]:
    """Return the history of each case, by case id. Events without a case form the history ``""``.

    If several workers have timed a case, as in a merged recording, only the history with the
    highest :attr:`History.rank` is returned.
    """
    by_case: dict[str, dict[str, History]] = defaultdict(lambda: defaultdict(History))
    for event in events:
        by_case[event["case"]][event["worker"]].add(event)
    return {
        case: max(by_worker.values(), key=lambda history: history.rank)
        for case, by_worker in by_case.items()
    }


def spent_seconds(events: Iterable[Event]) -> float:
    """Return the measuring time that these events took, in seconds."""
    return sum(event.get("cost", 0.0) for event in events)


def checking_seconds(events: Iterable[Event]) -> float:
    """Return the part of :func:`spent_seconds` that was spent on checking results."""
    return sum(event.get("checking", 0.0) for event in events)


def timed(events: Iterable[Event]) -> Iterator[Event]:
    """Return the samples whose times are used: those in which no gaps between launches show."""
    return (event for event in events if event["event"] == "sample" and event.get("hidden", True))


def sensor_medians(samples: Sequence[Event]) -> dict[str, float | None]:
    """Return each sensor's median reading in these samples; None if the sensor was never read."""
    medians: dict[str, float | None] = {}
    for name in SENSORS:
        readings = [sample[name] for sample in samples if sample.get(name) is not None]
        medians[name] = median(readings) if readings else None
    return medians


SamplePlace = tuple[str, int | None]
"""A worker and the number of the GPU on which it measured; the number is None on a CPU.

Samples from different places must not be mixed."""


def place_of(event: Event) -> SamplePlace:
    """Return the worker and the GPU of an event."""
    return event["worker"], event.get("gpu")


def utc(moment: float) -> str:
    """Format ``moment``, in seconds since 1970, as UTC text like that in measurements.csv."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
