"""Plot the speed of each GPU in a fleet, and show how well the SM clock explains the speeds.

Speeds come from the anchors: a few cases that are timed on every GPU. An anchor belongs to one of
several kinds, such as memory or bursts of compute (:data:`analysis.fleet.anchors.KINDS`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.fleet.device_verdict import KIND_WORDS, ORDINARY, SLOW, THROTTLED
from analysis.fleet.fleet_report import FleetReport
from analysis.plots.style import NEUTRAL, panels, save

_STYLE = {SLOW: ("#D55E00", "D"), THROTTLED: ("#E69F00", "^"), ORDINARY: ("#0072B2", "o")}
_NAMED = 6  # at most the six slowest GPUs are named, because more names would overlap


def write_fleet_plot(report: FleetReport) -> Path | None:
    """Draw the plot of a fleet, and save it in the folder ``plots`` of the fleet's recording.

    Returns:
        Path of the PNG file, or None if fewer than two GPUs have a speed.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    figure = draw_fleet(report)
    if figure is None:
        return None
    recording = report.anchors.recording
    return save(figure, recording.caption(), recording.folder / "plots", "fleet")


def fleet_title(report: FleetReport) -> str:
    """Return a title that names the only slow GPU, or says how many GPUs are slow."""
    count = len(report.verdicts)
    slow = [verdict for verdict in report.verdicts if verdict.verdict == SLOW]
    if not slow:
        spread = report.speeds.spread  # NaN in a small fleet
        difference = (
            "" if np.isnan(spread) else f"; the speeds have a standard deviation of {spread:.1%}"
        )
        return f"None of {count} {report.noun}s is clearly slow{difference}"
    if len(slow) > 1:
        unexplained_count = sum(not verdict.explained for verdict in slow)
        if unexplained_count:
            reasons = f"the reason is unknown for {unexplained_count} of them"
        else:
            reasons = "the reason is known for all of them"
        return f"{len(slow)} of {count} {report.noun}s are slow; {reasons}"
    (gpu,) = slow
    # The GPU may be slow in several kinds of anchor. The title is about the first of them.
    kind = gpu.slow[0]
    relative_speeds = report.speeds.kinds[kind].speed
    loss = 1 - relative_speeds[report.verdicts.index(gpu)]
    # The code of an explanation names the cause after a colon, such as "clock: power cap".
    reason = gpu.explained.partition(": ")[2] if gpu.explained else "reason unknown"
    return f"{gpu.name} is {loss:.0%} slower than the median in {KIND_WORDS[kind]}: {reason}"


def draw_fleet(report: FleetReport) -> Figure | None:
    """Draw the speed of each GPU with its interval, from the slowest GPU to the fastest.

    GPUs without a speed are left out. If the SM clock of any other GPU was read, a second panel
    plots speed against the clock. The result is None if fewer than two GPUs have a speed.
    """
    speeds = report.speeds
    if not speeds.overall:
        return None
    overall = speeds.kinds[speeds.overall]
    # Positions of the GPUs with a speed in the report, from the slowest to the fastest.
    order = np.array([i for i in report.slowest_first if np.isfinite(overall.log[i])])
    if len(order) < 2:
        return None
    has_clock = np.isfinite(overall.clock[order])
    if has_clock.any():
        panel_count = 2
        size = (14.0, 6.0)
    else:
        panel_count = 1
        size = (10.0, 6.0)
    figure, all_axes = panels(panel_count, fleet_title(report), size, share_y=True)
    speed_panel = all_axes[0]
    # 1. The first panel shows all GPUs that have a speed, and names slow GPUs among the first six.
    ranks = np.arange(1, len(order) + 1)
    low = overall.lo[order]
    high = overall.hi[order]
    speed_panel.vlines(ranks, low, high, color=NEUTRAL, linewidth=0.9, alpha=0.6)
    _draw_points(report, speed_panel, order, ranks)
    speed_panel.set(
        xlabel=f"{report.noun}s, slowest first",
        xlim=(0, len(order) + 1),
        ylabel=f"speed in {KIND_WORDS[speeds.overall]}, relative to the median",
    )
    for i, rank in zip(order[:_NAMED], ranks, strict=False):
        if report.verdicts[i].verdict == SLOW:
            speed_panel.annotate(
                report.verdicts[i].name,
                (rank, overall.speed[i]),
                fontsize=10,
                xytext=(8, -4),
                textcoords="offset points",
            )
    # The legend counts the GPUs of the first panel, because some may have no clock.
    legend_handles, _ = speed_panel.get_legend_handles_labels()
    # 2. The second panel plots speed against the SM clock. If a GPU is on the diagonal, its clock
    # explains its speed.
    if has_clock.any():
        clock_panel = all_axes[1]
        with_clock = order[has_clock]
        clocks = np.exp(overall.clock[with_clock])  # relative to the fleet's median
        _draw_points(report, clock_panel, with_clock, clocks)
        coordinates = np.concatenate([clocks, overall.speed[with_clock]])
        diagonal = [coordinates.min(), coordinates.max()]
        legend_handles += clock_panel.plot(
            diagonal,
            diagonal,
            color=NEUTRAL,
            linewidth=1,
            linestyle=":",
            label="speed explained by the clock",
        )
        clock_panel.set(xlabel="SM clock, relative to the median")
    # 3. In each panel, a line shows the margin. The whole interval of a slow GPU is below the
    # margin, in this kind of anchor or in another one.
    for axes in all_axes:
        margin_line = axes.axhline(
            1 - report.margin,
            color=NEUTRAL,
            linewidth=1,
            linestyle="--",
            label=f"{100 * report.margin:.3g}% below the median",
        )
    all_axes[-1].legend(handles=[*legend_handles, margin_line], loc="upper left")
    return figure


def _draw_points(
    report: FleetReport, axes: Axes, positions: np.ndarray, x_values: np.ndarray
) -> None:
    """Draw a marker at the speed of each given GPU, with a colour and a shape for each verdict.

    ``positions`` are the indices of these GPUs in ``report.verdicts``.
    """
    speeds = report.speeds.kinds[report.speeds.overall].speed[positions]
    verdicts = np.array([report.verdicts[i].verdict for i in positions])
    for verdict, (color, marker) in _STYLE.items():
        has_verdict = verdicts == verdict
        if has_verdict.any():
            axes.plot(
                x_values[has_verdict],
                speeds[has_verdict],
                marker,
                color=color,
                markersize=5,
                label=f"{verdict}, {has_verdict.sum()}",
            )
