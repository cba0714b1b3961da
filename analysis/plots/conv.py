"""Convolutions: which channel counts they like, and NHWC against NCHW."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.plots.style import DTYPE_STYLE, NEUTRAL, PREDICTION, panels
from analysis.tidy import Analysis
from analysis.units import rate_unit
from kernels.problem import PASSES


def channels_data(table: pd.DataFrame) -> pd.DataFrame:
    """Forward convolutions with as many channels in as out, over their number."""
    rows = table[(table["sweep"] == "conv-channels") & (table["c"] == table["kout"])]
    rows = rows[(rows["pass"] == "fprop") & (rows["config"] == "")].sort_values("c")
    return rows[["c", "h", "w", "r", "batch", "dtype", "tflops", "predicted_tflops"]]


def draw_channels(analysis: Analysis) -> Figure | None:
    """TFLOP/s over the channels; large points are multiples of 8."""
    rows = channels_data(analysis.table)
    if rows.empty:
        return None
    first = rows.iloc[0]
    title = f"Channels of a {first['r']}×{first['r']} convolution: large points are multiples of 8"
    figure, (axes,) = panels(1, title)
    factor, unit = rate_unit(float(rows["tflops"].max()))
    for dtype, some in rows.groupby("dtype", sort=False):
        color, marker = DTYPE_STYLE[str(dtype)]
        measured, round_ = some["tflops"] * factor, some["c"] % 8 == 0
        predicted = some["predicted_tflops"] * factor
        axes.plot(some["c"], predicted, **{**PREDICTION, "color": color})
        axes.plot(some["c"][~round_], measured[~round_], marker, color=color, markersize=4,
                  fillstyle="none")  # fmt: skip
        axes.plot(some["c"][round_], measured[round_], marker, color=color, markersize=8,
                  label=f"{dtype}")  # fmt: skip
    axes.plot([], [], **PREDICTION, label="predicted")
    axes.set(
        xlabel=f"channels in and out   ({first['batch']} images of {first['h']}×{first['w']})",
        ylabel=unit,
        ylim=(0, None),
    )
    axes.legend(loc="lower right")
    return figure


def layouts_data(table: pd.DataFrame) -> pd.DataFrame:
    """NHWC's speed over NCHW's, pair by pair of the same convolution, with the interval.

    Columns: label, dtype, pass, ratio, ratio_lo, ratio_hi.
    """
    rows = table[table["sweep"] == "conv-layouts"]
    same = ["batch", "c", "h", "w", "kout", "r", "s", "stride", "dtype", "pass", "config"]
    pairs = rows[rows["layout"] == "nhwc"].merge(
        rows[rows["layout"] == "nchw"], on=same, suffixes=("_nhwc", "_nchw")
    )
    label = [f"{row.c}×{row.h}×{row.w}→{row.kout}, {row.r}×{row.s}" for row in pairs.itertuples()]
    return pd.DataFrame(
        {
            "label": label,
            "dtype": pairs["dtype"],
            "pass": pairs["pass"],
            "ratio": pairs["time_us_nchw"] / pairs["time_us_nhwc"],
            "ratio_lo": pairs["time_lo_us_nchw"] / pairs["time_hi_us_nhwc"],
            "ratio_hi": pairs["time_hi_us_nchw"] / pairs["time_lo_us_nhwc"],
        }
    )


def draw_layouts(analysis: Analysis) -> Figure | None:
    """A dot and its interval for each pair; right of 1, NHWC is faster."""
    pairs = layouts_data(analysis.table)
    if pairs.empty:
        return None
    passes = [pass_ for pass_ in PASSES if pass_ in set(pairs["pass"])]
    labels = list(dict.fromkeys(pairs["label"]))
    title = "NHWC against NCHW: right of 1, channels-last is faster"
    figure, all_axes = panels(len(passes), title, (4.8 * len(passes), 5.5), share_y=True)
    dtypes = list(dict.fromkeys(pairs["dtype"]))
    for axes, pass_ in zip(all_axes, passes, strict=True):
        for number, dtype in enumerate(dtypes):
            some = pairs[(pairs["pass"] == pass_) & (pairs["dtype"] == dtype)]
            color, marker = DTYPE_STYLE[dtype]
            height = np.array([labels.index(label) for label in some["label"]])
            height = height + 0.18 * (number - (len(dtypes) - 1) / 2)
            bars = np.abs(some[["ratio_lo", "ratio_hi"]].to_numpy().T - some["ratio"].to_numpy())
            axes.errorbar(some["ratio"], height, xerr=bars, color=color, marker=marker,
                          linestyle="none", markersize=6, label=dtype)  # fmt: skip
        axes.axvline(1.0, color=NEUTRAL, linewidth=1)
        axes.set(xscale="log", xlabel=f"{pass_}: NCHW time / NHWC time")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="x", which="minor", labelsize=9)
    all_axes[0].set_yticks(range(len(labels)), labels)
    all_axes[0].invert_yaxis()
    all_axes[-1].legend(loc="best")
    return figure
