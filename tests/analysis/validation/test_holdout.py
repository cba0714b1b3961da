from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import H100, gemm_cases, model_law, problems, random_sizes, record

from analysis.model.features import Inputs
from analysis.model.query import Query
from analysis.model.residual import MANY_ROWS, MIN_ROWS, Residual, fit_residual
from analysis.plots.model_quality import (
    draw_staircase,
    shapes_data,
    staircase_data,
    write_validation_plots,
)
from analysis.recordings.public import Source, read_source
from analysis.validation.cliffs import cliffs
from analysis.validation.design import choose_rows
from analysis.validation.errors import Errors
from analysis.validation.holdout import Validation, validate
from analysis.validation.learning_curve import Point, learning_curve, noise_floor
from analysis.validation.report import curve_text, held_back_table, validation_text
from kernels.constants import default_constants, foreign_constants
from kernels.errors import UserError
from kernels.estimate import ALGORITHMS
from kernels.machine import known_machine
from kernels.problem import Conv, Gemm, Problem

A100 = known_machine("nvidia-a100-pcie-80gb")
LAW = replace(default_constants("hopper", "bf16"), compute=0.6, launch=5e-6, dram=0.6)


pytestmark = pytest.mark.xdist_group("validate")  # one worker calibrates for several tests

SIDES = (64, 128, 256, 512, 1024, 2048)


def rows_of(problem: Problem) -> int:
    assert isinstance(problem, Gemm)
    return problem.m


def a_source(folder: Path, count: int = 260, noise: float = 0.02) -> Source:
    cases = gemm_cases(dict.fromkeys(random_sizes(count)))
    truth = model_law(LAW)(problems(cases))
    rng = np.random.default_rng(0)
    record(folder, cases, truth * np.exp(noise * rng.standard_normal(len(truth))))
    return read_source(folder, H100)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return a_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def found(source: Source) -> Validation:
    """Calibrated on 60 rows; it takes seconds."""
    return validate(source, H100, calibrate=60)


def test_the_document_has_what_was_promised(found: Validation) -> None:
    document = found.to_json()
    assert set(document) == {
        "machine", "source", "dtype", "rows", "skipped", "calibrated", "seed", "constants_from",
        "median", "mean", "p95", "coverage_90", "neighbours", "above_1e11", "holdout", "baselines",
        "cliffs", "by_algorithm", "tile_agreement", "constants", "prior", "weights",
    }  # fmt: skip
    assert set(document["baselines"]) == {
        "datasheet", "three_constants", "four_fitted", "physics", "nvmatmulheuristics",
    }  # fmt: skip
    assert document["rows"] == len(found.tested)
    assert document["calibrated"] == 60
    json.dumps(document, allow_nan=False)


def test_a_known_law_is_learned_and_beats_every_baseline(source: Source) -> None:
    found = validate(source, H100, calibrate=120)
    assert found.errors.median is not None
    assert found.errors.median < 0.03  # the noise is 2 %
    for name in ("datasheet", "three_constants", "four_fitted"):
        baseline = found.baselines[name]
        assert baseline is not None
        assert baseline.median is not None
        assert baseline.median > 1.5 * found.errors.median
    assert 0.85 <= found.coverage <= 0.98
    assert "four fitted" in validation_text(found)


def test_the_choice_of_rows_never_looks_at_a_time(source: Source, found: Validation) -> None:
    shuffled = Source(
        source.name, source.dtype, source.problems, source.implementations,
        source.seconds[::-1].copy(), source.kernels, source.skipped,
    )  # fmt: skip
    blind = validate(shuffled, H100, calibrate=60)
    assert blind.calibrated.tolist() == found.calibrated.tolist()
    again = validate(source, H100, calibrate=60, seed=1)
    assert again.calibrated.tolist() != found.calibrated.tolist()


def test_without_calibration_the_constants_are_anothers(source: Source) -> None:
    found = validate(source, H100, calibrate=0)
    assert found.constants_from == "nvidia-a100-sxm-80gb"
    assert len(found.tested) == len(source)
    assert found.baselines["four_fitted"] is None
    with pytest.raises(UserError, match="did you mean 'nvidia-v100-sxm2-16gb'"):
        validate(source, H100, calibrate=0, constants="nvidia-v100-sxm2-16g")


