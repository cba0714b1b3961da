"""How long the installed command takes to start, next to the checkout's in one environment.

python -m tests.studies.start_up [--write FILE]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kernels.common.program import ROOT
from kernels.machine import cpu_machine
from tests.support.installed import QUESTION, Installed, build

PAIRS = 9  # of start-ups


def start_ups(here: Installed) -> dict[str, object]:
    """Seconds of one question: the command, and the checkout's, by turns in one environment."""
    ways = {
        "rooftile predict": (["rooftile", *QUESTION], here.work),
        "python -m analysis predict": (["python", "-m", "analysis", *QUESTION], ROOT),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(PAIRS + 1):
        for name, (command, cwd) in ways.items():
            began = time.perf_counter()
            here.run(*command, cwd=cwd)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    one, other = medians.values()
    return {
        "protocol": f"median of {PAIRS} alternating pairs after one that warms up",
        "python": platform.python_version(), "packages": "constraints.txt",
        "machine": f"{cpu_machine({}, 0.0, os.cpu_count() or 1).name}, {os.cpu_count()} cores",
        "seconds": medians, "ratio": one / other,
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="rooftile-start-up-") as name:
        folder = Path(name)
        here = Installed(folder)
        here.install(build(folder))
        found = start_ups(here)
    print(f"start-up over the checkout's: {found['ratio']:.2f}")
    if arguments[:1] == ["--write"]:
        Path(arguments[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
