"""Do times repeat? Pairs of real sweeps on this machine, alone and beside other work.

    python -m tests.studies.repeatability [--pairs 3] [--budget 40s] [--busy N] [--write FILE]

Every sweep is a run of its own, in processes of its own. Of each pair, the share of second medians
is printed that lie in the first run's intervals: the samples' own (``alone``), the median's, which
knows how the machine's speed changed (``median``), and that of a repetition (``repetition``), which
should hold 93 to 97 %, or the runs say that they are noisy. ``--busy N`` lets N processes compute
beside the sweeps. ``--write`` appends a line of JSON for each pair.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from analysis.advice.measurements import read_measurements
from analysis.recordings.load import Recording, load
from analysis.recordings.repetition import MeasuredTime
from sweeps.timing.statistics import median_interval

ROOT = Path(__file__).resolve().parents[2]

_BUSY = "while True: sum(range(100_000))"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many other processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def sweep(results: Path, budget: str, names: list[str]) -> Recording:
    """A run of its own."""
    command = [sys.executable, "-m", "sweeps", "run", *names, "--device", "cpu", "--budget", budget,
               "--results", str(results), "--json"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return load(Path(json.loads(done.stdout)["folder"]))


def times(recording: Recording) -> dict[Any, MeasuredTime]:
    """Every case that has an interval, by problem and implementation."""
    measured = read_measurements(recording.products, recording)
    return {
        (problem, name): time
        for problem in measured.problems
        for name, time in measured.times_of(problem).items()
        if time.lo == time.lo and time.rounds
    }


def shares(first: Recording, second: Recording) -> dict[str, Any]:
    """How many second medians lie in the first's intervals of each kind."""
    one, other = times(first), times(second)
    both = [(one[key], other[key]) for key in one.keys() & other.keys()]
    if not both:
        return {"cases": 0, "health": [first.health["verdict"], second.health["verdict"]]}
    alone = [median_interval(list(a.rounds.values())) or (0.0, 0.0) for a, _ in both]
    ends = {
        "alone": alone,
        "median": [(a.lo, a.hi) for a, _ in both],
        "repetition": [a.repetition for a, _ in both],
    }
    return {
        "cases": len(both),
        **{
            name: sum(lo <= b.time <= hi for (lo, hi), (_, b) in zip(of, both, strict=True))
            / len(both)
            for name, of in ends.items()
        },
        "half_width": sorted(b[1] / b[0] for b in ends["repetition"])[len(both) // 2] ** 0.5 - 1,
        "health": [first.health["verdict"], second.health["verdict"]],
        "reasons": list(first.health["reasons"]),
    }


def main(
    pairs: Annotated[int, typer.Option(help="Of sweeps, one after the other.")] = 3,
    budget: Annotated[str, typer.Option(help="Of each sweep.")] = "40s",
    busy_processes: Annotated[int, typer.Option("--busy", help="Processes beside them.")] = 0,
    sweeps: Annotated[list[str] | None, typer.Option("--sweep", help="Which; defaults.")] = None,
    write: Annotated[Path | None, typer.Option(help="A file to append to.")] = None,
) -> None:
    """Print the shares, a line for each pair."""
    with busy(busy_processes):
        for _ in range(pairs):
            with tempfile.TemporaryDirectory() as place:
                first, second = (sweep(Path(place) / n, budget, sweeps or []) for n in "12")
                told = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "budget": budget,
                        "busy": busy_processes, "machine": first.machine.slug,
                        "software": first.run["software"], **shares(first, second)}  # fmt: skip
            print(json.dumps(told), flush=True)
            if write is not None:
                with open(write, "a", encoding="utf-8") as file:
                    file.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    typer.run(main)
