"""Pairings find the right pairs among a handful of cases, with the right work and words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis.rules.pairing import (
    PAIRINGS,
    Match,
    TimedCase,
    doubled,
    edge,
    intensity,
    padded,
    pairs_of,
    ridge,
    rounded,
    separable,
    switch,
    threshold,
)
from kernels.operation import Layer, Lstm, Series, Workload
from kernels.problem import Conv, Gemm, linear
from tests.support.synthetic import H100


def case(
    workload: Workload, config: str = "", seconds: float = 1e-5, by: str = "cublas"
) -> TimedCase:
    return TimedCase(workload, by, config, "cold", "made-up", seconds, 0.01)


def gemms(*sizes: tuple[int, int, int], dtype: str = "bf16") -> list[TimedCase]:
    return [case(Gemm(m, n, k, dtype)) for m, n, k in sizes]


def named(cases: Sequence[TimedCase], matches: Sequence[Match]) -> set[tuple[str, str]]:
    return {(str(cases[m.against].workload), str(cases[m.following].workload)) for m in matches}


def test_a_switch_changes_only_one_thing() -> None:
    series = Series("projections", 3, 64, 128, 128, "bf16")
    other = Series("projections", 4, 64, 128, 128, "bf16")
    cases = [case(series), case(series, "fused=on"), case(other)]
    (match,) = switch(cases, H100, "config", "", ["fused=on"])
    assert (match.against, match.following, match.work) == (0, 1, 1.0)


def test_nothing_is_predicted_between_cases_that_the_model_cannot_tell_apart() -> None:
    series = Series("timesteps", 3, 64, 128, 128, "bf16")
    cases = [case(series, config) for config in ("", "fused=on", "paced=on", "graph=on")]
    matches = [
        *switch(cases, H100, "config", "", ["fused=on"]),
        *switch(cases, H100, "config", "paced=on", ["graph=on"]),
    ]
    pairs = pairs_of(cases, matches, ["dtype"], np.array([3.0, 1.0, 3.1, 3.0]))
    assert math.exp(pairs.log_predicted[0]) == pytest.approx(3.0)
    assert math.isnan(pairs.log_predicted[1])


def test_another_dtype_may_use_another_library() -> None:
    cases = [case(Gemm(8, 8, 8, "fp32"), by="mkl"), case(Gemm(8, 8, 8, "bf16"), by="onednn")]
    (match,) = switch(cases, H100, "dtype", "fp32", ["bf16"])
    assert match.words == {"value": "bf16"}


def test_a_separable_convolution_is_compared_with_the_dense_one() -> None:
    shapes = ("3,3,1,1,1,64", "3,3,1,1,1,1", "1,1,1,0,1,1", "3,3,1,1,1,4")
    cases = [
        case(Conv.parse(f"8,64,14,14,64,{shape},bf16"), seconds=seconds)
        for shape, seconds in zip(shapes, (2e-5, 4e-5, 1e-5, 9e-5), strict=True)
    ]
    (match,) = separable(cases, H100)
    assert (match.against, match.plus, match.following) == (0, 2, 1)
    pairs = pairs_of(cases, [match], ["dtype"], np.array([1.0, 2.0, 3.0, 4.0]))
    flops = [c.workload.flops for c in cases]
    speeds = (flops[0] + flops[2]) / 3e-5, flops[1] / 4e-5
    assert math.exp(pairs.log_ratio[0]) == pytest.approx(speeds[1] / speeds[0])
    assert math.exp(pairs.log_predicted[0]) == pytest.approx(4 / 2 * match.work)
    assert pairs.error[pairs.against[0]] == pytest.approx(math.hypot(2, 1) / 3 * 0.01)


def test_a_separable_convolution_has_the_window_and_image_of_the_dense_one() -> None:
    shapes = ("3,3,1,1,1,64", "1,1,1,0,1,1", "5,5,1,2,1,1", "3,3,1,1,1,1", "3,3,2,1,1,64")
    cases = [case(Conv.parse(f"8,64,14,14,64,{shape},bf16")) for shape in shapes]
    (match,) = separable([*cases, case(Conv.parse("8,64,14,14,64,3,3,2,1,1,1,bf16"))], H100)
    assert (match.against, match.plus, match.following) == (0, 1, 3)
    assert not list(separable([*cases[:3], cases[4]], H100))


def test_a_pointwise_convolution_must_read_all_channels_of_the_depthwise_one() -> None:
    shapes = ("3,3,1,1,1,64", "1,1,1,0,1,1", "3,3,1,1,1,1")
    cases = [case(Conv.parse(f"8,64,14,14,128,{shape},bf16")) for shape in shapes]
    assert not list(separable(cases, H100))  # the depthwise output has 128 channels, not 64


def test_a_dtype_that_the_datasheet_lacks_has_no_pairs() -> None:
    machine = replace(H100, peaks={"fp32": H100.peak("fp32")})
    cases = gemms((1, 4096, 1024), (512, 4096, 1024))
    cases.append(case(Layer("relu", 64, 1024, 1, 1, "bf16")))
    assert not list(intensity(cases, machine))
    assert not list(ridge(cases, machine))


def test_times_of_two_gpus_are_not_paired() -> None:
    one, other = gemms((1024, 1024, 1024), (1028, 1024, 1024))
    assert list(rounded([one, other], H100, ["m"], 8))
    assert not list(rounded([one, replace(other, gpu=1)], H100, ["m"], 8))
    faster = replace(one, config="fused=on", gpu=1)
    assert not list(switch([one, faster], H100, "config", "", ["fused=on"]))


def test_a_size_next_to_a_round_one_is_paired_on_both_sides() -> None:
    cases = gemms((1024, 1024, 1024), (1028, 1024, 1024), (1032, 1024, 1024), (1028, 512, 1024))
    found = list(rounded(cases, H100, ["m", "n", "k"], 8))
    assert {(m.against, m.following) for m in found} == {(1, 0), (1, 2)}
    assert {m.words["dim"] for m in found} == {"m"}
    assert {round(m.work, 6) for m in found} == {round(1024 / 1028, 6), round(1032 / 1028, 6)}


def test_a_padded_size_must_do_all_the_work() -> None:
    cases = gemms((1000, 1000, 64), (1001, 1001, 64), (1008, 1008, 64))
    found = list(rounded(cases, H100, ["m+n"], 8, whole=True))
    assert [(m.against, m.following, m.work) for m in found] == [(1, 2, 1.0)]


def test_tf32_is_round_in_multiples_of_four() -> None:
    cases = gemms((1024, 8, 8), (1028, 8, 8), (1030, 8, 8), (1032, 8, 8), dtype="tf32")
    found = rounded(cases, H100, ["m"], 8, units={"tf32": 4})
    assert {m.against for m in found} == {2}


def test_the_round_sizes_of_an_lstm() -> None:
    cases = [case(Lstm(8, 16, hidden, 32, "bf16")) for hidden in (127, 128)]
    (match,) = rounded(cases, H100, ["minibatch", "hidden", "features"], 8)
    assert match.words["dim"] == "hidden"


def test_named_sizes_are_padded() -> None:
    cases = gemms((8, 50257, 768), (8, 50304, 768), (16, 50304, 768))
    (match,) = padded(cases, H100, ["n"], {"50257": 50304})
    assert (match.against, match.following) == (0, 1)


def test_twice_the_size() -> None:
    cases = gemms((256, 256, 256), (512, 512, 512), (256, 256, 512))
    along_all = list(doubled(cases, H100, ["m+n+k"]))
    assert [(m.against, m.following, m.work) for m in along_all] == [(0, 1, 8.0)]
    along_k = list(doubled(cases, H100, ["k"]))
    assert [(m.against, m.following, m.work) for m in along_k] == [(0, 2, 2.0)]
    layers = [case(Layer("relu", n, 64, 1, 1, "bf16")) for n in (64, 128)]
    (match,) = doubled(layers, H100, ["n"], per="bytes")
    assert match.work == 2.0


def test_few_rows_against_enough() -> None:
    cases = gemms((16, 4096, 4096), (64, 4096, 4096), (128, 4096, 4096), (256, 4096, 4096))
    found = list(threshold(cases, H100, ["m"], 127, 128, claim=4.0))
    assert {(m.against, m.following) for m in found} == {(0, 2), (1, 2)}
    assert {m.claim for m in found} == {4.0}
    found = list(threshold(cases, H100, ["m"], 127, 128, least=64, dtypes=["bf16"]))
    assert {m.against for m in found} == {1}
    assert not list(threshold(cases, H100, ["m"], 127, 128, dtypes=["fp16"]))


def test_a_speed_up_is_compared_where_the_slow_dtype_was_measured() -> None:
    sizes = ((64, 4096, 4096), (1024, 4096, 4096), (64, 8192, 4096), (1024, 8192, 4096))
    fast, slow = gemms(*sizes), gemms(*sizes[:2], dtype="fp32")
    # In bf16, the first width is 3 times as fast as in fp32 at 64 rows, and 12 times at 1024.
    times = (2e-5, 4e-5, 1e-5, 1e-5, 6e-5, 4.8e-4)
    cases = [replace(c, seconds=t) for c, t in zip((*fast, *slow), times, strict=True)]
    (match,) = threshold(cases, H100, ["m"], 128, 1024, claim=4.0, over="fp32")
    assert (match.against, match.following, match.control) == (0, 1, (4, 5))
    assert (match.claim, match.words["of"]) == (4.0, "speed-up")
    pairs = pairs_of(cases, [match], ["dtype"], np.array(times) ** 2)
    assert math.exp(pairs.log_ratio[0]) == pytest.approx(12 / 3)
    assert math.exp(pairs.log_predicted[0]) == pytest.approx((12 / 3) ** 2)
    lonely = case(Gemm(1, 768, 3072, "fp32"))  # in the slow dtype, but not the shape of any pair
    for speeds in (cases[:4], [*cases[:4], lonely]):
        found = list(threshold(speeds, H100, ["m"], 128, 1024, claim=4.0, over="fp32"))
        assert [(m.against, m.following, m.work) for m in found] == [(0, 1, 16.0), (2, 3, 16.0)]
        assert {(m.control, m.words["of"]) for m in found} == {(None, "speed")}
        assert all(math.isnan(m.claim) for m in found)  # the claim is only about speed-ups


def test_edges_are_those_of_the_large_tile_and_nothing_far_past_them() -> None:
    # With tiles of 256 × 128, 16 · 8 = 128 tiles fit on 132 SMs at once, and 17 · 8 = 136 tiles
    # need a second wave.
    cases = gemms((4096, 1024, 4096), (4097, 1024, 4096), (4400, 1024, 4096))
    (wave,) = edge(cases, H100, "wave")
    assert (wave.against, wave.following, wave.claim) == (1, 0, 2.0)
    assert not list(edge(cases, H100, "tile"))
    small = gemms((256, 256, 1024), (257, 256, 1024))
    (tile,) = edge(small, H100, "tile")
    assert math.isnan(tile.claim)  # for more tiles in the same wave, no source claims a ratio
    assert not list(edge(small, H100, "wave"))


def test_an_edge_is_no_edge_if_rows_become_misaligned() -> None:
    """Along N, 1,025 is past a wave's edge, but its rows need slower kernels, too."""
    sizes = ((4096, 1024, 4096), (4096, 1025, 4096), (4096, 1032, 4096))
    assert not list(edge(gemms(*sizes[:2]), H100, "wave"))
    assert [m.claim for m in edge(gemms(sizes[0], sizes[2]), H100, "wave")] == [2.0]
    # Plain FMAs in fp32 have the same kernels at any alignment.
    assert len(list(edge(gemms(*sizes[:2], dtype="fp32"), H100, "wave"))) == 1


