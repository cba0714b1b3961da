"""What does reading a trace cost? Time and memory of files of 50 MB and of 1 GB.

    python -m tests.studies.trace_speed [--size MB …] [--write FILE]

A simulated training step of a GPT-2 on an H100, with the calls of CUDA's runtime, the flows between
events and the Python functions that a real trace has, is repeated until the file is large enough.
Each reading is a process of its own, whose CPU time, with that of starting, and largest memory are
reported:

1. The whole file at once, by ``json``; up to 100 MB, because it needs six times as much memory.
2. Event by event, by ``ijson`` with its C library, where it is installed.
3. Event by event, by :mod:`analysis.traces.trace_reader`.
4. ``python -m analysis explain``.

Prints a line of JSON for each, and ``--write`` appends them to a file.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from kernels.machine import cpu_model
from tests.support.gpu_traces import GpuTrace, training_step

ROOT = Path(__file__).resolve().parents[2]
_AT_ONCE_MB = 100
_IDS = ("External id", "correlation", "Ev Idx", "Python id", "Python parent id")

_MEASURED = """
import sys
from pathlib import Path
path = Path(sys.argv[1])
{code}
import json, re, time
# Unlike that of getrusage, this is not the memory of the process that started this one.
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(json.dumps({{"cpu_seconds": round(time.process_time(), 2), "events": events,
    "peak_mb": round(int(peak[1]) / 1024)}}))
"""
READERS = {
    "json": "import json\n"
    "with open(path, encoding='utf-8') as file:\n    events = len(json.load(file)['traceEvents'])",
    "ijson": "import ijson\nevents = 0\n"
    "with open(path, 'rb') as file:\n"
    "    for _ in ijson.items(file, 'traceEvents.item', use_float=True):\n        events += 1",
    "trace_reader": "from analysis.traces.trace_reader import read_events\n"
    "events = sum(1 for _ in read_events(path, {}))",
    "explain": "from analysis.explain.explain import explain_traces\n"
    "verdict = explain_traces([path], None, Path('none'))\n"
    "events = sum(entry.operation.calls for entry in verdict.operations)",
}


def step_with_calls() -> list[dict[str, Any]]:
    """The events of one step: operations, launches, kernels, flows and Python functions."""
    events = training_step().document()["traceEvents"]
    flows = [
        {"ph": "f", "id": e["args"]["correlation"], "pid": e["pid"], "tid": e["tid"],
         "ts": e["ts"], "cat": "ac2g", "name": "ac2g", "bp": "e"}
        for e in events if e.get("cat") == "kernel"
    ]  # fmt: skip
    calls = [
        {"ph": "X", "cat": "python_function", "name": "nn/module.py(1775): _call_impl",
         "pid": e["pid"], "tid": e["tid"], "ts": e["ts"], "dur": e["dur"],
         "args": {"Python parent id": 1, "Python id": 2, "Ev Idx": 3}}
        for e in events if e.get("cat") == "cpu_op" for _ in range(3)
    ]  # fmt: skip
    return [*events, *flows, *calls]


def write_trace(path: Path, size: int) -> None:
    """Write a trace of at least ``size`` bytes: the step again and again."""
    step = step_with_calls()
    first = min(event["ts"] for event in step)
    length = max(event["ts"] + event.get("dur", 0.0) for event in step) - first + 100.0
    document = GpuTrace().document()
    with open(path, "w", encoding="utf-8") as file:
        document["traceEvents"] = []
        file.write(json.dumps(document)[: -len('], "traceName": "trace.json"}')])
        number, comma = 0, ""
        while file.tell() < size:
            lines = []
            for event in step:
                args = event.get("args", {})
                moved = {key: args[key] + 100_000 * number for key in _IDS if key in args}
                shifted = {**event, "ts": round(event["ts"] + number * length, 3)}
                lines.append(json.dumps({**shifted, "args": {**args, **moved}}, indent=2))
            file.write(comma + ",\n".join(lines))
            number, comma = number + 1, ",\n"
        file.write("]}")


def measured(reader: str, path: Path) -> dict[str, Any]:
    """CPU seconds and memory of a reader in a process of its own."""
    code = _MEASURED.format(code=READERS[reader])
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(
    sizes: Annotated[
        list[int] | None, typer.Option("--size", min=1, help="MB of a file [default: 50, 1000].")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Append lines of JSON to it.")] = None,
) -> None:
    """Measure the readers on files of some sizes."""
    try:
        with_ijson = [importlib.metadata.version("ijson")]
    except importlib.metadata.PackageNotFoundError:
        with_ijson = []
    common = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": cpu_model(),
        "python": platform.python_version(), **({"ijson": with_ijson[0]} if with_ijson else {}),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes or [50, 1000]:
            path = Path(folder) / f"{size}.json"
            begin = time.perf_counter()
            write_trace(path, size * 1_000_000)
            print(f"wrote {size} MB in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
            for reader in READERS:
                if (reader == "ijson" and not with_ijson) or (
                    reader == "json" and size > _AT_ONCE_MB
                ):
                    continue
                line = {"reader": reader, "mb": round(path.stat().st_size / 1e6), **common}
                text = json.dumps(line | measured(reader, path))
                print(text, flush=True)
                if write is not None:
                    with open(write, "a", encoding="utf-8") as file:
                        file.write(text + "\n")
            path.unlink()


if __name__ == "__main__":
    typer.run(main)
