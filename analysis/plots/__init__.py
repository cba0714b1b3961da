"""The plots: each has a function for its data, which tests read, and one that draws it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from analysis.model.fitted import Analysis
from analysis.plots import accuracy, conv, plane, roofline, scaling
from analysis.plots.style import save

PLOTS: dict[str, Callable[[Analysis], Figure | None]] = {
    "roofline": roofline.draw,
    "square": scaling.draw_square,
    "steps": scaling.draw_steps,
    "alignment": scaling.draw_alignment,
    "conv-channels": conv.draw_channels,
    "conv-layouts": conv.draw_layouts,
    "accuracy": accuracy.draw,
    "plane": plane.draw,
}
"""Name → a function that draws it, or returns None where the recording lacks its sweep."""


def write_plots(analysis: Analysis) -> list[Path]:
    """Draw every plot that the recording has data for, as PNG and SVG; returns the PNGs."""
    folder = analysis.recording.folder / "plots"
    written = []
    for name, draw in PLOTS.items():
        figure = draw(analysis)
        if figure is not None:
            written.append(save(figure, analysis.recording.caption(), folder, name))
    return written
