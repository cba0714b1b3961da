"""Profiled models: each has its published size, and one step of it is timed and traced."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from kernels.device import this_cpu
from sweeps.profiling.models import MODELS, training_step
from sweeps.profiling.profile import _step_trace, is_profiled, profile_models, write_models


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
    document = profile_models(device, tmp_path, lambda text: None)
    write_models(tmp_path, document)
    assert is_profiled(tmp_path, device)
    (model,) = document["models"]
    assert len(model["seconds"]) == 2
    assert model["trace"] == "traces/gpt2-block-fp32.json.gz"
    (tmp_path / "models.json").write_text(json.dumps({**document, "software": {"torch": "1"}}))
    assert not is_profiled(tmp_path, device)
    write_models(tmp_path, document)
    (tmp_path / model["trace"]).unlink()
    assert not is_profiled(tmp_path, device)


def test_a_trace_has_one_step_with_shapes_and_nothing_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.profiling.profile.MODELS", {"gpt2-block": MODELS["gpt2-block"]})
    monkeypatch.setattr("sweeps.profiling.profile.STEPS", 1)
    (model,) = profile_models(this_cpu(), tmp_path, lambda text: None)["models"]
    trace = json.loads(gzip.decompress((tmp_path / model["trace"]).read_bytes()))
    assert set(trace) <= {
        "schemaVersion", "deviceProperties", "record_shapes", "displayTimeUnit", "traceEvents",
    }  # fmt: skip
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert names.count("aten::addmm") == 4
    assert names.count("aten::mm") == 8
    assert not [event for event in trace["traceEvents"] if event["ph"] == "M"]


def test_what_a_gpu_s_profiler_sacrificed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = {"ph": "X", "cat": "user_annotation", "name": "rooftile step", "ts": 50.0, "dur": 9.0}
    begun_on_gpu = {**begun, "cat": "gpu_user_annotation", "ts": 55.0}
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 52.0, "dur": 1.0}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 55.0, "dur": 1.0}
    kept = [begun_on_gpu, begun, launch, kernel]
    events = [
        {"ph": "M", "name": "process_name"}, {**kernel, "name": "spin_kernel", "ts": 40.0}, *kept,
    ]  # fmt: skip
    monkeypatch.setattr(
        "sweeps.profiling.profile.profile_document",
        lambda work, activities: {"host_name": "here", "traceEvents": events},
    )
    assert _step_trace(lambda: None, "fp32", "cpu") == {"traceEvents": kept}
