from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.machine import known_machine, known_machines
from kernels.problem import WIDE_BYTES, Conv, Gemm, Problem
from kernels.timemodel.constants import BOUNDS, Constants, default_constants
from kernels.timemodel.estimate import (
    ALGORITHMS,
    LIMITS,
    Shapes,
    Tiles,
    estimate,
    fastest,
    priced_alignment,
)

H100 = known_machine("nvidia-h100-sxm")
PEAK = H100.peak("bf16")
IDEAL = Constants.from_json({
    "compute": 1.0, "dram": 1.0, "feed": 1e15, "l2": 1e18, "store": 1e15, "epilogue": 0.0,
    "step": 0.0, "launch": 0.0, "tail": 1.0, "ramp": 0.0, "split": 0.0, "partials": 1.0,
    "slow": 0.0, "misalignment": 0.0, "repack": 0.0, "resident": 0.0, "cached": 1.0,
    "sustained": 1.0,
})  # fmt: skip

sizes = st.integers(1, 20_000)


def one_tile(bm: int, bn: int, split: int = 1) -> Tiles:
    return Tiles(*(np.array([float(v)]) for v in (bm, bn, split)))


def seconds(problem: Problem, tile: Tiles, constants: Constants = IDEAL) -> float:
    return float(estimate(Shapes.from_problems([problem]), tile, H100, PEAK, constants).time[0])


def test_without_losses_a_large_product_takes_its_flops_over_the_peak() -> None:
    gemm = Gemm(8192, 128 * 132, 8192, "bf16")  # 64 × 132 tiles: whole waves on 132 SMs
    assert seconds(gemm, one_tile(128, 128)) == pytest.approx(gemm.flops / PEAK, rel=1e-3)


def test_a_tile_in_another_wave_costs_a_whole_wave() -> None:
    full = Gemm(256 * 12, 256 * 11, 8192, "bf16")  # 132 tiles
    beyond = replace(full, m=full.m + 1)
    tile = one_tile(256, 256)
    assert seconds(beyond, tile) == pytest.approx(2 * seconds(full, tile), rel=0.01)
    # With ``tail`` = 0, eleven more tiles cost 11/132 more.
    soft = replace(IDEAL, tail=0.0)
    assert seconds(beyond, tile, soft) == pytest.approx(seconds(full, tile) * 143 / 132, rel=0.01)


def test_a_vector_takes_its_bytes_over_the_bandwidth() -> None:
    gemm = Gemm(1, 16384, 16384, "bf16")
    assert seconds(gemm, one_tile(64, 64)) == pytest.approx(gemm.bytes / H100.bandwidth, rel=0.01)


def test_few_ctas_do_not_reach_the_bandwidth() -> None:
    gemm = Gemm(16, 16, 65536, "bf16")
    alone = seconds(gemm, one_tile(16, 16), replace(IDEAL, ramp=17.0))
    # A single CTA reaches 1 / (1 + 17) of the bandwidth.
    assert alone == pytest.approx(18 * gemm.bytes / H100.bandwidth, rel=0.05)


def test_narrow_rows_are_slower_by_the_power_of_their_width() -> None:
    misaligned = replace(IDEAL, misalignment=0.5)
    aligned, odd = Gemm(4096, 4096, 4096, "bf16"), Gemm(4096, 4096, 4095, "bf16")
    slower = seconds(odd, one_tile(128, 128), misaligned) / seconds(
        aligned, one_tile(128, 128), misaligned
    )
    assert slower == pytest.approx((16 / 2) ** 0.5, rel=0.01)


def test_nchw_moves_its_activations_once_more() -> None:
    nhwc = Conv.parse("32,64,56,56,64,1,1,1,0,1,1,bf16,nhwc")
    x, _, y = nhwc.operand_elements
    plain = replace(nhwc, layout="nchw", dtype="fp32")  # FMAs need no change of layout
    shapes = Shapes.from_problems([nhwc, replace(nhwc, layout="nchw"), plain])
    assert shapes.helper_bytes.tolist() == [0, 2 * 2 * (x + y), 0]
    assert shapes.helper_kernels.tolist() == [0, 2, 0]
    # The changes of layout add to the time of the GEMM, whatever limits the GEMM.
    bandwidth = H100.bandwidth
    free, moved = (seconds(p, one_tile(128, 128)) for p in (nhwc, replace(nhwc, layout="nchw")))
    assert moved - free == pytest.approx(4 * (x + y) / bandwidth, rel=1e-6)


