"""Check that the headlines of a recording have a number, its interval and enough cases."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.advice.headlines import (
    Headline,
    _multiples_clause,
    alignment,
    changes,
    headlines,
    layout,
    peak,
    size,
)
from analysis.advice.recommend import Advice
from analysis.advice.table import build_table
from analysis.model.fitted import Analysis, analyse
from analysis.recordings.load import load
from kernels.problem import Conv, Gemm
from sweeps.cases.case import Case
from tests.support.synthetic import model_law, problems, record

SIZES = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)


def conv(layout: str, c: int) -> Case:
    return Case("conv-layouts", Conv.parse(f"8,{c},28,28,64,3,3,1,1,1,1,fp32,{layout}"), "onednn")


def analysed(folder: Path, cases: list[Case], seconds: np.ndarray) -> Analysis:
    return analyse(load(record(folder / "nvidia-h100-sxm", cases, list(seconds))))


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """An N that is not a multiple of four is 10% slower, and NHWC is 1.25 times as fast as NCHW."""
    cases = [Case("square", Gemm(n, n, n, "fp32"), "cublas") for n in SIZES]
    at = [*((512 + i, 512, 512) for i in range(17)), *((512, 512 + i, 512) for i in range(1, 17)),
          *((512, 512, 512 + i) for i in range(1, 17))]  # fmt: skip
    cases += [Case("alignment", Gemm(*mnk, "fp32"), "cublas") for mnk in at]
    cases += [conv(layout, c) for layout in ("nchw", "nhwc") for c in range(16, 16 * 13, 16)]
    seconds = model_law()(problems(cases))
    for i, case in enumerate(cases):
        problem = case.problem
        if isinstance(problem, Conv):
            first = Conv.parse(problem.spec().replace("nhwc", "nchw"))
            (seconds[i],) = model_law()([first])
            seconds[i] /= 1.25 if problem.layout == "nhwc" else 1.0
        elif isinstance(problem, Gemm) and case.sweep == "alignment":
            seconds[i] = 1e-3 * problem.flops / Gemm(512, 512, 512, "fp32").flops
            seconds[i] /= 0.9 if problem.n % 4 else 1.0
    return analysed(tmp_path_factory.mktemp("results"), cases, seconds)


@pytest.mark.parametrize(("drift", "words"), [(0.02, "2.0% slower"), (-0.015, "1.5% faster")])
def test_drift_is_a_change_of_speed(analysis: Analysis, drift: float, words: str) -> None:
    """The canary GEMM's time grows by the drift, so the machine becomes slower."""
    run = {**analysis.recording.run, "canary": {"certain": True, "drift": drift}}
    drifting = replace(analysis, recording=replace(analysis.recording, run=run))
    (headline,) = (one for one in headlines(drifting, []) if one.id == "accuracy")
    assert headline.text.endswith(f". The machine became {words} during the run.")


def test_what_is_left_of_a_burst_is_said_and_at_most_eight_sentences(analysis: Analysis) -> None:
    assert "steady" not in {one.id for one in headlines(analysis, [])}
    entry = {"gpu": 0, "problem": "8192×8192×8192 bf16 nt", "tflops": 640.0, "lo": 0.84, "hi": 0.88,
             "sm_mhz": 1395.0, "power_w": 695.0, "energy_j": 1.19}  # fmt: skip
    run = {**analysis.recording.run, "steady": [{**entry, "share": s} for s in (0.9, 0.5, 0.86)]}
    held = replace(analysis, recording=replace(analysis.recording, run=run))
    found = headlines(held, build_table(held))
    assert found[1].text == (
        "Sustained runs of 8192×8192×8192 bf16 nt settle at 640 TFLOP/s, 86% (84–88%) of burst "
        "speed. At this speed, the sensors show 1,395 MHz, 695 W and 1.19 J per GEMM. Times are "
        "burst times unless their mode is sustained."
    )
    assert found[1].count == 3
    assert len(found) <= 8


def test_a_planted_misalignment_is_found_and_which_multiple_is_enough(analysis: Analysis) -> None:
    found = alignment(analysis.table)
    assert found is not None
    # Two of the 14 sizes along N are multiples of four.
    assert found.value == pytest.approx(0.9 ** (12 / 14), rel=0.01)
    assert found.lo < found.value < found.hi < 1
    assert ". The mean is 100% along K and " in found.text
    assert ". On average along N, " in found.text
    assert found.text.endswith("multiples of 4 are less than 2% slower than multiples of 16.")
    assert found.count == 14


@pytest.mark.parametrize(
    ("slow_offsets", "words"),
    [
        ((8,), "multiples of 8 are more than 2% slower than multiples of 16"),
        ((4, 12), "multiples of 8 are less than 2% slower than multiples of 16"),
        ((), "alignment hardly matters"),
    ],
)
def test_the_multiples_clause_is_one_that_is_fast(
    slow_offsets: tuple[int, ...], words: str
) -> None:
    offsets = range(0, 17, 4)
    speeds = [0.5 if offset in slow_offsets else 1.0 for offset in offsets]
    assert _multiples_clause(pd.DataFrame({"offset": offsets, "relative": speeds})) == words


