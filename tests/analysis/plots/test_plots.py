"""The data of plots are right, and every plot can be written."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.text import Annotation

from analysis.model.fitted import Analysis, analyse
from analysis.model.predict import LIMIT_WORDS
from analysis.plots import PLOTS, conv, roofline, rules_overview, scaling, write_plots
from analysis.plots.style import LIMIT_STYLE, panels, scatter_predicted
from analysis.recordings.load import load
from analysis.slices import series
from kernels.machine import known_machine
from kernels.problem import Conv, Gemm
from kernels.timemodel.estimate import LIMITS
from sweeps.cases.case import Case
from tests.support.published import RECORDED
from tests.support.synthetic import H100, model_law, problems, record


@pytest.fixture(autouse=True)
def _no_figure_stays_open() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Return a GPU's recording with the sweeps of all plots and the times of the model."""
    gemms = {
        "square": [(size, size, size) for size in range(256, 4097, 256)],
        "steps": [(m, 4096, 4096) for m in [*range(1024, 3072, 128), 1025, 2049]],
        "alignment": [
            size
            for off in range(4096, 4113)
            for size in ((off, 4096, 4096), (4096, off, 4096), (4096, 4096, off))
        ],
    }
    convs = {
        "conv-channels": [("nhwc", "fprop", c) for c in (32, 60, 63, 64, 65, 72, 128)],
        "conv-layouts": [
            (layout, pass_, c)
            for pass_ in ("fprop", "dgrad", "wgrad")
            for c in (64, 128)
            for layout in ("nhwc", "nchw")
        ],
    }
    cases = list(
        dict.fromkeys(
            Case(name, Gemm(*size, "bf16"), "cublas")
            for name, sizes in gemms.items()
            for size in sizes
        )
    )
    cases += [
        Case(name, Conv.parse(f"32,{c},28,28,{c},3,3,1,1,1,1,bf16,{layout},{pass_}"), "cudnn")
        for name, kinds in convs.items()
        for layout, pass_, c in kinds
    ]
    times = model_law()(problems(cases))
    folder = tmp_path_factory.mktemp("results") / "nvidia-h100-sxm"
    canary = {"samples": 40, "median_us": 10.0, "spread": 0.02, "drift": -0.02, "certain": True}
    return analyse(load(record(folder, cases, times, canary=canary)))


def test_every_plot_is_written_as_png_and_svg(analysis: Analysis) -> None:
    written = write_plots(analysis)
    assert [path.stem for path in written] == list(PLOTS)
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        svg = path.with_suffix(".svg").read_text(encoding="utf-8")
        # Machine, versions and date are below every plot.
        assert "NVIDIA H100 80GB HBM3" in svg
        assert "torch 2.13.0" in svg
        assert "2026-01-02" in svg


def test_nothing_is_drawn_from_fewer_than_five_points(tmp_path: Path) -> None:
    squares = [Case("square", Gemm(m, m, m, "bf16"), "cublas") for m in (256, 512, 768, 1024)]
    pairs = [
        Case("conv-layouts", Conv.parse(f"32,64,28,28,64,3,3,1,1,1,1,bf16,{layout}"), "cudnn")
        for layout in ("nhwc", "nchw")
    ]
    cases = [*squares, *pairs]
    times = model_law()(problems(cases))
    written = write_plots(analyse(load(record(tmp_path, cases, times))))
    assert [path.stem for path in written] == ["roofline", "accuracy"]


@pytest.mark.filterwarnings("error")
def test_a_real_recording_is_drawn_without_a_warning(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path / RECORDED.name)
    written = write_plots(analyse(load(tmp_path / RECORDED.name)), kinds=("png",))
    assert [path.stem for path in written] == list(PLOTS)


