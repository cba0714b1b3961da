"""What a command line asks for, on the CPU, of two small sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweeps.running.request import Request
from sweeps.running.run import Run

NAMES = ("square", "cache")


def request(results: Path, **more: Any) -> Request:
    return Request(names=NAMES, budget=20.0, results=results, device="cpu", **more)


def quiet(text: str) -> None:
    pass


def ids(run: Run) -> list[str]:
    return [entry.case.id for entry in run.planned]
