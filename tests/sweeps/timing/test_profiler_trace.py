from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.device import this_cpu
from kernels.operands import random_operands
from kernels.problem import Conv, Gemm, Problem
from kernels.registry import all_implementations, library_for
from sweeps.timing.profiler_trace import (
    Kernel,
    cpu_tracer,
    kernel_columns,
    parse_verbose,
    profile_document,
    split_trace,
    trace_gpu,
)

VERBOSE = """
onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71049cd69a3df32adcccb623b12cd7baa22)
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:blk,undef,src:f32::blocked:abcd::f0,,,4x64x28x28,0.25
onednn_verbose,v1,primitive,exec,cpu,convolution,brg_conv_fwd:avx512_core,forward,,alg:x,mb4,1.75
onednn_verbose,v1,primitive,exec,cpu,conv
onednn_verbose,v1,primitive,exec,cpu,convolution,brg_conv_fwd:avx512_core,forward,,alg:x,mb4,1.7onednn
something that a library prints
MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture
MKL_VERBOSE SGEMM(N,N,512,512,512,0x7ffe,0x7f6c,512,0x7f6c,512,0x7ffe,0x5624,512) 2.60ms CNR:OFF
MKL_VERBOSE SGEMM_BATCH(T,N,0x7ffe,0x7ffe) 344.95us CNR:OFF Dyn:1 FastMM:1
"""


def test_verbose_output_is_read() -> None:
    assert parse_verbose(VERBOSE) == [
        Kernel("reorder jit:blk", pytest.approx(0.25e-3)),
        Kernel("convolution brg_conv_fwd:avx512_core", pytest.approx(1.75e-3)),
        Kernel("mkl_sgemm", pytest.approx(2.6e-3)),
        Kernel("mkl_sgemm_batch", pytest.approx(344.95e-6)),
    ]


def kernel_event(
    name: str, start: float, correlation: int, duration: float = 1.0, **more: Any
) -> dict[str, Any]:
    arguments = {"grid": [4, 2, 1], "correlation": correlation, **more}
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": arguments}


def marked(number: int, start: float) -> dict[str, Any]:
    """Return the mark of a launch: a span of ten microseconds on the host."""
    name = f"rooftile launch {number}"
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": 10.0, "tid": 5,
            "args": {"External id": 100 + number}}  # fmt: skip


def call(start: float, correlation: int, category: str = "cuda_runtime") -> dict[str, Any]:
    name = {"cuda_runtime": "cudaLaunchKernelExC", "cuda_driver": "cuLaunchKernelEx"}[category]
    return {"cat": category, "name": name, "ts": start, "dur": 2.0, "tid": 5,
            "args": {"correlation": correlation}}  # fmt: skip


SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
NVJET = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
SPLITK = "void cublasLt::splitKreduce_kernel<32>(int)"
TRACE = [
    *(call(i, i) for i in range(3)),  # dummy launches, outside of all marks
    *(kernel_event(SPIN, 200.0 + i, i) for i in range(3)),
    marked(0, 20.0), call(21.0, 10), call(24.0, 11),
    marked(1, 40.0), call(41.0, 12, "cuda_driver"),
    marked(2, 60.0),  # launches nothing
    call(75.0, 13),  # warms up the next launch, outside of the marks
    marked(3, 80.0), call(81.0, 14),
    {"cat": "cpu_op", "name": "aten::mm", "ts": 81.0, "dur": 2.0, "tid": 5,
     "args": {"External id": 7}},
    # Kernels run later on the device, so their times do not fall into the marks of their launches.
    kernel_event(SPLITK, 308.0, 11), kernel_event("a_gemm", 302.0, 10, 5.0),
    kernel_event(NVJET, 330.0, 12, 8.0), kernel_event("warm", 340.0, 13),
    kernel_event("conv", 350.0, 14, 4.0),
]  # fmt: skip


def names(launches: list[list[Kernel] | None]) -> list[list[str] | None]:
    return [None if kernels is None else [k.name for k in kernels] for kernels in launches]


