from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from analysis.comparing.by_name import compare_by_name, named_json
from analysis.comparing.changes import (
    CaseChanges,
    CommonShift,
    common_names,
    estimate_changes,
    moderated,
    robust_centre,
)
from analysis.comparing.gate import (
    BELOW,
    CANNOT_TELL,
    FAIL,
    PASS,
    SLOWER,
    UNCLEAR,
    GateResult,
    gate_json,
    gate_text,
    judge_changes,
)
from analysis.recordings.case_times import CaseTimes, TimedProcess
from tests.support.command_line import analysis
from tests.support.simulated_benchmarks import BenchmarkSetting, SimulatedBenchmark, slowed
from tests.support.synthetic import gemm_cases, record
from tests.support.tiers import quick_and_long

QUIET = BenchmarkSetting(noise=(0.002, 0.01), process=0.001, processes=3)


def answer(
    setting: BenchmarkSetting, changes: dict[int, float], seed: int = 0, threshold: float = 0.03
) -> GateResult:
    benchmark = SimulatedBenchmark(setting, np.random.default_rng(seed))
    return judge_changes(estimate_changes(benchmark.run(), benchmark.run(changes)), threshold)


def changes_of_one_error(freedom: float, cases: int) -> float:
    """Return the detectable change of cases with a standard error of 1, with three processes."""
    zeros, ones = np.zeros(cases), np.ones(cases)
    names = tuple(f"{i}" for i in range(cases))
    changes = CaseChanges(
        names, zeros, zeros, zeros, zeros, ones, freedom * ones, ones, None, (3, 3)
    )
    return float(judge_changes(changes, 0.03).detectable[0])


def test_a_quiet_benchmark_passes_and_a_slow_case_fails_it() -> None:
    assert answer(QUIET, {}).verdict == PASS
    result = answer(QUIET, {3: math.log(1.1), 4: math.log(0.8)})
    assert result.verdict == FAIL
    assert [i for i, v in enumerate(result.case_verdicts) if v == SLOWER] == [3]
    assert math.exp(result.log_ratio[3]) == pytest.approx(1.1, abs=0.02)
    assert result.detectable[3] < math.log1p(0.03)


def test_a_noisy_benchmark_cannot_tell_and_says_what_is_missing() -> None:
    result = answer(BenchmarkSetting(noise=(0.1, 0.1), process=0.001), {})
    assert result.verdict == CANNOT_TELL
    assert set(result.case_verdicts) == {UNCLEAR, BELOW}
    needed = np.array([v == UNCLEAR for v in result.case_verdicts])
    assert np.isfinite(result.more_processes[needed]).all()
    assert "more processes of each version" in gate_text(result).splitlines()[-1]


def test_enough_further_rounds_make_the_threshold_detectable() -> None:
    changes = estimate_changes(
        *([TimedProcess("", {f"{i}": CaseTimes(0.0, 0.01, math.inf, 20) for i in range(60)})],) * 2,
    )
    result = judge_changes(changes, 0.03)
    more = int(result.more_rounds[0])
    assert more > 0
    reach = result.detectable / changes.error
    for rounds, reaches in ((20 + more, True), (20 + more - 1, False)):
        error = (changes.within * 20 / rounds + changes.between) ** 0.5
        assert ((reach * error)[0] <= math.log1p(0.03)) == reaches


@pytest.mark.parametrize("freedom", [3.0, 6.0, 20.0, 1e6])
def test_the_detectable_change_is_found_in_80_percent_of_new_runs(freedom: float) -> None:
    """One run's estimate of the error sets the detectable change; another run's tests it."""
    rng = np.random.default_rng(0)
    cases, runs = 8, 20_000
    stated, tested = np.sqrt(rng.chisquare(freedom, (2, runs)) / freedom)
    reach = changes_of_one_error(freedom, cases)
    statistic = (reach * stated + rng.standard_normal(runs)) / tested
    power = (statistic > stats.t.isf(0.04 / cases, freedom)).mean()
    assert 0.78 < power < 0.88


def test_slower_by_less_than_the_threshold_is_no_failure() -> None:
    result = answer(QUIET, {3: math.log(1.015)}, threshold=0.05)
    assert result.is_significant[3]
    assert (result.case_verdicts[3], result.verdict) == (BELOW, PASS)


