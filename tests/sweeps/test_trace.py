from __future__ import annotations

import json
import os

import pytest
import torch

from kernels.device import this_cpu
from kernels.operands import random_operands
from kernels.problem import Conv, Gemm, Problem
from kernels.registry import all_implementations, library_for
from sweeps.trace import Kernel, kernel_columns, parse_verbose, split_trace, trace_cpu, trace_gpu

VERBOSE = """
onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71049cd69a3df32adcccb623b12cd7baa22)
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:blk,undef,src:f32::blocked:abcd::f0,,,4x64x28x28,0.25
onednn_verbose,v1,primitive,exec,cpu,convolution,brg_conv_fwd:avx512_core,forward,,alg:x,mb4,1.75
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


def kernel_event(name: str, start: float, duration: float, grid: list[int]) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"grid": grid}}


SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def test_a_trace_is_split_by_the_spins_in_order_of_time() -> None:
    events = [
        kernel_event("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", 30.0, 8.0, [132, 1, 1]),
        kernel_event(SPIN, 20.0, 1.0, [1, 1, 1]),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 2.0},
        kernel_event(SPIN, 1.0, 1.0, [1, 1, 1]),
        kernel_event("warm", 0.5, 1.0, [1, 1, 1]),  # before the first mark
        kernel_event("a_gemm", 2.0, 5.0, [4, 2, 1]),
        kernel_event("void cublasLt::splitKreduce_kernel<32>(int)", 8.0, 1.0, [8, 1, 1]),
    ]
    first, second = split_trace(events, 2)
    assert [k.name for k in first] == ["a_gemm", "void cublasLt::splitKreduce_kernel<32>(int)"]
    assert second[0].grid == (132, 1, 1)
    assert split_trace(events, 3) == [[], [], []]  # a mark is missing: no launch gets wrong kernels


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
    assert kernel_columns([]) == {}


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
    kernels = trace_cpu(lambda: launch(0))
    if not kernels:
        pytest.skip("this PyTorch's libraries do not say")
    assert all(kernel.seconds > 0 for kernel in kernels)
    words = " ".join(kernel.name for kernel in kernels)
    assert {"gemm": "gemm", "conv": "convolution"}[kind] in words.replace("matmul", "gemm")


def test_stdout_is_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before\n")
    trace_cpu(lambda: os.write(1, b"inside\n"))
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nafter\n"


@pytest.mark.gpu
def test_a_real_gpu_launch_names_its_kernels() -> None:
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.float16)
    first, second = trace_gpu([lambda: a @ a, lambda: a + a])
    assert any("gemm" in k.name.lower() or "nvjet" in k.name for k in first)
    assert second
    assert first[0].grid
