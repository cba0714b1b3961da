from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.imports.public import read_source
from analysis.imports.timings import FileDefaults, read_timings
from kernels.common.errors import UserError
from kernels.machine import known_machine
from kernels.operation import as_problem
from kernels.problem import Conv, Gemm
from sweeps.schema import problem_of

# Headers and lines as CUTLASS 3.5's profiler and TritonBench write them.
CUTLASS = """\
Problem,Provider,OperationKind,Operation,Disposition,Status,gemm_kind,m,n,k,A,B,C,D,alpha,beta,\
split_k_mode,split_k_slices,batch_count,raster_order,op_class,accum,cta_m,cta_n,cta_k,cluster_m,\
cluster_n,cluster_k,stages,warps_m,warps_n,warps_k,inst_m,inst_n,inst_k,min_cc,max_cc,Bytes,Flops,\
Flops/Byte,Runtime,GB/s,GFLOPs
1,CUTLASS,gemm,cutlass_tensorop_h16816gemm_256x128_32x3_tn_align8,passed,success,universal,4096,\
2048,8192,f16:row,f16:column,f16:row,f16:row,1,0,serial,1,1,heuristic,tensorop,f16,256,128,32,1,1,\
1,3,4,2,1,16,8,16,80,1024,117440512,137455730688,1170,0.63447,172.3,216646
1,CUTLASS,gemm,cutlass_tensorop_h16816gemm_128x128_32x3_tn_align8,passed,success,universal,4096,\
2048,8192,f16:row,f16:column,f16:row,f16:row,1,0,serial,1,1,heuristic,tensorop,f16,128,128,32,1,1,\
1,3,4,2,1,16,8,16,80,1024,117440512,137455730688,1170,0.58447,187.1,235180
2,CUTLASS,gemm,cutlass_tensorop_s1688tf32gemm_128x128_16x3_nt_align4,not_verified,success,universal,\
1024,512,256,f32:column,f32:row,f32:column,f32:column,1,0,serial,1,3,heuristic,tensorop,f32,128,128,\
16,1,1,1,3,4,2,1,16,8,8,80,1024,1,1,1,0.025,1,1
3,CUTLASS,gemm,cutlass_tensorop_d884gemm_128x128_16x3_nt_align1,passed,success,universal,1024,512,\
256,f64:column,f64:row,f64:column,f64:column,1,0,serial,1,1,heuristic,tensorop,f64,128,128,16,1,1,1,\
3,4,2,1,8,8,4,80,1024,1,1,1,0.125,1,1
4,CUTLASS,gemm,cutlass_tensorop_h16816gemm_128x128_32x3_tn_align8,incorrect,success,universal,64,64,\
64,f16:row,f16:column,f16:row,f16:row,1,0,serial,1,1,heuristic,tensorop,f16,128,128,32,1,1,1,3,4,2,\
1,16,8,16,80,1024,1,1,1,0.00447,187.1,235180
1,cuBLAS,gemm,cublas,passed,success,universal,4096,2048,8192,f16:row,f16:column,f16:row,f16:row,1,0,\
serial,1,1,heuristic,tensorop,f16,0,0,0,1,1,1,0,0,0,0,0,0,0,80,1024,1,1,1,0.55,1,1
"""
CUTLASS_CONV = """\
Problem,Provider,OperationKind,Operation,Disposition,Status,conv_kind,n,h,w,c,k,r,s,p,q,pad_h,pad_w,\
stride_h,stride_w,dilation_h,dilation_w,Activation,Filter,Output,conv_mode,iterator_algorithm,alpha,\
beta,split_k_mode,split_k_slices,eq_gemm_provider,op_class,accum,cta_m,cta_n,cta_k,stages,warps_m,\
warps_n,warps_k,inst_m,inst_n,inst_k,min_cc,max_cc,Bytes,Flops,Flops/Byte,Runtime,GB/s,GFLOPs
1,CUTLASS,conv2d,cutlass_tensorop_s1688fprop_optimized_f16_256x128_32x2_nhwc_align8,passed,success,\
fprop,8,224,224,128,64,3,3,224,224,1,1,1,1,1,1,f16:nhwc,f16:nhwc,f32:nhwc,cross,optimized,1,0,\
serial,1,none,tensorop,f32,256,128,32,2,4,2,1,16,8,8,75,1024,1130659840,118482796544,104,3.63979,\
289.305,32552.1
"""
TRITONBENCH = """\
(M, N, K);aten_matmul-best_config;aten_matmul-latency;aten_matmul-tflops;\
triton_tutorial_matmul-latency;triton_tutorial_matmul-tflops
(256, 256, 256);;0.0070719998329877853;4.7;0.009215999953448772;3.6
(384, 128, 512);;0.008 (±1.23%);14.1;CUDA OOM;
(4096, 4096, 4096);;0.55;240;;
"""


