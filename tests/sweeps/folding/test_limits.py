"""Times that are too short for any launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.machine import Machine, known_machine
from kernels.problem import Conv, Gemm
from sweeps.cases.case import Case
from sweeps.folding.limits import min_seconds, too_fast

H200 = known_machine("nvidia-h200")
LARGE = Case("s", Gemm(8192, 8192, 8192, "bf16"), "cublas")


def test_arithmetic_at_the_highest_clock_is_the_limit() -> None:
    at_boost = H200.peaks["bf16"] * H200.boost_mhz / H200.tensor_mhz
    assert min_seconds(LARGE, H200) == pytest.approx(LARGE.problem.flops / at_boost)


def test_a_cold_product_reads_its_operands_and_a_warm_one_need_not() -> None:
    flat = Case("s", Gemm(1, 16384, 16384, "bf16"), "cublas")
    assert min_seconds(flat, H200) == pytest.approx(2 * 16384 * 16385 / H200.bandwidth)
    assert min_seconds(replace(flat, cache="warm"), H200) < 1e-6


@pytest.mark.parametrize(("filters", "saved"), [("3,3", 9), ("1,1", 1), ("7,7", 49)])
def test_winograd_and_fourier_may_save_multiplications(filters: str, saved: int) -> None:
    conv = Conv.parse(f"32,256,28,28,256,{filters},1,3,1,1,fp16,nhwc,fprop")
    at_boost = H200.peaks["fp16"] * H200.boost_mhz / H200.tensor_mhz
    least = min_seconds(Case("s", conv, "cudnn", cache="warm"), H200)
    assert least == pytest.approx(conv.flops / saved / at_boost)


def test_an_impossible_time_on_a_known_gpu_is_an_error() -> None:
    least = min_seconds(LARGE, H200)
    assert too_fast(LARGE, least, H200) == (False, "")
    impossible, sentence = too_fast(LARGE, least / 2, H200)
    assert impossible
    assert "NVIDIA H200 needs" in sentence


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_where_the_ceilings_may_be_wrong_it_is_only_said(kind: str) -> None:
    machine: Machine = replace(H200, slug="some-other-one", kind=kind)
    least = min_seconds(LARGE, machine)
    assert too_fast(LARGE, least / 1.1, machine) == (False, "")
    impossible, sentence = too_fast(LARGE, least / 1343, machine)
    assert not impossible
    assert sentence.startswith("the case's speed is 1343.00 times the machine's ceiling, which ")


def test_an_unknown_peak_allows_everything() -> None:
    assert min_seconds(LARGE, replace(H200, peaks={}, bandwidth=0.0)) == 0.0
