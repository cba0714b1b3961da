from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.triton.sm_clock import mean_mhz
from sweeps.timing import clock as clock_module
from sweeps.timing.clock import CpuClock, CudaClock
from sweeps.timing.gate import HOLD_LIMIT, Gate, HostFlag, Spin, new_gate
from tests.support.fake_cuda import FakeCuda, FakeDriver, FakeTorch


def test_the_cpu_clock_times_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    now = 0

    def launch(index: int) -> None:
        nonlocal now
        calls.append(index)
        now += 2_000_000

    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter_ns=lambda: now))
    timing = CpuClock().time(launch, [3, 1, 2], before=lambda: launch(7))
    assert calls == [7, 3, 1, 2]
    assert timing.seconds == pytest.approx(0.006)
    calls.clear()
    timing = CpuClock().time(launch, [5], settle=0.02)
    assert calls == [5] * 11  # ten unmeasured launches before the measured one
    assert timing.seconds == pytest.approx(0.002)


def flag_of(cuda: FakeCuda, refuses: int = 0) -> Callable[[Any], Gate]:
    def make(torch: Any) -> Gate:
        flag = HostFlag(torch, FakeDriver(cuda, refuses), now=lambda: cuda.host)
        cuda.on_wait = flag.check
        return flag

    return make


def clock_on(cuda: FakeCuda, gate: str = "flag") -> CudaClock:
    class Clock(CudaClock):
        def now(self) -> float:
            return cuda.host

    return Clock(FakeTorch(cuda), "cuda:0", flag_of(cuda) if gate == "flag" else Spin)


