"""Use a clock to sample how long callables take.

A *sample* is one timed batch of launches. The sampler decides how many launches a batch has, what
precedes the batch (a cache flush, a settling time), and whether the sample must be taken again
because the hardware throttled or the process was stopped. The sampler does not depend on kernels,
files or devices.
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
"""Version of the timing protocol. A run with another version cannot be resumed or merged."""

SUSTAINED_SETTLE = 0.3
"""Seconds of unmeasured launches before a sustained batch."""
SUSTAINED_BATCH = 0.06
"""Length of a sustained batch in seconds."""
_THROTTLE_RETRIES = 3  # largest number of repetitions if the hardware throttles during a batch
_STOP_RETRIES = 3  # largest number of repetitions if the process is stopped during a batch
MAX_EXPOSED = CHECKPOINTS[0]
"""Number of samples with visible launch gaps after which a case is no longer sampled."""

CHECKED_EVERY, LATE = 12, 10
"""Numbers that choose the samples of a case to check: the 1st, the 11th, and then every 12th.

``LATE`` is the index of the 11th sample, counted from 0. A check costs about as much as a sample,
so not every sample is checked. For each checked sample from the 11th on, the inputs of one operand
set are changed, to detect a kernel that returns an old result."""


# A first launch is slower than later ones. If it takes longer than this many batches, later ones
# are assumed to take longer than one batch, too.
_LONG_BATCHES = 4.0


class Checker(Protocol):
    """Checker of the results that launches compute."""

    def poison(self, changed: int | None) -> None:
        """Overwrite every result, in stream order, so that an unwritten result fails the check.

        ``changed`` is the index of an operand set whose inputs are changed until :meth:`release`;
        None to change no inputs.
        """
        ...

    def check_batch(self, indices: Sequence[int], last: object) -> None:
        """Check the results of a batch that was launched after :meth:`poison`.

        If launches allocate their results, only ``last``, the result of the last launch, can be
        checked.

        Raises:
            Exception: if a result is wrong, or if a launch changed an operand.
        """
        ...

    def release(self) -> None:
        """Restore the inputs that :meth:`poison` changed, if any."""
        ...

    def check_after_timing(self) -> None:
        """Launch once more after the last sample, and check the result.

        Raises:
            Exception: if the launch fails, the result is wrong, or a launch changed an operand.
        """
        ...


@dataclass
class Subject:
    """Callable to time, with the conditions for timing it and the samples taken so far.

    Attributes:
        key: unique name of the subject, such as the id of its case.
        launch: ``launch(i)`` launches once on operand set i.
        mode: ``burst``, or ``sustained`` to launch for a while before each batch.
        cache: state of the cache before a launch: ``cold``, ``warm`` or ``weights-cold``.
        settings: function that returns a context manager, in which batches are timed.
        paced: True if the gaps between launches are part of the time and are not hidden.
        samples: seconds per launch of each sample, including the samples of earlier processes.
        exposed: number of rejected samples, in which gaps between launches may show.
        launches: number of launches per batch; set by :meth:`Sampler.set_batch`.
        cost: seconds that one sample takes, with its preparation but without a check.
        warm: function that loads into the flushed cache what a launch should find there.
        renew: ``renew(n)`` prepares memory for the results of a batch of n launches.
        checker: checker of the results of some samples (:data:`CHECKED_EVERY`); None to check none.
        checking: approximate seconds to launch once and check the result.
        checked_late: True if a check with changed inputs (:data:`LATE`) was due in this process.
    """

    key: str
    launch: LaunchCall
    sets: int = 1
    mode: str = "burst"
    cache: str = "cold"
    settings: Callable[[], AbstractContextManager[object]] = nullcontext
    paced: bool = False
    samples: list[float] = field(default_factory=list)
    exposed: int = 0
    launches: int = 0
    cost: float = 0.0
    warm: Callable[[], object] = lambda: None
    renew: Callable[[int], object] = lambda launches: None
    checker: Checker | None = None
    checking: float = 0.0
    checked_late: bool = False

    @property
    def finished(self) -> bool:
        """True if the stopping rule is met, or if too many samples were rejected."""
        return finished(self.samples) or self.exposed >= MAX_EXPOSED


@dataclass(frozen=True)
class Window:
    """One batch of a steady run, in which :meth:`Sampler.hold` times batch after batch.

    The window lasts from the end of the previous batch to the end of this batch. The first window
    begins with the steady run.

    Attributes:
        begin: start of the window, in seconds since the steady run began.
        seconds: time per launch.
        joules: the board's energy counter at the end of the window; None if it is not known.
    """

    begin: float
    seconds: float
    launches: int
    reading: Reading
    joules: float | None


@dataclass(frozen=True)
class Sample:
    """One timed batch of a subject.

    Attributes:
        seconds: time per launch.
        cost: seconds that the whole sample took.
        hidden: False if the time may include a stop of the process, or gaps between launches that
            the clock failed to hide.
        checked: True if the results were due for a check.
        checking: part of ``cost`` that the check took, in seconds.
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
    """Sampler that times subjects, one sample at a time."""

    def __init__(
        self,
        clock: Clock,
        flush: Callable[[], None] = lambda: None,
        telemetry: Telemetry | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """Create a sampler; ``flush`` evicts the last-level cache, in stream order on a GPU."""
        self._clock = clock
        self._flush = flush
        self._telemetry = telemetry or Telemetry()
        self._pulse = pulse or Pulse()
        self._stays_slow = False
        self._flush_seconds: float | None = None

    def estimate(self, launch: LaunchCall, warmed_up: bool = False, first: float = 0.0) -> float:
        """Return the approximate seconds of one launch, from warm launches on set 0.

        If ``warmed_up``, the callable has been launched before, and ``first`` is the duration of
        that launch in seconds, or 0 if it is unknown. If ``first`` is longer than a few batches, it
        is returned as the estimate.
        """
        clock = self._clock
        if first > _LONG_BATCHES * clock.batch_seconds:
            return first
        if not warmed_up:
            clock.time(launch, [0])
        long_enough = clock.batch_seconds / 4  # a clock is accurate to 0.5% over a whole batch
        seconds = math.inf  # the smallest time per launch so far
        count = 1  # launches in the next batch
        while True:
            batch = functools.partial(clock.time, launch, [0] * count)
            seconds = min(seconds, self._time_unstopped(batch).seconds / count)
            if seconds * count >= long_enough or count >= clock.max_launches:
                return seconds
            # The count is at least doubled, so that the loop ends. It grows at most 16-fold,
            # because the batch would be far too long if the first launch was timed as too short.
            needed = long_enough / max(seconds, 1e-9)
            count = min(max(2 * count, math.ceil(needed)), 16 * count, clock.max_launches)

    def launches(self, mode: str, seconds: float) -> int:
        """Return the number of launches that fill a batch, given the ``seconds`` of one launch."""
        batch_seconds = SUSTAINED_BATCH if mode == "sustained" else self._clock.batch_seconds
        # The estimate may be 0 if the clock is too coarse for a launch.
        needed = math.ceil(batch_seconds / max(seconds, 1e-9))
        return max(1, min(needed, self._clock.max_launches))

    def set_batch(self, subject: Subject, seconds: float) -> None:
        """Set a subject's cost and its launches per batch, given the ``seconds`` of one launch.

        A cold burst uses no set twice, because the second use would find the data in the cache. The
        same applies to ``weights-cold``, although there all sets share a first operand that stays
        cached.
        """
        subject.launches = self.launches(subject.mode, seconds)
        preparing_seconds = 0.0
        if subject.mode == "sustained":
            preparing_seconds = SUSTAINED_SETTLE
        elif subject.cache != "warm":
            preparing_seconds = self._flush_cost()
            subject.launches = min(subject.launches, subject.sets)
        subject.cost = preparing_seconds + subject.launches * seconds

    def _flush_cost(self) -> float:
        """Return the host's seconds to flush the cache or, on a GPU, to queue the flush."""
        if self._flush_seconds is None:
            begin = self.now()
            self._flush()
            self._flush_seconds = self.now() - begin
        return self._flush_seconds

    def sample(self, subject: Subject) -> Sample:
        """Take one sample, and append its time to the subject's samples.

        If the sample's ``hidden`` is False, it is only counted in the subject's ``exposed``.

        A batch during which the hardware throttled is timed again after a pause, up to three times.
        If the hardware still throttles, the last batch is kept with the throttle reasons. From then
        on, throttled batches are not timed again, until the hardware does not throttle during a
        batch.

        Raises:
            Exception: if a launch or a check fails.
        """
        # 1. Decide which sets are launched on, and whether the results are checked. Rejected
        # samples count as well, so that the check and the first set rotate with every attempt.
        taken = len(subject.samples) + subject.exposed
        late = taken % CHECKED_EVERY == LATE
        checked = late or taken == 0
        indices = self._set_indices(subject, taken)
        checker = subject.checker if checked else None
        begin = self.now()
        try:
            # 2. Time the batch.
            timing, reading = self._time_unthrottled(subject, indices, checker, late)
            seconds = timing.seconds / subject.launches
            # 3. Check the results. The measuring loop reserves the time for the check separately
            # (Subject.checking).
            cost_without_check = self.now() - begin
            subject.cost = cost_without_check
            if checker is not None:
                checker.check_batch(indices, timing.last)
        finally:
            if checker is not None:
                checker.release()
        # 4. Record the sample.
        subject.checked_late |= late
        cost = self.now() - begin
        if timing.hidden:
            subject.samples.append(seconds)
        else:
            subject.exposed += 1
        return Sample(
            key=subject.key,
            seconds=seconds,
            launches=subject.launches,
            cost=cost,
            reading=reading,
            hidden=timing.hidden,
            checked=checked,
            checking=cost - cost_without_check,
        )

    def hold(self, subject: Subject, seconds: float) -> list[Window]:
        """Time batch after batch until ``seconds`` have passed, and return a window for each batch.

        The device waits for the host between two batches. A batch is not timed again if the
        hardware throttles, because throttling is part of the steady state. After the last batch,
        the subject's checker, if any, launches once more and checks the result.

        Raises:
            Exception: if a launch or the check fails.
        """
        clock = self._clock
        windows: list[Window] = []
        begin = clock.now()
        window_end = begin
        with subject.settings():
            while window_end - begin < seconds:
                # Each batch starts one set further, as in _set_indices.
                indices = [(len(windows) + i) % subject.sets for i in range(subject.launches)]
                subject.renew(subject.launches)
                # The gaps between launches are not hidden. A closed gate would hide them, but the
                # device would be idle while the batch is queued, and would leave its steady state.
                timing = clock.time(subject.launch, indices, paced=True)
                # A window lasts from the end of the window before it to the end of its own batch.
                window_begin = window_end
                window_end = clock.now()
                reading = self._telemetry.between(window_begin, window_end)
                if timing.sm_mhz is not None:
                    reading = replace(reading, sm_mhz=timing.sm_mhz)
                windows.append(
                    Window(
                        begin=window_begin - begin,
                        seconds=timing.seconds / subject.launches,
                        launches=subject.launches,
                        reading=reading,
                        joules=self._telemetry.joules(),
                    )
                )
        if subject.checker is not None:
            subject.checker.check_after_timing()
        return windows

    def wake(self) -> None:
        """Bring the device back to its working clock rates after a pause."""
        self._clock.wake()

    def now(self) -> float:
        """Return the host's time in seconds, minus the time that the process has been stopped."""
        return self._clock.now() - self._pulse.lost()

    def _set_indices(self, subject: Subject, taken: int) -> Sequence[int]:
        """Return the operand set's index for each launch of a batch, in launch order.

        ``taken`` is the number of the subject's earlier samples, including rejected ones. The
        first launch's set changes from batch to batch, so that even batches with a single launch
        use all sets. A warm burst uses only set 0.
        """
        if subject.cache == "warm" and subject.mode != "sustained":
            return [0] * subject.launches
        # Every twelfth batch is checked. Without the first term, all checked batches of a case with
        # two sets would start at the same set.
        first = taken // CHECKED_EVERY + taken % CHECKED_EVERY
        return [(first + i) % subject.sets for i in range(subject.launches)]

    def _time_unthrottled(
        self, subject: Subject, indices: Sequence[int], checker: Checker | None, late: bool
    ) -> tuple[Timing, Reading]:
        """Time one batch, and repeat it if the hardware throttles, as :meth:`sample` describes."""
        clock = self._clock
        for attempt in range(_THROTTLE_RETRIES + 1):
            if attempt:
                self._telemetry.forget()
            start = clock.now()
            timing = self._time_batch(subject, indices, checker, late)
            reading = self._telemetry.between(start, clock.now())
            # A batch is shorter than the time between two readings of NVML, so the cycle counters
            # of the SMs give a better clock rate.
            if timing.sm_mhz is not None:
                reading = replace(reading, sm_mhz=timing.sm_mhz)
            throttled = not RETRY.isdisjoint(reading.throttled)
            if not throttled or self._stays_slow:
                break
        self._stays_slow = throttled
        return timing, reading

    def _time_batch(
        self, subject: Subject, indices: Sequence[int], checker: Checker | None, late: bool
    ) -> Timing:
        """Time one batch, and time it again if the process was stopped during it.

        If ``late``, the checker, if any, first changes the inputs of the last launch's operand set.
        """
        sustained = subject.mode == "sustained"
        changed = indices[-1] if late else None
        before = functools.partial(self._begin_batch, subject, checker, changed)
        batch = functools.partial(
            self._clock.time,
            subject.launch,
            indices,
            before=before,
            settle=SUSTAINED_SETTLE if sustained else 0.0,
            paced=subject.paced,
        )
        with subject.settings():
            return self._time_unstopped(batch)

    def _time_unstopped(self, take: Callable[[], Timing]) -> Timing:
        """Time a batch, and time it again if the process was stopped during it.

        If the process is stopped during every attempt, the batch is treated as one with visible
        launch gaps.
        """
        for _ in range(_STOP_RETRIES + 1):
            stops = self._pulse.stops()
            timing = take()
            if self._pulse.stops() == stops:
                return timing
        return replace(timing, hidden=False)

    def _begin_batch(self, subject: Subject, checker: Checker | None, changed: int | None) -> None:
        """Prepare the results' memory and the cache, right before a batch."""
        # The launch that warms the cache writes a result, so it must come before the poisoning. The
        # flush must come after the poisoning, which leaves the results in the cache.
        is_burst = subject.mode != "sustained"
        if is_burst and subject.cache == "warm":
            subject.launch(0)
        if checker is not None:
            checker.poison(changed)
        subject.renew(subject.launches)
        if is_burst and subject.cache != "warm":
            self._flush()
            subject.warm()
