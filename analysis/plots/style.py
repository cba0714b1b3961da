"""Define the style of all plots, and write plots with a caption to files.

Plots in this style are legible on a projector and accessible to colour-blind readers.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # plots are written to files, so no display is needed

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernels.common.counts import counted
from sweeps.store import make_folder, write_whole

# Okabe and Ito's colours can be distinguished with any colour vision, and the markers in black and
# white.
DTYPE_STYLE = {
    "bf16": ("#0072B2", "o"),
    "fp16": ("#009E73", "s"),
    "tf32": ("#E69F00", "^"),
    "fp32": ("#D55E00", "D"),
    "fp8": ("#CC79A7", "v"),
}
LIMIT_STYLE = {
    "compute": ("#D55E00", "o"),
    "memory": ("#0072B2", "s"),
    "feed": ("#E69F00", "^"),
    "latency": ("#CC79A7", "D"),
    "launch": ("#555555", "v"),
}
NEUTRAL = "#555555"
ERROR_BANDS = ((0.10, 0.16), (0.25, 0.08))
"""Bands of small prediction errors: for each band, its largest relative error and its opacity."""
LEAST_POINTS = 5
"""Minimum number of points in a plotted series. Fewer points show no trend."""

MAX_VECTORS = 5000  # maximum number of points drawn as vectors; more make an SVG slow in browsers
PREDICTION: dict[str, Any] = {"color": "#000000", "linewidth": 1.6, "linestyle": "-", "alpha": 0.75}
RIGHT_OF_AXES: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
"""Place of a legend that would otherwise cover points."""

KINDS = ("png", "svg")
_VARYING_FIELD = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}
"""Metadata field that is left out of written files, by file format. Its value may differ between
two files with the same plot."""

_SETTINGS: dict[str, Any] = {
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.labelsize": 13,
    "legend.fontsize": 11,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    # The size of text depends slightly on the resolution. The layout is therefore computed at the
    # resolution of the PNG file.
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "svg.hashsalt": "rooftile",  # the same data gives the same bytes
    "svg.fonttype": "none",
}


def panels(
    count: int, title: str, size: tuple[float, float] = (10.0, 6.0), share_y: bool = False
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with ``count`` panels side by side, and the axes of each panel.

    ``size`` is the width and height of the figure, in inches.
    """
    with plt.rc_context(_SETTINGS):
        figure, axes = plt.subplots(
            1, count, figsize=size, squeeze=False, sharey=share_y, layout="constrained"
        )
        figure.suptitle(
            verbatim(title), fontsize=16, fontweight="bold", x=0.01, ha="left", wrap=True
        )
    return figure, list(axes[0])


def enough(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Return the rows of each series that has at least LEAST_POINTS rows.

    The rows of a series have the same values in the columns ``by``.
    """
    if rows.empty:
        return rows
    return rows[rows.groupby(list(by))[by[0]].transform("size") >= LEAST_POINTS]


def error_bars(axes: Axes, sizes: pd.Series, low: pd.Series, high: pd.Series, color: str) -> None:
    """Draw a vertical line from ``low`` to ``high`` at each size, except where an end is NaN."""
    axes.vlines(sizes, low, high, color=color, linewidth=0.9, alpha=0.6)


def scatter_predicted(axes: Axes, rows: pd.DataFrame, size: float, alpha: float) -> None:
    """Plot predicted against measured time in µs on log-log axes, with bands of ±10% and ±25%.

    The colour and the marker of a point show the predicted bottleneck.

    ``rows`` has the columns ``measured`` and ``predicted`` (times in µs) and ``limit`` (the
    predicted bottleneck). The optional columns ``low`` and ``high`` are the ends of the measured
    time's interval, also in µs. ``size`` is the size of a marker, in points.
    """
    # 1. Shade the bands around the diagonal, from end to end of both axes.
    times = rows[["measured", "predicted"]]
    ends = np.array([times.min(axis=None) / 1.5, times.max(axis=None) * 1.5])
    for band, opacity in ERROR_BANDS:
        axes.fill_between(
            ends,
            ends * (1 - band),
            ends * (1 + band),
            color=NEUTRAL,
            alpha=opacity,
            linewidth=0,
            label=f"±{band:.0%}",
        )
    # 2. Draw the cases of each limit. Many points are drawn as an image, without intervals.
    has_many_points = len(rows) > MAX_VECTORS
    for limit, (color, marker) in LIMIT_STYLE.items():
        cases = rows[rows["limit"] == limit]
        if cases.empty:
            continue
        if "low" in cases and not has_many_points:
            axes.hlines(
                cases["predicted"],
                cases["low"],
                cases["high"],
                color=color,
                linewidth=0.8,
                alpha=0.5,
            )
        axes.plot(
            cases["measured"],
            cases["predicted"],
            marker,
            color=color,
            markersize=size,
            alpha=alpha,
            rasterized=has_many_points,
            label=f"{limit}-bound, {counted(len(cases), 'case')}",
        )
    # 3. Give both axes the same ends. In the legend, markers are at least 6 points wide.
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured time, µs",
        ylabel="predicted time, µs",
    )
    axes.legend(loc="upper left", markerscale=max(1.0, 6.0 / size))


def verbatim(text: str) -> str:
    """Escape dollar signs, so that matplotlib does not read them as the beginning of a formula."""
    return text.replace("$", r"\$")


def save(
    figure: Figure, caption: str, folder: Path, name: str, kinds: Sequence[str] = KINDS
) -> Path:
    """Write a figure with a caption below it, and return the path of the first written file.

    The figure is closed after the last file is written. ``kinds`` are the formats to write:
    ``png``, ``svg`` or ``pdf``.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    make_folder(folder)
    files = [folder / f"{name}.{kind}" for kind in kinds]
    with plt.rc_context(_SETTINGS):
        figure.supxlabel(verbatim(caption), fontsize=9, color=NEUTRAL, x=0.01, ha="left", wrap=True)
        # Compute the layout once for all formats.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for path, kind in zip(files, kinds, strict=True):
            image = io.BytesIO()
            figure.savefig(image, format=kind, metadata={_VARYING_FIELD[kind]: None})
            write_whole(path, image.getvalue())
    plt.close(figure)
    return files[0]