def read(folder: Path, text: str, **told: str) -> list[tuple[object, str, float]]:
    """Read a file with this text; return the problem, implementation and time of each row."""
    path = folder / "times.csv"
    path.write_text(text, encoding="utf-8")
    timings = read_timings(path, FileDefaults(**told))
    assert timings is not None
    rows = timings.rows.to_dict("records")
    return [(as_problem(problem_of(r)), r["implementation"], r["time_us"]) for r in rows]


def test_a_plain_file_needs_five_columns(tmp_path: Path) -> None:
    text = "m,n,k,dtype,time_us\n4096,1024,512,bf16,33.5\n8,16,24,torch.float16,2\n"
    assert read(tmp_path, text) == [
        (Gemm(4096, 1024, 512, "bf16"), "cublas", 33.5),
        (Gemm(8, 16, 24, "fp16"), "cublas", 2.0),
    ]


def test_a_plain_file_may_say_more_in_any_order_and_case(tmp_path: Path) -> None:
    text = (
        "note,time_us,K,N,M,dtype,layout,batch,implementation,cache\n"
        'fast,"7.5",512,256,128,bf16,tn,4,triton-tiled,cold\n'
        ",9,512,256,128,bf16,,,,\n"
    )
    assert read(tmp_path, text) == [
        (Gemm(128, 256, 512, "bf16", "tn", 4), "triton-tiled", 7.5),
        (Gemm(128, 256, 512, "bf16"), "cublas", 9.0),
    ]


def test_what_a_file_does_not_say_the_user_may(tmp_path: Path) -> None:
    found = read(tmp_path, "m,n,k,time_us\n8,8,8,1\n", dtype="bf16", layout="nn")
    assert found == [(Gemm(8, 8, 8, "bf16", "nn"), "cublas", 1.0)]
    with pytest.raises(UserError, match=r"no column 'dtype'.*m,n,k,dtype,time_us"):
        read(tmp_path, "m,n,k,time_us\n8,8,8,1\n")


def test_a_case_timed_several_times_is_its_median(tmp_path: Path) -> None:
    lines = "".join(f"8,8,8,bf16,{time}\n" for time in (1, 9, 2))
    ((_, _, time),) = read(tmp_path, f"m,n,k,dtype,time_us\n{lines}")
    assert time == 2


