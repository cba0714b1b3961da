"""Clocks: they launch a batch and say how long the device took, without the launch gaps.

A clock knows nothing of kernels; the sampler gives it a callable. Tests give the sampler a clock
that invents its times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

LaunchCall = Callable[[int], object]

_FIRST_QUEUE_SECONDS = 2e-5
_LONGEST_SPIN = 0.02
"""Where launching blocks (CUDA_LAUNCH_BLOCKING, a full queue), no spin would be long enough."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a whole batch, and whether every gap between its launches was hidden."""

    seconds: float
    hidden: bool = True


class Clock(Protocol):
    """What the sampler needs of a device's time."""

    batch_seconds: float
    """How long a burst should be, so that the clock's own error stays under half a percent."""

    most_launches: int
    """How many launches may be in flight at once."""

    def time(
        self, launch: LaunchCall, indices: Sequence[int], settle: float = 0.0, paced: bool = False
    ) -> Timing:
        """Launch once on each operand set of ``indices`` and time it, after ``settle`` seconds.

        ``settle`` seconds of the same launches come first, unmeasured and without a pause.
        ``paced`` asks for the time at the host's own pace, gaps and all.
        """
        ...

    def wake(self) -> None:
        """After a pause: bring the device to the clocks of work."""
        ...

    def now(self) -> float:
        """Seconds on a clock of the host that never goes back."""
        ...


class CpuClock:
    """``perf_counter_ns`` around a loop of calls: on a CPU, a call returns when it is done.

    Many short batches repeat better than few long ones in the same time: a virtual machine's
    speed changes by the second, and a median over many moments does not follow it.
    """

    batch_seconds = 5e-4
    most_launches = 100_000

    def time(
        self, launch: LaunchCall, indices: Sequence[int], settle: float = 0.0, paced: bool = False
    ) -> Timing:
        """Time the batch on the calling thread."""
        begin = time.perf_counter_ns()
        while settle and (time.perf_counter_ns() - begin) < settle * 1e9:
            launch(indices[0])
        begin = time.perf_counter_ns()
        for index in indices:
            launch(index)
        return Timing((time.perf_counter_ns() - begin) * 1e-9)

    def wake(self) -> None:
        """Nothing: a case's own check and first launches wake a CPU."""

    def now(self) -> float:
        """``time.monotonic``."""
        return time.monotonic()


class CudaClock:
    """CUDA events around launches that queue behind a spinning kernel.

    The host needs longer to launch a small kernel than the GPU to run it. So the GPU is kept
    spinning while the batch is queued, and the batch then runs back to back. If the spin was over
    before the last launch was queued, gaps may show: the spin is made longer and the batch is
    timed again. Events resolve about half a microsecond and cost about one: 0.4 % of a batch.
    """

    batch_seconds = 3e-4
    most_launches = 900  # the driver blocks at about a thousand pending launches

    def __init__(self, torch: Any, device: str) -> None:
        """``torch`` is the module, so that tests can run the logic on a fake of it."""
        self._torch = torch
        self._cuda = torch.cuda
        self._device = device
        # What one launch takes on the host: learned of each, because they differ tenfold.
        self._queue_seconds: WeakKeyDictionary[LaunchCall, float] = WeakKeyDictionary()
        self._cycles_per_second = self._spin_rate()
        self._product: Any = None

    def time(
        self, launch: LaunchCall, indices: Sequence[int], settle: float = 0.0, paced: bool = False
    ) -> Timing:
        """Time the batch on the current stream; try up to four times to hide its gaps."""
        for _ in range(4):
            timing, spin = self._once(launch, indices, settle, paced)
            if timing.hidden or spin >= _LONGEST_SPIN:
                break
        return timing

    def _once(
        self, launch: LaunchCall, indices: Sequence[int], settle: float, paced: bool
    ) -> tuple[Timing, float]:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        known = self._queue_seconds.get(launch, _FIRST_QUEUE_SECONDS)
        spin = min(5e-5 + known * len(indices), _LONGEST_SPIN)
        if settle:
            self._settle(launch, indices, settle)
        elif not paced:
            self._cuda._sleep(int(spin * self._cycles_per_second))
        queued = self.now()
        begin.record()
        for index in indices:
            launch(index)
        end.record()
        # Once the first event has happened the spin is over: it must not have, yet.
        hidden = paced or bool(settle) or not begin.query()
        each = (self.now() - queued) / len(indices)
        # A launch that waited for the device looks slow; the next, quicker one forgets it.
        self._queue_seconds[launch] = 1.3 * each if not hidden else max(0.7 * known, 1.3 * each)
        end.synchronize()
        return Timing(begin.elapsed_time(end) * 1e-3, hidden), spin

    def _settle(self, launch: LaunchCall, indices: Sequence[int], seconds: float) -> None:
        """Keep the device busy, one batch running and one queued behind it."""
        start, previous = self.now(), None
        while self.now() - start < seconds:
            for index in indices:
                launch(index)
            queued = self._cuda.Event()
            queued.record()
            if previous is not None:
                previous.synchronize()
            previous = queued

    def wake(self) -> None:
        """0.3 s of large matrix products, after which clocks and power are those of work."""
        if self._product is None:
            dtype = self._torch.float16
            a, b = (
                self._torch.randn(4096, 4096, device=self._device, dtype=dtype) for _ in range(2)
            )
            self._product = (a, b, self._torch.empty_like(a))
        a, b, out = self._product
        begin = self.now()
        while self.now() - begin < 0.3:
            for _ in range(20):
                self._torch.mm(a, b, out=out)
            self._cuda.synchronize(self._device)

    def now(self) -> float:
        """``time.monotonic``."""
        return time.monotonic()

    def _spin_rate(self) -> float:
        """Cycles of the spinning kernel in a second, at the clock of the moment."""
        cycles = 2_000_000
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        best = 0.0
        for _ in range(5):  # the first loads the kernel, and an idle GPU's clock has to rise
            begin.record()
            self._cuda._sleep(cycles)
            end.record()
            end.synchronize()
            best = max(best, cycles / max(begin.elapsed_time(end) * 1e-3, 1e-6))
        return best
