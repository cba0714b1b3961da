"""Build the charts of the page with Bokeh.

This module draws only roofs, reference lines and the effects of rules. The page's script adds all
other data to the charts' sources, which it finds by their names. In the roofline and the accuracy
chart, the script draws at most a few thousand points at once, so that large recordings are drawn
quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from bokeh.models import ColumnDataSource, HoverTool, Label, Range1d, Span, TapTool, Whisker
from bokeh.plotting import figure

from analysis.plots.style import DTYPE_STYLE, ERROR_BANDS, NEUTRAL
from analysis.rules.judge import RuleResult
from analysis.units import rate, rate_unit
from kernels.machine import Machine

HOVER = (
    ("shape", "@shape"), ("case", "@case"), ("time", "@time"), ("speed", "@speed"),
    ("predicted", "@predicted"), ("limit", "@limit"), ("tile", "@tile"), ("waves", "@waves"),
    ("kernel", "@kernel"), ("clock", "@clock"),
)  # fmt: skip
"""Label and source column of each line in a point's tooltip."""

_TOOLS = "pan,wheel_zoom,box_zoom,reset,save"
# Factors by which the roofline's axes are extended beyond the largest values, which leaves room for
# the labels of the roofs.
_INTENSITY_MARGIN, _PEAK_MARGIN = 1.3, 1.6
_LOG_MARGIN = 1.5  # factor between the outermost values and the ends of a logarithmic axis
_RULES_HEIGHT = 90  # height of the rules' chart without any rule: its axis and tools, in pixels
_RULE_HEIGHT = 22  # height of one rule in this chart, in pixels
_BLUE, _VERMILION = "#0072B2", "#D55E00"  # two colours that differ with any colour vision


def shown_points() -> ColumnDataSource:
    """Return an empty source of points for the roofline and the accuracy chart."""
    names = ("index", "x", "y", "lo", "hi", "expected", "measured", "error", "color", "marker")
    columns = [*names, *(text.removeprefix("@") for _, text in HOVER)]
    return ColumnDataSource({name: [] for name in columns}, name="shown")


def speed_unit(machines: Sequence[Machine]) -> tuple[float, str]:
    """Return the factor from TFLOP/s to the roofline's unit, and the name of this unit.

    The unit suits the highest peak of all machines.
    """
    return rate_unit(max(peak / 1e12 for machine in machines for peak in machine.peaks.values()))


def roofline(source: ColumnDataSource, machines: Sequence[Machine], points: pd.DataFrame) -> figure:
    """Plot speed against intensity on logarithmic axes.

    Measured points are filled, and predicted points are hollow.

    Args:
        source: source of the shown points, from :func:`shown_points`.
        machines: the machines whose roofs are drawn.
        points: all points. The roof of a dtype is drawn only if a point has this dtype.
    """
    # 1. The axes show all measured points and all drawn peaks.
    scale, unit = speed_unit(machines)
    speeds = points["flops"] / points["time_us"] / 1e6 * scale
    dtypes = set(points["dtype"])
    peaks = [
        machine.peak(dtype) / 1e12 * scale
        for machine in machines
        for dtype in machine.peaks
        if dtype in dtypes
    ]
    left, right = _log_range(points["intensity"])
    low, high = _log_range(pd.concat([speeds, pd.Series(peaks)]))
    chart = _figure(
        "roofline",
        "arithmetic intensity, FLOP per byte of minimum traffic",
        unit,
        height=400,
        log_x=True,
        log_y=True,
        x_range=(left, _INTENSITY_MARGIN * right),
        y_range=(low, _PEAK_MARGIN * high),
    )
    # 2. Draw the roofs. With several machines, the label of each roof names its machine.
    for machine in machines:
        prefix = f"{machine.slug} " if len(machines) > 1 else ""
        for dtype in machine.peaks:
            if dtype in dtypes:
                _roof(chart, machine, dtype, prefix, scale)
    # 3. Draw each case: a grey line between its two points, the interval of its measured speed, the
    # predicted point (hollow) and the measured point (filled).
    chart.segment("x", "y", "x", "expected", source=source, color=NEUTRAL, line_alpha=0.35)
    chart.segment("x", "lo", "x", "hi", source=source, color="color", line_alpha=0.6)
    chart.scatter(
        "x",
        "expected",
        source=source,
        marker="marker",
        size=6,
        line_color="color",
        fill_color=None,
        line_alpha=0.7,
    )
    measured = chart.scatter(
        "x", "y", source=source, marker="marker", size=7, color="color", alpha=0.8, line_color=None
    )
    _add_interaction(chart, measured)
    return chart


