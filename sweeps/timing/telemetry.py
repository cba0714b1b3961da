"""Read clocks, power, temperature and throttle reasons through NVML at 20 Hz, during the timing.

NVML's own index ignores ``CUDA_VISIBLE_DEVICES``, so the GPU is found by its UUID or PCI address. A
MIG slice has no sensors, so its parent is read. If NVML is missing or refuses, every reading is
empty and nothing else changes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from sweeps.timing.statistics import median

_PERIOD = 0.05
_KEEP = 20 * 60 * 20  # twenty minutes of readings

# Bits of nvmlClocksEventReasons (nvml.h). Idling and clock settings do not count as throttling.
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
RETRY = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"})
"""Throttle reasons for which a sample is taken again.

The software power cap is normal for large GEMMs, so it is only recorded."""


_Raw = tuple[float, float | None, float | None, float | None, int]
"""Moment, SM clock, power, temperature and throttle reasons."""


@dataclass(frozen=True)
class Reading:
    """Sensor values around a span of time; None or empty where they cannot be read."""

    sm_mhz: float | None = None
    power_w: float | None = None
    temp_c: float | None = None
    throttled: tuple[str, ...] = ()


class Telemetry:
    """Telemetry without sensors, for a CPU and for a GPU without NVML."""

    def start(self) -> None:
        """Begin reading."""

    def stop(self) -> None:
        """Stop reading."""

    def between(self, begin: float, end: float) -> Reading:
        """Return the readings between two moments of ``time.monotonic`` and right around them."""
        return Reading()

    def joules(self) -> float | None:
        """Return the joules used by the board since a fixed moment; None without a counter."""
        return None

    def forget(self) -> None:
        """Wait until later readings no longer cover what was before."""


class NvmlTelemetry(Telemetry):
    """Telemetry of one GPU, which a background thread reads every 50 ms."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """Prepare reading. ``nvml`` is pynvml or a fake of it, and ``handle`` is its GPU handle."""
        self._nvml = nvml
        self._handle = handle
        self._readings: deque[_Raw] = deque(maxlen=_KEEP)
        self._lock = threading.Lock()  # the thread appends while others read
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="telemetry")

    def start(self) -> None:
        """Take a first reading and start the thread."""
        self._read()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def between(self, begin: float, end: float) -> Reading:
        """Return medians over the span, and every throttle reason that was seen in it."""
        with self._lock:
            readings = list(self._readings)
        span: list[_Raw] = []
        for reading in reversed(readings):
            if reading[0] < begin - _PERIOD and span:
                break
            if reading[0] <= end + _PERIOD:
                span.append(reading)
        reason_bits = 0
        for row in span:
            reason_bits |= row[4]
        sm_mhz = _median_or_none([row[1] for row in span])
        power_w = _median_or_none([row[2] for row in span])
        temp_c = _median_or_none([row[3] for row in span])
        reasons = tuple(name for bit, name in _REASONS.items() if reason_bits & bit)
        return Reading(sm_mhz, power_w, temp_c, reasons)

    def joules(self) -> float | None:
        """Return the board's energy counter in joules.

        NVML counts millijoules, on boards from Volta on. Return None if there is no counter.
        """
        counted = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if counted is None else counted / 1e3

    def forget(self) -> None:
        """Wait two and a half periods: one reading is new then, and old ones are out of reach."""
        time.sleep(2.5 * _PERIOD)

    def _loop(self) -> None:
        while not self._stopping.wait(_PERIOD):
            self._read()

    def _read(self) -> None:
        """Append one reading of all sensors."""
        nvml, handle = self._nvml, self._handle
        clock = self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        power = self._power()
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        watts = None if power is None else power / 1e3
        with self._lock:
            self._readings.append((time.monotonic(), clock, watts, temperature, int(reasons or 0)))

    def _power(self) -> float | None:
        """Return the power at this moment in milliwatts.

        From Ampere on (except GA100), ``nvmlDeviceGetPowerUsage`` is an average over a second and
        the field is instantaneous. On cards without the field, the call itself is instantaneous.
        """
        nvml = self._nvml
        try:
            (field,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
            if field.nvmlReturn == nvml.NVML_SUCCESS:
                return float(field.value.uiVal)
        except (nvml.NVMLError, AttributeError):  # an older driver, or an older binding
            pass
        return self._ask(nvml.nvmlDeviceGetPowerUsage, self._handle)

    def _ask(self, query: Any, *arguments: Any) -> float | None:
        """Return the value of one NVML query; None if the card or its driver lacks it."""
        try:
            return float(query(*arguments))
        except self._nvml.NVMLError:
            return None


def _median_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def open_nvml() -> Any | None:
    """Return the initialised NVML module, or None if it is missing or refuses."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library or no permission
        return None
    return pynvml


def nvml_handle(nvml: Any, properties: Any) -> Any | None:
    """Return NVML's handle of a GPU, given PyTorch's ``get_device_properties``."""
    uuid = str(getattr(properties, "uuid", ""))
    pci_ids = [getattr(properties, f"pci_{what}_id", 0) for what in ("domain", "bus", "device")]
    address = f"{pci_ids[0]:08x}:{pci_ids[1]:02x}:{pci_ids[2]:02x}.0"
    for find_handle, identifier in (
        (nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}"),
        (nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}"),
        (nvml.nvmlDeviceGetHandleByPciBusId, address),
    ):
        try:
            handle = find_handle(identifier)
            if identifier.startswith("MIG-"):
                handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        except nvml.NVMLError:
            continue
        return handle
    return None


def other_processes(nvml: Any, handle: Any) -> int:
    """Return the number of other processes that compute on a GPU; 0 if NVML cannot tell."""
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return 0
    return sum(process.pid != os.getpid() for process in processes)


def other_processes_on(gpu: int | None) -> int:
    """Return :func:`other_processes` for the GPU with an ordinal; 0 on a CPU and without NVML."""
    if gpu is None:
        return 0
    import torch

    nvml = open_nvml()
    handle = nvml and nvml_handle(nvml, torch.cuda.get_device_properties(gpu))
    return other_processes(nvml, handle) if nvml and handle is not None else 0


def is_shared(gpu: int) -> bool:
    """Return True if several processes may use a GPU at once, or if NVML cannot tell.

    In the compute modes EXCLUSIVE_PROCESS and PROHIBITED, a second process would fail.
    """
    import torch

    nvml = open_nvml()
    handle = nvml and nvml_handle(nvml, torch.cuda.get_device_properties(gpu))
    if nvml is None or handle is None:
        return True
    try:
        return bool(nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_DEFAULT)
    except nvml.NVMLError:
        return True
