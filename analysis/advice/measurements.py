"""Look up the measured times of a problem, and the measured problems with similar sizes."""

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
    Rounds,
    between_cases,
    between_processes,
    case_ids,
    places_of,
    repeated_ratio,
    rounds_of,
)
from kernels.problem import Problem
from sweeps.cases.case import Contender

_MOST_FILTERED = 64  # problems; with more, filtering the table once per problem takes too long
_ROUNDED = 1e-9  # tolerance, because rounding may move the ratio of two sizes past its limit

KINDS = ("pad", "choose")
"""Kinds of queries: ``pad`` asks for sizes that are at least the given ones, and ``choose`` for any
sizes near them."""

Ratio = tuple[float, float, float]
"""A time ratio and the two ends of its interval."""


class Measurements:
    """Burst times of the measured problems, indexed by problem and by size.

    Times are compared only if they come from the same place (run, worker and GPU).
    """

    def __init__(
        self,
        times: Mapping[Problem, Mapping[str, MeasuredTime]],
        warm: bool = False,
        pairs: Sequence[Pair] = (),
        repeats: Mapping[Contender, Sequence[MeasuredTime]] | None = None,
    ) -> None:
        """Store the measured times, and compute the expected ratios of the re-timed pairs.

        Args:
            times: for each problem, the time of every implementation that computed it.
            warm: True if times are to be predicted for a warm cache.
            pairs: re-timed pairs of contenders; a contender is a problem and an implementation.
            repeats: all times of each contender that was measured several times; ``times`` has only
                one of these times.
        """
        self._repeats = dict(repeats or {})
        self.warm = warm
        self._confirmed: dict[tuple[str, Problem, Problem], Ratio] = {}
        self._other_implementations: dict[Contender, list[tuple[str, Ratio]]] = {}
        for kind in KINDS:
            for (before, after), ratio in _expected_ratios(pairs, kind).items():
                problem, implementation = before
                option, other_implementation = after
                if implementation == other_implementation:
                    self._confirmed[kind, problem, option] = ratio
                # Other implementations are re-timed only at the original sizes, where the FLOPs are
                # equal. The ratios for pad queries therefore serve both kinds of queries.
                elif kind == "pad":
                    self._other_implementations.setdefault(before, []).append(
                        (other_implementation, ratio)
                    )
        self.older: frozenset[Contender] = frozenset()
        """Contenders whose times are only in the older measurements of :meth:`with_older`."""
        self._times = times
        self._problems = list(times)
        self._index = SizeIndex(self._problems)

    def with_older(self, older: Measurements) -> Measurements:
        """Return these measurements together with older ones from another recording.

        If a contender was measured in both recordings, :meth:`times_of` returns the newer time, but
        :meth:`ratio` may use either time.
        """
        times = {
            problem: {**older.times_of(problem), **self.times_of(problem)}
            for problem in {**older._times, **self._times}
        }
        joined = Measurements(times, self.warm)
        joined.older = frozenset(older._contenders() - self._contenders())
        joined._confirmed = older._confirmed | self._confirmed
        joined._other_implementations = older._other_implementations | self._other_implementations
        joined._repeats = {**older._repeats, **self._repeats}
        for contender in older._contenders() & self._contenders():
            joined._repeats[contender] = [
                *self._all_times(contender),
                *older._all_times(contender),
            ]
        return joined

    def _contenders(self) -> set[Contender]:
        return {(problem, name) for problem, times in self._times.items() for name in times}

    @property
    def problems(self) -> Iterable[Problem]:
        """All measured problems."""
        return self._times

    @property
    def retimed(self) -> set[Problem]:
        """Original problems of all re-timed pairs."""
        sizes = {before for _, before, _ in self._confirmed}
        return sizes | {problem for problem, _ in self._other_implementations}

    def times_of(self, problem: Problem) -> Mapping[str, MeasuredTime]:
        """Return the time of each implementation, or an empty mapping for an unmeasured problem."""
        return self._times.get(problem, {})

    def near(self, problem: Problem, less: float, more: float) -> list[Problem]:
        """Return the measured problems that :meth:`SizeIndex.near` finds near a problem."""
        return [self._problems[i] for i in self._index.near(problem, less, more)]

    def confirmed(self, problem: Problem, option: Problem, kind: str) -> Ratio | None:
        """Return the time ratio of a re-timed pair (``problem`` over ``option``) with its interval.

        The ratio is an expected value, given all re-timed pairs that answer this kind of query
        (``pad`` or ``choose``). Return None if ``problem`` and ``option`` are not such a pair.
        """
        return self._confirmed.get((kind, problem, option))

    def other_implementations(self, problem: Problem, library: str) -> list[tuple[str, Ratio]]:
        """Return the implementations that were re-timed together with ``library`` on a problem.

        Each has a ratio: the time of ``library`` over the time of the implementation.
        """
        return self._other_implementations.get((problem, library), [])

    def ratio(self, problem: Problem, option: Problem) -> Ratio | None:
        """Return the ratio of measured times (``problem`` over ``option``) with its interval.

        The interval covers the ratio that a second measurement of both problems would give. For
        each problem, the fastest of the implementations that computed both problems is used. Return
        None if the times cannot be compared, or if the interval is unknown.
        """
        contenders = self._fastest_common(problem, option)
        if contenders is None:
            return None
        before, after = contenders
        return self._compared(before, after)

    def plain_ratio(self, problem: Problem, option: Problem) -> float | None:
        """Return the ratio of two times without intervals (``problem`` over ``option``).

        Times from public tables have no intervals. The implementations are chosen as in
        :meth:`ratio`. Return None if a time has an interval, or if the times cannot be compared.
        """
        contenders = self._fastest_common(problem, option)
        if contenders is None:
            return None
        (_, before_name), (_, after_name) = contenders
        before = self.times_of(problem)[before_name]
        after = self.times_of(option)[after_name]
        has_interval = not (math.isnan(before.lo) and math.isnan(after.lo))
        if has_interval or before.place != after.place:
            return None
        return before.time / after.time

    def _fastest_common(
        self, problem: Problem, option: Problem
    ) -> tuple[Contender, Contender] | None:
        """Return each problem with the fastest of the implementations that computed both problems.

        Return None if no implementation computed both.
        """
        before_times, after_times = self.times_of(problem), self.times_of(option)
        common = before_times.keys() & after_times.keys()
        if not common:
            return None
        before_name = min(common, key=lambda name: before_times[name].time)
        after_name = min(common, key=lambda name: after_times[name].time)
        return (problem, before_name), (option, after_name)

    def _compared(self, before: Contender, after: Contender) -> Ratio | None:
        """Return the ratio of two contenders' times from the same place, with its interval.

        Return None if no two times come from the same place, or if the interval is unknown.
        """
        pairs = [
            (before_time, after_time)
            for before_time in self._all_times(before)
            for after_time in self._all_times(after)
            if before_time.place == after_time.place
        ]
        if not pairs:
            return None
        best_before, best_after = min(pairs, key=lambda pair: sum(time.width for time in pair))
        return repeated_ratio(best_before, best_after)

    def _all_times(self, contender: Contender) -> Sequence[MeasuredTime]:
        problem, implementation = contender
        return self._repeats.get(contender) or [self.times_of(problem)[implementation]]

    def contender_ratio(self, before: Contender, after: Contender) -> Ratio | None:
        """Return the time of ``before`` over the time of ``after``, with the ratio's interval.

        Return None if a time is missing, if the times cannot be compared, or if the interval is
        unknown.
        """
        if any(name not in self.times_of(problem) for problem, name in (before, after)):
            return None
        return self._compared(before, after)

    def winner(self, problem: Problem, library: str) -> str:
        """Return ``library``, or the fastest implementation if it is significantly faster."""
        times = self.times_of(problem)
        if library not in times:
            return library
        fastest = min(times, key=lambda name: times[name].time)
        ratio = self._compared((problem, library), (problem, fastest))
        if ratio is None:
            return library
        _, lo, _ = ratio
        return fastest if lo > 1 else library


