from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from sweeps.timing.pulse import Pulse
from sweeps.timing.sampler import (
    CHECKED_EVERY,
    SUSTAINED_BATCH,
    SUSTAINED_SETTLE,
    Sampler,
    Subject,
)  # fmt: skip
from sweeps.timing.statistics import CHECKPOINTS
from sweeps.timing.telemetry import Reading, Telemetry
from tests.support.fakes import FakeChecker, FakeClock, noisy


class Throttled(Telemetry):
    """Telemetry that reports a throttle reason until :meth:`forget` was called often enough.

    ``lasting`` is the number of these calls.
    """

    def __init__(self, reason: str, lasting: int) -> None:
        self.reason = reason
        self.lasting = lasting
        self.waited = 0

    def between(self, begin: float, end: float) -> Reading:
        slow = self.waited < self.lasting
        return Reading(1500.0, 600.0, 60.0, (self.reason,) if slow else ())

    def forget(self) -> None:
        self.waited += 1


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def constant(seconds: float) -> Subject:
    return Subject("case", lambda index: seconds)


def test_the_estimate_is_right_from_nanoseconds_to_seconds(clock: FakeClock) -> None:
    for seconds in (1e-7, 1e-5, 1e-3, 0.3):
        assert Sampler(clock).estimate(constant(seconds).launch) == pytest.approx(seconds)


def test_the_estimate_is_not_fooled_by_a_slow_first_launch(clock: FakeClock) -> None:
    durations = iter([2.0] + [1e-5] * 10_000)
    assert Sampler(clock).estimate(lambda index: next(durations)) == pytest.approx(1e-5)


def test_a_long_launch_that_is_warm_is_launched_once_to_estimate_it(clock: FakeClock) -> None:
    assert Sampler(clock).estimate(constant(0.3).launch, warmed_up=True) == pytest.approx(0.3)
    assert clock.seconds == pytest.approx(0.3)


def test_a_burst_is_as_long_as_the_clock_needs(clock: FakeClock) -> None:
    sampler = Sampler(clock)
    short, long = constant(1e-5), constant(0.2)
    short.cache = "warm"
    sampler.set_batch(short, 1e-5)
    sampler.set_batch(long, 0.2)
    assert short.launches == 100  # one millisecond
    assert long.launches == 1
    sampler.set_batch(short, 1e-9)
    assert short.launches == clock.max_launches


def test_the_flush_is_part_of_what_a_cold_sample_costs(clock: FakeClock) -> None:
    sampler = Sampler(clock, flush=lambda: clock.pause(0.004))
    cold, warm = constant(1e-3), constant(1e-3)
    warm.cache = "warm"
    for subject in (cold, warm):
        sampler.set_batch(subject, 1e-3)
    assert (cold.cost, warm.cost) == pytest.approx((0.005, 0.001))
    assert sampler.sample(cold).cost == pytest.approx(cold.cost)


def test_a_cold_batch_flushes_first_and_never_uses_a_set_twice(clock: FakeClock) -> None:
    flushed_at: list[int] = []
    sampler = Sampler(clock, flush=lambda: flushed_at.append(len(clock.batches)))
    subject = constant(1e-5)
    subject.sets = 7
    sampler.set_batch(subject, 1e-5)
    flushed_at.clear()  # fitting measures what a flush costs
    sample = sampler.sample(subject)
    assert sample.launches == 7
    assert sample.seconds == pytest.approx(1e-5)
    assert flushed_at == [0]  # one flush, before the only batch
    assert clock.batches == [((0, 1, 2, 3, 4, 5, 6), 0.0)]


@pytest.mark.parametrize("sets", [2, 3, 6, 7, 64])
def test_of_batches_of_one_launch_the_checked_ones_use_every_set(
    clock: FakeClock, sets: int
) -> None:
    sampler = Sampler(clock)
    subject = constant(1.0)
    subject.sets = sets
    sampler.set_batch(subject, 1.0)
    samples = [sampler.sample(subject) for _ in range(CHECKED_EVERY * sets)]
    pairs = zip(samples, clock.batches, strict=True)
    assert {indices for sample, (indices, _) in pairs if sample.checked} == {
        (i,) for i in range(sets)
    }


def test_cold_weights_flush_first_then_warm_what_all_launches_share(clock: FakeClock) -> None:
    said: list[str] = []
    sampler = Sampler(clock, flush=lambda: said.append("flush"))

    def launch(index: int) -> float:
        said.append(f"set {index}")
        return 1e-5

    subject = Subject("case", launch, sets=3, cache="weights-cold")
    subject.warm = lambda: said.append("warm")
    sampler.set_batch(subject, 1e-5)
    said.clear()  # fitting measures what a flush costs
    assert sampler.sample(subject).launches == 3
    assert said == ["flush", "warm", "set 0", "set 1", "set 2"]


