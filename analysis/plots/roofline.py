"""Plot measured and predicted speeds under the machine's roofs: its memory limit and its peaks."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.model.fitted import Analysis
from analysis.plots.style import (
    DTYPE_STYLE,
    LEAST_POINTS,
    LIMIT_STYLE,
    MAX_VECTORS,
    NEUTRAL,
    error_bars,
    panels,
)
from analysis.plots.titles import roofline_title
from analysis.slices.series import roofline_series
from analysis.units import rate, rate_unit
from kernels.common.counts import counted
from kernels.machine import Machine

_LABEL_SHARE = 0.18  # width of a label left of a point, as a share of the plot's width


def roof_table(machine: Machine, dtypes: list[str]) -> pd.DataFrame:
    """Return a table with one row for each of the ``dtypes`` that the machine supports.

    Returns:
        The columns ``dtype``, ``tflops`` (the peak in TFLOP/s) and ``ridge`` (the intensity in
        FLOP/byte at which the memory limit reaches the peak).
    """
    with_peak = [dtype for dtype in machine.peaks if dtype in dtypes]
    return pd.DataFrame(
        {
            "dtype": with_peak,
            "tflops": [machine.peak(dtype) / 1e12 for dtype in with_peak],
            "ridge": [machine.ridge(dtype) for dtype in with_peak],
        }
    )


def draw(analysis: Analysis) -> Figure | None:
    """Draw the roofline on log-log axes, with measured and predicted speeds.

    Filled points are measured speeds, and hollow points are predicted speeds. A grey line joins
    each measured speed to its prediction. The colour of a point shows the predicted bottleneck, and
    the marker shows the dtype. The result is None for fewer than five cases.
    """
    rows = roofline_series(analysis.table, analysis.recording.cache)
    machine = analysis.recording.machine
    if len(rows) < LEAST_POINTS:
        return None
    roofs = roof_table(machine, list(rows["dtype"].unique()))
    factor, unit = rate_unit(float(roofs["tflops"].max()))
    intensity = rows["intensity"]
    measured = rows["tflops"] * factor
    predicted = rows["predicted_tflops"] * factor
    # 1. Draw each case as a hollow and a filled point, joined by a line.
    figure, (axes,) = panels(1, roofline_title(rows, machine), (12.5, 6.5))
    axes.set(
        xscale="log",
        yscale="log",
        ylabel=unit,
        xlabel="arithmetic intensity, FLOP per byte of minimum traffic",
    )
    has_many_points = len(rows) > MAX_VECTORS
    axes.vlines(
        intensity,
        measured,
        predicted,
        color="#BBBBBB",
        linewidth=0.6,
        rasterized=has_many_points,
    )
    for dtype, (_, marker) in DTYPE_STYLE.items():
        for limit, (color, _) in LIMIT_STYLE.items():
            is_drawn = (rows["dtype"] == dtype) & (rows["limit"] == limit)
            if not is_drawn.any():
                continue
            axes.plot(
                intensity[is_drawn],
                predicted[is_drawn],
                marker,
                color=color,
                alpha=0.6,
                markersize=4,
                fillstyle="none",
                rasterized=has_many_points,
            )
            if not has_many_points:
                low = rows.loc[is_drawn, "tflops_lo"] * factor
                high = rows.loc[is_drawn, "tflops_hi"] * factor
                error_bars(axes, intensity[is_drawn], low, high, color)
            axes.plot(
                intensity[is_drawn],
                measured[is_drawn],
                marker,
                color=color,
                alpha=0.75,
                markersize=5,
                markeredgewidth=0,
                rasterized=has_many_points,
            )
    # 2. Draw the roofs over the whole width of the plot.
    left = intensity.min() / 1.5
    right = intensity.max() * 1.5
    _draw_roofs(axes, machine, roofs, (left, right), factor)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom=0.5 * min(measured.min(), predicted.min()))
    _draw_legend(axes, rows)
    return figure


def _draw_legend(axes: Axes, rows: pd.DataFrame) -> None:
    # Lines without points give the legend its entries.
    for limit, (color, _) in LIMIT_STYLE.items():
        count = int((rows["limit"] == limit).sum())
        if count:
            axes.plot(
                [], [], "s", color=color, label=f"limited by {limit}, {counted(count, 'case')}"
            )
    for dtype, (_, marker) in DTYPE_STYLE.items():
        count = int((rows["dtype"] == dtype).sum())
        if count:
            axes.plot([], [], marker, color=NEUTRAL, label=f"{dtype}, {counted(count, 'case')}")
    axes.plot([], [], "o", color=NEUTRAL, fillstyle="none", label="hollow: predicted")
    # Right of the plot, the legend hides no case. The labels of the peaks are above it.
    axes.legend(loc="lower left", bbox_to_anchor=(1.0, 0.0))


def _draw_roofs(
    axes: Axes, machine: Machine, roofs: pd.DataFrame, ends: tuple[float, float], factor: float
) -> None:
    """Draw and label the slope of the memory limit and the level of each peak.

    ``ends`` are the smallest and the largest intensity on the axis, in FLOP/byte. ``factor``
    converts TFLOP/s to the plot's unit.
    """
    left, right = ends
    # The limits of a CPU are measured, and its labels say so.
    label_suffix = ", measured" if machine.kind == "cpu" else ""
    # 1. Draw the slope up to the last ridge. If all ridges are left of the plot or near its left
    # end, draw the slope up to twice the smallest intensity, so that a part of it is visible.
    slope = machine.bandwidth / 1e12 * factor  # in the plot's unit per FLOP/byte
    slope_end = max(roofs["ridge"].max(), 2 * left)
    intensities = np.array([left, slope_end])
    axes.plot(intensities, intensities * slope, color=NEUTRAL, linewidth=2)
    # 2. Label the slope. Its label and those of the ridges are above the slope, which is usually an
    # empty place: a case can only be there if some of its data stay in a cache. The slope's label
    # is as far left as it fits, because the ridges' labels are further right.
    # The axis is logarithmic, so a power is a share of its width.
    label_intensity = min(left * (right / left) ** _LABEL_SHARE, slope_end)
    axes.annotate(
        f"memory{label_suffix}\n{machine.bandwidth / 1e9:,.0f} GB/s",
        (label_intensity, label_intensity * slope),
        xytext=(-10, 4),
        textcoords="offset points",
        ha="right",
        color=NEUTRAL,
    )
    # 3. Draw and label the peaks. Dtypes with the same peak share a roof and its label. The labels
    # of peaks are right of the plot. Each label is one line, because labels may be close: many
    # peaks differ by a factor of two.
    for _, same_roof in roofs.groupby("tflops"):
        peak_tflops = float(same_roof["tflops"].iloc[0])
        level = peak_tflops * factor
        ridge = float(same_roof["ridge"].iloc[0])
        axes.plot([ridge, right], [level, level], color=NEUTRAL, linewidth=2)
        # Left of a ridge near the left end, the label would be on the axis. Right of the ridge, it
        # may cover points of dtypes with a higher peak.
        is_left = math.log(ridge / left) < _LABEL_SHARE * math.log(right / left)
        axes.annotate(
            f"ridge {ridge:.3g} FLOP/byte",
            (ridge, level),
            xytext=(8 if is_left else -8, 2),
            textcoords="offset points",
            ha="left" if is_left else "right",
            color=NEUTRAL,
            fontsize=10,
        )
        axes.annotate(
            f"{', '.join(same_roof['dtype'])} peak{label_suffix}: {rate(peak_tflops)}",
            (right, level),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=NEUTRAL,
            fontsize=10,
        )