def test_a_shift_of_all_cases_is_not_called_a_change_of_each() -> None:
    everything = {i: math.log(1.06) for i in range(100)}
    result = answer(BenchmarkSetting(shift=0.0, noise=(0.01, 0.01)), everything)
    assert result.changes.shift is not None
    assert math.expm1(result.changes.shift.log) == pytest.approx(0.06, abs=0.01)
    assert (result.verdict, result.count(SLOWER)) == (CANNOT_TELL, 0)
    text = gate_text(result)
    assert "the machine may be the cause" in text
    assert text.count("at least three processes of each version") == 1
    assert "Measure both versions again" not in text


@pytest.mark.parametrize(
    ("processes", "verdicts"), [(4, (FAIL, SLOWER)), (2, (CANNOT_TELL, UNCLEAR))]
)
def test_a_shift_larger_than_runs_differ_by_counts(
    processes: int, verdicts: tuple[str, str]
) -> None:
    steady = BenchmarkSetting(shift=0.001, noise=(0.01, 0.01), process=0.001, processes=processes)
    everything = {i: math.log(1.06) for i in range(100)}
    result = answer(steady, everything)
    assert (result.verdict, result.shift_verdict) == verdicts
    assert np.exp(result.log_ratio).mean() == pytest.approx(1.06, abs=0.01)
    assert "the ratio of each case includes it" in gate_text(result)


def test_few_cases_of_one_process_each_tell_nothing() -> None:
    result = answer(BenchmarkSetting(cases=3, noise=(0.001, 0.001)), {0: 0.5})
    assert result.verdict == CANNOT_TELL
    assert np.isnan(result.detectable).all()
    document = gate_json(result)
    assert document["detectable"] is None
    assert document["cases"][0]["p"] is None
    json.dumps(document, allow_nan=False)
    assert "at least three processes of each version" in gate_text(result)


@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 3), (3, 2)])
def test_fewer_than_three_processes_name_a_slower_case_but_does_not_fail(
    old: int, new: int
) -> None:
    benchmark = SimulatedBenchmark(replace(QUIET, processes=1), np.random.default_rng(0))
    sides = [
        [process for _ in range(count) for process in benchmark.run(changes)]
        for count, changes in ((old, {}), (new, {3: math.log(1.2)}))
    ]
    result = judge_changes(estimate_changes(sides[0], sides[1]), 0.03)
    assert np.flatnonzero(result.is_significant).tolist() == [3]
    assert (result.verdict, result.case_verdicts[3]) == (CANNOT_TELL, UNCLEAR)
    assert result.more_processes[3] >= 1
    text = gate_text(result)
    assert "slower, but timed in fewer than three processes of a version: 1\n" in text
    assert text.endswith(
        "Time at least three processes of each version, alternating between the versions. Put the "
        "results of each version into one folder, and compare the two folders."
    )


def test_a_lost_case_fails() -> None:
    benchmark = SimulatedBenchmark(QUIET, np.random.default_rng(0))
    changes = estimate_changes(benchmark.run(), benchmark.run())
    assert judge_changes(changes, 0.03, {"gone": "error: it crashed"}).verdict == FAIL
    many = judge_changes(changes, 0.03, {f"gone {i}": "error: it crashed" for i in range(22)})
    assert gate_text(many).endswith("  and 2 more (--json lists all)")


