from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.device import Device, this_cpu
from kernels.machine import known_machine
from sweeps.doctor import doctor
from sweeps.doctor.doctor import examine, examine_nvml
from tests.support.fakes import FakeNvml


def test_the_doctor_knows_a_cpu(tmp_path: Path) -> None:
    findings = examine(this_cpu(), tmp_path / "not" / "there")
    words = " ".join(finding.text for finding in findings)
    assert this_cpu().machine.slug in words
    assert "threads" in words
    assert "GiB free" in words


def test_the_governor_of_a_core_that_is_switched_off_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux answers that the file is busy; reading a folder fails in the same way."""
    for core, text in ((0, "performance"), (1, "powersave"), (2, None)):
        governor = tmp_path / f"cpu{core}"
        if text is None:
            governor.mkdir()
        else:
            governor.write_text(f"{text}\n", encoding="ascii")
    monkeypatch.setattr(doctor, "_GOVERNORS", str(tmp_path / "cpu*"))
    texts = [finding.text for finding in doctor._examine_cpu()]
    assert texts[-1] == "CPU frequency governor powersave: set it to performance"


@pytest.mark.parametrize(
    ("threads", "processors", "load", "warning"),
    [
        (2, 8, 1.0, ""),
        (4, 8, 1.0, "load average 1.0: other processes disturb timings; end them, or wait"),
        # Half of a host: a load of 9 may be on the other half, a load of 13 is not.
        (4, 16, 9.0, ""),
        (4, 16, 13.0, "load average 13.0: other processes disturb timings; end them, or wait"),
        # More threads than cores are not the fault of other processes.
        (8, 8, 0.0, "set THREADS to at most 4, the number of usable cores"),
    ],
)
def test_the_doctor_blames_the_load_only_if_it_disturbs(
    threads: int, processors: int, load: float, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may use 4 cores with two processors each."""
    monkeypatch.setattr(doctor, "_GOVERNORS", "/nowhere/*")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 4)
    monkeypatch.setattr(doctor, "usable_processors", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    found = [finding.text for finding in doctor._examine_cpu() if finding.warning]
    assert len(found) == bool(warning)
    assert all(text.endswith(warning) for text in found)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"EnforcedPowerLimit": 400_000}, "power limit 400 W, below its default of 700 W"),
        (
            {"ComputeRunningProcesses": [SimpleNamespace(pid=1)]},
            "1 other process on this GPU: stop all other work on it",
        ),
        ({"Temperature": 88}, "88 °C"),
    ],
)
def test_the_doctor_warns_of_what_spoils_timings(answers: dict[str, Any], words: str) -> None:
    findings = list(examine_nvml(FakeNvml(**answers), "card"))
    assert any(finding.warning and words in finding.text for finding in findings)
    assert sum(finding.warning for finding in findings) == 1


def test_the_doctor_is_content_with_a_healthy_card() -> None:
    findings = list(examine_nvml(FakeNvml(), "card"))
    assert not any(finding.warning for finding in findings)
    assert "SM clock is 1,980 MHz now, 1,980 MHz at most" in [finding.text for finding in findings]


def test_a_card_that_differs_from_the_datasheet_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some builds of PyTorch have no ``clock_rate`` and no ``memory_clock_rate``."""
    card = SimpleNamespace(multi_processor_count=132, memory_bus_width=6144)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    selected = Device(known_machine("nvidia-h200"), "cuda:0", 0)
    assert list(doctor._compare_facts(selected)) == []  # an unknown bandwidth is not compared
    slow = SimpleNamespace(**vars(card), memory_clock_rate=2_619_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: slow)
    (finding,) = doctor._compare_facts(selected)
    assert finding.text == (
        "machines.toml lists 4,800 GB/s, but the device reports 4,023 GB/s; part of the device may "
        "be disabled or slower than usual"
    )
    card.multi_processor_count = 148
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    (finding,) = doctor._compare_facts(selected)
    assert finding.text == (
        "machines.toml lists 132 SMs, but the device reports 148 SMs; the device may be a "
        "different variant from the one in machines.toml"
    )
