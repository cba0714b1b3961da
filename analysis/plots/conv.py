"""Plot convolutions: speed against the number of channels, and NHWC compared with NCHW."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from analysis.model.fitted import Analysis
from analysis.plots.style import (
    DTYPE_STYLE,
    LEAST_POINTS,
    NEUTRAL,
    PREDICTION,
    RIGHT_OF_AXES,
    enough,
    error_bars,
    panels,
)
from analysis.plots.titles import channels_title, layouts_title
from analysis.slices.series import channel_series, layout_series
from analysis.units import rate_unit
from kernels.common.counts import counted
from kernels.problem import PASSES

_DTYPE_DISTANCE = 0.18  # vertical distance of two dtypes' points, as a share of a row


def draw_channels(analysis: Analysis) -> Figure | None:
    """Plot measured and predicted speed against the number of channels, for each dtype.

    Points at multiples of 8 are larger. Dtypes with fewer than five points are left out. The result
    is None if no dtype is left.
    """
    rows = enough(channel_series(analysis.table), "dtype")
    if rows.empty:
        return None
    first = rows.iloc[0]  # all rows have the same filter, image size and batch
    figure, (axes,) = panels(1, channels_title(rows))
    factor, unit = rate_unit(float(rows["tflops"].max()))  # factor from TFLOP/s to the unit
    for dtype, group in rows.groupby("dtype", sort=False):
        color, marker = DTYPE_STYLE[str(dtype)]
        channels = group["c"]
        predicted = group["predicted_tflops"] * factor
        axes.plot(channels, predicted, **{**PREDICTION, "color": color})
        low = group["tflops_lo"] * factor
        high = group["tflops_hi"] * factor
        error_bars(axes, channels, low, high, color)
        measured = group["tflops"] * factor
        is_aligned = channels % 8 == 0
        axes.plot(channels[~is_aligned], measured[~is_aligned], marker, color=color, markersize=4)
        axes.plot(
            channels[is_aligned],
            measured[is_aligned],
            marker,
            color=color,
            markersize=8,
            label=str(dtype),
        )
    axes.plot([], [], "o", color=NEUTRAL, markersize=8, label="large: multiple of 8")
    axes.plot([], [], **PREDICTION, label="predicted")
    axes.set(
        xlabel=f"input and output channels   ({first['r']}×{first['r']} filter, "
        f"{counted(first['batch'], 'image')} of {first['h']}×{first['w']})",
        ylabel=unit,
        ylim=(0, None),
    )
    axes.legend(**RIGHT_OF_AXES)
    return figure


def draw_layouts(analysis: Analysis) -> Figure | None:
    """Draw the ratio of NCHW time to NHWC time, and its interval, for each convolution.

    Each pass has a panel. The result is None if there are fewer than five ratios.
    """
    pairs = layout_series(analysis.table)
    if len(pairs) < LEAST_POINTS:
        return None
    passes = [pass_ for pass_ in PASSES if pass_ in set(pairs["pass"])]
    labels = list(dict.fromkeys(pairs["label"]))
    size = (max(11.0, 4.8 * len(passes)), 5.5)
    figure, all_axes = panels(len(passes), layouts_title(pairs), size, share_y=True)
    dtypes = list(dict.fromkeys(pairs["dtype"]))
    for axes, pass_ in zip(all_axes, passes, strict=True):
        for number, dtype in enumerate(dtypes):
            group = pairs[(pairs["pass"] == pass_) & (pairs["dtype"] == dtype)]
            color, marker = DTYPE_STYLE[dtype]
            # Points of different dtypes are shifted by a part of a row, so that they do not
            # overlap. The dtypes of a row are centred on it.
            shift = _DTYPE_DISTANCE * (number - (len(dtypes) - 1) / 2)
            positions = np.array([labels.index(label) for label in group["label"]]) + shift
            # matplotlib expects the distances from each ratio to the two ends of its interval.
            ends = group[["ratio_lo", "ratio_hi"]].to_numpy().T
            to_ends = np.abs(ends - group["ratio"].to_numpy())
            axes.errorbar(
                group["ratio"],
                positions,
                xerr=to_ends,
                color=color,
                marker=marker,
                linestyle="none",
                markersize=6,
                label=dtype,
            )
        axes.axvline(1.0, color=NEUTRAL, linewidth=1)
        axes.set(xscale="log", xlabel=f"{pass_}: NCHW time / NHWC time")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="x", which="minor", labelsize=9)
    all_axes[0].set_yticks(range(len(labels)), labels)
    all_axes[0].invert_yaxis()
    all_axes[-1].legend(**RIGHT_OF_AXES)
    return figure