def test_winograd_multiplies_less_and_moves_more() -> None:
    conv = Conv.parse("32,256,28,28,256,3,3,1,1,1,1,fp32,nchw")
    direct, two, four = (Shapes.from_problems([conv], algorithm=name) for name in ALGORITHMS)
    products = [float((s.batch * s.m * s.n * s.k)[0]) for s in (direct, two, four)]
    assert products[0] / products[1] == pytest.approx(9 / 4)  # 28 is a multiple of 2 and of 4
    assert products[0] / products[2] == pytest.approx(9 * 16 / 36)
    assert direct.helper_kernels[0] < two.helper_kernels[0] < four.helper_kernels[0]
    assert direct.helper_bytes[0] < two.helper_bytes[0] < four.helper_bytes[0]
    # Every transformed input, filter and result is written by one kernel and read by another one.
    x, filters, y = conv.operand_elements
    assert four.helper_bytes[0] == four.bytes[0] + 4 * (x + filters + y)
    # The gradient of the input is the same GEMM with the channels exchanged.
    narrow = replace(conv, kout=64)
    forward = Shapes.from_problems([narrow], algorithm="winograd-4x4")
    backward = Shapes.from_problems([replace(narrow, pass_="dgrad")], algorithm="winograd-4x4")
    assert (forward.n[0], forward.k[0]) == (backward.k[0], backward.n[0])


@pytest.mark.parametrize(
    "change",
    [{"r": 1, "s": 1}, {"stride": (2, 2)}, {"dilation": (2, 2)}, {"groups": 2}, {"pass_": "wgrad"}],
)
def test_where_winograd_cannot_be_used_the_implied_gemm_is(change: dict[str, Any]) -> None:
    conv = replace(Conv.parse("32,64,28,28,64,3,3,1,1,1,1,fp32,nchw"), **change)
    assert conv.winograd_gemm(4) is None
    direct, wino = (
        Shapes.from_problems([conv]),
        Shapes.from_problems([conv], algorithm="winograd-4x4"),
    )
    assert (direct.m[0], direct.batch[0]) == (wino.m[0], wino.batch[0])


def test_strided_dgrad_counts_only_useful_products() -> None:
    conv = Conv.parse("32,64,56,56,64,3,3,2,1,1,1,bf16,nhwc,dgrad")
    shapes = Shapes.from_problems([conv])
    assert float(shapes.density[0]) == pytest.approx(0.25, rel=0.05)


@given(sizes, sizes, sizes, st.sampled_from(["bf16", "fp32"]))
def test_no_time_beats_the_roofline_and_fastest_beats_every_candidate(
    m: int, n: int, k: int, dtype: str
) -> None:
    gemm = Gemm(m, n, k, dtype)
    shapes = Shapes.from_problems([gemm])
    tiles = Tiles.library(H100, dtype)
    constants = default_constants("hopper", dtype)
    peak = H100.peak(dtype)
    best = float(fastest(shapes, tiles, H100, peak, constants).time[0])
    assert best >= gemm.flops / peak
    assert best >= gemm.bytes / H100.bandwidth
    assert best > constants.launch
    for i in range(len(tiles.bm)):
        tile = Tiles(tiles.bm[i : i + 1], tiles.bn[i : i + 1], tiles.split[i : i + 1])
        assert best <= float(estimate(shapes, tile, H100, peak, constants).time[0]) * (1 + 1e-9)


@given(sizes, sizes, sizes)
def test_parts_are_consistent(m: int, n: int, k: int) -> None:
    e = fastest(
        Shapes.from_problems([Gemm(m, n, k, "bf16")]), Tiles.library(H100, "bf16"), H100, PEAK,
        default_constants("hopper", "bf16"),
    )  # fmt: skip
    parts = [float(getattr(e, name)[0]) for name in LIMITS]
    assert LIMITS[int(e.limit[0])] == LIMITS[int(np.argmax(parts))]
    assert max(parts) <= float(e.time[0]) * (1 + 1e-9)
    assert 0 < float(e.tail_efficiency[0]) <= 1
    assert 0 < float(e.tile_efficiency[0]) <= 1
    assert float(e.waves[0]) == np.ceil(e.tiles[0] / H100.sms)


