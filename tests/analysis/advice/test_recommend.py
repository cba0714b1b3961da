from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.advice.measurements import Measurements, read_measurements
from analysis.advice.options import Question, options_of
from analysis.advice.recommend import _error, advise, advise_all
from analysis.advice.sizes import SizeConstraints
from analysis.advice.table import build_table, recommendations_markdown, write_table
from analysis.advice.verdict import LEAVE_IT, LIKELY, MIN_GAIN
from analysis.model.fit import UNCALIBRATED_PAIR, Fit
from analysis.model.fitted import analyse
from analysis.model.predict import Model
from analysis.recordings.load import load
from analysis.recordings.repetition import MeasuredTime
from kernels.problem import Gemm, Problem
from kernels.timemodel.constants import default_constants
from sweeps.cases.case import Case
from tests.support.synthetic import H100, gemm_cases, model_law, problems, record

ODD = Gemm(1024, 1021, 1024, "bf16")
ANY = SizeConstraints(any_size=True)
ROUND = replace(ODD, n=1024)


def times(*pairs: tuple[Gemm, float], half_width: float = 0.01) -> Measurements:
    return Measurements(
        {
            gemm: {"cublas": MeasuredTime(t, t * (1 - half_width), t * (1 + half_width))}
            for gemm, t in pairs
        }
    )


def certain_model(pair_error: float = 0.05) -> Model:
    constants = replace(default_constants("hopper", "bf16"), misalignment=0.3, fallback=0.0)
    both = pair_error / math.sqrt(2)  # so that two predictions of spread 1 have this error
    fit = Fit(constants, pair_low=-both, pair_high=both, rows=100)
    return Model(H100, {"cublas gemm bf16": fit})


def test_a_measured_gain_is_claimed_with_its_interval_and_reason() -> None:
    answer = advise(ODD, certain_model(), times((ODD, 1.8e-5), (ROUND, 1.0e-5)), "cublas")
    # Without new samples of both shapes, the gain is not confirmed.
    assert (answer.verdict, answer.evidence, answer.instead) == (LIKELY, "measured", ROUND)
    assert answer.measured_gain == pytest.approx(0.8)
    assert answer.measured_lo == pytest.approx(1.8 * 0.99 / 1.01 - 1)
    assert answer.measured_hi == pytest.approx(1.8 * 1.01 / 0.99 - 1)
    assert answer.change == "N 1021 → 1024"
    assert answer.reason == "because of alignment (N is not a multiple of 8)"
    assert answer.extra_flops == pytest.approx(3 / 1021)


def test_no_gain_is_claimed_that_its_interval_does_not_support() -> None:
    barely = times((ODD, 1.015e-5), (ROUND, 1.0e-5), half_width=0.2)
    # No other size is measured or within the allowance.
    answer = advise(ODD, Model(H100), barely, "cublas", Question("pad", 0.005))
    assert answer.verdict == LEAVE_IT
    assert answer.instead == ODD
    assert answer.measured_gain is None


def test_without_measurements_a_good_bet_is_likely_and_a_bad_one_is_left() -> None:
    sure = advise(ODD, certain_model(0.05), Measurements({}), "cublas")
    assert (sure.verdict, sure.evidence) == (LIKELY, "predicted")
    assert sure.predicted_gain >= MIN_GAIN
    assert sure.predicted_lo < sure.predicted_gain < sure.predicted_hi
    assert sure.measured_gain is None
    unsure = advise(ODD, certain_model(2.0), Measurements({}), "cublas")
    assert unsure.verdict == LEAVE_IT
    # The reason must not contradict the verdict by naming a gain.
    assert "%" not in unsure.reason
    assert "too little is known" in unsure.reason


