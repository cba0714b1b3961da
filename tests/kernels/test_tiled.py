"""``triton-tiled`` against float64: in the interpreter without a GPU, on it with one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import family as family_
from kernels.config import TileConfig
from kernels.family import TritonFamily
from kernels.machine import known_machine
from kernels.operands import Operands, random_operands
from kernels.problem import DTYPE_BYTES, GEMM_LAYOUTS, Gemm
from kernels.reference import check
from kernels.registry import all_implementations

HAS_GPU = torch.cuda.is_available()
DTYPES = list(DTYPE_BYTES)
# Around every block size of the test's tiles, and what is easily forgotten.
AWKWARD = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 61, 64, 65, 97)
TILES = [
    TileConfig(16, 16, 16, 1, 1, 2),
    TileConfig(32, 16, 16, 1, 1, 3),
    TileConfig(16, 32, 32, 1, 1),
]
GPU_TILES = [
    TileConfig(64, 64, 32, 3, 4),
    TileConfig(128, 128, 32, 2, 8),
    TileConfig(32, 64, 16, 4, 4),
]


LACK = family_.INTERPRETED and family_._interpreter_lack()
runs = pytest.mark.skipif(bool(LACK), reason=str(LACK))


def family() -> TritonFamily:
    found = all_implementations()["triton-tiled"]
    assert isinstance(found, TritonFamily)
    return found


def run(problem: Gemm, operands: Operands, config: TileConfig) -> Tensor:
    return family().prepare(problem, [operands], config)(0)


@runs
@settings(max_examples=300)
@given(
    m=st.sampled_from(AWKWARD), n=st.sampled_from(AWKWARD), k=st.sampled_from(AWKWARD),
    dtype=st.sampled_from(DTYPES), layout=st.sampled_from(GEMM_LAYOUTS), batch=st.integers(1, 3),
    config=st.sampled_from(GPU_TILES if HAS_GPU else TILES),
)  # fmt: skip
def test_any_size_dtype_layout_and_batch(
    m: int, n: int, k: int, dtype: str, layout: str, batch: int, config: TileConfig
) -> None:
    problem = Gemm(m, n, k, dtype, layout, batch)
    operands = random_operands(problem, "cuda" if HAS_GPU else "cpu", seed=m * n + k)
    result = run(problem, operands, config)
    assert not result.isnan().any()  # the output was poisoned: every entry is written
    assert check(problem, operands, result).ok


@runs
def test_operands_need_not_be_contiguous(device: str) -> None:
    problem = Gemm(33, 18, 40, "fp32", "nn")
    a = torch.randn(66, 160, device=device)[::2, ::4]
    b = torch.randn(80, 54, device=device)[1::2, 2::3]
    padded = torch.full((33, 50), math.nan, device=device)
    operands = Operands(a, b, padded[:, 5:23])
    result = run(problem, operands, TILES[0])
    assert check(problem, operands, result).ok
    outside = torch.cat([padded[:, :5], padded[:, 23:]], dim=1)
    assert outside.isnan().all()  # nothing beside the result was touched


@runs
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_infinities_and_nans_go_where_pytorch_sends_them(device: str, special: float) -> None:
    problem = Gemm(20, 24, 19, "fp32")
    operands = random_operands(problem, device)
    operands.a[3, 18] = special
    operands.b[0, 7] = special
    result = run(problem, operands, TILES[0])
    expected = operands.a @ operands.b
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())


@runs
def test_offsets_past_two_to_the_31(device: str) -> None:
    """Rows 2³¹ elements apart, in a view of memory that is touched only where it is used."""
    if not HAS_GPU:
        rows, gap = 3, 2**31 + 16
        try:
            a_memory = torch.empty(rows * gap, dtype=torch.bfloat16)
        except RuntimeError:
            pytest.skip("13 GB of address space are not to be had")
    else:
        rows, gap = 3, 2**31 + 16
        a_memory = torch.empty(rows * gap, dtype=torch.bfloat16, device="cuda")
    problem = Gemm(rows, 16, 32, "bf16", "nn")
    plain = random_operands(problem, device)
    a = a_memory.as_strided((rows, 32), (gap, 1))
    a.copy_(plain.a)
    operands = Operands(a, plain.b, plain.out)
    assert check(problem, operands, run(problem, operands, TILES[0])).ok


def test_a_config_is_needed() -> None:
    problem = Gemm(16, 16, 16, "fp32")
    with pytest.raises(TypeError, match="configs"):
        family().prepare(problem, [random_operands(problem, "cpu")])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slug", ["nvidia-a100-sxm-80gb", "nvidia-h200", "nvidia-l40s"])
def test_configs_are_valid_and_ranked_by_estimated_time(slug: str, dtype: str) -> None:
    machine = known_machine(slug)
    large = family().configs(Gemm(8192, 8192, 8192, dtype), machine)
    small = family().configs(Gemm(64, 64, 512, dtype), machine)
    assert len(large) == len(set(large)) >= 4
    for config in large:
        assert isinstance(config, TileConfig)
        assert config.invalid(dtype, machine) is None
    first_large, first_small = large[0], small[0]
    assert isinstance(first_large, TileConfig)
    assert isinstance(first_small, TileConfig)
    assert first_large.bm * first_large.bn > first_small.bm * first_small.bn


def test_misaligned_problems_get_shallow_steps(device: str) -> None:
    machine = known_machine("nvidia-h200")
    aligned = family().configs(Gemm(4096, 4096, 4096, "bf16"), machine)[0]
    odd = family().configs(Gemm(4095, 4095, 4095, "bf16"), machine)[0]
    assert isinstance(aligned, TileConfig)
    assert isinstance(odd, TileConfig)
    assert (aligned.bk, odd.bk) == (64, 32)
