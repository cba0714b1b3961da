"""Problems of traced operations are those of the capture by fake tensors, or derived by hand."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.traces.trace_account import account_of
from analysis.traces.trace_events import OperationInputs
from analysis.traces.trace_shapes import works_of
from kernels.problem import Conv, Gemm
from sweeps.capture.capture import capture
from sweeps.capture.captured import Attention, GroupedGemm, Work
from sweeps.capture.sources import find_source
from sweeps.capture.step import ModelStep, StartedStep
from tests.support.tiers import quick_and_slow

STEP = ModelStep(batch=2, seq=64, dtype="fp32")
MODELS: dict[str, tuple[dict[str, int], list[str]]] = {
    "gpt2": ({"hidden": 96, "heads": 4, "layers": 2, "vocab": 1003}, []),
    "tests.support.vit:Vit": ({"hidden": 96, "heads": 3}, ["float32[2,3,64,64]"]),
    "resnet-50": ({}, []),
    "unet": ({"width": 8, "depth": 2}, []),
    "llama-2-7b": ({"hidden": 128, "heads": 2, "kv_heads": 1, "ffn": 192, "layers": 2,
                    "vocab": 500}, []),
}  # fmt: skip


def profiled(started: StartedStep, path: Path) -> torch.profiler.profile:
    """Run a training step under the profiler, and export its trace."""
    started.call().backward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        started.call().backward()
    profiler.export_chrome_trace(str(path))
    return profiler


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the number of threads; on one thread, PyTorch uses other operations for convolutions."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", quick_and_slow(MODELS, 2))
@pytest.mark.usefixtures("threads")
def test_shapes_and_layouts_of_a_step_are_those_of_the_capture(name: str, tmp_path: Path) -> None:
    source = find_source(name, *MODELS[name])
    captured: Counter[Work] = Counter()
    for product in capture(source, STEP).products:
        captured[product.work] += product.count
    path = tmp_path / "trace.json"
    profiled(source.start(STEP, {}), path)
    traced: Counter[Work] = Counter()
    for operation in account_of([path]).operations:
        for work in operation.works:
            traced[work] += operation.calls
    assert traced == captured


@pytest.mark.parametrize("name", quick_and_slow(MODELS, 2))
@pytest.mark.usefixtures("threads")
def test_times_by_name_are_those_of_key_averages(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    profiler = profiled(find_source(name, *MODELS[name]).start(STEP, {}), path)
    account = account_of([path])
    times: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for operation in account.operations:
        times[operation.op] += operation.time_us
        calls[operation.op] += operation.calls
    # PyTorch has rows for ``aten::mul`` and for ``mul``, which it calls.
    averages: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event in profiler.key_averages():
        averages[event.key.removeprefix("aten::")] += event.self_cpu_time_total
        counts[event.key.removeprefix("aten::")] += event.count
    assert calls == counts
    for op, average in averages.items():
        # Both add up times that are rounded to a nanosecond.
        assert times[op] == pytest.approx(average, abs=2e-3 * counts[op]), op
    assert account.total_us == pytest.approx(sum(averages.values()), rel=1e-4)


def test_stacks_name_the_modules_of_operations_and_of_their_gradients(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    x = torch.randn(4, 16, requires_grad=True)
    with torch.profiler.profile(record_shapes=True, with_stack=True) as profiler:
        net(x).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    products = [o for o in account_of([tmp_path / "trace.json"]).operations if o.works]
    assert {operation.op for operation in products} == {"addmm", "mm"}
    assert {operation.module for operation in products} == {"Sequential.Linear"}
    assert sum(operation.calls for operation in products) == 6


def inputs(
    name: str, dims: list[Any], strides: list[Any], types: list[str], settings: list[str]
) -> OperationInputs:
    tensors = [tuple(map(tuple, part)) for part in (dims, strides)]
    return OperationInputs(f"aten::{name}", tensors[0], tensors[1], tuple(types), tuple(settings))


def gemm(name: str, first: int = 0, dtype: str = "c10::BFloat16") -> OperationInputs:
    """Return the inputs of a linear layer's (6, 4) @ (4, 8), after ``first`` other inputs."""
    skipped: list[Any] = [[8]] * first
    return inputs(
        name, [*skipped, [6, 4], [4, 8]], [*[[1]] * first, [4, 1], [1, 4]],
        [dtype] * (first + 2), [""] * (first + 2),
    )  # fmt: skip


NT = Gemm(6, 8, 4, "bf16", "nt")
ATTENTION = Attention(2, 8, 2, 64, 128, 32, 32, "bf16", True)
QKV = [[2, 8, 64, 32], [2, 2, 128, 32], [2, 2, 128, 32]]
QKV_STRIDES = [[16384, 2048, 32, 1], [8192, 4096, 32, 1], [8192, 4096, 32, 1]]