@pytest.mark.parametrize("slug", ["nvidia-h100-sxm", "nvidia-a100-sxm-80gb", "nvidia-h200"])
def test_a_machines_own_constants_are_never_used_on_it(slug: str) -> None:
    machine = known_machine(slug)
    constants, origin = foreign_constants(machine, "bf16")
    assert origin != slug
    nearest = {"nvidia-h100-sxm": "nvidia-a100-sxm-80gb", "nvidia-h200": "nvidia-h100-sxm",
               "nvidia-a100-sxm-80gb": "nvidia-v100-sxm2-16gb"}  # fmt: skip
    assert origin == nearest[slug]
    assert constants.launch > 0


def test_withheld_levels_are_unseen_in_all_three_dimensions(tmp_path: Path) -> None:
    cases = gemm_cases([(m, n, k) for m in SIDES for n in SIDES for k in SIDES])
    truth = model_law(LAW)(problems(cases))
    record(tmp_path, cases, truth)
    found = validate(read_source(tmp_path, H100), H100, calibrate=40, holdout="levels")
    seen = [found.source.problems[i] for i in found.calibrated]
    for name in "mnk":
        known = {getattr(problem, name) for problem in seen}
        assert not known & {getattr(problem, name) for problem in found.tested.problems}
    assert 0 < len(found.tested) < len(cases)


def test_beyond_a_size_nothing_was_calibrated(tmp_path: Path) -> None:
    cases = gemm_cases([(m, n, 512) for m in (512, 1024, 2304, 2305, 4096) for n in SIDES])
    record(tmp_path, cases, model_law(LAW)(problems(cases)))
    found = validate(read_source(tmp_path, H100), H100, calibrate=12, holdout="beyond")
    assert max(rows_of(found.source.problems[i]) for i in found.calibrated) == 2304
    assert min(rows_of(p) for p in found.tested.problems) == 2305


def test_of_folds_every_row_is_tested_by_a_fit_that_had_not_seen_it(source: Source) -> None:
    source = source.take(slice(0, 130))
    found = validate(source, H100, holdout="folds")
    assert len(found.tested) == len(found.calibrated) == len(source)
    assert found.baselines["physics"] is None
    assert found.errors.median is not None
    assert 0.005 < found.errors.median < 0.03
    # Rows whose times make no sense are missed: nothing of theirs came into their prediction.
    wild = source.seconds.copy()
    wild[::20] *= 3
    again = validate(replace(source, seconds=wild), H100, holdout="folds")
    missed = again.prediction.estimate.time[::20] / wild[::20]
    assert np.median(missed) < 0.5


def convolutions(count: int) -> Source:
    """fp32 3×3 layers on an A100, each by the fastest of three algorithms of a known law."""
    rng = np.random.default_rng(0)
    problems = [
        Conv.parse(f"{n},{c},{h},{h},{k},3,3,1,1,1,1,fp32,nchw")
        for n, c, h, k in zip(
            rng.integers(1, 64, count), rng.integers(3, 512, count), rng.integers(5, 64, count),
            rng.integers(3, 512, count), strict=True,
        )
    ]  # fmt: skip
    law = replace(default_constants("ampere", "fp32"), compute=0.7, launch=2e-5, dram=0.7)
    guess = Inputs.of(A100, Query.plain(problems, "cudnn")).estimate(law)
    named = {
        0: "ampere_scudnn_128x64_relu_medium_nn_v1",
        1: "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        2: "winogradForwardData4x4",
    }
    kernels = [(named[int(a)],) for a in guess.algorithm]
    seconds = guess.time * np.exp(0.02 * rng.standard_normal(count))
    return Source("made", "fp32", problems, ["cudnn"] * count, seconds, kernels, {})


def test_each_algorithm_of_a_convolution_has_its_law_and_is_reported_apart() -> None:
    source = convolutions(300)
    assert set(source.algorithms) == set(ALGORITHMS)
    found = validate(source, A100, calibrate=100)
    assert found.errors.median is not None
    assert found.errors.median < 0.03
    assert set(found.by_algorithm) == set(ALGORITHMS)
    assert sum(errors.rows for errors in found.by_algorithm.values()) == 200
    chosen = np.array(list(ALGORITHMS))[found.prediction.estimate.algorithm.astype(int)]
    assert np.mean(chosen == np.array(found.tested.algorithms)) > 0.9
    assert "winograd-4x4" in validation_text(found)
    some = source.by_algorithm("winograd-4x4")
    assert set(some.algorithms) == {"winograd-4x4"}
    with pytest.raises(UserError, match="has implicit-gemm, winograd-2x2, winograd-4x4, not 'fft'"):
        source.by_algorithm("fft")