def test_a_trace_is_sorted_by_the_calls_that_launched_its_kernels() -> None:
    launches = split_trace(TRACE, 4)
    assert names(launches) == [["a_gemm", SPLITK], [NVJET], None, ["conv"]]
    assert launches[1] == [Kernel(NVJET, pytest.approx(8e-6), (4, 2, 1))]


@pytest.mark.parametrize("lost", range(len(TRACE)))
def test_a_record_that_is_lost_costs_its_own_launch_alone(lost: int) -> None:
    """CUPTI loses the first kernel records of a session. Whichever is lost, no name is wrong."""
    whole = split_trace(TRACE, 4)
    partial = split_trace([*TRACE[:lost], *TRACE[lost + 1 :]], 4)
    event = TRACE[lost]
    different = [i for i in range(4) if partial[i] != whole[i]]
    assert len(different) <= 1
    if event["cat"] == "kernel" and event["args"]["correlation"] in (10, 11, 12, 14):
        assert partial[different[0]] is None  # a call has no kernel, so another process is asked
    for i in different:
        kernels = partial[i] or []  # these must be kernels of the launch itself
        assert {k.name for k in kernels} <= {k.name for k in whole[i] or []}


def test_the_first_records_of_a_session_are_lost_without_harm() -> None:
    kernels = [event for event in TRACE if event["cat"] == "kernel"]
    lost = [id(event) for event in kernels if event["name"] == SPIN]
    assert split_trace([e for e in TRACE if id(e) not in lost], 4) == split_trace(TRACE, 4)


def test_a_kernel_whose_call_was_not_recorded_is_found_by_its_operation() -> None:
    events = [e for e in TRACE if e.get("args", {}).get("correlation") != 14]
    events.append(kernel_event("conv", 350.0, 14, 4.0, **{"External id": 7}))
    assert names(split_trace(events, 4))[3] == ["conv"]


def test_threads_do_not_mix() -> None:
    other = {**call(22.0, 50), "tid": 6}
    events = [*TRACE, other, kernel_event("stray", 303.0, 50)]
    assert split_trace(events, 4) == split_trace(TRACE, 4)