@pytest.mark.long
def test_the_same_data_gives_the_same_bytes(analysis: Analysis) -> None:
    folder = analysis.recording.folder / "plots"
    write_plots(analysis)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_plots(analysis)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_long_title_takes_two_lines() -> None:
    figure, (axes,) = panels(1, "A finding about four dtypes needs many words: " + "word " * 20)
    figure.canvas.draw()
    title, drawn = figure._suptitle, figure.canvas.get_renderer()  # type: ignore[attr-defined]
    assert title is not None
    extent = title.get_window_extent(drawn)
    assert extent.x1 <= figure.bbox.x1
    assert extent.y0 >= axes.get_window_extent(drawn).y1


def test_a_recording_without_a_sweep_draws_what_it_has(tmp_path: Path) -> None:
    cases = [Case("mine", Gemm(512 + 64 * i, 512, 512, "bf16"), "cublas") for i in range(20)]
    times = model_law()(problems(cases))
    written = write_plots(analyse(load(record(tmp_path, cases, times))))
    assert [path.stem for path in written] == ["roofline", "accuracy"]


def test_the_roofline_has_every_case_below_every_ceiling(analysis: Analysis) -> None:
    rows = series.roofline_series(analysis.table)
    assert len(rows) == len(analysis.table)
    roofs = roofline.roof_table(H100, ["bf16", "tf32", "fp16", "fp32"])
    assert dict(zip(roofs["dtype"], roofs["tflops"], strict=True)) == {
        "fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4,
    }  # fmt: skip
    assert roofs["ridge"].max() == pytest.approx(989.4e12 / 3.352e12)
    assert (rows["tflops"] <= 989.4).all()
    assert (rows["tflops"] <= rows["intensity"] * 3.352 * 1.001).all()


def test_labels_of_the_roofline_do_not_overlap(analysis: Analysis) -> None:
    cases = analysis.table
    table = pd.concat([cases.assign(dtype=dtype) for dtype in ("bf16", "fp16", "tf32", "fp32")])
    table["intensity"] = np.geomspace(0.5, 2700, len(table))
    figure = roofline.draw(replace(analysis, table=table))
    assert figure is not None
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [child for child in axes.get_children() if isinstance(child, Annotation)]
    assert len(labels) == 7  # the memory's, and that of the ridge and of the peak of three roofs
    extents = [label.get_window_extent() for label in labels]
    for one, other in itertools.combinations(extents, 2):
        assert not one.overlaps(other)
    slope = next(line for line in axes.lines if np.size(line.get_xdata()) == 2)
    for extent in extents:
        assert not slope.get_transform().transform_path(slope.get_path()).intersects_bbox(extent)


def test_legends_beside_the_axes_do_not_cover_points(analysis: Analysis) -> None:
    for draw in (
        scaling.draw_square,
        scaling.draw_alignment,
        conv.draw_channels,
        conv.draw_layouts,
    ):
        figure = draw(analysis)
        assert figure is not None
        figure.draw_without_rendering()
        *_, axes = figure.axes
        legend = axes.get_legend()
        assert legend is not None
        assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
        assert legend.get_window_extent().x1 <= figure.bbox.x1
        assert figure.get_tightbbox().x0 >= 0


def test_steps_have_their_edges(analysis: Analysis) -> None:
    lines = series.steps_series(analysis.table)
    assert set(lines) == {"m"}
    assert lines["m"]["m"].is_monotonic_increasing
    tiles, waves = scaling.edges(H100, "bf16", "m", lines["m"])
    assert tiles == list(range(1024, 2945, 256))
    assert waves == [1024, 2048]  # a row has 32 tiles, so four rows fit on 132 SMs at once


def test_the_legend_of_steps_names_the_dtypes_and_edges_of_all_panels(analysis: Analysis) -> None:
    steps = analysis.table[analysis.table["sweep"] == "steps"]
    along_n = steps.rename(columns={"m": "n", "n": "m"}).assign(dtype="tf32")
    table = pd.concat([analysis.table, along_n])
    figure = scaling.draw_steps(replace(analysis, table=table))
    assert figure is not None
    (legend,) = filter(None, (axes.get_legend() for axes in figure.axes))
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["bf16", "tile edge in bf16", "wave edge in bf16", "predicted",
                      "tf32", "tile edge in tf32", "wave edge in tf32"]  # fmt: skip


