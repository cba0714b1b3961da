"""Slices of the table of measured and predicted, each the answer to one question of a sweep."""

from __future__ import annotations

from statistics import geometric_mean

import pandas as pd

from analysis.recordings.load import bursts, library_rows
from analysis.recordings.repetition import steady_ratio

DIMENSIONS = ("m", "n", "k")
NEARLY = 0.9
"""Share of the best speed, from which on a size counts as large enough."""
ENDS = ["tflops_lo", "tflops_hi"]
_STEADY = ["steady_log", "steady_error"]


def square_series(table: pd.DataFrame) -> pd.DataFrame:
    """The library's square products: size, dtype, measured and predicted TFLOP/s.

    ``tflops_lo`` and ``tflops_hi`` are of the interval of the time.
    """
    rows = _with_ends(library_rows(table[table["sweep"] == "square"]))
    return rows.sort_values("m")[["m", "dtype", "tflops", *ENDS, "predicted_tflops"]]


def _with_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """With the speeds of both ends of each time's interval; without any where it has none."""
    speeds = [rows["flops"] / rows[name] / 1e6 for name in ("time_hi_us", "time_lo_us")]
    return rows.assign(**dict(zip(ENDS, speeds, strict=True)))


def fast_from(group: pd.DataFrame, speeds: str = "tflops") -> int | None:
    """The size from which on all sizes reach :data:`NEARLY` of the best speed; None: not one does.

    Args:
        group: rows of :func:`square_series` of one dtype.
        speeds: the column to judge by; an end of the interval says how sure the size is.
    """
    slow = group[group[speeds].fillna(group["tflops"]) < NEARLY * group["tflops"].max()]
    fast = group[group["m"] > slow["m"].max()] if len(slow) else group
    return int(fast["m"].min()) if len(fast) else None


def steps_series(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """For each of m, n and k that the steps sweep varies: its densest line of cases."""
    rows = library_rows(table[table["sweep"] == "steps"])
    lines = {}
    for along in DIMENSIONS:
        fixed = [name for name in DIMENSIONS if name != along]
        groups = [group for _, group in rows.groupby(fixed) if group[along].nunique() > 3]
        if groups:
            lines[along] = max(groups, key=lambda group: group[along].nunique()).sort_values(along)
    return lines


def alignment_series(table: pd.DataFrame) -> pd.DataFrame:
    """How far each dimension is off its base, and TFLOP/s relative to no offset.

    Columns: along (m, n or k), base, offset, dtype, relative, relative_lo, relative_hi: the
    interval of a repetition.
    """
    rows = library_rows(table[table["sweep"] == "alignment"])
    pieces = []
    for along in DIMENSIONS:
        fixed = [name for name in DIMENSIONS if name != along]
        equal = rows[rows[fixed[0]] == rows[fixed[1]]]
        for base in sorted(equal[fixed[0]].unique()):
            line = equal[equal[fixed[0]] == base]
            line = line[line[along].between(base, base + 16)]
            for dtype, group in line.groupby("dtype", sort=False):
                at_base = group[group[along] == base]
                if at_base.empty or len(group) < 3:
                    continue
                best = at_base.iloc[0]
                pieces.append(
                    pd.DataFrame(
                        {
                            "along": along,
                            "base": base,
                            "offset": group[along] - base,
                            "dtype": dtype,
                            **_relative_speed(group, best),
                        }
                    ).sort_values("offset")
                )
    return pd.concat(pieces, ignore_index=True) if pieces else pd.DataFrame()


def _relative_speed(rows: pd.DataFrame, base: pd.Series) -> dict[str, pd.Series]:
    """Speeds relative to that of a row, which relative to itself is 1 without any doubt."""
    work = rows["flops"] / base["flops"]
    itself = rows.index == base.name
    return {
        name.replace("ratio", "relative"): (work * ratio).mask(itself, 1.0)
        for name, ratio in steady_ratio(base, rows).items()
    }


def channel_series(table: pd.DataFrame) -> pd.DataFrame:
    """Forward convolutions with as many channels in as out, over their number."""
    rows = table[(table["sweep"] == "conv-channels") & (table["c"] == table["kout"])]
    rows = rows[(rows["pass"] == "fprop") & (rows["config"] == "")].sort_values("c")
    columns = ["c", "h", "w", "r", "batch", "dtype", "tflops", *ENDS, "predicted_tflops"]
    return _with_ends(rows)[columns]


def layout_series(table: pd.DataFrame) -> pd.DataFrame:
    """NHWC's speed over NCHW's, pair by pair of the same convolution, with the interval.

    Columns: label, dtype, pass, ratio, ratio_lo, ratio_hi.
    """
    rows = table[table["sweep"] == "conv-layouts"]
    same = ["batch", "c", "h", "w", "kout", "r", "s", "stride", "dtype", "pass", "config"]
    pairs = rows[rows["layout"] == "nhwc"].merge(
        rows[rows["layout"] == "nchw"], on=same, suffixes=("_nhwc", "_nchw")
    )
    nchw, nhwc = (
        pairs[[name + end for name in _STEADY]].set_axis(_STEADY, axis=1)
        for end in ("_nchw", "_nhwc")
    )
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
    """NHWC's speed over NCHW's, geometric mean, and in how many pairs it is clearly faster, slower.

    Args:
        pairs: of :func:`layout_series`, at least one.
    """
    faster, slower = int((pairs["ratio_lo"] > 1).sum()), int((pairs["ratio_hi"] < 1).sum())
    return geometric_mean(pairs["ratio"]), faster, slower


def roofline_series(table: pd.DataFrame) -> pd.DataFrame:
    """Each measured case once: intensity (FLOP/byte), measured and predicted TFLOP/s, dtype."""
    rows = _with_ends(bursts(table))
    return rows[["intensity", "tflops", *ENDS, "predicted_tflops", "dtype", "op"]]


def accuracy_series(table: pd.DataFrame) -> pd.DataFrame:
    """Measured (with its interval) and predicted time in µs, limit, group, and relative error."""
    names = {
        "time_us": "measured",
        "time_lo_us": "low",
        "time_hi_us": "high",
        "predicted_time_us": "predicted",
        "predicted_limit": "limit",
    }
    rows = table[[*names, "group"]].rename(columns=names)
    return rows.assign(error=rows["predicted"] / rows["measured"] - 1)
