"""Gates that hold a GPU's stream while the host queues a batch behind them.

The host needs longer to launch a small kernel than the GPU needs to run it. Behind a closed gate,
the launches pile up. When the gate opens, the kernels run back to back.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

HOLD_LIMIT = 0.5
"""Seconds after which a thread of :class:`HostFlag` releases a stream that is still held.

Without the release, a launch that waits for the device would never return. A launch may wait when
it first uses a module or allocates memory."""

_MIN_LIMIT, _MAX_LIMIT = 0.02, 0.1
"""Smallest and largest value, in seconds, of the limit on the length of a spin (:class:`Spin`).

The limit starts at the largest value, because under WSL and on virtual GPUs, queueing a batch can
take longer than the smallest value. If launches block (CUDA_LAUNCH_BLOCKING, a full queue), no spin
is long enough. The limit is therefore halved, down to the smallest value, after each spin that was
as long as the limit but still too short."""

_FIRST_CYCLES = 2_000_000  # length of the spins that measure the cycle rate, about 1 ms at 2 GHz
_MEASURING_SPINS = 3  # the first one also loads the kernel, so its rate is wrong

_WAIT_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: until (int32)(word - ticket) >= 0
_DRIVER = "libcuda.so.1"


class Gate(Protocol):
    """Gate that a clock uses to hold a stream."""

    def close(self, seconds: float) -> None:
        """Hold the current stream. ``seconds`` is the expected time to queue the batch."""
        ...

    def open(self) -> None:
        """Release the stream after the batch has been queued or queueing has failed."""
        ...

    def learn(self, first: Any, hidden: bool) -> None:
        """Update the gate's estimates after the device has passed the first event of a batch.

        ``first`` is that event. ``hidden`` is True if the gate held until everything was queued.
        """
        ...


class HostFlag:
    """Gate that holds the stream until the host writes to a word of pinned memory.

    Each batch waits for its own number, the ticket, so that a late release of one batch never
    releases the next. A background thread enforces :data:`HOLD_LIMIT`. The thread needs Python's
    global interpreter lock, which PyTorch and Triton release while they launch. A launch that kept
    the lock while it waited for the device would hang.
    """

    def __init__(self, torch: Any, driver: Any, now: Callable[[], float] = time.monotonic) -> None:
        """Pin the word, hold the stream once as a test, and start the background thread.

        Raises:
            OSError: if the driver cannot hold a stream in this way.
            AttributeError: if the driver lacks a function that the gate needs.
        """
        self._cuda = torch.cuda
        self._driver = driver
        self._now = now
        self._memory = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._word = ctypes.c_uint32.from_address(self._memory.data_ptr())
        self._address = ctypes.c_uint64()
        self._call(
            "cuMemHostGetDevicePointer_v2",
            ctypes.byref(self._address),
            ctypes.c_void_p(self._memory.data_ptr()),
            ctypes.c_uint(0),
        )
        self._ticket = 0
        # Ticket and time of the held batch, or None. They are in one tuple, so that the watching
        # thread never pairs the time of one batch with the ticket of the next.
        self._held: tuple[int, float] | None = None
        self.close(0.0)  # a driver that cannot hold a stream raises here, before any batch
        self.open()
        threading.Thread(target=self._watch, daemon=True, name="gate").start()

    def close(self, seconds: float) -> None:
        """Queue the wait for the next ticket; ``seconds`` is ignored."""
        self._ticket = (self._ticket + 1) % 2**32
        # This is set before the wait is queued, so that the thread can end the wait in any case.
        self._held = (self._ticket, self._now())
        stream = ctypes.c_void_p(self._cuda.current_stream().cuda_stream)
        ticket, flags = ctypes.c_uint32(self._ticket), ctypes.c_uint(_WAIT_GEQ)
        self._call("cuStreamWaitValue32_v2", stream, self._address, ticket, flags)

    def open(self) -> None:
        """Write the ticket, which releases the stream."""
        self._word.value = self._ticket
        self._held = None

    def learn(self, first: Any, hidden: bool) -> None:
        """Do nothing, because this gate needs no estimates."""

    def check(self) -> None:
        """Release the stream if it has been held for too long."""
        held = self._held  # read once, because the main thread may change it at any moment
        if held is None:
            return
        ticket, since = held
        if self._now() - since > HOLD_LIMIT:
            self._word.value = ticket

    def _watch(self) -> None:
        while True:
            time.sleep(HOLD_LIMIT / 5)
            self.check()

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver, and raise an OSError if it reports an error."""
        code = getattr(self._driver, name)(*arguments)
        if code:
            self._held = None  # nothing was queued, so there is nothing to release
            raise OSError(f"{name} returned {code}")


class Spin:
    """Gate that holds the stream with a kernel that spins until queueing should have ended.

    The argument of ``torch.cuda._sleep`` is a number of cycles. A busy GPU has up to five times as
    many cycles per second as an idle one, so this cycle rate is measured with every spin.
    """

    def __init__(self, torch: Any) -> None:
        """Measure the cycle rate of the GPU, which must already run at its working clock rate."""
        self._cuda = torch.cuda
        self._start = torch.cuda.Event(enable_timing=True)
        self._factor = 1.0  # length of a spin relative to the expected queueing time
        self._limit = _MAX_LIMIT
        self._at_limit = False  # True if the latest spin was as long as the limit
        self._cycles = _FIRST_CYCLES  # length of the latest spin
        self._rate = 1e9  # cycles per second; a guess, which the first spins replace
        for _ in range(_MEASURING_SPINS):
            first = torch.cuda.Event(enable_timing=True)
            self._start.record()
            self._cuda._sleep(self._cycles)
            first.record()
            first.synchronize()
            self.learn(first, hidden=True)

    def close(self, seconds: float) -> None:
        """Queue the spin."""
        # The expected queueing time is inaccurate for short batches, so 50 µs are added to it.
        spin = min(self._factor * (5e-5 + seconds), self._limit)
        self._at_limit = spin == self._limit
        self._cycles = int(spin * self._rate)
        self._start.record()
        self._cuda._sleep(self._cycles)

    def open(self) -> None:
        """Do nothing: the spin ends by itself."""

    def learn(self, first: Any, hidden: bool) -> None:
        """Update the cycle rate, and the factor and the limit for the length of the next spin."""
        elapsed_seconds = self._start.elapsed_time(first) * 1e-3
        # The time may be 0, because events have a resolution of about 0.5 µs.
        self._rate = self._cycles / max(elapsed_seconds, 1e-6)
        # The factor is halved after each hidden batch, so that one slow moment of the host has no
        # lasting cost.
        self._factor = max(1.0, self._factor / 2) if hidden else 2 * self._factor
        if self._at_limit and not hidden:
            self._limit = max(_MIN_LIMIT, self._limit / 2)


def new_gate(torch: Any) -> Gate:
    """Create a :class:`HostFlag` if the driver supports it, else a :class:`Spin`.

    The GPU must already run at its working clock rate, because :class:`Spin` measures that rate.
    """
    try:
        return HostFlag(torch, ctypes.CDLL(_DRIVER))
    except (OSError, AttributeError):  # the driver or its function is missing, or fails
        return Spin(torch)