def _roof(chart: figure, machine: Machine, dtype: str, prefix: str, scale: float) -> None:
    """Draw a roof: the memory slope up to the ridge, then the peak, labelled at the right end.

    ``scale`` is the factor from TFLOP/s to the chart's unit.
    """
    peak = machine.peak(dtype) / 1e12 * scale
    left, right = chart.x_range.start, chart.x_range.end
    color, _ = DTYPE_STYLE.get(dtype, (NEUTRAL, ""))
    slope = machine.bandwidth / 1e12 * scale
    # If the ridge is left of the chart, only the peak is in the chart.
    bend = max(left, machine.ridge(dtype))
    # The page's script finds and colours the line by its tag.
    chart.line(
        [left, bend, max(right, bend)],
        [min(left * slope, peak), peak, peak],
        color=color,
        line_width=2,
        line_alpha=0.7,
        tags=[dtype],
    )
    name = f"{prefix}{dtype} peak {rate(peak / scale)}"
    chart.add_layout(
        Label(
            x=right,
            y=peak,
            text=name,
            text_align="right",
            text_font_size="12px",
            y_offset=2,
        )
    )


def accuracy(source: ColumnDataSource, points: pd.DataFrame) -> figure:
    """Plot the relative errors of predictions against the measured time, with lines at ±10%.

    Args:
        source: source of the shown points, from :func:`shown_points`.
        points: all points, which set the ranges of the axes.
    """
    errors = 100 * (points["predicted_us"] / points["time_us"] - 1)
    # The axis shows 99% of the errors with a margin, and at least ±30%. No error is below −100%.
    top = max(30.0, 1.1 * float(errors.abs().quantile(0.99)))
    chart = _figure(
        "accuracy",
        "measured time, µs",
        "predicted / measured − 1, %",
        height=340,
        log_x=True,
        x_range=_log_range(points["time_us"]),
        y_range=(-min(100.0, top), top),
    )
    # The lines are the edges of the narrower band in the plot of a recording's accuracy.
    narrower_band = 100 * min(share for share, _ in ERROR_BANDS)
    for error in (-narrower_band, narrower_band):
        chart.add_layout(
            Span(location=error, dimension="width", line_color=NEUTRAL, line_dash="dashed")
        )
    dots = chart.scatter(
        "measured",
        "error",
        source=source,
        marker="marker",
        size=6,
        color="color",
        alpha=0.7,
        line_color=None,
    )
    _add_interaction(chart, dots)
    return chart


def neighbours(number: int) -> figure:
    """Make a chart of time against a dimension, for shapes that differ only in this dimension.

    Measured points are filled, and predicted points are hollow. The page's script chooses the
    dimension, such as N, and finds the edges of tiles and waves.

    Args:
        number: number of the chart, used in the names of the chart and of its data sources.
    """
    # 1. Make empty sources for the script: the points, the edges, and the chosen size.
    name = f"line-{number}"
    points = ColumnDataSource(
        {key: [] for key in ("x", "time", "lo", "hi", "expected", "description")}, name=name
    )
    edges = {
        kind: ColumnDataSource({"x": [], "low": [], "high": []}, name=f"{name}-{kind}")
        for kind in ("tiles", "waves")
    }
    selected = ColumnDataSource({"x": [], "time": []}, name=f"{name}-here")
    chart = _figure(
        f"chart-{name}",
        "size",
        "time, µs",
        height=280,
        x_range=Range1d(0, 1),
        y_range=Range1d(0, 1),
    )
    # 2. Draw the edges first, so that they lie below everything else.
    chart.segment(
        "x",
        "low",
        "x",
        "high",
        source=edges["tiles"],
        color=NEUTRAL,
        line_dash="dotted",
        line_alpha=0.6,
    )
    chart.segment(
        "x",
        "low",
        "x",
        "high",
        source=edges["waves"],
        color=_VERMILION,
        line_dash="dashed",
        line_alpha=0.7,
    )
    # 3. Draw predicted times. The tag tells the script to give them the page's grey, which differs
    # in dark mode.
    predicted_line = chart.line("x", "expected", source=points, color=NEUTRAL, line_width=1.5)
    predicted_line.tags = ["neutral"]
    predicted_dots = chart.scatter(
        "x", "expected", source=points, size=6, line_color=NEUTRAL, fill_color=None
    )
    predicted_dots.tags = ["neutral"]
    # 4. Draw measured times with their intervals, and a ring around the chosen time.
    chart.segment("x", "lo", "x", "hi", source=points, color=_BLUE)
    dots = chart.scatter("x", "time", source=points, size=7, color=_BLUE)
    chart.scatter(
        "x",
        "time",
        source=selected,
        size=14,
        line_color=_VERMILION,
        fill_color=None,
        line_width=2.5,
    )
    chart.add_tools(HoverTool(renderers=[dots], tooltips="@description"))
    return chart