def _expected_ratios(pairs: Sequence[Pair], kind: str) -> dict[tuple[Contender, Contender], Ratio]:
    """Return the expected time ratio of each re-timed pair that answers one kind of query.

    A pad query does not allow smaller sizes, so it uses only pairs in which no size shrinks.
    """
    # 1. Select the pairs, and convert their log ratios of times to log ratios of what is compared.
    #    A time ratio times ``work`` is a ratio of speeds for ``choose``, and of times for ``pad``.
    relevant: list[Pair] = []
    works: list[float] = []  # one for each relevant pair
    log_gains: list[list[list[float]]] = []  # by pair, process and block
    for pair in pairs:
        before_problem, _ = pair.before
        after_problem, _ = pair.after
        if kind == "choose":
            work = after_problem.flops / before_problem.flops
        elif _contains(after_problem, before_problem):
            work = 1.0
        else:
            continue
        log_work = math.log(work)
        relevant.append(pair)
        works.append(work)
        log_gains.append(
            [[log_ratio + log_work for log_ratio in blocks] for blocks in pair.log_ratios]
        )
    # 2. Compute the expected gains, and convert them back to time ratios.
    gains = from_processes(
        log_gains, [pair.between for pair in relevant], [pair.cases for pair in relevant]
    )
    return {
        (pair.before, pair.after): (gain.ratio / work, gain.lo / work, gain.hi / work)
        for pair, work, gain in zip(relevant, works, expect(gains), strict=True)
    }


