"""Find cliffs: pairs of neighbouring sizes that take very different times."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.recordings.repetition import steady_ratio
from analysis.slices.series import DIMENSIONS

_NEAR = 1.02  # largest ratio of two neighbouring sizes
_SMALLEST = 16  # size from which on sizes that are one apart are neighbours, whatever their ratio
_REPEATED = 0.5  # share of a cliff's logarithm that another collection must show to repeat it
_SAME = ("dtype", "layout", "batch", "implementation", "cache", "mode")


def steps_of(rows: pd.DataFrame, along: str = "m") -> pd.DataFrame:
    """Return each pair of neighbouring sizes of GEMMs that are otherwise the same.

    Args:
        rows: rows of measurements.csv with times. Columns that tell cases apart may be missing.
        along: the dimension, m, n or k.

    Returns:
        The rows' columns for the smaller size, with ``after`` (the larger size), ``after_us``,
        ``ratio`` (of the times, larger size over smaller size) and ``certain``, which is True if
        the interval of a repetition (:func:`analysis.recordings.repetition.steady_ratio`) is on
        one side of 1, or if the rows have no interval.
    """
    # 1. Sort the sizes of each line. The shortest of several times of a size counts.
    fixed = [name for name in DIMENSIONS if name != along]
    keys = [*fixed, *(name for name in _SAME if name in rows)]
    ordered = rows.sort_values([*keys, along, "time_us"]).drop_duplicates([*keys, along])
    # 2. Put the next larger size of the line next to each size; it is NaN for the largest one.
    steady_columns = [name for name in ("steady_log", "steady_error") if name in rows]
    lines = ordered.groupby(keys, dropna=False, observed=True)
    after = lines[[along, "time_us", *steady_columns]].shift(-1)
    # 3. Judge each pair.
    one_more = (after[along] == ordered[along] + 1) & (ordered[along] >= _SMALLEST)
    are_near = one_more | (after[along] <= _NEAR * ordered[along])
    certain = pd.Series(True, index=ordered.index)
    if steady_columns:
        repetition = steady_ratio(after, ordered)
        certain = (
            (repetition["ratio_lo"] > 1)
            | (repetition["ratio_hi"] < 1)
            | repetition["ratio_lo"].isna()
        )
    steps = ordered.assign(
        after=after[along],
        after_us=after["time_us"],
        ratio=after["time_us"] / ordered["time_us"],
        certain=certain,
    )
    return steps[are_near].astype({"after": int}).reset_index(drop=True)


def repeated_steps(steps: pd.DataFrame, others: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the cliffs along M that another collection repeats.

    That collection must show a cliff in the same direction, at least half as large. The largest
    cliffs of one collection are partly due to chance, which differs in another collection.

    Args:
        steps: rows of :func:`steps_of`.
        others: other collections of the same machine by their names, with m, n, k, dtype, time_us.

    Returns:
        The cliffs with ``again``, the ratio in another collection, and ``by``, its name. If several
        collections repeat a cliff, both come from the one in which it is smallest.
    """
    shape = ["m", "n", "k", "dtype"]
    repeats = []
    for name, rows in others.items():
        times = rows.groupby(shape)["time_us"].min()
        smaller = pd.MultiIndex.from_frame(steps[shape])
        larger = pd.MultiIndex.from_frame(steps[["after", "n", "k", "dtype"]])
        # A shape that the other collection lacks has NaN as its time, and repeats nothing.
        repeated_ratio = times.reindex(larger).to_numpy() / times.reindex(smaller).to_numpy()
        with np.errstate(invalid="ignore"):
            cliff = np.log(steps["ratio"])
            is_repeated = np.log(repeated_ratio) * np.sign(cliff) >= _REPEATED * np.abs(cliff)
        repeats.append(steps.assign(again=repeated_ratio, by=name)[is_repeated.to_numpy()])
    if not repeats:
        return steps.assign(again=np.nan, by="").head(0)
    combined = pd.concat(repeats)
    combined["height"] = np.abs(np.log(combined["again"]))
    return combined.sort_values("height").drop_duplicates(shape).drop(columns="height")


def largest(steps: pd.DataFrame, count: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the ``count`` largest certain cliffs upwards, and as many downwards."""
    certain = steps[steps["certain"]]
    ups, downs = certain[certain["ratio"] > 1], certain[certain["ratio"] < 1]
    return ups.nlargest(count, "ratio"), downs.nsmallest(count, "ratio")


def steepest(lines: Mapping[str, pd.DataFrame]) -> tuple[str, pd.Series] | None:
    """Return the dimension and the row of the largest certain cliff upwards; None without any.

    Args:
        lines: for each dimension the rows to search, as :func:`steps_of` takes them.
    """
    ups_by_dimension: dict[str, pd.Series] = {}
    for along, rows in lines.items():
        ups, _ = largest(steps_of(rows, along), 1)
        for _, row in ups.iterrows():  # at most one
            ups_by_dimension[along] = row
    if not ups_by_dimension:
        return None
    steepest_along = max(
        ups_by_dimension, key=lambda along: float(ups_by_dimension[along]["ratio"])
    )
    return steepest_along, ups_by_dimension[steepest_along]