@pytest.mark.parametrize(("kind", "joined"), [("gpu", False), ("cpu", True)])
def test_a_gpus_aligned_and_misaligned_sizes_are_not_joined(
    analysis: Analysis, kind: str, joined: bool
) -> None:
    steps = analysis.table[analysis.table["sweep"] == "steps"]
    along_n = steps.rename(columns={"m": "n", "n": "m"})
    machine = replace(analysis.recording.machine, kind=kind)
    recording = replace(analysis.recording, machine=machine)
    figure = scaling.draw_steps(replace(analysis, recording=recording, table=along_n))
    assert figure is not None
    (axes,) = figure.axes
    predicted = [line for line in axes.get_lines() if line.get_linestyle() == "-"]
    sizes = [np.asarray(line.get_xdata()) for line in predicted]
    assert any((part % 8 == 0).any() and (part % 8 > 0).any() for part in sizes) == joined


def test_a_cpu_has_no_known_tile_edges(analysis: Analysis) -> None:
    lines = series.steps_series(analysis.table)
    assert scaling.edges(replace(H100, kind="cpu"), "bf16", "m", lines["m"]) == ([], [])


def test_alignment_is_relative_to_the_round_size(analysis: Analysis) -> None:
    rows = series.alignment_series(analysis.table)
    assert set(rows["along"]) == {"m", "n", "k"}
    assert (rows[rows["offset"] == 0]["relative"] == 1.0).all()
    odd_k = rows[(rows["along"] == "k") & (rows["offset"] % 8 != 0)]
    assert (odd_k["relative"] < 0.95).all()  # the model predicts that these are slower
    assert (rows["relative_lo"] <= rows["relative"]).all()
    assert (rows["relative_hi"] >= rows["relative"]).all()
    # Every ratio includes the uncertainty of the base, but the base's ratio to itself has none.
    base = rows["offset"] == 0
    assert (rows[base][["relative_lo", "relative_hi"]] == 1.0).all(axis=None)
    widened = rows[~base]["relative_hi"] / rows[~base]["relative"]
    # Both times have intervals of ±1%. The interval of the ratio is wider, because times in another
    # process would differ by as much as the canary GEMM shows.
    assert (widened > 1.01 / 0.99).all()
    assert (widened < 1.03).all()


def test_speeds_without_intervals_are_inside_the_axes(analysis: Analysis) -> None:
    table = analysis.table.assign(steady_error=np.nan)
    figure = scaling.draw_alignment(replace(analysis, table=table))
    assert figure is not None
    low, high = figure.axes[0].get_ylim()
    assert series.alignment_series(table)["relative"].between(low, high).all()


def test_the_legend_of_alignment_names_the_dtypes_of_all_panels(analysis: Analysis) -> None:
    along_m = analysis.table[(analysis.table["n"] == 4096) & (analysis.table["k"] == 4096)]
    table = pd.concat([analysis.table, along_m.assign(dtype="fp16")])
    figure = scaling.draw_alignment(replace(analysis, table=table))
    assert figure is not None
    assert [axes.get_xlabel()[0] for axes in figure.axes] == ["M", "N", "K"]
    (legend,) = filter(None, (axes.get_legend() for axes in figure.axes))
    assert {text.get_text() for text in legend.get_texts()} == {"bf16", "fp16"}


def test_a_round_size_with_few_offsets_does_not_hide_a_smaller_one(analysis: Analysis) -> None:
    line = analysis.table[(analysis.table["sweep"] == "alignment") & (analysis.table["m"] >= 4096)]
    line = line[(line["n"] == 4096) & (line["k"] == 4096)]
    small = line.assign(m=line["m"] - 3072, n=1024, k=1024)
    # The large round size has three offsets along M and along N in each of two dtypes.
    along_m = line[line["m"] < 4099]
    along_n = along_m[along_m["m"] > 4096].rename(columns={"m": "n", "n": "m"})
    in_bf16 = pd.concat([along_m, along_n]).assign(dtype="bf16")
    sparse = pd.concat([in_bf16, in_bf16.assign(dtype="fp16")])
    figure = scaling.draw_alignment(replace(analysis, table=pd.concat([small, sparse])))
    assert figure is not None
    assert [axes.get_xlabel() for axes in figure.axes] == ["M − 1024"]
    assert scaling.draw_alignment(replace(analysis, table=sparse)) is None


