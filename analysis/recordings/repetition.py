"""Compute repetition intervals: 95% prediction intervals for the medians of a second run.

A repetition interval is wider than the confidence interval of a run's median, for two reasons. The
median of the second run is as noisy as that of the first. In addition, the second run is another
process, which gets memory at different addresses. The entry ``repeats`` of run.json shows how much
medians differ between processes.

A run samples its cases in rounds, each case at most once per round. The speed of the machine
changes during a run, but it is nearly the same for all samples of a round. Two cases are therefore
compared within each round in which both were sampled, so that the changes cancel in the ratio. If
many cases are compared, their times are first corrected for the machine's speed in each round.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.recordings.csv_file import read_csv
from analysis.recordings.kept import until_changed
from analysis.recordings.load import Recording
from sweeps.cases.case import Case
from sweeps.schema import IDENTITY
from sweeps.store import ROUND_COLUMNS
from sweeps.timing.statistics import CHECKPOINTS, Z95, median, median_interval

_ROUNDS = "rounds.csv"

_DECILE_RANGE = 2.563  # 10th to 90th percentile of normal values, in standard deviations

_REMEDY = "Move the file away; ratios are then computed from the medians and their intervals."

_MIN_IN_ROUND = 6  # fewest cases of a round whose median shows how fast the machine was

SINGLE_HALF = 0.051
"""Half-width of the 95% interval of a single log time whose scatter is not recorded.

It comes from two collections of bf16 GEMMs on an H100: AIConfigurator's tables for TensorRT-LLM
1.3.0rc10 and 1.3.0rc20. The collections have 35,700 shapes in common, and each time is the mean of
six replays. The two times of a shape differ by at most 7.2% for 95% of the shapes. Both times
contribute equally to the difference, so the half-width of a single time is smaller by a factor of
√2. The result is the 95th percentile of the noise floor in
results/accuracy/learning-curve-h100.txt."""

Rounds = Mapping[tuple[str, int], float]
"""Samples of a case in seconds, by place (run, worker and GPU) and number of the round."""


@dataclass(frozen=True)
class MeasuredTime:
    """A measured median time and its 95% interval, in seconds.

    Attributes:
        lo: lower end of the interval; NaN if it is unknown, as with fewer than six samples.
        hi: upper end of the interval; NaN if it is unknown.
        rounds: the samples by place and round; empty if they are not recorded.
        between: standard deviation of the log ratio between a median of this run and the median of
            the same case in another process, without the part that the noise of the two medians
            explains.
        between_cases: the same standard deviation without the change that all cases share.
        place: run, worker and GPU of the measurement, as one string.
    """

    time: float
    lo: float
    hi: float
    rounds: Rounds = field(default_factory=dict)
    between: float = 0.0
    between_cases: float = 0.0
    place: str = ""

    @classmethod
    def single(cls, seconds: float, place: str = "") -> MeasuredTime:
        """Create a time without recorded scatter, with the interval from :data:`SINGLE_HALF`."""
        factor = math.exp(SINGLE_HALF)
        return cls(seconds, seconds / factor, seconds * factor, place=place)

    @property
    def width(self) -> float:
        """Width of the interval, or infinity if the interval is unknown."""
        return math.inf if math.isnan(self.lo) else self.hi - self.lo

    @property
    def repetition(self) -> tuple[float, float]:
        """95% interval of a second run's median; both ends are NaN if ``lo`` and ``hi`` are."""
        half_below, half_above = _log_halves(self)
        below = repeated(half_below, Z95 * self.between)
        above = repeated(half_above, Z95 * self.between)
        return self.time * math.exp(-below), self.time * math.exp(above)


def repeated_ratio(one: MeasuredTime, other: MeasuredTime) -> tuple[float, float, float] | None:
    """Return the ratio of two times, ``one`` over ``other``, with its 95% repetition interval.

    A change of speed that affects all cases alike does not widen the interval, because the change
    cancels in the ratio. The result is None if the times were measured at different places, because
    such times are not comparable. The result is also None if the interval is unknown. This happens
    if the cases have fewer than six rounds in common and one of the times has no interval.
    """
    if one.place != other.place:
        return None
    # 1. Compute the log ratio in this run, and the distances to the lower and the upper end of its
    #    interval. In rounds with samples of both cases, changes of the machine's speed cancel.
    common = sorted(one.rounds.keys() & other.rounds.keys())
    if len(common) >= CHECKPOINTS[0]:
        log_ratios = [math.log(one.rounds[key] / other.rounds[key]) for key in common]
        middle = median(log_ratios)
        interval = median_interval(log_ratios)
        assert interval is not None  # it is None only for fewer than six values
        low, high = interval
        below = middle - low
        above = high - middle
    else:
        if math.isnan(one.lo + other.lo):
            return None
        middle = math.log(one.time / other.time)
        # The ratio is lower if the first time is lower or the second one higher.
        one_below, one_above = _log_halves(one)
        other_below, other_above = _log_halves(other)
        below = math.hypot(one_below, other_above)
        above = math.hypot(one_above, other_below)
    # 2. Widen the interval to that of a repetition.
    between = Z95 * math.hypot(one.between_cases, other.between_cases)
    lo = middle - repeated(below, between)
    hi = middle + repeated(above, between)
    return math.exp(middle), math.exp(lo), math.exp(hi)