def test_a_prediction_never_sees_the_names_of_its_own_kernels() -> None:
    source = convolutions(120)
    found = validate(source, A100, calibrate=40)
    renamed = list(source.kernels)
    for i in set(range(120)) - set(found.calibrated.tolist()):
        renamed[i] = ("fft2d_r2c_32x32",)
    again = validate(replace(source, kernels=renamed), A100, calibrate=40)
    assert again.prediction.estimate.time == pytest.approx(found.prediction.estimate.time)


def test_tiles_are_compared_where_names_have_them(source: Source, found: Validation) -> None:
    assert found.tile_agreement is None
    e = found.prediction.estimate
    named = [("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT",)] * len(source)
    agreement = validate(replace(source, kernels=named), H100, calibrate=60).tile_agreement
    assert agreement == pytest.approx(np.mean((e.bm == 128) & (e.bn == 256)))


def test_more_rows_than_there_are_is_a_sentence(source: Source) -> None:
    with pytest.raises(UserError, match="give --calibrate of at most"):
        validate(source, H100, calibrate=100_000)


def test_cliffs_count_what_they_say() -> None:
    base = [Gemm(m, 4096, 4096, "bf16") for m in (1024, 1025, 2048, 2049, 3072, 3073, 4096, 4097)]
    seconds = np.array([1.0, 1.2, 1.0, 1.2, 1.0, 1.0, 1.0, 0.9])
    predicted = np.array([1.0, 1.1, 1.0, 1.0, 1.0, 1.1, 1.0, 0.9])
    small = Gemm(8, 8, 8, "bf16")
    made = Source(
        "x", "bf16", [*base, small, replace(small, m=9)], ["cublas"] * 10,
        np.append(seconds, [1.0, 2.0]), [()] * 10, {},
    )  # fmt: skip
    found = cliffs(made, np.append(predicted, [1.0, 1.0]))
    assert found["pairs"] == 4  # the small pair is no cliff
    assert found["recall"] == 0.5  # two real steps, one foreseen
    assert found["precision"] == 0.5  # two foreseen, one real
    assert found["recall_down"] == 1.0
    assert 0 < found["rank_correlation"] < 1
    assert cliffs(made.take([0]), predicted[:1])["recall"] is None


def test_errors_of_nothing_are_none() -> None:
    assert Errors.of(np.empty(0), np.empty(0)) == Errors(0, None, None, None)
    found = Errors.of(np.array([1.1, 0.9, 1.0]), np.ones(3))
    assert (found.rows, found.median) == (3, pytest.approx(0.1))


def test_chosen_rows_are_spread_evenly() -> None:
    rng = np.random.default_rng(0)
    features = np.concatenate([rng.normal(0, 1, (900, 2)), rng.normal(20, 1, (100, 2))])
    chosen = choose_rows(features, 100)
    assert len(set(chosen.tolist())) == 100
    assert 5 <= (chosen >= 900).sum() <= 15  # as many as there are
    assert choose_rows(features, 5000).tolist() == list(range(1000))


def test_a_residual_learns_what_is_smooth_and_leaves_noise_alone() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (300, 3))
    smooth = np.sin(2 * x[:, 0]) * 0.2
    found = fit_residual(x[:200], smooth[:200] + 0.01 * rng.standard_normal(200))
    assert found is not None
    mean, spread = found.predict(x[200:])
    left = smooth[200:] - mean
    assert np.abs(left).mean() < 0.25 * np.abs(smooth[200:]).mean()
    assert fit_residual(x, 0.1 * rng.standard_normal(300)) is None
    assert fit_residual(x[: MIN_ROWS - 1], smooth[: MIN_ROWS - 1]) is None
    again = Residual.from_json(json.loads(json.dumps(found.to_json())))
    assert again.predict(x[200:])[0] == pytest.approx(mean)
    assert again.predict(x[200:])[1] == pytest.approx(spread)
    # A row that was not seen is as uncertain as is usual for such rows, and a seen one less.
    assert 0.7 < np.median(spread) < 1.4
    assert np.median(found.predict(x[:200])[1]) < 0.8 * np.median(spread)


