"""A heat map over M and N: measured beside predicted."""

from __future__ import annotations

from matplotlib.figure import Figure

from analysis.model.fitted import Analysis
from analysis.model.series import plane_series
from analysis.plots.style import panels, verbatim
from analysis.units import rate_unit


def draw(analysis: Analysis) -> Figure | None:
    """Two maps on one colour scale."""
    measured, predicted = plane_series(analysis.table)
    if measured.shape[0] < 2 or measured.shape[1] < 2:
        return None
    rows = analysis.table[analysis.table["sweep"] == "plane"].iloc[0]
    factor, unit = rate_unit(float(measured.max().max()))
    measured, predicted = measured * factor, predicted * factor
    title = f"{unit} over M and N at K = {rows['k']}, {rows['dtype']}"
    figure, all_axes = panels(2, title, (13.0, 6.0))
    top = float(max(measured.max().max(), predicted.max().max()))
    for axes, values, name in zip(
        all_axes, (measured, predicted), ("measured", "predicted"), strict=True
    ):
        image = axes.imshow(values, origin="lower", vmin=0, vmax=top, cmap="cividis", aspect="auto")
        axes.grid(False)
        for label, setter, sizes in (
            ("N", axes.set_xticks, values.columns), ("M", axes.set_yticks, values.index),
        ):  # fmt: skip
            every = max(1, len(sizes) // 8)
            places = range(0, len(sizes), every)
            setter(places, [str(sizes[i]) for i in places])
            (axes.set_xlabel if label == "N" else axes.set_ylabel)(label)
        axes.set_title(verbatim(name))
    figure.colorbar(image, ax=list(all_axes), label=unit, shrink=0.9)
    return figure
