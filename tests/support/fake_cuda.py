"""A made-up GPU: one stream, events, the driver's wait for a word in memory, a clock that rises.

Host and device have their own time. Work that is queued runs when the device gets there; nothing
really waits. ``host`` is the host's clock: it moves by what launching takes, and jumps where the
host waits for the device.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

Run = Callable[[float], float | None]
"""Given the moment at which it starts, when it ends; None: not before the host does something."""

IDLE_HZ, WORK_HZ = 345e6, 1980e6
"""SM clocks of an H200: as it idles and as it works."""


class FakeCuda:
    """What the clock and its gates use of ``torch.cuda``.

    ``rises`` is the seconds of work after which the clock is at its highest; kernels take longer
    before, and so do cycles. ``max_pending`` launches may be queued: the next blocks until the
    device has done one.
    """

    def __init__(
        self,
        queue_seconds: float = 5e-6,
        kernel_seconds: float = 1e-6,
        rises: float = 0.0,
        max_pending: int = 1000,
    ) -> None:
        self.host = 0.0
        self.queue_seconds, self.kernel_seconds = queue_seconds, kernel_seconds
        self.rises, self.max_pending = rises, max_pending
        self.worked = 0.0
        self.free_at = 0.0  # when the device has done everything that it has begun
        self.idle = 0.0
        self.sleeps: list[float] = []
        self.mm_seconds = 2e-4
        self.on_wait: Callable[[], object] = lambda: None
        self._queue: deque[tuple[float, Run]] = deque()
        outer = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at: float | None = None

            def record(self) -> None:
                self.at = None

                def passed(start: float) -> float:
                    self.at = start
                    return start

                outer.queue(passed)

            def query(self) -> bool:
                outer.advance()
                return self.at is not None

            def synchronize(self) -> None:
                outer.wait(lambda: self.at is not None)

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) * 1e3

        self.Event = Event

    @property
    def hertz(self) -> float:
        """The SM clock: between idle and work, by the work done so far."""
        share = min(1.0, self.worked / self.rises) if self.rises else 1.0
        return IDLE_HZ + share * (WORK_HZ - IDLE_HZ)

    def queue(self, run: Run) -> None:
        """Put work on the stream."""
        pending = self.max_pending
        self.wait(lambda: len(self._queue) < pending)
        self._queue.append((self.host, run))
        self.advance()

    def advance(self) -> None:
        """Begin what the device can have begun by now."""
        while self._queue:
            queued_at, run = self._queue[0]
            start = max(self.free_at, queued_at)
            end = run(start) if start <= self.host else None
            if end is None:
                return
            self._queue.popleft()
            self.free_at = end

    def wait(self, until: Callable[[], bool]) -> None:
        """Let the host's time go on until something has happened."""
        self.advance()
        while not until():
            coming = max(self.free_at, self._queue[0][0])
            # A stream that is held goes on only when somebody on the host lets it.
            self.host = coming if coming > self.host else self.host + 0.01
            self.on_wait()
            self.advance()

    def busy(self, seconds: float) -> None:
        """Queue a kernel that takes ``seconds`` at the clock of work."""
        queued_at = self.host

        def run(start: float) -> float:
            took = seconds * WORK_HZ / self.hertz
            self.worked += took
            self.idle += max(0.0, queued_at - self.free_at)
            return start + took

        self.queue(run)

    def _sleep(self, cycles: int) -> None:
        def run(start: float) -> float:
            took = cycles / self.hertz
            self.sleeps.append(took)
            self.worked += took
            return start + took

        self.queue(run)

    def synchronize(self, device: object = None) -> None:
        self.wait(lambda: not self._queue)
        self.host = max(self.host, self.free_at)

    def current_stream(self) -> Any:
        class Stream:
            cuda_stream = 7

        return Stream()

    def launch(self, index: int) -> None:
        self.host += self.queue_seconds
        self.busy(self.kernel_seconds)


class FakeTorch:
    """``torch`` as the clock sees it: ``mm`` keeps the device busy."""

    float16, int32 = "float16", "int32"

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def randn(self, *sizes: int, **options: Any) -> str:
        return "matrix"

    def empty_like(self, other: str) -> str:
        return "matrix"

    def mm(self, a: str, b: str, out: str) -> None:
        self.cuda.host += self.cuda.queue_seconds
        self.cuda.busy(self.cuda.mm_seconds)

    def zeros(self, count: int, dtype: str) -> Any:
        word = (ctypes.c_uint32 * count)()

        class Pinned:
            memory = word

            def pin_memory(self) -> Pinned:
                return self

            def data_ptr(self) -> int:
                return ctypes.addressof(self.memory)

        return Pinned()


class FakeDriver:
    """The driver's calls behind the host's flag: the stream waits for a word in real memory."""

    def __init__(self, cuda: FakeCuda, refuses: int = 0) -> None:
        self.cuda = cuda
        self.refuses = refuses
        self.waits = 0

    def cuMemHostGetDevicePointer_v2(self, out: Any, host: Any, flags: Any) -> int:  # noqa: N802
        out._obj.value = host.value
        return 0

    def cuStreamWaitValue32_v2(  # noqa: N802
        self, stream: Any, address: Any, ticket: Any, how: Any
    ) -> int:
        if self.refuses:
            return self.refuses
        self.waits += 1
        word = ctypes.c_uint32.from_address(address.value)
        opened: list[float] = []

        def wait(start: float) -> float | None:
            if not opened and ctypes.c_int32(word.value - ticket.value).value >= 0:
                opened.append(self.cuda.host)
            return max(start, opened[0]) if opened else None

        self.cuda.queue(wait)
        return 0
