"""Plots. Each has a function for its data, which tests read, and one that draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from analysis.model.fitted import Analysis
from analysis.plots import accuracy, conv, roofline, scaling
from analysis.plots.style import KINDS, save

PLOTS: dict[str, Callable[[Analysis], Figure | None]] = {
    "roofline": roofline.draw,
    "square": scaling.draw_square,
    "steps": scaling.draw_steps,
    "alignment": scaling.draw_alignment,
    "conv-channels": conv.draw_channels,
    "conv-layouts": conv.draw_layouts,
    "accuracy": accuracy.draw,
}
"""Functions that draw a plot, by name. Each returns None if the recording lacks the plot's
sweep."""


def write_plots(
    analysis: Analysis, names: Sequence[str] = (), kinds: Sequence[str] = KINDS
) -> list[Path]:
    """Draw the plots that a recording has data for, or only the named ones, in each file format.

    Returns:
        The first file of each plot.
    """
    folder = analysis.recording.folder / "plots"
    written = []
    for name in names or PLOTS:
        figure = PLOTS[name](analysis)
        if figure is not None:
            written.append(save(figure, analysis.recording.caption(), folder, name, kinds))
    return written
