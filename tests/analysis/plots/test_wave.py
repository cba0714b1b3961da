"""The title of the wave plot says what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from analysis.commands.plot import _draw_wave_plot, _print_cliffs
from analysis.model.basis import find_basis
from analysis.plots.wave import _explain, cliff_at, draw_wave
from analysis.recordings import imported
from analysis.recordings.runs import load_runs
from kernels.common.program import RESULTS
from kernels.problem import Gemm
from sweeps.cases.case import CONFIRM
from tests.support.command_line import analysis
from tests.support.synthetic import gemm_cases, model_law, problems, random_sizes, record

SIZES = [*range(64, 1281, 64), 1281, *range(1344, 3000, 64)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record an H100 whose times are those of the model, except for one cliff of 81%."""
    folder = tmp_path_factory.mktemp("results")
    line = [(m, 768, 10240) for m in SIZES]
    cases = gemm_cases(dict.fromkeys([*line, *random_sizes(80)]))
    seconds = model_law()(problems(cases))
    sizes = [case.problem.m for case in cases]  # type: ignore[union-attr]
    seconds[sizes.index(1281)] = 1.81 * seconds[sizes.index(1280)]
    record(folder / "nvidia-h100-sxm", cases, seconds)
    return folder


def test_the_title_is_the_largest_step(results: Path) -> None:
    basis = find_basis("nvidia-h100-sxm", results)
    rows = load_runs(results / "nvidia-h100-sxm").products
    line = rows[(rows["n"] == 768) & (rows["k"] == 10240)]
    figure = draw_wave(basis, Gemm(1, 768, 10240, "bf16"), line)
    title = figure.get_suptitle()
    assert title.startswith("One more row, M 1280 → 1281. The time goes from ")
    assert title.endswith(" µs (+81%)")
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    shown = [size for size in SIZES if size <= 2 * 1281]
    assert f"measured, {len(shown)} sizes" in labels
    edges = 0
    for name, style in (("tile", ":"), ("wave", "--")):
        told = sum(int(label.split()[0]) for label in labels if f" {name} edge" in label)
        drawn = [
            line for line in axes.lines
            if line.get_linestyle() == style and np.size(line.get_xdata())
        ]  # fmt: skip
        assert len(drawn) == told
        edges += told
    assert edges > 0
    before, after = (
        basis.model.predict(basis.query([Gemm(m, 768, 10240, "bf16")])).frame().iloc[0]
        for m in (1280, 1281)
    )
    texts = " ".join(text.get_text() for text in axes.texts)
    same = (before["tile"], before["split"]) == (after["tile"], after["split"])
    assert ("another kernel" in texts) == (not same)
    assert axes.get_xscale() == axes.get_yscale() == "linear"
    plt.close(figure)


def test_a_cliff_that_the_model_does_not_predict_is_not_attributed(results: Path) -> None:
    basis = find_basis("nvidia-h100-sxm", results)
    gemms = [Gemm(m, 768, 10240, "bf16") for m in (1280, 1281)]
    predicted = basis.model.predict(basis.query(gemms)).frame()
    predicted.loc[:, "time_us"] = [100.0, 105.0]
    predicted.loc[:, "tile"] = ["128x128", "128x256"]
    for after, words in (
        (110.0, "attributes the cliff to another"),
        (180.0, "but a change of +5.0% instead"),
    ):
        figure, axes = plt.subplots()
        ratio = after / 100.0
        cliff = pd.Series(
            {"m": 1280, "after": 1281, "time_us": 100.0, "after_us": after, "ratio": ratio}
        )
        _explain(axes, cliff, predicted.assign(m=[1280, 1281]))
        assert words in axes.texts[-1].get_text()
        plt.close(figure)


def test_the_legend_says_that_the_model_was_fitted_only_if_it_was(results: Path) -> None:
    basis = find_basis("nvidia-h100-sxm", results)
    rows = load_runs(results / "nvidia-h100-sxm").products
    line = rows[(rows["n"] == 768) & (rows["k"] == 10240)]
    for calibrated in (True, False):
        figure = draw_wave(replace(basis, calibrated=calibrated), Gemm(1, 768, 10240, "bf16"), line)
        legend = figure.axes[0].get_legend()
        assert legend is not None
        labels = " ".join(text.get_text() for text in legend.get_texts())
        assert ("also fitted to these cases" in labels) == calibrated
        plt.close(figure)


def test_the_model_was_not_fitted_to_pad_and_choose_queries(tmp_path: Path) -> None:
    line = [(m, 768, 10240) for m in (1280, 1281)]
    cases = gemm_cases(line, CONFIRM)
    plan = {"budget_s": 10.0, "shards": 1, "sweeps": [CONFIRM], "left_out": {}, "cases": []}
    record(tmp_path / "nvidia-h100-sxm", cases, model_law()(problems(cases)), plan=plan)
    basis = find_basis("nvidia-h100-sxm", tmp_path)
    assert basis.calibrated
    rows = load_runs(tmp_path / "nvidia-h100-sxm").products
    figure = draw_wave(basis, Gemm(1, 768, 10240, "bf16"), rows)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert "predicted" in labels
    assert "measured, 2 sizes" in labels
    plt.close(figure)


