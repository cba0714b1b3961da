"""A CPU's ceilings, measured: no datasheet says what a virtual machine's share of a CPU can do."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels import implementations
from kernels.device import Device, select_device
from kernels.machine import of_cpu
from kernels.operands import random_operands
from kernels.problem import Gemm
from kernels.registry import library_for
from sweeps.timing.clock import CpuClock

_PASSES = 20
_SIZE = 1024
_COPY_BYTES = 1 << 28


def measured_device(kind: str, gpu: int) -> Device:
    """The device that is asked for, a CPU with its ceilings measured."""
    device = select_device(kind, gpu)
    return measure_ceilings(device) if device.gpu is None else device


def measure_ceilings(device: Device) -> Device:
    """The same CPU with its peaks (FLOP/s by dtype) and bandwidth (bytes/s) filled in.

    A peak is the best of 20 products of 1024³, the bandwidth the best of 20 copies of 256 MiB,
    read and written. A case may still come out a little above either.
    """
    clock = CpuClock()
    peaks = {}
    for dtype in device.machine.peaks:
        problem = Gemm(_SIZE, _SIZE, _SIZE, dtype)
        implementation = implementations()[library_for(problem, device.machine)]
        launch = implementation.prepare(problem, [random_operands(problem, "cpu")])
        launch(0)
        with launch.settings():
            best = min(clock.time(launch.bare, [0]).seconds for _ in range(_PASSES))
        peaks[dtype] = problem.flops / best
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(clock.time(lambda _: target.copy_(source), [0]).seconds for _ in range(_PASSES))
    bandwidth = 2 * _COPY_BYTES / best
    return replace(device, machine=of_cpu(peaks, bandwidth, device.machine.sms))
