"""Are the times that ``explain`` expects those of real steps? Traces of two models on this CPU.

    python -m tests.studies.traced_steps [TRACE …] [--budget 150s] [--results DIR] [--write FILE]
    python -m tests.studies.traced_steps TRACE … --machine NAME [--results DIR] [--write FILE]

1. The default sweeps are measured within the budget, unless ``--results`` has a recording of this
   CPU, and the model is calibrated.
2. A training step of ResNet-50 and of a GPT-2 block is traced, twice, unless traces are given.
3. Each trace is explained. Of the operations whose shape has an expected time, the line says how
   many took a time within the 90% interval, how many took longer, and the median of traced over
   expected times.

Prints a line of JSON for each trace, and ``--write`` appends it. ``load`` is the load average when
a new trace was recorded. Shapes that the sweeps timed have the interval of a second run, which is
narrow. With ``--machine``, the given traces of a GPU are compared with its recording, and nothing
is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from analysis.explain.explain import explain_traces
from analysis.recordings.load import find_recording
from kernels.device import Device, this_cpu
from kernels.machine import cpu_model
from sweeps.folding.health import health_sentence
from sweeps.profiling.profile import profile_models
from sweeps.store import read_run

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 2


def recorded(results: Path, budget: str) -> None:
    """Measure the default sweeps on this CPU, and calibrate the model."""
    for words in (["sweeps", "run", "--budget", budget, "--device", "cpu"],
                  ["analysis", "report", "--machine", this_cpu().machine.slug]):  # fmt: skip
        command = [sys.executable, "-m", *words, "--results", str(results)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def new_traces(device: Device, folder: Path) -> Iterator[Path]:
    """Trace every model again and again; a later trace replaces an earlier one."""
    for _ in range(ROUNDS):
        for model in profile_models(device, folder, lambda text: None)["models"]:
            yield folder / model["trace"]


def compared(trace: Path, results: Path) -> dict[str, Any]:
    """Traced times next to expected ones."""
    verdict = explain_traces([trace], None, results)
    known = [(e.operation, e.expected) for e in verdict.operations if e.expected is not None]
    ratios = [operation.each_us / expected.time_us for operation, expected in known]
    longer = sum(operation.each_us > expected.hi_us for operation, expected in known)
    shorter = sum(operation.each_us < expected.lo_us for operation, expected in known)
    return {
        "shapes": len(known), "within": len(known) - longer - shorter, "longer": longer,
        "median_ratio": round(median(ratios), 3),
        "share_of_time": round(
            sum(operation.time_us for operation, _ in known) / verdict.account.total_us, 3
        ),
        "findings": len(verdict.findings),
        "largest_saving": [verdict.findings[0].subject, round(verdict.findings[0].saves_us)]
        if verdict.findings
        else None,
    }  # fmt: skip


def append(line: dict[str, Any], write: Path | None) -> None:
    """Print a line of JSON, and append it to a file if one is given."""
    print(json.dumps(line), flush=True)
    if write is not None:
        with open(write, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Traces of this CPU [default: new ones].")
    ] = None,
    budget: Annotated[str, typer.Option(help="Measuring time of the sweeps.")] = "150s",
    results: Annotated[Path | None, typer.Option(help="Folder with a recording to use.")] = None,
    write: Annotated[Path | None, typer.Option(help="Append lines of JSON to it.")] = None,
    machine: Annotated[
        str | None, typer.Option(help="Machine of the given traces [default: this CPU].")
    ] = None,
) -> None:
    """Trace the models, and compare their operations with expected times."""
    if machine is not None:
        place = results or ROOT / "results"
        run = read_run(find_recording(machine, place))
        common = {
            "machine": machine, "torch": run["software"]["torch"],
            "date": f"{datetime.now(UTC):%Y-%m-%d}", "run": health_sentence(run),
        }  # fmt: skip
        for trace in traces or []:
            append({"trace": trace.name, "load": None, **common, **compared(trace, place)}, write)
        return
    device = this_cpu()
    torch.set_num_threads(device.machine.sms)
    with tempfile.TemporaryDirectory() as folder:
        place = results or Path(folder) / "results"
        if results is None:
            recorded(place, budget)
        common = {
            "machine": cpu_model(), "torch": torch.__version__,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "run": health_sentence(read_run(place / device.machine.slug)),
        }  # fmt: skip
        for trace in traces or new_traces(device, Path(folder)):
            load = None if traces else round(os.getloadavg()[0], 1)
            append({"trace": trace.name, "load": load, **common, **compared(trace, place)}, write)


if __name__ == "__main__":
    typer.run(main)
