"""How long a page of many points takes in a browser, against a page of few.

    python -m tests.studies.page_speed [--write FILE]

Recordings of 800 and of 40,000 made-up cases become pages, which Chromium opens by turns, offline.
``ready`` is from the beginning of loading until charts and tables are drawn, ``filter`` from a
click on a filter until the next frame is drawn. Goals: a page of 40,000 points under 4 MB, ready in
at most three times the time of 800, a filter in a fifth of that.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from analysis.commands.page import write_page
from analysis.model.fitted import analyse
from analysis.recordings.load import load
from kernels.machine import cpu_machine
from kernels.problem import Gemm
from sweeps.cases.case import Case
from tests.support.browsing import CHROMIUM, opened
from tests.support.synthetic import model_law, random_sizes, record

COUNTS = (800, 40_000)
TURNS = 5
FILTER = """() => new Promise((resolve) => {
  const box = document.querySelector("#filters input[name=dtype]");
  const began = performance.now();
  box.click();
  requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - began)));
})"""


def make_page(folder: Path, count: int) -> Path:
    """The page of a made-up recording of half bf16 and half fp16 products."""
    sizes = list(dict.fromkeys(random_sizes(count)))[: count // 2]
    gemms = [Gemm(*size, dtype) for size in sizes for dtype in ("bf16", "fp16")]
    cases = [Case("made-up", gemm, "cublas") for gemm in gemms]
    seconds = model_law()(gemms)
    noise = np.exp(0.02 * np.random.default_rng(0).standard_normal(len(cases)))
    return write_page([analyse(load(record(folder, cases, seconds * noise)))], [None])


def times_of(page: Path) -> dict[str, float]:
    """Milliseconds of one opening."""
    with opened(page) as here:
        ready = here.page.evaluate("performance.getEntriesByName('ready')[0].startTime")
        return {"ready": ready, "filter": here.page.evaluate(FILTER)}


def main(arguments: list[str]) -> None:
    """Print the medians and their ratios."""
    with tempfile.TemporaryDirectory() as name:
        pages = {count: make_page(Path(name) / str(count), count) for count in COUNTS}
        turns: dict[int, list[dict[str, float]]] = {count: [] for count in COUNTS}
        for _ in range(TURNS):
            for count, page in pages.items():
                turns[count].append(times_of(page))
        rows: list[dict[str, Any]] = [
            {
                "points": count, "bytes": pages[count].stat().st_size,
                **{f"{what}_ms": statistics.median(turn[what] for turn in turns[count])
                   for what in ("ready", "filter")},
            }
            for count in COUNTS
        ]  # fmt: skip
    few, many = rows
    version = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, check=True)
    found = {
        "protocol": f"median of {TURNS} openings of each page by turns",
        "machine": f"{cpu_machine({}, 0.0, os.cpu_count() or 1).name}, {os.cpu_count()} cores",
        "browser": version.stdout.strip(), "packages": "constraints.txt", "pages": rows,
        "ready_ratio": many["ready_ms"] / few["ready_ms"],
        "filter_over_ready": many["filter_ms"] / many["ready_ms"],
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if arguments[:1] == ["--write"]:
        Path(arguments[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
