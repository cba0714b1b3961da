from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from analysis.imports.public import PublicRows, read_source
from analysis.model.features import Inputs
from analysis.model.query import Query
from analysis.plots.model_quality import (
    curve_title,
    draw_curve,
    draw_staircase,
    shapes_data,
    staircase_data,
    write_validation_plots,
)
from analysis.validation.design import choose_rows
from analysis.validation.error_summary import Errors
from analysis.validation.holdout import Validation, validate
from analysis.validation.learning_curve import CurvePoint, learning_curve, noise_floor
from analysis.validation.validation_report import (
    basis,
    curve_text,
    held_out_table,
    validation_text,
)
from kernels.common.errors import UserError
from kernels.machine import known_machine
from kernels.problem import Conv, Gemm, Problem
from kernels.timemodel.constants import default_constants, foreign_constants
from kernels.timemodel.estimate import ALGORITHMS
from tests.studies.cliffs import cliffs
from tests.support.command_line import ANALYSIS, said
from tests.support.published import PUBLISHED, SLUG
from tests.support.synthetic import H100, gemm_cases, model_law, problems, random_sizes, record

A100 = known_machine("nvidia-a100-pcie-80gb")
LAW = replace(default_constants("hopper", "bf16"), compute=0.6, launch=5e-6, dram=0.6)


pytestmark = pytest.mark.xdist_group("validate")  # one worker calibrates for several tests

SIDES = (64, 128, 256, 512, 1024, 2048)


def rows_of(problem: Problem) -> int:
    assert isinstance(problem, Gemm)
    return problem.m


def a_source(folder: Path, count: int = 260, noise: float = 0.02) -> PublicRows:
    cases = gemm_cases(dict.fromkeys(random_sizes(count)))
    truth = model_law(LAW)(problems(cases))
    rng = np.random.default_rng(0)
    record(folder, cases, truth * np.exp(noise * rng.standard_normal(len(truth))))
    return read_source(folder, H100)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> PublicRows:
    return a_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def found(source: PublicRows) -> Validation:
    """Return a validation after calibration on 60 rows, which takes seconds."""
    return validate(source, H100, calibrate=60)


def test_the_document_has_what_was_promised(found: Validation) -> None:
    document = found.to_json()
    assert set(document) == {
        "machine", "source", "dtype", "rows", "skipped", "calibrated", "seed", "constants_from",
        "median", "mean", "p95", "coverage_90", "neighbours", "above_1e11", "holdout", "baselines",
        "by_algorithm", "tile_agreement", "constants", "prior", "weights",
    }  # fmt: skip
    assert set(document["baselines"]) == {
        "datasheet", "three_constants", "four_fitted", "physics",
    }  # fmt: skip
    assert document["rows"] == len(found.tested)
    assert document["calibrated"] == 60
    json.dumps(document, allow_nan=False)


def test_a_known_law_is_learned_and_beats_every_baseline(source: PublicRows) -> None:
    found = validate(source, H100, calibrate=120)
    assert found.errors.median is not None
    assert found.errors.median < 0.03  # the noise is 2%
    for name in ("datasheet", "three_constants", "four_fitted"):
        baseline = found.baselines[name]
        assert baseline is not None
        assert baseline.median is not None
        assert baseline.median > 1.5 * found.errors.median
    assert 0.85 <= found.coverage <= 0.98
    text = validation_text(found)
    assert "four fitted" in text
    assert "left out" not in text
    skipped = replace(source, skipped={"other_machines": 0, "other_dtypes": 2, "unreadable": 0})
    text = validation_text(replace(found, source=skipped))
    assert "\nMeasurements left out: 2 in other dtypes\n" in text


@pytest.mark.slow
def test_the_choice_of_rows_never_looks_at_a_time(source: PublicRows, found: Validation) -> None:
    shuffled = PublicRows(
        source.name, source.dtype, source.problems, source.implementations,
        source.seconds[::-1].copy(), source.kernels, source.skipped,
    )  # fmt: skip
    blind = validate(shuffled, H100, calibrate=60)
    assert blind.calibrated.tolist() == found.calibrated.tolist()
    again = validate(source, H100, calibrate=60, seed=1)
    assert again.calibrated.tolist() != found.calibrated.tolist()


