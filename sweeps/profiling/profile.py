"""Profile training steps: which operations take the time, with their shapes and kernels.

A few steps are timed in each dtype, in turn, so that their ratios come from one run. One step then
runs under PyTorch's profiler, whose trace shows which operation launched which kernel. On a CPU an
operation's time is its own, without that of the operations that it called.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kernels.device import Device, make_current, software
from kernels.library.vendor import LibraryConfig, library_settings
from sweeps.profiling.models import MODELS, training_step
from sweeps.schema import SCHEMA
from sweeps.store import write_json
from sweeps.timing.profiler_trace import profile_events
from sweeps.timing.sampler import PROTOCOL

STEPS = 8
"""Timed steps of each model and dtype, after a warm-up step that does not count."""

_DTYPES = {"gpu": ("fp32", "tf32", "bf16"), "cpu": ("fp32",)}
_STORED = {"bf16": torch.bfloat16}
_NAMED = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"}


def profile_models(device: Device, note: Callable[[str], None]) -> dict[str, Any]:
    """Profile every model: seconds of its steps by dtype, and the operations of one step.

    Returns:
        The document of ``models.json``.
    """
    kind = device.machine.kind
    make_current(device.gpu)
    models = []
    for name in MODELS:
        note(f"Profiling {name} …")
        dtypes = [dtype for dtype in _DTYPES[kind] if dtype in device.machine.peaks]
        steps = {
            d: training_step(name, device.torch_name, _STORED.get(d, torch.float32)) for d in dtypes
        }
        seconds: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
        for round_ in range(STEPS + 1):
            for dtype, step in steps.items():
                step_seconds = _step_seconds(step, dtype, kind)
                if round_:
                    seconds[dtype].append(step_seconds)
        for dtype, step in steps.items():
            events = _step_events(step, dtype, kind)
            models.append(
                {
                    "model": name,
                    "dtype": dtype,
                    "images": MODELS[name].images[kind],
                    "seconds": seconds[dtype],
                    "operations": operations(events, dtype, kind),
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
    """Return True if the folder has the models' profiles with the present versions."""
    try:
        document = json.loads((folder / "models.json").read_bytes())
        return bool(document["software"] == software(device) and document["schema"] == SCHEMA)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_models(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write ``models.json`` and return its path."""
    return write_json(folder / "models.json", document)


def operations(events: Sequence[Mapping[str, Any]], dtype: str, kind: str) -> list[dict[str, Any]]:
    """Return the operations of a trace, the longest first.

    Operations of one name, shape and dtype are added up.

    Args:
        events: ``traceEvents`` of a trace with shapes.
        dtype: precision of fp32 matrix multiplication, ``fp32`` or ``tf32``.
        kind: kind of machine. If a GPU's profiler shows no kernel, nothing is known and the result
            is empty.

    Returns:
        ``operation``, ``shapes``, ``dtype``, ``calls``, ``seconds`` (of its kernels on a GPU, its
        own on a CPU) and ``kernels``, the names with their seconds.
    """
    # 1. Find the seconds of each operation, and the kernels that it launched.
    ops = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: e["ts"])
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    exclusive = _exclusive_seconds(ops)
    # A kernel has the external id of the operation that launched it.
    launched: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for kernel in kernels:
        launched[kernel.get("args", {}).get("External id")].append(kernel)
    # 2. Add up operations of one name, shape and dtype.
    entries: dict[Any, dict[str, Any]] = {}
    for op, seconds in zip(ops, exclusive, strict=True):
        args = op.get("args", {})
        own_kernels = launched.get(args.get("External id"), [])
        op_seconds = sum(k["dur"] for k in own_kernels) * 1e-6 if kind == "gpu" else seconds
        if op_seconds <= 0:
            continue
        shapes = [list(s) for s in args.get("Input Dims", []) if s and isinstance(s[0], int)]
        input_dtype = next((_NAMED[t] for t in args.get("Input type", []) if t in _NAMED), "")
        dtype_used = dtype if input_dtype == "fp32" else input_dtype
        key = op["name"], json.dumps(shapes), dtype_used
        entry = entries.setdefault(
            key,
            {
                "operation": op["name"].removeprefix("aten::"),
                "shapes": shapes,
                "dtype": dtype_used,
                "calls": 0,
                "seconds": 0.0,
                "kernels": {},
            },
        )
        entry["calls"] += 1
        entry["seconds"] += op_seconds
        for k in own_kernels:
            names = entry["kernels"]
            names[k["name"]] = names.get(k["name"], 0.0) + k["dur"] * 1e-6
    return sorted(entries.values(), key=lambda entry: -entry["seconds"])


def _exclusive_seconds(ops: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return each operation's seconds without those of the operations within it.

    ``ops`` must be in the order of their beginnings. Operations nest only within one thread.
    """
    seconds = [op["dur"] * 1e-6 for op in ops]
    within: dict[Any, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        stack = within[op.get("tid")]
        # Operations that ended before this one began do not contain it.
        while stack and ops[stack[-1]]["ts"] + ops[stack[-1]]["dur"] <= op["ts"]:
            stack.pop()
        if stack:
            seconds[stack[-1]] -= op["dur"] * 1e-6
        stack.append(i)
    return seconds


def _step_seconds(step: Callable[[], None], dtype: str, kind: str) -> float:
    with _settings_of(dtype, kind):
        begin = time.perf_counter()
        step()
    return time.perf_counter() - begin


@contextmanager
def _settings_of(dtype: str, kind: str) -> Iterator[None]:
    """Apply a dtype's settings, with the device idle before and after."""
    with library_settings(dtype, LibraryConfig()):
        if kind == "gpu":
            torch.cuda.synchronize()
        yield
        if kind == "gpu":
            torch.cuda.synchronize()


def _step_events(step: Callable[[], None], dtype: str, kind: str) -> list[dict[str, Any]]:
    activity = torch.profiler.ProfilerActivity

    def work() -> None:
        with _settings_of(dtype, kind):
            step()

    return profile_events(work, [activity.CPU, *([activity.CUDA] if kind == "gpu" else [])])