def test_intensity_promises_the_ratio_under_the_roofs() -> None:
    cases = gemms((1, 4096, 1024), (512, 4096, 1024), dtype="fp16")
    cases += [case(Layer("relu", n, 1024, 1, 1, "fp16")) for n in (64, 128)]
    found = {m.words["op"]: m for m in intensity(cases, H100)}
    assert set(found) == {"linear, batch 1", "relu"}
    assert found["relu"].against == 3  # the larger of the two
    roof = min(H100.peak("fp16"), cases[1].workload.intensity * H100.bandwidth)
    assert found["relu"].claim == pytest.approx(roof / (0.25 * H100.bandwidth))


def test_the_ridge_is_measured_over_the_datasheets() -> None:
    gemm, layer = Gemm(8192, 8192, 8192, "bf16"), Layer("relu", 65536, 4096, 1, 1, "bf16")
    at_the_roofs = [
        case(gemm, seconds=gemm.flops / H100.peak("bf16")),
        case(layer, seconds=layer.bytes / H100.bandwidth),
    ]
    (match,) = ridge(at_the_roofs, H100)
    assert match.words == {"dtype": "bf16"}  # the dtype of the GEMM
    pairs = pairs_of(at_the_roofs, [match], ["dtype"], np.ones(2))
    assert math.exp(pairs.log_ratio[0]) == pytest.approx(1.0)


