"""How good the model is, for a talk: curve, scatter, errors by shape and a staircase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.plots.style import NEUTRAL, PREDICTION, panels, save, scatter_predicted
from analysis.validation.errors import Errors
from analysis.validation.holdout import Validation
from analysis.validation.learning_curve import Point
from analysis.validation.report import held_back_table

_STYLES = {"rows": ("#0072B2", "o"), "levels": ("#D55E00", "s")}


def write_validation_plots(
    found: Validation, folder: Path, curve: Sequence[Point] = (), floor: Errors | None = None
) -> list[Path]:
    """Everything that there is data for, as PNG and SVG; returns the PNGs."""
    rows = held_back_table(found)
    figures = {
        "learning-curve": draw_curve(curve, floor) if curve else None,
        "predicted-measured": draw_scatter(rows),
        "error-by-shape": draw_shapes(rows),
        "staircase": draw_staircase(rows),
    }
    basis = f"{len(found.calibrated)} rows calibrated, {len(rows)} others shown"
    caption = f"{found.machine.name}  ·  {found.source.dtype}  ·  {found.source.name}  ·  {basis}"
    return [
        save(figure, caption, folder, name)
        for name, figure in figures.items()
        if figure is not None
    ]


def draw_curve(curve: Sequence[Point], floor: Errors | None) -> Figure:
    """Median and mean error over the rows calibrated; a perfect model's as dotted lines."""
    figure, axes = panels(2, "Error on rows that were not seen, by rows calibrated", (12.0, 5.5))
    for panel, what in zip(axes, ("median", "mean"), strict=True):
        for holdout, (color, marker) in _STYLES.items():
            some = [point for point in curve if point.holdout == holdout]
            label = {"rows": "other rows", "levels": "M, N and K all unseen"}[holdout]
            errors = [100 * getattr(point.errors, what) for point in some]
            panel.plot([point.count for point in some], errors, color=color, marker=marker,
                       label=label)  # fmt: skip
        if floor is not None:
            panel.axhline(100 * getattr(floor, what), color=NEUTRAL, linestyle=":",
                          label="noise of one collection")  # fmt: skip
        panel.set(xscale="log", xlabel="rows calibrated", ylabel=f"{what} error, %", ylim=(0, None))
        panel.set_xticks(sorted({point.count for point in curve}))
        panel.get_xaxis().set_major_formatter("{x:.0f}")
        panel.minorticks_off()
    axes[0].legend()
    return figure


def draw_scatter(rows: pd.DataFrame) -> Figure:
    """Predicted over measured time, log-log, by what the model finds binding."""
    error = rows["error"].abs()
    title = f"Held-back rows: median error {error.median():.1%}, mean {error.mean():.1%}"
    figure, (axes,) = panels(1, title, (8.0, 7.0))
    scatter_predicted(axes, rows, size=2.5, alpha=0.5)
    return figure


def shapes_data(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean absolute error by powers of two of M (rows) and of N·K (columns)."""
    m = 2 ** np.floor(np.log2(rows["m"])).astype(int)
    weights = 2 ** (2 * np.floor(np.log2(rows["n"].astype(float) * rows["k"]) / 2)).astype(int)
    return rows["error"].abs().groupby([m.rename("m"), weights.rename("nk")]).mean().unstack()


def draw_shapes(rows: pd.DataFrame) -> Figure:
    """A heat map of the error over M and the size of the weights."""
    data = shapes_data(rows)
    figure, (axes,) = panels(1, "Where the error sits", (9.0, 7.0))
    image = axes.imshow(100 * data.to_numpy(), origin="lower", aspect="auto", cmap="cividis",
                        vmin=0)  # fmt: skip
    axes.set_xticks(range(len(data.columns)), [f"2^{int(np.log2(v))}" for v in data.columns])
    axes.set_yticks(range(len(data.index)), [str(v) for v in data.index])
    axes.set(xlabel="N × K", ylabel="M, rounded down to a power of two")
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label="mean error, %")
    return figure


def staircase_data(rows: pd.DataFrame) -> pd.DataFrame:
    """The line of constant N and K with the most values of M over 256, sorted by M."""
    large = rows[rows["m"] > 256]
    if large.empty:
        return large
    lines = large.groupby(["n", "k"])["m"].nunique()
    # Of equally long lines the middle one: neither the smallest weights nor the largest.
    longest = lines[lines == lines.max()].index
    n, k = longest[len(longest) // 2]
    return large[(large["n"] == n) & (large["k"] == k)].sort_values("m")


def draw_staircase(rows: pd.DataFrame) -> Figure | None:
    """Measured and predicted time over M, where N and K stay."""
    line = staircase_data(rows)
    if len(line) < 8:
        return None
    n, k = int(line["n"].iloc[0]), int(line["k"].iloc[0])
    figure, (axes,) = panels(1, "The staircase: one row more, at times one wave more")
    axes.plot(line["m"], line["measured"], "o", color=_STYLES["rows"][0], label="measured")
    axes.plot(line["m"], line["predicted"], **PREDICTION, label="predicted")
    axes.set(xlabel=f"M   (N = {n}, K = {k})", ylabel="time, µs", xscale="log", yscale="log")
    axes.legend()
    return figure
