"""Time and trace training steps of two models.

The dtypes alternate from step to step, so that slow changes in the machine's speed affect all of
them alike.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kernels.device import Device, make_current, software
from kernels.library.vendor import LibraryConfig, library_settings
from sweeps.profiling.models import MODELS, training_step
from sweeps.schema import SCHEMA
from sweeps.store import make_folder, write_json, write_whole
from sweeps.timing.profiler_trace import profile_document
from sweeps.timing.sampler import PROTOCOL

STEPS = 8
"""Number of timed steps of each model and dtype, after one warm-up step."""

TRACES = "traces"
"""Folder with the traces, next to ``models.json``."""

_DTYPES = {"gpu": ("fp32", "tf32", "bf16"), "cpu": ("fp32",)}  # by kind of machine
# Type of the parameters by dtype; float32 if not listed.
_PARAMETER_TYPES = {"bf16": torch.bfloat16}
_MARK = "rooftile step"
_KEPT = ("schemaVersion", "deviceProperties", "record_shapes", "displayTimeUnit")
"""Top-level entries of a trace that are kept in addition to its events.

Some of the other entries name the host or a folder."""


def profile_models(device: Device, folder: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Time training steps of each model, and trace one step in each dtype.

    The traces are written to the subfolder :data:`TRACES` of ``folder``. Return the content of
    ``models.json``.

    Raises:
        UserError: if a trace cannot be written.
    """
    kind = device.machine.kind
    make_current(device.gpu)
    dtypes = [dtype for dtype in _DTYPES[kind] if dtype in device.machine.peaks]
    models = []
    for name in MODELS:
        note(f"Profiling {name} …")
        # 1. Build a step in each dtype.
        steps: dict[str, Callable[[], None]] = {}
        for dtype in dtypes:
            parameter_type = _PARAMETER_TYPES.get(dtype, torch.float32)
            steps[dtype] = training_step(name, device.torch_name, parameter_type)
        # 2. Time the steps in rounds over the dtypes. The first round is a warm-up.
        seconds: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
        for round_number in range(STEPS + 1):
            for dtype, step in steps.items():
                step_seconds = _step_seconds(step, dtype, kind)
                if round_number > 0:
                    seconds[dtype].append(step_seconds)
        # 3. Trace one step in each dtype.
        for dtype, step in steps.items():
            path = folder / TRACES / f"{name}-{dtype}.json.gz"
            _write_trace(path, _step_trace(step, dtype, kind))
            models.append(
                {
                    "model": name,
                    "dtype": dtype,
                    "images": MODELS[name].batch[kind],
                    "seconds": seconds[dtype],
                    "trace": str(path.relative_to(folder)),
                }
            )
    return {
        "schema": SCHEMA,
        "protocol": PROTOCOL,
        "machine": device.machine.to_json(),
        "software": software(device),
        "models": models,
    }


def is_profiled(folder: Path, device: Device) -> bool:
    """Return True if a folder has a current ``models.json`` and all traces that this file names.

    The file is current if it has the present schema and the versions of this machine's software.
    """
    try:
        document = json.loads((folder / "models.json").read_bytes())
        has_traces = all((folder / entry["trace"]).exists() for entry in document["models"])
        is_current = document["software"] == software(device) and document["schema"] == SCHEMA
        return has_traces and is_current
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_models(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write ``models.json`` and return its path.

    Raises:
        UserError: if the file cannot be written.
    """
    return write_json(folder / "models.json", document)


def _step_seconds(step: Callable[[], None], dtype: str, kind: str) -> float:
    """Return the seconds from the start of one step until the device is idle again."""
    with _synchronized_settings(dtype, kind):
        begin = time.perf_counter()
        step()
    return time.perf_counter() - begin


@contextmanager
def _synchronized_settings(dtype: str, kind: str) -> Iterator[None]:
    """Run a block with a dtype's library settings; on a GPU, synchronize before and after it."""
    with library_settings(dtype, LibraryConfig()):
        if kind == "gpu":
            torch.cuda.synchronize()
        yield
        if kind == "gpu":
            torch.cuda.synchronize()


def _step_trace(step: Callable[[], None], dtype: str, kind: str) -> dict[str, Any]:
    """Return the trace of one step: its events, and the top-level entries in :data:`_KEPT`.

    Events before the step are left out.
    """

    def marked_step() -> None:
        with _synchronized_settings(dtype, kind), torch.profiler.record_function(_MARK):
            step()

    activities = [torch.profiler.ProfilerActivity.CPU]
    if kind == "gpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    document = profile_document(marked_step, activities)
    events = document["traceEvents"]
    # The step begins where its mark begins. On a GPU, a second mark of this name begins later, with
    # the first kernel. Events before the step belong to the profiler's dummy launches, or they
    # describe the host and its processes. Some of these descriptions have no time.
    begin = min(event["ts"] for event in events if event.get("name") == _MARK)
    step_events = [event for event in events if "ts" in event and event["ts"] >= begin]
    kept_entries = {name: document[name] for name in _KEPT if name in document}
    return {**kept_entries, "traceEvents": step_events}


def _write_trace(path: Path, document: Mapping[str, Any]) -> None:
    make_folder(path.parent)
    # The header gets no time (mtime=0), so that equal traces give equal files.
    write_whole(path, gzip.compress(json.dumps(document).encode(), mtime=0))
