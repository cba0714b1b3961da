"""Extract series for plots and reports from the table of measured and predicted times.

The table comes from :class:`analysis.model.fitted.Analysis`.
"""

from __future__ import annotations

import math
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.recordings.load import bursts, library_rows
from analysis.recordings.repetition import places_of, steady_ratio
from kernels.machine import Machine
from sweeps.timing.statistics import Z95

DIMENSIONS = ("m", "n", "k")
NEARLY = 0.9
"""Smallest share of the best speed at which a size is called fast."""
ENDS = ["tflops_lo", "tflops_hi"]
"""Columns with the speeds at the two ends of a time's interval."""
LEAST_COMPARED = 8  # fewest cases or pairs that a comparison may rest on
LARGEST_OFFSET = 16
"""Largest difference between a size and its base, the aligned size below it, in the sweep
``alignment``."""
_STEADY = ["steady_log", "steady_error"]
_LEAST_SIZES = 4  # fewest sizes of a line that is shown


def square_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return the speeds of vendor libraries on square GEMMs, in TFLOP/s.

    Returns:
        The columns m, dtype, tflops (measured), tflops_lo, tflops_hi (the speeds at the ends of the
        time's interval) and predicted_tflops.
    """
    rows = _with_ends(library_rows(table[table["sweep"] == "square"]))
    return rows.sort_values("m")[["m", "dtype", "tflops", *ENDS, "predicted_tflops"]]


def _with_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with the columns :data:`ENDS`, which are NaN where a time has no interval."""
    slowest = rows["flops"] / rows["time_hi_us"] / 1e6
    fastest = rows["flops"] / rows["time_lo_us"] / 1e6
    return rows.assign(tflops_lo=slowest, tflops_hi=fastest)


def fast_from(group: pd.DataFrame, speeds: str = "tflops") -> int | None:
    """Return the smallest size from which all sizes reach :data:`NEARLY` of the best speed.

    The result is None if the largest size does not reach this speed, or if ``group`` is empty.

    Args:
        group: rows of :func:`square_series` in one dtype.
        speeds: column with the speeds to judge: ``tflops``, or one of :data:`ENDS` to see how
            certain the result is.
    """
    # Speeds without an interval are compared by their measured value.
    judged = group[speeds].fillna(group["tflops"])
    slow = group[judged < NEARLY * group["tflops"].max()]
    above_slow = group if slow.empty else group[group["m"] > slow["m"].max()]
    return None if above_slow.empty else int(above_slow["m"].min())


def steps_series(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the longest line of cases along each dimension (m, n or k) in the sweep ``steps``.

    The cases of a line have the same sizes in the two other dimensions. The longest line is the one
    with the most sizes. A dimension without a line of at least four sizes is left out, and so are
    all cases of hand-written kernels.
    """
    rows = library_rows(table[table["sweep"] == "steps"])
    lines = {}
    for along in DIMENSIONS:
        fixed = [name for name in DIMENSIONS if name != along]
        candidates = [
            line for _, line in rows.groupby(fixed) if line[along].nunique() >= _LEAST_SIZES
        ]
        if candidates:
            longest = max(candidates, key=lambda line: line[along].nunique())
            lines[along] = longest.sort_values(along)
    return lines


def alignment_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return the relative speeds at each aligned size (the base) and at sizes just above it.

    Only cases that one run timed on the same GPU are compared.

    Returns:
        A table with the columns ``along`` (m, n or k), ``base``, ``offset`` (size minus base),
        ``dtype``, ``relative`` (speed over the speed at the base), and ``relative_lo`` and
        ``relative_hi`` (the ends of the relative speed's interval). The table is empty if no sizes
        can be compared.
    """
    rows = library_rows(table[table["sweep"] == "alignment"])
    series = []
    for along in DIMENSIONS:
        # The sweep varies one dimension from the base upwards. Both other dimensions are equal to
        # the base.
        fixed, other_fixed = [name for name in DIMENSIONS if name != along]
        with_equal_sizes = rows[rows[fixed] == rows[other_fixed]]
        for base in sorted(with_equal_sizes[fixed].unique()):
            line = with_equal_sizes[with_equal_sizes[fixed] == base]
            line = line[line[along].between(base, base + LARGEST_OFFSET)]
            for (dtype, _), group in line.groupby(["dtype", places_of(line)], sort=False):
                at_base = group[group[along] == base]
                if at_base.empty or len(group) < 3:  # the base and two other sizes
                    continue
                columns = {
                    "along": along,
                    "base": base,
                    "offset": group[along] - base,
                    "dtype": dtype,
                    **_relative_speed(group, at_base.iloc[0]),
                }
                series.append(pd.DataFrame(columns).sort_values("offset"))
    return pd.concat(series, ignore_index=True) if series else pd.DataFrame()


def _relative_speed(rows: pd.DataFrame, base: pd.Series) -> dict[str, pd.Series]:
    """Return the columns relative, relative_lo and relative_hi of :func:`alignment_series`."""
    work = rows["flops"] / base["flops"]
    is_base = rows.index == base.name
    # A ratio of times, base over row, becomes a ratio of speeds, row over base.
    time_ratio = steady_ratio(base, rows)
    return {
        "relative": (work * time_ratio["ratio"]).mask(is_base, 1.0),
        "relative_lo": (work * time_ratio["ratio_lo"]).mask(is_base, 1.0),
        "relative_hi": (work * time_ratio["ratio_hi"]).mask(is_base, 1.0),
    }


def mean_ratio(
    rows: pd.DataFrame, name: str = "relative", bases: int | None = None
) -> tuple[float, float, float]:
    """Return the geometric mean of at least two ratios, and both ends of its 95% interval.

    The interval combines the scatter of the ratios with the uncertainty of each ratio, which
    follows from the 95% interval in the columns ``<name>_lo`` and ``<name>_hi``. A ratio without an
    interval contributes only to the scatter. Errors that differ from ratio to ratio are counted
    twice, because they also cause scatter. The interval is therefore wider than necessary.

    ``bases`` is the number of distinct bases, the measured times that the ratios are relative to;
    None if each ratio has its own base. Averaging ratios with the same base does not reduce the
    error of the base. The variance of this error is taken to be half the variance of a ratio's
    error.
    """
    from scipy import stats  # slow to import, and most plots do not need it

    logs = np.log(rows[name].to_numpy(float))
    log_lo = np.log(rows[f"{name}_lo"].to_numpy(float))
    log_hi = np.log(rows[f"{name}_hi"].to_numpy(float))
    # A ratio without an interval adds no uncertainty of its own.
    errors = np.nan_to_num((log_hi - log_lo) / 2 / Z95)
    mean_square = np.mean(errors**2)
    squared_error = mean_square / len(logs)
    if bases is not None:
        squared_error = mean_square / 2 / len(logs) + mean_square / 2 / bases
    variance = np.var(logs, ddof=1) / len(logs) + squared_error
    half_interval = stats.t.ppf(0.975, len(logs) - 1) * math.sqrt(variance)
    mean = float(logs.mean())
    return math.exp(mean), math.exp(mean - half_interval), math.exp(mean + half_interval)


def mean_alignment(rows: pd.DataFrame) -> tuple[float, float, float]:
    """Return the mean of relative speeds, and both ends of its interval, as in :func:`mean_ratio`.

    ``rows`` are at least two rows of :func:`alignment_series`, none of which is a base.
    """
    series = rows[["along", "base", "dtype"]].drop_duplicates()
    return mean_ratio(rows, bases=len(series))


def channel_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return the speeds of forward convolutions with equal numbers of input and output channels.

    Only cases of the sweep ``conv-channels`` with the default config are returned. Speeds are in
    TFLOP/s, in the same columns as in :func:`square_series`.
    """
    rows = table[(table["sweep"] == "conv-channels") & (table["c"] == table["kout"])]
    rows = rows[(rows["pass"] == "fprop") & (rows["config"] == "")].sort_values("c")
    columns = ["c", "h", "w", "r", "batch", "dtype", "tflops", *ENDS, "predicted_tflops"]
    return _with_ends(rows)[columns]


def layout_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return the ratio of each convolution's speed in the layout NHWC to its speed in NCHW.

    Only times that one run measured on the same GPU are compared.

    Returns:
        The columns label (the sizes, as text), dtype, pass, ratio (speed in NHWC over speed in
        NCHW), and ratio_lo and ratio_hi (the ends of the ratio's interval).
    """
    rows = table[table["sweep"] == "conv-layouts"]
    rows = rows.assign(place=places_of(rows))
    sizes = ["batch", "c", "h", "w", "kout", "r", "s", "stride", "padding", "dilation", "groups"]
    keys = [*sizes, "dtype", "pass", "config", "place"]
    pairs = rows[rows["layout"] == "nhwc"].merge(
        rows[rows["layout"] == "nchw"], on=keys, suffixes=("_nhwc", "_nchw")
    )
    nchw = pairs[[name + "_nchw" for name in _STEADY]].set_axis(_STEADY, axis=1)
    nhwc = pairs[[name + "_nhwc" for name in _STEADY]].set_axis(_STEADY, axis=1)
    # A ratio of times, NCHW over NHWC, is the ratio of speeds, NHWC over NCHW.
    ratios = steady_ratio(nchw, nhwc)
    label = [f"{row.c}×{row.h}×{row.w}→{row.kout}, {row.r}×{row.s}" for row in pairs.itertuples()]
    return pd.DataFrame(
        {
            "label": label,
            "dtype": pairs["dtype"],
            "pass": pairs["pass"],
            **ratios,
        }
    )


def layout_summary(pairs: pd.DataFrame) -> tuple[float, int, int]:
    """Summarise at least one row of :func:`layout_series`.

    Returns:
        The geometric mean of the ratios, the number of pairs in which NHWC is significantly faster,
        and the number of pairs in which NHWC is significantly slower.
    """
    faster = int((pairs["ratio_lo"] > 1).sum())
    slower = int((pairs["ratio_hi"] < 1).sum())
    return geometric_mean(pairs["ratio"]), faster, slower


def roofline_series(table: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """Return the points of a roofline plot, one for each case that was timed in short batches.

    ``cache`` is the cache state of these cases, ``cold`` or ``warm``.

    Returns:
        The columns intensity (FLOP/byte), tflops (measured), tflops_lo, tflops_hi,
        predicted_tflops, limit (the predicted bottleneck), dtype and op.
    """
    rows = _with_ends(bursts(table, cache)).rename(columns={"predicted_limit": "limit"})
    return rows[["intensity", "tflops", *ENDS, "predicted_tflops", "limit", "dtype", "op"]]


def accuracy_series(table: pd.DataFrame) -> pd.DataFrame:
    """Return the measured and the predicted time of each case, with the error of the prediction.

    Returns:
        The columns measured, low and high (the interval of the measured time), predicted, limit
        (the predicted bottleneck), group (such as ``cublas gemm bf16``), and error: predicted /
        measured − 1. Times are in µs.
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


class FastestGemm(NamedTuple):
    """Fastest GEMM of a dtype: its speed in TFLOP/s, with an interval, and its share of the peak.

    ``share`` is at most 1, even if the GEMM was measured to be faster than the peak.
    """

    dtype: str
    tflops: float
    lo: float
    hi: float
    share: float
    cases: int


def fastest_gemms(rows: pd.DataFrame, machine: Machine) -> list[FastestGemm]:
    """Return the fastest GEMM of each dtype that has at least :data:`LEAST_COMPARED` GEMMs.

    ``rows`` come from :func:`roofline_series`.
    """
    fastest = []
    for dtype, gemms in rows[rows["op"] == "gemm"].groupby("dtype", sort=False):
        if len(gemms) < LEAST_COMPARED:
            continue
        row = gemms.loc[gemms["tflops"].idxmax()]
        # A measured peak is itself uncertain, so no GEMM is reported to exceed it.
        share = min(1.0, row["tflops"] * 1e12 / machine.peak(str(dtype)))
        fastest.append(
            FastestGemm(
                str(dtype),
                row["tflops"],
                row["tflops_lo"],
                row["tflops_hi"],
                share,
                len(gemms),
            )
        )
    return fastest