def attention(name: str, causal: int, first: int = 0) -> OperationInputs:
    count = max(causal, first + 3) + 1
    dims: list[Any] = [[]] * count
    strides: list[Any] = [[]] * count
    dims[first : first + 3], strides[first : first + 3] = QKV, QKV_STRIDES
    settings = [""] * count
    settings[causal] = "True"
    return inputs(name, dims, strides, ["c10::BFloat16"] * count, settings)


@pytest.mark.parametrize(
    ("read", "work"),
    [
        (gemm("mm"), NT),
        (gemm("addmm", 1), NT),
        (gemm("addmm", 1, "c10::Half"), Gemm(6, 8, 4, "fp16", "nt")),
        (gemm("_scaled_mm", 0, "c10::Float8_e4m3fn"), Gemm(6, 8, 4, "fp8", "nt")),
        (gemm("matmul"), NT),
        (inputs("bmm", [[3, 6, 4], [3, 4, 8]], [[24, 4, 1], [32, 8, 1]], ["float"] * 2, [""] * 2),
         Gemm(6, 8, 4, "fp32", "nn", 3)),
        (inputs("baddbmm", [[3, 6, 8], [3, 6, 4], [3, 4, 8]],
                [[48, 8, 1], [24, 1, 6], [32, 8, 1]], ["float"] * 3, [""] * 3),
         Gemm(6, 8, 4, "fp32", "tn", 3)),
        (inputs("linear", [[2, 3, 4], [8, 4], [8]], [[12, 4, 1], [4, 1], [1]],
                ["c10::BFloat16"] * 3, [""] * 3), NT),
        (inputs("mv", [[6, 4], [4]], [[4, 1], [1]], ["float"] * 2, [""] * 2),
         Gemm(6, 1, 4, "fp32", "nn")),
        (inputs("_grouped_mm", [[64, 16], [4, 16, 32], [4]], [[16, 1], [512, 1, 16], [1]],
                ["c10::BFloat16", "c10::BFloat16", "int"], [""] * 3),
         GroupedGemm(64, 32, 16, 4, "bf16", "nt")),
        (inputs("_grouped_mm", [[32, 64], [64, 16], [4]], [[1, 32], [16, 1], [1]],
                ["c10::BFloat16", "c10::BFloat16", "int"], [""] * 3),
         GroupedGemm(64, 32, 16, 4, "bf16", "tn", "wgrad")),
        (attention("_scaled_dot_product_flash_attention", 4), ATTENTION),
        (attention("_scaled_dot_product_cudnn_attention", 6), ATTENTION),
        (attention("_scaled_dot_product_efficient_attention", 6), ATTENTION),
        (inputs("cudnn_convolution", [[2, 33, 9, 9], [64, 33, 3, 3], [], [], [], []],
                [[2673, 1, 297, 33], [297, 1, 99, 33], [], [], [], []],
                ["c10::Half", "c10::Half", "ScalarList", "ScalarList", "ScalarList", "Scalar"],
                ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]),
         Conv(2, 33, 9, 9, 64, 3, 3, (2, 2), (1, 1), (1, 1), 1, "fp16", "nhwc")),
        (inputs("_conv_depthwise2d", [[2, 8, 9, 9], [8, 1, 3, 3], *[[]] * 5],
                [[648, 81, 9, 1], [9, 9, 3, 1], *[[]] * 5], ["float"] * 7,
                ["", "", "[3, 3]", "", "[1, 1]", "[1, 1]", "[1, 1]"]),
         Conv(2, 8, 9, 9, 8, 3, 3, (1, 1), (1, 1), (1, 1), 8, "fp32", "nchw")),
    ],
    ids=lambda value: value.name if isinstance(value, OperationInputs) else "",
)  # fmt: skip
def test_operations_of_gpus_are_read_by_hand(read: OperationInputs, work: Work) -> None:
    assert works_of(read) == (work,)


def test_without_strides_the_usual_layouts_are_assumed() -> None:
    read = gemm("mm")
    assert works_of(replace(read, strides=())) == (NT,)
    conv = inputs(
        "cudnn_convolution", [[2, 32, 9, 9], [64, 32, 3, 3]], [], ["c10::Half"] * 2,
        ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"],
    )  # fmt: skip
    (work,) = works_of(conv)
    assert isinstance(work, Conv)
    assert work.layout == "nchw"
    assert works_of(replace(conv, settings=())) == ()


