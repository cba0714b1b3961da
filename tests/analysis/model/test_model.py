from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy.optimize import least_squares

from analysis.model.basis import find_basis
from analysis.model.calibrate import _fold_of, _leave_one_out_ranges, _range, calibrate
from analysis.model.features import Inputs
from analysis.model.fit import UNCALIBRATED, Fit
from analysis.model.fitted import analyse, write_predictions
from analysis.model.fitting import fit_constants, fit_group
from analysis.model.predict import Model, explain, model_from_json
from analysis.model.prior import Prior, Spread, prior_without_tables
from analysis.model.query import Query, group_of
from analysis.page.page_model import page_groups
from analysis.recordings.load import load
from kernels.common.errors import UserError
from kernels.config import HAND_WRITTEN
from kernels.machine import known_machine, known_machines
from kernels.problem import Conv, Gemm, Problem
from kernels.timemodel.constants import BOUNDS, default_constants
from kernels.timemodel.estimate import LIMITS
from sweeps.cases.case import Case
from sweeps.schema import IDENTITY
from tests.support.synthetic import (
    H100,
    gemm_cases,
    model_law,
    problems,
    random_sizes,
    record,
    recorded,
)

GROUP = "cublas gemm bf16"
TRUTH = replace(
    default_constants("hopper", "bf16"), compute=0.7, dram=0.75, launch=4e-6, feed=8e10, tail=0.6
)


def test_the_name_of_an_implementation_may_contain_spaces(tmp_path: Path) -> None:
    """Names come from the user's files. Such a fit is also used for the other 16-bit dtype."""
    cases = [
        replace(case, implementation="my kernel")
        for case in gemm_cases(dict.fromkeys(random_sizes(60)))
    ]
    folder = record(tmp_path / H100.slug, cases, model_law()(problems(cases)))
    write_predictions(analyse(load(folder)))
    basis = find_basis(H100.slug, tmp_path)
    assert {"my kernel gemm bf16", "my kernel gemm fp16"} <= basis.model.fits.keys()
    assert basis.library(Gemm(512, 512, 512, "bf16")) == "my kernel"
    assert {group.name for group in page_groups(basis)} >= {"gemm bf16", "gemm fp16"}


def test_a_group_without_a_dtype_is_refused() -> None:
    document = {"groups": {"cublas gemm": Fit(TRUTH).to_json()}}
    with pytest.raises(ValueError, match="a group's name must have"):
        model_from_json(H100, document)


def test_planted_constants_are_found(tmp_path: Path) -> None:
    recording = recorded(tmp_path, 400, noise=0.01, law=model_law(TRUTH))
    fit = calibrate(H100, recording.ok).model.fits[GROUP]
    assert fit.constants.compute == pytest.approx(TRUTH.compute, rel=0.05)
    assert fit.constants.dram == pytest.approx(TRUTH.dram, rel=0.1)
    assert fit.constants.launch == pytest.approx(TRUTH.launch, rel=0.1)
    assert fit.median is not None
    assert fit.median < 0.02  # the noise
    assert fit.rows == len(recording.ok)


def test_outliers_do_not_move_the_constants(tmp_path: Path) -> None:
    cases = gemm_cases(dict.fromkeys(random_sizes(300)))
    seconds = model_law(TRUTH)(problems(cases))
    seconds[::10] *= 3.0  # a tenth of the rows is disturbed
    fit = calibrate(H100, load(record(tmp_path, cases, seconds)).ok).model.fits[GROUP]
    assert fit.constants.compute == pytest.approx(TRUTH.compute, rel=0.1)
    assert fit.constants.launch == pytest.approx(TRUTH.launch, rel=0.15)


