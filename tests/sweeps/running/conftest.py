from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.device import Device
from kernels.machine import cpu_machine
from sweeps.planning.plan import Costs
from sweeps.running import opening


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measuring of a CPU's ceilings and costs, which takes long and is not tested."""

    def measured(device: Device) -> Device:
        peaks = dict.fromkeys(device.machine.peaks, 1e11)
        return replace(device, machine=cpu_machine(peaks, 3e10, device.machine.sms))

    monkeypatch.setattr(opening, "with_measured_ceilings", measured)
    monkeypatch.setattr(opening, "probe", lambda cases, machine: Costs.default(machine.kind))