def test_a_padding_further_than_the_neighbours_is_less_certain() -> None:
    """No measured pair shows how large the error is for shapes that differ by more than 12.5%."""
    fit = Fit(default_constants("hopper", "bf16"), None, -0.3, 0.2, -0.01, 0.01, rows=100)
    sides = (0.6, 0.8)  # together as uncertain as one shape with a spread of 1
    assert fit.ratio_range(True, sides) == pytest.approx((-0.01, 0.01))
    wide = 0.5 / math.sqrt(2)
    assert fit.ratio_range(False, sides) == pytest.approx((-wide, wide))
    assert _error(ODD, replace(ODD, n=ODD.n * 9 // 8), fit, sides) == fit.ratio_range(True, sides)
    beyond = replace(ODD, n=ODD.n * 9 // 8 + 1)
    assert _error(ODD, beyond, fit, sides) == fit.ratio_range(False, sides)


def test_a_shape_far_from_every_measurement_is_less_certain() -> None:
    fit = Fit(default_constants("hopper", "bf16"), None, -0.3, 0.2, -0.01, 0.01, rows=100)
    assert fit.spread(math.exp(-0.3), math.exp(0.2)) == pytest.approx(1.0)
    assert fit.spread(math.exp(-0.03), math.exp(0.02)) == pytest.approx(0.1)
    assert fit.ratio_range(True, (0.1, 1.0))[1] > 7 * fit.ratio_range(True, (0.1, 0.1))[1]


def test_a_layout_that_was_not_measured_is_as_uncertain_as_a_machine_that_was_not() -> None:
    """The error is not that of two unlike shapes, because padded shapes share most of it."""
    fit = Fit(
        default_constants("hopper", "bf16"), None, -0.1, 0.1, -0.02, 0.05, rows=100, layout="nt"
    )
    like, unlike = (replace(ROUND, layout=layout) for layout in ("nt", "nn"))
    far = (7.0, 7.0)  # the spreads of a factor of two either way
    assert _error(like, replace(like, n=1088), fit, (0.6, 0.8)) == pytest.approx((-0.02, 0.05))
    assert _error(unlike, replace(unlike, n=1088), fit, far) == UNCALIBRATED_PAIR
    assert _error(unlike, replace(unlike, n=2048), fit, far) == fit.ratio_range(False, far)
    wide = replace(fit, pair_low=-0.4, pair_high=0.4)  # never more certain than measured layouts
    assert _error(unlike, replace(unlike, n=1088), wide, far) == wide.ratio_range(True, (1, 1))


def test_a_smaller_shape_is_as_uncertain_either_way() -> None:
    fit = Fit(default_constants("hopper", "bf16"), None, -0.3, 0.2, -0.02, 0.05, rows=100)
    one = (1.0, 0.0)
    assert _error(ROUND, replace(ROUND, n=960), fit, one) == (-0.05, 0.05)
    assert _error(ROUND, replace(ROUND, n=960, m=1088), fit, one) == (-0.05, 0.05)
    assert _error(ROUND, replace(ROUND, n=900), fit, one) == fit.ratio_range(False, one)


def test_the_gain_is_between_the_same_implementations() -> None:
    """The time of a padded shape by another implementation says nothing about padding."""
    slow = {"triton-tiled": MeasuredTime(2e-5, 1.9e-5, 2.1e-5)}
    both = {**slow, "cublas": MeasuredTime(1e-5, 0.99e-5, 1.01e-5)}
    # All four medians, two of this run and two of a second run, have about the same error.
    below = 2 * math.hypot(math.log(2 / 1.9), math.log(2.1 / 2)) / math.sqrt(2)
    assert Measurements({ODD: slow, ROUND: both}).ratio(ODD, ROUND) == pytest.approx(
        (1.0, math.exp(-below), math.exp(below))
    )
    only = {"cublas": MeasuredTime(1e-5, 0.99e-5, 1.01e-5)}
    assert Measurements({ODD: slow, ROUND: only}).ratio(ODD, ROUND) is None


def test_a_time_without_an_interval_stands_only_until_there_is_one(tmp_path: Path) -> None:
    problem = Gemm(512, 512, 512, "bf16")
    cases = [Case(sweep, problem, "cublas") for sweep in ("one", "two", "three")]
    recording = load(record(tmp_path, cases, [1e-5, 2e-5, 3e-5]))
    rows = recording.ok.copy()
    rows.loc[rows["sweep"] != "two", ["time_lo_us", "time_hi_us"]] = np.nan
    assert read_measurements(rows, recording).times_of(problem)["cublas"].time == pytest.approx(
        2e-5
    )


def test_another_config_does_not_replace_the_default(tmp_path: Path) -> None:
    problem = Gemm(512, 512, 512, "bf16")
    only_tuned = Gemm(512, 512, 1024, "bf16")
    cases = [
        Case("settings", problem, "cublas", "reduced=off"),
        Case("settings", problem, "cublas"),
        Case("settings", only_tuned, "cublas", "reduced=off"),
    ]
    recording = load(record(tmp_path, cases, [2e-5, 3e-5, 4e-5]))
    measured = read_measurements(recording.ok, recording)
    assert measured.times_of(problem)["cublas"].time == pytest.approx(3e-5)
    assert measured.times_of(only_tuned)["cublas"].time == pytest.approx(4e-5)


def test_operands_stored_otherwise_are_not_the_time_of_their_shape(tmp_path: Path) -> None:
    problem = Gemm(512, 513, 512, "bf16")
    odd = ("offset=1", "reduced=off;offset=1", "ld_multiple=64")
    cases = [Case("s", problem, "cublas"), *(Case("s", problem, "cublas", c) for c in odd)]
    cases.append(Case("s", problem, "cublas", cache="weights-cold"))
    recording = load(record(tmp_path, cases, [3e-5, 2e-5, 2e-5, 1e-5, 1e-5]))
    rows = recording.ok.copy()
    rows.loc[rows["config"] == "", ["time_lo_us", "time_hi_us"]] = np.nan  # the least certain
    assert read_measurements(rows, recording).times_of(problem)["cublas"].time == pytest.approx(
        3e-5
    )


@pytest.mark.parametrize(
    ("gemm", "words"),
    [
        (Gemm(1, 4096, 4096, "bf16"), "memory-bound: no larger size within the limits"),
        (Gemm(16, 16, 16, "bf16"), "launch-bound"),
        (
            Gemm(8192, 8192, 8192, "bf16"),
            "no larger size within the limits is expected to save enough time",
        ),
    ],
)
def test_leaving_it_has_a_reason_too(gemm: Gemm, words: str) -> None:
    answer = advise(gemm, certain_model(), Measurements({}), "cublas")
    assert answer.verdict == LEAVE_IT
    assert words in answer.reason


def test_the_allowance_holds_in_every_dimension() -> None:
    for allowance in (0.0, 0.002, 0.05, 0.125):
        answer = advise(Gemm(1001, 1003, 999, "bf16"), certain_model(), Measurements({}), "cublas",
                        Question("pad", allowance))  # fmt: skip
        for name in "mnk":
            own, padded = getattr(answer.problem, name), getattr(answer.instead, name)
            assert own <= padded <= own * (1 + allowance)
    none = Question("pad", 0.0)
    assert advise(ODD, certain_model(), Measurements({}), "cublas", none).verdict == LEAVE_IT


def test_padding_never_changes_dtype_layout_or_batch() -> None:
    other = replace(ROUND, layout="nn")
    answer = advise(ODD, certain_model(2.0), times((ODD, 1.8e-5), (other, 1e-6)), "cublas")
    assert answer.instead.layout == "nt"
    assert answer.verdict == LEAVE_IT


def test_the_winner_is_named_only_if_its_interval_says_so() -> None:
    clear = {
        "cublas": MeasuredTime(2e-5, 1.9e-5, 2.1e-5),
        "triton-tiled": MeasuredTime(1e-5, 0.9e-5, 1.1e-5),
    }
    close = {
        "cublas": MeasuredTime(2e-5, 1.9e-5, 2.1e-5),
        "triton-tiled": MeasuredTime(1.95e-5, 1.85e-5, 2e-5),
    }
    assert Measurements({ROUND: clear}).winner(ROUND, "cublas") == "triton-tiled"
    assert Measurements({ROUND: close}).winner(ROUND, "cublas") == "cublas"
    assert Measurements({}).winner(ROUND, "cublas") == "cublas"


def test_choosing_is_by_work_a_second_and_may_shrink() -> None:
    """The smaller shape takes 20% less time for 10% fewer FLOPs."""
    own, smaller, larger = (Gemm(1000, 1000, k, "bf16") for k in (1000, 900, 1100))
    known = times((own, 1.0e-5), (smaller, 0.8e-5), (larger, 1.05e-5), half_width=0.002)
    answer = advise(own, Model(H100), known, "cublas", Question("choose", 0.15, ANY))
    assert (answer.question, answer.verdict, answer.instead) == ("choose", LIKELY, smaller)
    assert answer.measured_gain == pytest.approx(0.9 / 0.8 - 1)
    assert answer.measured_lo == pytest.approx(0.9 / 0.8 * 0.998 / 1.002 - 1)
    assert answer.extra_flops == pytest.approx(-0.1)
    padded = advise(own, certain_model(), known, "cublas", Question("pad", 0.15))
    assert padded.instead not in (smaller, larger)  # neither contains it and is faster


def test_choosing_stays_within_its_share_and_its_certainty() -> None:
    for share in (0.02, 0.15):
        answer = advise(Gemm(4000, 4100, 3900, "bf16"), certain_model(0.01), Measurements({}),
                        "cublas", Question("choose", share))  # fmt: skip
        assert answer.verdict == LEAVE_IT or answer.predicted_gain >= MIN_GAIN
        for name in "mnk":
            own, other = getattr(answer.problem, name), getattr(answer.instead, name)
            assert own * (1 - share) <= other <= own * (1 + share)
    unsure = advise(Gemm(4000, 4100, 3900, "bf16"), certain_model(2.0), Measurements({}),
                    "cublas", Question("choose", 0.15))  # fmt: skip
    assert unsure.verdict == LEAVE_IT


@pytest.mark.parametrize("size", [100, 4000, 131_072])
def test_few_enough_sizes_are_tried_whatever_the_size(size: int) -> None:
    gemm = Gemm(size, size, size, "bf16")
    options, frame = options_of(gemm, certain_model(), Measurements({}), "cublas",
                                Question("choose", 0.15))  # fmt: skip
    assert options[0] == gemm
    assert len(options) == len(set(options)) == len(frame)
    assert 8 < len(options) <= 256


def planted(folder: Path, penalty: float, seed: int, noise: float = 0.03) -> list[float | None]:
    """Simulate an alignment sweep with a penalty for misaligned N, and return the claimed gains."""
    cases = gemm_cases([(1024, 1024 + offset, 1024) for offset in range(17)], "alignment")
    free = replace(default_constants("hopper", "bf16"), misalignment=0.0, fallback=0.0)
    truth = model_law(free)(problems(cases))
    odd = np.arange(17) % 8 != 0
    rng = np.random.default_rng(seed)
    # The median of nine samples, and the interval that nine samples give.
    samples = truth[:, None] * np.where(odd, penalty, 1.0)[:, None]
    samples = np.sort(samples * np.exp(noise * rng.standard_normal((len(truth), 9))), axis=1)
    measured = {
        problem: {"cublas": MeasuredTime(row[4], row[1], row[7])}
        for problem, row in zip(problems(cases), samples, strict=True)
    }
    gemms = [p for p in measured if isinstance(p, Gemm)]
    question = Question("pad", 0.01)
    answers = [advise(p, Model(H100), Measurements(measured), "cublas", question) for p in gemms]
    return [
        a.measured_lo for a in answers
        if a.verdict == LIKELY and a.evidence == "measured" and (a.measured_lo or 0) > 0.01
    ]  # fmt: skip


def test_a_planted_penalty_is_found_and_noise_is_not_taken_for_one(tmp_path: Path) -> None:
    found = [planted(tmp_path, 1.8, seed) for seed in range(20)]
    # There are 14 misaligned sizes. More claims may come from noise.
    assert all(len(claims) >= 14 for claims in found)
    false_alarms = sum(len(planted(tmp_path, 1.0, seed)) for seed in range(20))
    assert false_alarms / (20 * 17) < 0.05


def test_the_table_in_three_formats(tmp_path: Path) -> None:
    sizes = [(512, n, 512) for n in (512, 1000, 1001, 1008, 1024)]
    cases = gemm_cases(sizes)
    penalty = [1.0, 1.0, 1.5, 1.0, 1.0]
    analysis = analyse(load(record(tmp_path, cases, np.array(penalty) * 2e-5)))
    advice = build_table(analysis)
    write_table(analysis, advice)
    assert advice[0].problem == Gemm(512, 1001, 512, "bf16")
    assert [a.question for a in advice] == ["pad"] * 5 + ["choose"] * 5
    assert [a.verdict for a in advice[:5]] == [LIKELY] + [LEAVE_IT] * 4
    assert advice[5].problem == Gemm(512, 1001, 512, "bf16")
    assert [a.verdict for a in advice[5:]].count(LIKELY) >= 1
    text = (tmp_path / "recommendations.md").read_text(encoding="utf-8")
    assert text == recommendations_markdown(analysis, advice)
    row = next(line for line in text.splitlines() if line.startswith("| 512×1001×512"))
    assert "N 1001 → 1008" in row
    assert "+50.0% [+47.0%, +53.0%]" in row
    assert "N is not a multiple of 8" in row
    lines = (tmp_path / "recommendations.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 11
    assert lines[0].startswith(
        "problem,instead,op,m,n,k,batch,dtype,layout,new_m,new_n,new_k,change,roles,question,"
    )


def test_what_misalignment_costs_is_said_to_be_assumed_where_no_row_has_shown_it() -> None:
    fit = Fit(default_constants("hopper", "bf16"), None, -0.05, 0.05, -0.02, 0.02, rows=100)
    odd = Gemm(8192, 50257, 4096, "bf16")
    for aligned_only in (False, True):
        model = Model(H100, {"cublas gemm bf16": replace(fit, aligned_only=aligned_only)})
        answer = advise(odd, model, Measurements({}), "cublas")
        assert answer.verdict == LIKELY
        assert ("the price of misalignment is assumed" in answer.reason) == aligned_only
        # The time of the misaligned shape is then known to a factor of two either way.
        ends = (1 + answer.predicted_hi) / (1 + answer.predicted_lo)
        assert (ends > 4) == aligned_only
    # A small price may be zero.
    cheap = replace(fit.constants, misalignment=0.3, fallback=0.0)
    low = replace(fit, constants=cheap, aligned_only=True)
    small = advise(odd, Model(H100, {"cublas gemm bf16": low}), Measurements({}), "cublas")
    assert small.predicted_gain is not None
    assert small.predicted_lo < 0.02
    known = Model(H100, {"cublas gemm bf16": replace(fit, aligned_only=True)})
    padded = replace(odd, n=50264)
    times: dict[Problem, dict[str, MeasuredTime]] = {
        problem: {"cublas": MeasuredTime(t, 0.99 * t, 1.01 * t)}
        for problem, t in ((odd, 8e-3), (padded, 1e-3))
    }
    answer = advise(odd, known, Measurements(times), "cublas")
    assert (answer.instead, answer.evidence) == (padded, "measured")
    assert "assumed" not in answer.reason


def test_advice_for_many_problems_at_once_is_what_each_gets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("analysis.advice.recommend._TOGETHER", 2)
    model, known = certain_model(), times((ODD, 1.8e-5), (ROUND, 1.0e-5))
    # The problems have few options, thousands of combinations, a dtype without a fit, and another
    # implementation.
    asked: dict[Problem, str] = {
        ODD: "cublas", Gemm(64, 64, 64, "bf16"): "cublas", Gemm(4099, 8191, 2053, "bf16"): "cublas",
        Gemm(1000, 1001, 1002, "fp16"): "cublas", replace(ODD, k=2000): "triton-tiled",
    }  # fmt: skip
    for question in (Question("pad", 0.02), Question("choose", 0.1)):
        together = advise_all(asked, model, known, question)
        alone = [advise(problem, model, known, name, question) for problem, name in asked.items()]
        assert len(together) == len(alone)
        assert {a.problem: a for a in together} == {a.problem: a for a in alone}
        assert any(a.evidence == "measured" for a in together)
    assert advise_all({}, model, known, Question()) == []
