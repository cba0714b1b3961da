"""Plot predicted against measured times of held-out cases."""

from __future__ import annotations

from matplotlib.figure import Figure

from analysis.model.fitted import Analysis
from analysis.plots.style import (
    ERROR_BANDS,
    LIMIT_STYLE,
    MAX_VECTORS,
    NEUTRAL,
    panels,
    scatter_predicted,
)
from analysis.slices.series import accuracy_series
from kernels.common.counts import counted


def draw(analysis: Analysis) -> Figure:
    """Plot predicted time (left) and relative error (right) against measured time.

    The left panel is log-log. Both panels have bands of ±10% and ±25%.
    """
    rows = accuracy_series(analysis.table)
    error = rows["error"].abs()
    title = (
        f"Prediction error of held-out cases: median {error.median():.1%}, mean "
        f"{error.mean():.1%}, 95th percentile {error.quantile(0.95):.0%}"
    )
    figure, (time_panel, error_panel) = panels(2, title, (13.0, 6.0))
    # Many points are drawn smaller and as pixels, because a file of so many vectors would be large.
    has_many_points = len(rows) > MAX_VECTORS
    marker_size = 2 if has_many_points else 4
    # 1. Plot predicted against measured time.
    scatter_predicted(time_panel, rows, size=marker_size, alpha=0.7)
    # 2. Plot the relative error in % against measured time.
    for band, opacity in ERROR_BANDS:
        error_panel.axhspan(-100 * band, 100 * band, color=NEUTRAL, alpha=opacity, linewidth=0)
    for limit, (color, marker) in LIMIT_STYLE.items():
        cases = rows[rows["limit"] == limit]
        error_panel.plot(
            cases["measured"],
            100 * cases["error"],
            marker,
            color=color,
            markersize=marker_size,
            alpha=0.7,
            rasterized=has_many_points,
        )
    # 3. Choose the range of errors. It includes 99% of them with a margin, and both bands with a
    # margin. No error is below −100%.
    widest_band = max(band for band, _ in ERROR_BANDS)
    top_percent = float(max(120 * widest_band, 105 * error.quantile(0.99)))
    error_panel.set(
        xscale="log",
        xlim=time_panel.get_xlim(),
        ylim=(-min(100.0, top_percent), top_percent),
        xlabel="measured time, µs",
        ylabel="predicted / measured − 1, %",
    )
    # 4. Say how many errors are outside of that range. The background covers points.
    hidden_count = int((100 * error > top_percent).sum())
    if hidden_count:
        error_panel.annotate(
            f"{counted(hidden_count, 'larger error')} not shown",
            (0.99, 0.98),
            xycoords="axes fraction",
            ha="right",
            va="top",
            color=NEUTRAL,
            fontsize=10,
            backgroundcolor="white",
        )
    return figure
