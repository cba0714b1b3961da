"""Implement ``sweeps doctor``: describe the machine, and warn of what may spoil its timings."""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels import implementations
from kernels.common.counts import counted
from kernels.common.program import command, extra
from kernels.config import HAND_WRITTEN
from kernels.device import Device, clock_khz, software
from kernels.machine import known_machines, usable_cores, usable_processors
from kernels.operation import Workload
from kernels.problem import Conv, Gemm
from sweeps.timing.telemetry import nvml_handle, open_nvml, other_processes

_MIN_DISK = 1 << 30  # bytes of free space below which a warning is given
_FACT_TOLERANCE = 0.05  # relative difference from machines.toml above which a warning is given
_HOT = 80  # °C above which a warning is given
_GOVERNORS = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"


@dataclass(frozen=True)
class DoctorFinding:
    """A fact about the machine or, if ``warning`` is true, a problem that may spoil its timings."""

    warning: bool = field(default=False, kw_only=True)
    text: str


def examine(device: Device, results: Path) -> list[DoctorFinding]:
    """Return facts and warnings about the device, the software and the results folder."""
    findings = [DoctorFinding(f"{device.machine.name} ({device.machine.slug})")]
    versions = ", ".join(f"{name} {version}" for name, version in software(device).items())
    findings.append(DoctorFinding(versions))
    if device.gpu is None:
        findings += _examine_cpu()
    else:
        findings += _examine_gpu(device)
    findings += _examine_triton(device)
    # The results folder may not exist yet, so the free space is that of its nearest parent.
    existing = next(path for path in (results, *results.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    is_full = free_bytes < _MIN_DISK
    remark = ": free some space, or choose another --results folder" if is_full else ""
    findings.append(
        DoctorFinding(f"{free_bytes / 2**30:,.1f} GiB free for results{remark}", warning=is_full)
    )
    return findings


def _examine_cpu() -> Iterator[DoctorFinding]:
    """Report threads, instruction set, load, and CPU frequency governors except ``performance``."""
    threads, usable = torch.get_num_threads(), usable_cores()
    instructions = torch.backends.cpu.get_cpu_capability()
    has_too_many = threads > usable
    remark = (
        f": set THREADS to at most {usable}, the number of usable cores" if has_too_many else ""
    )
    text = f"{counted(threads, 'thread')}, {instructions}{remark}"
    yield DoctorFinding(text, warning=has_too_many)
    # The load is that of the whole host. If this process may use only a part of the host, the load
    # may be on other cores, so the process is only disturbed for sure if the host is full.
    load = os.getloadavg()[0]
    processors = os.cpu_count() or 1
    cores = usable if usable_processors() == processors else processors
    # Each thread needs an idle core. Half a core of other work is tolerated.
    busy = load + min(threads, usable) > cores + 0.5
    remark = ": other processes disturb timings; end them, or wait" if busy else ""
    yield DoctorFinding(f"load average {load:.1f}{remark}", warning=busy)
    governors = set()
    for path in glob.glob(_GOVERNORS):
        with suppress(OSError):  # the governor of a core that is switched off cannot be read
            governors.add(Path(path).read_text(encoding="ascii").strip())
    for governor in sorted(governors - {"performance"}):
        yield DoctorFinding(
            f"CPU frequency governor {governor}: set it to performance", warning=True
        )


def _examine_triton(device: Device) -> Iterator[DoctorFinding]:
    """Report if Triton is missing and, on a GPU, whether each hand-written kernel runs here."""
    # Every hand-written kernel computes one of these problems, so only this machine can be the
    # reason for a refusal.
    sample_problems: dict[str, Workload] = {
        "gemm": Gemm(1024, 1024, 1024, "fp16"),
        "conv": Conv.parse("8,64,28,28,64,3,3,1,1,1,1,fp16"),
    }
    # The hand-written kernels are listed as implementations only if Triton is installed.
    has_triton = not HAND_WRITTEN.keys().isdisjoint(implementations())
    if not has_triton:
        # The extra contains Triton only on Linux.
        remedy = f"; {extra('measure')}" if sys.platform == "linux" else ""
        yield DoctorFinding(
            f"Triton is not installed, so hand-written kernels are skipped{remedy}",
            warning=device.gpu is not None,
        )
    for name, implementation in implementations().items():
        if name in HAND_WRITTEN and device.gpu is not None:
            sample = sample_problems[implementation.ops[0]]
            reason = implementation.supports(sample, device.machine)
            yield DoctorFinding(f"{name}: {reason or 'runs here'}", warning=reason is not None)


def _examine_gpu(device: Device) -> Iterator[DoctorFinding]:
    """Report facts about a GPU, and what may spoil its timings."""
    count = torch.cuda.device_count()
    if count > 1:
        yield DoctorFinding(
            f"{count} GPUs: this is number {device.gpu}, counted from 0. --gpu selects another; "
            f"{command('sweeps run --gpus all')} shares a run among all of them",
        )
    machine = device.machine
    if machine.slug not in known_machines():
        yield DoctorFinding(
            f"this GPU is not in machines.toml. It reports {machine.sms} SMs; its bandwidth "
            f"({machine.bandwidth / 1e9:,.0f} GB/s) and its peak rates are derived from its "
            "properties, or from a similar GPU in machines.toml",
        )
    else:
        yield from _compare_facts(device)
    if "MIG" in machine.name:
        yield DoctorFinding(
            "this is a MIG slice, which shares power and clocks with the GPU's other slices; "
            "leave those idle",
            warning=True,
        )
    nvml = open_nvml()
    handle = None
    if nvml is not None:
        handle = nvml_handle(nvml, torch.cuda.get_device_properties(device.gpu))
    if nvml is None or handle is None:
        yield DoctorFinding(
            "NVML is missing, denies access or does not list this GPU, so power, temperature and "
            "throttling are not recorded; install nvidia-ml-py, and check that `nvidia-smi` works",
            warning=True,
        )
        return
    yield from examine_nvml(nvml, handle)


def _compare_facts(device: Device) -> Iterator[DoctorFinding]:
    """Warn if the number of SMs or the bandwidth differs by more than 5% from machines.toml."""
    properties = torch.cuda.get_device_properties(device.gpu)
    # Memory transfers data twice per clock. If the clock is not known, the bandwidth is 0 here.
    memory_hz = clock_khz(properties, "memory_clock_rate") * 1e3
    bandwidth = 2 * memory_hz * properties.memory_bus_width / 8
    for unit, listed, reported in (
        ("SMs", device.machine.sms, properties.multi_processor_count),
        ("GB/s", device.machine.bandwidth / 1e9, bandwidth / 1e9),
    ):
        if reported and abs(reported / listed - 1) > _FACT_TOLERANCE:
            if reported < listed:
                remark = "part of the device may be disabled or slower than usual"
            else:
                remark = "the device may be a different variant from the one in machines.toml"
            yield DoctorFinding(
                f"machines.toml lists {listed:,.0f} {unit}, but the device reports {reported:,.0f} "
                f"{unit}; {remark}",
                warning=True,
            )


def examine_nvml(nvml: Any, handle: Any) -> Iterator[DoctorFinding]:
    """Report clocks, power limit, temperature, ECC and other processes, if NVML reports them.

    ``nvml`` is the initialised NVML module, and ``handle`` identifies the GPU in calls to it.
    """

    def ask(query: Any, *arguments: Any) -> Any:
        try:
            return query(*arguments)
        except nvml.NVMLError:
            return None

    now_mhz = ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
    highest_mhz = ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    if now_mhz is not None and highest_mhz is not None:
        yield DoctorFinding(f"SM clock is {now_mhz:,} MHz now, {highest_mhz:,} MHz at most")
    limit_mw = ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    default_mw = ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    if limit_mw is not None:
        is_capped = default_mw is not None and limit_mw < default_mw
        remark = f", below its default of {default_mw / 1e3:.0f} W" if is_capped else ""
        yield DoctorFinding(f"power limit {limit_mw / 1e3:.0f} W{remark}", warning=is_capped)
    temperature = ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    if temperature is not None:
        is_hot = temperature > _HOT
        remark = ": the clock may drop; wait, or improve the cooling" if is_hot else ""
        yield DoctorFinding(f"{temperature} °C{remark}", warning=is_hot)
    ecc_modes = ask(nvml.nvmlDeviceGetEccMode, handle)
    if ecc_modes is not None:
        current_mode = ecc_modes[0]  # the other mode would apply after a restart
        yield DoctorFinding(f"ECC {'on' if current_mode else 'off'}")
    other_count = other_processes(nvml, handle)
    if other_count:
        yield DoctorFinding(
            f"{counted(other_count, 'other process', 'other processes')} on this GPU: stop all "
            "other work on it, or timings will be wrong",
            warning=True,
        )
