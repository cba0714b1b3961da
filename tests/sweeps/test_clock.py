from __future__ import annotations

import time
from typing import Any

import pytest

from sweeps.clock import CpuClock, CudaClock


def test_the_cpu_clock_times_calls() -> None:
    calls: list[int] = []

    def launch(index: int) -> None:
        calls.append(index)
        time.sleep(0.002)

    timing = CpuClock().time(launch, [3, 1, 2])
    assert calls == [3, 1, 2]
    assert timing.seconds >= 0.006
    calls.clear()
    CpuClock().time(launch, [5], settle=0.02)
    assert len(calls) > 1  # at least one unmeasured before the measured one
    assert set(calls) == {5}


class FakeCuda:
    """A GPU with a stream: launches queue, and the host's time is what the launches take to queue.

    ``host`` is the host's clock. The device works off its queue beginning at ``host`` time.
    """

    def __init__(self, queue_seconds: float, kernel_seconds: float) -> None:
        self.host = 0.0
        self.free_at = 0.0  # when the device has done everything that is queued
        self.queue_seconds = queue_seconds
        self.kernel_seconds = kernel_seconds
        self.sleeps: list[float] = []
        self.idle = 0.0
        outer = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(outer.host, outer.free_at)

            def query(self) -> bool:
                return outer.host >= self.at

            def synchronize(self) -> None:
                outer.host = max(outer.host, self.at)

            def elapsed_time(self, other: Any) -> float:
                return (other.at - self.at) * 1e3

        self.Event = Event

    def _sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles / 1e9)
        self._run(cycles / 1e9)

    def synchronize(self, device: object = None) -> None:
        self.host = max(self.host, self.free_at)

    def launch(self, index: int) -> None:
        self.host += self.queue_seconds
        self._run(self.kernel_seconds)

    def _run(self, seconds: float) -> None:
        begin = max(self.host, self.free_at)
        self.idle += begin - self.free_at
        self.free_at = begin + seconds


def clock_on(cuda: FakeCuda) -> CudaClock:
    class Torch:
        pass

    torch = Torch()
    torch.cuda = cuda  # type: ignore[attr-defined]
    clock = CudaClock(torch, "cuda:0")
    clock.now = lambda: cuda.host  # type: ignore[method-assign]
    return clock


@pytest.mark.parametrize("queue", [1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("kernel", [1e-6, 3e-6, 1e-3])
def test_launch_gaps_never_show(queue: float, kernel: float) -> None:
    """However slowly the host launches, the batch takes the kernels' own time."""
    cuda = FakeCuda(queue, kernel)
    clock = clock_on(cuda)
    timing = clock.time(cuda.launch, [0] * 100)
    assert timing.hidden
    assert timing.seconds == pytest.approx(100 * kernel, rel=1e-6)


def test_at_the_hosts_own_pace_the_gaps_are_part_of_the_time() -> None:
    cuda = FakeCuda(queue_seconds=1e-5, kernel_seconds=1e-6)
    clock = clock_on(cuda)
    spins = len(cuda.sleeps)
    timing = clock.time(cuda.launch, [0] * 100, paced=True)
    assert len(cuda.sleeps) == spins
    assert timing.hidden  # nothing to warn of: the gaps are what was asked for
    assert timing.seconds == pytest.approx(100 * 1e-5, rel=0.02)


def test_a_spin_that_was_too_short_is_made_longer() -> None:
    cuda = FakeCuda(queue_seconds=2e-4, kernel_seconds=1e-6)
    clock = clock_on(cuda)
    launch = cuda.launch  # one object: what the clock learns, it learns of this launch
    before = len(cuda.sleeps)
    assert clock.time(launch, [0] * 50).hidden
    spins = cuda.sleeps[before:]
    assert len(spins) > 1
    assert spins == sorted(spins)
    # What was learned is kept: the next batch needs no second try.
    before = len(cuda.sleeps)
    clock.time(launch, [0] * 50)
    assert len(cuda.sleeps) == before + 1


def test_launches_that_block_are_said_and_cost_little() -> None:
    """As with CUDA_LAUNCH_BLOCKING=1: each launch waits for the device."""
    cuda = FakeCuda(queue_seconds=1e-6, kernel_seconds=1e-6)
    clock = clock_on(cuda)

    def blocking(index: int) -> None:
        cuda.launch(index)
        cuda.synchronize()

    before = cuda.host
    for _ in range(10):
        assert not clock.time(blocking, [0] * 20).hidden
    assert cuda.host - before < 10 * 4 * 0.03


def test_a_slow_launch_does_not_lengthen_the_spin_of_others() -> None:
    cuda = FakeCuda(queue_seconds=5e-6, kernel_seconds=1e-6)
    clock = clock_on(cuda)
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