def repeated(within: Any, between: Any) -> Any:
    """Return the uncertainty of a second run's value, given the value of the first run.

    Uncertainties are numbers or arrays. All of them are standard errors, or all are half-widths of
    intervals.

    Args:
        within: uncertainty of the value within a run; it is assumed to be the same in both runs.
        between: uncertainty that is added because the second run is another process.
    """
    # The values of both runs are uncertain, which gives the factor √2.
    return np.hypot(math.sqrt(2) * within, between)


def _log_halves(measured: MeasuredTime) -> tuple[float, float]:
    """Return the log distances from the time to the lower and the upper end of its interval."""
    return math.log(measured.time / measured.lo), math.log(measured.hi / measured.time)


def between_processes(recording: Recording) -> dict[str, float]:
    """Return each run's standard deviation of log ratios between processes, by the run's name.

    A log ratio compares the medians of the same case in two processes. If a run did not measure the
    standard deviation (:attr:`MeasuredTime.between`), it is estimated from the run's canary GEMM.
    Without a canary GEMM, it is 0.
    """
    return {part.run["run"]: _deviation(part.run, "between") for part in recording.parts}


def between_cases(recording: Recording) -> dict[str, float]:
    """Return the deviations of :func:`between_processes` without the change that all cases share.

    Ratios of cases need these deviations, because the shared change cancels in ratios. If a run
    has no such value, the value that :func:`between_processes` returns for it is used.
    """
    return {part.run["run"]: _deviation(part.run, "between_cases") for part in recording.parts}


def _deviation(run: Mapping[str, Any], name: str) -> float:
    """Return a run's standard deviation of log ratios between processes.

    ``name`` is ``between`` for the whole deviation, or ``between_cases`` for the deviation without
    the change that all cases share.
    """
    if repeats := run.get("repeats"):
        # Older recordings only have ``between``.
        return float(repeats.get(name, repeats["between"]))
    canary = run.get("canary")
    if not canary:
        return 0.0
    # The canary's spread is the range from its 10th to its 90th percentile, divided by its median.
    # Half of its deviation is a guess: no measurement has set this factor. One case cannot show
    # which part of a change all cases share, so the same value stands for both deviations.
    return 0.5 * float(canary["spread"]) / _DECILE_RANGE


def rounds_of(recording: Recording) -> dict[tuple[str, str], Rounds]:
    """Return the recorded samples of each case, by run and case id.

    Raises:
        UserError: if a rounds.csv cannot be read or is too damaged to use.
    """
    rounds_by_case = {}
    for part in recording.parts:
        run = part.run["run"]
        for case, rounds in _read_rounds(part.folder, run).items():
            rounds_by_case[run, case] = rounds
    return rounds_by_case


