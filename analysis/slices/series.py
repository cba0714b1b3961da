"""Slices of the table of measured and predicted times; each answers one question of a sweep."""

from __future__ import annotations

from statistics import geometric_mean

import pandas as pd

from analysis.recordings.load import bursts, library_rows
from analysis.recordings.repetition import steady_ratio

DIMENSIONS = ("m", "n", "k")
NEARLY = 0.9
"""Share of the best speed from which on a size counts as large enough."""
ENDS = ["tflops_lo", "tflops_hi"]
_STEADY = ["steady_log", "steady_error"]


def square_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return size, dtype, measured and predicted TFLOP/s of square GEMMs on the vendor library.

    ``tflops_lo`` and ``tflops_hi`` belong to the interval of the time.
    """
    rows = _with_ends(library_rows(table[table["sweep"] == "square"]))
    return rows.sort_values("m")[["m", "dtype", "tflops", *ENDS, "predicted_tflops"]]


def _with_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Add the speeds at both ends of each time's interval; NaN for a time without one."""
    slowest = rows["flops"] / rows["time_hi_us"] / 1e6
    fastest = rows["flops"] / rows["time_lo_us"] / 1e6
    return rows.assign(tflops_lo=slowest, tflops_hi=fastest)


def fast_from(group: pd.DataFrame, speeds: str = "tflops") -> int | None:
    """Return the smallest size from which on all sizes reach :data:`NEARLY` of the best speed.

    Args:
        group: rows of :func:`square_series` in one dtype.
        speeds: the column to judge by; an end of the interval shows how certain the size is.

    Returns:
        The size; None if the largest size does not reach that speed.
    """
    # A speed without an interval counts as it is.
    judged = group[speeds].fillna(group["tflops"])
    slow = group[judged < NEARLY * group["tflops"].max()]
    fast = group[group["m"] > slow["m"].max()] if len(slow) else group
    return int(fast["m"].min()) if len(fast) else None


def steps_series(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the densest line of cases along each of m, n and k that the steps sweep varies."""
    rows = library_rows(table[table["sweep"] == "steps"])
    lines = {}
    for along in DIMENSIONS:
        fixed = [name for name in DIMENSIONS if name != along]
        # Fewer than four sizes are not a line.
        groups = [group for _, group in rows.groupby(fixed) if group[along].nunique() > 3]
        if groups:
            densest = max(groups, key=lambda group: group[along].nunique())
            lines[along] = densest.sort_values(along)
    return lines


def alignment_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return the speed at each offset of a dimension from its base, relative to offset 0.

    Returns:
        The columns along (m, n or k), base, offset, dtype, relative, relative_lo and relative_hi.
        The last two are the interval of a repetition.
    """
    rows = library_rows(table[table["sweep"] == "alignment"])
    parts = []
    for along in DIMENSIONS:
        # The sweep varies one dimension from a base to 16 more, while both others are the base.
        first, second = (name for name in DIMENSIONS if name != along)
        equal = rows[rows[first] == rows[second]]
        for base in sorted(equal[first].unique()):
            line = equal[equal[first] == base]
            line = line[line[along].between(base, base + 16)]
            for dtype, group in line.groupby("dtype", sort=False):
                at_base = group[group[along] == base]
                if at_base.empty or len(group) < 3:
                    continue
                columns = {
                    "along": along,
                    "base": base,
                    "offset": group[along] - base,
                    "dtype": dtype,
                    **_relative_speed(group, at_base.iloc[0]),
                }
                parts.append(pd.DataFrame(columns).sort_values("offset"))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _relative_speed(rows: pd.DataFrame, base: pd.Series) -> dict[str, pd.Series]:
    """Return the speed of each row relative to the base row's; the base row has exactly 1.

    The columns are relative, relative_lo and relative_hi.
    """
    work = rows["flops"] / base["flops"]
    is_base = rows.index == base.name
    return {
        name.replace("ratio", "relative"): (work * ratio).mask(is_base, 1.0)
        for name, ratio in steady_ratio(base, rows).items()
    }


def channel_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return forward convolutions with as many input as output channels, sorted by their number."""
    rows = table[(table["sweep"] == "conv-channels") & (table["c"] == table["kout"])]
    rows = rows[(rows["pass"] == "fprop") & (rows["config"] == "")].sort_values("c")
    columns = ["c", "h", "w", "r", "batch", "dtype", "tflops", *ENDS, "predicted_tflops"]
    return _with_ends(rows)[columns]


def layout_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return NHWC's speed over NCHW's for pairs of the same convolution, with the interval.

    Returns:
        The columns label, dtype, pass, ratio, ratio_lo and ratio_hi.
    """
    rows = table[table["sweep"] == "conv-layouts"]
    keys = ["batch", "c", "h", "w", "kout", "r", "s", "stride", "dtype", "pass", "config"]
    pairs = rows[rows["layout"] == "nhwc"].merge(
        rows[rows["layout"] == "nchw"], on=keys, suffixes=("_nhwc", "_nchw")
    )
    nchw = pairs[[name + "_nchw" for name in _STEADY]].set_axis(_STEADY, axis=1)
    nhwc = pairs[[name + "_nhwc" for name in _STEADY]].set_axis(_STEADY, axis=1)
    label = [f"{row.c}×{row.h}×{row.w}→{row.kout}, {row.r}×{row.s}" for row in pairs.itertuples()]
    return pd.DataFrame(
        {
            "label": label,
            "dtype": pairs["dtype"],
            "pass": pairs["pass"],
            **steady_ratio(nchw, nhwc),
        }
    )


def layout_summary(pairs: pd.DataFrame) -> tuple[float, int, int]:
    """Summarise NHWC's speed over NCHW's.

    Args:
        pairs: at least one row of :func:`layout_series`.

    Returns:
        The geometric mean, and the numbers of pairs in which NHWC is clearly faster and clearly
        slower.
    """
    faster = int((pairs["ratio_lo"] > 1).sum())
    slower = int((pairs["ratio_hi"] < 1).sum())
    return geometric_mean(pairs["ratio"]), faster, slower


def roofline_series(table: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """Return each measured case once: intensity, measured and predicted TFLOP/s, predicted limit.

    The intensity is in FLOP/byte. ``cache`` is where operands come from.
    """
    rows = _with_ends(bursts(table, cache)).rename(columns={"predicted_limit": "limit"})
    return rows[["intensity", "tflops", *ENDS, "predicted_tflops", "limit", "dtype", "op"]]


def accuracy_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return measured time with its interval, predicted time, limit, group and relative error.

    Times are in µs.
    """
    names = {
        "time_us": "measured",
        "time_lo_us": "low",
        "time_hi_us": "high",
        "predicted_time_us": "predicted",
        "predicted_limit": "limit",
    }
    rows = table[[*names, "group"]].rename(columns=names)
    return rows.assign(error=rows["predicted"] / rows["measured"] - 1)
