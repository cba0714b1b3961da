"""Plot how fast each GPU of a fleet is, and how much of that its clock explains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.fleet.device_verdict import KIND_WORDS, ORDINARY, SLOW, THROTTLED
from analysis.fleet.fleet_report import FleetReport
from analysis.plots.style import NEUTRAL, panels, save

_STYLE = {SLOW: ("#D55E00", "D"), THROTTLED: ("#E69F00", "^"), ORDINARY: ("#0072B2", "o")}
_NAMED = 6  # GPUs with a name in the plot: more names would overlap


def write_fleet_plot(report: FleetReport) -> Path | None:
    """Draw a fleet into its recording's folder; return the first file, or None without speeds."""
    figure = draw_fleet(report)
    if figure is None:
        return None
    recording = report.anchors.recording
    return save(figure, recording.caption(), recording.folder / "plots", "fleet")


def fleet_title(report: FleetReport) -> str:
    """Say which GPU is slow, and whether clocks explain it.

    Args:
        report: report on several GPUs.
    """
    count = len(report.verdicts)
    slow = [verdict for verdict in report.verdicts if verdict.verdict == SLOW]
    spread = (
        "" if np.isnan(report.speeds.spread) else f": they differ by {report.speeds.spread:.1%}"
    )
    if not slow:
        return f"None of {count} GPUs is clearly slow{spread}"
    unexplained = sum(not verdict.explained for verdict in slow)
    if len(slow) > 1:
        return f"{len(slow)} of {count} GPUs are slow, {unexplained} of them for an unknown reason"
    of = report.speeds.kinds[slow[0].slow[0]]
    lost = 1 - of.speed[report.verdicts.index(slow[0])]
    why = "for an unknown reason" if unexplained else slow[0].explained.partition(": ")[2]
    return f"{slow[0].name} is {lost:.0%} slow in {KIND_WORDS[slow[0].slow[0]]}: {why}"


def draw_fleet(report: FleetReport) -> Figure | None:
    """Draw the speed of each GPU with its interval, beginning with the slowest.

    If clocks were read, a second panel shows speed over clock. None if fewer than two GPUs have a
    speed.
    """
    speeds = report.speeds
    if not speeds.overall:
        return None
    of = speeds.kinds[speeds.overall]
    order = np.array([i for i in report.slowest_first if np.isfinite(of.log[i])])
    if len(order) < 2:
        return None
    clocks = np.isfinite(of.clock[order])
    size = (14.0, 6.0) if clocks.any() else (10.0, 6.0)
    figure, all_axes = panels(1 + bool(clocks.any()), fleet_title(report), size, share_y=True)
    places = np.arange(1, len(order) + 1)
    ends = of.lo[order], of.hi[order]
    all_axes[0].vlines(places, *ends, color=NEUTRAL, linewidth=0.9, alpha=0.6)
    _points(report, all_axes[0], order, places)
    all_axes[0].set(
        xlabel="GPUs, from the slowest",
        xlim=(0, len(order) + 1),
        ylabel=f"speed in {KIND_WORDS[speeds.overall]}, of the median",
    )
    for i, place in zip(order[:_NAMED], places, strict=False):
        if report.verdicts[i].verdict == SLOW:
            all_axes[0].annotate(
                report.verdicts[i].name,
                (place, of.speed[i]),
                fontsize=10,
                xytext=(8, -4),
                textcoords="offset points",
            )
    if clocks.any():
        seen = order[clocks]
        _points(report, all_axes[1], seen, np.exp(of.clock[seen]))
        both = np.concatenate([np.exp(of.clock[seen]), of.speed[seen]])
        all_axes[1].plot(
            [both.min(), both.max()],
            [both.min(), both.max()],
            color=NEUTRAL,
            linewidth=1,
            linestyle=":",
            label="explained by its clock",
        )
        all_axes[1].set(xlabel="SM clock, of the median")
    for axes in all_axes:
        axes.axhline(
            1 - report.margin,
            color=NEUTRAL,
            linewidth=1,
            linestyle="--",
            label=f"{100 * report.margin:.3g}% below the median",
        )
    all_axes[-1].legend(loc="upper left")
    return figure


def _points(report: FleetReport, axes: Axes, order: np.ndarray, places: np.ndarray) -> None:
    """Draw a marker for each GPU, which shows its verdict."""
    of = report.speeds.kinds[report.speeds.overall]
    verdicts = np.array([report.verdicts[i].verdict for i in order])
    for verdict, (color, marker) in _STYLE.items():
        this = verdicts == verdict
        if this.any():
            axes.plot(
                places[this],
                of.speed[order][this],
                marker,
                color=color,
                markersize=5,
                label=f"{verdict}, {this.sum()}",
            )