def steady_times(
    rows: pd.DataFrame, recording: Recording
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the logarithm of each row's time in seconds, and the standard error of the logarithm.

    The time of a case with at least six recorded samples is corrected for the machine's slowness in
    each round. The slowness is the median ratio of a sample to its case's median, taken over all
    cases that were sampled in the round. A round with fewer than six cases is not corrected.

    The standard error is that of a repetition, so it includes the uncertainty of both runs. It does
    not include the change that all cases share, because that change cancels in ratios of the times.
    The error is NaN where a time has no interval.

    Raises:
        UserError: if a rounds.csv cannot be read or is too damaged to use.
    """

    def log_seconds(name: str) -> NDArray[np.float64]:
        microseconds = rows[name].to_numpy(dtype=float, na_value=np.nan)
        return np.log(microseconds * 1e-6)

    # 1. Take the recorded times and intervals. If six or more samples of a case are known, its time
    #    and its interval come from the corrected samples instead.
    log_time = log_seconds("time_us")
    log_lo = log_seconds("time_lo_us")
    log_hi = log_seconds("time_hi_us")
    samples = steady_samples(recording)
    if samples:
        for i, case in enumerate(case_ids(rows)):
            corrected = samples.get(case, [])
            interval = median_interval(corrected)  # None for fewer than six samples
            if interval is not None:
                log_time[i] = median(corrected)
                log_lo[i], log_hi[i] = interval
    # 2. Convert the intervals to standard errors, and widen them to those of a repetition.
    within = (log_hi - log_lo) / 2 / Z95
    between = rows["run"].map(between_cases(recording)).fillna(0.0).to_numpy(float)
    return log_time, repeated(within, between)


def steady_samples(recording: Recording) -> dict[tuple[str, str], list[float]]:
    """Return the corrected samples of each case, as logarithms of seconds, by run and case id.

    :func:`steady_times` describes the correction.

    Raises:
        UserError: if a rounds.csv cannot be read or is too damaged to use.
    """
    logs_by_case = {}
    for case, rounds in rounds_of(recording).items():
        logs_by_case[case] = {key: math.log(seconds) for key, seconds in rounds.items()}
    slowness = _slowness_of_rounds(list(logs_by_case.values()))
    corrected = {}
    for case, logs in logs_by_case.items():
        corrected[case] = [log - slowness[place_and_round] for place_and_round, log in logs.items()]
    return corrected


def with_steady_times(rows: pd.DataFrame, recording: Recording) -> pd.DataFrame:
    """Return rows with the results of :func:`steady_times` as two more columns.

    The columns are ``steady_log`` (logarithm of the time) and ``steady_error`` (standard error of
    the logarithm).

    Raises:
        UserError: if a rounds.csv cannot be read or is too damaged to use.
    """
    log, error = steady_times(rows, recording)
    return rows.assign(steady_log=log, steady_error=error)


def steady_ratio(before: pd.DataFrame | pd.Series, after: pd.DataFrame) -> dict[str, pd.Series]:
    """Return ratios of times, ``before`` over ``after``, with their 95% repetition intervals.

    Args:
        before: rows that :func:`with_steady_times` returned, or a single such row.
        after: rows to compare with ``before``; both have the same index, unless ``before`` is a
            single row.

    Returns:
        The columns ``ratio``, ``ratio_lo`` and ``ratio_hi``, by name. The last two are the ends of
        the intervals. They are NaN where a time has no interval.
    """
    log_ratio = before["steady_log"] - after["steady_log"]
    half_width = Z95 * np.hypot(before["steady_error"], after["steady_error"])
    return {
        "ratio": np.exp(log_ratio),
        "ratio_lo": np.exp(log_ratio - half_width),
        "ratio_hi": np.exp(log_ratio + half_width),
    }


def _slowness_of_rounds(
    cases: Sequence[Mapping[tuple[str, int], float]],
) -> dict[tuple[str, int], float]:
    """Return the log of the machine's slowness in each round, as :func:`steady_times` defines it.

    ``cases`` has the logs of each case's samples, by place and round.
    """
    deviations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for logs in cases:
        middle = median(list(logs.values()))
        for place_and_round, log in logs.items():
            deviations[place_and_round].append(log - middle)
    slowness = {}
    for place_and_round, log_ratios in deviations.items():
        slowness[place_and_round] = median(log_ratios) if len(log_ratios) >= _MIN_IN_ROUND else 0.0
    return slowness


def case_ids(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the run and the case id of each row."""
    identity = rows[["run", *IDENTITY]].astype(object)
    records = identity.where(identity.notna(), "").to_dict("records")
    return [(row["run"], Case.from_columns(row).id) for row in records]


def places_of(rows: pd.DataFrame) -> pd.Series:
    """Return the place where each row's case was measured: run, worker and GPU, as one string."""
    places = pd.Series("", index=rows.index)
    for name in ("run", "worker", "gpu"):
        if name in rows:
            # A missing value would stay missing as text, and places with it would never be equal.
            places = places + " " + rows[name].astype("string").fillna("").astype(str)
    return places


@until_changed(_ROUNDS)
def _read_rounds(folder: Path, run: str) -> Mapping[str, Rounds]:
    """Return a run's samples by case id; report and leave out damaged lines of its rounds.csv."""
    path = folder / _ROUNDS
    if not path.exists():
        return {}
    table = read_csv(path, dict.fromkeys(ROUND_COLUMNS, "text"), _REMEDY)
    parsed = [_parse_rounds(run, row) for row in table.rows.to_dict("records")]
    table.faults.record(
        [rounds is None for rounds in parsed], "its rounds and times do not form valid pairs"
    )
    table.faults.report()
    sound = table.faults.sound
    return {
        case: rounds
        for case, rounds, is_sound in zip(table.rows["case"], parsed, sound, strict=True)
        if rounds is not None and is_sound
    }


def _parse_rounds(run: str, row: Mapping[Any, Any]) -> Rounds | None:
    # Every worker counts its own rounds, and may have resumed on another GPU, so the place names
    # both the worker and the GPU.
    place = f"{run} {row['worker']} {row['gpu']}"
    try:
        pairs = zip(row["rounds"].split(), row["times_us"].split(), strict=True)
        rounds = {
            (place, int(number)): float(microseconds) * 1e-6 for number, microseconds in pairs
        }
    except ValueError:
        return None
    # A line without samples is damaged, because a case without samples has no line.
    is_sound = bool(rounds) and all(0 < seconds < math.inf for seconds in rounds.values())
    return rounds if is_sound else None
