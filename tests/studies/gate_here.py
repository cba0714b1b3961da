"""Does the gate find a planted slowdown on this machine, and how often does it raise an alarm?

    python -m tests.studies.gate_here [--repeats 10] [--busy N] [--write FILE]

Eight CPU cases (``gate_cases.py``) are benchmarks of pytest-benchmark. In each repetition, two of
them, in turn, become slower by 5% and by 10%: by a copy whose size is found first. Four versions
take turns, with three processes each: the old one, the unchanged one, the one slower by 5% and the
one slower by 10%. Three rules then judge the same files:

- ``gate, 3 processes``: ``compare --gate 3%`` on all three processes of two versions;
- ``gate, 2 processes`` and ``gate, 1 process``: the same on the first processes of each;
- ``mean:5%``: pytest-benchmark's ``--benchmark-compare-fail=mean:5%``, by its own class, on the
  first process of each.

``alarms`` is the share of unchanged versions that fail, and ``suspects`` the share of them in which
a case is named. The gate names slower cases of fewer than three processes, too, but does not fail
them. ``found`` is the share of planted slowdowns that are named, and ``wrongly`` the share of the
other cases in the same versions.
``planted`` is the slowdown as three processes of both versions measured it: the median over the
repetitions and cases. ``--busy N`` lets N processes compute next to all of it. ``--write`` appends
a line of JSON.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from pytest_benchmark.utils import PercentageRegressionCheck

from analysis.comparing.changes import estimate_changes
from analysis.comparing.gate import CANNOT_TELL, FAIL, PASS, judge_changes
from analysis.imports.benchmarks import read_benchmarks
from tests.studies.gate_cases import slower, works
from tests.studies.repeatability import ROOT, busy

THRESHOLD = 0.03
PROCESSES = 3
SLOWDOWNS = {"5%": 0.05, "10%": 0.10}
RULES = ("gate, 3 processes", "gate, 2 processes", "gate, 1 process", "mean:5%")
_TURNS = 100  # alternating launches by which a copy's size is found
_LEAST = 256  # bytes


def ratio(name: str, size: int) -> float:
    """Time of a case with a copy over that without, from launches that take turns."""
    work = works()[name]
    other = slower(work, size)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TURNS):
        for call, taken in zip((work, other), seconds, strict=True):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    # Other work on the machine only adds time, so a low quantile tells what the copy itself costs.
    plain, copied = (float(np.quantile(taken, 0.1)) for taken in seconds)
    return copied / plain


def size_for(name: str, slowdown: float) -> int:
    """Bytes of the copy that makes a case slower by about so much."""
    low, high = _LEAST, 1 << 24
    while high > 1.1 * low:
        middle = int(math.sqrt(low * high))
        if ratio(name, middle) < 1 + slowdown:
            low = middle
        else:
            high = middle
    return low


def benchmark(path: Path, copies: dict[str, int]) -> Path:
    """Run the cases in a process of their own."""
    command = [
        sys.executable, "-m", "pytest", "-q", "tests/studies/gate_cases.py", "-p", "no:xdist",
        "--benchmark-json", str(path), "--benchmark-max-time", "0.3",
        "--benchmark-min-rounds", "20",
    ]  # fmt: skip
    environment = {**os.environ, "ROOFTILE_COPIES": json.dumps(copies)}
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environment)
    return path


def by_gate(old: Sequence[Path], new: Sequence[Path]) -> tuple[str, set[str]]:
    """The gate's answer, and the cases that it calls slower."""
    sides = [[read_benchmarks(path) for path in side] for side in (old, new)]
    result = judge_changes(estimate_changes(sides[0], sides[1]), THRESHOLD)
    significant = result.is_significant
    named = {name for name, is_found in zip(result.changes.names, significant, strict=True)
             if is_found}  # fmt: skip
    return result.verdict, {short(name) for name in named}


def by_mean(old: Path, new: Path) -> tuple[str, set[str]]:
    """pytest-benchmark's answer, and the cases that it calls slower."""
    rule = PercentageRegressionCheck("mean", 5.0)
    before, after = (
        {entry["fullname"]: entry["stats"] for entry in json.loads(path.read_text())["benchmarks"]}
        for path in (old, new)
    )
    named = {short(name) for name in after if rule.fails(after[name], before[name])}
    return FAIL if named else PASS, named