@pytest.mark.parametrize(
    "setting",
    quick_and_long(
        [
            BenchmarkSetting(),
            BenchmarkSetting(drift=0.02, uneven=0.3),
            BenchmarkSetting(processes=3),
            BenchmarkSetting(processes=3, uneven=1.0),
            BenchmarkSetting(cases=8, processes=3),
            BenchmarkSetting(heavy=True),
        ],
        2,
    ),
    ids=str,
)
def test_false_alarms_are_rare_and_stated_changes_are_found(setting: BenchmarkSetting) -> None:
    """Each setting is run 30 times, and 400 times in the study.

    With 5% false alarms, more than five of 30 runs fail with a probability of 0.3%.
    """
    failed, named, planted = 0, 0, min(5, setting.cases // 8)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        benchmark = SimulatedBenchmark(setting, rng)
        old, new = benchmark.run(), benchmark.run()
        result = judge_changes(estimate_changes(old, new), 0.03)
        failed += result.verdict == FAIL
        chosen = rng.choice(setting.cases, planted, replace=False)
        changed = slowed(new, {int(i): float(result.detectable[i]) for i in chosen})
        named += judge_changes(estimate_changes(old, changed), 0.03).is_significant[chosen].sum()
    assert failed <= 5
    assert named >= 0.65 * 30 * planted


def test_the_robust_centre_ignores_a_few_changed_cases() -> None:
    rng = np.random.default_rng(0)
    values = 0.1 + 0.03 * rng.standard_normal(400)
    values[:20] += 1.0
    variances, freedom = np.full(400, 0.02**2), np.full(400, np.inf)
    centre, extra, weights = robust_centre(values, variances, freedom)
    assert centre == pytest.approx(0.1, abs=0.01)
    assert math.sqrt(extra) == pytest.approx(math.sqrt(0.03**2 - 0.02**2), rel=0.25)
    assert centre == pytest.approx(np.average(values, weights=weights))
    unspread = robust_centre(np.zeros(10), np.zeros(10), np.full(10, np.inf))
    assert unspread[:2] == (0.0, 0.0)


@pytest.mark.parametrize("uneven", [False, True])
def test_variances_are_drawn_together_as_far_as_cases_agree(uneven: bool) -> None:
    rng = np.random.default_rng(0)
    truth = 1e-4 * (5 / rng.chisquare(5, 3000) if uneven else np.ones(3000))
    variances = truth * rng.chisquare(4, 3000) / 4
    drawn, prior = moderated(variances, 4.0, np.full(3000, 1e-6))
    assert (4 < prior < 6.5) if uneven else prior > 50
    assert np.square(np.log(drawn / truth)).mean() < np.square(np.log(variances / truth)).mean()


def test_cases_are_those_of_all_processes_in_the_last_ones_order() -> None:
    one, two = (
        TimedProcess("", {name: CaseTimes(0.0) for name in names}) for names in ("abc", "cxb")
    )
    assert common_names([one, two]) == ("c", "b")
    changes = estimate_changes([one], [two])
    assert isinstance(changes, CaseChanges)
    assert changes.names == ("c", "b")


def test_the_command_answers_with_its_exit_code(tmp_path: Path) -> None:
    cases = gemm_cases([(64 * i, 1024, 1024) for i in range(1, 21)])
    seconds = np.linspace(1e-4, 2e-4, 20)
    factors = np.ones(20)
    folders = {}
    for name, slow in (("old", 1.0), ("same", 1.0), ("slower", 1.2)):
        factors[5] = slow
        for run in range(3):
            rng = np.random.default_rng([run, len(name)])
            noise = np.exp(0.002 * rng.standard_normal(20))
            record(tmp_path / name / str(run), cases, seconds * factors * noise, 0.004)
        folders[name] = tmp_path / name
    passed = analysis("compare", folders["old"], folders["same"], "--gate", "3%")
    assert (passed.returncode, passed.stdout.split(":")[0]) == (0, PASS)
    failed = analysis("compare", folders["old"], folders["slower"], "--gate", "3%", "--json")
    assert failed.returncode == 1
    document = json.loads(failed.stdout)
    assert document["verdict"] == FAIL
    assert document["processes"] == [3, 3]
    [slow] = [case for case in document["cases"] if case["verdict"] == SLOWER]
    assert slow["name"].startswith("384×1024×1024 bf16 nt cublas")
    unsure = analysis("compare", folders["old"], folders["same"], "--gate", "0.1%")
    assert (unsure.returncode, unsure.stdout.split(":")[0]) == (3, CANNOT_TELL)
    for gate, words in (("0%", "a slowdown above 0"), ("much", "takes a share")):
        wrong = analysis("compare", folders["old"], folders["same"], "--gate", gate)
        assert (wrong.returncode, words in wrong.stderr) == (2, True)


def test_a_recording_without_a_time_is_named(tmp_path: Path) -> None:
    cases = gemm_cases([(512, 512, 512)])
    timed, failed = (record(tmp_path / name, cases, [1e-3]) for name in ("timed", "failed"))
    rows = pd.read_csv(failed / "measurements.csv", dtype=str)
    rows[["time_us", "time_lo_us", "time_hi_us", "tflops", "gbps", "samples", "converged"]] = ""
    rows.assign(status="oom").to_csv(failed / "measurements.csv", index=False)
    for sides in ((timed, failed), (failed, timed)):
        answer = analysis("compare", *sides, "--gate", "3%")
        assert answer.returncode == 2
        assert "failed has no case with a time." in answer.stderr


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3))
def test_any_times_get_an_answer(seed: int, cases: int, old: int, new: int) -> None:
    rng = np.random.default_rng(seed)

    def times() -> CaseTimes:
        """Draw a time at random: far from others or equal, exact or not, of few samples or many."""
        log, error = rng.uniform(-25, 5), 10 ** rng.uniform(-9, 0)
        freedom, count = float(rng.choice([math.inf, 1.0, 20.0])), int(rng.integers(1, 1000))
        return CaseTimes(rng.choice([0.0, log]), rng.choice([0.0, error]), freedom, count)

    sides = [
        [TimedProcess("", {f"{i}": times() for i in range(cases)}) for _ in range(count)]
        for count in (old, new)
    ]
    result = judge_changes(estimate_changes(sides[0], sides[1]), 0.05)
    assert result.verdict in (PASS, FAIL, CANNOT_TELL)
    json.dumps(gate_json(result), allow_nan=False)
    assert gate_text(result).startswith(result.verdict)


