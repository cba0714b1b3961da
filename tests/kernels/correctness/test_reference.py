from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.common.errors import UserError
from kernels.correctness.reference import TOLERANCE, check
from kernels.operands import Operands, element_counts, random_operands, view_operands
from kernels.problem import GEMM_LAYOUTS, PASSES, Conv, Gemm

size = st.integers(1, 70)
small = st.integers(1, 3)


def in_double(problem: Gemm | Conv, operands: Operands) -> Tensor:
    """Return PyTorch's whole result in float64, which is independent of the sampled reference."""
    a, b = operands.a.double(), operands.b.double()
    if isinstance(problem, Gemm):
        return torch.matmul(a, b)
    geometry = (problem.stride, problem.padding, problem.dilation)
    if problem.pass_ == "fprop":
        return torch.conv2d(a, b, None, *geometry, problem.groups)
    x, w = (operands.out, b) if problem.pass_ == "dgrad" else (a, operands.out)
    dy = a if problem.pass_ == "dgrad" else b
    mask = [problem.pass_ == "dgrad", problem.pass_ == "wgrad", False]
    gradients = torch.ops.aten.convolution_backward(
        dy, x.double(), w.double(), None, *map(list, geometry), False, [0, 0], problem.groups, mask
    )
    return gradients[0 if problem.pass_ == "dgrad" else 1]


@settings(max_examples=60)
@given(size, size, size, st.sampled_from(GEMM_LAYOUTS), small)
def test_exact_gemms_pass_and_a_wrong_last_entry_does_not(
    m: int, n: int, k: int, layout: str, batch: int
) -> None:
    gemm = Gemm(m, n, k, "fp32", layout, batch)
    operands = random_operands(gemm, "cpu")
    result = in_double(gemm, operands)
    assert check(gemm, operands, result).rel_error < 1e-12
    result[..., -1, -1] += 0.01 * result.abs().max() + 1e-6
    assert not check(gemm, operands, result).ok


@settings(max_examples=80)
@given(
    n=small, c=small, h=st.integers(1, 12), w=st.integers(1, 12), kout=small, r=small, s=small,
    stride=st.tuples(small, small), padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(small, small), groups=small, pass_=st.sampled_from(PASSES),
    layout=st.sampled_from(["nhwc", "nchw"]),
)  # fmt: skip
def test_the_sampled_reference_of_a_convolution_is_float64_arithmetic(
    n: int, c: int, h: int, w: int, kout: int, r: int, s: int, stride: tuple[int, int],
    padding: tuple[int, int], dilation: tuple[int, int], groups: int, pass_: str, layout: str,
) -> None:  # fmt: skip
    sizes = (n, c * groups, h, w, kout * groups, r, s)
    try:
        conv = Conv.build(sizes, (stride, padding, dilation), groups, "fp32", layout, pass_)
    except UserError:
        return  # the filter does not fit
    operands = random_operands(conv, "cpu")
    result = in_double(conv, operands)
    outcome = check(conv, operands, result)
    assert outcome.rel_error < 1e-12 or result.abs().max() == 0
    if result.abs().max() > 0:
        result[-1, -1, -1, -1] += 0.01 * result.abs().max()
        assert not check(conv, operands, result).ok


def test_a_large_result_is_sampled_with_its_last_row_and_column() -> None:
    gemm = Gemm(700, 900, 64, "fp32")
    operands = random_operands(gemm, "cpu")
    for row, column in ((0, 0), (-1, 0), (0, -1), (-1, -1)):
        result = in_double(gemm, operands)
        result[row, column] += result.abs().max()
        assert not check(gemm, operands, result).ok


def test_nan_is_never_right() -> None:
    gemm = Gemm(8, 8, 8, "fp32")
    operands = random_operands(gemm, "cpu")
    assert operands.out.isnan().all()  # the memory is filled with NaN before a launch
    assert not check(gemm, operands, operands.out).ok


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rounding_the_result_passes_and_the_next_coarser_format_does_not(dtype: str) -> None:
    gemm = Gemm(256, 256, 256, dtype)
    operands = random_operands(gemm, "cpu")
    exact = in_double(gemm, operands)
    rounded = exact.to({"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])
    assert check(gemm, operands, rounded).ok
    coarse = (exact / exact.abs().max() * 32).round() / 32 * exact.abs().max()  # five bits
    assert not check(gemm, operands, coarse).ok


def test_tf32_does_not_pass_for_fp32() -> None:
    gemm = Gemm(512, 512, 512, "fp32")
    operands = random_operands(gemm, "cpu")
    a, b = (  # truncated to ten mantissa bits, which Tensor Cores read
        (t.view(torch.int32) & ~0x1FFF).view(torch.float32)
        for t in (operands.a.contiguous(), operands.b.t().contiguous())
    )
    result = a.double() @ b.double().t()
    outcome = check(gemm, operands, result)
    assert TOLERANCE["fp32"] < outcome.rel_error < TOLERANCE["tf32"]


@pytest.mark.parametrize("layout", GEMM_LAYOUTS)
def test_operands_are_stored_as_their_layout_says(layout: str) -> None:
    gemm = Gemm(6, 10, 4, "fp32", layout, 3)
    a, b, out = (torch.arange(float(count)) for count in element_counts(gemm))
    operands = view_operands(gemm, a, b, out)
    assert operands.a.shape == (3, 6, 4)
    assert operands.b.shape == (3, 4, 10)
    assert operands.out.shape == (3, 6, 10)
    # The second element in memory is the next one in the row (n) or in the column (t).
    assert float(operands.a[0, 0, 1] if layout[0] == "n" else operands.a[0, 1, 0]) == 1
    assert float(operands.b[0, 0, 1] if layout[1] == "n" else operands.b[0, 1, 0]) == 1


def test_channels_last_operands_are_channels_last() -> None:
    conv = Conv.parse("2,8,5,6,16,3,3,1,1,1,1,fp32,nhwc")
    for tensor in random_operands(conv, "cpu"):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    for tensor in random_operands(Conv.parse("2,8,5,6,16,3,3,1,1,1,1,fp32,nchw"), "cpu"):
        assert tensor.is_contiguous()