class FakeProfiler:
    """Fake of PyTorch's profiler. Its trace has the events that :meth:`launch` records."""

    def __init__(self, lose: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.lose = lose
        self.now = 0.0

    def launch(self, name: str) -> None:
        self.now += 1.0
        number = len(self.events)
        self.events.append(call(self.now, number))
        self.events.append(kernel_event(name, self.now + 1000.0, number))

    @contextmanager
    def record_function(self, name: str) -> Iterator[None]:
        start = self.now + 0.5
        yield
        self.now += 1.0
        span = {"ts": start, "dur": self.now - start, "tid": 5}
        self.events.append({"cat": "user_annotation", "name": name, **span})

    @contextmanager
    def profile(self, **options: Any) -> Iterator[FakeProfiler]:
        yield self

    def export_chrome_trace(self, path: str) -> None:
        kernels = [event for event in self.events if event["cat"] == "kernel"]
        lost = {id(event) for event in kernels[: self.lose]}
        left = [event for event in self.events if id(event) not in lost]
        Path(path).write_text(json.dumps({"traceEvents": left}), encoding="utf-8")


@pytest.mark.parametrize("lose", [0, 1, 30, 64])
def test_a_gpu_s_session_sacrifices_its_first_records(
    monkeypatch: pytest.MonkeyPatch, lose: int
) -> None:
    profiler = FakeProfiler(lose)
    monkeypatch.setattr(torch.profiler, "profile", profiler.profile)
    monkeypatch.setattr(torch.profiler, "record_function", profiler.record_function)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: profiler.launch(SPIN), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fails() -> None:
        raise RuntimeError("no such kernel")

    launches = [lambda i=i: profiler.launch(f"gemm_{i}") for i in range(20)]
    traced = trace_gpu([*launches, fails])
    assert names(traced) == [*([f"gemm_{i}"] for i in range(20)), None]


@pytest.mark.filterwarnings("error")
def test_a_warning_about_cycles_of_the_profiler_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def profile(**options: Any) -> Iterator[FakeProfiler]:
        warnings.warn(
            "Warning: Profiler clears events at the end of each cycle."
            "Only events from the current cycle will be reported."
            "To keep events across cycles, set acc_events=True.",
            stacklevel=2,
        )
        yield FakeProfiler(0)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    assert profile_document(lambda: None, []) == {"traceEvents": []}
    with pytest.raises(UserWarning, match="another"):
        profile_document(lambda: warnings.warn("another", stacklevel=1), [])


def test_the_runtime_s_own_call_of_the_driver_is_not_a_second_launch() -> None:
    inner = {**call(21.5, 99, "cuda_driver"), "dur": 1.0}  # inside the runtime's call at 21
    assert split_trace([*TRACE, inner], 4) == split_trace(TRACE, 4)


def test_a_host_function_has_no_kernel() -> None:
    host = {**call(25.0, 98), "name": "cudaLaunchHostFunc"}
    assert split_trace([*TRACE, host], 4) == split_trace(TRACE, 4)


def test_where_nothing_was_traced_nothing_is_asked_again() -> None:
    assert split_trace([marked(0, 20.0), marked(1, 40.0)], 2) == [[], []]


def test_columns_name_the_main_kernel_its_tile_and_all_shares() -> None:
    columns = kernel_columns(
        [
            Kernel("void cublasLt::splitKreduce_kernel<32>(int)", 1e-6, (8, 1, 1)),
            Kernel("nvjet_tst_64x8_64x16_2x1_v_bz_splitK_TNT", 9e-6, (64, 1, 2)),
        ]
    )
    assert columns["kernel"].startswith("nvjet")
    assert columns["tile"] == "8x64x64"  # cuBLAS names tiles column-major
    assert columns["grid"] == "64x1x2"
    assert columns["tensor_cores"] is True
    assert json.loads(columns["kernels"])[1] == ["nvjet_tst_64x8_64x16_2x1_v_bz_splitK_TNT", 0.9]
    assert kernel_columns([]) == {"kernel": ""}


def test_the_main_kernel_may_be_launched_several_times() -> None:
    short, long = "nvjet_tst_64x8_64x16_2x1_v_bz_TNT", "void other_kernel<32>(int)"
    launches = [Kernel(long, 5e-6, (8, 1, 1)), *[Kernel(short, 3e-6, (64, 1, 2))] * 2]
    columns = kernel_columns(launches)
    assert (columns["kernel"], columns["grid"]) == (short, "64x1x2")


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (Gemm(256, 256, 256, "fp32"), "gemm"),
        (Gemm(256, 256, 256, "bf16"), "gemm"),
        (Conv.parse("4,64,28,28,64,3,3,1,1,1,1,fp32"), "conv"),
        (Conv.parse("4,64,28,28,64,3,3,1,1,1,1,fp32,nchw,wgrad"), "conv"),
    ],
    ids=str,
)
def test_a_real_cpu_launch_names_its_kernels(problem: Problem, kind: str) -> None:
    machine = this_cpu().machine
    if problem.dtype not in machine.peaks or not torch.backends.mkldnn.is_available():
        pytest.skip("not on this CPU")
    name = library_for(problem, machine)
    launch = all_implementations()[name].prepare(problem, [random_operands(problem, "cpu")])
    with cpu_tracer() as trace:
        kernels, again = trace(lambda: launch(0)), trace(lambda: launch(0))
    assert [kernel.name for kernel in again] == [kernel.name for kernel in kernels]
    if not kernels:
        pytest.skip("the libraries of this PyTorch do not print their kernels")
    assert all(kernel.seconds > 0 for kernel in kernels)
    words = " ".join(kernel.name for kernel in kernels)
    assert {"gemm": "gemm", "conv": "convolution"}[kind] in words.replace("matmul", "gemm")


def test_stdout_is_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before\n")
    with cpu_tracer() as trace:
        assert trace(lambda: os.write(1, b"inside\n")) == []
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nafter\n"


@pytest.mark.gpu
def test_a_real_gpu_launch_names_its_kernels() -> None:
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.float16)
    first, second = trace_gpu([lambda: a @ a, lambda: a + a])
    assert first is not None
    assert any("gemm" in k.name.lower() or "nvjet" in k.name for k in first)
    assert second
    assert first[0].grid