def rules(rows: Sequence[RuleResult], number: int) -> figure:
    """Draw the effect of each rule, with the effect's interval.

    Args:
        rows: one or more results of rules whose effect is a ratio.
        number: number of the recording, used in the chart's name.
    """
    # Bokeh puts the first name at the bottom of the axis, but the first rule belongs at the top.
    drawn = list(reversed(rows))
    names = [row.id for row in drawn]
    data: Mapping[str, Sequence[object]] = {
        "rule": names,
        "effect": [row.effect for row in drawn],
        "lo": [row.lo for row in drawn],
        "hi": [row.hi for row in drawn],
        "verdict": [row.verdict for row in drawn],
        "color": [_color(row) for row in drawn],
    }
    source = ColumnDataSource(dict(data))
    chart = _figure(
        f"rules-{number}",
        "effect, as a ratio",
        "",
        height=_RULES_HEIGHT + _RULE_HEIGHT * len(drawn),
        y_range=names,
        log_x=True,
    )
    chart.add_layout(
        Whisker(
            source=source,
            base="rule",
            lower="lo",
            upper="hi",
            dimension="width",
            line_color="color",
            level="glyph",
        )
    )
    dots = chart.scatter("effect", "rule", source=source, size=9, color="color")
    chart.add_layout(Span(location=1, dimension="height", line_color=NEUTRAL))
    chart.add_tools(
        HoverTool(
            renderers=[dots],
            tooltips=[
                ("rule", "@rule"),
                ("verdict", "@verdict"),
                ("effect", "@effect{0.00}× (@lo{0.00} to @hi{0.00})"),
            ],
        )
    )
    return chart


def pairs() -> figure:
    """Make a chart of each common case's speed in the second recording relative to the first."""
    columns = ("x", "ratio", "shape", "times", "color", "marker")
    source = ColumnDataSource({name: [] for name in columns}, name="pairs")
    chart = _figure(
        "pairs-chart",
        "arithmetic intensity, FLOP per byte of minimum traffic",
        "speed in the second recording / speed in the first",
        height=340,
        log_x=True,
        log_y=True,
        x_range=Range1d(0.1, 10),
        y_range=Range1d(0.1, 10),
    )
    chart.add_layout(Span(location=1, dimension="width", line_color=NEUTRAL))
    dots = chart.scatter(
        "x",
        "ratio",
        source=source,
        marker="marker",
        size=7,
        color="color",
        alpha=0.8,
        line_color=None,
    )
    chart.add_tools(
        HoverTool(renderers=[dots], tooltips=[("shape", "@shape"), ("times", "@times")])
    )
    return chart


def _color(row: RuleResult) -> str:
    if row.verdict.startswith("holds"):
        return _BLUE
    return _VERMILION if row.verdict.startswith("no longer") else NEUTRAL


def _add_interaction(chart: figure, dots: object) -> None:
    chart.add_tools(HoverTool(renderers=[dots], tooltips=list(HOVER)), TapTool(renderers=[dots]))


def _log_range(values: pd.Series) -> tuple[float, float]:
    """Return the ends of a logarithmic axis that shows all finite positive values with a margin."""
    positive = values[(values > 0) & np.isfinite(values)]
    if positive.empty:
        return 0.1, 10.0
    return float(positive.min()) / _LOG_MARGIN, float(positive.max()) * _LOG_MARGIN


def _figure(
    name: str,
    x_label: str,
    y_label: str,
    height: int,
    log_x: bool = False,
    log_y: bool = False,
    **ranges: Sequence[str] | tuple[float, float] | Range1d,
) -> figure:
    """Return an empty chart that is as wide as the page.

    ``ranges`` may contain ``x_range`` and ``y_range``. Bokeh fits a missing range to the drawn
    points. The roofline needs both ranges, because the script may draw only the points within them.
    """
    chart = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        toolbar_location="above",
        x_axis_type="log" if log_x else "linear",
        y_axis_type="log" if log_y else "auto",
        x_axis_label=x_label,
        y_axis_label=y_label,
        background_fill_color=None,
        border_fill_color=None,
        **ranges,
    )
    chart.toolbar.logo = None
    return chart