def test_constants_stay_within_what_is_physically_possible(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cases = gemm_cases(dict.fromkeys(random_sizes(60)))
    nonsense = rng.uniform(1e-7, 1e-1, len(cases))
    fit = calibrate(H100, load(record(tmp_path, cases, nonsense)).ok).model.fits[GROUP]
    for name, value in fit.constants.to_json().items():
        low, high = BOUNDS[name]
        assert low * (1 - 1e-6) <= value <= high * (1 + 1e-6), name


def test_no_row_is_predicted_by_constants_that_saw_it(tmp_path: Path) -> None:
    """The times of a fold do not influence its predictions, but those of other folds do."""
    cases = gemm_cases(dict.fromkeys(random_sizes(150)))
    seconds = model_law()(problems(cases))
    own = np.array([_fold_of(problem, 3) for problem in problems(cases)]) == 0
    assert 0.2 < own.mean() < 0.5

    def predicted(name: str, slower: NDArray[np.bool_]) -> NDArray[np.float64]:
        times = np.where(slower, 2 * seconds, seconds)
        held_out = calibrate(H100, load(record(tmp_path / name, cases, times)).ok).held_out
        return held_out.estimate.time[own]

    plain = predicted("plain", np.zeros_like(own))
    assert np.allclose(predicted("own", own) / plain, 1.0)
    assert np.median(predicted("others", ~own) / plain) > 1.5


def test_the_same_problem_is_in_the_same_part_in_every_sweep(tmp_path: Path) -> None:
    sizes = list(dict.fromkeys(random_sizes(50)))
    cases = gemm_cases(sizes, "one") + gemm_cases(sizes, "two")
    seconds = model_law()(problems(cases))
    seconds[len(sizes) :] *= 1.5  # so that different folds lead to different constants
    time = calibrate(H100, load(record(tmp_path, cases, seconds)).ok).held_out.estimate.time
    assert time[: len(sizes)] == pytest.approx(time[len(sizes) :])  # predicted by the same fit


@pytest.mark.slow
@pytest.mark.parametrize("rows", [25, 60, 500])
def test_the_interval_covers_nine_in_ten_of_rows_that_it_never_met(
    tmp_path: Path, rows: int
) -> None:
    """The rows are new: neither the constants nor the interval were fitted to them."""
    covered = []
    truth = model_law()
    for seed in range(8 if rows < 500 else 3):
        recording = recorded(tmp_path / str(seed), rows, noise=0.1, seed=seed)
        model = calibrate(H100, recording.ok).model
        fresh = problems(gemm_cases(random_sizes(200, seed + 1000)))
        noise = np.random.default_rng(seed + 2000).standard_normal(len(fresh))
        seconds = truth(fresh) * np.exp(0.1 * noise)
        prediction = model.predict(Query.plain(fresh, "cublas"))
        covered.append(((prediction.lo <= seconds) & (seconds <= prediction.hi)).mean())
    assert 0.88 <= np.mean(covered) <= 0.97


def test_no_row_widens_its_own_interval() -> None:
    errors = np.random.default_rng(0).standard_normal(67)
    low, high = _leave_one_out_ranges(errors, -3.0, 2.0)
    for i in range(len(errors)):
        assert (low[i], high[i]) == _range(np.delete(errors, i), -3.0, 2.0)


def test_the_interval_goes_from_the_priors_to_that_of_own_errors() -> None:
    errors = 0.01 * np.random.default_rng(0).standard_normal(2000)
    widths = [np.ptp(_range(errors[:count], -0.5, 0.5)) for count in (0, 1, 5, 20, 200, 2000)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 1.0
    assert widths[-1] == pytest.approx(2 * max(1.645 * 0.01, 0.02), abs=0.005)


def test_few_rows_narrow_a_priors_interval_as_they_tell_the_scale(tmp_path: Path) -> None:
    prior = prior_without_tables(H100, GROUP)
    as_known = recorded(tmp_path, 18, noise=0.01, law=model_law(prior.fit.constants))
    few = calibrate(H100, as_known.ok).model.fits[GROUP]
    assert few.high - few.low < (prior.fit.high - prior.fit.low) * prior.fit.typical_spread
    spread = Spread(scale=0.3, shape=0.1)
    assert spread.narrowing(0) == 1
    assert spread.after(10_000) == pytest.approx(0.1, rel=0.01)
    # A single shape may deviate by 0.1, so one row determines the scale to 0.1.
    assert spread.after(1) == pytest.approx(np.hypot(0.1, 0.1), rel=0.1)


def test_pairs_of_neighbours_have_the_noise_of_two(tmp_path: Path) -> None:
    sizes = [(m, 1024, 1024) for m in range(1024, 2048, 8)]
    cases = gemm_cases(sizes)
    truth = model_law()(problems(cases))
    rng = np.random.default_rng(0)
    noisy = truth * np.exp(0.03 * rng.standard_normal(len(truth)))
    fit = calibrate(H100, load(record(tmp_path, cases, noisy)).ok).model.fits[GROUP]
    assert 100 < fit.pairs < len(sizes)  # one pair for each shape that has a padding
    # The 5th and 95th percentile of the difference of two errors are ±1.645 · √2 · 0.03.
    low, high = fit.ratio_range(True, (1.0, 1.0))
    assert high == pytest.approx(0.07, rel=0.3)
    assert low == pytest.approx(-0.07, rel=0.3)


def test_few_rows_move_the_scale_and_hardly_any_single_constant() -> None:
    problems = [Gemm(1024 + 64 * i, 1024, 1024, "bf16") for i in range(6)]
    query, slow = Query.plain(problems, "cublas"), model_law()(problems) * 1.3
    start = default_constants("hopper", "bf16")
    prior = Prior.bare(start, Spread(scale=0.3, shape=0.1))
    fit = fit_group(H100, query, slow, np.full(6, ""), prior)
    ratio = Inputs.from_query(H100, query).estimate(fit.constants).time / slow
    assert np.median(ratio) == pytest.approx(1.0, rel=0.05)
    for rate in ("compute", "dram", "feed", "l2"):  # even rates that limit none of the six times
        slower = getattr(start, rate) / getattr(fit.constants, rate)
        assert 1.1 < slower < 1.45, rate
    assert fit.constants.tail == pytest.approx(start.tail, abs=0.1)


def test_a_fit_takes_one_thread_whatever_blas_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    threads = []

    def solve(*arguments: Any, **options: Any) -> Any:
        threads.append(pools())
        return least_squares(*arguments, **options)

    def pools() -> list[int]:
        found = threadpoolctl.threadpool_info()
        return [pool["num_threads"] for pool in found if pool["user_api"] == "blas"]

    monkeypatch.setattr("analysis.model.fitting.least_squares", solve)
    query = Query.plain([Gemm(m, 1024, 1024, "bf16") for m in range(1, 64)], "cublas")
    seconds = model_law()(query.problems) * 1.2
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        fit_constants(Inputs.from_query(H100, query), seconds, default_constants("hopper", "bf16"))
        after = pools()
    assert threads
    assert {count for inside in threads for count in inside} == {1}
    assert set(after) == {2}


def test_warm_and_sustained_rows_have_constants_of_their_own(tmp_path: Path) -> None:
    base = [Gemm(m, 1024, 1024, "bf16") for m in range(1, 64)]
    large = [Gemm(4096 + 128 * i, 4096, 4096, "bf16") for i in range(30)]
    cases = [Case("s", p, "cublas") for p in base + large]
    cases += [Case("s", p, "cublas", cache="warm") for p in base]
    cases += [Case("s", p, "cublas", mode="sustained") for p in large]
    law = model_law()
    times = np.concatenate([law(base), law(large), law(base) * 0.7, law(large) * 1.25])
    analysis = analyse(load(record(tmp_path, cases, times)))
    constants = analysis.model.fits[GROUP].constants
    assert constants.sustained == pytest.approx(0.8, abs=0.08)
    warm = analysis.table[analysis.table["cache"] == "warm"]
    error = (warm["predicted_time_us"] / warm["time_us"] - 1).abs()
    assert error.median() < 0.25


def test_triton_rows_are_predicted_with_their_own_tiles() -> None:
    gemm = Gemm(4096, 4096, 4096, "bf16")
    texts = [
        "bm=128;bn=256;bk=64;stages=3;warps=8;group=8",
        "bm=32;bn=32;bk=64;stages=5;warps=4;group=8",
    ]
    query = Query([gemm] * 2, ["triton-tiled"] * 2, texts, [False] * 2, [False] * 2)
    frame = Model(H100).predict(query).frame()
    assert frame["tile"].tolist() == ["128x256", "32x32"]
    assert frame["time_us"].iloc[1] > frame["time_us"].iloc[0]


def test_a_model_survives_json(tmp_path: Path) -> None:
    calibration = calibrate(H100, recorded(tmp_path, 60).ok)
    again = model_from_json(H100, json.loads(json.dumps(calibration.to_json())))
    query = Query.plain(problems(gemm_cases(random_sizes(50, 7))), "cublas")
    before, after = calibration.model.predict(query), again.predict(query)
    assert after.estimate.time == pytest.approx(before.estimate.time, rel=1e-3)
    assert after.hi / after.estimate.time == pytest.approx(before.hi / before.estimate.time)
    assert again.fits[GROUP].constants == calibration.model.fits[GROUP].constants


def test_a_fit_of_an_older_file_is_read_and_one_whose_interval_has_no_width_is_refused() -> None:
    fit = Fit(default_constants(H100.generation, "bf16"), low=-0.1, high=0.2)
    text = json.loads(json.dumps(fit.to_json()))
    again = Fit.from_json({**text, "min_spread": 0.0})
    assert again == Fit.from_json(text)
    assert (again.low, again.high) == (-0.1, 0.2)
    with pytest.raises(ValueError, match="the interval is empty"):
        Fit.from_json({**text, "low": 0.0, "high": 0.0})
    for trees in ("residual", "offsets"):
        with pytest.raises((KeyError, ValueError)):
            Fit.from_json({**text, trees: {}})


@pytest.mark.parametrize("slug", sorted(known_machines()))
def test_every_known_machine_predicts_without_measurements(slug: str) -> None:
    machine = known_machine(slug)
    problems: list[Problem] = [
        Gemm(4096, 4096, 4096, "fp16"), Gemm(1, 1, 1, "fp16"),
        Conv.parse("32,64,56,56,64,3,3,1,1,1,1,fp16"),
    ]  # fmt: skip
    frame = Model(machine).predict(Query.plain(problems, "cublas")).frame()
    assert (frame["time_us"] > 0).all()
    assert (frame["lo_us"] < frame["time_us"]).all()
    high = frame["hi_us"].iloc[0] / frame["time_us"].iloc[0]
    assert 1.1 < high <= np.exp(UNCALIBRATED[1]) * 1.001
    assert set(frame["limit"]) <= set(LIMITS)
    # Large GEMMs reach more than half of the peak, and tiny ones take as long as a launch.
    rate = problems[0].flops / (frame["time_us"].iloc[0] * 1e-6) / machine.peak("fp16")
    assert 0.5 < rate < 1.0
    assert frame["limit"].iloc[1] == "launch"


def test_a_dtype_without_units_is_a_sentence() -> None:
    volta = Model(known_machine("nvidia-v100-sxm2-16gb"))
    with pytest.raises(UserError, match="does not compute bf16"):
        volta.predict(Query.plain([Gemm(8, 8, 8, "bf16")], "cublas"))


def test_explanations_are_one_line_for_every_limit() -> None:
    model = Model(H100)
    for gemm, words in (
        (Gemm(8192, 8192, 8192, "bf16"), "limited by arithmetic"),
        (Gemm(1, 16384, 16384, "bf16"), "limited by memory bandwidth"),
        (Gemm(16, 16, 16, "bf16"), "limited by launching"),
    ):
        row = model.predict(Query.plain([gemm], "cublas")).frame().iloc[0].to_dict()
        assert words in explain(row)
        assert "\n" not in explain(row)
    conv = Conv.parse("32,256,28,28,256,3,3,1,1,1,1,fp32,nchw")
    query = Query.plain([conv], "cudnn")
    row = Model(known_machine("nvidia-a100-pcie-80gb")).predict(query).frame().iloc[0].to_dict()
    assert row["algorithm"] == "winograd-4x4"
    assert "Winograd over 4x4 outputs" in explain(row)


@pytest.mark.parametrize("config", ["", "bm=128;bn=128;bk=32;stages=3;warps=8;group=8;split=1"])
def test_a_kernel_of_ours_is_not_taken_for_winograds(config: str) -> None:
    conv = Conv.parse("32,256,28,28,256,3,3,1,1,1,1,fp32,nhwc")
    query = replace(Query.plain([conv], "triton-conv"), configs=[config])
    row = Model(known_machine("nvidia-a100-pcie-80gb")).predict(query).frame().iloc[0]
    assert row["algorithm"] == "implicit-gemm"


def test_groups() -> None:
    assert group_of("cublas", Gemm(1, 1, 1, "tf32")) == "cublas gemm tf32"
    conv = Conv.parse("1,8,8,8,8,3,3,1,1,1,1,fp16,nhwc,wgrad")
    assert group_of("cudnn", conv) == "cudnn wgrad fp16"


def test_predictions_are_written_one_row_a_case(tmp_path: Path) -> None:
    analysis = analyse(recorded(tmp_path, 80))
    write_predictions(analysis)
    frame = pd.read_csv(tmp_path / "predicted.csv")
    assert len(frame) == len(analysis.table)
    assert list(frame.columns[: len(IDENTITY)]) == list(IDENTITY)
    assert frame["time_us"].tolist() == analysis.table["predicted_time_us"].tolist()
    document = json.loads((tmp_path / "calibration.json").read_text())
    assert document["groups"][GROUP]["rows"] == len(frame)
    assert 0 < document["groups"][GROUP]["median"] < 0.1


def test_nothing_measured_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no measured case yet"):
        analyse(load(record(tmp_path, [], [])))


def test_times_that_the_model_does_not_use_are_told_from_none(tmp_path: Path) -> None:
    cases = [replace(case, cache="weights-cold") for case in gemm_cases([(64, 64, 64)])]
    with pytest.raises(UserError, match="has no measured GEMM or convolution that the model"):
        analyse(load(record(tmp_path, cases, [1e-5])))


@pytest.mark.parametrize(
    ("file", "slug", "mean"),
    [
        # For comparison: the law of four fitted constants has errors of 10.1% and 12.9%.
        ("h100_sxm-trtllm-1.3.0rc20.parquet", "nvidia-h100-sxm", 0.08),
        ("a100_sxm-sglang-0.5.10.parquet", "nvidia-a100-sxm-80gb", 0.11),
    ],
)
def test_public_bf16_tables_calibrated_on_256_rows(
    public_data: Path, file: str, slug: str, mean: float
) -> None:
    table = pd.read_parquet(public_data / "aiconfigurator" / file)
    table = table[table["gemm_dtype"] == "bfloat16"].dropna(subset=["latency"])
    drawn = table.sample(2256, random_state=0)
    problems = [Gemm(int(r.m), int(r.n), int(r.k), "bf16") for r in drawn.itertuples()]
    seconds = drawn["latency"].to_numpy() * 1e-3
    machine = known_machine(slug)
    # Start from another generation's constants, because they were not fitted to this table.
    start = default_constants("volta", "bf16")
    seen = Inputs.from_query(machine, Query.plain(problems[:256], "cublas"))
    constants = fit_constants(seen, seconds[:256], start)
    guess = (
        Inputs.from_query(machine, Query.plain(problems[256:], "cublas")).estimate(constants).time
    )
    assert np.abs(guess / seconds[256:] - 1).mean() < mean


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_hand_written_kernel_is_predicted_with_its_own_config(name: str) -> None:
    """The prediction has the tile and the parts of K in its config, not the library's best."""
    few = Gemm(256, 256, 65536, "bf16")
    conv = Conv(1, 512, 7, 7, 512, 3, 3, (1, 1), (1, 1), (1, 1), 1, "bf16")
    problem = conv if name == "triton-conv" else few
    extra = {"triton-splitk": ";split=8", "triton-conv": ";split=8", "triton-streamk": ";ctas=132",
             "triton-persistent": ";ctas=132;tma=on;specialize=off"}  # fmt: skip
    config = f"bm=64;bn=128;bk=64;stages=4;warps=4;group=8{extra.get(name, '')}"
    query = Query([problem], [name], [config], [False], [False])
    found = Model(H100).predict(query).estimate
    assert (found.bm[0], found.bn[0]) == (64, 128)
    parts = {"triton-splitk": 8, "triton-conv": 8, "triton-streamk": 132 / 8}.get(name, 1)
    assert found.split[0] == pytest.approx(parts)


def test_the_first_case_does_not_decide_whether_trees_grow() -> None:
    """Trees correct the search for a tile, which one case without a config makes necessary."""
    sizes = np.random.default_rng(0).integers(8, 500, (300, 3)) * 8
    gemms = [Gemm(int(m), int(n), int(k), "bf16") for m, n, k in sizes]
    config = "bm=128;bn=256;bk=64;stages=3;warps=8;group=8"
    prior = prior_without_tables(H100, "triton-tiled gemm bf16")
    for configs in ([config] * 299 + [""], [""] + [config] * 299):
        query = replace(Query.plain(gemms, "triton-tiled"), configs=configs)
        guess = Inputs.from_query(H100, query).estimate(prior.fit.constants).time
        seconds = guess * np.exp(0.3 * np.sign(sizes[:, 1] - 2000))
        fitted = fit_group(H100, query, seconds, np.array([""] * 300, dtype=object), prior)
        assert fitted.residual is not None


def test_vectors_do_not_show_what_misaligned_rows_cost(tmp_path: Path) -> None:
    """Times with an N of 1 do not show what an N of 1001 costs."""
    shapes = [*random_sizes(30), *((m, 1, 1024) for m in range(1024, 1034))]
    recording = load(
        record(tmp_path, gemm_cases(shapes), model_law()(problems(gemm_cases(shapes))))
    )
    fit = calibrate(H100, recording.ok).model.fits[GROUP]
    assert fit.aligned_only
    assert not fit.has_like(Gemm(1024, 1001, 1024, "bf16"))
    assert fit.has_like(Gemm(1024, 1, 1024, "bf16"))
