"""Read clocks, power, temperature and throttle reasons through NVML at 20 Hz during measurements.

NVML's own index ignores ``CUDA_VISIBLE_DEVICES``, so the GPU is found by its UUID or PCI address. A
MIG slice has no sensors, so the sensors of its GPU are read. If NVML is missing or denies access,
every reading is empty, and measuring continues.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sweeps.timing.statistics import median

_PERIOD = 0.05  # seconds between two readings
_KEEP = 20 * 60 * 20  # number of readings to keep: twenty minutes at 20 Hz

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


class _RawReading(NamedTuple):
    """Values of all sensors and NVML's throttle bits, with the time of the reading."""

    moment: float
    sm_mhz: float | None
    power_w: float | None
    temp_c: float | None
    reason_bits: int


@dataclass(frozen=True)
class Reading:
    """Sensor values over a span of time. A value that cannot be read is None or empty."""

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
        """Return the sensor values between two times on the ``time.monotonic`` clock."""
        return Reading()

    def joules(self) -> float | None:
        """Return the board's energy counter in joules, or None if it is not known."""
        return None

    def forget(self) -> None:
        """Wait until :meth:`between` no longer includes earlier readings."""


class NvmlTelemetry(Telemetry):
    """Telemetry of one GPU, whose sensors are read in the background."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._readings: deque[_RawReading] = deque(maxlen=_KEEP)
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
        """Return each sensor's median and the throttle reasons from ``begin`` to ``end``.

        If no reading was taken in or near this span, the last earlier reading is used.
        """
        with self._lock:
            readings = list(self._readings)
        # The span is widened by a period at both ends, because a batch is shorter than a period. If
        # even the widened span has no reading, the last reading before it is used.
        span: list[_RawReading] = []
        for reading in reversed(readings):
            if reading.moment < begin - _PERIOD and span:
                break
            if reading.moment <= end + _PERIOD:
                span.append(reading)
        reason_bits = 0
        for reading in span:
            reason_bits |= reading.reason_bits
        sm_mhz = _median_or_none([reading.sm_mhz for reading in span])
        power_w = _median_or_none([reading.power_w for reading in span])
        temp_c = _median_or_none([reading.temp_c for reading in span])
        reasons = tuple(name for bit, name in _REASONS.items() if reason_bits & bit)
        return Reading(sm_mhz, power_w, temp_c, reasons)

    def joules(self) -> float | None:
        """Return the energy counter in joules, or None if NVML does not report it."""
        millijoules = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if millijoules is None else millijoules / 1e3

    def forget(self) -> None:
        """Wait until a new reading is due and earlier ones are too old for :meth:`between`."""
        # The last reading before this call must be more than a period old when a span begins, and
        # the next one may take a period to arrive. Half a period is a margin for the thread's
        # delays.
        time.sleep(2.5 * _PERIOD)

    def _loop(self) -> None:
        while not self._stopping.wait(_PERIOD):
            self._read()

    def _read(self) -> None:
        nvml, handle = self._nvml, self._handle
        sm_mhz = self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        milliwatts = self._milliwatts()
        power_w = None if milliwatts is None else milliwatts / 1e3
        temp_c = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        reason_bits = int(reasons or 0)
        with self._lock:
            self._readings.append(
                _RawReading(time.monotonic(), sm_mhz, power_w, temp_c, reason_bits)
            )

    def _milliwatts(self) -> float | None:
        """Return the power in milliwatts, or None if no power is reported.

        The instantaneous power is preferred, because on many GPUs ``nvmlDeviceGetPowerUsage``
        returns an average over one second.
        """
        nvml = self._nvml
        try:
            (field,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
            if field.nvmlReturn == nvml.NVML_SUCCESS:
                return float(field.value.uiVal)
        except (nvml.NVMLError, AttributeError):  # an older driver, or an older pynvml
            pass
        return self._ask(nvml.nvmlDeviceGetPowerUsage, self._handle)

    def _ask(self, query: Callable[..., Any], *arguments: Any) -> float | None:
        try:
            return float(query(*arguments))
        except self._nvml.NVMLError:
            return None


def _median_or_none(values: list[float | None]) -> float | None:
    reported = [value for value in values if value is not None]
    return median(reported) if reported else None


def open_nvml() -> Any | None:
    """Return the initialised NVML module, or None if it is missing or cannot be initialised."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library or no permission
        return None
    return pynvml


def nvml_handle(nvml: Any, properties: Any) -> Any | None:
    """Return NVML's handle of a GPU, or None if NVML does not find the GPU.

    ``properties`` is what PyTorch's ``get_device_properties`` returned. For a MIG slice, the handle
    is that of the slice's GPU.
    """
    uuid = str(getattr(properties, "uuid", ""))
    domain = getattr(properties, "pci_domain_id", 0)
    bus = getattr(properties, "pci_bus_id", 0)
    device = getattr(properties, "pci_device_id", 0)
    address = f"{domain:08x}:{bus:02x}:{device:02x}.0"
    for find_handle, identifier in (
        (nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}"),
        (nvml.nvmlDeviceGetHandleByUUID, f"MIG-{uuid}"),
        (nvml.nvmlDeviceGetHandleByPciBusId, address),
    ):
        try:
            handle = find_handle(identifier)
            if identifier.startswith("MIG-"):  # a slice has no sensors, so its parent is read
                handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        except nvml.NVMLError:
            continue
        return handle
    return None


def _open_handle(gpu: int) -> tuple[Any, Any] | None:
    """Return the NVML module, and its handle of the GPU with this ordinal in PyTorch.

    Return None if NVML is not available or does not find the GPU.
    """
    import torch

    nvml = open_nvml()
    if nvml is None:
        return None
    handle = nvml_handle(nvml, torch.cuda.get_device_properties(gpu))
    return None if handle is None else (nvml, handle)


def gpu_telemetry(gpu: int) -> Telemetry:
    """Return the telemetry of the GPU with this ordinal.

    If NVML is not available or does not find the GPU, the telemetry has no sensors.
    """
    opened = _open_handle(gpu)
    if opened is None:
        return Telemetry()
    nvml, handle = opened
    return NvmlTelemetry(nvml, handle)


def other_processes(nvml: Any, handle: Any) -> int:
    """Return the number of other processes that compute on a GPU, or 0 if it is unknown."""
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return 0
    return sum(process.pid != os.getpid() for process in processes)


def other_processes_on(gpu: int | None) -> int:
    """Return the number of other processes that compute on the GPU with this ordinal.

    Return 0 for a CPU, or if NVML does not report the processes.
    """
    opened = None if gpu is None else _open_handle(gpu)
    if opened is None:
        return 0
    nvml, handle = opened
    return other_processes(nvml, handle)


def is_shared(gpu: int) -> bool:
    """Return True if several processes may use the GPU at once, or if its compute mode is unknown.

    ``gpu`` is the GPU's ordinal in PyTorch.
    """
    opened = _open_handle(gpu)
    if opened is None:
        return True
    nvml, handle = opened
    try:
        return bool(nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_DEFAULT)
    except nvml.NVMLError:
        return True
