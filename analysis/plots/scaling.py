"""Plot speed or time against the sizes of GEMMs.

The plots show square GEMMs, cliffs along M, N and K, and the effect of alignment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.model.fitted import Analysis
from analysis.plots.style import (
    DTYPE_STYLE,
    NEUTRAL,
    PREDICTION,
    RIGHT_OF_AXES,
    enough,
    error_bars,
    panels,
)
from analysis.plots.titles import alignment_title, square_title, steps_title
from analysis.slices.series import (
    DIMENSIONS,
    LARGEST_OFFSET,
    alignment_series,
    square_series,
    steps_series,
)
from analysis.units import rate_unit
from kernels.config import ceil_div, large_tile, next_wave_edge
from kernels.machine import Machine


def draw_square(analysis: Analysis) -> Figure | None:
    """Plot speed against the size of a square GEMM, with the peak of each dtype.

    Dtypes with fewer than five points are left out. The result is None if no dtype is left.
    """
    rows = enough(square_series(analysis.table), "dtype")
    if rows.empty:
        return None
    figure, (axes,) = panels(1, square_title(rows))
    machine = analysis.recording.machine
    peaks = {str(dtype): machine.peak(str(dtype)) / 1e12 for dtype in rows["dtype"].unique()}
    factor, unit = rate_unit(max(peaks.values()))
    for dtype, group in rows.groupby("dtype", sort=False):
        color, marker = DTYPE_STYLE[str(dtype)]
        axes.plot(group["m"], group["tflops"] * factor, marker, color=color, label=str(dtype))
        low = group["tflops_lo"] * factor
        high = group["tflops_hi"] * factor
        error_bars(axes, group["m"], low, high, color)
        predicted = group["predicted_tflops"] * factor
        axes.plot(group["m"], predicted, **{**PREDICTION, "color": color})
        axes.axhline(peaks[str(dtype)] * factor, color=color, linewidth=1, linestyle=":")
    axes.plot([], [], **PREDICTION, label="predicted")
    axes.plot([], [], color=NEUTRAL, linewidth=1, linestyle=":", label="peak")
    axes.set(xlabel="M = N = K", ylabel=unit, ylim=(0, None))
    axes.legend(**RIGHT_OF_AXES)
    return figure


def edges(
    machine: Machine, dtype: str, along: str, line: pd.DataFrame
) -> tuple[list[int], list[int]]:
    """Return the tile edges and the wave edges along a line of GEMMs that differ in one size.

    The tile is assumed to be that of a large GEMM (:func:`kernels.config.large_tile`). At a tile
    edge, one more element in the dimension ``along`` needs another row or column of tiles. At a
    wave edge, one more element needs another wave. Both lists are empty along K, because the result
    is split into tiles only along M and N. They are also empty on a CPU, because the block sizes of
    its vendor libraries are not known.

    ``line`` is a table of unbatched GEMMs with the columns m, n and k. It may contain several
    dtypes, but the edges are those of ``dtype``.
    """
    if along == "k" or machine.kind == "cpu":
        return [], []
    low = int(line[along].min())
    high = int(line[along].max())
    # 1. Find the size of a tile along the line and across it. The GEMM's size across the line is
    # the same in all cases.
    tile_rows, tile_columns = large_tile(machine.generation, dtype)
    if along == "m":
        tile_along = tile_rows
        tile_across = tile_columns
        size_across = int(line["n"].iloc[0])
    else:
        tile_along = tile_columns
        tile_across = tile_rows
        size_across = int(line["m"].iloc[0])
    # 2. List the edges. The next wave edge may lie beyond the line.
    tile_edges = list(range(ceil_div(low, tile_along) * tile_along, high + 1, tile_along))
    wave_edges = {
        next_wave_edge(size, size_across, tile_along, tile_across, machine.sms)
        for size in tile_edges
    }
    return tile_edges, sorted(edge for edge in wave_edges if edge <= high)


def draw_steps(analysis: Analysis) -> Figure | None:
    """Plot time against size, with a panel for each dimension.

    In each panel, dtypes with fewer than five points are left out. Dotted lines mark the tile edges
    of the most frequent dtype, and dashed lines mark its wave edges. The result is None if no panel
    has a dtype left.
    """
    # 1. Keep the dimensions along which a dtype has enough points.
    lines = {}
    for along, line in steps_series(analysis.table).items():
        dense = enough(line, "dtype")
        if not dense.empty:
            lines[along] = dense
    if not lines:
        return None
    figure, all_axes = panels(len(lines), steps_title(lines), (max(8.0, 5.0 * len(lines)), 5.5))
    machine = analysis.recording.machine
    for axes, (along, line) in zip(all_axes, lines.items(), strict=True):
        # 2. Draw the measured and the predicted times of each dtype.
        for dtype, group in line.groupby("dtype", sort=False):
            color, marker = DTYPE_STYLE[str(dtype)]
            error_bars(axes, group[along], group["time_lo_us"], group["time_hi_us"], color)
            axes.plot(
                group[along], group["time_us"], marker, color=color, markersize=4, label=str(dtype)
            )
            # Along N and K, most dtypes use different kernels for misaligned sizes, so the
            # predictions for these sizes have a separate line. All cases are in layout nt. M is not
            # the length of a row of any matrix there, so every M is aligned.
            joined_groups = [group]
            if machine.kind == "gpu" and along != "m":
                is_multiple = group[along] % 8 == 0
                joined_groups = [group[is_multiple], group[~is_multiple]]
            for joined in joined_groups:
                predicted_us = joined["predicted_time_us"]
                axes.plot(joined[along], predicted_us, **{**PREDICTION, "color": color})
        # 3. Draw the edges. Another dtype may have another tile, so only the edges of the most
        # frequent dtype are drawn.
        edge_dtype = str(line["dtype"].mode().iloc[0])
        tile_edges, wave_edges = edges(machine, edge_dtype, along, line)
        tile_label = f"tile edge in {edge_dtype}"
        for edge in tile_edges:
            axes.axvline(edge, color=NEUTRAL, linewidth=0.6, linestyle=":", label=tile_label)
        # If every tile edge is a wave edge, the dotted lines already show them.
        wave_label = f"wave edge in {edge_dtype}"
        if len(wave_edges) < len(tile_edges):
            for edge in wave_edges:
                axes.axvline(edge, color=NEUTRAL, linewidth=1.2, linestyle="--", label=wave_label)
        fixed = ", ".join(
            f"{name.upper()} = {int(line[name].iloc[0])}" for name in DIMENSIONS if name != along
        )
        axes.set(xlabel=f"{along.upper()}   ({fixed})", ylabel="time, µs")
    # 4. Draw one legend for all panels.
    all_axes[0].plot([], [], **PREDICTION, label="predicted")
    entries = _legend_entries(all_axes)
    all_axes[0].legend(handles=[*entries.values()], labels=[*entries], loc="upper left")
    return figure


def _legend_entries(all_axes: Sequence[Axes]) -> dict[str, Artist]:
    """Return the legend entries of all panels: each label once, with its first handle."""
    entries: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    return entries


def draw_alignment(analysis: Analysis) -> Figure | None:
    """Plot speed, relative to the speed at a round size, against the offset from this size.

    A series has the points of one dimension, round size and dtype. Series with fewer than five
    points are left out. Only the largest remaining round size is drawn. The result is None if no
    series remains.
    """
    # The points of a plotted series are those of one dimension, round size and dtype.
    rows = enough(alignment_series(analysis.table), "along", "base", "dtype")
    if rows.empty:
        return None
    base = int(rows["base"].max())
    rows = rows[rows["base"] == base]
    dimensions = [along for along in DIMENSIONS if (rows["along"] == along).any()]
    size = (max(8.0, 2.0 + 4.0 * len(dimensions)), 5.0)
    figure, all_axes = panels(len(dimensions), alignment_title(rows), size, share_y=True)
    # The axes include every speed and every known interval. The round size itself has the speed 1.
    # A speed without an interval has NaN ends, which min and max ignore.
    low = float(rows[["relative", "relative_lo"]].min().min())
    high = float(rows[["relative", "relative_hi"]].max().max())
    margin = 0.06 * (high - low)
    for axes, along in zip(all_axes, dimensions, strict=True):
        for dtype, group in rows[rows["along"] == along].groupby("dtype", sort=False):
            color, marker = DTYPE_STYLE[str(dtype)]
            # Matplotlib takes the distances from each value to both ends of its interval.
            ends = group[["relative_lo", "relative_hi"]].to_numpy().T
            to_ends = np.abs(ends - group["relative"].to_numpy())
            axes.errorbar(
                group["offset"],
                group["relative"],
                yerr=to_ends,
                color=color,
                marker=marker,
                linewidth=1.2,
                markersize=5,
                label=str(dtype),
            )
        axes.axhline(1.0, color=NEUTRAL, linewidth=0.8)
        axes.set(
            xlabel=f"{along.upper()} − {base}",
            xticks=range(0, LARGEST_OFFSET + 1, 4),
            ylim=(low - margin, high + margin),
        )
    all_axes[0].set_ylabel(f"speed relative to {base}")
    # All panels share one legend, but some dtypes have enough points in only some of the panels.
    entries = _legend_entries(all_axes)
    all_axes[-1].legend(handles=[*entries.values()], labels=[*entries], **RIGHT_OF_AXES)
    return figure