def test_a_warm_batch_uses_one_set_and_launches_it_once_before(clock: FakeClock) -> None:
    flushed: list[int] = []
    sampler = Sampler(clock, flush=lambda: flushed.append(1))
    launched: list[int] = []
    subject = constant(1e-4)
    subject.launch = lambda index: launched.append(index) or 1e-4  # type: ignore[func-returns-value]
    subject.cache, subject.sets = "warm", 5
    sampler.set_batch(subject, 1e-4)
    sampler.sample(subject)
    assert not flushed
    assert clock.batches == [((0,) * 10, 0.0)]
    assert launched == [0] * 11  # the batch, and one launch before it


def test_sustained_work_settles_first_and_rotates_its_sets(clock: FakeClock) -> None:
    sampler = Sampler(clock)
    subject = constant(1e-2)
    subject.mode, subject.sets = "sustained", 3
    sampler.set_batch(subject, 1e-2)
    sampler.sample(subject)
    ((indices, settle),) = clock.batches
    assert settle == SUSTAINED_SETTLE
    assert len(indices) * 1e-2 >= SUSTAINED_BATCH
    assert indices[:4] == (0, 1, 2, 0)


@pytest.mark.parametrize(
    ("reason", "lasting", "batches", "stands"),
    [
        ("hw_thermal_slowdown", 1, 2, False),
        ("hw_power_brake", 2, 3, False),
        ("hw_slowdown", 99, 4, True),  # kept after three retries
        ("sw_power_cap", 99, 1, True),  # normal for large GEMMs
    ],
)
def test_only_hardware_slowdowns_are_retried_and_not_for_ever(
    clock: FakeClock, reason: str, lasting: int, batches: int, stands: bool
) -> None:
    telemetry = Throttled(reason, lasting)
    sampler = Sampler(clock, telemetry=telemetry)
    subject = constant(1e-3)
    subject.launches = 1
    sample = sampler.sample(subject)
    assert len(clock.batches) == batches
    assert telemetry.waited == batches - 1  # each retry waits for new readings
    assert sample.reading.throttled == ((reason,) if stands else ())
    assert len(subject.samples) == 1  # batches that were retried are dropped
    assert sample.cost == pytest.approx(batches * 1e-3)  # their time still counts as cost


def test_a_machine_that_stays_slow_is_waited_for_once(clock: FakeClock) -> None:
    telemetry = Throttled("hw_slowdown", 5)
    sampler = Sampler(clock, telemetry=telemetry)
    subject = constant(1e-3)
    subject.launches = 1
    batches = []
    for _ in range(4):
        before = len(clock.batches)
        sampler.sample(subject)
        batches.append(len(clock.batches) - before)
    assert batches == [4, 1, 1, 1]
    telemetry.lasting = 0  # it recovers
    sampler.sample(subject)
    telemetry.lasting = 99  # it slows down again
    before = len(clock.batches)
    sampler.sample(subject)
    assert len(clock.batches) - before == 4


def test_settings_are_entered_once_a_batch(clock: FakeClock) -> None:
    entered: list[str] = []

    @contextmanager
    def settings() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    subject = Subject("case", lambda index: 1e-5, settings=settings)
    subject.launches = 50
    Sampler(clock).sample(subject)
    assert entered == ["in", "out"]


def test_a_subject_is_finished_when_its_samples_agree(clock: FakeClock) -> None:
    sampler = Sampler(clock)
    quiet = Subject("quiet", noisy(1e-3, 0.001))
    loud = Subject("loud", noisy(1e-3, 0.3))
    for subject in (quiet, loud):
        subject.launches = 1
        while not subject.finished:
            sampler.sample(subject)
    assert len(quiet.samples) == 6
    assert len(loud.samples) == CHECKPOINTS[-1]


class Stopped(Pulse):
    """Pulse of a process that is stopped for 40 s during each of the first ``times`` batches."""

    def __init__(self, clock: FakeClock, times: int) -> None:
        self.clock = clock
        self.times = times

    def stops(self) -> int:
        return min(len(self.clock.batches), self.times)

    def lost(self) -> float:
        return 40.0 * self.stops()


