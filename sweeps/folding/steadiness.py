"""Judge how steady a machine was, from all samples, the canary GEMM, and re-timed cases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweeps.cases.case import CONFIRM
from sweeps.folding.history import CANARY, History, SamplePlace, place_of, timed
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from sweeps.timing.speed import MachineSpeed, machine_speed
from sweeps.timing.statistics import CHECKPOINTS, median, median_interval

_MAX_REPEATED = 24  # cases that are re-timed at the end of a run
_MIN_CANARY_SAMPLES = 8  # fewer samples say too little about drift and spread
_MIN_REPEATED = 4  # fewer cases say too little about how well medians repeat
_REPEATED_SHARE = 0.05  # share of the budget that is for re-timing
# Shortest time for re-timing, in seconds. If a quarter of the budget is less, as when advice
# measures a few cases, re-timing gets that quarter.
_REPEATED_SECONDS = 2.0
_FEW_CASES = 12  # up to this many cases, the expensive ones are re-timed as well
_CUT = 3.0  # robust standard deviations at which a deviation is cut
# Factor that makes the median absolute deviation of normal values their standard deviation.
_NORMAL_MAD = 1.4826
# Corrections of the median absolute deviation of few values, by their number.
_FEW = {6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


def machine_speeds(events: Iterable[Event]) -> dict[SamplePlace, MachineSpeed]:
    """Return the machine's speed over the run, for each worker and GPU."""
    samples: dict[SamplePlace, list[Event]] = defaultdict(list)
    for event in timed(events):
        samples[place_of(event)].append(event)
    speeds = {}
    for place, place_samples in samples.items():
        cases = dict.fromkeys(event["case"] for event in place_samples)
        case_numbers = {case: number for number, case in enumerate(cases)}
        speeds[place] = machine_speed(
            [case_numbers[event["case"]] for event in place_samples],
            [event["at"] for event in place_samples],
            [event["s"] for event in place_samples],
        )
    return speeds


def canary_report(events: Iterable[Event]) -> dict[str, Any] | None:
    """Return the entry ``canary`` of run.json: the canary's spread and drift.

    Only samples from the worker and GPU with the most canary samples are used. Return None if there
    are fewer than eight.

    ``drift`` is the relative change of the median from the first quarter of the samples to the last
    quarter. ``certain`` is True if the intervals of these medians do not overlap. ``spread`` is the
    range of the samples without the fastest and the slowest tenth, relative to the median.
    """
    # 1. Take the canary's samples in the order of their times, by worker and GPU.
    by_place: dict[SamplePlace, list[float]] = defaultdict(list)
    canaries = (event for event in timed(events) if event["case"] == CANARY)
    for event in sorted(canaries, key=lambda event: event["at"]):
        by_place[place_of(event)].append(event["s"])
    seconds = max(by_place.values(), key=len, default=[])
    if len(seconds) < _MIN_CANARY_SAMPLES:
        return None
    # 2. Compare the first quarter with the last one. Quarters of few samples have no interval.
    quarter = len(seconds) // 4
    first, last = seconds[:quarter], seconds[-quarter:]
    first_interval, last_interval = median_interval(first), median_interval(last)
    certain = False
    if first_interval is not None and last_interval is not None:
        first_lo, first_hi = first_interval
        last_lo, last_hi = last_interval
        certain = first_hi < last_lo or last_hi < first_lo
    # 3. Measure the spread without the fastest and the slowest tenth.
    ordered = sorted(seconds)
    tenth = len(seconds) // 10
    return {
        "samples": len(seconds),
        "median_us": median(seconds) * 1e6,
        "spread": (ordered[-1 - tenth] - ordered[tenth]) / median(seconds),
        "drift": median(last) / median(first) - 1,
        "certain": certain,
    }


def repeating_seconds(budget: float) -> float:
    """Return how many seconds re-timing may take, given the run's budget in seconds."""
    return max(_REPEATED_SHARE * budget, min(_REPEATED_SECONDS, budget / 4))