class MarkedClock:
    """Fake of the kernel that reads the SM clock. It records when it ran in the stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.marks: list[tuple[int, float]] = []

    def mark(self, number: int) -> None:
        def run(start: float) -> float:
            self.marks.append((number, start))
            return start + 2e-6

        self._cuda.queue(run)

    def mhz(self) -> float | None:
        self._cuda.synchronize()
        return 1500.0


def test_the_sm_clock_is_read_around_a_batch_and_not_within_its_time() -> None:
    cuda = FakeCuda(queue_seconds=1e-5, kernel_seconds=1e-5)
    marked = MarkedClock(cuda)
    clock = CudaClock(FakeTorch(cuda), "cuda:0", Spin, marked)
    timing = clock.time(cuda.launch, [0] * 50)
    assert timing.sm_mhz == 1500.0
    assert timing.seconds == pytest.approx(50e-5, rel=1e-6)
    (first, began), (last, ended) = marked.marks[-2:]
    assert (first, last) == (0, 1)
    assert began + timing.seconds <= ended <= began + timing.seconds + 1e-3


@pytest.mark.parametrize(
    ("first", "last", "wanted"),
    [
        # Two SMs that ran at 1.5 GHz for 200 µs; a third was read only once.
        (
            {0: (0, 0), 5: (100, 50), 7: (1, 1)},
            {0: (300_000, 200_000), 5: (300_100, 200_050)},
            1500.0,
        ),
        ({0: (0, 0)}, {1: (300_000, 200_000)}, None),  # no SM was read twice
        ({0: (0, 0)}, {0: (1500, 1000)}, None),  # too short to tell
        ({0: (0, 0)}, {0: (0, 0)}, None),  # nothing was written
    ],
)
def test_the_mean_clock_of_two_readings(
    first: dict[int, tuple[int, int]], last: dict[int, tuple[int, int]], wanted: float | None
) -> None:
    assert mean_mhz(first, last) == (None if wanted is None else pytest.approx(wanted))


GATES = pytest.mark.parametrize("gate", ["flag", "spin"])


@GATES
@pytest.mark.parametrize("queue", [1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("kernel", [1e-6, 3e-6, 1e-3])
def test_launch_gaps_never_show(queue: float, kernel: float, gate: str) -> None:
    """However slowly the host launches, the batch takes only the time of its kernels."""
    cuda = FakeCuda(queue, kernel)
    timing = clock_on(cuda, gate).time(cuda.launch, [0] * 100)
    assert timing.hidden
    assert timing.seconds == pytest.approx(100 * kernel, rel=1e-6)


@GATES
def test_a_gpu_that_wakes_from_its_idle_clock_is_timed_at_the_clock_of_work(gate: str) -> None:
    """An H200 idles at 345 MHz and works at 1980, so a spin for the idle clock is too short."""
    cuda = FakeCuda(queue_seconds=1e-5, kernel_seconds=2e-6, rises=0.2)
    clock = clock_on(cuda, gate)
    launch = cuda.launch
    attempts = []
    for _ in range(20):
        began = len(cuda.sleeps)
        timing = clock.time(launch, [0] * 150)
        attempts.append(len(cuda.sleeps) - began)
        assert timing.hidden
        assert timing.seconds / 150 == pytest.approx(2e-6, rel=0.01)
    assert sum(attempts) <= 21 * (gate == "spin")  # at most one batch needed a second attempt


def test_a_spin_learns_the_clock_again_when_it_falls_and_rises() -> None:
    cuda = FakeCuda(queue_seconds=1e-5, kernel_seconds=2e-6, rises=0.05)
    clock = clock_on(cuda, "spin")
    launch = cuda.launch
    for _ in range(3):
        cuda.worked = 0.0  # the GPU was idle, so its clock is back at 345 MHz
        timings = [clock.time(launch, [0] * 150) for _ in range(40)]
        assert all(timing.hidden for timing in timings)


@GATES
def test_each_try_of_a_cold_batch_begins_with_a_flush(gate: str) -> None:
    """Otherwise, a batch that is timed again would find its operands in the cache."""
    cuda = FakeCuda(kernel_seconds=3e-5)
    clock = clock_on(cuda, gate)
    warm = False
    done: list[str] = []

    def flush() -> None:
        nonlocal warm
        warm = False
        done.append("flush")

    def launch(index: int) -> None:
        nonlocal warm
        if len(done) == 1 and index == 9:
            cuda.synchronize()  # the first attempt waits for the device, so its gaps show
        cuda.kernel_seconds = 1e-5 if warm else 3e-5
        cuda.launch(index)
        warm = index == 9

    timing = clock.time(launch, range(10), before=flush)
    assert done == ["flush", "flush"]
    assert timing.hidden
    assert timing.seconds == pytest.approx(10 * 3e-5)


def test_a_launch_that_waits_for_the_device_once_is_launched_again_with_the_gate_open() -> None:
    """The launch has to allocate memory that was returned to the device."""
    cuda = FakeCuda()
    clock = clock_on(cuda)
    waited: list[int] = []

    def launch(index: int) -> None:
        if index == 5 and not waited:
            waited.append(1)
            cuda.synchronize()
        cuda.launch(index)

    began = cuda.host
    timing = clock.time(launch, range(10))
    assert timing.hidden
    assert waited
    assert HOLD_LIMIT < cuda.host - began < 2 * HOLD_LIMIT
    before = len(cuda.sleeps)
    assert clock.time(launch, range(10)).hidden
    assert len(cuda.sleeps) == before  # the host's flag still holds the stream, not a spin


def test_a_launch_that_waits_for_the_device_again_is_held_by_a_spin_from_then_on() -> None:
    cuda = FakeCuda()
    clock = clock_on(cuda)
    waited: list[int] = []

    def launch(index: int) -> None:
        if index == 5 and len(waited) < 2:
            waited.append(1)
            cuda.synchronize()
        cuda.launch(index)

    assert clock.time(launch, range(10)).hidden
    before = len(cuda.sleeps)
    assert clock.time(launch, range(10)).hidden
    assert len(cuda.sleeps) == before + 1
    assert clock.time(cuda.launch, range(10)).hidden
    assert len(cuda.sleeps) == before + 1  # the host's flag still holds other launches


def test_a_launch_that_raises_leaves_the_stream_open() -> None:
    cuda = FakeCuda()
    clock = clock_on(cuda)

    def launch(index: int) -> None:
        if index == 3:
            raise RuntimeError("no")
        cuda.launch(index)

    with pytest.raises(RuntimeError):
        clock.time(launch, range(5))
    began = cuda.host
    cuda.synchronize()
    assert cuda.host - began < 0.001


def test_a_flag_never_opens_the_next_batch() -> None:
    cuda = FakeCuda()
    driver = FakeDriver(cuda)
    flag = HostFlag(FakeTorch(cuda), driver, now=lambda: cuda.host)
    for _ in range(3):
        flag.close(0.0)
        event = cuda.Event()
        event.record()
        assert not event.query()
        flag.open()
        assert event.query()
    flag._ticket = flag._word.value = 2**32 - 1  # the next ticket wraps to 0
    flag.close(0.0)
    event.record()
    assert not event.query()
    flag.open()
    assert event.query()


def test_a_driver_that_refuses_the_flag_leaves_the_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    with pytest.raises(OSError, match="cuStreamWaitValue32_v2 returned 801"):
        HostFlag(FakeTorch(cuda), FakeDriver(cuda, refuses=801))
    for driver, kind in (
        (FakeDriver(cuda, 801), Spin),
        (object(), Spin),
        (FakeDriver(cuda), HostFlag),
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, driver=driver: driver)
        assert isinstance(new_gate(FakeTorch(cuda)), kind)

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert isinstance(new_gate(FakeTorch(cuda)), Spin)


def test_at_the_hosts_own_pace_the_gaps_are_part_of_the_time() -> None:
    cuda = FakeCuda(queue_seconds=1e-5, kernel_seconds=1e-6)
    clock = clock_on(cuda)
    spins = len(cuda.sleeps)
    timing = clock.time(cuda.launch, [0] * 100, paced=True)
    assert len(cuda.sleeps) == spins
    assert timing.hidden  # the gaps should be part of the time, so they are no fault
    assert timing.seconds == pytest.approx(100 * 1e-5, rel=0.02)


@GATES
def test_launches_that_block_are_said_and_cost_little(gate: str) -> None:
    """Each launch waits for the device, as with CUDA_LAUNCH_BLOCKING=1."""
    cuda = FakeCuda(queue_seconds=1e-6, kernel_seconds=1e-6)
    clock = clock_on(cuda, gate)

    def blocking(index: int) -> None:
        cuda.launch(index)
        cuda.synchronize()

    before = cuda.host
    for _ in range(10):
        assert not clock.time(blocking, [0] * 20).hidden
    assert cuda.host - before < HOLD_LIMIT * 2 + 10 * 4 * 0.03


def test_a_full_queue_is_worked_off_and_timed_again() -> None:
    """The driver blocks at about a thousand pending launches, until the flag is released."""
    cuda = FakeCuda(max_pending=100)
    clock = clock_on(cuda)
    assert not clock.time(cuda.launch, [0] * 200).hidden
    assert clock.time(cuda.launch, [0] * 50).hidden


def test_a_slow_launch_does_not_lengthen_the_spin_of_others() -> None:
    cuda = FakeCuda(queue_seconds=5e-6, kernel_seconds=1e-6)
    clock = clock_on(cuda, "spin")
    launch = cuda.launch

    def slow(index: int) -> None:
        cuda.host += 1e-4
        cuda.launch(index)

    for _ in range(3):
        clock.time(launch, [0] * 100)
        clock.time(slow, [0] * 100)
    before = len(cuda.sleeps)
    clock.time(launch, [0] * 100)
    assert sum(cuda.sleeps[before:]) < 2e-3


def test_sustained_work_leaves_no_pause_before_it_is_timed() -> None:
    cuda = FakeCuda(queue_seconds=1e-6, kernel_seconds=1e-3)
    clock = clock_on(cuda)
    cuda.synchronize()
    idle, start = cuda.idle, cuda.host
    timing = clock.time(cuda.launch, [0] * 100, settle=0.3)
    assert timing.seconds == pytest.approx(0.1)
    assert cuda.host - start >= 0.4
    assert cuda.idle - idle < 1e-4  # after the first launch, the device never waits
