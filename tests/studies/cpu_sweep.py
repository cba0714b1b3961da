"""Does ``make sweep DEVICE=cpu`` measure what it plans, do its answers hold, and do runs agree?

    python -m tests.studies.cpu_sweep [--quiet 5] [--busy 5] [--revision REV] [--write FILE]

Each run is a user's: ``make sweep DEVICE=cpu FRESH=1`` in a clone of a commit, with this
interpreter, so that no run installs anything. The busy runs share the machine with one process that
computes all the time. For each run the study prints how many of the planned cases were measured,
which of the three sweeps that people look for first are whole, and where the time went. Any two
runs of a kind are compared case by case: ``difference`` is the distance of the ratio of two medians
from 1. The study prints its median and its 90th percentile over the cases, each as the median over
all pairs of runs. ``shifted`` is the same after dividing by the median ratio. It leaves out
that the whole machine was faster in one run, which does not change ratios within a run.

After each run, what its table says to do is timed again by other processes in another folder: all
that it calls *do it*, and eight of the measured *likely* ones. ``gain_again`` is the share that
gains again. ``findings`` has the numbers that the run ended with; ``same_sign`` is the share of
pairs of runs in which both of them lie on the same side of 1, or of 0 for a gain. ``--write``
appends a line of JSON for each run and one for the comparison.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from analysis.advice.headlines import headlines
from analysis.advice.table import build_table
from analysis.advice.verdict import DO_IT, LIKELY, PREDICTED
from analysis.model.fitted import analyse
from analysis.recordings.runs import load_runs
from sweeps.cases.case import CONFIRM
from sweeps.store import read_events, read_run
from tests.studies.advice_repeats import gains_again
from tests.studies.repeatability import busy

ROOT = Path(__file__).resolve().parents[2]
WHOLE = ("alignment", "conv-layouts", "steps")
SAMPLES = 10
CLAIMS = 8  # of the likely ones, timed again

# A phase ends where the next one's first line is printed.
PHASES = {
    "Measuring the ceilings": "probing",
    "Measuring the best": "confirming",
    "Measuring ": "measuring",
    "Naming ": "naming",
    "Looking for": "confirming",
    "Calibrating": "reporting",
}


def phase_of(line: str, before: str) -> str:
    """Return the phase that a line of output starts, or the current phase if it starts none."""
    if "again" in line and line.startswith("Timing "):
        return "confirming" if before == "confirming" else "repeating"
    found = next((name for start, name in PHASES.items() if line.startswith(start)), before)
    # Confirming has measuring and naming of its own.
    return before if before == "confirming" and found in ("measuring", "naming") else found


def run_sweep(clone: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], float]]:
    """One run; what became of it, and the median of each case in µs."""
    command = ["make", "sweep", "DEVICE=cpu", "FRESH=1", f"PYTHON={sys.executable}"]
    begin = since = time.monotonic()
    seconds: dict[str, float] = defaultdict(float)
    phase = "starting"
    with subprocess.Popen(
        command, cwd=clone, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            now = time.monotonic()
            seconds[phase] += now - since
            since, phase = now, phase_of(line, phase)
    seconds[phase] += time.monotonic() - since
    if process.returncode:
        raise SystemExit(f"`make sweep` ended with {process.returncode}.")
    (file,) = (clone / "results").glob("cpu-*/run.json")
    record = read_run(file.parent)
    with open(file.with_name("measurements.csv"), encoding="utf-8", newline="") as table:
        rows = [row for row in csv.DictReader(table) if row["sweep"] != CONFIRM]
    ok = [row for row in rows if row["status"] == "ok"]
    planned = [row for row in record["plan"]["cases"] if row["sweep"] != CONFIRM]
    of_sweep = Counter(row["sweep"] for row in planned)
    timed = Counter(row["sweep"] for row in ok)
    shares = event_shares(file.parent)
    told = {
        "seconds": round(time.monotonic() - begin, 1),
        "planned": len(planned),
        "left_out": sum(record["plan"]["left_out"].values()),
        "measured": len(ok),
        "ten_samples": sum(int(row["samples"]) >= SAMPLES for row in ok),
        "whole": [name for name in WHOLE if timed[name] == of_sweep[name] > 0
                  and not record["plan"]["left_out"].get(name)],
        "health": record["health"]["verdict"],
        "phases": {name: round(value, 1) for name, value in seconds.items()},
        "within_measuring": shares,
    }  # fmt: skip
    told |= answers(file.parent, clone / "again")
    names = list(ok[0])
    keys = names[names.index("sweep") : names.index("status")]
    return told, {tuple(row[key] for key in keys): float(row["time_us"]) for row in ok}


def answers(folder: Path, again: Path) -> dict[str, Any]:
    """What a run ended with, and whether what it claims gains again."""
    analysis = analyse(load_runs(folder))
    table = build_table(analysis)
    found = headlines(analysis, table)
    sure = [answer for answer in table if answer.verdict == DO_IT]
    likely = [a for a in table if a.verdict == LIKELY and a.evidence != PREDICTED]
    chosen = sure + random.Random(0).sample(likely, min(CLAIMS, len(likely)))
    gained = gains_again(chosen, analysis.recording.machine, again) if chosen else []
    claims = [
        {"verdict": a.verdict, "evidence": a.evidence, "question": a.question,
         "gain": round(a.gain.value, 4), "lo": round(a.gain.lo, 4), "again": round(more, 4)}
        for a, more in zip(chosen, gained, strict=True) if more == more
    ]  # fmt: skip
    return {
        "repeats": analysis.recording.run["repeats"],
        "reasons": list(analysis.recording.health["reasons"]),
        "plots": len(list((folder / "plots").glob("*.png"))),
        "findings": [[f.id, *(round(v, 5) for v in (f.value, f.lo, f.hi)), f.count] for f in found],
        "error_median": round(float(analysis.errors.median()), 4),
        "error_p95": round(float(analysis.errors.quantile(0.95)), 4),
        "claims": claims,
    }  # fmt: skip


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many claims of several runs gain again, and how many findings keep their sign."""
    told: dict[str, Any] = {}
    for verdict in (DO_IT, LIKELY):
        gained = [c["again"] > 0 for run in runs for c in run["claims"] if c["verdict"] == verdict]
        told[verdict] = {"claims": len(gained), "gain_again": _share(gained)}
    for name in ("alignment", "layout"):
        sides = [f[1] > 1 for run in runs for f in run["findings"] if f[0] == name]
        same = [one == other for one, other in itertools.combinations(sides, 2)]
        told[name] = {"runs": len(sides), "same_sign": _share(same)}
    return told


