"""Clocks, power, temperature and throttle reasons, read beside the timing at 20 Hz through NVML.

NVML's own index ignores ``CUDA_VISIBLE_DEVICES``, so the GPU is found by its UUID or PCI address;
a MIG slice has no sensors, so its parent is read. Where NVML is missing or refuses, every reading
is empty and nothing else changes.
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

# Bits of nvmlClocksEventReasons (nvml.h). Idle and the clock settings are no throttling.
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
RETRY = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"})
"""Reasons for which a sample is taken again. The software power cap is normal for large
products: it is recorded."""


_Raw = tuple[float, float | None, float | None, float | None, int]
"""Moment, SM clock, power, temperature, throttle reasons."""


@dataclass(frozen=True)
class Reading:
    """Sensor values around a span of time; None or empty where they cannot be read."""

    sm_mhz: float | None = None
    power_w: float | None = None
    temp_c: float | None = None
    throttled: tuple[str, ...] = ()


class Telemetry:
    """Reads nothing: what a CPU has, and a GPU without NVML."""

    def start(self) -> None:
        """Begin reading."""

    def stop(self) -> None:
        """Stop reading."""

    def between(self, begin: float, end: float) -> Reading:
        """Readings between two moments of ``time.monotonic``, and the nearest around them."""
        return Reading()

    def joules(self) -> float | None:
        """Energy that the board has used since some moment; None where it does not count."""
        return None

    def forget(self) -> None:
        """Wait until later readings no longer cover what was before."""


class NvmlTelemetry(Telemetry):
    """A background thread that asks one GPU every 50 ms."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """``nvml`` is the module pynvml (or a fake of it), ``handle`` its handle of the GPU."""
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
        """Medians over the span; every throttle reason that was seen in it."""
        with self._lock:
            readings = list(self._readings)
        span: list[_Raw] = []
        for reading in reversed(readings):
            if reading[0] < begin - _PERIOD and span:
                break
            if reading[0] <= end + _PERIOD:
                span.append(reading)
        seen = 0
        for row in span:
            seen |= row[4]
        sm_mhz, power_w, temp_c = (_median_or_none([row[i] for row in span]) for i in (1, 2, 3))
        reasons = tuple(name for bit, name in _REASONS.items() if seen & bit)
        return Reading(sm_mhz, power_w, temp_c, reasons)

    def joules(self) -> float | None:
        """What the board's counter says; it has one from Volta on and counts millijoules."""
        counted = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if counted is None else counted / 1e3

    def forget(self) -> None:
        """Wait two and a half periods: one reading is new then, the old ones are out of reach."""
        time.sleep(2.5 * _PERIOD)

    def _loop(self) -> None:
        while not self._stopping.wait(_PERIOD):
            self._read()

    def _read(self) -> None:
        nvml, handle = self._nvml, self._handle
        clock = self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        power = self._power()
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        watts = None if power is None else power / 1e3
        with self._lock:
            self._readings.append((time.monotonic(), clock, watts, temperature, int(reasons or 0)))

    def _power(self) -> float | None:
        """Milliwatts at this moment.

        From Ampere on (except GA100) ``nvmlDeviceGetPowerUsage`` is an average over a second and
        the field is instantaneous; on cards without the field, the call itself is.
        """
        nvml = self._nvml
        try:
            (field,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
            if field.nvmlReturn == nvml.NVML_SUCCESS:
                return float(field.value.uiVal)
        except (nvml.NVMLError, AttributeError):  # an older driver, or an older binding
            pass
        return self._ask(nvml.nvmlDeviceGetPowerUsage, self._handle)

    def _ask(self, question: Any, *arguments: Any) -> float | None:
        """One answer; None where the card or its driver does not give it."""
        try:
            return float(question(*arguments))
        except self._nvml.NVMLError:
            return None


def _median_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def open_nvml() -> Any | None:
    """The initialised NVML module, or None where it is missing or refused."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library or no permission
        return None
    return pynvml


def nvml_handle(nvml: Any, properties: Any) -> Any | None:
    """NVML's handle of a GPU, from PyTorch's ``get_device_properties``."""
    uuid = str(getattr(properties, "uuid", ""))
    place = [getattr(properties, f"pci_{what}_id", 0) for what in ("domain", "bus", "device")]
    address = f"{place[0]:08x}:{place[1]:02x}:{place[2]:02x}.0"
    for by, name in (
        (nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}"),
        (nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}"),
        (nvml.nvmlDeviceGetHandleByPciBusId, address),
    ):
        try:
            handle = by(name)
            if name.startswith("MIG-"):
                handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        except nvml.NVMLError:
            continue
        return handle
    return None


def other_processes(nvml: Any, handle: Any) -> int:
    """How many other processes compute on a GPU; 0 where NVML does not tell."""
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return 0
    return sum(process.pid != os.getpid() for process in processes)


def other_processes_on(gpu: int | None) -> int:
    """As :func:`other_processes`, of the GPU of an ordinal; 0 on a CPU and without NVML."""
    if gpu is None:
        return 0
    import torch

    nvml = open_nvml()
    handle = nvml and nvml_handle(nvml, torch.cuda.get_device_properties(gpu))
    return other_processes(nvml, handle) if nvml and handle is not None else 0


def is_shared(gpu: int) -> bool:
    """Whether several processes may use a GPU at once; assumed where NVML cannot tell.

    In the compute modes EXCLUSIVE_PROCESS and PROHIBITED a second one would fail.
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
