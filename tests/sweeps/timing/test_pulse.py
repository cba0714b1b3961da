"""Tests that a stopped process is noticed by SIGCONT or by the gap between its beats."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sweeps.timing.pulse import BeatingPulse, Pulse

ROOT = Path(__file__).resolve().parents[3]


class Clocks:
    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def go(self, wall: float, cpu: float) -> None:
        self.wall += wall
        self.cpu += cpu


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def pulse(clocks: Clocks) -> BeatingPulse:
    return BeatingPulse(lambda: clocks.wall, lambda: clocks.cpu)


def test_a_gap_without_work_is_a_stop(clocks: Clocks) -> None:
    one = pulse(clocks)
    clocks.go(0.05, 0.0)
    assert (one.stops(), one.lost()) == (0, 0.0)
    clocks.go(40.0, 0.01)
    assert (one.stops(), one.lost()) == (1, 40.0)
    clocks.go(0.05, 0.05)
    assert (one.stops(), one.lost()) == (1, 40.0)


@pytest.mark.parametrize(("wall", "cpu"), [(40.0, 40.0), (40.0, 9.0), (0.4, 0.0)])
def test_work_and_short_gaps_are_none(clocks: Clocks, wall: float, cpu: float) -> None:
    """A thread that has to wait for another thread's work does not beat during that time."""
    one = pulse(clocks)
    clocks.go(wall, cpu)
    assert (one.stops(), one.lost()) == (0, 0.0)


def test_a_process_that_is_never_stopped_says_so() -> None:
    assert (Pulse().stops(), Pulse().lost()) == (0, 0.0)


STOPPED = """
import os, subprocess, sys, time
from sweeps.timing.pulse import pulse_of_this_process
pulse = pulse_of_this_process()
before = pulse.stops()
me, seconds = os.getpid(), sys.argv[1]
subprocess.Popen(["/bin/sh", "-c", f"kill -STOP {me}; sleep {seconds}; kill -CONT {me}"])
begin = time.monotonic()
while pulse.stops() == before and time.monotonic() - begin < 60:
    time.sleep(0.01)
print(pulse.stops() - before, pulse.lost())
"""


@pytest.mark.parametrize(("seconds", "least"), [(0.1, 0.0), (1.5, 1.3)])
def test_a_process_that_really_was_stopped(seconds: float, least: float) -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(seconds)], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    stops, lost = done.stdout.split()
    assert int(stops) >= 1
    assert least <= float(lost) <= time.monotonic() - begin
