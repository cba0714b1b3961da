"""Measured times, looked up by problem and by its neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.advice.sizes import SizeIndex
from analysis.recordings.load import Recording, bursts, problems_of, stored_ordinarily
from analysis.recordings.repetition import (
    MeasuredTime,
    between_processes,
    case_ids,
    repeated_ratio,
    rounds_of,
)
from kernels.problem import Problem

_MANY = 64  # shapes, for which one pass over the rows per shape would take longer


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
        """Time of ``problem`` over that of ``option`` and the interval of a repetition, each by the
        fastest of the implementations that computed both; None where no interval is known.
        """
        both = self.of(problem).keys() & self.of(option).keys()
        if not both:
            return None
        before, after = (
            min((self.of(p)[name] for name in both), key=lambda t: t.time)
            for p in (problem, option)
        )
        return repeated_ratio(before, after)

    def winner(self, problem: Problem, library: str) -> str:
        """The fastest implementation if it is faster again, beyond doubt; else the library."""
        entry = self.of(problem)
        if library not in entry:
            return library
        name = min(entry, key=lambda key: entry[key].time)
        ratio = repeated_ratio(entry[library], entry[name])
        return name if ratio is not None and ratio[1] > 1 else library


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


def read_measurements(rows: pd.DataFrame, recording: Recording) -> Measurements:
    """The measured times of ``ok`` rows of a recording: in bursts, of operands stored ordinarily,
    which came from where they do in most of its cases.
    """
    rows = bursts(rows[stored_ordinarily(rows)], recording.cache)
    times_s = (
        rows[name].to_numpy(dtype=float, na_value=np.nan) * 1e-6
        for name in ("time_us", "time_lo_us", "time_hi_us")
    )
    between, rounds = between_processes(recording), rounds_of(recording)
    samples = [rounds.get(case, {}) for case in case_ids(rows)] if rounds else [{}] * len(rows)
    times: dict[Problem, dict[str, MeasuredTime]] = {}
    columns = (problems_of(rows), rows["implementation"], rows["run"].fillna(""), samples, *times_s)
    for problem, name, run, taken, seconds, lo, hi in zip(*columns, strict=True):
        time = MeasuredTime(seconds, lo, hi, taken, between.get(run, 0.0), run)
        known = times.setdefault(problem, {})
        # Of the same problem in two sweeps, the time with the narrower interval counts.
        if name not in known or time.width < known[name].width:
            known[name] = time
    return Measurements(times, recording.cache == "warm")