def choose_repeats(
    planned: Sequence[PlanEntry],
    history_by_case: Mapping[str, History],
    budget: float,
    required: Collection[PlanEntry] = (),
) -> list[PlanEntry]:
    """Return the cases to be re-timed, including the ``required`` ones.

    The other cases are spread over the plan. Their expected times add up to at most
    :func:`repeating_seconds` for the run's ``budget``. The result is empty if cases were re-timed
    before, or if fewer than four cases can be chosen. Fewer than four would not show how well
    medians repeat.

    Required cases are those that another process has to confirm, such as GEMMs above a measured
    peak. They are added even if the time for re-timing is then exceeded.
    """
    # 1. Find the candidates. Cases for advice are left out if possible, because the most promising
    # of them are re-timed in pairs anyway.
    not_for_advice = [entry for entry in planned if entry.case.sweep != CONFIRM]
    eligible = not_for_advice if not_for_advice else planned
    begun = [
        (entry, history_by_case[entry.case.id])
        for entry in eligible
        if entry.case.id in history_by_case
    ]
    # Cases are re-timed once in a run.
    if any(history.repeats for _, history in begun):
        return []
    # A case has an interval from the first checkpoint on.
    usable = [
        entry
        for entry, history in begun
        if history.outcome is None and len(history.trusted) >= CHECKPOINTS[0]
    ]
    candidates = usable
    if len(usable) > _FEW_CASES:
        median_cost = float(np.median([entry.expected for entry in usable]))
        candidates = [entry for entry in usable if entry.expected <= median_cost]
    if len(candidates) < _MIN_REPEATED:
        return []
    # 2. Try fewer and fewer cases, until they fit in the time.
    limit = repeating_seconds(budget)
    for count in range(min(_MAX_REPEATED, len(candidates)), _MIN_REPEATED - 1, -1):
        positions = np.linspace(0, len(candidates) - 1, count).round().astype(int)
        chosen = [candidates[i] for i in positions]
        if sum(entry.expected for entry in chosen) <= limit:
            return [*chosen, *(entry for entry in required if entry not in chosen)]
    return []


def repeats_report(history_by_case: Mapping[str, History]) -> dict[str, Any] | None:
    """Return the entry ``repeats`` of run.json: how well medians repeat in another process.

    Each re-timed case has two medians: the original one, and the one from the other process. The
    case's log ratio is log(other median / original median). ``ratio`` is the exponential of the
    median log ratio. ``between`` is the standard deviation of the log ratios from 0, without the
    part that the noise of the medians explains. ``between_cases`` is computed like ``between``, but
    without the change that all cases share. Such a shared change does not affect the ratio of two
    cases. Return None if fewer than four cases have at least six samples for each of the two
    medians.

    A case whose memory happens to be placed badly in one of the processes can take twice as long in
    that process. Deviations are clipped at three robust standard deviations, so that such a case
    does not widen the intervals of all other cases.
    """
    # 1. Collect the log ratio of each case's two medians, and the variance that their noise
    # explains.
    log_ratios, variances = [], []
    for history in history_by_case.values():
        if history.outcome is not None or not history.trusted:
            continue
        gpu = history.trusted[0].get("gpu")
        first = [sample["s"] for sample in history.trusted]
        repeated = [sample["s"] for sample in history.repeats if sample.get("gpu") == gpu]
        if min(len(first), len(repeated)) < CHECKPOINTS[0]:
            continue
        log_ratios.append(math.log(median(repeated) / median(first)))
        variances.append(_variance_of_median(np.log(first)) + _variance_of_median(np.log(repeated)))
    if len(log_ratios) < _MIN_REPEATED:
        return None
    # 2. Subtract that variance from the mean square of the log ratios.
    deviations = np.array(log_ratios)  # from 0, the log ratio of two equal medians
    noise_variance = float(np.mean(variances))
    between_variance = _mean_square(deviations, noise_variance) - noise_variance
    # 3. Do the same without the change that all cases share. That change is estimated from the same
    # cases, which costs one degree of freedom.
    shared_change = float(np.median(deviations))
    correction = len(deviations) / (len(deviations) - 1)
    mean_square = correction * _mean_square(deviations - shared_change, noise_variance)
    between_cases_variance = mean_square - noise_variance
    # Chance can make a difference of two variances negative.
    return {
        "cases": len(log_ratios),
        "ratio": math.exp(shared_change),
        "between": math.sqrt(max(0.0, between_variance)),
        "between_cases": math.sqrt(max(0.0, between_cases_variance)),
    }


def _mean_square(deviations: NDArray[np.float64], noise_variance: float) -> float:
    """Return the mean square of the deviations after clipping them at three standard deviations.

    The standard deviation is estimated robustly, and is at least that of the noise.
    """
    robust_deviation = _NORMAL_MAD * float(np.median(np.abs(deviations)))
    limit = _CUT * max(robust_deviation, math.sqrt(noise_variance))
    return float(np.mean(np.square(np.clip(deviations, -limit, limit))))


def _variance_of_median(values: NDArray[np.float64]) -> float:
    """Return the variance of the median of at least six values.

    The variance is estimated from the median absolute deviation, assuming normally distributed
    values. The correction for few values is from Croux and Rousseeuw, "Time-efficient algorithms
    for two highly robust estimators of scale" (1992). In simulations with six values, the mean
    estimate was 1.5 times the true variance. With 30 values, it was 1.1 times the true variance.
    """
    count = len(values)
    absolute_deviation = float(np.median(np.abs(values - np.median(values))))
    correction = _FEW.get(count, count / (count - 0.8))
    sigma = _NORMAL_MAD * correction * absolute_deviation
    # The variance of the median of many values is π/2 times that of their mean.
    return math.pi / 2 * sigma**2 / count