def test_a_planted_layout_is_found(analysis: Analysis) -> None:
    found = layout(analysis.table)
    assert found is not None
    assert found.value == pytest.approx(1.25, rel=0.01)
    assert found.lo <= 1.25 <= found.hi
    assert found.count == 12


def test_the_size_from_which_on_it_is_fast(analysis: Analysis) -> None:
    found = size(analysis.table)
    rows = analysis.table[analysis.table["sweep"] == "square"].set_index("m")["tflops"]
    assert found is not None
    assert (rows[rows.index >= found.value] >= 0.9 * rows.max()).all()
    assert rows[rows.index < found.value].iloc[-1] < 0.9 * rows.max()
    assert found.lo <= found.value <= found.hi


def test_if_the_largest_size_is_slow_larger_ones_may_be_fast(analysis: Analysis) -> None:
    table = analysis.table.copy()
    speeds = ["tflops", "time_us", "time_lo_us", "time_hi_us"]
    slow = (table["sweep"] == "square") & (table["m"] == max(SIZES))
    slow_text = "The largest square GEMM in fp32 (M = 1024) is below 90% of the best speed."
    table.loc[slow, speeds] *= [0.5, 2, 2, 2]
    found = size(table)
    assert found is not None
    assert found.text == slow_text
    # A time whose interval reaches from half to twice the measured one may be fast.
    table.loc[slow, "time_lo_us"] /= 4
    found = size(table)
    assert found is not None
    assert found.text == slow_text.replace("speed.", "speed, but not significantly.")
    table.loc[slow, speeds] = analysis.table.loc[slow, speeds] * [1, 1, 1, 4]
    found = size(table)
    assert found is not None
    assert " or more) in fp32" in found.text


@pytest.mark.parametrize("count", [1, 7])
def test_a_few_pairs_say_nothing(analysis: Analysis, count: int) -> None:
    """A report once drew a conclusion from one pair of convolutions."""
    table = analysis.table
    pairs = table[table["sweep"] == "conv-layouts"]
    some = pairs[pairs["c"].isin(sorted(pairs["c"].unique())[:count])]
    assert layout(some) is None
    assert alignment(table[table["sweep"] == "alignment"].head(8)) is None
    assert size(table[(table["sweep"] == "square") & (table["m"] < 512)]) is None


def test_nothing_is_above_its_ceiling(analysis: Analysis) -> None:
    slow = replace(analysis.recording.machine, peaks={"fp32": 1e12})
    found = peak(replace(analysis, recording=replace(analysis.recording, machine=slow)))
    assert found is not None
    assert "100% of the peak" in found.text


def test_a_raised_ceiling_is_said_to_be(analysis: Analysis) -> None:
    raised = {"fp32": {"case": "512×512×512 fp32 nt", "from": 30e12}}
    run = {**analysis.recording.run, "ceilings": {"raised": raised}}
    found = peak(replace(analysis, recording=replace(analysis.recording, run=run)))
    assert found is not None
    assert "was raised from the measured 30 TFLOP/s, because 512×512×512 fp32 nt was" in found.text


def test_they_are_sentences_with_an_interval(analysis: Analysis) -> None:
    found = headlines(analysis, build_table(analysis))
    assert [f.id for f in found][:5] == ["peak", "alignment", "layout", "size", "accuracy"]
    assert len(found) <= 8
    assert all(f.text.endswith(".") and f.lo <= f.value <= f.hi for f in found)


def test_each_reported_change_is_of_another_shape_and_kind() -> None:
    padded = Advice(
        problem=Gemm(4096, 4095, 4096, "fp32"),
        instead=Gemm(4096, 4096, 4096, "fp32"),
        question="pad",
        verdict="likely",
        evidence="predicted",
        implementation="library",
        predicted_gain=0.2,
        predicted_lo=0.1,
        predicted_hi=0.3,
        measured_gain=None,
        measured_lo=None,
        measured_hi=None,
        extra_flops=0.0,
        extra_bytes=0.0,
        reason="alignment",
    )
    chosen = replace(
        padded,
        instead=Gemm(4096, 4224, 4096, "fp32"),
        question="choose",
        predicted_lo=0.11,
    )
    same_kind = replace(
        padded, problem=Gemm(4096, 2047, 4096, "fp32"), instead=Gemm(4096, 2048, 4096, "fp32")
    )
    other = replace(padded, problem=Gemm(64, 64, 30, "fp32"), instead=Gemm(64, 64, 32, "fp32"))
    first, second = changes([padded, chosen, same_kind, other])
    assert "4095 → 4224 gains 20% per FLOP" in first.text
    assert "K 30 → 32" in second.text


def test_an_unusable_run_says_nothing(analysis: Analysis) -> None:
    run = {**analysis.recording.run, "health": {"verdict": "unusable", "reasons": ["of it"]}}
    unusable = replace(analysis, recording=replace(analysis.recording, run=run))
    assert headlines(unusable, build_table(unusable)) == []
    assert unusable.recording.caption().endswith("unusable run: no conclusions possible")


def test_a_time_without_an_interval_is_null_in_a_file() -> None:
    told = Headline("peak", "Fast.", 1.0, math.nan, math.nan, 8).to_json()
    assert told["lo"] is None
    assert told["value"] == 1.0
    assert pd.notna(told["value"])