def test_a_residual_from_before_trees_were_written_grows_them() -> None:
    x = np.random.default_rng(0).uniform(-2, 2, (200, 3))
    y = 0.1 * x[:, 0]
    old = {"features": x.tolist(), "log_ratios": y.tolist(), "seen": 0.1, "unseen": 0.2}
    mean, spread = Residual.from_json(old).predict(x)
    assert np.abs(mean - y).mean() < 0.01
    assert (spread >= 0.5).all()
    damages: list[dict[str, object]] = [
        {"features": 1.0},
        {"features": [1.0, 2.0]},
        {"features": [[0.0] * 128] * 200},  # more than trees can tell apart
        {"log_ratios": [1.0]},
        {"log_ratios": [math.nan] * 200},
    ]
    for damaged in damages:
        with pytest.raises(ValueError):  # noqa: PT011
            Residual.from_json({**old, **damaged})


@pytest.mark.parametrize("name", ["seen", "unseen"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "0.1", 10**400, None])
def test_a_residual_without_a_doubt_is_refused(name: str, value: object) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (100, 3))
    found = fit_residual(x, 0.1 * x[:, 0])
    assert found is not None
    with pytest.raises(ValueError, match="above 0"):
        Residual.from_json({**found.to_json(), name: value})


def test_a_residual_doubts_most_where_it_is_most_wrong() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1200, 4))
    rough = np.where(x[:, 0] > 0, 0.3 * np.sign(np.sin(20 * x[:, 1])), 0.02 * x[:, 1])
    found = fit_residual(x[:600], rough[:600])
    assert found is not None
    mean, spread = found.predict(x[600:])
    wrong, hard = np.abs(rough[600:] - mean), x[600:, 0] > 0
    assert wrong[hard].mean() > 3 * wrong[~hard].mean()
    assert spread[hard].mean() > 1.5 * spread[~hard].mean()


def test_one_mishap_does_not_teach_a_residual_about_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (300, 2))
    smooth = 0.2 * x[:, 0]
    spoilt = smooth + 0.01 * rng.standard_normal(300)
    spoilt[::30] += 2.5  # twelve times too slow
    found = fit_residual(x, spoilt)
    assert found is not None
    others = np.arange(300) % 30 != 0
    wrong = np.abs(found.predict(x)[0] - smooth)[others]
    assert wrong.mean() < 0.25 * np.abs(smooth).mean()


def test_of_very_many_rows_the_few_that_are_unlike_all_near_them_are_learned() -> None:
    rng = np.random.default_rng(0)
    rows = MANY_ROWS + 2000
    x = rng.uniform(0, 1, (rows, 6))
    x[:, :2] = rng.integers(0, 20, (rows, 2))
    # Like weights whose two sizes are powers of two: five pairs of sizes of four hundred.
    fast = (x[:, 0] == x[:, 1]) & (x[:, 0] % 4 == 0)
    y = 0.02 * x[:, 2] - 0.7 * fast + 0.01 * rng.standard_normal(rows)
    found = fit_residual(x, y)
    assert found is not None
    mean, spread = found.predict(x)
    # Clipped as outliers, they would be predicted like all others.
    assert mean[fast].mean() < -0.3
    assert np.abs(mean[~fast] - y[~fast]).mean() < 0.015
    assert 0.5 < np.median(spread) < 1.2
    # So are a fold's, however few it leaves, but with fewer trees.
    part, alone = (fit_residual(x[:8000], y[:8000], part_of=of) for of in (rows, None))
    assert part is not None
    assert alone is not None
    assert part.predict(x)[0][fast].mean() < -0.3 < alone.predict(x)[0][fast].mean()
    assert len(part.trees.number) < 0.85 * len(alone.trees.number)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_what_slows_some_rows_alone_is_learned_and_no_mishap(share: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (600, 6))
    slow = x[:, 2] < share
    found = fit_residual(x, 0.3 * slow + 0.01 * rng.standard_normal(600))
    assert found is not None
    mean, _ = found.predict(rng.uniform(0, 1, (500, 6)) * [1, 1, 0.8 * share, 1, 1, 1])
    assert np.abs(mean - 0.3).mean() < 0.03