def test_convolutions_have_the_columns_of_measurements(tmp_path: Path) -> None:
    text = (
        "op,batch,c,h,w,kout,r,s,stride,padding,dtype,layout,pass,time_us\n"
        "conv,32,64,56,56,128,3,3,2,1,fp16,nhwc,dgrad,100\n"
    )
    pairs = ((2, 2), (1, 1), (1, 1))
    conv = Conv(32, 64, 56, 56, 128, 3, 3, *pairs, 1, "fp16", "nhwc", "dgrad")
    assert read(tmp_path, text) == [(conv, "cudnn", 100.0)]


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"stride": "x"}, "but stride must be one number such as 2, or two such as 2x1, not 'x'"),
        ({"groups": "1.5"}, "groups is '1.5', not a whole number"),
        ({"groups": "3"}, r"but groups=3 must divide the input channels \(64\)"),
        ({"layout": "nt"}, r"but conv layout 'nt' is not known \(use one of nhwc, nchw\)\."),
        ({"pass": "fprob"}, r"but pass 'fprob' is not known \(did you mean 'fprop'\?\)\."),
        ({"r": "60"}, "but a 60×3 filter does not fit into 56×56 pixels"),
        ({"r": "0"}, "r is '0', not a whole number from 1"),
    ],
)
def test_a_damaged_convolution_is_told_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], fault: str
) -> None:
    sound = {
        "batch": "8", "c": "64", "h": "56", "w": "56", "kout": "64", "r": "3", "s": "3",
        "stride": "1", "groups": "1", "layout": "nhwc", "pass": "fprop", "dtype": "bf16",
        "time_us": "9",
    }  # fmt: skip
    lines = [",".join(row.values()) for row in (sound, sound | changed)]
    read(tmp_path, "\n".join([",".join(sound), *lines]))
    told = capsys.readouterr().err
    assert re.search(f"line 3 is damaged and was left out: .*{fault}", told)


def test_products_and_convolutions_may_stand_in_one_file(tmp_path: Path) -> None:
    text = (
        "m,n,k,batch,c,h,w,kout,r,s,dtype,time_us,layout,samples,kernels\n"
        "8,16,24,,,,,,,,bf16,2,NT,5,some text\n"
        ",,,2,8,9,9,16,3,3,bf16,7,,,\n"
    )
    conv = Conv(2, 8, 9, 9, 16, 3, 3, (1, 1), (0, 0), (1, 1), 1, "bf16", "nhwc")
    found = read(tmp_path, text)
    assert found == [(Gemm(8, 16, 24, "bf16"), "cublas", 2.0), (conv, "cudnn", 7.0)]
    alone = "batch,c,h,w,kout,r,s,dtype,time_us\n2,8,9,9,16,3,3,bf16,7\n"
    assert read(tmp_path, alone) == [(conv, "cudnn", 7.0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("m,n,k,dtype,time_us\n,,,,\n", "no row with a time"),
        ("m,n,k,dtype,time_us,Time_us\n8,8,8,bf16,1,1\n", "has the column 'time_us' twice"),
        ("m,n,k,dtype,time_us,time_us\n8,8,8,bf16,1,1\n", "has the column 'time_us' twice"),
        ("op,m,n,k,dtype,time_us\nmatmul,8,8,8,bf16,1\n", "operation 'matmul'; op must be gemm"),
        ("(M, N, K);aten_matmul-latency\n(8, 8, 8);CUDA OOM\n", "no row with a time"),
        (CUTLASS.replace(",Status", "", 1), "more cells than its header"),
        (CUTLASS.replace(",Status", ",State", 1), "no column 'Status'"),
        (CUTLASS_CONV.replace("conv_kind", "X", 1), "no column 'conv_kind'"),
        (CUTLASS.replace(",gemm,cutlass", ",spgemm,cutlass").replace(",gemm,cublas", ",spgemm,c"),
         "no dense GEMM or 2-D convolution that ran successfully"),
    ],
    ids=["blank", "twice", "repeated", "operation", "failed", "cells", "status", "kind", "sparse"],
)  # fmt: skip
def test_files_that_tell_nothing_are_sentences(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(tmp_path, text, dtype="bf16")


def test_columns_without_a_name_and_operations_in_capitals_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, "op,m,n,k,dtype,time_us,,\nGEMM,8,16,24,bf16,5,,\n")
    assert found == [(Gemm(8, 16, 24, "bf16"), "cublas", 5.0)]


def test_of_the_cutlass_profilers_kernels_the_fastest_that_passed_counts(tmp_path: Path) -> None:
    assert read(tmp_path, CUTLASS) == [
        (Gemm(4096, 2048, 8192, "fp16", "nt"), "cutlass", pytest.approx(584.47)),
        # The profiler's GEMM (1024 × 256) (256 × 512) has a column-major result, so it is read as
        # its transpose.
        (Gemm(512, 1024, 256, "tf32", "tn", 3), "cutlass", pytest.approx(25)),
        (Gemm(4096, 2048, 8192, "fp16", "nt"), "cublas", pytest.approx(550)),
    ]


