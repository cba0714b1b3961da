"""Measured times, looked up by problem and by its neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.advice.sizes import SizeIndex
from analysis.recordings.load import bursts, problems_of, stored_ordinarily
from kernels.problem import Problem

_MANY = 64  # shapes, for which one pass over the rows per shape would take longer


@dataclass(frozen=True)
class MeasuredTime:
    """A measured time and its interval, in seconds; the interval is NaN under six samples."""

    time: float
    lo: float
    hi: float

    @property
    def width(self) -> float:
        """Of the interval; infinite where there is none."""
        return math.inf if math.isnan(self.lo) else self.hi - self.lo


class Measurements:
    """Measured times in bursts, looked up by problem and by its neighbours."""

    def __init__(
        self, times: Mapping[Problem, Mapping[str, MeasuredTime]], warm: bool = False
    ) -> None:
        """Take what was measured.

        Args:
            times: maps a problem to the time of each implementation that computed it.
            warm: whether operands came from the cache where they fit it.
        """
        self.warm = warm
        self._times = times
        self._problems = list(times)
        self._index = SizeIndex(self._problems)

    @property
    def problems(self) -> Iterable[Problem]:
        """Every problem that was measured."""
        return self._times

    def of(self, problem: Problem) -> Mapping[str, MeasuredTime]:
        """Time of each implementation; empty if the problem was not measured."""
        return self._times.get(problem, {})

    def near(self, problem: Problem, less: float, more: float) -> list[Problem]:
        """Measured problems near this one; see :meth:`analysis.advice.sizes.SizeIndex.near`."""
        return [self._problems[i] for i in self._index.near(problem, less, more)]

    def ratio(self, problem: Problem, option: Problem) -> tuple[float, float, float] | None:
        """Time of ``problem`` over that of ``option`` and its interval, each by the fastest of the
        implementations that computed both; None where no interval is known.
        """
        both = self.of(problem).keys() & self.of(option).keys()
        if not both:
            return None
        before, after = (
            min((self.of(p)[name] for name in both), key=lambda t: t.time)
            for p in (problem, option)
        )
        if math.isnan(before.lo + after.lo):
            return None
        return before.time / after.time, before.lo / after.hi, before.hi / after.lo

    def winner(self, problem: Problem, library: str) -> str:
        """The fastest implementation if its interval lies below the library's, else the library."""
        entry = self.of(problem)
        if library not in entry:
            return library
        name = min(entry, key=lambda key: entry[key].time)
        return name if entry[name].hi < entry[library].lo else library


def rows_near(rows: pd.DataFrame, problems: Sequence[Problem], factor: float) -> pd.DataFrame:
    """The rows whose GEMM is as large as that of one of the problems, up to a factor in each size.

    A question about one shape needs few of a table's rows, and making problems of all takes longer
    than the answer. Of many shapes, all rows are returned.
    """
    if len(problems) > _MANY:
        return rows
    sizes = rows[["m", "n", "k"]].to_numpy(dtype=float)
    near = np.zeros(len(rows), dtype=bool)
    for problem in problems:
        gemm = problem.implied_gemm
        ratio = sizes / [gemm.m, gemm.n, gemm.k]
        near |= ((ratio <= factor) & (ratio * factor >= 1)).all(axis=1)
    return rows[near]


def read_measurements(rows: pd.DataFrame, cache: str = "cold") -> Measurements:
    """The measured times of ``ok`` rows: in bursts, of operands stored ordinarily.

    Args:
        rows: as loaded.
        cache: where the operands came from; that of a recording's most cases.
    """
    rows = bursts(rows[stored_ordinarily(rows)], cache)
    columns = (
        rows[name].to_numpy(dtype=float, na_value=np.nan) * 1e-6
        for name in ("time_us", "time_lo_us", "time_hi_us")
    )
    times: dict[Problem, dict[str, MeasuredTime]] = {}
    for problem, name, *values in zip(
        problems_of(rows), rows["implementation"], *columns, strict=True
    ):
        time = MeasuredTime(*values)
        known = times.setdefault(problem, {})
        # Of the same problem in two sweeps, the time with the narrower interval counts.
        if name not in known or time.width < known[name].width:
            known[name] = time
    return Measurements(times, cache == "warm")
