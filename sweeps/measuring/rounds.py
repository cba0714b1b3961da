"""Measuring loop of a run: sample each new case once, then all unfinished cases in rounds."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sweeps.cases.case import Case
from sweeps.folding.history import CANARY, History
from sweeps.measuring.bench import Bench, OnStart, Ready, Refusal, make_event
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from sweeps.timing.sampler import Subject
from sweeps.timing.statistics import CHECKPOINTS

_T = TypeVar("_T")

CHUNK = 64
"""Largest number of cases prepared between two rounds. It is small, so that results come early."""
FIRST_CHUNK = 8
"""Largest number of cases that a process prepares before its first round.

It is smaller than :data:`CHUNK`, so that the first cases get samples before the time is up even if
preparing is slow."""
_CANARY_SECONDS = 2.0  # time between two samples of the canary GEMM
# Longest expected time for waking the device, preparing the canary or measuring the ceilings.
_ASIDE_SECONDS = 30.0
_MIN_SAMPLES = CHECKPOINTS[0]
# A process on a CPU measures the ceilings again only if it has at least this many seconds.
_LEAST_WITH_CEILINGS = 30.0
# Share of the time that stays free when cases are admitted, because the cost of samples varies.
_MARGIN = 0.02
# A case may take this multiple of its planned seconds, even if that is more than _MAX_SHARE.
_MISTAKEN = 2.5
_MAX_SHARE = 0.05
"""Share of the budget that six samples of one case may take.

