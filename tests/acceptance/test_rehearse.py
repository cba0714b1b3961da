"""A recording rehearsed for real: in slices, and killed in every one of its steps.

On the CPU the commands measure; on the GPU they run on the simulated one of
``tests/support/fake_gpu.py``. Sweeps have few cases (``tests/support/few_cases.py``), since a jumpy
CPU takes very long for all of them. First each step is killed once, with ``kill -9`` of the
recording while it is busy with that step; then slices follow until nothing more can be done.
Whatever was lost or repeated shows as a case with more samples than its rule takes, a step that is
missing, or an error. With ``-s`` it prints a line per slice.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from analysis.recorder.parts import all_parts
from kernels.common.program import ROOT
from sweeps.folding.history import CANARY
from sweeps.timing.statistics import CHECKPOINTS

pytestmark = pytest.mark.long

# A CPU's slice is long because every step of it starts processes before it measures anything.
SLICE = {"cpu": "150s", "gpu": "90s"}
MAX_SLICES = 60


def command(kind: str, results: Path) -> list[str]:
    script = ROOT / "tests" / "support" / {"cpu": "few_cases.py", "gpu": "fake_gpu.py"}[kind]
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
    assert answer.returncode == 0, answer.stderr
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


@pytest.mark.parametrize("kind", SLICE)
def test_nothing_is_lost_or_repeated(kind: str, tmp_path: Path) -> None:
    killed = kill_in_every_step(kind, tmp_path)
    missing: list[str] = []
    for number in range(1, MAX_SLICES + 1):
        said = finish(kind, tmp_path)
        missing = re.findall(r"missing: (.*)", said)
        print(f"{kind}: slice {number}: {len(missing)} parts missing {missing}", flush=True)
        if "Run the same command to resume." not in said:
            break
    assert killed == wanted(kind)
    assert spoilt(tmp_path) == []
    assert missing == []