def test_a_size_that_two_implementations_computed_is_counted_once(results: Path) -> None:
    basis = find_basis("nvidia-h100-sxm", results)
    line = pd.DataFrame({"m": [1024, 2048], "n": 768, "k": 10240, "time_us": [10.0, 20.0]})
    both = pd.concat([line.assign(implementation=name) for name in ("cublas", "cutlass")])
    figure = draw_wave(basis, Gemm(1, 768, 10240, "bf16"), both)
    assert figure.get_suptitle() == "No significant cliff in 2 measured sizes"
    plt.close(figure)


def test_a_step_can_be_named_and_one_that_was_not_measured_cannot(results: Path) -> None:
    rows = load_runs(results / "nvidia-h100-sxm").products
    line = rows[(rows["n"] == 768) & (rows["k"] == 10240)]
    named, none = cliff_at(line, 1280), cliff_at(line, 5)
    assert named is not None
    assert named["after"] == 1281
    assert none is None


@pytest.mark.filterwarnings("error")
def test_equal_times_are_not_a_cliff(results: Path) -> None:
    line = pd.DataFrame({"m": [1280, 1281], "n": 768, "k": 10240, "time_us": 100.0})
    assert cliff_at(line, None) is None
    cliff = cliff_at(line, 1280)
    assert cliff is not None
    predicted = pd.DataFrame(
        {"m": [1280, 1281], "tile": ["128x128", "128x256"], "split": 1, "tiles": 60, "waves": 1.0,
         "time_us": [100.0, 105.0]}
    )  # fmt: skip
    figure, axes = plt.subplots()
    _explain(axes, cliff, predicted)
    words = "predicts another kernel, but a change of +5.0% instead of the measured +0%"
    assert words in axes.texts[-1].get_text()
    plt.close(figure)


def test_own_measurements_may_be_confirmed_by_every_public_collection(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An own run that only measured queries keeps the kind of the imported table."""
    rows = load_runs(results / "nvidia-h100-sxm").products
    collection = rows[["m", "n", "k", "dtype", "time_us"]]
    monkeypatch.setattr(imported, "read_collections", lambda folder: {"vLLM 1": collection})
    public = replace(find_basis("nvidia-h100-sxm", results), kind="public")
    own = replace(public, measured="measured 2026-01-01")
    _print_cliffs(public, "bf16", results, json=False)
    assert "tables confirm" not in capsys.readouterr().err
    _print_cliffs(own, "bf16", results, json=False)
    note = capsys.readouterr().err
    assert "(measured 2026-01-01), of which other tables confirm 1." in note


def test_the_command_draws_finds_and_says_what_is_wrong(results: Path, tmp_path: Path) -> None:
    where = ("--results", str(results), "--machine", "nvidia-h100-sxm")
    drawn = analysis("plot", "wave", *where, "--n", "768", "--k", "10240", "-o", str(tmp_path),
                     "--format", "svg")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert [path.suffix for path in tmp_path.iterdir()] == [".svg"]
    found = analysis("plot", "wave", *where, "--find", "--json")
    assert found.returncode == 0, found.stderr
    up = json.loads(found.stdout)["up"][0]
    assert (up["m"], up["after"], up["n"], up["k"]) == (1280, 1281, 768, 10240)
    assert (
        "Slower at the next larger M:\n  M 1280 → 1281, N 768"
        in analysis("plot", "wave", *where, "--find").stdout
    )
    for arguments, words in (
        (("wave", *where), "needs --n and --k"),
        (("wave", *where, "--n", "768", "--k", "10240", "--m", "5"), "M 5 was not measured"),
        (("wave", *where, "--n", "7", "--k", "7", "--m", "5"), "leave --m out"),
        (("wave", *where, "--find", "--dtype", "fp16"), "no unbatched fp16 GEMM"),
        (("wave", *where, "--find", "-o", str(tmp_path)), "leave --output and --format out"),
        (("wave", *where, "--find", "--format", "pdf"), "leave --output and --format out"),
        (("roofline", *where, "--find"), "are only for `plot wave`"),
        (("rofline", *where), "did you mean 'roofline'"),
        (("roofline", *where, "--format", "gif"), "--format is 'gif'; use one of png, svg, pdf"),
        (("roofline", *where, "--dtype", "fp32"), "--dtype is 'fp32'; use bf16."),
    ):
        told = analysis("plot", *arguments)
        assert told.returncode == 2, told.stdout
        assert words in told.stderr


def test_a_class_that_nobody_measured_is_predicted(tmp_path: Path) -> None:
    drawn = analysis("plot", "wave", "--machine", "nvidia-h200", "--n", "768", "--k", "10240",
                     "--results", str(tmp_path))  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert "No bf16 GEMM with this N and K was measured" in drawn.stderr
    assert (tmp_path / "nvidia-h200" / "plots").is_dir()


def test_a_size_that_several_sweeps_timed_is_drawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []

    def draw(_basis: object, _gemm: Gemm, line: pd.DataFrame, _size: None) -> Figure:
        lines.append(line)
        return Figure()

    monkeypatch.setattr("analysis.plots.wave.draw_wave", draw)
    basis = find_basis("cpu-intel-xeon-avx512bf16-1t", RESULTS)
    _draw_wave_plot(basis, Gemm(1, 512, 512, "fp32"), None, ("png",), tmp_path, RESULTS)
    (line,) = lines
    rows = load_runs(RESULTS / "published" / "cpu-intel-xeon-avx512bf16-1t").products
    same = rows[(rows["dtype"] == "fp32") & (rows["n"] == 512) & (rows["k"] == 512)]
    assert set(same[same["m"] == 512]["sweep"]) > {"square", "steps"}
    assert line["m"].is_unique
    assert 512 in set(line["m"])
