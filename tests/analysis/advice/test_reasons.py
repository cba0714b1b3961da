"""Check that the points of a reason add up to the gain, and that it names the model's causes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.advice.options import Question
from analysis.advice.reasons import why, why_not
from kernels.problem import Conv, Gemm
from kernels.timemodel.estimate import LIMITS as ALL_LIMITS

PROBLEM = Gemm(1281, 768, 10240, "bf16")
OPTION = Gemm(1280, 768, 10240, "bf16")


def row(**more: Any) -> dict[str, Any]:
    plain = {
        "limit": "compute", "tile": "128x256", "split": 1, "waves": 2, "tile_efficiency": 0.8,
        "tail_efficiency": 0.5, "bytes": 1e6,
    }  # fmt: skip
    return {**plain, **more}


def points(reason: str) -> list[int]:
    return [int(number) for number in re.findall(r"(\d+) points? from", reason)]


def test_tiles_and_waves_explain_what_they_do_and_another_kernel_the_rest() -> None:
    after = row(tile="160x192", tile_efficiency=1.0, tail_efficiency=0.75, waves=1)
    reason = why(PROBLEM, OPTION, row(), after, gain=1.25 * 1.5 * 1.2 - 1, measured=True)
    assert "fuller tiles (80% → 100% of their area)" in reason
    assert "fuller waves (50% → 75% of their slots)" in reason
    assert "another kernel (128x256 → 160x192)" in reason
    assert sum(points(reason)) == pytest.approx(125, abs=2)


@pytest.mark.parametrize(("dtype", "is_timed"), [("bf16", True), ("fp8", False)])
def test_an_uncertain_shape_is_only_to_be_measured_if_it_can_be(dtype: str, is_timed: bool) -> None:
    reason = why_not(Gemm(64, 64, 64, dtype), row(), Question("pad"), uncertain=True)
    assert reason.startswith("too little is known about nearby sizes to recommend one")
    assert ("--measure" in reason) == is_timed


def test_one_cause_needs_no_points() -> None:
    split = why(PROBLEM, OPTION, row(), row(split=4), gain=0.5)
    assert split == "because of another kernel (parts of K: 1 → 4)"
    unknown = why(PROBLEM, OPTION, row(), row(), gain=0.5, measured=True)
    assert unknown == "because of effects that the model does not include"
    similar = why(PROBLEM, OPTION, row(), row(), 0.5)
    assert similar == "because of a measured trend among similar shapes"


def test_alignment_is_named_with_the_size_that_lacks_it() -> None:
    odd = Gemm(4096, 4097, 4096, "bf16", "nn")
    reason = why(odd, Gemm(4096, 4104, 4096, "bf16", "nn"), row(), row(), gain=0.6)
    assert reason == "because of alignment (N is not a multiple of 8)"
    # In the layout nt, the rows of A and B have K elements, and the rows of C have N.
    linear = why(Gemm(101, 101, 64, "bf16"), Gemm(96, 112, 64, "bf16"), row(), row(), gain=0.6)
    assert linear.startswith(
        "67 points from alignment and the change in M (N is not a multiple of 8), minus "
    )
    both = Gemm(4090, 4090, 4096, "bf16")
    one = why(both, Gemm(4090, 4096, 4096, "bf16"), row(), row(), gain=0.1, choose=True)
    assert "(N is not" in one or "alignment" not in one
    assumed = why(odd, Gemm(4096, 4104, 4096, "bf16", "nn"), row(), row(), 0.6, assumed=True)
    assert "the price of misalignment is assumed" in assumed


def test_channels_of_a_group_are_named_if_they_are_misaligned() -> None:
    grouped = Conv.parse("32,120,28,28,128,3,3,1,1,1,2,bf16")
    reason = why(grouped, replace(grouped, c=128), row(), row(), gain=0.6)
    assert "alignment (C is not a multiple of 16)" in reason


def test_where_memory_binds_bytes_explain_and_tiles_do_not() -> None:
    before = row(limit="memory", tile_efficiency=0.5, bytes=2e6)
    reason = why(PROBLEM, OPTION, before, row(limit="memory", bytes=1e6), gain=1.0)
    assert reason == "because of fewer bytes"


def test_padding_within_a_tile_fills_it_and_saves_nothing() -> None:
    wider = Gemm(1408, 768, 10240, "bf16")
    before, after = row(tile_efficiency=1281 / 1408), row(tile_efficiency=1.0)
    reason = why(PROBLEM, wider, before, after, gain=0.05, measured=True)
    assert reason == "because of effects that the model does not include"
    per_flop = why(PROBLEM, wider, before, after, gain=1408 / 1281 - 1, choose=True)
    assert per_flop == "because of fuller tiles (91% → 100% of their area)"


def test_more_work_for_the_same_bytes_is_a_gain_per_flop() -> None:
    few, more = Gemm(50, 5000, 5000, "bf16"), Gemm(56, 5000, 5000, "bf16")
    limit = row(limit="memory")
    assert why(few, more, limit, limit, gain=0.12, choose=True) == "because of fewer bytes per FLOP"


def test_what_costs_is_named_so_that_points_add_up() -> None:
    after = row(tile_efficiency=0.96, tail_efficiency=0.4)
    reason = why(PROBLEM, OPTION, row(), after, gain=0.2, choose=True, measured=True)
    assert "from emptier waves (50% → 40% of their slots)" in reason
    less = [int(number) for number in re.findall(r"minus (\d+) from", reason)]
    assert sum(points(reason)) - sum(less) == pytest.approx(20, abs=2)


def test_a_cost_is_not_called_by_the_name_of_a_gain() -> None:
    wider = Gemm(1408, 768, 10240, "bf16")
    limit = row(limit="memory")
    bytes_too = why(PROBLEM, wider, limit, row(limit="memory", bytes=1.1e6), 0.2, measured=True)
    assert bytes_too.endswith("from more bytes")
    flops_too = why(PROBLEM, wider, row(), row(tile_efficiency=0.82), 0.2, measured=True)
    assert flops_too.endswith("from more FLOPs")
    odd, even = Gemm(4096, 4097, 4096, "bf16"), Gemm(4096, 4104, 4096, "bf16")
    full = row(tile_efficiency=1.0)
    assert "from alignment" not in why(odd, even, row(tile_efficiency=0.5), full, gain=0.2)


LIMITS = st.sampled_from(ALL_LIMITS)
SHARES = st.floats(0.01, 1.0)


@given(
    st.tuples(LIMITS, SHARES, SHARES), st.tuples(LIMITS, SHARES, SHARES),
    st.floats(0.01, 20.0), st.booleans(), st.booleans(), st.sampled_from(["gpu", "cpu"]),
)  # fmt: skip
def test_any_gain_has_a_reason_that_says_no_more_than_the_gain(
    one: tuple[str, float, float], other: tuple[str, float, float], gain: float, choose: bool,
    measured: bool, kind: str,
) -> None:  # fmt: skip
    names = ("limit", "tile_efficiency", "tail_efficiency")
    before, after = (row(**dict(zip(names, values, strict=True))) for values in (one, other))
    reason = why(PROBLEM, OPTION, before, after, gain, choose, False, measured, kind)
    assert reason
    assert "nan" not in reason
    less = [int(number) for number in re.findall(r"minus (\d+) from", reason)]
    # At most three parts are not named, each of them less than a tenth of the gain.
    if points(reason):
        assert sum(points(reason)) - sum(less) <= 100 * gain * 1.3 + 3
