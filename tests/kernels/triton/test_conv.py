"""Compare ``triton-conv`` with float64: on the GPU if there is one, or in the interpreter."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from kernels.common.errors import UserError
from kernels.config import ConvConfig, PersistentConfig, SplitConfig, TileConfig
from kernels.correctness.reference import check
from kernels.machine import known_machine
from kernels.operands import Operands, random_operands
from kernels.problem import PASSES, TIMED_DTYPES, Conv
from kernels.registry import all_implementations
from kernels.triton import family as family_
from kernels.triton.family import TritonFamily
from tests.support.bounds import guarded

HAS_GPU = torch.cuda.is_available()
LACK = family_.INTERPRETED and family_._missing_for_interpreter()
runs = pytest.mark.skipif(bool(LACK), reason=str(LACK))
every_pass = pytest.mark.parametrize("pass_", PASSES)
LARGE = [TileConfig(64, 64, 32, 3, 4), TileConfig(128, 32, 32, 2, 4)]
TILES = LARGE if HAS_GPU else [TileConfig(16, 16, 16, 1, 1, 2)]
SPLITS = (1, 2, 3)
# Numbers of channels around the block sizes, a single channel, and the three of a first layer.
CHANNELS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 33)


def family() -> TritonFamily:
    found = all_implementations()["triton-conv"]
    assert isinstance(found, TritonFamily)
    return found


def run(problem: Conv, operands: Operands, split: int = 1, repack: bool = False) -> Tensor:
    tile = TILES[problem.n % len(TILES)]
    return run_with(problem, operands, ConvConfig(**vars(tile), split=split, repack=repack))


def run_with(problem: Conv, operands: Operands, config: ConvConfig) -> Tensor:
    launch = family().prepare(problem, [operands], config)
    with nullcontext() if HAS_GPU else guarded(operands[:2], operands[2:]):
        return launch(0)


@st.composite
def problems(draw: st.DrawFn) -> Conv:
    """Draw a convolution of any geometry with an output, small enough for the interpreter."""
    groups = draw(st.sampled_from((1, 1, 1, 2, 3)))
    few = [c for c in CHANNELS if c * groups <= 33]
    c, kout = (groups * draw(st.sampled_from(few)) for _ in range(2))
    n, r, s = (draw(st.integers(1, most)) for most in (2, 4, 3))
    h, w = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    stride, dilation = ((draw(st.integers(1, 3)), draw(st.integers(1, 3))) for _ in range(2))
    padding = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    dtype, pass_ = draw(st.sampled_from(list(TIMED_DTYPES))), draw(st.sampled_from(PASSES))
    try:
        return Conv(n, c, h, w, kout, r, s, stride, padding, dilation, groups, dtype, "nhwc", pass_)
    except UserError:  # the filter is larger than the padded image
        assume(False)
        raise


@runs
@given(problem=problems(), split=st.sampled_from(SPLITS), repack=st.booleans())
def test_any_geometry_dtype_and_pass(problem: Conv, split: int, repack: bool) -> None:
    operands = random_operands(problem, "cuda" if HAS_GPU else "cpu", seed=problem.flops)
    result = run(problem, operands, split, repack)
    assert not result.isnan().any()  # the memory held NaN, so every entry has been written
    assert check(problem, operands, result).ok


GEMM_CONFIGS = [
    config
    for tile in TILES
    for config in (
        tile,
        SplitConfig(**vars(tile), split=3),
        PersistentConfig(**vars(tile), ctas=3),
        PersistentConfig(**vars(tile), ctas=2, halves=True),
    )
]


@runs
@given(
    sizes=st.tuples(st.integers(1, 3), *[st.sampled_from(CHANNELS)] * 2, *[st.integers(1, 7)] * 2),
    dtype=st.sampled_from(list(TIMED_DTYPES)),
    pass_=st.sampled_from(PASSES),
    config=st.sampled_from(GEMM_CONFIGS),
)
def test_a_convolution_that_is_a_gemm_is_right(
    sizes: tuple[int, ...], dtype: str, pass_: str, config: TileConfig
) -> None:
    n, c, kout, h, w = sizes
    problem = Conv(n, c, h, w, kout, 1, 1, (1, 1), (0, 0), (1, 1), 1, dtype, "nhwc", pass_)
    operands = random_operands(problem, "cuda" if HAS_GPU else "cpu", seed=problem.flops)
    result = run_with(problem, operands, ConvConfig.from_gemm(config))
    assert not result.isnan().any()
    assert check(problem, operands, result).ok


@runs
@every_pass
@pytest.mark.parametrize("split", [1, 3])
def test_a_gemm_of_images_with_gaps_is_computed_as_a_convolution(
    device: str, pass_: str, split: int
) -> None:
    problem = Conv(2, 5, 6, 7, 4, 1, 1, (1, 1), (0, 0), (1, 1), 1, "fp32", "nhwc", pass_)
    plain = random_operands(problem, device)
    wide = [torch.full([2 * size for size in t.shape], math.nan, device=device) for t in plain]
    views = Operands(*(t[::2, 1::2, ::2, 1::2] for t in wide))
    for view, t in zip(views, plain, strict=True):
        view.copy_(t)
    config = ConvConfig(**vars(TILES[0]), split=split, gemm=True)
    assert check(problem, views, run_with(problem, views, config)).ok
    names = {
        call.kernel.fn.__name__
        for of in (plain, views)
        for call in family().unbound_calls(problem, of, config)
    }
    assert [name for name in names if name.startswith("conv_")]
    assert [name for name in names if name.startswith("matmul_")]


@pytest.mark.parametrize(
    ("spec", "kernels"),
    [
        ("32,256,56,56,64,1,1,1,0,1,1,bf16,nhwc,fprop", {"tma", "tiled", "split", "conv"}),
        ("32,256,56,56,64,1,1,1,0,1,1,bf16,nhwc,wgrad", {"tma", "tiled", "split", "conv"}),
        ("32,255,56,56,64,1,1,1,0,1,1,bf16,nhwc,fprop", {"tiled", "split", "conv"}),  # no TMA
        ("32,256,56,56,64,1,1,2,0,1,1,bf16,nhwc,fprop", {"conv"}),  # stride 2
        ("32,256,56,56,64,1,1,1,1,1,1,bf16,nhwc,fprop", {"conv"}),  # padding 1
        ("32,256,56,56,64,1,1,1,0,1,2,bf16,nhwc,fprop", {"conv"}),  # two groups
        ("32,256,56,56,64,3,3,1,1,1,1,bf16,nhwc,fprop", {"conv"}),
    ],
)
def test_dense_filters_of_one_tap_are_gemms(spec: str, kernels: set[str]) -> None:
    configs = family().configs(Conv.parse(spec), known_machine("nvidia-h200"))
    found = set()
    for config in configs:
        assert isinstance(config, ConvConfig)
        assert family().parse_config(str(config)) == config
        kind = "tma" if config.ctas else "split" if config.split > 1 else "tiled"
        found.add(kind if config.gemm else "conv")
    assert found == kernels
    first = configs[0]
    assert isinstance(first, ConvConfig)
    assert first.gemm == (len(kernels) > 1)


@runs
@every_pass
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("split", [1, 3])
def test_slow_filters_are_transposed_beforehand(
    device: str, pass_: str, dtype: str, split: int
) -> None:
    problem = Conv(2, 6, 5, 4, 10, 3, 3, (2, 1), (1, 1), (1, 2), 2, dtype, "nhwc", pass_)
    assert 10 * 3 * 3 * 3 % 4  # the filters do not end at a multiple of 16 bytes
    operands = random_operands(problem, device)
    config = ConvConfig(**vars(TILES[0]), split=split, repack=True)
    assert check(problem, operands, run_with(problem, operands, config)).ok
    calls = family().unbound_calls(problem, operands, config)
    views = [a for call in calls for a in call.arguments if isinstance(a, Tensor) and a.is_meta]
    assert all(view.storage_offset() % 4 == 0 for view in views)  # at 16 bytes
    has_slow_filters = (pass_, dtype) in {("fprop", "fp32"), ("dgrad", "tf32")}
    assert (calls[0].kernel.fn.__name__ == "transpose") == has_slow_filters


@pytest.mark.parametrize(
    ("spec", "slug", "repacks"),
    [
        ("32,256,14,14,256,3,3,1,1,1,1,fp32,nhwc,fprop", "nvidia-h200", True),
        ("32,256,14,14,256,3,3,1,1,1,1,fp32,nhwc,dgrad", "nvidia-h200", False),
        ("1,256,7,7,256,3,3,1,1,1,1,fp32,nhwc,fprop", "nvidia-h200", False),  # 49 pixels
        ("32,256,14,14,256,1,1,1,0,1,1,fp32,nhwc,fprop", "nvidia-h200", True),  # a GEMM
        ("32,256,14,14,256,3,3,1,1,1,256,fp32,nhwc,fprop", "nvidia-h200", False),  # depthwise
        ("32,256,14,14,256,3,3,1,1,1,1,tf32,nhwc,dgrad", "nvidia-h200", True),
        ("32,256,14,14,256,3,3,1,1,1,1,tf32,nhwc,dgrad", "nvidia-a100-sxm-80gb", False),
        ("32,256,14,14,256,3,3,1,1,1,1,tf32,nhwc,wgrad", "nvidia-h200", False),
        ("32,256,14,14,256,3,3,1,1,1,1,bf16,nhwc,dgrad", "nvidia-h200", False),
    ],
)
def test_which_filters_are_transposed(spec: str, slug: str, repacks: bool) -> None:
    for config in family().configs(Conv.parse(spec), known_machine(slug)):
        assert isinstance(config, ConvConfig)
        assert config.repack == repacks


@runs
@every_pass
@pytest.mark.parametrize("split", SPLITS)
def test_operands_need_not_be_contiguous(device: str, pass_: str, split: int) -> None:
    problem = Conv(2, 5, 6, 7, 4, 3, 2, (2, 1), (1, 1), (1, 2), 1, "fp32", "nhwc", pass_)
    plain = random_operands(problem, device)
    wide = [torch.full([2 * size for size in t.shape], math.nan, device=device) for t in plain]
    views = Operands(*(t[::2, 1::2, ::2, 1::2] for t in wide))
    for view, t in zip(views, plain, strict=True):
        view.copy_(t)
    assert check(problem, views, run(problem, views, split, repack=True)).ok
    assert int(wide[2].isnan().sum()) == wide[2].numel() - views.out.numel()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN is part of the test
@runs
@every_pass
def test_infinities_and_nans_go_where_pytorch_sends_them(device: str, pass_: str) -> None:
    problem = Conv(1, 3, 6, 6, 4, 3, 3, (2, 2), (1, 1), (1, 1), 1, "fp32", "nhwc", pass_)
    operands = random_operands(problem, device)
    operands.a[0, 1, 1, 1] = math.inf
    operands.a[0, 2, 2, 2] = math.nan
    expected = all_implementations()["cudnn" if HAS_GPU else "onednn"].prepare(problem, [operands])
    theirs = expected(0)
    ours = run(problem, operands)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())


@runs
@every_pass
def test_offsets_past_two_to_the_31(device: str, pass_: str) -> None:
    """The images are 2³¹ elements apart; only the memory of their pixels is read or written."""
    problem = Conv(2, 16, 5, 5, 16, 3, 3, (1, 1), (1, 1), (1, 1), 1, "bf16", "nhwc", pass_)
    plain = random_operands(problem, device)
    gap = 2**31 + 16
    try:
        memory = torch.empty(gap + 2**12, dtype=torch.bfloat16, device=device)
    except RuntimeError:
        pytest.skip("4 GB of memory are not available")
    far = memory.as_strided(plain.a.shape, (gap, *plain.a.stride()[1:]))
    far.copy_(plain.a)
    operands = Operands(far, plain.b, plain.out)
    assert check(problem, operands, run(problem, operands)).ok


@runs
@every_pass
def test_sums_in_parts_have_the_same_bits_in_every_run(device: str, pass_: str) -> None:
    problem = Conv(2, 16, 7, 7, 9, 3, 3, (1, 1), (1, 1), (1, 1), 1, "fp16", "nhwc", pass_)
    operands = random_operands(problem, device)
    first = run(problem, operands, split=3).clone()
    operands.out.fill_(math.nan)
    assert torch.equal(run(problem, operands, split=3), first)


def test_other_layouts_are_refused_in_a_sentence() -> None:
    problem = Conv(1, 8, 8, 8, 8, 3, 3, (1, 1), (1, 1), (1, 1), 1, "bf16", "nchw")
    reason = family().supports(problem, known_machine("nvidia-h200"))
    assert reason == "triton-conv computes only channels-last convolutions; use the layout nhwc."


def test_more_pixels_than_32_bits_count_are_refused() -> None:
    problem = Conv(2049, 1, 1024, 1024, 1, 1, 1, (1, 1), (0, 0), (1, 1), 1, "bf16")
    reason = family().supports(problem, known_machine("nvidia-h200"))
    assert reason == (
        "triton-conv counts pixels in 32 bits, but this convolution has 2³¹ pixels or more; use a "
        "smaller batch or image."
    )


def test_a_strided_gradient_is_ranked_by_its_phases() -> None:
    """Each of the 16 phases has 16 pixels and 4 K steps, too few for more than two parts."""
    problem = Conv.parse("1,256,16,16,256,4,4,4,0,1,1,bf16,nhwc,dgrad")
    for config in family().configs(problem, known_machine("nvidia-h200")):
        assert isinstance(config, SplitConfig)
        assert config.split <= 2


@every_pass
@pytest.mark.parametrize("dtype", list(TIMED_DTYPES))
@pytest.mark.parametrize("slug", ["nvidia-a100-sxm-80gb", "nvidia-h200", "nvidia-l40s"])
def test_configs_are_valid(slug: str, dtype: str, pass_: str) -> None:
    machine = known_machine(slug)
    problem = Conv(32, 256, 14, 14, 256, 3, 3, (1, 1), (1, 1), (1, 1), 1, dtype, "nhwc", pass_)
    configs = family().configs(problem, machine)
    assert len(configs) == len(set(configs)) >= 4
    for config in configs:
        assert isinstance(config, SplitConfig)
        assert config.invalid(dtype, machine) is None
        assert family().parse_config(str(config)) == config


def test_a_filter_gradient_with_few_tiles_is_split() -> None:
    machine = known_machine("nvidia-h200")
    few = Conv(32, 64, 56, 56, 64, 3, 3, (1, 1), (1, 1), (1, 1), 1, "bf16", "nhwc", "wgrad")
    many = Conv(32, 64, 56, 56, 64, 3, 3, (1, 1), (1, 1), (1, 1), 1, "bf16", "nhwc", "fprop")
    split, whole = (family().configs(problem, machine)[0] for problem in (few, many))
    assert isinstance(split, SplitConfig)
    assert isinstance(whole, SplitConfig)
    assert split.split > whole.split == 1