@pytest.mark.parametrize("times", [1, 3])
def test_a_batch_that_was_stopped_is_taken_again_and_costs_nothing(
    clock: FakeClock, times: int
) -> None:
    sampler = Sampler(clock, pulse=Stopped(clock, times))

    def launch(index: int) -> float:
        stopped = len(clock.batches) <= times
        return 40.0 + 1e-3 if stopped else 1e-3

    subject = Subject("case", launch, cache="warm", launches=1)
    clock.launched = 0.0
    sample = sampler.sample(subject)
    assert (sample.seconds, sample.hidden) == (1e-3, True)
    assert subject.samples == [1e-3]
    assert sample.cost == pytest.approx((times + 1) * 1e-3)


def test_a_process_that_is_stopped_again_and_again_has_no_good_sample(clock: FakeClock) -> None:
    sampler = Sampler(clock, pulse=Stopped(clock, 1000))
    subject = Subject("case", lambda index: 1e-3, cache="warm", launches=1)
    assert not sampler.sample(subject).hidden
    assert (subject.samples, subject.exposed) == ([], 1)


def test_an_estimate_is_not_of_a_stop(clock: FakeClock) -> None:
    sampler = Sampler(clock, pulse=Stopped(clock, 1))
    durations = iter([40.0] + [1e-3] * 1000)
    assert sampler.estimate(lambda index: next(durations), warmed_up=True) == pytest.approx(1e-3)


class Recorder:
    """Checker that records its calls, and finds its ``wrong``-th batch wrong."""

    def __init__(self, wrong: int | None = None) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.poisoned = self.released = 0
        self.unseen: list[int | None] = []
        self.wrong = wrong

    def poison(self, unseen: int | None) -> None:
        self.poisoned += 1
        self.unseen.append(unseen)

    def release(self) -> None:
        self.released += 1

    def check_batch(self, indices: Sequence[int], last: object) -> None:
        self.asked.append(tuple(indices))
        if self.wrong == len(self.asked):
            raise ValueError("wrong")

    def check_after_timing(self) -> None:
        pass


def test_the_first_sample_is_checked_and_late_ones_on_other_inputs(clock: FakeClock) -> None:
    checker = Recorder()
    subject = Subject("case", lambda index: 1e-3, 3, launches=2, checker=checker)
    sampler = Sampler(clock)
    checked = [sampler.sample(subject).checked for _ in range(2 * CHECKED_EVERY + 1)]
    assert [i for i, one in enumerate(checked) if one] == [0, 10, 22]
    assert checker.poisoned == checker.released == len(checker.asked) == 3
    assert [set_ is not None for set_ in checker.unseen] == [False, True, True]
    assert subject.checked_late


def test_batches_begin_with_one_set_after_another(clock: FakeClock) -> None:
    subject = Subject("case", lambda index: 1e-3, 2, launches=1)
    sampler = Sampler(clock)
    for _ in range(4):
        sampler.sample(subject)
    assert [batch for batch, _ in clock.batches] == [(0,), (1,), (0,), (1,)]


def test_a_sample_that_is_found_wrong_is_none(clock: FakeClock) -> None:
    subject = Subject("case", lambda index: 1e-3, launches=1, checker=Recorder(wrong=1))
    with pytest.raises(ValueError, match="wrong"):
        Sampler(clock).sample(subject)
    assert subject.samples == []


class Board(Telemetry):
    """Board that draws 500 W, and counts energy by the fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def between(self, begin: float, end: float) -> Reading:
        return Reading(1200.0, 500.0, 60.0, ("hw_slowdown",))

    def joules(self) -> float:
        return 500.0 * self.clock.seconds


def test_a_steady_run_has_no_pause_and_reads_the_board_in_every_window(clock: FakeClock) -> None:
    checked = []

    class Checker(FakeChecker):
        def check_after_timing(self) -> None:
            checked.append(clock.seconds)

    subject = Subject("case", lambda index: 2e-3, 4, "sustained", checker=Checker("ok"))
    sampler = Sampler(clock, telemetry=Board(clock))
    sampler.set_batch(subject, 2e-3)
    windows = sampler.hold(subject, 5.0)
    took = sum(window.seconds * window.launches for window in windows)
    # Only launches advance the fake clock. There are none but those of the windows: nothing
    # settles, and a throttled window is not repeated.
    assert took == pytest.approx(clock.seconds)
    assert took >= 5.0
    assert {settle for _, settle in clock.batches} == {0.0}
    assert [w.begin for w in windows[:3]] == pytest.approx([0.0, 0.06, 0.12])
    assert windows[-1].joules == pytest.approx(500.0 * took)
    assert windows[0].reading.throttled == ("hw_slowdown",)
    assert checked == [clock.seconds]
