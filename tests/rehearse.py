"""A recording rehearsed for real: in slices, and killed in every one of its steps.

    python tests/rehearse.py [cpu] [gpu]

On the CPU the commands measure; on the GPU they run on the made-up one of ``fake_gpu.py``. First
each step is killed once, with ``kill -9`` of the recording while it is busy with that step; then
slices go on until nothing is missing. Whatever was lost shows as a case that is measured twice, a
step that is missing, or an error. Prints a line per slice, and exits 1 if anything is wrong.
"""

from __future__ import annotations

import csv
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLICE = {"cpu": "75s", "gpu": "90s"}
MAX_SLICES = 25


def command(kind: str, results: Path) -> list[str]:
    fake = [str(ROOT / "tests" / "fake_gpu.py")] if kind == "gpu" else []
    return [sys.executable, *fake, "-m", "analysis", "record", "--device", kind, "--budget",
            SLICE[kind], "--results", str(results)]  # fmt: skip


def kill_in_every_step(kind: str, results: Path) -> int:
    """Start the recording again and again, and kill it in the first step not yet killed in."""
    rng = random.Random(0)
    killed: list[str] = []
    for _ in range(4 * MAX_SLICES):
        process = subprocess.Popen(
            command(kind, results), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            step = re.match(r"([\w-]+): about", line)
            if step and step.group(1) not in killed:
                time.sleep(rng.uniform(0.0, 6.0))
                killed.append(step.group(1))
                process.kill()
                print(f"{kind}: killed in {killed[-1]}", flush=True)
                break
        process.wait()
        if process.returncode == 0 and "missing" not in finish(kind, results):
            break
    return len(killed)


def finish(kind: str, results: Path) -> str:
    answer = subprocess.run(
        command(kind, results), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise SystemExit(f"{kind}: exit code {answer.returncode}: {answer.stderr}")
    return answer.stderr


def twice(results: Path) -> list[str]:
    """Cases that a table has more than once."""
    repeated = []
    for path in results.rglob("measurements.csv"):
        with open(path, encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            header = next(rows)
            begin, end = header.index("sweep"), header.index("fill") + 1
            counts = Counter(tuple(row[begin:end]) for row in rows)
        repeated += [str(case) for case, count in counts.items() if count > 1]
    return repeated


def rehearse(kind: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        kills = kill_in_every_step(kind, results)
        for number in range(1, MAX_SLICES + 1):
            said = finish(kind, results)
            missing = re.findall(r"missing: (.*)", said)
            print(f"{kind}: slice {number}: {len(missing)} parts missing {missing}", flush=True)
            if not missing:
                break
        repeated = twice(results)
        print(f"{kind}: {kills} kills, {len(repeated)} cases twice, {len(missing)} parts missing")
        return bool(kills) and not repeated and not missing


if __name__ == "__main__":
    kinds = sys.argv[1:] or ["cpu", "gpu"]
    results = [rehearse(kind) for kind in kinds]  # all of them, whatever the first says
    sys.exit(not all(results))
