"""Measure a CPU's ceilings: its peak for each dtype, and its memory bandwidth.

No datasheet gives the speed of a virtual machine's share of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from kernels import implementations
from kernels.device import Device, select_device
from kernels.machine import Machine, cpu_machine
from kernels.operands import random_operands
from kernels.problem import Gemm
from kernels.registry import library_for
from sweeps.timing.clock import CpuClock

_MAX_LAUNCHES = 20
_MIN_LAUNCHES = 3
_SECONDS = 0.5  # total time after which no launch beyond _MIN_LAUNCHES begins
_SIZE = 1024  # M, N and K of the GEMM that measures a peak
_EMULATED_SIZE = 256  # M, N and K for an emulated dtype, which is much slower
_COPY_BYTES = 1 << 28  # size of the copied tensor, 256 MiB


def measured_device(kind: str, gpu: int) -> Device:
    """Return the requested device, after measuring its ceilings if it is a CPU.

    Raises:
        UserError: if :func:`select_device` refuses the arguments or cannot use the device.
    """
    device = select_device(kind, gpu)
    return with_measured_ceilings(device) if device.gpu is None else device


def with_measured_ceilings(device: Device) -> Device:
    """Return a copy of a CPU device with measured peaks (FLOP/s) and bandwidth (bytes/s)."""
    peaks, bandwidth = measure_ceilings(device.machine, device.machine.peaks)
    return replace(device, machine=cpu_machine(peaks, bandwidth, device.machine.sms))


def measure_ceilings(machine: Machine, dtypes: Iterable[str]) -> tuple[dict[str, float], float]:
    """Measure this CPU's current peaks (FLOP/s by dtype) and its memory bandwidth (bytes/s).

    A GEMM of size 1024³, or 256³ for an emulated dtype, is launched up to 20 times, and its best
    rate is the peak. A tensor of 256 MiB is copied up to 20 times, and the best rate is the
    bandwidth. The rate includes both the bytes read and the bytes written.
    """
    clock = CpuClock()
    # 1. Measure the peaks with a GEMM of each dtype.
    peaks = {}
    for dtype in dtypes:
        size = _EMULATED_SIZE if dtype in machine.emulated else _SIZE
        problem = Gemm(size, size, size, dtype)
        implementation = implementations()[library_for(problem, machine)]
        launch = implementation.prepare(problem, [random_operands(problem, "cpu")])
        # This untimed launch is the warm-up: it initialises the library and touches all memory.
        launch(0)
        with launch.settings():
            peaks[dtype] = problem.flops / _best_seconds(clock, launch.bare)
    # 2. Measure the bandwidth with a copy.
    source = torch.ones(_COPY_BYTES // 4)  # PyTorch's default dtype has four bytes
    target = torch.empty_like(source)
    # The first copy is a warm-up, too: it makes the system provide the target's memory pages.
    target.copy_(source)
    copy_seconds = _best_seconds(clock, lambda _: target.copy_(source))
    return peaks, 2 * _COPY_BYTES / copy_seconds


def _best_seconds(clock: CpuClock, launch: Callable[[int], object]) -> float:
    """Call ``launch`` 3 to 20 times with index 0, and return the seconds of the fastest call."""
    times: list[float] = []
    while len(times) < _MAX_LAUNCHES and (len(times) < _MIN_LAUNCHES or sum(times) < _SECONDS):
        times.append(clock.time(launch, [0]).seconds)
    return min(times)


def emulated_sentence(machine: Machine) -> str:
    """Return a sentence about the speed of each emulated dtype, or "" if no dtype is emulated."""
    sentences = []
    for dtype in machine.emulated:
        slowdown = machine.peak("fp32") / machine.peak(dtype)
        sentences.append(
            f"GEMMs in {dtype} take {slowdown:,.1f} times as long as in fp32, because this CPU has "
            f"no {dtype} instructions. Most sweeps leave {dtype} out; use `--dtype {dtype}` to "
            "measure it."
        )
    return " ".join(sentences)
