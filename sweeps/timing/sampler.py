"""The sampler: takes callables and a clock, and knows nothing of kernels, files or devices.

A *subject* is something to time. A *sample* is one timed batch of its launches. The sampler
decides how many launches a batch has, what precedes it (a cache flush, a settling time), and
whether it must be taken again because the hardware slowed itself down.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from sweeps.timing.clock import Clock, LaunchCall, Timing
from sweeps.timing.pulse import Pulse
from sweeps.timing.statistics import CHECKPOINTS, finished
from sweeps.timing.telemetry import RETRY, Reading, Telemetry

PROTOCOL = 1
"""Version of the way of measuring. Rows of different versions never mix."""

SUSTAINED_SETTLE = 0.3
SUSTAINED_BATCH = 0.06
_THROTTLE_RETRIES = 3
_STOP_RETRIES = 3
MAX_EXPOSED = CHECKPOINTS[0]
"""Samples with launch gaps in them after which a case is given up: they never enter a median."""

CHECKED_EVERY = 6
"""One sample in so many is checked, the first one of a case among them: it costs about as much as a
sample does. The median of six samples has one that was."""


class Checker(Protocol):
    """Knows whether what was launched computed what it should."""

    def poison(self) -> None:
        """Make every result wrong, in the device's own order of things."""
        ...

    def batch(self, indices: Sequence[int], last: object) -> None:
        """Check the results of a batch on the sets of ``indices``; ``last`` is what its last launch
        returned. Raises if one is wrong.
        """
        ...

    def after(self) -> None:
        """Check once more when all samples are taken. Raises if a result is wrong."""
        ...


@dataclass
class Subject:
    """Something to time.

    ``launch(i)`` launches once on operand set i of ``sets``; ``settings()`` is entered around a
    batch. ``paced`` says that the gaps between launches belong to the time: nothing hides them.
    ``samples`` are seconds per launch, those of earlier processes included. ``warm()`` brings back
    into the flushed cache what a launch should find there; cold, that is nothing. ``checker``
    checks some of its batches.
    """

    key: str
    launch: LaunchCall
    sets: int = 1
    mode: str = "burst"
    cache: str = "cold"
    settings: Callable[[], AbstractContextManager[object]] = nullcontext
    paced: bool = False
    samples: list[float] = field(default_factory=list)
    exposed: int = 0  # samples that were not taken over: gaps between their launches may show
    launches: int = 0  # of a batch; set by Sampler.fit
    cost: float = 0.0  # seconds that one sample takes, everything included
    warm: Callable[[], object] = lambda: None
    checker: Checker | None = None
    checking: float = 0.0  # seconds that checking one launch takes, about

    @property
    def finished(self) -> bool:
        """Whether the stopping rule is content, or too many samples were no good."""
        return finished(self.samples) or self.exposed >= MAX_EXPOSED


@dataclass(frozen=True)
class Sample:
    """One timed batch: seconds per launch, how many, and what the sensors said.

    ``cost`` are the seconds that all of it took, ``checking`` those of them that went into its
    results, if they were ``checked``.
    """

    key: str
    seconds: float
    launches: int
    cost: float
    reading: Reading
    hidden: bool
    checked: bool
    checking: float


