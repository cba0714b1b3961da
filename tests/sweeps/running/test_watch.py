from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest

from sweeps.running import watch as watch_module
from sweeps.running.watch import Watch


def test_processes_that_compile_for_the_run_are_not_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours: list[Callable[[], Iterable[int]]] = []
    monkeypatch.setattr(watch_module, "HostWatch", ours.append)
    Watch(lambda event: None, "1/1", None).begin()
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        assert process.pid in ours[0]()
        process.communicate("\n")
