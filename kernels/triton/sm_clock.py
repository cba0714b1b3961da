"""Mean clock of the SMs during a batch.

NVML is polled every 50 ms, which is too slow for a batch of 0.3 ms. Instead, a tiny kernel reads
the SMs' cycle counters and the GPU's time before and after a batch. If a batch reaches, for
example, only 75% of the peak FLOP/s, the mean clock shows whether the measured kernel is slow, or
whether the SMs ran at 75% of their peak clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

_MARKS = 2  # one before a batch, one after it
_LEAST_NANOSECONDS = 50_000
"""Shortest time, in nanoseconds, between two readings from which a clock is computed.

On some GPUs, the nanosecond counter advances in steps of about 1,000 ns, or 2% of this time.
"""


@triton.jit
def read_counters(out_ptr):
    """Store three int64 numbers in this CTA's row of ``out`` (CTAs, 3).

    The numbers are the index of the SM on which the CTA runs, the cycle counter of this SM, and the
    GPU's time in nanoseconds.
    """
    place = out_ptr + tl.program_id(0) * 3
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    nanoseconds = globaltimer()
    tl.store(place, smid().to(tl.int64))
    tl.store(place + 1, cycles)
    tl.store(place + 2, nanoseconds)


class TritonSmClock:
    """Reader of the SMs' counters at two marks in a stream: one before a batch and one after it."""

    def __init__(self, sms: int, device: str) -> None:
        """Compile the kernel, and launch it once for each mark.

        Raises:
            Exception: any error of Triton's compiler or of the launch.
        """
        self._sms = sms
        self._readings = torch.zeros((_MARKS, sms, 3), dtype=torch.int64, device=device)
        for number in range(_MARKS):
            self.mark(number)

    def mark(self, number: int) -> None:
        """Read the counters; ``number`` is 0 before a batch and 1 after it."""
        read_counters[(self._sms,)](self._readings[number], num_warps=1)

    def mhz(self) -> float | None:
        """Return the SMs' mean clock in MHz between the two marks, or None if it is not known.

        The call waits until the device has passed the second mark, and then computes the clock with
        :func:`mean_mhz`.
        """
        first, last = self._readings.tolist()
        return mean_mhz(_counters(first), _counters(last))


def mean_mhz(
    first: Mapping[int, tuple[int, int]], last: Mapping[int, tuple[int, int]]
) -> float | None:
    """Return the median of the SMs' mean clocks between two readings, in MHz.

    A reading maps the indices of SMs to (cycles, nanoseconds), and may lack some SMs. An SM counts
    only if it is in both readings, its times are at least 50 µs apart, and its cycle counter has
    advanced. The result is None if no SM counts.
    """
    clocks = []
    for sm in first.keys() & last.keys():
        first_cycles, first_nanoseconds = first[sm]
        last_cycles, last_nanoseconds = last[sm]
        cycles = last_cycles - first_cycles
        nanoseconds = last_nanoseconds - first_nanoseconds
        if nanoseconds >= _LEAST_NANOSECONDS and cycles > 0:
            clocks.append(cycles / nanoseconds * 1e3)  # cycles per nanosecond are GHz
    return median(clocks) if clocks else None


def _counters(rows: Iterable[list[int]]) -> dict[int, tuple[int, int]]:
    return {sm: (cycles, nanoseconds) for sm, cycles, nanoseconds in rows}
