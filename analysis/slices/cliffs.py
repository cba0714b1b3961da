"""Cliffs: neighbouring sizes of which one takes much more, or much less, time than the other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.recordings.repetition import steady_ratio
from analysis.slices.series import DIMENSIONS

_NEAR = 1.02  # two sizes are neighbours up to this ratio,
_SMALLEST = 16  # or if they are one apart; below this size, one more is much more work
_REPEATED = 0.5  # share of a cliff's logarithm that another collection must show to repeat it
_SAME = ("dtype", "layout", "batch", "implementation", "cache", "mode")


def steps_of(rows: pd.DataFrame, along: str = "m") -> pd.DataFrame:
    """Return each pair of neighbouring sizes of GEMMs that are otherwise the same.

    Args:
        rows: rows of measurements.csv with times. Columns that tell cases apart may be missing.
        along: the dimension, m, n or k.

    Returns:
        The rows' columns for the smaller size, with ``after`` (the larger size), ``after_us``,
        ``ratio`` (of the times, larger size over smaller size) and ``certain``. The latter is True
        if the interval of a repetition (:func:`analysis.recordings.repetition.steady_ratio`) is on
        one side of 1, or if the rows have no interval.
    """
    fixed = [name for name in DIMENSIONS if name != along]
    keys = [*fixed, *(name for name in _SAME if name in rows)]
    ordered = rows.sort_values([*keys, along, "time_us"]).drop_duplicates([*keys, along])
    known = [name for name in ("steady_log", "steady_error") if name in rows]
    after = ordered.groupby(keys, dropna=False, observed=True)[[along, "time_us", *known]].shift(-1)
    one_more = (after[along] == ordered[along] + 1) & (ordered[along] >= _SMALLEST)
    near = one_more | (after[along] <= _NEAR * ordered[along])
    apart = pd.Series(True, index=ordered.index)
    if known:
        of_two = steady_ratio(after, ordered)
        apart = (of_two["ratio_lo"] > 1) | (of_two["ratio_hi"] < 1) | of_two["ratio_lo"].isna()
    steps = ordered.assign(
        after=after[along],
        after_us=after["time_us"],
        ratio=after["time_us"] / ordered["time_us"],
        certain=apart,
    )
    return steps[near].astype({"after": int}).reset_index(drop=True)


def repeated_steps(steps: pd.DataFrame, others: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the cliffs along M that another collection repeats.

    It must show a cliff in the same direction that is at least half as large. The largest cliffs of
    one collection are partly due to chance, which differs in another collection.

    Args:
        steps: rows of :func:`steps_of`.
        others: other collections of the same machine by their names, with m, n, k, dtype, time_us.

    Returns:
        The cliffs with ``again``, the ratio in another collection, and ``by``, its name. If several
        collections repeat a cliff, it is the one in which the cliff is smallest.
    """
    found = []
    for name, rows in others.items():
        times = rows.groupby(["m", "n", "k", "dtype"])["time_us"].min()
        before, after = (
            times.reindex(pd.MultiIndex.from_frame(steps[[size, "n", "k", "dtype"]])).to_numpy()
            for size in ("m", "after")
        )
        again = after / before
        with np.errstate(invalid="ignore"):
            same = np.log(again) * np.sign(np.log(steps["ratio"])) >= _REPEATED * np.abs(
                np.log(steps["ratio"])
            )
        found.append(steps.assign(again=again, by=name)[same.to_numpy()])
    if not found:
        return steps.assign(again=np.nan, by="").head(0)
    each = pd.concat(found)
    each["size"] = np.abs(np.log(each["again"]))
    keys = ["m", "n", "k", "dtype"]
    return each.sort_values("size").drop_duplicates(keys).drop(columns="size")


def largest(steps: pd.DataFrame, count: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the largest cliffs upwards and downwards that are beyond their intervals."""
    certain = steps[steps["certain"]]
    ups, downs = certain[certain["ratio"] > 1], certain[certain["ratio"] < 1]
    return ups.nlargest(count, "ratio"), downs.nsmallest(count, "ratio")


def steepest(lines: Mapping[str, pd.DataFrame]) -> tuple[str, pd.Series] | None:
    """Return the largest cliff upwards beyond its interval, with its dimension; None without any.

    Args:
        lines: for each dimension the rows to search, as :func:`steps_of` takes them.
    """
    found = []
    for along, rows in lines.items():
        ups, _ = largest(steps_of(rows, along), 1)
        found += [(along, row) for _, row in ups.iterrows()]
    return max(found, key=lambda step: float(step[1]["ratio"]), default=None)
