"""Look up the measured times of problems, and measured problems near another one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.advice.claims import expect, from_processes
from analysis.advice.sizes import SizeIndex, dimensions
from analysis.recordings.confirmed import Pair, confirmed_pairs
from analysis.recordings.load import Recording, bursts, problems_of, stored_ordinarily
from analysis.recordings.repetition import (
    MeasuredTime,
    between_cases,
    between_processes,
    case_ids,
    places_of,
    repeated_ratio,
    rounds_of,
)
from kernels.problem import Problem
from sweeps.cases.case import Way

_MANY = 64  # shapes; for more, one pass over the table per shape takes too long

KINDS = ("pad", "choose")
"""Kinds of queries: ``pad`` needs at least the given sizes, ``choose`` may pick among sizes near
them."""

Ratio = tuple[float, float, float]
"""A time ratio and the two ends of its interval."""


class Measurements:
    """Times measured in bursts, to look up by problem, and measured problems near another one."""

    def __init__(
        self,
        times: Mapping[Problem, Mapping[str, MeasuredTime]],
        warm: bool = False,
        pairs: Sequence[Pair] = (),
        again: Mapping[Way, Sequence[MeasuredTime]] | None = None,
    ) -> None:
        """Store the measured times, and evaluate the confirmed pairs.

        Args:
            times: for each problem, the time of every implementation that computed it.
            warm: True if operands came from the cache where they fit it.
            pairs: pairs of ways that were re-timed together.
            again: all times of each way that was measured in several places (run, worker and
                GPU); ``times`` has only one of them. Only times from the same place are compared.
        """
        self._again = again or {}
        self.warm = warm
        self._confirmed: dict[tuple[str, Problem, Problem], Ratio] = {}
        self._other_ways: dict[Way, list[tuple[str, Ratio]]] = {}
        for kind in KINDS if pairs else ():
            for (before, after), ratio in _expected_ratios(pairs, kind).items():
                if before[1] == after[1]:
                    self._confirmed[kind, before[0], after[0]] = ratio
                elif kind == "pad":
                    self._other_ways.setdefault(before, []).append((after[1], ratio))
        self._times = times
        self._problems = list(times)
        self._index = SizeIndex(self._problems)

    @property
    def problems(self) -> Iterable[Problem]:
        """All problems that were measured."""
        return self._times

    @property
    def timed_anew(self) -> set[Problem]:
        """Problems that were re-timed together with another size or implementation."""
        sizes = {before for _, before, _ in self._confirmed}
        return sizes | {problem for problem, _ in self._other_ways}

    def times_of(self, problem: Problem) -> Mapping[str, MeasuredTime]:
        """Return the time of each implementation; empty if the problem was not measured."""
        return self._times.get(problem, {})

    def near(self, problem: Problem, less: float, more: float) -> list[Problem]:
        """Return the measured problems whose sizes lie in a window around this one's.

        See :meth:`analysis.advice.sizes.SizeIndex.near`.
        """
        return [self._problems[i] for i in self._index.near(problem, less, more)]

    def confirmed(self, problem: Problem, option: Problem, kind: str) -> Ratio | None:
        """Return the confirmed time of ``problem`` over that of ``option``, with its interval.

        This is the value to expect given the pair's samples. None if the two were not re-timed
        together. The distribution of gains depends on the query, so ``kind`` (``pad`` or
        ``choose``) matters.
        """
        return self._confirmed.get((kind, problem, option))

    def other_ways(self, problem: Problem, library: str) -> list[tuple[str, Ratio]]:
        """Return the implementations that were re-timed together with a vendor library.

        Each comes with the ratio of the vendor library's time to its own time.
        """
        return self._other_ways.get((problem, library), [])

    def ratio(self, problem: Problem, option: Problem) -> Ratio | None:
        """Return the measured time of ``problem`` over that of ``option``, with its interval.

        The interval is where the ratio of a repetition would lie. Each problem has the time of its
        fastest implementation, among those that computed both problems. None if no interval is
        known.
        """
        both = self.times_of(problem).keys() & self.times_of(option).keys()
        if not both:
            return None
        before = (problem, min(both, key=lambda name: self.times_of(problem)[name].time))
        after = (option, min(both, key=lambda name: self.times_of(option)[name].time))
        return self._compared(before, after)

    def plain_ratio(self, problem: Problem, option: Problem) -> float | None:
        """Return the time of ``problem`` over that of ``option`` in a public table.

        The table has single times without an interval. None if it does not have both.
        """
        both = self.times_of(problem).keys() & self.times_of(option).keys()
        if not both:
            return None
        before = min((self.times_of(problem)[n] for n in both), key=_seconds)
        after = min((self.times_of(option)[n] for n in both), key=_seconds)
        single = math.isnan(before.lo) and math.isnan(after.lo)
        return before.time / after.time if single and before.run == after.run else None

    def _compared(self, before: Way, after: Way) -> Ratio | None:
        """Return the ratio of two ways from the place with the narrowest intervals.

        None if no place measured both.
        """
        before_times = self._again.get(before) or [self.times_of(before[0])[before[1]]]
        after_times = self._again.get(after) or [self.times_of(after[0])[after[1]]]
        pairs = [
            (first, second)
            for first in before_times
            for second in after_times
            if first.run == second.run
        ]
        best = min(pairs, key=lambda p: p[0].width + p[1].width, default=None)
        return repeated_ratio(*best) if best else None

    def ratio_of(self, before: Way, after: Way) -> Ratio | None:
        """Return the time of one way over that of another, with the interval of a repetition.

        None if one of the ways was not measured or has no interval.
        """
        if any(name not in self.times_of(problem) for problem, name in (before, after)):
            return None
        return self._compared(before, after)

    def winner(self, problem: Problem, library: str) -> str:
        """Return the fastest implementation if it would certainly win again, else ``library``."""
        entry = self.times_of(problem)
        if library not in entry:
            return library
        name = min(entry, key=lambda key: entry[key].time)
        ratio = self._compared((problem, library), (problem, name))
        return name if ratio is not None and ratio[1] > 1 else library


def _seconds(time: MeasuredTime) -> float:
    return time.time


def _expected_ratios(pairs: Sequence[Pair], kind: str) -> dict[tuple[Way, Way], Ratio]:
    """Return the expected time ratio of each pair that answers one kind of query.

    For ``choose``, gains are in work per second and every pair counts. For ``pad``, the second
    problem has to contain the first.
    """
    relevant = [p for p in pairs if kind == "choose" or _contains(p.after[0], p.before[0])]
    works = [p.after[0].flops / p.before[0].flops if kind == "choose" else 1.0 for p in relevant]
    gains = from_processes(
        [
            [[x + math.log(work) for x in blocks] for blocks in p.log_ratios]
            for p, work in zip(relevant, works, strict=True)
        ],
        [p.between for p in relevant],
        [p.cases for p in relevant],
    )
    return {
        (p.before, p.after): (e.ratio / work, e.lo / work, e.hi / work)
        for p, work, e in zip(relevant, works, expect(gains), strict=True)
    }


def _contains(larger: Problem, smaller: Problem) -> bool:
    """Return True if no size of ``larger`` is below that of ``smaller``."""
    return all(getattr(larger, d) >= getattr(smaller, d) for d in dimensions(smaller))


def rows_near(
    rows: pd.DataFrame, problems: Sequence[Problem], factor: float, many: bool = False
) -> pd.DataFrame:
    """Return the rows whose GEMM is, in each size, within a factor of a problem's GEMM.

    A query about one shape needs few of a table's rows, and creating a problem for every row takes
    longer than answering the query. For many shapes, all rows are returned, unless ``many`` says
    that there are far more rows than shapes.
    """
    if len(problems) > _MANY and not many:
        return rows
    sizes = rows[["m", "n", "k"]].to_numpy(dtype=float, na_value=np.nan)
    near = np.zeros(len(rows), dtype=bool)
    for problem in problems:
        gemm = problem.implied_gemm
        ratio = sizes / [gemm.m, gemm.n, gemm.k]
        near |= ((ratio <= factor) & (ratio * factor >= 1)).all(axis=1)
    return rows[near]


def read_measurements(rows: pd.DataFrame, recording: Recording) -> Measurements:
    """Read the measured times of a recording from its ``ok`` rows.

    Only bursts count, with operands that are stored ordinarily and come from the same place (cache
    or memory) as in most of the recording's cases.

    A time from a user's own file gets the interval of a single time. A time from a public table
    gets none, because the user may run another framework or version. :mod:`analysis.model.fit`
    accounts for that.
    """
    rows = bursts(rows[stored_ordinarily(rows)], recording.cache)
    times_s = (
        rows[name].to_numpy(dtype=float, na_value=np.nan) * 1e-6
        for name in ("time_us", "time_lo_us", "time_hi_us")
    )
    rounds = rounds_of(recording)
    between, of_cases = between_processes(recording), between_cases(recording)
    samples = [rounds.get(case, {}) for case in case_ids(rows)] if rounds else [{}] * len(rows)
    times: dict[Problem, dict[str, MeasuredTime]] = {}
    again: dict[Way, list[MeasuredTime]] = {}
    runs = rows["run"].fillna("")
    columns = (
        problems_of(rows),
        rows["implementation"],
        runs,
        places_of(rows),
        samples,
        *times_s,
    )
    for problem, name, run, place, taken, seconds, lo, hi in zip(*columns, strict=True):
        deviation = between.get(run, 0.0), of_cases.get(run, 0.0)
        if math.isnan(lo) and recording.public and not recording.is_public_table:
            time = MeasuredTime.single(seconds, place)
        else:
            time = MeasuredTime(seconds, lo, hi, taken, *deviation, place)
        again.setdefault((problem, name), []).append(time)
        problem_times = times.setdefault(problem, {})
        # If two sweeps measured the same problem, the time with the narrower interval counts.
        if name not in problem_times or time.width < problem_times[name].width:
            problem_times[name] = time
    several = {way: way_times for way, way_times in again.items() if len(way_times) > 1}
    return Measurements(times, recording.cache == "warm", confirmed_pairs(recording), several)
