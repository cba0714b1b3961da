from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sweeps.timing import telemetry
from sweeps.timing.telemetry import NvmlTelemetry, Reading, Telemetry, nvml_handle, open_nvml
from tests.support.fakes import FakeNvml


def test_without_sensors_everything_is_empty() -> None:
    assert Telemetry().between(0, 1) == Reading(None, None, None, ())


def test_readings_are_joined_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: now))
    nvml = FakeNvml()
    sensors = NvmlTelemetry(nvml, "card")
    sensors._read()
    first = now
    now += 0.15
    nvml.answers["ClockInfo"], nvml.reasons = 1200, 0x04 | 0x40
    sensors._read()
    second = now
    assert sensors.between(first - 0.01, first) == Reading(1980.0, 612.0, 55.0, ())
    late = sensors.between(second, second)
    assert late.sm_mhz == 1200.0
    assert late.throttled == ("sw_power_cap", "hw_thermal_slowdown")
    both = sensors.between(first, second)
    assert both.sm_mhz == 1590.0  # the median
    assert both.throttled == late.throttled  # every reason that occurred in the span


def test_a_span_without_a_reading_takes_the_last_one() -> None:
    sensors = NvmlTelemetry(FakeNvml(), "card")
    sensors._read()
    assert sensors.between(time.monotonic() + 100, time.monotonic() + 101).sm_mhz == 1980.0


@pytest.mark.long
def test_reading_and_asking_at_once_does_no_harm() -> None:
    """The deque grows while it is read. Without the lock, 3 of 300 calls raised an error."""
    sensors = NvmlTelemetry(FakeNvml(), "card")
    done = threading.Event()

    def fill() -> None:
        while not done.is_set():
            sensors._read()

    writer = threading.Thread(target=fill)
    writer.start()
    try:
        for _ in range(300):
            sensors.between(0.0, time.monotonic())
    finally:
        done.set()
        writer.join()


@pytest.mark.parametrize(
    ("nvml", "watts"),
    [
        (FakeNvml(instant=655_000), 655.0),  # the instantaneous power, not the average of a second
        (FakeNvml(), 612.0),  # a GPU without the field, whose usual value is instantaneous
        (FakeNvml(refuse=("FieldValues",)), 612.0),
        (FakeNvml(refuse=("FieldValues", "PowerUsage")), None),
    ],
)
def test_power_is_that_of_the_moment(nvml: FakeNvml, watts: float | None) -> None:
    sensors = NvmlTelemetry(nvml, "card")
    sensors._read()
    assert sensors.between(0.0, time.monotonic()).power_w == watts


def test_what_the_card_refuses_is_empty_and_nothing_else_is() -> None:
    sensors = NvmlTelemetry(FakeNvml(refuse=("PowerUsage", "CurrentClocksThrottleReasons")), "card")
    sensors._read()
    reading = sensors.between(time.monotonic() - 1, time.monotonic())
    assert reading == Reading(1980.0, None, 55.0, ())


def test_it_reads_in_the_background_at_twenty_hertz() -> None:
    sensors = NvmlTelemetry(FakeNvml(), "card")
    sensors.start()
    deadline = time.monotonic() + 600
    while len(sensors._readings) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    sensors.stop()
    assert len(sensors._readings) >= 4


def properties(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(uuid="8a1b", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0, **more)


def test_the_card_is_found_by_uuid_then_by_address() -> None:
    def by_uuid(name: str) -> str:
        if name != "GPU-8a1b":
            raise FakeNvml.NVMLError
        return "by uuid"

    assert nvml_handle(FakeNvml(HandleByUUID=by_uuid), properties()) == "by uuid"
    by_address = FakeNvml(refuse=("HandleByUUID",), HandleByPciBusId=lambda name: f"at {name}")
    assert nvml_handle(by_address, properties()) == "at 00000000:3b:00.0"
    nothing = FakeNvml(refuse=("HandleByUUID", "HandleByPciBusId"))
    assert nvml_handle(nothing, properties()) is None


def test_a_mig_slice_is_read_by_its_parent() -> None:
    def by_uuid(name: str) -> str:
        if not name.startswith("MIG-"):
            raise FakeNvml.NVMLError
        return "slice"

    nvml = FakeNvml(
        HandleByUUID=by_uuid, DeviceHandleFromMigDeviceHandle=lambda h: f"parent of {h}"
    )
    assert nvml_handle(nvml, properties()) == "parent of slice"


def test_a_missing_or_refused_nvml_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError(999)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert open_nvml() is None
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert telemetry.open_nvml() is None


@pytest.mark.parametrize(
    ("nvml", "shared"),
    [
        (FakeNvml(), True),
        (FakeNvml(ComputeMode=3), False),  # EXCLUSIVE_PROCESS: a second process would fail
        (FakeNvml(refuse=("ComputeMode",)), True),
        (None, True),
    ],
)
def test_a_gpu_in_exclusive_mode_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, shared: bool
) -> None:
    monkeypatch.setattr(telemetry, "open_nvml", lambda: nvml)
    monkeypatch.setattr(telemetry, "nvml_handle", lambda nvml, properties: "card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties())
    assert telemetry.is_shared(0) is shared


def test_energy_is_counted_in_joules_where_the_board_counts() -> None:
    assert NvmlTelemetry(FakeNvml(TotalEnergyConsumption=2500), "card").joules() == 2.5
    refusing = FakeNvml(refuse=("TotalEnergyConsumption",))
    assert NvmlTelemetry(refusing, "card").joules() is None
    assert Telemetry().joules() is None
