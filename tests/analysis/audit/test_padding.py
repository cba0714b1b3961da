"""Check which GEMMs count as padded by Inductor, and the bytes that the padding copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.audit.account import account_of
from analysis.audit.padding import with_padding
from analysis.audit.runtime import Runtime
from analysis.model.basis import Basis, find_basis
from kernels.common.program import RESULTS
from kernels.problem import Gemm
from sweeps.capture.capture import capture
from sweeps.capture.captured import Product
from sweeps.capture.sources import find_source
from sweeps.capture.step import ModelStep

H100 = "nvidia-h100-sxm"


@pytest.fixture(scope="module")
def h100(tmp_path_factory: pytest.TempPathFactory) -> Basis:
    return find_basis(H100, tmp_path_factory.mktemp("no-results"))


def padded(work: Gemm, basis: Basis, pass_: str = "forward") -> tuple[object, int]:
    product = Product(work, "head", "head", pass_, 1, 0, 0)
    (computed,), copied = with_padding([product], basis)
    return computed.work, copied


@pytest.mark.parametrize(("pass_", "copies"), [("forward", 1), ("dgrad", 1), ("wgrad", 0)])
def test_a_misaligned_gemm_is_padded_and_only_its_weight_is_copied(
    h100: Basis, pass_: str, copies: int
) -> None:
    work = Gemm(8192, 50257, 1024, "bf16")
    expected = replace(work, n=50264)
    # The weight is read with 2 bytes per element, and written with 7 more rows.
    assert padded(work, h100, pass_) == (expected, copies * 2 * (50257 + 50264) * 1024)


def test_sizes_are_padded_to_16_bytes_unless_they_are_1(h100: Basis) -> None:
    assert padded(Gemm(8191, 50257, 1023, "fp16"), h100)[0] == Gemm(8192, 50264, 1024, "fp16")
    for work in (Gemm(1, 50257, 1024, "bf16"), Gemm(8192, 50256, 1024, "bf16")):
        assert padded(work, h100) == (work, 0)


def test_gemms_that_memory_limits_are_not_padded(h100: Basis) -> None:
    work = Gemm(8192, 8191, 64, "bf16")
    assert padded(work, h100) == (work, 0)


def test_nothing_is_padded_on_a_cpu() -> None:
    work = Gemm(1024, 1023, 1023, "fp32")
    assert padded(work, find_basis("cpu-intel-xeon-avx512bf16-1t", RESULTS)) == (work, 0)


def test_only_compiled_steps_are_padded(h100: Basis) -> None:
    source = find_source("gpt2", {"layers": 2, "vocab": 50257})
    captured = capture(source, ModelStep(batch=4, seq=512))
    steps = {kind: account_of(captured, Runtime(kind=kind), h100) for kind in ("eager", "compile")}
    heads = {
        kind: {size for line in step.lines for size in line.product.sizes.values() if size > 50000}
        for kind, step in steps.items()
    }
    assert heads == {"eager": {50257}, "compile": {50264}}
    copied = {kind: [o.bytes for o in step.other if o.what == "padded copies"]
              for kind, step in steps.items()}  # fmt: skip
    assert copied == {"eager": [], "compile": [2 * 2 * (50257 + 50264) * 768]}
