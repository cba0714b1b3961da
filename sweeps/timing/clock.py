"""Clocks: they launch a batch and say how long the device took, without the launch gaps.

A clock knows nothing of kernels; the sampler gives it a callable. Tests give the sampler a clock
that invents its times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from sweeps.timing.gate import Gate, Spin, open_gate

LaunchCall = Callable[[int], object]

_TRIES = 4


@dataclass(frozen=True)
class Timing:
    """Seconds of a whole batch, whether every gap between its launches was hidden, and what its
    last launch returned.
    """

    seconds: float
    hidden: bool = True
    last: object = None


def nothing() -> None:
    """What precedes a batch that needs no preparation."""


class Clock(Protocol):
    """What the sampler needs of a device's time."""

    batch_seconds: float
    """How long a burst should be, so that the clock's own error stays under half a percent."""

    most_launches: int
    """How many launches may be in flight at once."""

    def time(
        self,
        launch: LaunchCall,
        indices: Sequence[int],
        before: Callable[[], object] = nothing,
        settle: float = 0.0,
        paced: bool = False,
    ) -> Timing:
        """Launch once on each operand set of ``indices`` and time it.

        Args:
            launch: launches once on the set of an index.
            indices: the sets, in order.
            before: what comes right before the batch, unmeasured: a cache flush, say. A batch that
                is timed again has it again.
            settle: seconds of the same launches that come first of all, unmeasured and without a
                pause.
            paced: asks for the time at the host's own pace, gaps and all.
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
        self,
        launch: LaunchCall,
        indices: Sequence[int],
        before: Callable[[], object] = nothing,
        settle: float = 0.0,
        paced: bool = False,
    ) -> Timing:
        """Time the batch on the calling thread."""
        begin = time.perf_counter_ns()
        while settle and (time.perf_counter_ns() - begin) < settle * 1e9:
            launch(indices[0])
        before()
        *most, final = indices
        begin = time.perf_counter_ns()
        for index in most:
            launch(index)
        last = launch(final)
        return Timing((time.perf_counter_ns() - begin) * 1e-9, last=last)

    def wake(self) -> None:
        """Nothing: a case's own check and first launches wake a CPU."""

    def now(self) -> float:
        """``time.monotonic``."""
        return time.monotonic()


class CudaClock:
    """CUDA events around launches that queue behind a closed gate (:mod:`sweeps.timing.gate`).

    If the batch began before its last launch was queued, gaps between the launches may show: it is
    timed again, up to four times, from what comes ``before`` it on. Events resolve about half a
    microsecond and cost about one: 0.4 % of a batch.
    """

    batch_seconds = 3e-4
    most_launches = 900  # the driver blocks at about a thousand pending launches

    def __init__(
        self, torch: Any, device: str, make_gate: Callable[[Any], Gate] = open_gate
    ) -> None:
        """``torch`` is the module, so that tests can run the logic on a fake of it."""
        self._torch = torch
        self._cuda = torch.cuda
        self._device = device
        # What one launch takes on the host: learned of each, because they differ tenfold.
        self._queue_seconds: WeakKeyDictionary[LaunchCall, float] = WeakKeyDictionary()
        self._product: Any = None
        self.wake()  # a spin learns its rate here, which must be that of the working clock
        self._gate = make_gate(torch)
        self._spin = self._gate if isinstance(self._gate, Spin) else None
        # Launches that the host's flag could not hold: they wait for the device.
        self._spun: WeakSet[LaunchCall] = WeakSet()

    def time(
        self,
        launch: LaunchCall,
        indices: Sequence[int],
        before: Callable[[], object] = nothing,
        settle: float = 0.0,
        paced: bool = False,
    ) -> Timing:
        """Time the batch on the current stream; try up to four times to hide its gaps."""
        if launch not in self._queue_seconds:
            self._launch_first(launch, indices[0])
        for _ in range(_TRIES):
            if settle:
                self._settle(launch, indices, settle)
            before()
            timing = self._once(launch, indices, None if settle or paced else self._gate_of(launch))
            if timing.hidden:
                break
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

        A first use may load a module, which waits for the device: behind a closed gate, for ever.
        """
        begin = self.now()
        launch(index)
        self._queue_seconds[launch] = self.now() - begin
        self._cuda.synchronize(self._device)

    def _once(self, launch: LaunchCall, indices: Sequence[int], gate: Gate | None) -> Timing:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        known = self._queue_seconds[launch]
        if gate is not None:
            gate.close(known * len(indices))
        *most, final = indices
        queued = self.now()
        begin.record()
        try:
            for index in most:
                launch(index)
            last = launch(final)
            end.record()
            # Once the first event has happened the gate is open: it must not have, yet.
            hidden = gate is None or not begin.query()
        finally:
            if gate is not None:  # whatever a launch throws, the stream must not stay held
                gate.open()
        each = (self.now() - queued) / len(indices)
        # A launch that waited for the device looks slow; the next, quicker one forgets it.
        self._queue_seconds[launch] = 1.3 * each if not hidden else max(0.7 * known, 1.3 * each)
        end.synchronize()
        if gate is not None:
            gate.learn(begin, hidden)
        return Timing(begin.elapsed_time(end) * 1e-3, hidden, last)

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
