"""Test that the intervals of a repetition contain the times of a second run.

Ratios are computed from rounds in which both cases were sampled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis.advice.measurements import read_measurements
from analysis.recordings.load import load
from analysis.recordings.repetition import (
    MeasuredTime,
    between_cases,
    between_processes,
    repeated_ratio,
    rounds_of,
    steady_samples,
    steady_times,
)
from kernels.common.errors import UserError
from sweeps.store import write_rounds
from sweeps.timing.statistics import finished, median, median_interval
from tests.support.synthetic import RUN, gemm_cases, record

CASES = gemm_cases([(1024, 1024, 1024), (1024, 1024, 1088)])


def timed(draw: Callable[[], float], between: float = 0.0) -> MeasuredTime:
    """Time a case like a run, which samples it until it is finished."""
    samples: list[float] = []
    while not finished(samples):
        samples.append(draw())
    interval = median_interval(samples)
    assert interval is not None
    return MeasuredTime(median(samples), *interval, between=between)


def process(rng: random.Random, noise: float, between: float) -> Callable[[], float]:
    """Simulate a process: all its times differ from the truth by one factor, and have noise."""
    off = rng.gauss(0, between / math.sqrt(2))
    return lambda: math.exp(rng.gauss(off, noise))


@pytest.mark.parametrize("noise", [0.002, 0.005, 0.01, 0.02, 0.05])
@pytest.mark.parametrize("between", [0.0, 0.01])
def test_a_second_median_lies_in_the_interval_of_a_repetition(noise: float, between: float) -> None:
    """It must contain at least 93% of 3,000 second medians, and more than the median's interval."""
    rng = random.Random(1)
    inside = plain = 0
    for _ in range(3000):
        first, second = (timed(process(rng, noise, between), between) for _ in range(2))
        lo, hi = first.repetition
        inside += lo <= second.time <= hi
        plain += first.lo <= second.time <= first.hi
    assert 0.93 <= inside / 3000 <= 0.985
    assert plain < inside


def test_a_ratio_of_common_rounds_does_not_feel_the_machine(tmp_path: Path) -> None:
    """Two cases differ by 5%, on a machine whose speed changes by up to 50% between rounds."""
    rng = np.random.default_rng(2)
    speed = rng.uniform(1.0, 1.5, 8)
    rounds = [
        {(RUN, i): base * speed[i] * math.exp(0.001 * rng.standard_normal()) for i in range(8)}
        for base in (1.05e-5, 1e-5)
    ]
    one, other = (
        MeasuredTime(median(list(r.values())), min(r.values()), max(r.values()), r) for r in rounds
    )
    ratio, lo, hi = repeated_ratio(one, other) or (0.0, 0.0, 0.0)
    assert 1.045 < lo < ratio < hi < 1.055
    alone = [MeasuredTime(t.time, t.lo, t.hi) for t in (one, other)]
    _, lo, hi = repeated_ratio(*alone) or (0.0, 0.0, 0.0)
    assert lo < 0.8 < 1.3 < hi


def test_few_common_rounds_are_not_enough() -> None:
    one = MeasuredTime(1.0, 0.9, 1.1, {(RUN, i): 1.0 for i in range(6)})
    other = MeasuredTime(1.0, 0.9, 1.1, {(RUN, i): 1.0 for i in range(1, 7)})
    of_another_run = MeasuredTime(1.0, 0.9, 1.1, {("else", i): 1.0 for i in range(6)})
    for case in (other, of_another_run):
        _, lo, hi = repeated_ratio(one, case) or (0.0, 0.0, 0.0)
        assert lo < 0.9 < 1.1 < hi
    assert repeated_ratio(one, MeasuredTime(1.0, math.nan, math.nan)) is None
    assert repeated_ratio(one, one) == pytest.approx((1.0, 1.0, 1.0))


def test_what_processes_differ_by_widens_a_ratio() -> None:
    one = MeasuredTime(1.0, 0.999, 1.001, {}, between=0.2, between_cases=0.03)
    _, lo, hi = repeated_ratio(one, one) or (0.0, 0.0, 0.0)
    assert math.log(hi) == pytest.approx(1.96 * 0.03 * math.sqrt(2), rel=0.01)
    assert math.log(lo) == pytest.approx(-math.log(hi))


def test_a_change_that_all_cases_share_widens_times_and_no_ratio(tmp_path: Path) -> None:
    repeats = {"cases": 24, "ratio": 1.3, "between": 0.3, "between_cases": 0.01}
    recording = load(record(tmp_path / "h100", CASES, [1.05e-5, 1e-5], repeats=repeats))
    assert between_processes(recording) == {RUN: 0.3}
    assert between_cases(recording) == {RUN: 0.01}
    measured = read_measurements(recording.products, recording)
    lo, hi = measured.times_of(CASES[0].problem)["cublas"].repetition  # type: ignore[arg-type]
    assert hi / lo > 1.5
    _, error = steady_times(recording.ok.reset_index(drop=True), recording)
    assert np.all(error < 0.02)


