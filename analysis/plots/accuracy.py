"""Predicted against measured, on rows that the constants had not seen."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.plots.style import LIMIT_STYLE, NEUTRAL, panels
from analysis.tidy import Analysis

_BANDS = ((0.10, 0.16), (0.25, 0.08))


def data(table: pd.DataFrame) -> pd.DataFrame:
    """Measured and predicted microseconds, their relative error and the predicted limit."""
    rows = table[["time_us", "predicted_time_us", "predicted_limit", "group"]].copy()
    rows["error"] = rows["predicted_time_us"] / rows["time_us"] - 1
    return rows


def draw(analysis: Analysis) -> Figure | None:
    """Both log-log with bands of ±10 % and ±25 %, and the error by measured time."""
    rows = data(analysis.table)
    error = rows["error"].abs()
    title = (
        f"Held-back predictions: median error {error.median():.1%}, "
        f"mean {error.mean():.1%}, 95th percentile {error.quantile(0.95):.0%}"
    )
    figure, (left, right) = panels(2, title, (13.0, 6.0))
    ends = np.array([rows["time_us"].min() / 1.5, rows["time_us"].max() * 1.5])
    for band, alpha in _BANDS:
        left.fill_between(ends, ends * (1 - band), ends * (1 + band), color=NEUTRAL, alpha=alpha,
                          linewidth=0, label=f"±{band:.0%}")  # fmt: skip
        right.axhspan(-100 * band, 100 * band, color=NEUTRAL, alpha=alpha, linewidth=0)
    for limit, (color, marker) in LIMIT_STYLE.items():
        some = rows[rows["predicted_limit"] == limit]
        if some.empty:
            continue
        left.plot(some["time_us"], some["predicted_time_us"], marker, color=color, markersize=4,
                  alpha=0.7, label=f"{limit}-bound, {len(some)}")  # fmt: skip
        right.plot(some["time_us"], 100 * some["error"], marker, color=color, markersize=4,
                   alpha=0.7)  # fmt: skip
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured time, µs",
             ylabel="predicted time, µs")  # fmt: skip
    left.legend(loc="upper left")
    worst = float(max(30.0, 105 * error.quantile(0.99)))
    right.set(xscale="log", xlim=ends, ylim=(-min(100.0, worst), worst),
              xlabel="measured time, µs", ylabel="predicted / measured − 1, %")  # fmt: skip
    return figure