def _share(held: list[bool]) -> float | None:
    return round(float(np.mean(held)), 3) if held else None


def event_shares(folder: Path) -> dict[str, float]:
    """Seconds of preparing, checking and sampling, by a run's events; advice's cases too."""
    seconds: dict[str, float] = defaultdict(float)
    for event in read_events(folder)[0]:
        cost, checking = event.get("cost", 0.0), event.get("checking", 0.0)
        kind = {"facts": "preparing", "sample": "sampling"}.get(event["event"])
        if kind:
            seconds[kind] += cost - checking
            seconds["checking"] += checking
        elif event["event"] == "right":
            seconds["checking"] += cost
        elif cost:
            seconds["other"] += cost
    return {name: round(value, 1) for name, value in seconds.items()}


def compare(runs: list[dict[tuple[str, ...], float]]) -> dict[str, float] | None:
    """How far the medians of two runs are apart, over all pairs of runs."""
    found: dict[str, list[float]] = defaultdict(list)
    for one, other in itertools.combinations(runs, 2):
        ratios = np.array([other[key] / one[key] for key in one.keys() & other.keys()])
        for name, values in (("", ratios), ("shifted_", ratios / np.median(ratios))):
            apart = np.abs(values - 1)
            found[f"{name}median"].append(float(np.median(apart)))
            found[f"{name}p90"].append(float(np.percentile(apart, 90)))
    if not found:
        return None
    told: dict[str, float] = {"pairs": len(found["median"])}
    for name, values in found.items():
        told |= {name: round(float(np.median(values)), 4), f"largest_{name}": round(max(values), 4)}
    return told


def main(
    quiet: Annotated[int, typer.Option(help="Runs on an otherwise idle machine.")] = 5,
    others: Annotated[int, typer.Option("--busy", help="Runs next to one busy process.")] = 5,
    revision: Annotated[str, typer.Option(help="Commit that is measured.")] = "HEAD",
    write: Annotated[Path | None, typer.Option(help="File to append to.")] = None,
) -> None:
    """Run the study."""
    parsed = subprocess.run(
        ["git", "rev-parse", "--short", revision], cwd=ROOT, check=True, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    commit = parsed.stdout.strip()
    for kind, count in (("quiet", quiet), ("busy", others)):
        runs: list[dict[tuple[str, ...], float]] = []
        lines: list[dict[str, Any]] = []
        for _ in range(count):
            with tempfile.TemporaryDirectory() as folder:
                clone = Path(folder) / "rooftile"
                subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
                subprocess.run(["git", "-C", str(clone), "checkout", "-q", commit], check=True)
                with busy(int(kind == "busy")):
                    told, medians = run_sweep(clone)
            runs.append(medians)
            lines.append(told)
            tell({"commit": commit, "kind": kind, **told}, write)
        if difference := compare(runs):
            judged = {"difference": difference, "answers": judge(lines)}
            tell({"commit": commit, "kind": kind, **judged}, write)


def tell(document: dict[str, Any], write: Path | None) -> None:
    """Print a line of JSON, and append it to a file."""
    line = json.dumps(document)
    print(line, flush=True)
    if write is not None:
        with open(write, "a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    typer.run(main)
