"""Find cliffs: differences between the times of two neighbouring sizes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.recordings.repetition import steady_ratio
from analysis.slices.series import DIMENSIONS

_NEAR = 1.02  # largest ratio of two neighbouring sizes
_SMALLEST = 16  # from this size on, two sizes that differ by 1 are neighbours at any ratio
_REPEATED = 0.5  # share of a cliff's log ratio that another table must show to confirm it
_SAME = ("dtype", "layout", "batch", "implementation", "cache", "mode", "run", "worker", "gpu")
"""Columns in which the two GEMMs of a pair must agree. Columns that the table lacks are ignored.

The GEMMs must also have the same sizes along the two dimensions that are not searched for cliffs.
Times of different runs, workers or GPUs are not comparable."""


def neighbouring_pairs(rows: pd.DataFrame, along: str = "m") -> pd.DataFrame:
    """Return the pairs of otherwise equal GEMMs with neighbouring sizes along one dimension.

    Two sizes are neighbours if no size between them was measured, and the larger size is at most 2%
    larger. From 16 on, sizes that differ by 1 are also neighbours.

    Args:
        rows: measured GEMMs with an empty config; columns of measurements.csv other than m, n, k
            and time_us may be missing. If a case was timed several times in the same run on the
            same GPU, its shortest time is used.
        along: dimension along which the sizes are neighbours (m, n or k).

    Returns:
        A table with one row per pair. It has the columns of ``rows`` for the smaller size, and:

        - ``after``: the larger size;
        - ``after_us``: time at the larger size, in µs;
        - ``ratio``: time at the larger size over time at the smaller size;
        - ``certain``: True if the interval of the ratio
          (:func:`analysis.recordings.repetition.steady_ratio`) does not contain 1, or if the ratio
          has no interval.
    """
    # 1. Sort the sizes of each line.
    fixed = [name for name in DIMENSIONS if name != along]
    keys = [*fixed, *(name for name in _SAME if name in rows)]
    ordered = rows.sort_values([*keys, along, "time_us"]).drop_duplicates([*keys, along])
    # 2. Find the next larger size on the line of each size. It is NaN for the largest size.
    steady_columns = [name for name in ("steady_log", "steady_error") if name in rows]
    lines = ordered.groupby(keys, dropna=False, observed=True)
    after = lines[[along, "time_us", *steady_columns]].shift(-1)
    # 3. Decide which pairs are neighbours, and which ratios are certain.
    one_more = (after[along] == ordered[along] + 1) & (ordered[along] >= _SMALLEST)
    is_neighbour = one_more | (after[along] <= _NEAR * ordered[along])
    certain = pd.Series(True, index=ordered.index)
    if steady_columns:
        repetition = steady_ratio(after, ordered)
        certain = (
            (repetition["ratio_lo"] > 1)
            | (repetition["ratio_hi"] < 1)
            | repetition["ratio_lo"].isna()
        )
    pairs = ordered.assign(
        after=after[along],
        after_us=after["time_us"],
        ratio=after["time_us"] / ordered["time_us"],
        certain=certain,
    )
    return pairs[is_neighbour].astype({"after": int}).reset_index(drop=True)


def confirmed_pairs(pairs: pd.DataFrame, others: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the pairs along M that at least one other table of the machine confirms.

    A table confirms a pair if the time changes in the same direction in this table, and the log
    ratio of the two times is at least half as large as in ``pairs``. A pair with equal times is
    never confirmed. The largest cliffs of one table are partly noise, which a second table does not
    repeat.

    Args:
        pairs: result of :func:`neighbouring_pairs` along M.
        others: other tables of the same machine, by name. Each table needs the columns m, n, k,
            dtype and time_us.

    Returns:
        The confirmed pairs with two more columns: ``by``, the name of the table that confirms the
        pair, and ``again``, the ratio in this table. If several tables confirm a pair, the one with
        the smallest change is named.
    """
    shape = ["m", "n", "k", "dtype"]
    confirmed = []
    for name, rows in others.items():
        times = rows.groupby(shape)["time_us"].min()
        smaller = pd.MultiIndex.from_frame(pairs[shape])
        larger = pd.MultiIndex.from_frame(pairs[["after", "n", "k", "dtype"]])
        # If the other table lacks one of the shapes, the ratio is NaN and confirms nothing.
        other_ratio = times.reindex(larger).to_numpy() / times.reindex(smaller).to_numpy()
        with np.errstate(invalid="ignore"):
            change = np.log(pairs["ratio"])
            is_confirmed = np.log(other_ratio) * np.sign(change) >= _REPEATED * np.abs(change)
        is_confirmed &= change != 0  # otherwise, there is no change to repeat
        confirmed.append(pairs.assign(again=other_ratio, by=name)[is_confirmed.to_numpy()])
    if not confirmed:
        return pairs.assign(again=np.nan, by="").head(0)
    # If several tables confirm a pair, keep the row with the smallest change. All rows of a pair
    # have the index of the pair.
    combined = pd.concat(confirmed)
    smallest_first = combined.sort_values("again", key=lambda ratio: np.abs(np.log(ratio)))
    return smallest_first[~smallest_first.index.duplicated()]


def largest(pairs: pd.DataFrame, count: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the largest certain upward and downward cliffs, at most ``count`` of each kind.

    At an upward cliff, the larger size takes more time.
    """
    certain = pairs[pairs["certain"]]
    ups = certain[certain["ratio"] > 1]
    downs = certain[certain["ratio"] < 1]
    return ups.nlargest(count, "ratio"), downs.nsmallest(count, "ratio")


def largest_cliff(rows_by_dimension: Mapping[str, pd.DataFrame]) -> tuple[str, pd.Series] | None:
    """Find the largest certain upward cliff along any of the given dimensions.

    Args:
        rows_by_dimension: for each dimension, the rows to search, as :func:`neighbouring_pairs`
            takes them.

    Returns:
        The dimension of the largest cliff, and the cliff's row in the result of
        :func:`neighbouring_pairs`; None if no upward cliff is certain.
    """
    cliffs: dict[str, pd.Series] = {}  # largest cliff by dimension
    for along, rows in rows_by_dimension.items():
        ups, _ = largest(neighbouring_pairs(rows, along), 1)
        if len(ups):
            cliffs[along] = ups.iloc[0]
    if not cliffs:
        return None
    dimension = max(cliffs, key=lambda along: float(cliffs[along]["ratio"]))
    return dimension, cliffs[dimension]
