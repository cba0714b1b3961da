"""Test the readers on a few invented rows of each format, without the real public tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.imports.public import read_public, read_source
from analysis.imports.timings import FileDefaults
from analysis.imports.writing import write_timings
from kernels.common.errors import UserError
from kernels.machine import Machine, known_machine
from kernels.problem import Conv, Gemm
from sweeps.cases.case import Case
from sweeps.store import read_run
from tests.support.synthetic import H100, gemm_cases, record

V100 = known_machine("nvidia-v100-sxm2-16gb")
A100 = known_machine("nvidia-a100-pcie-80gb")


def test_our_own_results_are_read_cold_and_in_bursts(tmp_path: Path) -> None:
    cases = gemm_cases([(64, 64, 64), (128, 128, 128)])
    record(tmp_path, cases, [1e-6, 2e-6])
    for path in (tmp_path, tmp_path / "measurements.csv"):
        source = read_source(path, H100)
        assert source.problems == [case.problem for case in cases]
        assert source.seconds == pytest.approx([1e-6, 2e-6])
        assert source.implementations == ["cublas", "cublas"]


def test_only_bursts_in_the_most_frequent_cache_state_are_read(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text(
        "m,n,k,dtype,time_us,mode,cache\n"
        "64,64,64,bf16,1,burst,warm\n"
        "64,64,64,bf16,3,sustained,warm\n"
        "64,64,64,bf16,5,burst,cold\n"
    )
    source = read_source(path, H100)
    assert source.seconds.tolist() == pytest.approx([1e-6])
    assert source.warm
    # The cache state of sustained cases and of other kernels does not matter.
    path.write_text(
        "m,n,k,dtype,time_us,mode,cache,implementation\n"
        "64,64,64,bf16,3,sustained,warm,\n"
        "64,64,64,bf16,4,burst,warm,triton-tiled\n"
        "64,64,64,bf16,5,burst,cold,\n"
    )
    source = read_source(path, H100)
    assert source.seconds.tolist() == pytest.approx([5e-6])
    assert not source.warm
    path.write_text("m,n,k,dtype,time_us,mode\n64,64,64,bf16,1,sustained\n")
    with pytest.raises(UserError, match="no vendor-library times that were measured in bursts"):
        read_source(path, H100)


def test_a_recording_has_no_row_of_another_machine(tmp_path: Path) -> None:
    record(tmp_path, gemm_cases([(64, 64, 64)]), [1e-6])
    for read in (read_source, read_public):
        with pytest.raises(
            UserError, match=f"no row for {A100.slug}; its rows are from {H100.slug}"
        ):
            read(tmp_path, A100)


@pytest.mark.parametrize("place", [".", "samples/..", ".."])
def test_relative_folders_have_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = tmp_path / "mine"
    record(folder, gemm_cases([(64, 64, 64)]), [1e-6])
    (folder / "samples").mkdir(exist_ok=True)
    monkeypatch.chdir(folder / "samples" if place == ".." else folder)
    path = Path(place)
    assert read_source(path, H100).name == "mine"
    imported = write_timings(read_public(path, H100), path, FileDefaults(), H100, tmp_path)
    public = read_run(imported)["public"]
    assert public["source"] == public["file"] == "mine"


def test_our_own_convolutions_say_how_they_were_computed(tmp_path: Path) -> None:
    conv = Conv.parse("8,64,28,28,64,3,3,1,1,1,1,fp32,nchw")
    cases = [Case("made-up", replace(conv, n=n), "cudnn") for n in (1, 2, 3)]
    record(tmp_path, cases, [1e-5, 2e-5, 3e-5])
    frame = pd.read_csv(tmp_path / "measurements.csv", dtype=str)
    # The longest kernel of a Winograd convolution can be an sgemm, so all kernels' names count.
    frame["kernel"] = ["ampere_sgemm_128x128_nn", "ampere_scudnn_128x64_relu_medium_nn_v1", None]
    frame["kernels"] = [
        '[["winogradForwardData4x4", 0.3], ["ampere_sgemm_128x128_nn", 0.7]]',
        '[["ampere_scudnn_128x64_relu_medium_nn_v1", 1.0]]',
        None,
    ]
    frame.to_csv(tmp_path / "measurements.csv", index=False)
    assert read_source(tmp_path, H100).algorithms == ["winograd-4x4", "implicit-gemm", ""]


def aiconfigurator(path: Path) -> Path:
    frame = pd.DataFrame(
        {
            "framework": "x", "version": "1", "op_name": "gemm", "kernel_source": "y",
            "device": ["NVIDIA H100 80GB HBM3"] * 4 + ["NVIDIA H200"],
            "gemm_dtype": ["bfloat16", "bfloat16", "fp8", "bfloat16", "bfloat16"],
            "m": [1, 257, 8, 8, 8], "n": [512, 1024, 8, 8, 8], "k": [64, 4096, 8, 8, 8],
            "latency": [0.002, 0.031, 0.1, float("nan"), 0.5],
        }
    )  # fmt: skip
    frame.to_parquet(path)
    return path


def test_aiconfigurators_gemms(tmp_path: Path) -> None:
    source = read_source(aiconfigurator(tmp_path / "table.parquet"), H100)
    assert source.problems == [Gemm(1, 512, 64, "bf16"), Gemm(257, 1024, 4096, "bf16")]
    assert source.seconds == pytest.approx([2e-6, 31e-6])
    assert source.skipped == {"other_machines": 1, "other_dtypes": 1, "unreadable": 1}


def test_neusights_linear_layers_contract_over_n(tmp_path: Path) -> None:
    path = tmp_path / "linear.csv"
    path.write_text(
        "OPName,Latency,Device,Kernel Name,Kernels,B,M,N,K\n"
        "linear,1.5,NVIDIA A100 80GB PCIe,ampere_sgemm_128x64_tn,"
        ";ampere_sgemm_128x64_tn,1,32,64,96\n"
        "linear,9.9,NVIDIA L4,k,;k,1,32,64,96\n"
        "bmm,9.9,NVIDIA A100 80GB PCIe,k,;k,16,32,64,96\n"
    )
    source = read_source(path, A100)
    assert source.problems == [Gemm(32, 96, 64, "fp32")]
    assert source.dtype == "fp32"
    assert source.kernels == [("ampere_sgemm_128x64_tn",)]
    assert source.skipped["other_machines"] == 1


def test_neusights_convolutions(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text(
        "OPName,Latency,Device,Kernel Name,Kernels,B,Input_Channel,Output_Channel,Kernel_Szie,"
        "Input_Size,Stride,Padding\n"
        "conv,0.5,NVIDIA A100 80GB PCIe,b,;a;b;c,8,16,32,3,28,1,1\n"
    )
    source = read_source(path, A100)
    assert source.problems == [Conv.parse("8,16,28,28,32,3,3,1,1,1,1,fp32,nchw")]
    assert source.kernels == [("a", "b", "c")]


def test_deepbenchs_gemms_are_column_major(tmp_path: Path) -> None:
    path = tmp_path / "v100-fp16-gemm.csv"
    path.write_text("app,M,N,K,transA,transB,_,time_ms,tflops\nx,1760,16,512,T,N,,0.02,1\n")
    source = read_source(path, V100)
    assert source.problems == [Gemm(16, 1760, 512, "fp16", "nt")]
    assert source.seconds == pytest.approx([2e-5])


def test_deepbenchs_convolutions_have_three_passes(tmp_path: Path) -> None:
    path = tmp_path / "v100-fp32-conv.csv"
    path.write_text(
        ",W,H,C,N,K ,S (Filter width),R (Filter height),pad_w,pad_h,Horizontal stride,"
        "Vertical stride,Forward (msec),wrt Inputs (msec),wrt Parameters (msec)\n"
        "x,700,161,1,4,32,20,5,0,0,2,2,0.591,N/A*,1.028\n"
    )
    source = read_source(path, V100)
    forward = Conv.parse("4,1,161,700,32,5,20,2,0,1,1,fp32,nchw,fprop")
    assert source.problems == [forward, Conv.parse(forward.spec().replace("fprop", "wgrad"))]
    assert source.seconds == pytest.approx([0.591e-3, 1.028e-3])
    assert source.skipped["unreadable"] == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "x,y\n1,2\n", "no known format"),
        ("a.csv", "", "cannot be read as a table"),
        ("a.parquet", "nonsense", "cannot be read as a table"),
        ("missing.csv", None, r"cannot be read \(No such file or directory\); check its path"),
        (
            "gemm.csv",
            "app,M,N,K,transA,transB,time_ms\nx,1,1,1,N,N,1\n",
            "has no column for the dtype",
        ),
    ],
)
def test_what_cannot_be_read_is_a_sentence(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_source(tmp_path / name, H100)
    assert "\n" not in str(caught.value)


def test_a_machine_or_dtype_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    path = aiconfigurator(tmp_path / "table.parquet")
    with pytest.raises(
        UserError, match="row for nvidia-v100-sxm2-16gb; its rows are from nvidia-h100-sxm"
    ):
        read_source(path, V100)
    with pytest.raises(UserError, match="no readable row for nvidia-h100-sxm in fp16"):
        read_source(path, H100, "fp16")


@pytest.mark.parametrize("read", [read_source, read_public])
def test_a_file_without_a_usable_row_says_why(
    tmp_path: Path, read: Callable[[Path, Machine], object]
) -> None:
    path = tmp_path / "gemm.csv"
    header = "device,gemm_dtype,m,n,k,latency\n"
    path.write_text(header)
    with pytest.raises(UserError, match="has no rows; give another file"):
        read(path, H100)
    path.write_text(f"{header}NVIDIA H100 80GB HBM3,bfloat16,64,64,64,0\n")
    with pytest.raises(UserError, match="has rows for nvidia-h100-sxm, but none with a time"):
        read(path, H100)
    with pytest.raises(UserError, match="its rows are from nvidia-h100-sxm. Give another"):
        read(path, V100)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemm.csv", "device,gemm_dtype,m,n,k,latency\nNVIDIA H200,bfloat16,,64,64,1\n"),
        ("gemm.csv", "device,gemm_dtype,m,n,k,latency\nNVIDIA H200,bfloat16,64,64,64,x\n"),
        ("linear.csv", "OPName,Latency,Device,Kernels,B,M,N,K\nx,1,NVIDIA H200,k,1,8,8,8\n"),
        ("fp16.csv", "M,N,K,transA,transB,time_ms\n,1,1,N,N,1\n"),
    ],
)
def test_a_damaged_table_is_a_sentence(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="lacks a column of its format, or has an invalid cell"):
        read_source(tmp_path / name, H100)


def test_a_row_without_a_device_is_of_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    path.write_text(
        "device,gemm_dtype,m,n,k,latency\n"
        "NVIDIA H100 80GB HBM3,bfloat16,64,64,64,1\n"
        ",bfloat16,64,64,128,1\n"
    )
    rows = read_source(path, H100)
    assert (len(rows), rows.skipped["other_machines"]) == (1, 1)


def test_an_infinite_time_is_not_read(tmp_path: Path) -> None:
    path = aiconfigurator(tmp_path / "gemm_perf.parquet")
    frame = pd.read_parquet(path)
    frame.assign(latency=frame["latency"].mask(frame["m"] == 257, float("inf"))).to_parquet(path)
    assert read_source(path, H100).problems == [Gemm(1, 512, 64, "bf16")]
    assert read_source(path, H100).skipped["unreadable"] == 2
    assert len(read_public(path, H100).rows) == 2


def test_a_neusight_row_without_kernels_has_none(tmp_path: Path) -> None:
    columns = "OPName,Latency,Device,Kernels,Kernel Name,B,M,N,K"
    (tmp_path / "linear.csv").write_text(f"{columns}\nlinear,1.0,Tesla V100,,,1,8,16,24\n")
    machine = replace(V100, slug="tesla-v100")
    assert read_source(tmp_path / "linear.csv", machine).kernels == [()]


def test_a_gemm_without_a_size_is_left_out_like_a_convolution(tmp_path: Path) -> None:
    path = tmp_path / "fp16.csv"
    path.write_text("M,N,K,transA,transB,time_ms\n0,8,8,N,N,1\n8,8,8,N,X,1\n8,16,24,N,T,1\n")
    source = read_source(path, H100)
    assert source.problems == [Gemm(16, 8, 24, "fp16", "tn")]
    assert source.skipped["unreadable"] == 2
