"""How often does the gate fail an unchanged program, and how often does it find what it states?

    python -m tests.studies.gate [--runs 400] [--write FILE]

Benchmarks are simulated (``tests/support/simulated_benchmarks.py``), so nothing is timed. Each has
cases of different noise. The machine's speed differs between processes and drifts during them, and
each case is faster or slower by a little in each process. A run of the study is one benchmark:

1. Two versions without a change are judged. ``failed`` counts the answer *fail*, ``passed`` the
   answer *pass*. ``suspected`` counts the runs in which a case is called slower.
2. Five cases of the new version's samples are made slower by what the gate called detectable for
   them. ``named`` is the share of these cases that are then called slower by the same test.
3. The new version is run again with the five slower cases. ``named_again`` is the share in these
   new samples.

With fewer than three processes of each version the gate names slower cases, but does not fail.

``named_others`` is the mean number of unchanged cases that are called slower in step 2. Settings
with fewer than 40 cases have one slower case instead of five.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from analysis.comparing.changes import estimate_changes
from analysis.comparing.gate import FAIL, PASS, judge_changes
from tests.support.simulated_benchmarks import BenchmarkSetting, SimulatedBenchmark, slowed

THRESHOLD = 0.03
PLAIN = BenchmarkSetting()
ONE_PROCESS = {
    "100 cases, noise 1–10%, processes differ by 1%, machine by 2%": PLAIN,
    "noise only": replace(PLAIN, shift=0.0, process=0.0),
    "six rounds": replace(PLAIN, rounds=6),
    "drift by 2% within processes": replace(PLAIN, drift=0.02),
    "noise with heavy tails": replace(PLAIN, heavy=True),
    "processes differ very unevenly over cases": replace(PLAIN, uneven=1.0),
    "eight cases": replace(PLAIN, cases=8),
}
SETTINGS = {
    **{f"{name}, three processes each": replace(setting, processes=3)
       for name, setting in ONE_PROCESS.items()},
    "eight quiet cases, three processes each": replace(
        PLAIN, cases=8, processes=3, noise=(0.003, 0.02), process=0.003
    ),
    "three cases, three processes each": replace(PLAIN, cases=3, processes=3),
    "six processes each": replace(PLAIN, processes=6),
    "two processes each": replace(PLAIN, processes=2),
    **{f"{name}, one process each": setting for name, setting in ONE_PROCESS.items()},
}  # fmt: skip


def judge_setting(setting: BenchmarkSetting, runs: int) -> dict[str, Any]:
    """The counts of a setting; the seed of each run is its number."""
    counts = dict.fromkeys(("failed", "suspected", "passed"), 0)
    planted = 5 if setting.cases >= 40 else 1
    named, again, others, detectable = 0, 0, 0, list[float]()
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        benchmark = SimulatedBenchmark(setting, rng)
        old, new = benchmark.run(), benchmark.run()
        result = judge_changes(estimate_changes(old, new), THRESHOLD)
        counts["failed"] += result.verdict == FAIL
        counts["suspected"] += bool(result.is_significant.any())
        counts["passed"] += result.verdict == PASS
        detectable.append(math.expm1(float(np.median(result.detectable))))
        chosen = rng.choice(setting.cases, planted, replace=False)
        changes = {int(i): float(result.detectable[i]) for i in chosen}
        found = judge_changes(estimate_changes(old, slowed(new, changes)), THRESHOLD).is_significant
        named += int(found[chosen].sum())
        others += int(found.sum() - found[chosen].sum())
        second = judge_changes(estimate_changes(old, benchmark.run(changes)), THRESHOLD)
        again += int(second.is_significant[chosen].sum())
    return {
        "runs": runs,
        **{name: count / runs for name, count in counts.items()},
        "slower_cases": planted,
        "named": named / runs / planted,
        "named_again": again / runs / planted,
        "named_others": others / runs,
        "detectable": float(np.median(detectable)),
    }


def lines(runs: int, workers: int) -> Iterator[str]:
    """One JSON document for each setting, in their order."""
    with ProcessPoolExecutor(workers) as pool:
        counts = pool.map(judge_setting, SETTINGS.values(), [runs] * len(SETTINGS))
        for (name, setting), counted in zip(SETTINGS.items(), counts, strict=True):
            document = {"setting": name, "threshold": THRESHOLD, **counted, **asdict(setting)}
            yield json.dumps(document, ensure_ascii=False)


def main(
    runs: Annotated[int, typer.Option(help="Simulated runs of each setting.")] = 400,
    workers: Annotated[int, typer.Option(help="Settings that are simulated in parallel.")] = 2,
    write: Annotated[Path | None, typer.Option(help="File for the lines.")] = None,
) -> None:
    written = []
    for line in lines(runs, workers):
        print(line, flush=True)
        written.append(line)
    if write is not None:
        write.write_text("".join(f"{line}\n" for line in written), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
