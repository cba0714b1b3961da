"""Compare the GEMM families with float64: on the GPU if there is one, or in the interpreter."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.config import (
    HAND_WRITTEN,
    PersistentConfig,
    SplitConfig,
    StreamConfig,
    TileConfig,
    TiledConfig,
    experimental_feature,
    tile_count,
)
from kernels.correctness.reference import check
from kernels.machine import known_machine
from kernels.operands import Operands, random_operands
from kernels.problem import GEMM_LAYOUTS, TIMED_DTYPES, Gemm
from kernels.registry import all_implementations
from kernels.triton import family as family_
from kernels.triton.family import TritonFamily
from kernels.triton.gemm import should_repack, slow_operands
from kernels.triton.streamk import streamed_tiles
from tests.support.bounds import guarded

HAS_GPU = torch.cuda.is_available()
DTYPES = list(TIMED_DTYPES)
# Sizes around the block sizes of the test's tiles, very small sizes, and primes.
AWKWARD = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 61, 64, 65, 97)
MAX_CTAS = 10_000 if HAS_GPU else 12  # the interpreter runs CTAs one after another
SMALL = [
    TileConfig(16, 16, 16, 1, 1, 2), TileConfig(32, 16, 16, 1, 1, 3), TileConfig(16, 32, 32, 1, 1)
]  # fmt: skip
LARGE = [
    TileConfig(64, 64, 32, 3, 4), TileConfig(128, 128, 32, 2, 8), TileConfig(32, 64, 16, 4, 4)
]  # fmt: skip
TILES = LARGE if HAS_GPU else SMALL
CONFIGS: dict[str, list[TileConfig]] = {
    "triton-tiled": [
        TiledConfig(**vars(tile), repack=repack) for tile in TILES for repack in (False, True)
    ],
    "triton-splitk": [
        SplitConfig(**vars(tile), repack=split == 3, split=split)
        for tile in TILES
        for split in (2, 3, 8)
    ],
    "triton-streamk": [
        StreamConfig(**vars(tile), ctas=ctas) for tile in TILES for ctas in (1, 2, 3, 7)
    ],
    "triton-persistent": [
        PersistentConfig(**vars(tile), ctas=ctas, tma=tma, halves=halves)
        for tile in TILES
        for ctas in (1, 3)
        for tma, halves in ((True, False), (True, True), (False, False))
    ],
}
LACK = family_.INTERPRETED and family_._missing_for_interpreter()
runs = pytest.mark.skipif(bool(LACK), reason=str(LACK))
every_family = pytest.mark.parametrize("name", CONFIGS)


def test_every_family_is_listed_and_every_one_of_gemms_is_tested_here() -> None:
    listed = [one for one in all_implementations().values() if isinstance(one, TritonFamily)]
    assert {one.name for one in listed} == set(HAND_WRITTEN)
    assert {one.name for one in listed if "gemm" in one.ops} == set(CONFIGS)


def family(name: str) -> TritonFamily:
    found = all_implementations()[name]
    assert isinstance(found, TritonFamily)
    return found


def run(name: str, problem: Gemm, operands: Operands, config: TileConfig) -> Tensor:
    launch = family(name).prepare(problem, [operands], config)
    with nullcontext() if HAS_GPU else guarded(operands[:2], operands[2:]):
        return launch(0)


def ctas(problem: Gemm, config: TileConfig) -> int:
    tiles = tile_count(problem.m, problem.n, config.bm, config.bn, problem.batch)
    return tiles * int(getattr(config, "split", 1))


@st.composite
def problems(draw: st.DrawFn, config: TileConfig) -> Gemm:
    """Draw a GEMM of any size with at most ``MAX_CTAS`` CTAs."""

    def fits(m: int, n: int, batch: int) -> bool:
        return ctas(Gemm(m, n, 1, "fp32", "nn", batch), config) <= MAX_CTAS

    m = draw(st.sampled_from([m for m in AWKWARD if fits(m, 1, 1)]))
    n = draw(st.sampled_from([n for n in AWKWARD if fits(m, n, 1)]))
    batch = draw(st.sampled_from([batch for batch in (1, 2, 3) if fits(m, n, batch)]))
    k, dtype, layout = (draw(st.sampled_from(x)) for x in (AWKWARD, DTYPES, GEMM_LAYOUTS))
    return Gemm(m, n, k, dtype, layout, batch)


@runs
@every_family
@given(data=st.data())
def test_any_size_dtype_layout_and_batch(name: str, data: st.DataObject) -> None:
    config = data.draw(st.sampled_from(CONFIGS[name]))
    problem = data.draw(problems(config))
    operands = random_operands(problem, "cuda" if HAS_GPU else "cpu", seed=problem.flops)
    result = run(name, problem, operands, config)
    assert not result.isnan().any()  # the memory held NaN, so every entry has been written
    assert check(problem, operands, result).ok


@runs
@pytest.mark.skipif(HAS_GPU, reason="accesses are checked only in the interpreter")
@every_family
def test_a_kernel_that_leaves_its_operands_is_caught(name: str) -> None:
    """The test declares memory that is one row or column smaller than what the kernel uses."""
    problem = Gemm(33, 24, 40, "fp32")
    operands = random_operands(problem, "cpu")
    launch = family(name).prepare(problem, [operands], CONFIGS[name][0])
    last = [(operands.a[:-1], operands.b), (operands.a, operands.b[:, :-1])]
    for read in last:
        with pytest.raises(Exception, match="read outside"), guarded(read, operands[2:]):
            launch(0)
    with (
        pytest.raises(Exception, match="written outside"),
        guarded(operands[:2], [operands.out[:-1]]),
    ):
        launch(0)


@runs
@every_family
@pytest.mark.parametrize("ways", ["plain", "rows of 16 bytes"])
def test_operands_need_not_be_contiguous(device: str, name: str, ways: str) -> None:
    problem = Gemm(33, 18, 40, "fp32", "nn")
    if ways == "plain":
        a = torch.randn(66, 160, device=device)[::2, ::4]
        b = torch.randn(80, 54, device=device)[1::2, 2::3]
    else:  # TMA can read matrices with one contiguous dimension and rows of 16 bytes
        a = torch.randn(40, 36, device=device)[:, :33].T
        b = torch.randn(80, 20, device=device)[::2, :18]
    padded = torch.full((33, 52), math.nan, device=device)
    operands = Operands(a, b, padded[:, 4:22])
    for config in CONFIGS[name]:
        padded.fill_(math.nan)
        assert check(problem, operands, run(name, problem, operands, config)).ok
        outside = torch.cat([padded[:, :4], padded[:, 22:]], dim=1)
        assert outside.isnan().all()  # nothing next to the result was written


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN is part of the test
@runs
@every_family
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_infinities_and_nans_go_where_pytorch_sends_them(
    device: str, name: str, special: float
) -> None:
    problem = Gemm(20, 24, 19, "fp32")
    operands = random_operands(problem, device)
    operands.a[3, 18] = special
    operands.b[0, 7] = special
    expected = operands.a @ operands.b
    for config in CONFIGS[name]:
        result = run(name, problem, operands, config)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.isinf(), expected.isinf())


@runs
@every_family
def test_offsets_past_two_to_the_31(device: str, name: str) -> None:
    """The rows are 2³¹ elements apart; only the memory of their elements is read or written."""
    rows, gap = 3, 2**31 + 16
    try:
        a_memory = torch.empty(rows * gap, dtype=torch.bfloat16, device=device)
    except RuntimeError:
        pytest.skip("13 GB of memory are not available")
    problem = Gemm(rows, 16, 32, "bf16", "nn")
    plain = random_operands(problem, device)
    a = a_memory.as_strided((rows, 32), (gap, 1))
    a.copy_(plain.a)
    operands = Operands(a, plain.b, plain.out)
    for config in (CONFIGS[name][0], CONFIGS[name][-1]):
        plain.out.fill_(math.nan)
        assert check(problem, operands, run(name, problem, operands, config)).ok


@runs
@every_family
@pytest.mark.parametrize("layout", ["tn", "nn"])
def test_k_steps_past_two_to_the_31(device: str, name: str, layout: str) -> None:
    """A K step covers 2³¹ elements or more: in A if it is stored transposed, otherwise in B."""
    config = CONFIGS[name][-1]
    k, gap = config.bk + 4, 2**31 // config.bk + 8
    try:
        memory = torch.empty(k * gap, dtype=torch.bfloat16, device=device)
    except RuntimeError:
        pytest.skip("5 GB of memory are not available")
    problem = Gemm(16, 16, k, "bf16", layout)
    plain = random_operands(problem, device)
    if layout == "tn":
        far = memory.as_strided((16, k), (1, gap))
        operands = plain._replace(a=far.copy_(plain.a))
    else:
        far = memory.as_strided((k, 16), (gap, 1))
        operands = plain._replace(b=far.copy_(plain.b))
    assert check(problem, operands, run(name, problem, operands, config)).ok


@pytest.mark.slow
@runs
@pytest.mark.parametrize("name", ["triton-splitk", "triton-streamk"])
def test_sums_in_parts_have_the_same_bits_in_every_run(device: str, name: str) -> None:
    problem = Gemm(47, 33, 97, "fp16")
    operands = random_operands(problem, device)
    for config in CONFIGS[name]:
        first = run(name, problem, operands, config).clone()
        operands.out.fill_(math.nan)
        assert torch.equal(run(name, problem, operands, config), first)


def test_no_kernel_adds_atomically() -> None:
    """Atomic additions finish in any order on a GPU, which a run in the interpreter cannot show."""
    sources = Path(family_.__file__).parent.glob("*.py")
    assert not [path.name for path in sources if "atomic_" in path.read_text(encoding="utf-8")]


@runs
def test_one_scratch_serves_all_operand_sets(device: str) -> None:
    problem = Gemm(17, 33, 64, "fp32")
    sets = [random_operands(problem, device, seed) for seed in range(3)]
    launch = family("triton-splitk").prepare(problem, sets, CONFIGS["triton-splitk"][0])
    for index in (2, 0, 1):
        assert check(problem, sets[index], launch(index)).ok


@runs
@pytest.mark.parametrize("layout", GEMM_LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
@pytest.mark.parametrize(("m", "n", "batch"), [(257, 261, 1), (260, 256, 2), (256, 31, 1)])
def test_operands_that_are_transposed_beforehand(
    m: int, n: int, batch: int, dtype: str, layout: str, device: str
) -> None:
    """Sizes above the number of uses from which both dtypes transpose, odd ones among them."""
    problem = Gemm(m, n, 19, dtype, layout, batch)
    operands = random_operands(problem, device)
    configs: dict[str, TiledConfig] = {
        "triton-tiled": TiledConfig(64, 64, 16, 1, 1, repack=True),
        "triton-splitk": SplitConfig(64, 64, 16, 1, 1, repack=True, split=2),
    }
    for name, config in configs.items():
        assert check(problem, operands, run(name, problem, operands, config)).ok
        calls = family(name).unbound_calls(problem, operands, config)
        views = [a for call in calls for a in call.arguments if isinstance(a, Tensor) and a.is_meta]
        assert all(view.storage_offset() % 4 == 0 for view in views)  # at 16 bytes
        plain = family(name).unbound_calls(problem, operands, replace(config, repack=False))
        assert len(calls) == len(plain) + sum(slow_operands(problem))


@runs
def test_an_operand_without_a_contiguous_dimension_is_not_transposed(device: str) -> None:
    problem = Gemm(70, 34, 20, "fp32", "nt")
    a, b, out = random_operands(problem, device)
    spread = torch.empty(20, 2, 34, 2, device=device)[:, 0, :, 0]
    spread.copy_(b)
    operands = Operands(a, spread, out)
    config = TiledConfig(**vars(TILES[0]), repack=True)
    assert check(problem, operands, run("triton-tiled", problem, operands, config)).ok
    assert len(family("triton-tiled").unbound_calls(problem, operands, config)) == 1


@pytest.mark.parametrize(
    ("text", "slug", "slow"),
    [
        ("4096,4096,4096,fp32,nt", "nvidia-h200", (False, True)),
        ("4096,4096,4096,fp32,tn", "nvidia-h200", (False, False)),
        ("63,4096,4096,fp32,nt", "nvidia-h200", (False, False)),
        ("4096,4096,4096,tf32,tn", "nvidia-h200", (True, True)),
        ("4096,64,4096,tf32,tn", "nvidia-h200", (False, True)),
        ("4096,4096,4096,tf32,tn", "nvidia-a100-sxm-80gb", (False, False)),
        ("4096,4096,4096,tf32,nt", "nvidia-h200", (False, False)),
        ("4096,4096,4096,bf16,tn", "nvidia-h200", (False, False)),
    ],
)
def test_which_operands_are_transposed(text: str, slug: str, slow: tuple[bool, bool]) -> None:
    problem, machine = Gemm.parse(text), known_machine(slug)
    assert should_repack(problem, machine) == any(slow)
    (config, *_) = family("triton-tiled").configs(problem, machine)
    assert isinstance(config, TiledConfig)
    assert config.repack == any(slow)
    if any(slow):
        assert slow_operands(problem) == slow


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_only_what_would_be_a_partial_wave_is_streamed(tiles: int, ctas: int) -> None:
    streamed = streamed_tiles(tiles, ctas)
    assert (tiles - streamed) % ctas == 0  # the tiles that are not streamed fill whole waves
    assert (streamed == 0) == (tiles % ctas == 0)
    assert streamed < 2 * ctas
    assert streamed > ctas or streamed in (0, tiles)  # a CTA's run is no shorter than a tile


@every_family
def test_a_config_is_needed(name: str) -> None:
    problem = Gemm(16, 16, 16, "fp32")
    with pytest.raises(TypeError, match=r"Config; use one from configs\(\)"):
        family(name).prepare(problem, [random_operands(problem, "cpu")])


@every_family
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slug", ["nvidia-a100-sxm-80gb", "nvidia-h200", "nvidia-l40s"])
def test_configs_are_valid_and_ranked_by_estimated_time(slug: str, dtype: str, name: str) -> None:
    machine = known_machine(slug)
    large = family(name).configs(Gemm(8192, 8192, 8192, dtype), machine)
    small = family(name).configs(Gemm(64, 64, 512, dtype), machine)
    assert len(large) == len(set(large)) >= 4
    for config in large:
        assert isinstance(config, family(name).config_type)
        assert config.invalid(dtype, machine) is None
        assert family(name).parse_config(str(config)) == config
    first_large, first_small = large[0], small[0]
    assert isinstance(first_large, TileConfig)
    assert isinstance(first_small, TileConfig)
    assert first_large.bm * first_large.bn > first_small.bm * first_small.bn


def test_misaligned_problems_get_shallow_steps() -> None:
    machine = known_machine("nvidia-h200")
    aligned = family("triton-tiled").configs(Gemm(4096, 4096, 4096, "bf16"), machine)[0]
    odd = family("triton-tiled").configs(Gemm(4095, 4095, 4095, "bf16"), machine)[0]
    assert isinstance(aligned, TileConfig)
    assert isinstance(odd, TileConfig)
    assert (aligned.bk, odd.bk) == (64, 32)


def test_long_sums_over_few_tiles_are_split_further() -> None:
    machine = known_machine("nvidia-h200")
    splits = []
    for k in (1024, 16384, 262144):
        config = family("triton-splitk").configs(Gemm(256, 256, k, "bf16"), machine)[0]
        assert isinstance(config, SplitConfig)
        splits.append(config.split)
    assert splits == sorted(splits)
    assert splits[0] < splits[-1]


@pytest.mark.parametrize(
    ("slug", "spec", "tma"),
    [
        ("nvidia-h200", "4096,4096,4096,bf16", True),
        ("nvidia-h200", "4095,4095,4095,bf16", False),  # TMA cannot read misaligned rows
        ("nvidia-a100-sxm-80gb", "4096,4096,4096,bf16", False),  # an A100 has no TMA
    ],
)
def test_tma_is_used_where_it_can_be(slug: str, spec: str, tma: bool) -> None:
    for config in family("triton-persistent").configs(Gemm.parse(spec), known_machine(slug), True):
        assert isinstance(config, PersistentConfig)
        assert config.tma == tma
        assert tma or not config.specialize


@pytest.mark.parametrize(
    ("slug", "spec", "there"),
    [
        ("nvidia-h200", "4096,4096,4096,bf16", True),
        ("nvidia-h200", "4096,4096,64,bf16", False),  # a single K step has no loop to specialise
        ("nvidia-h200", "4096,4097,4096,bf16", True),
        ("nvidia-b200", "4096,4097,4096,bf16", False),  # plain stores of C would spill on sm_100
        ("nvidia-h200", "4096,4096,4096,tf32,nn", False),  # TMA cannot transpose tf32
        ("nvidia-h200", "4096,4096,4096,bf16,nt,4", False),  # batches are not specialised
    ],
)
def test_warps_are_specialised_where_that_compiles(slug: str, spec: str, there: bool) -> None:
    machine, problem = known_machine(slug), Gemm.parse(spec)
    configs = family("triton-persistent").configs(problem, machine, experimental=True)
    assert any(config.experimental for config in configs if config) == there
    # They were slower on an H100, so they are candidates only if the caller asks for them.
    plain = family("triton-persistent").configs(problem, machine)
    assert not any(config.experimental for config in plain if config)
    assert plain


def test_an_experimental_feature_is_read_from_the_text_of_a_config() -> None:
    assert experimental_feature("triton-persistent", "specialize=on") == "warp specialisation"
    assert experimental_feature("triton-persistent", "specialize=off") is None
    assert experimental_feature("triton-tiled", "bm=64") is None
    assert experimental_feature("cublas", "autotune=on") is None


@pytest.mark.parametrize("slug", ["nvidia-a100-sxm-80gb", "nvidia-h200", "nvidia-l40s"])
def test_streaming_ctas_all_fit_at_once(slug: str) -> None:
    machine = known_machine(slug)
    for config in family("triton-streamk").configs(Gemm(4096, 4096, 4096, "bf16"), machine):
        assert isinstance(config, StreamConfig)
        resident = config.ctas // machine.sms
        assert resident * (config.shared_bytes("bf16", machine) + 1024) <= machine.shared_sm_bytes


def test_matrices_that_tma_cannot_read_are_read_with_plain_loads(device: str) -> None:
    config = PersistentConfig(**vars(SMALL[0]))

    def kernel(spec: str, batch_gap: int | None = None) -> tuple[str, bool | None]:
        problem = Gemm.parse(spec)
        operands = random_operands(problem, device)
        if batch_gap is not None:
            spread = torch.zeros(2 * batch_gap, dtype=torch.bfloat16, device=device)
            strides = (batch_gap, *operands.a.stride()[1:])
            operands = operands._replace(a=spread.as_strided(operands.a.shape, strides))
        (call,) = family("triton-persistent").unbound_calls(problem, operands, config)
        return call.kernel.fn.__name__, call.options.get("STORE")

    plain = ("matmul_persistent_plain", None)
    assert kernel("64,64,64,bf16") == ("matmul_persistent", True)
    assert kernel("64,63,64,bf16") == ("matmul_persistent", False)  # only the rows of C are odd
    assert kernel("64,64,63,bf16") == plain
    assert kernel("64,63,64,bf16,nn") == plain
    assert kernel("64,64,64,bf16,nt,2", batch_gap=64 * 64 + 8) == ("matmul_persistent", True)
    assert kernel("64,64,64,bf16,nt,2", batch_gap=64 * 64 + 1) == plain


def test_stages_are_fitted_to_the_shared_memory() -> None:
    tile = TileConfig(128, 128, 64, stages=4, warps=8)
    stages = [
        tile.fitted("bf16", known_machine(slug)).stages
        for slug in ("nvidia-h200", "nvidia-a100-sxm-80gb", "nvidia-l40s")
    ]
    assert stages == [4, 4, 4]  # stages of 32 KiB; mma.sync holds one stage fewer
    huge = replace(tile, bk=256).fitted("bf16", known_machine("nvidia-l40s"))
    assert huge.stages == 2
    assert huge.invalid("bf16", known_machine("nvidia-l40s")) is not None