def test_a_batch_of_predictions_is_the_same_as_one_at_a_time() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9000, (2500, 3)).tolist()
    problems = [Gemm(m, n, k, "bf16") for m, n, k in sizes]
    constants = default_constants("hopper", "bf16")
    tiles = Tiles.library(H100, "bf16")
    together = fastest(Shapes.from_problems(problems), tiles, H100, PEAK, constants).time
    for i in (0, 1023, 1024, 2499):
        alone = fastest(Shapes.from_problems([problems[i]]), tiles, H100, PEAK, constants).time
        assert float(together[i]) == float(alone[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_known_generation_has_constants_within_their_bounds(dtype: str) -> None:
    for generation in {m.generation for m in known_machines().values()} | {"cpu"}:
        constants = default_constants(generation, dtype).to_json()
        assert set(constants) == set(BOUNDS)
        for name, value in constants.items():
            assert BOUNDS[name][0] <= value <= BOUNDS[name][1], (generation, name)


def test_splitting_k_helps_few_tiles_and_a_long_sum() -> None:
    e = fastest(
        Shapes.from_problems([Gemm(64, 64, 65536, "bf16"), Gemm(8192, 8192, 64, "bf16")]),
        Tiles.library(H100, "bf16"), H100, PEAK, default_constants("hopper", "bf16"),
    )  # fmt: skip
    assert float(e.split[0]) > 1
    assert float(e.split[1]) == 1


def misaligned_price(generation: str, gemm: Gemm) -> float:
    """Return a GEMM's time relative to the time with N rounded up to a multiple of 8."""
    machine = known_machine({"hopper": "nvidia-h100-sxm", "blackwell": "nvidia-b200",
                             "ampere": "nvidia-a100-sxm-80gb"}[generation])  # fmt: skip
    aligned = replace(gemm, n=-(-gemm.n // 8) * 8)
    shapes = Shapes.from_problems([gemm, aligned], [True] * 2, [False] * 2)
    peak, c = machine.peak("bf16"), default_constants(generation, "bf16")
    one, other = fastest(shapes, Tiles.library(machine, "bf16"), machine, peak, c).time
    return float(one / other)


def test_rows_that_bulk_copies_cannot_load_cost_more_on_later_generations() -> None:
    narrow = Gemm(128, 4, 4096, "bf16")
    prices = [misaligned_price(g, narrow) for g in ("ampere", "hopper", "blackwell")]
    assert prices == sorted(prices)
    assert prices[0] < 1.1
    assert prices[2] > 2
    # For a matrix-vector multiplication, only the rows of the operands count, not those of C.
    assert misaligned_price("blackwell", Gemm(4096, 1, 4096, "bf16")) < 1.1
    assert misaligned_price("blackwell", Gemm(1, 4092, 4096, "bf16")) < 1.1
    assert priced_alignment(Gemm(1, 4096, 4095, "bf16")) == 2


def test_kernels_for_misaligned_rows_may_not_split_k() -> None:
    few = Gemm(64, 60, 65536, "bf16")
    shapes = Shapes.from_problems([few, replace(few, n=64)], [False] * 2, [False] * 2)
    c = default_constants("hopper", "bf16")
    tiles = Tiles.library(H100, "bf16")
    splits = [
        fastest(shapes, tiles, H100, PEAK, replace(c, fallback_split=on)).split for on in (1.0, 0.0)
    ]
    assert (splits[0] > 1).all()
    assert splits[1][0] == 1 < splits[1][1]


def padded(spec: str) -> Shapes:
    return Shapes.from_problems([Conv.parse(spec)], on_gpu_library=True)


def test_misaligned_channels_are_padded_by_a_helper_kernel() -> None:
    odd, even = (f"2,{c},8,8,{c},3,3,1,1,1,1,bf16,nhwc" for c in (63, 64))
    row, aligned = padded(odd), padded(even)
    assert (row.m, row.n, row.k) == (aligned.m, aligned.n, aligned.k)
    assert row.alignment == aligned.alignment == WIDE_BYTES
    assert [*row.helper_kernels, *aligned.helper_kernels] == [1, 0]
    # The activations are read with 63 channels and written with 64.
    assert row.helper_bytes == 12 * 2 * 8 * 8 * (63 + 64)
    assert aligned.helper_bytes == 0
    # A data gradient reads the gradient of the output, whose channels are aligned here.
    (bytes_,) = padded("2,63,8,8,128,3,3,1,1,1,1,bf16,nhwc,dgrad").helper_bytes
    assert bytes_ == 12 * 2 * 8 * 8 * (128 + 128)


@pytest.mark.parametrize("changed", ["fp32,nhwc", "bf16,nchw"])
def test_only_tensor_core_kernels_for_nhwc_pad_channels(changed: str) -> None:
    conv = Conv.parse(f"2,63,8,8,63,3,3,1,1,1,1,{changed}")
    for problem in (conv, Gemm(64, 63, 64, "bf16"), replace(conv, dtype="bf16", groups=63)):
        one, other = (Shapes.from_problems([problem], on_gpu_library=on) for on in (True, False))
        assert [one.k, one.alignment, one.helper_bytes] == [
            other.k, other.alignment, other.helper_bytes,
        ]  # fmt: skip


def test_cublas_has_kernels_for_rows_of_four_bytes_but_not_of_eight() -> None:
    problems = [Gemm(512, n, 512, "bf16") for n in (513, 514, 516, 520)]
    for on_gpu_library, alignment in ((True, [2, 4, 4, 16]), (False, [2, 4, 8, 16])):
        shapes = Shapes.from_problems(problems, on_gpu_library=on_gpu_library)
        assert shapes.alignment.tolist() == alignment


def test_hand_written_kernels_do_not_pay_for_the_librarys_fallback() -> None:
    library, ours = (default_constants("hopper", "bf16", hand) for hand in (False, True))
    assert library.misalignment > ours.misalignment
    assert replace(library, misalignment=ours.misalignment) == ours
    assert default_constants("hopper", "fp32", True) == default_constants("hopper", "fp32")