def test_without_calibration_the_constants_are_anothers(source: PublicRows) -> None:
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


@pytest.mark.slow
def test_of_folds_every_row_is_tested_by_a_fit_that_had_not_seen_it(source: PublicRows) -> None:
    source = source.take(slice(0, 130))
    found = validate(source, H100, holdout="folds")
    assert len(found.tested) == len(found.calibrated) == len(source)
    assert found.baselines["physics"] is None
    assert found.errors.median is not None
    assert 0.005 < found.errors.median < 0.03
    # Times that are three times too long are not predicted, because no fit used them to predict
    # themselves.
    wild = source.seconds.copy()
    wild[::20] *= 3
    again = validate(replace(source, seconds=wild), H100, holdout="folds")
    missed = again.prediction.estimate.time[::20] / wild[::20]
    assert np.median(missed) < 0.5


def convolutions(count: int) -> PublicRows:
    """Return fp32 3×3 layers on an A100, each with the time of its fastest algorithm by a law."""
    rng = np.random.default_rng(0)
    problems = [
        Conv.parse(f"{n},{c},{h},{h},{k},3,3,1,1,1,1,fp32,nchw")
        for n, c, h, k in zip(
            rng.integers(1, 64, count), rng.integers(3, 512, count), rng.integers(5, 64, count),
            rng.integers(3, 512, count), strict=True,
        )
    ]  # fmt: skip
    law = replace(default_constants("ampere", "fp32"), compute=0.7, launch=2e-5, dram=0.7)
    guess = Inputs.from_query(A100, Query.plain(problems, "cudnn")).estimate(law)
    named = {
        0: "ampere_scudnn_128x64_relu_medium_nn_v1",
        1: "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        2: "winogradForwardData4x4",
    }
    kernels = [(named[int(a)],) for a in guess.algorithm]
    seconds = guess.time * np.exp(0.02 * rng.standard_normal(count))
    return PublicRows("made", "fp32", problems, ["cudnn"] * count, seconds, kernels, {})


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
    with pytest.raises(
        UserError, match="algorithm 'fft'; use one of implicit-gemm, winograd-2x2, winograd"
    ):
        source.by_algorithm("fft")


@pytest.mark.slow
def test_a_prediction_never_sees_the_names_of_its_own_kernels() -> None:
    source = convolutions(120)
    found = validate(source, A100, calibrate=40)
    renamed = list(source.kernels)
    for i in set(range(120)) - set(found.calibrated.tolist()):
        renamed[i] = ("fft2d_r2c_32x32",)
    again = validate(replace(source, kernels=renamed), A100, calibrate=40)
    assert again.prediction.estimate.time == pytest.approx(found.prediction.estimate.time)


def test_tiles_are_compared_where_names_have_them(source: PublicRows, found: Validation) -> None:
    assert found.tile_agreement is None
    e = found.prediction.estimate
    named = [("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT",)] * len(source)
    agreement = validate(replace(source, kernels=named), H100, calibrate=60).tile_agreement
    assert agreement == pytest.approx(np.mean((e.bm == 128) & (e.bn == 256)))


def test_more_rows_than_there_are_is_a_sentence(source: PublicRows) -> None:
    with pytest.raises(UserError, match="measurements? to calibrate on; give at most"):
        validate(source, H100, calibrate=100_000)


def test_pairs_of_shapes_have_one_implementation() -> None:
    shapes = [Gemm(1024, 1024, k, "bf16") for k in (1024, 1100)]
    seconds = np.array([1e-5, 2e-5])
    one = PublicRows("x", "bf16", shapes, ["cublas", "cublas"], seconds, [(), ()], {})
    two = replace(one, implementations=["cublas", "mine"])
    assert validate(one, H100, calibrate=0).neighbours["pairs"] == 1
    assert validate(two, H100, calibrate=0).neighbours["pairs"] == 0