def test_trees_that_agree_in_everything_still_doubt_a_little() -> None:
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.integers(0, 2, 200), rng.uniform(0, 1, 200)]).astype(float)
    found = fit_residual(x, 0.3 * x[:, 0])
    assert found is not None
    _, spread = found.predict(rng.uniform(0, 1, (200, 2)))
    assert spread.min() > 0
    assert spread.max() < 100


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_a_residual_survives_features_that_say_everything_or_nothing(scale: float) -> None:
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.uniform(-1, 1, 120) * scale, np.ones(120), rng.integers(0, 2, 120)])
    found = fit_residual(x, 0.5 * x[:, 2])
    assert found is not None
    mean, spread = found.predict(x)
    assert np.abs(mean - 0.5 * x[:, 2]).mean() < 0.05
    assert np.isfinite(spread).all()


def test_the_learning_curve_falls_and_ends_where_the_rows_do(source: Source) -> None:
    points = learning_curve(source, H100, counts=(32, 128, 100_000))
    rows = [point for point in points if point.holdout == "rows"]
    assert [point.count for point in rows] == [32, 128]
    assert rows[1].errors.mean is not None
    assert rows[0].errors.mean is not None
    assert rows[1].errors.mean < rows[0].errors.mean
    assert "rows calibrated (rows held back)" in curve_text(points, None)


def test_the_noise_floor_is_the_difference_of_two_collections_over_root_two(
    source: Source, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    again = replace(
        source, seconds=source.seconds * (1 + 0.1 * np.sign(rng.standard_normal(len(source))))
    )
    floor = noise_floor(source, again)
    assert floor.mean == pytest.approx(0.1 / np.sqrt(2))
    assert floor.rows == len(source)
    with pytest.raises(UserError, match="no problem in common"):
        noise_floor(source.take([0]), source.take([1]))


def test_the_plots_of_a_validation(found: Validation, tmp_path: Path) -> None:
    curve = [Point("rows", 60, found.errors), Point("rows", 120, found.errors)]
    written = write_validation_plots(found, tmp_path, curve, found.errors)
    assert {"learning-curve", "predicted-measured", "error-by-shape"} <= {p.stem for p in written}
    rows = held_back_table(found)
    assert len(rows) == len(found.tested)
    heat = shapes_data(rows)
    assert heat.index.is_monotonic_increasing
    assert float(np.nanmax(heat.to_numpy())) <= rows["error"].abs().max()


def stairs(n: int, step: float) -> pd.DataFrame:
    """Nine pairs M, M + 1, each taking ``step`` more than it was predicted at M."""
    m = np.array([256 * i + one for i in range(1, 10) for one in (0, 1)])
    predicted = m // 2 * (1 + step * (m % 2))
    return pd.DataFrame(
        {"m": m, "n": n, "k": 512, "limit": "compute", "measured": m, "predicted": predicted}
    )


def test_the_staircase_is_the_line_whose_steps_are_predicted_to_be_the_largest() -> None:
    small, large, unbound = stairs(128, 0.2), stairs(256, 0.5), stairs(512, 0.9)
    unbound["limit"] = "memory"
    line = staircase_data(pd.concat([small, large, unbound], ignore_index=True))
    assert set(line["n"]) == {256}
    assert line["m"].is_monotonic_increasing
    assert line["step"].notna().sum() == 9  # at the first of each pair
    assert line["predicted_step"].max() == pytest.approx(0.5)
    assert staircase_data(unbound).empty


def test_the_staircase_is_drawn_over_linear_axes_with_its_finding_as_title(
    found: Validation,
) -> None:
    line = stairs(1024, 0.5)
    some = [Gemm(int(m), 1024, 512, "bf16") for m in line["m"]]
    names = [found.tested.implementations[0]] * len(some)
    tested = replace(found.tested, problems=some, implementations=names)
    figure = draw_staircase(replace(found, tested=tested), line)
    assert figure is not None
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    drawn, points = axes.get_lines()
    assert np.asarray(points.get_xdata()).tolist() == line["m"].tolist()
    assert np.size(drawn.get_xdata()) > 5 * len(line)  # it is predicted between them
    assert "M 256 → 257" in figure.get_suptitle()