The plan usually sets a smaller limit; the limit here is for cases whose time was underestimated."""


class Rounds:
    """The measuring loop of one process."""

    def __init__(
        self,
        planned: Sequence[PlanEntry],
        known: Mapping[str, History],
        bench: Bench,
        worker: str,
        budget: float,
        spent: float,
        emit: Callable[[Event], None],
        on_start: OnStart,
        seed: int | None = None,
        limit: float = math.inf,
        longest: float | None = None,
    ) -> None:
        """Prepare the loop; nothing is measured yet.

        ``known`` has histories from earlier processes. This shard may measure for ``budget``
        seconds in total, of which ``spent`` seconds are used up. This process may take at most
        ``limit`` seconds, even if more of the budget is left. Six samples of a case may take
        ``longest`` seconds or 2.5 times the case's planned time, whichever is longer. If
        ``longest`` is None, it is the share :data:`_MAX_SHARE` of the budget.
        """
        closed = {case for case, history in known.items() if history.closed}
        self._waiting = deque(entry for entry in planned if entry.case.id not in closed)
        self._histories = known
        self._bench = bench
        self._sampler = bench.sampler
        self._worker = worker
        # Seconds left of the budget or of this process's time, whichever is less.
        self._left = min(budget - spent, limit)
        self._margin = _MARGIN * self._left
        # A CPU's ceilings were measured for the plan. They are measured again in the middle and at
        # the end. The next time is when this many seconds are left; −∞ means never.
        self._ceilings_due = self._left / 2 if self._left >= _LEAST_WITH_CEILINGS else -math.inf
        self._planned_seconds = {entry.case.id: entry.expected for entry in planned}
        self._max_seconds = _MAX_SHARE * budget if longest is None else longest
        self._emit = emit
        self._on_start = on_start
        self._random = random.Random(seed)
        # Rounds are numbered over the whole run, because the analysis compares the samples that
        # different cases have in the same round.
        earlier_rounds = (
            sample.get("r", 0) for history in known.values() for sample in history.every_sample
        )
        self._round = max(earlier_rounds, default=0)
        self._open: list[Subject] = []
        self._failed: set[str] = set()
        # Largest number of cases to prepare before the next round. It doubles each time, up to
        # CHUNK.
        self._chunk = FIRST_CHUNK
        # Seconds of one sample of each case opened so far. The subjects themselves are released
        # when they are finished, because their launches hold memory.
        self._sample_seconds: dict[str, float] = {}
        # Sums over all cases prepared so far: planned seconds, and seconds spent on preparing.
        self._expected_seconds = 0.0
        self._preparing_seconds = 0.0
        self._canary: Subject | None = None
        self._canary_due = 0.0
        # If the canary crashed an earlier process, the run continues without one.
        self._watching = CANARY not in known or not known[CANARY].crashes

    def run(self) -> str:
        """Measure, and return ``done`` if no case is left to be measured, else ``budget``.

        ``budget`` means that the budget or the time does not suffice for the remaining cases.

        Raises:
            PoisonedError: if the device does not recover from an error.
        """
        reason = self._measure()
        if self._ceilings_due > -math.inf:
            self._measure_ceilings()
        self._check([subject for subject in self._open if subject.samples])
        return reason

    def _measure(self) -> str:
        while self._spare_seconds > 0:
            # 1. Prepare new cases, if there is still time for six samples of them.
            open_before = len(self._open)
            admitted = self._admit()
            if not self._open:
                if admitted:
                    continue  # all of them were refused, or would take too long
                return "budget" if self._waiting else "done"
            # While cases are compiled and loaded on the host, the device's clocks drop.
            if admitted:
                self._run_outside_cases(None, self._sampler.wake)
            # 2. Choose the cases of this round. While cases are still being admitted, only the new
            # ones are sampled, and only once. Much time then passes between the first sample of a
            # case and its later ones, so that its samples show how the machine's speed changes.
            subjects = self._open[open_before:] if admitted else self._due_subjects()
            due = [subject for subject in subjects if not subject.finished]
            # 3. Take one sample of each case, in a new order in each round. Short disturbances then
            # hit different cases, and the samples of one case are spread over the run.
            self._random.shuffle(due)
            self._round += 1
            for subject in due:
                if self._spare_seconds <= 0:
                    break
                if self._left < self._ceilings_due:
                    self._ceilings_due = 0.0  # not again in this loop, but once more after it
                    self._measure_ceilings()
                self._watch_drift()
                self._take_sample(subject)
            # 4. Check the finished cases a last time, and close them.
            self._check([subject for subject in self._open if subject.finished])
            self._open = [
                subject
                for subject in self._open
                if not subject.finished and subject.key not in self._failed
            ]
        # The time may be used up by the very sample that finishes the last case.
        return "budget" if self._open or self._waiting else "done"

    @property
    def _spare_seconds(self) -> float:
        """Seconds left for samples, excluding those reserved for checks after the last samples."""
        return self._left - sum(subject.checking for subject in self._open if subject.samples)

    def _check(self, subjects: Sequence[Subject]) -> None:
        """Check cases again after their last samples, because a kernel may be right only at first.

        A case with :attr:`Subject.checked_late` is not launched again. Each case that does not fail
        is reported as ``right``; this event confirms the case's samples.
        """
        for subject in subjects:
            if subject.key in self._failed or not subject.samples:
                continue
            self._on_start([subject.key], subject.cost + subject.checking)
            begin = self._sampler.now()
            try:
                if subject.checker is not None and not subject.checked_late:
                    subject.checker.check_after_timing()
            except Exception as error:
                self._fail(subject, error, begin)
                continue
            cost = self._sampler.now() - begin
            self._left -= cost
            self._report("right", subject.key, cost, checking=round(cost, 6))

    def _promised_seconds(self) -> float:
        """Return the seconds needed until every open case has six samples."""
        return sum(
            max(0, _MIN_SAMPLES - len(subject.samples)) * subject.cost for subject in self._open
        )

    def _due_subjects(self) -> list[Subject]:
        """Return the open cases to sample in the next round: all of them, unless time is short."""
        # Six samples are the fewest that give an interval. While time is short, they have priority
        # over narrowing the intervals of other cases.
        incomplete = [subject for subject in self._open if len(subject.samples) < _MIN_SAMPLES]
        complete = [subject for subject in self._open if len(subject.samples) >= _MIN_SAMPLES]
        narrowing_seconds = sum(subject.cost for subject in complete)
        is_short = self._promised_seconds() + narrowing_seconds > self._spare_seconds
        if not is_short:
            return list(self._open)
        affordable = self._affordable(incomplete)
        if affordable:
            return affordable
        # No further case can get six samples, so the time is used to narrow the other intervals. If
        # there are none, more samples still help a call that resumes the run.
        return complete or list(self._open)

    def _affordable(self, subjects: Sequence[Subject]) -> list[Subject]:
        """Return cases that can all get six samples in the time left.

        If the machine has become slower, continuing every case could leave all of them without an
        interval.
        """
        chosen: list[Subject] = []
        spare_seconds = self._spare_seconds
        by_progress = sorted(subjects, key=lambda subject: len(subject.samples), reverse=True)
        for subject in by_progress:
            needed_seconds = (_MIN_SAMPLES - len(subject.samples)) * subject.cost
            if needed_seconds <= spare_seconds:  # the loop continues: a shorter case may still fit
                spare_seconds -= needed_seconds
                chosen.append(subject)
        return chosen

    def _pace(self) -> float:
        """Return the time of the prepared cases divided by their planned time, but at least 1."""
        if not self._expected_seconds:
            return 1.0
        sampling_seconds = _MIN_SAMPLES * sum(self._sample_seconds.values())
        # The ratio is at least 1, so that time saved by a fast machine goes to more samples, not to
        # more cases.
        return max(1.0, (self._preparing_seconds + sampling_seconds) / self._expected_seconds)

    def _admit(self) -> int:
        """Prepare new cases that can get six samples in the time left; return the case count."""
        # 1. Choose the cases, in the plan's order.
        promised = self._promised_seconds()
        pace = self._pace()
        chosen: list[PlanEntry] = []
        skipped: deque[PlanEntry] = deque()
        while self._waiting and len(chosen) < self._chunk:
            entry = self._waiting.popleft()
            if promised + entry.expected * pace > self._spare_seconds - self._margin:
                skipped.append(entry)  # the loop continues: a shorter case may still fit
                continue
            promised += entry.expected * pace
            chosen.append(entry)
        # 2. Put the skipped cases back in front, in the plan's order: they may fit later, if other
        # cases finish early.
        self._waiting.extendleft(reversed(skipped))
        self._chunk = min(2 * self._chunk, CHUNK)
        self._expected_seconds += sum(entry.expected for entry in chosen)
        # 3. Prepare the chosen cases.
        begin = self._sampler.now()
        cases = [entry.case for entry in chosen]
        for result in self._bench.prepare(cases, self._histories, self._on_start):
            cost = self._sampler.now() - begin
            self._left -= cost
            self._preparing_seconds += cost
            self._open_case(result, cost)
            # Restart the clock after reporting. Reporting waits until the parent reads, and that
            # wait does not count as measuring time.
            begin = self._sampler.now()
        return len(chosen)

    def _open_case(self, result: Ready | Refusal, cost: float) -> None:
        """Report a prepared case, and let it be sampled unless it is refused or takes too long."""
        if isinstance(result, Refusal):
            if result.facts:
                self._report("facts", result.case.id, 0.0, facts=dict(result.facts))
            self._report(
                "outcome", result.case.id, cost, status=result.status, message=result.message
            )
            return
        self._report(
            "facts",
            result.case.id,
            cost,
            facts=dict(result.facts),
            checking=round(result.subject.checking, 6),
        )
        if _MIN_SAMPLES * result.subject.cost > self._too_long_seconds(result.case):
            self._report("too-long", result.case.id, 0.0)
        else:
            self._open.append(result.subject)
            self._sample_seconds[result.case.id] = result.subject.cost

    def _too_long_seconds(self, case: Case) -> float:
        return max(self._max_seconds, _MISTAKEN * self._planned_seconds[case.id])

    def _take_sample(self, subject: Subject) -> None:
        # 1. Take the sample.
        self._on_start([subject.key], subject.cost)
        begin = self._sampler.now()
        try:
            sample = self._sampler.sample(subject)
        except Exception as error:
            self._fail(subject, error, begin)
            return
        self._left -= sample.cost
        if subject.key in self._sample_seconds:  # the canary is not, because it is not in the plan
            self._sample_seconds[subject.key] = subject.cost
        # 2. Select the sensor values. A burst is shorter than the time between two power readings,
        # so the power that is read around a burst is mostly that of other cases. Only sustained
        # samples have a power.
        reading = sample.reading
        power_w = reading.power_w if subject.mode == "sustained" else None
        sensors = {
            "sm_mhz": reading.sm_mhz,
            "power_w": power_w,
            "temp_c": reading.temp_c,
            "throttled": list(reading.throttled),
        }
        # 3. Report the sample. To keep the file small, entries with their usual value are left out,
        # and so are sensors that were not read. A reading of 0 is left out as well, because no GPU
        # at work reads 0.
        optional: dict[str, Any] = {}
        if not sample.hidden:
            optional["hidden"] = False
        if sample.checked:
            optional["checking"] = round(sample.checking, 6)
        optional |= {name: value for name, value in sensors.items() if value}
        self._report(
            "sample",
            sample.key,
            sample.cost,
            s=sample.seconds,
            n=sample.launches,
            r=self._round,
            **optional,
        )

    def _fail(self, subject: Subject, error: Exception, begin: float) -> None:
        """Let the bench recover from an error, and report the error as the case's outcome."""
        status, message = self._bench.recover_from(error)
        cost = self._sampler.now() - begin
        self._left -= cost
        self._failed.add(subject.key)
        self._report("outcome", subject.key, cost, status=status, message=message)

    def _watch_drift(self) -> None:
        """Time the canary GEMM if two seconds have passed since its last sample."""
        if self._sampler.now() < self._canary_due:
            return
        # The canary is prepared at its first use. If that fails, the run continues without one.
        if self._watching and self._canary is None:
            self._canary = self._run_outside_cases(CANARY, self._bench.canary)
            self._watching = self._canary is not None
        if self._canary is not None:
            self._take_sample(self._canary)
            if self._canary.key in self._failed:
                self._canary, self._watching = None, False
        self._canary_due = self._sampler.now() + _CANARY_SECONDS

    def _measure_ceilings(self) -> None:
        """Measure a CPU's ceilings again, and report them; the CPU may have been slow last time."""
        ceilings = self._run_outside_cases(None, self._bench.ceilings)
        if ceilings is not None:
            peaks, bandwidth = ceilings
            # The cost is 0 here, because it was reported as time outside of cases.
            self._report("ceilings", "", 0.0, peaks=dict(peaks), bandwidth=bandwidth)

    def _run_outside_cases(self, name: str | None, work: Callable[[], _T]) -> _T | None:
        """Do work that belongs to no planned case, and return its result, or None if it fails.

        ``name`` says what to blame if the work crashes, such as :data:`CANARY`; None to blame
        nothing.
        """
        self._on_start([name] if name else [], _ASIDE_SECONDS)
        begin = self._sampler.now()
        result = None
        try:
            result = work()
        except Exception as error:
            self._bench.recover_from(error)
        cost = self._sampler.now() - begin
        self._left -= cost
        self._report("aside", name or "", cost)
        return result

    def _report(self, event: str, case: str, cost: float, **more: Any) -> None:
        self._emit(make_event(self._bench, self._worker, event, case, cost, **more))