def test_the_floor_of_versions_is_only_that_of_bf16_gemms(source: PublicRows) -> None:
    assert "Floor on nvidia-h100-sxm" in validation_text(validate(source, H100, calibrate=0))
    halves = [replace(problem, dtype="fp16") for problem in source.problems]
    in_fp16 = replace(source, dtype="fp16", problems=halves)
    assert "Floor on" not in validation_text(validate(in_fp16, H100, calibrate=0))
    conv = Conv.parse("32,64,28,28,64,3,3,1,1,1,1,bf16,nhwc")
    with_conv = replace(source, problems=[conv, *source.problems[1:]])
    assert "Floor on" not in validation_text(validate(with_conv, H100, calibrate=0))


def test_cliffs_count_what_they_say() -> None:
    base = [Gemm(m, 4096, 4096, "bf16") for m in (1024, 1025, 2048, 2049, 3072, 3073, 4096, 4097)]
    seconds = np.array([1.0, 1.2, 1.0, 1.2, 1.0, 1.0, 1.0, 0.9])
    predicted = np.array([1.0, 1.1, 1.0, 1.0, 1.0, 1.1, 1.0, 0.9])
    small = Gemm(8, 8, 8, "bf16")
    made = PublicRows(
        "x", "bf16", [*base, small, replace(small, m=9)], ["cublas"] * 10,
        np.append(seconds, [1.0, 2.0]), [()] * 10, {},
    )  # fmt: skip
    found = cliffs(made, np.append(predicted, [1.0, 1.0]))
    assert found["pairs"] == 4  # the pair of small shapes is left out
    assert found["recall"] == 0.5  # one of two measured cliffs is predicted
    assert found["precision"] == 0.5  # one of two predicted cliffs was measured
    assert found["recall_down"] == 1.0
    assert 0 < found["rank_correlation"] < 1
    assert cliffs(made.take([0]), predicted[:1])["recall"] is None


def test_errors_of_nothing_are_none() -> None:
    assert Errors.from_times(np.empty(0), np.empty(0)) == Errors(0, None, None, None)
    found = Errors.from_times(np.array([1.1, 0.9, 1.0]), np.ones(3))
    assert (found.rows, found.median) == (3, pytest.approx(0.1))


def test_chosen_rows_are_spread_evenly() -> None:
    rng = np.random.default_rng(0)
    features = np.concatenate([rng.normal(0, 1, (900, 2)), rng.normal(20, 1, (100, 2))])
    chosen = choose_rows(features, 100)
    assert len(set(chosen.tolist())) == 100
    assert 5 <= (chosen >= 900).sum() <= 15  # a tenth, like their share of all rows
    assert choose_rows(features, 5000).tolist() == list(range(1000))


@pytest.mark.long
def test_the_learning_curve_falls_and_ends_where_the_rows_do(source: PublicRows) -> None:
    points = learning_curve(source, H100, counts=(32, 128, 100_000))
    rows = [point for point in points if point.holdout == "rows"]
    assert [point.count for point in rows] == [32, 128]
    assert rows[1].errors.mean is not None
    assert rows[0].errors.mean is not None
    assert rows[1].errors.mean < rows[0].errors.mean
    assert "calibration measurements (hold-out: rows)" in curve_text(points, None)