@pytest.mark.parametrize(
    ("a", "b", "c", "product"),
    [
        ("row", "row", "row", (64, 32, "nn")),
        ("row", "column", "row", (64, 32, "nt")),
        ("column", "row", "row", (64, 32, "tn")),
        # C is column-major, so these GEMMs are read as Cᵀ = Bᵀ Aᵀ.
        ("column", "column", "column", (32, 64, "nn")),
        ("row", "column", "column", (32, 64, "nt")),
        ("column", "row", "column", (32, 64, "tn")),
        ("row", "row", "column", (32, 64, "tt")),
    ],
)
def test_cutlass_orders_are_our_layouts(
    tmp_path: Path, a: str, b: str, c: str, product: tuple[int, int, str]
) -> None:
    line = f"1,CUTLASS,gemm,k,passed,success,64,32,16,bf16:{a},bf16:{b},bf16:{c},1,0.01\n"
    header = "Problem,Provider,OperationKind,Operation,Disposition,Status,m,n,k,A,B,C,batch_count,"
    ((problem, _, _),) = read(tmp_path, f"{header}Runtime\n{line}")
    m, n, layout = product
    assert problem == Gemm(m, n, 16, "bf16", layout)


def test_cutlass_convolutions_are_read(tmp_path: Path) -> None:
    ((problem, name, time),) = read(tmp_path, CUTLASS_CONV)
    pairs = ((1, 1), (1, 1), (1, 1))
    assert problem == Conv(8, 128, 224, 224, 64, 3, 3, *pairs, 1, "fp16", "nhwc", "fprop")
    assert (name, time) == ("cutlass", pytest.approx(3639.79))


def test_tritonbench_has_a_row_for_each_implementation_that_ran(tmp_path: Path) -> None:
    found = read(tmp_path, TRITONBENCH, dtype="fp16")
    assert found == [
        (Gemm(256, 256, 256, "fp16", "nn"), "cublas", pytest.approx(7.072)),
        (Gemm(384, 128, 512, "fp16", "nn"), "cublas", pytest.approx(8)),
        (Gemm(4096, 4096, 4096, "fp16", "nn"), "cublas", pytest.approx(550)),
        (Gemm(256, 256, 256, "fp16", "nn"), "triton_tutorial_matmul", pytest.approx(9.216)),
    ]
    with pytest.raises(UserError, match="does not name its dtype; give --dtype"):
        read(tmp_path, TRITONBENCH)


def test_damaged_lines_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{8 * i},8,8,bf16,{i}" for i in range(1, 41)]
    lines[3], lines[7] = "x,8,8,bf16,1", "8,8,8,bf16,-1"
    lines[9] = "1099511627776,1099511627776,1099511627776,bf16,1"
    found = read(tmp_path, "m,n,k,dtype,time_us\n" + "\n".join(lines))
    assert len(found) == 37
    said = capsys.readouterr().err
    assert "line 5 is damaged and was left out: m is 'x', not a whole number" in said
    assert "line 9 is damaged and was left out: time_us is '-1', not a time" in said
    assert "line 11 is damaged and was left out" in said
    with pytest.raises(UserError, match="2 of 2 lines"):
        read(tmp_path, "m,n,k,dtype,time_us\n8,8,8,int4,1\n8,8,8,bf16,nan\n")


def test_tritonbench_may_quote_the_names_of_columns(tmp_path: Path) -> None:
    text = '"(M, N, K)";"aten_matmul-latency"\n"(8, 16, 24)";0.005\n'
    assert read(tmp_path, text, dtype="bf16") == [
        (Gemm(8, 16, 24, "bf16", "nn"), "cublas", pytest.approx(5.0))
    ]


