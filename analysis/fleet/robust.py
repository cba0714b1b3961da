"""Averages that a few wild values do not move, and how uncertain they are.

All functions take arrays in which NaN stands for what was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, stdtrit

from sweeps.timing.statistics import Z95

Array = NDArray[np.float64]

_PARTS = 5  # one value of so many is left out at either end: trimming by 20 % is customary
_SHARED_DF = 4.0  # as many values more count what all rows say about their scatter
_LENT_DF = 100.0  # a scatter that is lent is of many rows
_MAD = 1.4826  # standard deviations in a median absolute deviation of normal values
_FAR = 3.5  # standard deviations: what lies further out is no part of a spread


@dataclass(frozen=True)
class Centres:
    """The centre of each row of a table, and what is known of its error.

    ``scatter`` is its variance by the scatter of the row's values, which a Student t of ``df``
    degrees of freedom belongs to; ``own`` its variance by the values' own errors. ``each`` is the
    variance of a single value, as it usually is. NaN: not known.
    """

    centre: Array
    scatter: Array
    df: Array
    own: Array
    each: float

    @property
    def variance(self) -> Array:
        """Of the centre, by the scatter where it is known: of few samples, intervals by order
        statistics are wider than 95 % and say too much.
        """
        return np.where(np.isfinite(self.scatter), self.scatter, self.own)

    def half_width(self, others: Any = 0.0) -> Array:
        """Of the 95 % interval, never narrower than the values' own errors say.

        Args:
            others: variance of errors that are in no row's scatter, a number or one for each row.
        """
        quantile = stdtrit(np.where(self.df > 0, self.df, np.nan), 0.975)
        inside = np.fmax(quantile**2 * self.scatter, Z95**2 * self.own)
        return np.sqrt(inside + Z95**2 * others)


def centres(values: Array, own: Array, middles_of: int = 0, lent: float = np.nan) -> Centres:
    """The trimmed mean of each row, without its smallest and its largest fifth.

    Its error is by J. Tukey and D. McLaughlin, "Less vulnerable confidence and significance
    procedures for location based on a single sample" (Sankhyā, 1963): from the values with each
    that is left out moved to the nearest that is not, with as many degrees of freedom as values
    are left, less one. Where those are few, the scatter is not well known; so a row's is averaged
    with that of all rows, which counts as four values more, as in G. Smyth, "Linear models and
    empirical Bayes methods for assessing differential expression" (2004).

    Args:
        values: (rows, columns).
        own: the standard error of each value; NaN where it is not known.
        middles_of: of how many rows each column's middle was taken off, which made the values
            scatter less than they should; 0 if it was not.
        lent: the variance of a single value elsewhere, for rows that all have just one.
    """
    known = np.isfinite(values)
    count = known.sum(axis=1)
    cut = count // _PARTS
    kept = count - 2 * cut
    place = np.arange(values.shape[1])
    ordered = np.sort(values, axis=1)  # NaN come last
    inner = (place >= cut[:, None]) & (place < (count - cut)[:, None])
    centre = _mean(np.where(inner, ordered, np.nan))
    ends = [np.where(inner, ordered, filling) for filling in (np.inf, -np.inf)]
    pulled_in = np.clip(values, ends[0].min(axis=1, initial=np.inf)[:, None],
                        ends[1].max(axis=1, initial=-np.inf)[:, None])  # fmt: skip
    squares = np.nansum((pulled_in - _mean(pulled_in)[:, None]) ** 2, axis=1)
    squares *= middles_of / (middles_of - 1) if middles_of > 1 else 1.0
    df = np.maximum(kept - 1, 0).astype(float)
    of_rows, df, each = _shared(squares, df, lent)
    number = np.where(kept > 0, kept, np.nan)
    own_each = _mean(np.where(known, own, np.nan) ** 2)
    return Centres(centre, of_rows / number, df, own_each / number, each)


def _shared(squares: Array, df: Array, lent: float) -> tuple[Array, Array, float]:
    """Variance of a value in each row, from the row's squares and what all rows have in common;
    its degrees of freedom; and what the rows have in common.
    """
    some = df > 0
    if not some.any():
        return np.full(len(df), lent), np.full(len(df), _LENT_DF), lent
    each = np.divide(squares, df, out=np.zeros(len(df)), where=some)
    # The middle one is not moved by rows that scatter wildly, but it is below the mean.
    common = float(np.median(squares[some] / chdtri(df[some], 0.5)))
    weight = np.minimum(_SHARED_DF, df.sum() - df)
    total = weight + df
    pooled = np.divide(weight * common + df * each, total, out=np.full(len(df), np.nan),
                       where=total > 0)  # fmt: skip
    return pooled, total, common


def middle(values: Array, axis: int = 0) -> Array:
    """Medians of what is known; NaN where nothing is."""
    ordered = np.sort(values, axis=axis)
    count = np.isfinite(values).sum(axis=axis, keepdims=True)
    places = np.maximum((count - 1) // 2, 0), np.maximum(count // 2, 0)
    last = values.shape[axis] - 1
    both = [np.take_along_axis(ordered, np.minimum(place, last), axis) for place in places]
    return np.squeeze(np.where(count > 0, (both[0] + both[1]) / 2, np.nan), axis=axis)


def deviation(values: Array) -> float:
    """Standard deviation of values around their median, which must be taken off, by the median
    absolute deviation; NaN if none is known.
    """
    known = np.abs(values[np.isfinite(values)])
    return _MAD * float(np.median(known)) if len(known) else np.nan


def spread(values: Array, noise: Array, centred: int = 1) -> float:
    """Standard deviation of what values measure, without the noise that they are measured with.

    Those beyond 3.5 standard deviations by :func:`deviation` are no part of it.

    Args:
        values: around a middle that was taken off.
        noise: the variance of each value's error.
        centred: how many middles were taken off, each of a group.

    Returns:
        At least 0; NaN if the values are no more than the groups.
    """
    known = np.isfinite(values) & np.isfinite(noise)
    if not known.any():
        return float("nan")
    far = _FAR * max(deviation(values[known]), float(np.sqrt(np.median(noise[known]))))
    near = known & (np.abs(np.where(known, values, 0.0)) <= far)
    if near.sum() <= centred:
        return float("nan")
    around = values[near] - (np.mean(values[near]) if centred == 1 else 0.0)
    variance = np.sum(around**2) / (near.sum() - centred) - np.mean(noise[near])
    return float(np.sqrt(max(0.0, variance)))


def _mean(values: Array) -> Array:
    """Of what is known in each row; NaN where nothing is."""
    count = np.isfinite(values).sum(axis=1)
    return np.divide(np.nansum(values, axis=1), count, out=np.full(len(values), np.nan),
                     where=count > 0)  # fmt: skip
