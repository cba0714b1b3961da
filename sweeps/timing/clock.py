"""Clocks that launch a batch and measure how long the device needs for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from sweeps.timing.gate import Gate, Spin, new_gate

LaunchCall = Callable[[int], object]

_WAKE_SECONDS = 0.3  # busy time after which a GPU's clocks have left their idle level
_WAKE_SIZE = 4096  # rows and columns of the matrices that keep the GPU busy
_WAKE_LAUNCHES = 20  # multiplications between two looks at the time

_TRIES = 4  # attempts to time a batch without visible launch gaps


@dataclass(frozen=True)
class Timing:
    """Result of timing one batch.

    ``seconds`` is the time of the whole batch. ``hidden`` is False if that time may include gaps
    between launches that the clock failed to hide. ``last`` is what the last launch returned.
    ``sm_mhz`` is the mean clock rate of the SMs in MHz, or None if it is not known.
    """

    seconds: float
    hidden: bool = True
    last: object = None
    sm_mhz: float | None = None


def do_nothing() -> None:
    """Do nothing."""


class SmClock(Protocol):
    """Interface for reading the clock rate of a GPU's SMs in stream order."""

    def mark(self, number: int) -> None:
        """Read the clock. ``number`` is 0 before a batch and 1 after it."""
        ...

    def mhz(self) -> float | None:
        """Return the mean clock rate in MHz between the two marks, or None if it is not known."""
        ...


class Clock(Protocol):
    """Interface through which the sampler uses a device's clock."""

    batch_seconds: float
    """Length of a burst-mode batch in seconds, long enough to keep the clock's error below 0.5%."""

    max_launches: int
    """Largest number of launches in a batch."""

    def time(
        self,
        launch: LaunchCall,
        indices: Sequence[int],
        before: Callable[[], object] = do_nothing,
        settle: float = 0.0,
        paced: bool = False,
    ) -> Timing:
        """Launch once for each of ``indices``, in order, and time these launches as one batch.

        Args:
            launch: function that is called with the index of an operand set and launches on it.
            indices: index of each launch's operand set; at least one.
            before: untimed function that is called right before the batch, for example to flush the
                cache. It is called again if the batch is timed again.
            settle: seconds of untimed launches, directly followed by ``before`` and the batch.
            paced: True to include the gaps between launches in the time instead of hiding them.
        """
        ...

    def wake(self) -> None:
        """Bring the device back to its working clock rates after a pause."""
        ...

    def now(self) -> float:
        """Return the time of a monotonic clock of the host, in seconds."""
        ...


class CpuClock:
    """Clock that reads ``perf_counter_ns`` before and after a loop of launches on a CPU.

    On a CPU, a launch returns when its work is done.

    Batches are short because the speed of a virtual machine changes from second to second. Many
    short batches sample more moments than a few long ones, so their median is more repeatable.
    """

    batch_seconds = 5e-4
    max_launches = 100_000

    def time(
        self,
        launch: LaunchCall,
        indices: Sequence[int],
        before: Callable[[], object] = do_nothing,
        settle: float = 0.0,
        paced: bool = False,
    ) -> Timing:
        """Time the batch on the calling thread.

        ``paced`` has no effect, because the gaps between launches are always part of the time.
        """
        settling_began = time.perf_counter_ns()
        while settle and (time.perf_counter_ns() - settling_began) < settle * 1e9:
            launch(indices[0])
        before()
        # Only the result of the last launch is needed. That launch is outside the loop, so that no
        # other launch is timed together with an assignment.
        *first, final = indices
        begin = time.perf_counter_ns()
        for index in first:
            launch(index)
        last = launch(final)
        return Timing((time.perf_counter_ns() - begin) * 1e-9, last=last)

    def wake(self) -> None:
        """Do nothing, because the check and the first launches of a case already wake a CPU."""

    def now(self) -> float:
        """Return the time of ``time.monotonic`` in seconds."""
        return time.monotonic()