def test_groups_are_named_by_words_and_facts() -> None:
    layer = linear(2041, 512, 512, "bf16")
    cases = [case(layer["dgrad"]), case(Gemm(2048, 512, 512, "bf16", "nn"))]
    matches = list(rounded(cases, H100, ["m"], 8))
    pairs = pairs_of(cases, matches, ["dtype", "pass", "dim"], np.array([2.0, 1.0]))
    assert pairs.group == ["bf16 dgrad m"]
    assert math.exp(pairs.log_predicted[0]) == pytest.approx(2 * 2048 / 2041)


def test_a_layout_of_no_pass_names_its_own_group() -> None:
    cases = [case(Gemm(m, 512, 512, "bf16", "tt")) for m in (2041, 2048)]
    matches = list(rounded(cases, H100, ["m"], 8))
    assert pairs_of(cases, matches, ["dtype", "pass"], np.ones(2)).group == ["bf16 tt"]


def test_every_pairing_takes_nothing_and_finds_nothing() -> None:
    options: dict[str, dict[str, Any]] = {
        "switch": {"axis": "dtype", "against": "fp32", "following": ["bf16"]},
        "rounded": {"dims": ["m"], "unit": 8},
        "padded": {"dims": ["n"], "to": {"3": 4}},
        "doubled": {"dims": ["m"]},
        "threshold": {"dims": ["m"], "small": 1, "large": 2},
        "edge": {"kind": "wave"},
    }
    for name, pairing in PAIRINGS.items():
        assert not list(pairing([], H100, **options.get(name, {})))