def _contains(larger: Problem, smaller: Problem) -> bool:
    return all(getattr(larger, d) >= getattr(smaller, d) for d in dimensions(smaller))


def rows_near(
    rows: pd.DataFrame, problems: Sequence[Problem], factor: float, always: bool = False
) -> pd.DataFrame:
    """Return the rows near any of the problems.

    A row is near a problem if M, N and K each differ by at most a factor of ``factor``. Filtering
    saves time, because creating a :class:`Problem` for every row takes longer than answering a
    query. For more than 64 problems, filtering itself takes too long, so all rows are returned
    unless ``always`` is True.
    """
    if len(problems) > _MOST_FILTERED and not always:
        return rows
    sizes = rows[["m", "n", "k"]].to_numpy(dtype=float, na_value=np.nan)
    near = np.zeros(len(rows), dtype=bool)
    limit = factor * (1 + _ROUNDED)
    for problem in problems:
        gemm = problem.implied_gemm
        ratio = sizes / [gemm.m, gemm.n, gemm.k]
        near |= ((ratio <= limit) & (ratio * limit >= 1)).all(axis=1)
    return rows[near]


def read_measurements(rows: pd.DataFrame, recording: Recording) -> Measurements:
    """Read the measured times of the given rows, which are ``ok`` rows of a recording.

    Only burst times in the recording's main cache state are used, and only those of cases whose
    operands are dense and aligned. On each problem, an implementation's times with the default
    config replace its times with other configs. A time that the user imported without an interval
    gets the interval of a single measurement.

    Raises:
        UserError: if a rounds.csv cannot be read or is too damaged, or if the confirmed.csv in the
            recording's folder cannot be used.
    """
    # 1. Collect the problem, the place, the samples and the times of each row.
    rows = bursts(rows[stored_ordinarily(rows)], recording.cache)
    rounds = rounds_of(recording)
    no_rounds: Rounds = {}
    # Computing the case ids takes long, so it is done only if the recording has rounds of samples.
    row_rounds = [no_rounds] * len(rows)
    if rounds:
        row_rounds = [rounds.get(case, no_rounds) for case in case_ids(rows)]
    seconds_of_rows = rows["time_us"].to_numpy(dtype=float, na_value=np.nan) * 1e-6
    lows_of_rows = rows["time_lo_us"].to_numpy(dtype=float, na_value=np.nan) * 1e-6
    highs_of_rows = rows["time_hi_us"].to_numpy(dtype=float, na_value=np.nan) * 1e-6
    run_deviations = between_processes(recording)
    run_case_deviations = between_cases(recording)
    imported_by_user = recording.public and not recording.is_public_table
    # 2. Convert each row to a measured time with its interval.
    default_times: dict[Contender, list[MeasuredTime]] = {}
    other_times: dict[Contender, list[MeasuredTime]] = {}
    for problem, name, config, run, place, samples, seconds, lo, hi in zip(
        problems_of(rows),
        rows["implementation"],
        rows["config"].fillna(""),
        rows["run"].fillna(""),
        places_of(rows),
        row_rounds,
        seconds_of_rows,
        lows_of_rows,
        highs_of_rows,
        strict=True,
    ):
        if math.isnan(lo) and imported_by_user:
            time = MeasuredTime.single(seconds, place)
        else:
            time = MeasuredTime(
                seconds,
                lo,
                hi,
                rounds=samples,
                between=run_deviations.get(run, 0.0),
                between_cases=run_case_deviations.get(run, 0.0),
                place=place,
            )
        times_by_contender = other_times if config else default_times
        times_by_contender.setdefault((problem, name), []).append(time)
    # 3. Choose one time of each implementation: the one with the narrowest interval. Times with the
    #    default config replace those with other configs.
    all_times = other_times | default_times
    times: dict[Problem, dict[str, MeasuredTime]] = {}
    for (problem, name), contender_times in all_times.items():
        narrowest = min(contender_times, key=lambda time: time.width)
        times.setdefault(problem, {})[name] = narrowest
    repeats = {
        contender: contender_times
        for contender, contender_times in all_times.items()
        if len(contender_times) > 1
    }
    return Measurements(times, recording.cache == "warm", confirmed_pairs(recording), repeats)