@pytest.mark.parametrize("seconds", [1e-5, 2.3e-5, 0.1])
def test_equal_samples_have_no_scatter(seconds: float) -> None:
    for count in range(1, 30):
        times = CaseTimes.from_samples([seconds] * count)
        assert (times.error, times.freedom) == (0.0, math.inf)
    unknown = CaseTimes.from_summary(seconds, math.nan, 9)
    assert (unknown.error, unknown.freedom) == (0.0, math.inf)


def test_a_counted_shift_leaves_less_of_the_threshold_to_each_case() -> None:
    ones = np.ones(6)
    changes = CaseChanges(
        names=tuple("abcdef"), old=0 * ones, new=0 * ones, deviation=0.005 * ones,
        within=0.006**2 * ones, between=0 * ones, freedom=math.inf * ones, rounds=20 * ones,
        shift=CommonShift(math.log1p(0.02), 0.001, 4.0), processes=(3, 3),
    )  # fmt: skip
    result = judge_changes(changes, 0.03)
    # Each case would be found at 2%, and the shift has already used up 2% of the 3%.
    assert result.counted > 0
    assert set(result.case_verdicts) == {UNCLEAR}
    assert (result.more_rounds > 0).all()
    assert "To detect a slowdown of 3%" in gate_text(result)


def test_rounds_are_asked_for_only_where_they_help() -> None:
    """The threshold is detectable in the first case, whose slowdown is close to it."""
    zeros, ones = np.zeros(6), np.ones(6)
    deviation = np.array([0.028, 0.028, 0, 0, 0, 0])
    within = np.array([0.001, 0.02, *[0.001] * 4]) ** 2
    changes = CaseChanges(
        tuple("abcdef"), zeros, deviation, deviation, within, 0.5 * 0.002**2 * ones, 20 * ones,
        10 * ones, CommonShift(0.0, 0.001, 4.0), (3, 3),
    )  # fmt: skip
    result = judge_changes(changes, 0.03)
    assert result.case_verdicts[:2] == (UNCLEAR, UNCLEAR)
    assert result.more_rounds[0] == 0 < result.more_rounds[1]
    text = gate_text(result)
    assert " in 1 unclear case. To detect it, add " in text
    # The totals are those of the text, which is about the unclear cases.
    assert gate_json(result)["more_rounds"] == result.more_rounds[1]
    settled = judge_changes(replace(changes, deviation=zeros, new=zeros), 0.2)
    assert (settled.verdict, gate_json(settled)["more_rounds"]) == (PASS, 0)


def test_absurd_times_are_json_too() -> None:
    times = (1e-300, 1e290)
    processes = [[TimedProcess("", {"a": CaseTimes(math.log(seconds))})] for seconds in times]
    document = named_json(compare_by_name(estimate_changes(*processes), {}))
    assert math.isfinite(document["cases"][0]["ratio"])


def test_a_slowdown_close_to_the_threshold_is_not_helped_by_zero_more_rounds() -> None:
    zeros, ones = np.zeros(6), np.ones(6)
    deviation = np.array([0.028, 0, 0, 0, 0, 0])
    variance = 0.5 * 0.004**2 * ones
    changes = CaseChanges(
        tuple("abcdef"), zeros, deviation, deviation, variance, variance, 20 * ones, 10 * ones,
        CommonShift(0.0, 0.001, 4.0), (3, 3),
    )  # fmt: skip
    result = judge_changes(changes, 0.03)
    assert (result.verdict, result.case_verdicts[0]) == (CANNOT_TELL, UNCLEAR)
    assert result.is_significant[0]
    text = gate_text(result)
    assert "add 0" not in text
    assert "More processes of each version would narrow the intervals." in text


def test_variances_that_scatter_hardly_more_than_chance_have_a_usual_variance() -> None:
    chance = float(special.polygamma(1, 2.0))
    # Two cases whose log variances have the variance of chance plus 1e-9.
    half = math.sqrt((chance + 1e-9) / 2)
    variances = np.exp(np.array([-half, half]))
    usual, freedom = moderated(variances, 4.0, np.zeros(2))
    assert freedom == math.inf
    assert usual[0] == usual[1]