@pytest.mark.parametrize(
    ("name", "causal"),
    [("flash", 11), ("efficient", 11), ("cudnn", 14), ("flash_attention_for_cpu", 7)],
)
def test_gradients_of_attention_are_read(name: str, causal: int) -> None:
    name = name if name.endswith("cpu") else f"{name}_attention"
    (work,) = works_of(attention(f"_scaled_dot_product_{name}_backward", causal, 1))
    assert isinstance(work, Attention)
    assert (work.pass_, work.queries, work.keys, work.causal) == ("backward", 64, 128, True)


@pytest.mark.parametrize(
    "name",
    ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"],
)
def test_settings_are_where_pytorch_has_them(name: str) -> None:
    """Positions of settings in the tables of readers are those in this PyTorch's schemas."""
    for suffix, causal in (("", attention), ("_backward", attention)):
        function = getattr(torch.ops.aten, f"_scaled_dot_product_{name}{suffix}").default
        names = [argument.name for argument in function._schema.arguments]
        place, first = names.index("is_causal"), names.index("query")
        (work,) = works_of(causal(f"_scaled_dot_product_{name}{suffix}", place, first))
        assert isinstance(work, Attention)
        assert work.causal


@pytest.mark.parametrize(
    "read",
    [
        gemm("relu"),
        gemm("mm", dtype="double"),
        gemm("mm", dtype="long int"),
        inputs("mm", [], [], [], []),
        inputs("mm", [[6, 4]], [[4, 1]], ["float"], [""]),
        inputs("mm", [[6, 4], [5, 8]], [[4, 1], [8, 1]], ["float"] * 2, [""] * 2),
        inputs("mm", [[0, 4], [4, 8]], [[4, 1], [8, 1]], ["float"] * 2, [""] * 2),
        inputs("mm", [[2**61, 4], [4, 8]], [[4, 1], [8, 1]], ["float"] * 2, [""] * 2),
        inputs("mm", [[6], [4, 8]], [[1], [8, 1]], ["float"] * 2, [""] * 2),
        inputs("bmm", [[3, 6, 4], [2, 4, 8]], [[24, 4, 1], [32, 8, 1]], ["float"] * 2, [""] * 2),
        inputs("_scaled_dot_product_flash_attention",
               [[2, 8, 64, 32], [4, 8, 64, 32], [4, 8, 64, 32]], [[1] * 4] * 3, ["c10::Half"] * 3,
               ["", "", "", "", "True"]),
        inputs("cudnn_convolution", [[2, 8, 9, 9], [4, 3, 3, 3]], [[648, 81, 9, 1], [27, 9, 3, 1]],
               ["float"] * 2, ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]),
        inputs("cudnn_convolution", [[2, 3, 9], [4, 3, 3, 3]], [[27, 9, 1], [27, 9, 3, 1]],
               ["float"] * 2, ["", "", "[1]", "[1]", "[1]", "1"]),
        inputs("convolution", [[1, 1, 1]], [[1]], ["float"], [""]),
        inputs("cudnn_convolution", [[2, 3, 9, 9], [4, 3, 3, 3]], [[243, 81, 9, 1], [27, 9, 3, 1]],
               ["float"] * 2, ["", "", "x", "[1]", "[1]", "1"]),
        inputs("cudnn_convolution", [[2, 3, 9, 9], [4, 3, 3, 3]], [[243, 81, 9, 1], [27, 9, 3, 1]],
               ["float"] * 2, ["", "", "[0]", "[0]", "[1]", "0"]),
        inputs("_conv_depthwise2d", [[2, 3, 9, 9], [4, 0, 3, 3]], [[243, 81, 9, 1], [27, 9, 3, 1]],
               ["float"] * 2, ["", "", "", "", "[1]", "[1]", "[1]"]),
        inputs("_scaled_dot_product_flash_attention", [[2, 8, 64, 32], [2, 0, 1, 1], [1, 1, 1, 1]],
               [[1] * 4] * 3, ["c10::Half"] * 3, ["", "", "", "", "True"]),
        inputs("_grouped_mm", [[4, 8], [8, 4]], [[8, 1], [4, 1]], ["c10::BFloat16"] * 2, [""] * 2),
        inputs("_scaled_dot_product_flash_attention",
               [[2, 8, 64, 32], [2, 8, 64, 16], [2, 8, 64, 32]], [[1] * 4] * 3, ["c10::Half"] * 3,
               ["", "", "", "", "True"]),
        inputs("_grouped_mm", [[64, 16], [4, 17, 32], [4]], [[16, 1], [544, 1, 17], [1]],
               ["c10::BFloat16"] * 2 + ["int"], [""] * 3),
        inputs("_grouped_mm", [[4, 16, 32], [32, 64], [4]], [[512, 32, 1], [64, 1], [1]],
               ["c10::BFloat16"] * 2 + ["int"], [""] * 3),
    ],
)  # fmt: skip
def test_impossible_inputs_have_no_problem(read: OperationInputs) -> None:
    assert works_of(read) == ()
