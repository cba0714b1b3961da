from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sweeps.process import is_stopped, terminated_as_interrupt, undisturbed


@pytest.fixture(autouse=True)
def _hangup_not_ignored() -> Iterator[None]:
    """Let SIGHUP end this process, as in a terminal; under nohup, it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_s_end_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupt():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """nohup ignores SIGHUP, and its command goes on when the terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminated_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_short_is_finished_first() -> None:
    """SIGTERM, SIGHUP and Ctrl-C take effect after a file is written."""
    done = []

    def write(number: int) -> None:
        with terminated_as_interrupt(), undisturbed():
            os.kill(os.getpid(), number)
            done.append(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        with pytest.raises(KeyboardInterrupt):
            write(number)
        assert done[-1] == number
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)  # the old handlers are back


def test_a_stopped_process_is_told_from_a_slow_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert not is_stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    while not is_stopped(process.pid):
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not is_stopped(process.pid)