def short(name: str) -> str:
    """The name of a case in a test's name."""
    return name.partition("[")[2].rstrip("]")


def judged(old: Sequence[Path], new: Sequence[Path]) -> dict[str, tuple[str, set[str]]]:
    """What each rule says about two versions."""
    gates = [by_gate(old[:processes], new[:processes]) for processes in (3, 2, 1)]
    answers = *gates, by_mean(old[0], new[0])
    return dict(zip(RULES, answers, strict=True))


def study(repeats: int, folder: Path) -> dict[str, Any]:
    """Count, for each rule, the alarms and what was found."""
    names = list(works())
    torch.set_num_threads(1)
    sizes = {label: {name: size_for(name, slowdown) for name in names}
             for label, slowdown in SLOWDOWNS.items()}  # fmt: skip
    kinds = [f"{kind} {label}" for label in SLOWDOWNS for kind in ("found", "wrongly", "failed")]
    keys = ("alarms", "suspects", PASS, FAIL, CANNOT_TELL, *kinds)
    counts = {rule: dict.fromkeys(keys, 0) for rule in RULES}
    planted: dict[str, list[float]] = {label: [] for label in SLOWDOWNS}
    for repeat in range(repeats):
        chosen = {names[(2 * repeat + i) % len(names)] for i in range(2)}
        versions: dict[str, dict[str, int]] = {
            "old": {}, "unchanged": {},
            **{label: {name: sizes[label][name] for name in chosen} for label in SLOWDOWNS},
        }  # fmt: skip
        paths: dict[str, list[Path]] = {version: [] for version in versions}
        for process in range(PROCESSES):
            for version, copies in versions.items():
                path = folder / f"{repeat}-{process}-{version.rstrip('%')}.json"
                paths[version].append(benchmark(path, copies))
        for rule, (verdict, named) in judged(paths["old"], paths["unchanged"]).items():
            counts[rule]["alarms"] += verdict == FAIL
            counts[rule]["suspects"] += bool(named)
            counts[rule][verdict] += 1
        for label in SLOWDOWNS:
            for rule, (verdict, named) in judged(paths["old"], paths[label]).items():
                counts[rule][f"failed {label}"] += verdict == FAIL
                counts[rule][f"found {label}"] += len(named & chosen)
                counts[rule][f"wrongly {label}"] += len(named - chosen)
            planted[label] += [math.expm1(log) for log in changes_of(paths, label, chosen)]
        print(f"{repeat + 1} of {repeats}: {json.dumps(counts)}", file=sys.stderr, flush=True)
    return {
        "repeats": repeats, "threshold": THRESHOLD,
        "planted": {label: statistics.median(values) for label, values in planted.items()},
        "rules": {rule: shares(counts[rule], repeats, len(names)) for rule in RULES},
    }  # fmt: skip


def changes_of(paths: dict[str, list[Path]], label: str, chosen: set[str]) -> list[float]:
    """Log ratios of the chosen cases, over all processes, without the common shift."""
    sides = [[read_benchmarks(path) for path in paths[version]] for version in ("old", label)]
    changes = estimate_changes(sides[0], sides[1])
    return [float(log) for name, log in zip(changes.names, changes.deviation, strict=True)
            if short(name) in chosen]  # fmt: skip


def shares(counts: dict[str, int], repeats: int, cases: int) -> dict[str, float]:
    """Counts as shares of versions or of cases."""
    of = {"found": 2 * repeats, "wrongly": (cases - 2) * repeats}
    return {name: count / of.get(name.split()[0], repeats) for name, count in counts.items()}


def main(
    repeats: Annotated[int, typer.Option(help="Repetitions.")] = 10,
    busy_processes: Annotated[
        int, typer.Option("--busy", help="Processes that compute next to the cases.")
    ] = 0,
    write: Annotated[Path | None, typer.Option(help="File to append a line to.")] = None,
) -> None:
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder, busy(busy_processes):
        document = study(repeats, Path(folder))
    line = json.dumps({
        "busy": busy_processes, "seconds": round(time.time() - begin),
        "versions": {"torch": torch.__version__.split("+")[0], "numpy": np.__version__},
        "date": time.strftime("%Y-%m-%d"), **document,
    })  # fmt: skip
    print(line)
    if write is not None:
        with write.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    typer.run(main)