def test_the_noise_floor_is_the_difference_of_two_collections_over_root_two(
    source: PublicRows, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    again = replace(
        source, seconds=source.seconds * (1 + 0.1 * np.sign(rng.standard_normal(len(source))))
    )
    floor = noise_floor(source, again)
    assert floor.mean == pytest.approx(0.1 / np.sqrt(2))
    assert floor.rows == len(source)
    with pytest.raises(UserError, match="no case in common"):
        noise_floor(source.take([0]), source.take([1]))
    # Two implementations of the same shapes are not repetitions of each other.
    slower = replace(source, implementations=["cutlass"] * len(source), seconds=2 * source.seconds)
    both = PublicRows.joined([source, slower])
    assert noise_floor(both, both).mean == 0


def test_the_learning_curve_needs_a_dtype_of_the_machine(source: PublicRows) -> None:
    with pytest.raises(UserError):
        learning_curve(replace(source, dtype="fp8"), A100)


def test_the_plots_of_a_validation(found: Validation, tmp_path: Path) -> None:
    curve = [CurvePoint("rows", 60, found.errors), CurvePoint("rows", 120, found.errors)]
    written = write_validation_plots(found, tmp_path, curve, found.errors)
    assert {"learning-curve", "predicted-measured", "error-by-shape"} <= {p.stem for p in written}
    assert basis(found).startswith("calibrated on 60 measurements, tested on ")
    none = replace(found, calibrated=found.calibrated[:0], constants_from="nvidia-a100-sxm-80gb")
    assert basis(none).startswith("predicted without calibration (constants: nvidia-a100-sxm-80gb)")
    rows = held_out_table(found)
    assert len(rows) == len(found.tested)
    heat = shapes_data(rows)
    assert heat.index.is_monotonic_increasing
    assert float(np.nanmax(heat.to_numpy())) <= rows["error"].abs().max()


def test_a_learning_curve_only_has_the_hold_outs_with_points(found: Validation) -> None:
    curve = [CurvePoint("rows", 60, found.errors)]
    figure = draw_curve(curve, None)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["other measurements"]
    plt.close(figure)


def test_the_title_of_a_learning_curve_gives_each_error_once(found: Validation) -> None:
    curve = [CurvePoint("rows", 60, found.errors)]
    median = f"{found.errors.median:.1%}"
    title = f"The median error is {median} after calibration on 60 measurements"
    assert curve_title(curve) == title
    longer = [*curve, CurvePoint("rows", 1200, found.errors)]
    assert curve_title(longer) == f"{title}. After calibration on 1,200, it is {median}"


def stairs(n: int, step: float) -> pd.DataFrame:
    """Return nine pairs M, M + 1, whose predicted times differ by the share ``step``."""
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


def test_the_staircase_has_gemms_of_one_layout(found: Validation) -> None:
    line = stairs(1024, 0.5)
    sizes = [int(m) for m in line["m"]]
    gemms = [Gemm(m, 1024, 512, "bf16", "nt") for m in sizes]
    others = [Gemm(m, 1024, 512, "bf16", "tn") for m in sizes[1:]]
    rows = pd.concat([line, line[1:].assign(measured=1e6)], ignore_index=True)
    names = [found.tested.implementations[0]] * len(rows)
    tested = replace(found.tested, problems=[*gemms, *others], implementations=names)
    figure = draw_staircase(replace(found, tested=tested), rows)
    assert figure is not None
    _, points = figure.axes[0].get_lines()
    assert np.asarray(points.get_ydata()).tolist() == line["measured"].tolist()


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
    assert np.size(drawn.get_xdata()) > 5 * len(line)  # sizes in between are predicted, too
    assert figure.get_suptitle().startswith("Adding one row at M = 256 changes the measured time")


def test_priors_are_refused_for_a_cpu() -> None:
    result = said(
        ANALYSIS, "validate", str(PUBLISHED / SLUG), "--machine", SLUG, "--prior", "h100",
    )  # fmt: skip
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("--prior works only for GPUs")


def test_repeated_measurements_are_read_in_the_dtype_under_test(tmp_path: Path) -> None:
    sizes = list(dict.fromkeys(random_sizes(60)))
    fp16 = [f"{m},{n},{k},fp16,{m * n * k / 1e8 + 5}" for m, n, k in sizes]
    head = "m,n,k,dtype,time_us"
    once, again = tmp_path / "once.csv", tmp_path / "again.csv"
    once.write_text("\n".join([head, *fp16, ""]))
    # Without a dtype, the rows in bf16 would be read, which the first file lacks.
    again.write_text("\n".join([head, "8,8,8,bf16,5", *fp16, ""]))
    result = said(
        ANALYSIS, "validate", str(once), "--machine", H100.slug, "--calibrate", "0",
        "--again", str(again),
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "noise floor" in result.out