def test_layout_pairs_are_the_same_convolution(analysis: Analysis) -> None:
    pairs = series.layout_series(analysis.table)
    assert len(pairs) == 6
    assert (pairs["ratio"] >= 1).all()  # NCHW moves its activations once more
    assert (pairs["ratio_lo"] < pairs["ratio"]).all()


def test_times_of_different_runs_are_not_compared(analysis: Analysis) -> None:
    table = analysis.table
    is_nhwc = table["layout"] == "nhwc"
    other_run = table.assign(run=table["run"].where(~is_nhwc, "2026-01-03T00:00:00Z"))
    assert series.layout_series(other_run).empty
    is_base = (table["m"] == 4096) & (table["n"] == 4096) & (table["k"] == 4096)
    other_run = table.assign(run=table["run"].where(~is_base, "2026-01-03T00:00:00Z"))
    assert series.alignment_series(other_run).empty


def test_channels_are_sorted_and_forward_only(analysis: Analysis) -> None:
    rows = series.channel_series(analysis.table)
    assert rows["c"].tolist() == [32, 60, 63, 64, 65, 72, 128]


def test_predictions_beyond_all_measured_times_are_on_the_axes() -> None:
    rows = pd.DataFrame({"measured": 100.0, "predicted": [30.0, 100.0, 180.0], "limit": "memory"})
    _, (axes,) = panels(1, "title", (4.0, 4.0))
    scatter_predicted(axes, rows, size=4, alpha=1.0)
    low, high = axes.get_ylim()
    assert axes.get_xlim() == (low, high)
    assert low < 30
    assert high > 180


def test_accuracy_counts_every_row(analysis: Analysis) -> None:
    rows = series.accuracy_series(analysis.table)
    assert len(rows) == len(analysis.table)
    assert rows["error"].abs().median() < 0.01  # the recorded times are those of the model


@pytest.mark.slow
def test_a_cpus_roofs_say_that_they_were_measured(analysis: Analysis, tmp_path: Path) -> None:
    gpu = known_machine("nvidia-h100-sxm")
    cpu = replace(gpu, kind="cpu", generation="cpu", capability=None, slug="cpu-x-2t")
    cases = [Case("mine", Gemm(512 + 64 * i, 512, 512, "bf16"), "onednn") for i in range(20)]
    times = model_law()(problems(cases))
    recording = load(record(tmp_path / "cpu-x-2t", cases, times, machine=cpu))
    write_plots(analyse(recording))
    svg = (tmp_path / "cpu-x-2t" / "plots" / "roofline.svg").read_text(encoding="utf-8")
    assert "peak, measured" in svg


def test_every_limit_has_its_words_and_its_colour() -> None:
    assert set(LIMIT_WORDS) == set(LIMIT_STYLE) == set(LIMITS)


def test_the_overview_of_rules_names_a_users_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def caption_of(*documents: dict[str, Any]) -> str:
        saved: list[str] = []
        monkeypatch.setattr(
            rules_overview, "save", lambda figure, caption, *_: saved.append(caption)
        )
        rules_overview.write_overview(documents, tmp_path)
        return saved[0]

    rule = {"statement": "s", "effect": 1.2, "lo": 1.1, "hi": 1.3, "verdict": "holds"}
    table = {"name": "a GPU", "package": "tables 1.0", "source": "vLLM", "rules": [rule]}
    file = {"name": "another", "package": "", "source": "times.csv", "rules": [rule]}
    assert caption_of(table) == "bf16 GEMMs, tables 1.0  ·  lines are 95% intervals"
    assert caption_of(table, file) == "tables 1.0, times.csv  ·  lines are 95% intervals"
