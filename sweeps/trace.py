"""Which kernels a launch runs, with their shares of its time: one profiler pass.

On a GPU PyTorch's profiler writes a trace, whose JSON is read (its printed table truncates
names). On a CPU, oneDNN and MKL name their kernels on stdout when asked to be verbose.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.names import read_name

# The profiler's library tells of its own doings on stderr; it reads this when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

LaunchOnce = Callable[[], object]
_DELIMITER = "spin_kernel"  # what torch.cuda._sleep runs


@dataclass(frozen=True)
class Kernel:
    """One kernel of a launch: seconds, and its grid where there is one."""

    name: str
    seconds: float
    grid: tuple[int, ...] = ()


def trace_cpu(launch: LaunchOnce) -> list[Kernel]:
    """The oneDNN and MKL kernels of one launch; empty if PyTorch computed it by itself."""
    with _captured_stdout() as read:
        with ExitStack() as verbose:
            for library in (torch.backends.mkldnn, torch.backends.mkl):
                if library.is_available():
                    verbose.enter_context(library.verbose(library.VERBOSE_ON))
            launch()
        text = read()
    return parse_verbose(text)


def parse_verbose(text: str) -> list[Kernel]:
    """Read what ``ONEDNN_VERBOSE`` and ``MKL_VERBOSE`` print.

    oneDNN: ``onednn_verbose,v1,primitive,exec,cpu,<kind>,<implementation>,…,<ms>``.
    MKL: ``MKL_VERBOSE SGEMM(N,N,…) 1.30ms …``.
    """
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    kernels = []
    for line in text.splitlines():
        fields = line.split(",")
        if line.startswith("onednn_verbose,") and fields[2:4] == ["primitive", "exec"]:
            kernels.append(Kernel(f"{fields[5]} {fields[6]}", float(fields[-1]) * 1e-3))
        elif match := re.match(r"MKL_VERBOSE (\w+)\(.*?\) ([\d.]+)([mun]?s)\b", line):
            name, number, unit = match.groups()
            kernels.append(Kernel(f"mkl_{name.lower()}", float(number) * units[unit]))
    return kernels


def trace_gpu(launches: Sequence[LaunchOnce]) -> list[list[Kernel]]:
    """The kernels of each launch, all from one profiler session.

    A short spin before each launch marks where it begins. A launch that fails has no kernels.
    """

    def work() -> None:
        for launch in launches:
            torch.cuda._sleep(1000)
            with suppress(Exception):
                launch()
        torch.cuda.synchronize()

    events = profiled(work, [torch.profiler.ProfilerActivity.CUDA])
    return split_trace(events, len(launches))


def profiled(
    work: Callable[[], object], activities: Sequence[torch.profiler.ProfilerActivity]
) -> list[dict[str, Any]]:
    """The events of PyTorch's trace of some work, with the operations' shapes."""
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return events


def split_trace(events: Sequence[dict[str, Any]], count: int) -> list[list[Kernel]]:
    """Sort a trace's kernels into ``count`` launches, each begun by the spinning kernel."""
    ran = sorted(
        (event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"]
    )
    launches: list[list[Kernel]] = []
    for event in ran:
        if _DELIMITER in event["name"]:
            launches.append([])
        elif launches:
            grid = tuple(event.get("args", {}).get("grid", ()))
            launches[-1].append(Kernel(event["name"], event["dur"] * 1e-6, grid))
    return launches if len(launches) == count else [[] for _ in range(count)]


def kernel_columns(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """The columns ``kernel``, ``tile``, ``grid``, ``kernels`` and ``tensor_cores``."""
    if not kernels:
        return {}
    total = sum(kernel.seconds for kernel in kernels) or 1.0
    shares: dict[str, float] = {}
    for kernel in kernels:
        shares[kernel.name] = shares.get(kernel.name, 0.0) + kernel.seconds / total
    main = max(kernels, key=lambda kernel: kernel.seconds)
    facts = read_name(main.name)
    listing = [[name, round(share, 4)] for name, share in shares.items()]
    return {
        "kernel": main.name,
        "tile": facts.tile_text(),
        "grid": "x".join(map(str, main.grid)),
        "kernels": json.dumps(listing, ensure_ascii=False),
        "tensor_cores": facts.tensor_cores,
    }


@contextmanager
def _captured_stdout() -> Iterator[Callable[[], str]]:
    """Send the process's stdout, C libraries' included, to a file; yields a reader of it."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)

        def read() -> str:
            libc.fflush(None)
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield read
        finally:
            libc.fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
