"""How much longer do commands take on larger recordings?

    python -m tests.studies.growth [--checkout DIR] [--rows 1000,10000,100000,1000000] [--limit 150]
                           [--only calibrate,recommend] [--write FILE]

Recordings of so many GEMMs are made up by the model's own formula, and each command is started on
each of them, one at a time, the first one before any copy or calibration exists: processor seconds
of the process and its children, and the most memory that one of them held. What does not end within
``--limit`` seconds of wall time is stopped and printed as such. ``--checkout`` times the commands
of another checkout, such as an older one's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tests.support.synthetic import H100, gemm_cases, model_law, problems, record

ROOT = Path(__file__).resolve().parents[2]

_CHUNK = 20_000  # shapes whose time is computed at once
COMMANDS = {
    "calibrate": (), "recommend": ("--gemm", "4096,4096,1000,bf16"), "table": (), "rules": (),
    "report": (), "compare": (),
}  # fmt: skip


def made_up(folder: Path, rows: int) -> Path:
    """A recording of so many different GEMMs, with 2 % noise."""
    rng = np.random.default_rng(0)
    sizes: dict[tuple[int, int, int], None] = {}
    while len(sizes) < rows:
        drawn = (2 ** rng.uniform(4, 13.5, (rows, 3))).astype(int).tolist()
        sizes |= dict.fromkeys((m, n // 8 * 8 + 8, k // 8 * 8 + 8) for m, n, k in drawn)
    cases = gemm_cases(list(sizes)[:rows], "square")
    asked = problems(cases)
    law = model_law()
    chunks = [law(asked[at : at + _CHUNK]) for at in range(0, rows, _CHUNK)]
    seconds = np.concatenate(chunks) * np.exp(0.02 * rng.standard_normal(rows))
    return record(folder, cases, seconds)


def timed(checkout: Path, arguments: list[str], limit: float) -> dict[str, Any]:
    """What a command took: processor seconds, megabytes, and whether it ended in time."""
    line = [sys.executable, "-m", "analysis", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with subprocess.Popen(
        line, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        stopper = threading.Timer(limit, process.kill)
        stopper.start()
        _, status, usage = os.wait4(process.pid, 0)
        stopper.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "ended": process.returncode == 0, "code": process.returncode,
        "seconds": round(usage.ru_utime + usage.ru_stime, 1), "megabytes": usage.ru_maxrss // 1024,
    }  # fmt: skip


def _said(*line: str, at: Path = ROOT) -> str:
    done = subprocess.run(line, cwd=at, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout.strip()


def main(
    checkout: Annotated[Path, typer.Option()] = ROOT,
    rows: Annotated[str, typer.Option()] = "1000,10000,100000,1000000",
    limit: Annotated[float, typer.Option(help="Seconds for each command.")] = 150.0,
    only: Annotated[str, typer.Option(help="These commands alone.")] = ",".join(COMMANDS),
    write: Annotated[Path | None, typer.Option()] = None,
) -> None:
    commit = _said("git", "log", "-1", "--format=%h %cs", at=checkout)
    machine = json.loads(_said(sys.executable, "-m", "sweeps", "doctor", "--name", "--json"))[
        "slug"
    ]
    wanted = {name: COMMANDS[name] for name in only.split(",")}
    print(f"{'rows':>9}  " + "".join(f"{name:>18}" for name in wanted))
    for count in map(int, rows.split(",")):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / H100.slug
            # In a process of its own: what this one holds counts as its children's.
            maker = get_context("spawn").Process(target=made_up, args=(folder, count))
            maker.start()
            maker.join()
            found = {}
            for name, more in wanted.items():
                of = [str(folder)] * 2 if name == "compare" else ["--machine", H100.slug]
                found[name] = timed(checkout, [name, *of, *more, "--results", place], limit)
        cells = [
            f"{f['seconds']:.0f} s, {f['megabytes']} MB" if f["ended"] else f"not in {limit:.0f} s"
            for f in found.values()
        ]
        print(f"{count:>9,}  " + "".join(f"{cell:>18}" for cell in cells), flush=True)
        if write is not None:
            line = {
                "rows": count, "commit": commit, "machine": machine, "limit_s": limit,
                "commands": found,
            }  # fmt: skip
            with write.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    typer.run(main)
