"""Draw the wave plot: time against M for one class of GEMMs, with tile and wave edges.

The GEMMs of a class differ only in M.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.model.basis import Basis
from analysis.plots.style import DTYPE_STYLE, NEUTRAL, PREDICTION, panels
from analysis.slices.cliffs import neighbouring_pairs
from analysis.units import signed_percent, three_digits
from kernels.common.counts import counted
from kernels.config import ceil_div
from kernels.problem import Gemm

_BEYOND = 2.0  # end of the plot, as a multiple of the M after the cliff
_MOST_MARKED = 60  # maximum number of edges of a kind to draw; more are only counted
_ROUND = 16  # sizes of the predicted line are multiples of this, in addition to measured sizes
_EXPLAINED = 0.5  # share of a cliff's log ratio that the model must predict to explain the cliff
_DEFAULT_END = 2048  # end of the plot in M, if nothing was measured


def cliff_at(line: pd.DataFrame, size: int | None) -> pd.Series | None:
    """Return the cliff that the wave plot shows.

    The result is a row of :func:`analysis.slices.cliffs.neighbouring_pairs`, or None if
    ``line`` has no such cliff.

    Args:
        line: measured GEMMs of one class.
        size: the smaller M of the cliff; None for the largest significant cliff, upwards or
            downwards.
    """
    pairs = neighbouring_pairs(line)
    # A ratio without an interval counts as certain, but a ratio of 1 is not a cliff.
    is_cliff = pairs["certain"] & (pairs["ratio"] != 1)
    cliffs = pairs[is_cliff] if size is None else pairs[pairs["m"] == size]
    if cliffs.empty:
        return None
    # A drop to half the time is as large as a rise to twice the time.
    return cliffs.loc[np.abs(np.log(cliffs["ratio"])).idxmax()]


def draw_wave(basis: Basis, gemm: Gemm, line: pd.DataFrame, size: int | None = None) -> Figure:
    """Draw the wave plot.

    Args:
        basis: the model that predicts the times, and where it comes from.
        gemm: a GEMM of the class; its M is not used.
        line: measured GEMMs of the class, with the columns ``m``, ``n``, ``k``, ``time_us`` and, if
            they are known, ``implementation``, ``time_lo_us`` and ``time_hi_us``.
        size: smaller M of the cliff that the title describes, which must be in ``line`` together
            with a neighbouring larger M; None for the largest significant cliff, if there is one.
    """
    # 1. Choose the range of M, and predict over it.
    cliff = cliff_at(line, size)
    if cliff is not None:
        end = int(_BEYOND * cliff["after"])
    elif len(line):
        end = int(line["m"].max())
    else:
        end = _DEFAULT_END
    line = line[line["m"] <= end]
    # Predict only at measured sizes and multiples of 16, because the cost of misalignment at other
    # sizes would hide the cliffs.
    round_sizes = np.arange(_ROUND, end + 1, _ROUND)
    sizes = np.union1d(round_sizes, line["m"].to_numpy(dtype=int))
    predicted = _predicted(basis, gemm, sizes)
    measured_count = line["m"].nunique()
    figure, (axes,) = panels(1, _title(cliff, predicted, measured_count), (11.0, 6.5))
    # 2. Draw the predicted line. Its label says if the model was fitted to the measured points. The
    # model is not fitted to the times of a run that only measured pad/choose queries.
    is_fitted = basis.calibrated and not basis.measured and not line.empty
    label = "predicted by a model that was also fitted to these cases" if is_fitted else "predicted"
    axes.plot(predicted["m"], predicted["time_us"], **PREDICTION, label=label)
    # 3. Mark the edges of the kernel that is predicted at the cliff or, without a cliff, at the
    # largest M.
    kernel_m = predicted["m"].iloc[-1] if cliff is None else cliff["m"]
    kernel_row = predicted[predicted["m"] == kernel_m].iloc[-1]
    _mark_edges(axes, kernel_row, predicted, basis.model.machine.sms)
    # 4. Draw the measured points and the known intervals of their times, and explain the cliff.
    color, _ = DTYPE_STYLE.get(gemm.dtype, (NEUTRAL, "o"))
    if len(line):
        axes.plot(
            line["m"],
            line["time_us"],
            "o",
            color=color,
            markersize=6,
            zorder=4,
            label=f"measured, {counted(measured_count, 'size')}",
        )
    if "time_lo_us" in line and line["time_lo_us"].notna().any():
        bars = line[line["time_lo_us"].notna()]
        axes.vlines(bars["m"], bars["time_lo_us"], bars["time_hi_us"], color=color)
    if cliff is not None:
        _explain(axes, cliff, predicted)
    gemm_class = f"N = {gemm.n}, K = {gemm.k}, {gemm.dtype}, layout {gemm.layout}"
    axes.set(xlabel=f"M, rows   ({gemm_class})", ylabel="time, µs", xlim=(0, end), ylim=(0, None))
    axes.legend(loc="upper left", framealpha=1.0)
    return figure


def _predicted(basis: Basis, gemm: Gemm, sizes: np.ndarray) -> pd.DataFrame:
    gemms = [replace(gemm, m=int(size)) for size in sizes]
    return basis.model.predict(basis.query(gemms)).frame().assign(m=sizes)


def _title(cliff: pd.Series | None, predicted: pd.DataFrame, measured_count: int) -> str:
    """Return the title of the plot; ``predicted`` is in ascending order of M."""
    if cliff is None and measured_count:
        return f"No significant cliff in {counted(measured_count, 'measured size')}"
    if cliff is None:
        last = predicted.iloc[-1]
        prediction = f"{three_digits(last['time_us'])} µs at M = {int(last['m'])}"
        return f"The prediction is {prediction}; nothing was measured"
    added_rows = int(cliff["after"] - cliff["m"])
    more_rows = "One more row" if added_rows == 1 else f"{added_rows} more rows"
    return (
        f"{more_rows}, M {int(cliff['m'])} → {int(cliff['after'])}. The time goes from "
        f"{three_digits(cliff['time_us'])} to {three_digits(cliff['after_us'])} µs "
        f"({cliff['ratio'] - 1:+.0%})"
    )


def _explain(axes: Axes, cliff: pd.Series, predicted: pd.DataFrame) -> None:
    """Draw an arrow at the cliff, and write what the model predicts before and after the cliff."""
    # 1. Draw an arrow to the middle of the cliff.
    middle_us = (cliff["time_us"] + cliff["after_us"]) / 2
    axes.annotate(
        f"{int(cliff['m'])} → {int(cliff['after'])}",
        (cliff["m"], middle_us),
        xytext=(-80, 24),
        textcoords="offset points",
        fontsize=13,
        arrowprops={"arrowstyle": "->"},
    )
    # 2. Describe the predictions for both sizes.
    before = predicted[predicted["m"] == cliff["m"]].iloc[0]
    after = predicted[predicted["m"] == cliff["after"]].iloc[0]
    text_lines = [
        f"At M = {int(row['m'])}, the model predicts {three_digits(row['time_us'])} µs. It expects "
        f"{counted(int(row['tiles']), 'tile')} of {row['tile']} in "
        f"{counted(int(row['waves']), 'wave')}"
        for row in (before, after)
    ]
    # 3. Compare the kernels. Two kernels are the same if they have the same tile and split K into
    # the same number of parts.
    if (before["tile"], before["split"]) != (after["tile"], after["split"]):
        cause = "another kernel"
        if before["waves"] != after["waves"]:
            cause += " and a different number of waves"
        predicted_ratio = after["time_us"] / before["time_us"]
        # The ratio is 1 if both sizes take the same time, which leaves nothing to explain.
        is_cliff = cliff["ratio"] != 1
        if is_cliff and np.log(predicted_ratio) / np.log(cliff["ratio"]) >= _EXPLAINED:
            text_lines.append(f"The model attributes the cliff to {cause}")
        else:
            predicted_change = signed_percent(predicted_ratio - 1)
            text_lines.append(
                f"The model predicts {cause}, but a change of {predicted_change} instead of the "
                f"measured {cliff['ratio'] - 1:+.0%}"
            )
    # 4. Write the text at the lower right, where it rarely covers points.
    axes.text(
        0.99,
        0.03,
        "\n".join(text_lines),
        transform=axes.transAxes,
        ha="right",
        fontsize=11,
        bbox={"facecolor": "white", "edgecolor": "none"},
    )


def _mark_edges(axes: Axes, kernel_row: pd.Series, predicted: pd.DataFrame, sms: int) -> None:
    """Mark each M above which the GEMM needs another row of tiles, or another wave.

    The edges are computed for the kernel in ``kernel_row``. Edges at which the model expects
    another kernel are left out. More than 60 edges of a kind (tile or wave) are not drawn, but only
    counted in the legend.
    """
    # 1. Find all edges, at multiples of the tile's height.
    height = int(str(kernel_row["tile"]).partition("x")[0])
    tiles_per_row = round(kernel_row["tiles"] / ceil_div(int(kernel_row["m"]), height))
    sizes = predicted["m"].to_numpy()
    edges = height * np.arange(1, int(sizes[-1]) // height + 1)
    # 2. Keep an edge if the model expects this kernel both there and at the next larger size. If no
    # size is larger than the last edge, only the size at the edge counts.
    has_same_tile = predicted["tile"] == kernel_row["tile"]
    has_same_split = predicted["split"] == kernel_row["split"]
    is_same_kernel = (has_same_tile & has_same_split).to_numpy()
    at_edge = np.searchsorted(sizes, edges)
    beyond_edge = np.minimum(np.searchsorted(sizes, edges, side="right"), len(sizes) - 1)
    edges = edges[is_same_kernel[at_edge] & is_same_kernel[beyond_edge]]
    # 3. Distinguish edges that begin a wave from those that only begin a row of tiles. Each SM
    # computes one tile per wave.
    tile_rows = edges // height
    waves_at_edge = np.ceil(tile_rows * tiles_per_row / sms)
    waves_beyond = np.ceil((tile_rows + 1) * tiles_per_row / sms)
    is_wave = waves_beyond > waves_at_edge
    # 4. Draw the edges of each kind, and count them in the legend.
    styles = (("tile", edges[~is_wave], ":", 0.7), ("wave", edges[is_wave], "--", 1.2))
    for name, marked, style, width in styles:
        count = len(marked)
        if not count:
            continue
        label = f"{counted(count, f'{name} edge')} of {kernel_row['tile']} tiles"
        if count > _MOST_MARKED:
            label += ", too many to draw"
        else:
            for edge in marked:
                axes.axvline(
                    edge, color=NEUTRAL, linestyle=style, linewidth=width, alpha=0.7, zorder=0
                )
        # A line without points gives the legend its entry.
        axes.plot([], [], color=NEUTRAL, linestyle=style, label=label)