def test_a_recordings_rounds_reach_its_advice(tmp_path: Path) -> None:
    folder = record(
        tmp_path / "h100", CASES, [1.05e-5, 1e-5], half_width=0.3,
        repeats={"cases": 24, "ratio": 1.0, "between": 0.001},
    )  # fmt: skip
    write_rounds(folder, [
        {"case": case.id, "worker": "1/1", "gpu": None, "rounds": "1 2 3 4 5 6",
         "times_us": " ".join(f"{base * s:.6g}" for s in (1, 1.1, 1.2, 1.3, 1.4, 1.5))}
        for case, base in zip(CASES, (10.5, 10.0), strict=True)
    ])  # fmt: skip
    recording = load(folder)
    assert rounds_of(recording)[RUN, CASES[0].id][f"{RUN} 1/1 ", 2] == pytest.approx(1.155e-5)
    measured = read_measurements(recording.products, recording)
    ratio = measured.ratio(CASES[0].problem, CASES[1].problem)  # type: ignore[arg-type]
    assert ratio is not None
    assert ratio[0] == pytest.approx(1.05)
    assert 1.04 < ratio[1] < 1.05 < ratio[2] < 1.06
    (folder / "rounds.csv").unlink()
    wide = read_measurements(recording.products, recording)
    assert wide.ratio(CASES[0].problem, CASES[1].problem)[1] < 0.8  # type: ignore[arg-type,index]


def test_rules_take_times_put_right_for_the_machines_speed(tmp_path: Path) -> None:
    """Each of 20 cases is 1% slower than the one before, and the machine's speed changes by 50%."""
    rng = np.random.default_rng(4)
    cases = gemm_cases([(256 * i, 1024, 1024) for i in range(1, 21)])
    truth = 1e-5 * 1.01 ** np.arange(20)
    speed = np.array([1.0, 1.5, 1.0, 1.0, 1.5, 1.5, 1.0, 1.5])
    samples = truth[:, None] * speed * np.exp(0.001 * rng.standard_normal((20, 8)))
    folder = record(
        tmp_path / "h100", cases, np.median(samples, axis=1), half_width=0.25,
        repeats={"cases": 20, "ratio": 1.0, "between": 0.002},
    )  # fmt: skip
    write_rounds(folder, [
        {"case": case.id, "worker": "1/1", "gpu": None, "rounds": "1 2 3 4 5 6 7 8",
         "times_us": " ".join(f"{s * 1e6:.6g}" for s in of_case)}
        for case, of_case in zip(cases, samples, strict=True)
    ])  # fmt: skip
    recording = load(folder)
    log_time, error = steady_times(recording.ok.reset_index(drop=True), recording)
    assert np.diff(log_time) == pytest.approx(math.log(1.01), abs=0.004)
    assert np.all((error >= 0.002) & (error < 0.004))
    (folder / "rounds.csv").unlink()
    plain, wide = steady_times(recording.ok.reset_index(drop=True), recording)
    assert np.exp(plain) == pytest.approx(recording.ok["time_us"].to_numpy(float) * 1e-6)
    assert np.all(wide > 0.1)


def test_rounds_of_two_shards_are_not_the_same(tmp_path: Path) -> None:
    """Each shard counts its rounds from 1, and has a GPU of its own."""
    folder = record(tmp_path / "h100", CASES, [1e-5, 1e-5], half_width=0.01)
    write_rounds(folder, [
        {"case": case.id, "worker": f"{i + 1}/2", "gpu": i, "rounds": "1 2 3 4 5 6",
         "times_us": "10 10 10 10 10 10"}
        for i, case in enumerate(CASES)
    ])  # fmt: skip
    recording = load(folder)
    measured = read_measurements(recording.products, recording)
    ratio = measured.ratio(CASES[0].problem, CASES[1].problem)  # type: ignore[arg-type]
    assert ratio is not None
    assert ratio[1] < 0.99


HEADER = "case,worker,gpu,rounds,times_us\n"


@pytest.mark.parametrize("text", ["nonsense", f"{HEADER}a,1/1,,1 2,3.0\n", "\x00"])
def test_damaged_rounds_are_one_sentence(text: str, tmp_path: Path) -> None:
    folder = record(tmp_path / "h100", CASES, [1e-5, 1e-5])
    (folder / "rounds.csv").write_text(text, encoding="utf-8")
    with pytest.raises(
        UserError, match=r"rounds\.csv .*Move the file away; ratios are then computed from"
    ):
        rounds_of(load(folder))


@pytest.mark.parametrize("times", ["3.0", "3.0 nan", "3.0 0", "3.0 -1", "3.0 inf", ""])
def test_a_damaged_line_of_rounds_costs_itself(times: str, tmp_path: Path) -> None:
    folder = record(tmp_path / "h100", CASES, [1e-5, 1e-5])
    text = f"{HEADER}a,1/1,,1 2,3.0 4.0\nb,1/1,,1 2,{times}\n"
    (folder / "rounds.csv").write_text(text, encoding="utf-8")
    assert [case for _, case in rounds_of(load(folder))] == ["a"]


def test_a_line_without_rounds_is_damaged(tmp_path: Path) -> None:
    folder = record(tmp_path / "h100", CASES, [1e-5, 1e-5])
    text = f"{HEADER}a,1/1,,1 2,3.0 4.0\nb,1/1,,,\n"
    (folder / "rounds.csv").write_text(text, encoding="utf-8")
    assert [case for _, case in steady_samples(load(folder))] == ["a"]
