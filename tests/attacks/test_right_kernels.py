"""No right result is called wrong: random problems, dtypes, layouts and lengths of sums."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import implementations
from kernels.correctness.identity import LIMIT, remainders
from kernels.correctness.verify import verify
from kernels.device import this_cpu
from kernels.launch import Implementation
from kernels.library.calls import conv_call
from kernels.operands import TORCH_DTYPES, Operands, random_operands
from kernels.operation import Series, Workload
from kernels.problem import GEMM_LAYOUTS, Conv, Gemm, Problem
from tests.support.tiers import quick_and_long

CPU = this_cpu().machine
MAX_ELEMENTS = 1 << 22  # elements of an operand or result: so that thousands are tested in minutes


def size(rng: random.Random, most: int) -> int:
    """Of any magnitude, at times a power of two."""
    value = round(2 ** rng.uniform(0, most))
    return 1 << (value.bit_length() - 1) if rng.random() < 0.3 else value


def random_gemm(rng: random.Random, dtype: str) -> Gemm:
    """K up to 65,536; the other sizes small where K is large."""
    while True:
        gemm = Gemm(
            size(rng, 12), size(rng, 12), size(rng, 16), dtype, rng.choice(GEMM_LAYOUTS),
            rng.choice([1, 1, 1, 2, 5]),
        )  # fmt: skip
        if max(gemm.operand_elements) * gemm.batch <= MAX_ELEMENTS and gemm.flops <= 1 << 29:
            return gemm


def random_conv(rng: random.Random, dtype: str) -> Conv:
    """Any but the filter gradients of 1×1 filters with a stride: there, oneDNN destroys memory.

    That of 2×2×4×16 images in nhwc differs from float64 in a quarter of the draws, and on one
    thread it writes past its memory (PyTorch 2.13): our check found that.
    """
    while True:
        groups = rng.choice([1, 1, 1, 2, 4, 16])
        numbers = [
            size(rng, 4), groups * size(rng, 6), size(rng, 6), size(rng, 6), groups * size(rng, 6),
            rng.choice([1, 2, 3, 5]), rng.choice([1, 3]), rng.choice([1, 1, 2]),
            rng.choice([0, 1, 2]), rng.choice([1, 1, 2]), groups,
        ]  # fmt: skip
        text = ",".join(map(str, numbers))
        layout, pass_ = rng.choice(["nhwc", "nchw"]), rng.choice(["fprop", "dgrad", "wgrad"])
        try:
            conv = Conv.parse(f"{text},{dtype},{layout},{pass_}")
        except Exception:
            continue  # a filter larger than its image
        skips = conv.pass_ == "wgrad" and (conv.r, conv.s) == (1, 1) and max(conv.stride) > 1
        if conv.flops <= 1 << 28 and not skips:
            return conv


def in_16_bits(gemm: Gemm, parts: int, dtype: torch.dtype, seed: int) -> float:
    """The remainder of a product whose partial sums are added up in 16 bits."""
    operands = random_operands(gemm, "cpu", seed)
    a, b = operands.a.float(), operands.b.float()
    total = torch.zeros(operands.out.shape, dtype=dtype)
    for part in range(parts):
        total += (a[..., part::parts] @ b[..., part::parts, :]).to(dtype)
    (left,) = remainders(gemm, [operands], [total], seed) or [float("nan")]
    return left


def accused(implementation: Implementation, problem: Workload, seed: int) -> list[str]:
    """What a right result is blamed for: nothing, if all is well.

    A library may really be wrong: with AMX, oneDNN's bf16 filter gradients of 2 channels in 2
    groups are off by any factor (PyTorch 2.13). Where no entry may differ by much from PyTorch's
    own loops in float64, the blame is false.
    """
    operands = random_operands(problem, "cpu", seed)
    config = implementation.configs(problem, CPU)[0]
    result = implementation.prepare(problem, [operands], config)(0)
    verdict = verify(problem, [operands], [result], seed)
    if verdict.ok or (isinstance(problem, Conv) and really_wrong(problem, operands, result)):
        return []
    return [f"{implementation.name}: {problem}: {verdict.message}"]


def really_wrong(problem: Conv, operands: Operands, result: torch.Tensor) -> bool:
    """Whether a convolution is far off in some entry: PyTorch's own loops compute float64."""
    right = conv_call(problem, [Operands(*(tensor.double() for tensor in operands))])(0)
    off = (result.double() - right).abs().max() / right.abs().max()
    return not off < 0.1


@pytest.mark.parametrize("count", quick_and_long([40, 10_000]))
def test_the_libraries_are_right(count: int) -> None:
    rng = random.Random(count)
    libraries = [i for n, i in implementations().items() if not n.startswith("triton")]
    tested = 0
    while tested < count:
        dtype = rng.choice(list(TORCH_DTYPES))
        make = random_gemm if rng.random() < 0.6 else random_conv
        problem = make(rng, dtype)
        for library in libraries:
            if library.supports(problem, CPU) is None:
                tested += 1
                assert accused(library, problem, rng.getrandbits(31)) == []


@pytest.mark.parametrize("count", quick_and_long([1, 200]))
def test_the_families_are_right_in_the_interpreter(count: int) -> None:
    rng = random.Random(count)
    families = [i for n, i in implementations().items() if n.startswith("triton")]
    for _ in range(count):
        for family in families:
            dtype = rng.choice(list(TORCH_DTYPES))
            sizes = size(rng, 7), size(rng, 7), size(rng, 9)
            problem: Problem = Gemm(*sizes, dtype, rng.choice(GEMM_LAYOUTS))
            if "gemm" not in family.ops:
                c, side, kout = size(rng, 4), size(rng, 3) + 2, size(rng, 4)
                text = f"2,{c},{side},{side},{kout},3,3,1,1,1,1,{dtype},nhwc,fprop"
                problem = Conv.parse(text)
            if family.supports(problem, CPU) is None:
                assert accused(family, problem, rng.getrandbits(31)) == []


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("parts", [1, 4, 16, 64])
def test_partial_sums_in_16_bits_are_right(dtype: str, parts: int) -> None:
    """As split-K kernels of a library add them up, at any length of the sum."""
    rng = random.Random(parts)
    for _ in range(3):
        gemm = Gemm(rng.choice([1, 64, 200]), rng.choice([64, 1300]), size(rng, 14) + 64, dtype)
        left = in_16_bits(gemm, parts, TORCH_DTYPES[dtype], rng.getrandbits(31))
        assert left < LIMIT[dtype], gemm


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_partial_sums_in_16_bits_are_right_up_to_65536(dtype: str) -> None:
    rng = random.Random(0)
    for _ in range(40):
        gemm = Gemm(size(rng, 8), size(rng, 11), round(2 ** rng.uniform(12, 16)), dtype)
        parts = rng.choice([2, 8, 16, 32])
        assert in_16_bits(gemm, parts, TORCH_DTYPES[dtype], rng.getrandbits(31)) < LIMIT[dtype]


def test_a_series_is_right_and_one_wrong_product_of_it_is_found() -> None:
    for op in ("projections", "timesteps"):
        series = Series(op, 3, 40, 50, 60, "fp32")
        operands = random_operands(series, "cpu")
        x, w = operands.a, operands.b
        result = x @ w.mT
        assert verify(series, [operands], [result], 0).ok
        result[1, 20] *= -1
        assert not verify(series, [operands], [result], 0).ok
