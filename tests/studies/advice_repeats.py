"""Does a second measurement find what advice claims? The claims of sweeps, timed anew.

    python -m tests.studies.advice_repeats [--runs 2] [--budget 150s] [--leave 0.4] [--write FILE]

Each run is a sweep of its own with its best guesses measured, as ``make sweep`` does. All that its
table says to do is then timed anew by processes that know nothing of the claims, in another folder,
and what that found is compared: the share that gains again, and the share that gains at least the
lower end that was claimed. Beside it stands how many shapes the table moves with what was
confirmed, and without it. ``--write`` appends a line of JSON for each run.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from analysis.advice.recommend import Advice
from analysis.advice.table import build_table
from analysis.advice.verdict import DO_IT, LIKELY
from analysis.model.fitted import analyse
from analysis.recordings.confirmed import confirmed_pairs
from analysis.recordings.load import load
from analysis.recordings.runs import load_runs
from kernels.machine import Machine
from kernels.operation import as_problem
from sweeps.cases.case import Contender
from sweeps.running.confirming import confirm_choices, explore, seconds_of
from sweeps.running.request import Request

ROOT = Path(__file__).resolve().parents[2]


def command(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=True,
                          stdout=subprocess.PIPE, text=True)  # fmt: skip
    return done.stdout


def work_of(claim: Advice) -> float:
    return claim.instead.flops / claim.problem.flops if claim.question == "choose" else 1.0


def gains_again(claims: list[Advice], machine: Machine, results: Path) -> list[float]:
    """By how much each claim gains when its pair is timed anew; NaN if it could not be timed."""
    pairs: list[tuple[Contender, Contender]] = [
        ((a.problem, a.implementation), (a.instead, a.implementation)) for a in claims
    ]
    contenders = list(dict.fromkeys(contender for pair in pairs for contender in pair))
    cost = sum(seconds for seconds, _ in seconds_of(contenders, machine).values())
    # The plan keeps a part of the budget in reserve, and a case that does not fit is left out.
    run = explore(Request(results=results, device="cpu", budget=3 * cost), contenders, print)
    planned = {(as_problem(e.case.problem), e.case.implementation) for e in run.planned}
    there = [pair for pair in dict.fromkeys(pairs) if planned.issuperset(pair)]
    confirm_choices(run, there, print)
    found = {
        (pair.before, pair.after): float(np.mean([np.mean(of) for of in pair.log_ratios]))
        for pair in confirmed_pairs(load(run.folder))
    }
    return [
        math.exp(found.get(pair, math.nan)) * work_of(claim) - 1
        for pair, claim in zip(pairs, claims, strict=True)
    ]


def main(
    runs: Annotated[int, typer.Option(help="One after the other.")] = 2,
    budget: Annotated[str, typer.Option(help="Of each sweep.")] = "150s",
    leave: Annotated[float, typer.Option(help="Share of it for the best guesses.")] = 0.4,
    write: Annotated[Path | None, typer.Option(help="A file to append to.")] = None,
) -> None:
    """Print the shares, a line for each run."""
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as text:
            place = Path(text)
            told = one_run(place, budget, leave)
        print(json.dumps(told), flush=True)
        if write is not None:
            with open(write, "a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")


def one_run(place: Path, budget: str, leave: float) -> dict[str, Any]:
    where = ["--device", "cpu", "--results", str(place)]
    ran = json.loads(command("sweeps", "run", "--budget", budget, "--leave", str(leave), "--json",
                             *where))  # fmt: skip
    folder = Path(ran["folder"])
    without = build_table(analyse(load_runs(folder)))
    command("analysis", "recommend", "--measure", *where)
    recording = load_runs(folder)
    table = build_table(analyse(recording))
    claims = [answer for answer in table if answer.verdict == DO_IT]
    gained = (
        np.array(gains_again(claims, recording.machine, place / "second"))
        if claims
        else np.empty(0)
    )
    timed = ~np.isnan(gained)
    lower = np.array([claim.gain.lo for claim in claims])
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "budget": budget, "leave": leave,
        "machine": recording.machine.slug, "software": recording.run["software"],
        "health": recording.health["verdict"], "reasons": list(recording.health["reasons"]),
        "confirmed_pairs": len(confirmed_pairs(recording)),
        "do_it": len(claims), "timed_again": int(timed.sum()),
        "gain_again": float(np.mean(gained[timed] > 0)) if timed.any() else None,
        "gain_lower_end": float(np.mean(gained[timed] >= lower[timed])) if timed.any() else None,
        "mean_claimed": float(np.mean([c.gain.value for c in claims])) if claims else None,
        "mean_gained": float(np.mean(gained[timed])) if timed.any() else None,
        "moved_with": sum(a.verdict in (DO_IT, LIKELY) for a in table),
        "moved_without": sum(a.verdict in (DO_IT, LIKELY) for a in without),
        "questions": len(table),
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
