"""Build the points of a page: a recording's cases, as columns that the page's script reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.model.fitted import PREDICTED, Analysis
from analysis.recordings.load import Recording
from kernels.timemodel.estimate import Array

TEXTS = (
    "op", "pass", "dtype", "layout", "implementation", "config", "sweep", "mode", "cache",
    "status", "message", "kernel", "stride", "padding", "dilation", "tile", "predicted_tile",
    "limit", "spec",
)  # fmt: skip
SIZES = ("m", "n", "k", "batch", "c", "h", "w", "kout", "r", "s", "groups")
TIMES = ("time_us", "time_lo_us", "time_hi_us", "sm_mhz")  # columns of measurements.csv
ESTIMATES = (
    "predicted_us",
    "predicted_lo_us",
    "predicted_hi_us",
    "waves",
    "tiles",
    "intensity",
    "flops",
)

MOST_POINTS = 40_000
"""Maximum number of points of a recording."""

_TIME_DIGITS = 9  # significant digits of times: a picosecond in times of up to a millisecond
_DIGITS = 4  # significant digits of estimates: the page shows no more, and more would enlarge it


def points_of(analysis: Analysis) -> pd.DataFrame:
    """Return the analysed cases, then the cases that have no time or that the model cannot predict.

    The table has one row per case. If there are more than :data:`MOST_POINTS` rows, the result is a
    random sample of them.

    Returns:
        A table with the columns :data:`TEXTS`, :data:`SIZES`, :data:`TIMES` and :data:`ESTIMATES`.
        Values may be missing.
    """
    table = analysis.table
    # Name of each column on the page, and the predicted column that it comes from.
    estimates = {
        "predicted_us": "time_us",
        "predicted_lo_us": "lo_us",
        "predicted_hi_us": "hi_us",
        "waves": "waves",
        "tiles": "tiles",
    }
    # A tile that is known from the measurement takes precedence over the predicted one. An unknown
    # tile is empty in our own recordings, and missing in imported ones.
    predicted = table.assign(
        **{name: table[PREDICTED + column] for name, column in estimates.items()},
        limit=table[f"{PREDICTED}limit"],
        tile=table["tile"].where(table["tile"].fillna("") != "", table[f"{PREDICTED}tile"]),
    )
    points = pd.concat([predicted, _without_prediction(analysis.recording)], ignore_index=True)
    if len(points) > MOST_POINTS:
        points = points.sample(MOST_POINTS, random_state=0).sort_index(ignore_index=True)
    points = points.reindex(columns=[*TEXTS, *SIZES, *TIMES, *ESTIMATES])
    points["spec"] = specs_of(points)
    return points


def _without_prediction(recording: Recording) -> pd.DataFrame:
    return recording.rows.drop(index=recording.products.index)


_CONV = [
    "batch", "c", "h", "w", "kout", "r", "s", "stride", "padding", "dilation", "groups", "dtype",
    "layout", "pass",
]  # fmt: skip
"""Columns that describe a convolution, in the order of their values in ``--conv``."""


def specs_of(rows: pd.DataFrame) -> pd.Series:
    """Return each problem in the form of ``--gemm`` or ``--conv``, or "" for other operations."""
    gemm = _joined(rows, ["m", "n", "k", "dtype", "layout", "batch"])
    conv = _joined(rows, _CONV)
    return pd.Series(
        np.select([rows["op"] == "gemm", rows["op"] == "conv"], [gemm, conv], ""),
        index=rows.index,
    )


def _joined(rows: pd.DataFrame, names: list[str]) -> pd.Series:
    texts = []
    for name in names:
        # Columns with missing sizes are floats, which would be written as 64.0.
        values = rows[name].astype("Int64") if name in SIZES else rows[name]
        texts.append(values.astype("string").fillna(""))
    return texts[0].str.cat(texts[1:], sep=",")


def columns_of(points: pd.DataFrame) -> dict[str, Any]:
    """Return the columns of :func:`points_of` for JSON, by their names.

    A column of :data:`TEXTS` has a list of distinct words, and for each point the position of its
    word in this list. Every other column is a list of numbers, with None for missing values.
    """
    columns: dict[str, Any] = {}
    for name in TEXTS:
        codes, words = pd.factorize(points[name].astype("string").fillna(""))
        columns[name] = {"codes": codes.tolist(), "words": list(map(str, words))}
    for name in (*SIZES, *TIMES, *ESTIMATES):
        values = points[name].to_numpy(dtype=float, na_value=np.nan)
        if name in TIMES:
            values = _rounded(values, _TIME_DIGITS)
        # The page computes speeds from the number of FLOPs, which is known exactly.
        elif name in ESTIMATES and name != "flops":
            values = _rounded(values, _DIGITS)
        columns[name] = [_number(value) for value in values]
    return columns


def _rounded(values: Array, digits: int) -> Array:
    return np.array([float(f"{value:.{digits}g}") for value in values])


def _number(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(value)