@pytest.mark.parametrize(
    ("damaged", "kept", "report"),
    [
        ("(8, 8, 8, 8);0.02;0.02", 78, "line 2 is damaged and was left out: m is"),
        ("(8, 8, 8);0.02;0.0", 79, "line 2 is damaged and was left out in part: time_us is"),
    ],
)
def test_a_line_of_tritonbench_is_left_out_as_far_as_it_is_damaged(
    damaged: str, kept: int, report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"({8 * i}, 8, 8);0.02;0.02\n" for i in range(2, 41))
    text = f"(M, N, K);aten_matmul-latency;other-latency\n{damaged}\n{rows}"
    assert len(read(tmp_path, text, dtype="fp16")) == kept
    assert report in capsys.readouterr().err


def test_only_pytorchs_own_product_is_the_library(tmp_path: Path) -> None:
    text = "(M, N, K);aten_matmul-latency;aten_tunableop_mm-latency\n(8, 8, 8);0.02;0.01\n"
    names = [name for _, name, _ in read(tmp_path, text, dtype="fp16")]
    assert names == ["cublas", "aten_tunableop_mm"]


@pytest.mark.parametrize("text", ["", "\n", "m,n\n1,2\n", "a;b\n1;2\n", "shape,time\n", "{}"])
def test_a_file_that_is_none_of_these_is_answered_with_the_header(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(UserError):
        read_source(path, known_machine("nvidia-h100-sxm"))


@given(st.binary(max_size=300))
def test_any_bytes_are_times_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "times.csv"
    path.write_bytes(b"m,n,k,dtype,time_us\n8,8,8,bf16,1\n" + data)
    try:
        timings = read_timings(path, FileDefaults())
    except UserError:
        return
    assert timings is not None
    assert len(timings.rows)


def test_validate_reads_such_files_too(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text(CUTLASS)
    source = read_source(path, known_machine("nvidia-a100-sxm-80gb"), "fp16")
    assert list(source.implementations) == ["cutlass", "cublas"]
    assert source.kernels[0] == ("cutlass_tensorop_h16816gemm_128x128_32x3_tn_align8",)
    assert source.warm


@pytest.mark.parametrize("cell", ["1.5", "inf", "1e30", "x", ""])
def test_a_gemm_may_have_anything_in_a_column_of_convolutions(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(f"op,m,n,k,dtype,c,time_us\ngemm,64,64,64,bf16,{cell},3\n")
    timings = read_timings(path, FileDefaults())
    assert timings is not None
    assert timings.rows["m"].tolist() == [64]
    assert timings.rows["c"].isna().all()


def test_kernels_that_round_to_16_bits_are_not_fp32(tmp_path: Path) -> None:
    rounded = CUTLASS.replace("s1688tf32gemm", "s1688bf16gemm")
    assert len(read(tmp_path, rounded)) == len(read(tmp_path, CUTLASS)) - 1


def test_operands_of_unknown_order_do_not_get_the_default_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unordered = CUTLASS.replace("f16:row,f16:column,f16:row,f16:row", "f16,f16,f16:row,f16:row", 1)
    assert read(tmp_path, unordered) == read(tmp_path, CUTLASS)  # the first kernel is not fastest
    assert "line 2 is damaged and was left out: layout is '??'" in capsys.readouterr().err


def test_another_operation_is_damage_and_layouts_may_be_in_capitals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "op,batch,c,h,w,kout,r,s,dtype,layout,time_us\n"
    lines += "relu,1,8,8,8,8,3,3,bf16,nhwc,5\nconv,1,8,8,8,8,3,3,bf16,NCHW,5\n"
    ((problem, _, _),) = read(tmp_path, lines)
    assert problem == Conv.parse("1,8,8,8,8,3,3,1,0,1,1,bf16,nchw")
    assert "line 2 is damaged and was left out: op is 'relu', not gemm or conv" in (
        capsys.readouterr().err
    )


def test_the_averages_of_tritonbench_are_not_a_damaged_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    averages = "average;;0.19;86.5;0.0092;3.6\n"
    with_averages = read(tmp_path, TRITONBENCH + averages, dtype="bf16")
    assert with_averages == read(tmp_path, TRITONBENCH, dtype="bf16")
    assert capsys.readouterr().err == ""