class Sampler:
    """Times subjects, one sample at a time."""

    def __init__(
        self,
        clock: Clock,
        flush: Callable[[], None] = lambda: None,
        telemetry: Telemetry | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """``flush`` evicts the last-level cache, in the device's own order of things."""
        self._clock = clock
        self._flush = flush
        self._telemetry = telemetry or Telemetry()
        self._pulse = pulse or Pulse()
        self._stays_slow = False
        self._flush_seconds: float | None = None

    def estimate(self, launch: LaunchCall, warmed_up: bool = False) -> float:
        """Seconds of one launch, roughly, from warm launches on set 0.

        Doubles the batch until it is long enough for the clock to be believed to a few percent.

        Args:
            launch: launches once.
            warmed_up: it has been launched before, so that even a first time is a true one.
        """
        clock = self._clock
        if not warmed_up:
            clock.time(launch, [0])
        seconds, count = math.inf, 1
        while True:
            batch = functools.partial(clock.time, launch, [0] * count)
            seconds = min(seconds, self._whole(batch).seconds / count)
            if seconds * count >= clock.batch_seconds / 4 or count >= clock.most_launches:
                return seconds
            # Never more launches than a full batch should have, however fast the first one was.
            wanted = clock.batch_seconds / 4 / max(seconds, 1e-9)
            count = min(max(2 * count, math.ceil(wanted)), 16 * count, clock.most_launches)

    def launches(self, mode: str, seconds: float) -> int:
        """Launches of a batch, from the estimated seconds of one, if there are sets enough."""
        batch = SUSTAINED_BATCH if mode == "sustained" else self._clock.batch_seconds
        return max(1, min(math.ceil(batch / max(seconds, 1e-9)), self._clock.most_launches))

    def fit(self, subject: Subject, seconds: float) -> None:
        """Decide the launches of a batch from the estimated seconds of one launch.

        A cold burst never uses a set twice: its second use would find the data in the cache, also
        where the sets share an operand that is to be found there.
        Sustained work rotates its sets, of which there must be enough to leave the cache behind.
        """
        sustained = subject.mode == "sustained"
        subject.launches = self.launches(subject.mode, seconds)
        subject.cost = sustained * SUSTAINED_SETTLE
        if subject.cache != "warm" and not sustained:
            subject.launches = min(subject.launches, subject.sets)
            subject.cost = self._flush_cost()
        subject.cost += subject.launches * seconds

    def _flush_cost(self) -> float:
        """Seconds of a flush: on a CPU, several times a short batch's own."""
        if self._flush_seconds is None:
            begin = self.now()
            self._flush()
            self._flush_seconds = self.now() - begin
        return self._flush_seconds

    def sample(self, subject: Subject) -> Sample:
        """Take one sample and append it to the subject's, if it hid the gaps between its launches.

        A sample during which the hardware slowed itself down is taken again after a pause, three
        times at most; then it stands, and its reasons with it. A machine that stays slow is not
        waited for again until it was seen at its full speed.

        Raises:
            Exception: whatever a launch throws, or the subject's checker, if a result is wrong.
        """
        clock = self._clock
        taken = len(subject.samples) + subject.exposed
        checked = taken % CHECKED_EVERY == 0
        indices = self._indices(subject, taken)
        checker = subject.checker if checked else None
        begin = self.now()
        for attempt in range(_THROTTLE_RETRIES + 1):
            if attempt:
                self._telemetry.forget()
            start = clock.now()
            timing = self._batch(subject, indices, checker)
            reading = self._telemetry.between(start, clock.now())
            throttled = not RETRY.isdisjoint(reading.throttled)
            if not throttled or self._stays_slow:
                break
        self._stays_slow = throttled
        seconds = timing.seconds / subject.launches
        subject.cost = self.now() - begin
        if checker is not None:
            checker.batch(indices, timing.last)
        cost = self.now() - begin
        if timing.hidden:
            subject.samples.append(seconds)
        else:
            subject.exposed += 1
        return Sample(
            subject.key, seconds, subject.launches, cost, reading, timing.hidden, checked,
            cost - subject.cost,
        )  # fmt: skip

    def wake(self) -> None:
        """After a pause: bring the device back to the clocks of work."""
        self._clock.wake()

    def now(self) -> float:
        """The clock's host time without what the process was stopped for, in seconds."""
        return self._clock.now() - self._pulse.lost()

    def _indices(self, subject: Subject, taken: int) -> Sequence[int]:
        """The sets of a batch, in order.

        Each begins with another, so that also batches of one launch use them all. So does each
        batch that is checked: of two sets, every sixth batch would begin with the same.
        """
        if subject.cache == "warm" and subject.mode != "sustained":
            return [0] * subject.launches
        first = taken // CHECKED_EVERY + taken % CHECKED_EVERY
        return [(first + i) % subject.sets for i in range(subject.launches)]

    def _batch(self, subject: Subject, indices: Sequence[int], checker: Checker | None) -> Timing:
        sustained = subject.mode == "sustained"
        before = functools.partial(self._set_out, subject, checker)
        batch = functools.partial(
            self._clock.time, subject.launch, indices, before=before,
            settle=SUSTAINED_SETTLE if sustained else 0.0,
            paced=subject.paced and not sustained,
        )  # fmt: skip
        with subject.settings():
            return self._whole(batch)

    def _whole(self, take: Callable[[], Timing]) -> Timing:
        """A batch that was not stopped halfway: taken again where the process was.

        Where that happens time after time, as under a limit on CPU time that works by stopping, the
        batch shows gaps.
        """
        for _ in range(_STOP_RETRIES + 1):
            stops = self._pulse.stops()
            timing = take()
            if self._pulse.stops() == stops:
                return timing
        return replace(timing, hidden=False)

    def _set_out(self, subject: Subject, checker: Checker | None) -> None:
        """What a batch begins with: results that are wrong, and the cache as it should be."""
        if subject.mode != "sustained" and subject.cache == "warm":
            subject.launch(0)
        if checker is not None:
            checker.poison()
        if subject.mode != "sustained" and subject.cache != "warm":
            self._flush()
            subject.warm()