class CudaClock:
    """Clock that records one CUDA event before a batch of launches on a GPU and one after it.

    CUDA events take about 1 µs, which is under 0.5% of a batch.

    The launches are usually queued behind a closed gate (:mod:`sweeps.timing.gate`). If the GPU
    began a batch before the last launch was queued, gaps between the launches may show. The batch
    is then timed again, up to three times. Before the second attempt, one launch runs with the gate
    open. That launch allocates any memory that PyTorch has returned to the device since the last
    batch; behind a closed gate, the allocation would wait for the device.
    """

    batch_seconds = 3e-4
    max_launches = 900  # the driver blocks at about a thousand pending launches

    def __init__(
        self,
        torch: Any,
        device: str,
        make_gate: Callable[[Any], Gate] = new_gate,
        sm_clock: SmClock | None = None,
    ) -> None:
        """Wake the device, and create its gate."""
        self._torch = torch
        self._sm_clock = sm_clock
        self._cuda = torch.cuda
        self._device = device
        # Seconds that the host needs to queue one launch. They are estimated for each callable,
        # because callables differ tenfold.
        self._queue_seconds: WeakKeyDictionary[LaunchCall, float] = WeakKeyDictionary()
        self._wake_matrices: Any = None  # two factors and the result
        self.wake()  # a Spin measures the GPU's clock rate when it is made, so the GPU must be busy
        self._gate = make_gate(torch)
        self._spin = self._gate if isinstance(self._gate, Spin) else None
        # Launches that wait for the device themselves. Behind the host's flag, the launch and the
        # device would wait for each other until the flag's time limit. Launches are added here when
        # even a repeated batch of them shows gaps. A spin then holds the stream for them.
        self._spun: WeakSet[LaunchCall] = WeakSet()

    def time(
        self,
        launch: LaunchCall,
        indices: Sequence[int],
        before: Callable[[], object] = do_nothing,
        settle: float = 0.0,
        paced: bool = False,
    ) -> Timing:
        """Time the batch on the current stream."""
        if launch not in self._queue_seconds:
            self._launch_first(launch, indices[0])
        for attempt in range(_TRIES):
            if attempt == 1:  # as the class explains, the launch may have to allocate memory again
                self._launch_first(launch, indices[0])
            if settle:
                self._settle(launch, indices, settle)
            before()
            # Settling leaves a batch queued, which hides the gaps without a gate. A paced batch
            # keeps its gaps.
            gate = None if settle or paced else self._gate_of(launch)
            timing = self._once(launch, indices, gate)
            if timing.hidden:
                break
            if attempt:  # even a repeated batch shows gaps
                self._spun.add(launch)
        return timing

    def _gate_of(self, launch: LaunchCall) -> Gate:
        if launch not in self._spun:
            return self._gate
        if self._spin is None:
            self._spin = Spin(self._torch)
        return self._spin

    def _launch_first(self, launch: LaunchCall, index: int) -> None:
        """Launch once with the gate open.

        The first launch of a kernel may load a CUDA module and wait for the device. Behind a closed
        gate, that launch would not return before the gate's time limit.
        """
        begin = self.now()
        launch(index)
        # An earlier estimate from a whole batch is better than this one, so it is kept.
        self._queue_seconds.setdefault(launch, self.now() - begin)
        self._cuda.synchronize(self._device)

    def _once(self, launch: LaunchCall, indices: Sequence[int], gate: Gate | None) -> Timing:
        # 1. Close the gate. A spin needs to know how long queueing the batch should take.
        begin = self._cuda.Event(enable_timing=True)
        end = self._cuda.Event(enable_timing=True)
        seconds_per_launch = self._queue_seconds[launch]
        if gate is not None:
            gate.close(seconds_per_launch * len(indices))
        # 2. Queue the batch between its two events.
        *first, final = indices
        if self._sm_clock is not None:
            self._sm_clock.mark(0)
        queueing_began = self.now()
        begin.record()
        try:
            for index in first:
                launch(index)
            last = launch(final)
            end.record()
            # The first event completes when the gate releases the stream. If it has completed by
            # now, part of the batch ran while the rest was still being queued.
            hidden = gate is None or not begin.query()
        finally:
            if gate is not None:  # even after an exception, the stream must not stay held
                gate.open()
        # 3. Estimate the host's seconds per launch, with a margin of 30%. The estimate rises at
        # once, and falls by at most 30% per hidden batch, so that one quick batch does not make the
        # next spin too short.
        launch_seconds = (self.now() - queueing_began) / len(indices)
        estimate = 1.3 * launch_seconds
        if hidden:
            estimate = max(0.7 * seconds_per_launch, estimate)
        self._queue_seconds[launch] = estimate
        # 4. Wait for the device, and read what the gate and the clocks measured.
        if self._sm_clock is not None:
            self._sm_clock.mark(1)
        end.synchronize()
        if gate is not None:
            gate.learn(begin, hidden)
        sm_mhz = None if self._sm_clock is None else self._sm_clock.mhz()
        return Timing(begin.elapsed_time(end) * 1e-3, hidden, last, sm_mhz)

    def _settle(self, launch: LaunchCall, indices: Sequence[int], seconds: float) -> None:
        """Keep the device busy for ``seconds``, with one batch running and one queued behind it."""
        begin = self.now()
        previous_end = None  # event at the end of the batch before
        while self.now() - begin < seconds:
            for index in indices:
                launch(index)
            end = self._cuda.Event()
            end.record()
            # While the host waits here, the batch that it has just queued keeps the device busy.
            if previous_end is not None:
                previous_end.synchronize()
            previous_end = end

    def wake(self) -> None:
        """Multiply large matrices for 0.3 s, so that the GPU's clocks leave their idle level."""
        if self._wake_matrices is None:
            dtype = self._torch.float16
            a = self._torch.randn(_WAKE_SIZE, _WAKE_SIZE, device=self._device, dtype=dtype)
            b = self._torch.randn(_WAKE_SIZE, _WAKE_SIZE, device=self._device, dtype=dtype)
            self._wake_matrices = (a, b, self._torch.empty_like(a))
        a, b, out = self._wake_matrices
        begin = self.now()
        while self.now() - begin < _WAKE_SECONDS:
            for _ in range(_WAKE_LAUNCHES):
                self._torch.mm(a, b, out=out)
            self._cuda.synchronize(self._device)

    def now(self) -> float:
        """Return the time of ``time.monotonic`` in seconds."""
        return time.monotonic()
