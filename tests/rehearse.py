"""A recording rehearsed for real: in slices, and killed in every one of its steps.

    python tests/rehearse.py [cpu] [gpu]

On the CPU the commands measure; on the GPU they run on the made-up one of ``fake_gpu.py``. Sweeps
have few cases (``sweeps/few_cases.py``), since a jumpy CPU takes very long for all of them. First
each step is killed once, with ``kill -9`` of the recording while it is busy with that step; then
slices go on until nothing more can be done. Whatever was lost or repeated shows as a case with more
samples than its rule takes, a step that is missing, or an error. Prints a line per slice, and exits
1 if anything is wrong.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from analysis.recorder.parts import all_parts  # noqa: E402
from sweeps.running.fold import CANARY  # noqa: E402
from sweeps.timing.statistics import CHECKPOINTS  # noqa: E402

# A CPU's slice is long because every step of it starts processes before it measures anything.
SLICE = {"cpu": "150s", "gpu": "90s"}
MAX_SLICES = 60


def command(kind: str, results: Path) -> list[str]:
    script = ROOT / "tests" / {"cpu": "sweeps/few_cases.py", "gpu": "fake_gpu.py"}[kind]
    return [sys.executable, str(script), "-m", "analysis", "record", "--device", kind, "--budget",
            SLICE[kind], "--results", str(results)]  # fmt: skip


def kill_in_every_step(kind: str, results: Path) -> set[str]:
    """Start the recording again and again, and kill it in the first step not yet killed in."""
    rng = random.Random(0)
    killed: set[str] = set()
    for _ in range(MAX_SLICES):
        process = subprocess.Popen(
            command(kind, results), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            step = re.match(r"([\w-]+): about", line)
            if step and step.group(1) not in killed:
                time.sleep(rng.uniform(0.0, 6.0))
                process.kill()
                killed.add(step.group(1))
                print(f"{kind}: killed in {step.group(1)}", flush=True)
                break
        process.wait()
        if killed >= wanted(kind):
            break
    return killed


def wanted(kind: str) -> set[str]:
    return {s.name for part in all_parts() for s in part.steps if s.expected(kind) is not None}


def finish(kind: str, results: Path) -> str:
    answer = subprocess.run(
        command(kind, results), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise SystemExit(f"{kind}: exit code {answer.returncode}: {answer.stderr}")
    return answer.stderr


def spoilt(results: Path) -> list[str]:
    """Cases with more samples than the stopping rule takes, or with one sample twice."""
    samples: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in results.rglob("samples/*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["event"] == "sample" and event["case"] != CANARY:
                samples[f"{path} {event['case']}"] += 1
                lines[f"{path} {line}"] += 1
    past = [case for case, count in samples.items() if count > CHECKPOINTS[-1]]
    return past + [line for line, count in lines.items() if count > 1]


def rehearse(kind: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        kills = kill_in_every_step(kind, results)
        for number in range(1, MAX_SLICES + 1):
            said = finish(kind, results)
            missing = re.findall(r"missing: (.*)", said)
            print(f"{kind}: slice {number}: {len(missing)} parts missing {missing}", flush=True)
            if "The same command goes on." not in said:
                break
        wrong, unkilled = spoilt(results), wanted(kind) - kills
        print(
            f"{kind}: killed in {len(kills)} steps (not in {sorted(unkilled)}), {len(wrong)} cases "
            f"spoilt, {len(missing)} parts missing",
            flush=True,
        )
        return not (unkilled or wrong or missing)


if __name__ == "__main__":
    kinds = sys.argv[1:] or ["cpu", "gpu"]
    results = [rehearse(kind) for kind in kinds]  # all of them, whatever the first says
    sys.exit(not all(results))
