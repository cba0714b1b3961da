"""Tests of the progress that a run shows, on a real terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.progress import LiveReporter

ROOT = Path(__file__).resolve().parents[2]

RUN = """
import time
from sweeps.progress import LiveReporter
with LiveReporter() as live:
    live.begin("Measuring", 1.0, after=1.0)
    live.update(3, 10, 0.5)
    time.sleep(0.3)
    live.update(10, 10, 0.5)
    time.sleep(0.3)
    live.begin("Repeating", 0.5)
    live.update(1, 4)
    time.sleep(0.8)
"""


def on_a_terminal(code: str) -> str:
    """Return what a program writes to a terminal of 100 columns, without control sequences."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=slave, stderr=slave, env=environment
    ):
        os.close(slave)
        written = b""
        while True:
            try:
                some = os.read(master, 65536)
            except OSError:  # Linux raises this when the last writer is gone
                break
            if not some:
                break
            written += some
    os.close(master)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode("utf-8"))


def test_a_terminal_shows_the_phase_its_cases_and_a_time_that_ends_at_zero() -> None:
    shown = on_a_terminal(RUN)
    assert re.search(r"Measuring.* 3/10 .*at most [12] s left", shown)
    assert re.search(r"Measuring.* 10/10 .*repeating for at most [12] s", shown)
    assert re.search(r"Repeating.* 1/4 .*at most 0 s left", shown)


def test_elsewhere_a_line_is_printed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("sweeps.progress.time.monotonic", lambda: now)
    with LiveReporter() as live:
        live.begin("Measuring", 60.0, after=9.0)
        live.update(1, 20, 50.0)
        now += 11
        live.update(7, 20, 40.0)
        live.update(8, 20, 39.0)
        now += 11
        live.update(20, 20, 20.0)
        now += 11
        live.update(1, 1, 3.0)
        now += 11
        live.begin("Repeating", 5.0)
        live.update(2, 4)
        now += 11
        live.update(3, 4)
        now += 11
        live.begin("Reporting", None)
        live.update(1, 4)
    assert capsys.readouterr().err.splitlines() == [
        "  Measuring: 7 of 20 cases, at most 49 s left",
        "  Measuring: all 20 cases timed, repeating for at most 29 s",
        "  Measuring: the case is timed, repeating for at most 12 s",
        "  Repeating: 2 of 4 cases, at most 5 s left",
        "  Repeating: 3 of 4 cases, at most 0 s left",
        "  Reporting: 1 of 4 cases",
    ]
