"""Profiled models: the models are what they claim to be, and a trace is read for what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.device import this_cpu
from sweeps.profiling.models import MODELS, training_step
from sweeps.profiling.profile import is_profiled, operations, profile_models, write_models


@pytest.mark.parametrize(
    ("name", "parameters", "out"),
    [("resnet50", 25_557_032, (2, 1000)), ("gpt2-block", 7_087_872, (2, 1024, 768))],
)
def test_the_models_have_the_published_number_of_parameters(
    name: str, parameters: int, out: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        net = MODELS[name].build()
        y = net(torch.empty(2, *MODELS[name].shape))
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert tuple(y.shape) == out


def op(name: str, ts: float, dur: float, ident: int, **args: Any) -> dict[str, Any]:
    return {
        "cat": "cpu_op", "name": f"aten::{name}", "ts": ts, "dur": dur, "tid": args.pop("tid", 1),
        "args": {"External id": ident, "Input Dims": [[4, 8], [8, 2], []],
                 "Input type": ["float", "float", "Scalar"], **args},
    }  # fmt: skip


def test_on_a_cpu_an_operations_time_is_its_own() -> None:
    events = [
        op("linear", 0, 100, 1),
        op("addmm", 10, 60, 2),
        op("copy_", 20, 10, 3),
        op("relu", 100, 5, 4),
        op("mm", 30, 40, 5, tid=2),  # of another thread: within nothing
    ]
    found = {row["operation"]: row["seconds"] * 1e6 for row in operations(events, "fp32", "cpu")}
    assert found == pytest.approx({"linear": 40, "addmm": 50, "copy_": 10, "relu": 5, "mm": 40})


def test_on_a_gpu_an_operations_time_is_its_kernels() -> None:
    half = {"Input type": ["c10::BFloat16", "c10::BFloat16", ""]}
    events = [
        op("mm", 0, 50, 1, **half),
        op("mm", 60, 50, 2, **half),
        op("relu", 120, 50, 3),
        {"cat": "kernel", "name": "nvjet", "ts": 5, "dur": 7, "args": {"External id": 1}},
        {"cat": "kernel", "name": "nvjet", "ts": 70, "dur": 8, "args": {"External id": 2}},
        {"cat": "kernel", "name": "splitKreduce", "ts": 80, "dur": 1, "args": {"External id": 2}},
    ]
    (row,) = operations(events, "tf32", "gpu")  # ReLU launched nothing that was seen
    assert row["shapes"] == [[4, 8], [8, 2]]
    assert (row["operation"], row["dtype"], row["calls"]) == ("mm", "bf16", 2)
    assert row["seconds"] == pytest.approx(16e-6)
    assert row["kernels"] == pytest.approx({"nvjet": 15e-6, "splitKreduce": 1e-6})


def test_a_gpu_whose_kernels_nobody_saw_has_no_operations() -> None:
    assert operations([op("mm", 0, 50, 1)], "tf32", "gpu") == []


def test_fp32_is_what_it_was_multiplied_as() -> None:
    (row,) = operations([op("mm", 0, 1, 1)], "tf32", "cpu")
    assert row["dtype"] == "tf32"


def test_a_step_computes_gradients() -> None:
    step = training_step("gpt2-block", "cpu", torch.float32)
    with torch.profiler.profile() as profiler:
        step()
    names = {event.key for event in profiler.key_averages()}
    assert any("backward" in name for name in names)


def test_models_are_profiled_once_for_each_software(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.profiling.profile.MODELS", {"gpt2-block": MODELS["gpt2-block"]})
    monkeypatch.setattr("sweeps.profiling.profile.STEPS", 2)
    device = this_cpu()
    assert not is_profiled(tmp_path, device)
    document = profile_models(device, lambda text: None)
    write_models(tmp_path, document)
    assert is_profiled(tmp_path, device)
    (model,) = document["models"]
    assert len(model["seconds"]) == 2
    by_name = [row["operation"] for row in model["operations"]]
    assert "addmm" in by_name
    times = [row["seconds"] for row in model["operations"]]
    assert times == sorted(times, reverse=True)
    (tmp_path / "models.json").write_text(json.dumps({**document, "software": {"torch": "1"}}))
    assert not is_profiled(tmp_path, device)
