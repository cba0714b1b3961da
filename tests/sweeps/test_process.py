from __future__ import annotations

import os
import signal

import pytest

from sweeps.process import terminated_as_interrupt, undisturbed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_s_end_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupt():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_what_is_short_is_finished_first() -> None:
    """SIGTERM, SIGHUP and Ctrl-C are nothing while a file is written."""
    done = []
    with terminated_as_interrupt(), undisturbed():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
        done.append("written")
    assert done == ["written"]
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)  # afterwards they mean what they meant
