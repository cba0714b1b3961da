"""Draw the plots of a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from analysis.model.fitted import Analysis
from analysis.plots import accuracy, conv, roofline, scaling
from analysis.plots.style import KINDS, save


class Plot(NamedTuple):
    """A function that draws a plot, and the part of the caption that says how to read the plot.

    The function returns None if the recording has too few points.
    """

    draw: Callable[[Analysis], Figure | None]
    reading: str


_MEASURED = "Points are measured, with 95% intervals; solid lines are predicted"

PLOTS = {
    "roofline": Plot(
        roofline.draw,
        "Filled points are measured; hollow points are predicted. Left of a dtype's ridge, memory "
        "limits the speed; right of the ridge, arithmetic does.",
    ),
    "square": Plot(scaling.draw_square, f"{_MEASURED}. Dotted lines are the peaks."),
    "steps": Plot(
        scaling.draw_steps,
        f"{_MEASURED}. A cliff is a jump in the time from one size to the next.",
    ),
    "alignment": Plot(
        scaling.draw_alignment,
        "Points are speeds at a round size and at sizes just above it, relative to the speed at "
        "the round size. Bars are 95% intervals. Below 1, a size is slower than the round size.",
    ),
    "conv-channels": Plot(conv.draw_channels, f"{_MEASURED}."),
    "conv-layouts": Plot(conv.draw_layouts, "Right of 1, NHWC is faster. Bars are 95% intervals."),
    "accuracy": Plot(
        accuracy.draw,
        "Each prediction comes from a model that was not fitted to the predicted case. Bands are "
        "±10% and ±25%.",
    ),
}
"""Plots by name."""


def write_plots(
    analysis: Analysis, names: Sequence[str] = (), kinds: Sequence[str] = KINDS
) -> list[Path]:
    """Draw plots of a recording, and write them to the folder ``plots`` in the recording's folder.

    Plots for which the recording has too few points are left out.

    Args:
        analysis: the recording, with its predictions.
        names: names of the plots to draw, from :data:`PLOTS`; an empty sequence draws all plots.
        kinds: file formats, at least one.

    Returns:
        The path of each plot's file in the first format.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    folder = analysis.recording.folder / "plots"
    written = []
    for name in names or PLOTS:
        plot = PLOTS[name]
        figure = plot.draw(analysis)
        if figure is not None:
            caption = f"{plot.reading}\n{analysis.recording.caption()}"
            written.append(save(figure, caption, folder, name, kinds))
    return written
