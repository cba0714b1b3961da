"""Steadiness of a machine over a run, judged by all samples, the canary and another process."""

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

_REPEATED = 24  # cases that are re-timed at the end of a run
_REPEATED_SHARE = 0.05  # share of the budget for re-timing them
# Least seconds for re-timing, unless a quarter of the budget is less, as when advice measures a few
# cases.
_REPEATED_SECONDS = 2.0
_MIN_REPEATED = 4
_FEW_CASES = 12  # up to this many cases, the expensive ones are re-timed as well
_CUT = 3.0  # robust standard deviations
_FEW = {6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}  # corrections for few values, by their count


def machine_speeds(events: Iterable[Event]) -> dict[SamplePlace, MachineSpeed]:
    """Return the speed of each place over the run."""
    samples: dict[SamplePlace, list[Event]] = defaultdict(list)
    for event in timed(events):
        samples[place_of(event)].append(event)
    speeds = {}
    for place, place_samples in samples.items():
        number = {
            case: i for i, case in enumerate({event["case"]: None for event in place_samples})
        }
        speeds[place] = machine_speed(
            [number[e["case"]] for e in place_samples],
            [e["at"] for e in place_samples],
            [e["s"] for e in place_samples],
        )
    return speeds


def canary_report(events: Iterable[Event]) -> dict[str, Any] | None:
    """Report how steady the machine was: the canary's spread and drift.

    ``drift`` compares the last quarter of the samples with the first. ``certain`` is True if the
    intervals of these quarters do not overlap, which leaves no doubt that the machine drifted.
    Samples of several shards or GPUs are not mixed: only those of the place that took the most are
    reported.
    """
    by_place: dict[SamplePlace, list[float]] = defaultdict(list)
    canaries = (event for event in timed(events) if event["case"] == CANARY)
    for event in sorted(canaries, key=lambda e: e["at"]):
        by_place[place_of(event)].append(event["s"])
    seconds = max(by_place.values(), key=len, default=[])
    if len(seconds) < 8:
        return None
    ordered = sorted(seconds)
    quarter, tenth = len(seconds) // 4, len(seconds) // 10
    first, last = seconds[:quarter], seconds[-quarter:]
    first_interval, last_interval = median_interval(first), median_interval(last)
    certain = (
        first_interval
        and last_interval
        and (first_interval[1] < last_interval[0] or last_interval[1] < first_interval[0])
    )
    return {
        "samples": len(seconds),
        "median_us": median(seconds) * 1e6,
        "spread": (ordered[-1 - tenth] - ordered[tenth]) / median(seconds),
        "drift": median(last) / median(first) - 1,
        "certain": bool(certain),
    }


def repeating_seconds(budget: float) -> float:
    """Return the seconds for re-timing cases after a run that measures for ``budget`` seconds."""
    return max(_REPEATED_SHARE * budget, min(_REPEATED_SECONDS, budget / 4))


def choose_repeats(
    planned: Sequence[PlanEntry],
    known: Mapping[str, History],
    budget: float,
    wanted: Collection[PlanEntry] = (),
) -> list[PlanEntry]:
    """Choose the cases to be re-timed, and add the ``wanted`` ones.

    Candidates are the cases with an interval: the cheaper half of them, or all if they are few. As
    many as fit the time are taken, spread evenly over the plan.

    Nothing is chosen if any case was re-timed before, or if too few cases have an interval. Cases
    that advice asked for are ignored unless the plan has no others: advice re-times them for its
    own purposes.
    """
    planned = [entry for entry in planned if entry.case.sweep != CONFIRM] or planned
    if any(known[entry.case.id].repeats for entry in planned if entry.case.id in known):
        return []
    usable = [
        entry
        for entry in planned
        if entry.case.id in known and len(known[entry.case.id].trusted) >= CHECKPOINTS[0]
    ]
    median_cost = float(np.median([entry.expected for entry in usable])) if usable else 0.0
    takes_all = len(usable) <= _FEW_CASES
    cheap = [entry for entry in usable if takes_all or entry.expected <= median_cost]
    if len(cheap) < _MIN_REPEATED:
        return []
    limit = repeating_seconds(budget)
    for count in range(min(_REPEATED, len(cheap)), _MIN_REPEATED - 1, -1):
        places = np.linspace(0, len(cheap) - 1, count).round().astype(int)
        chosen = [cheap[i] for i in dict.fromkeys(places.tolist())]
        if sum(entry.expected for entry in chosen) <= limit:
            return [*chosen, *(entry for entry in wanted if entry not in chosen)]
    return []


def repeats_report(known: Mapping[str, History]) -> dict[str, Any] | None:
    """Report how well medians repeat in another process, which re-timed some cases after the run.

    ``ratio`` is the second median over the first, as the median over the cases. ``between`` is the
    standard deviation of the ratio's logarithm beyond what the intervals of both medians explain.
    ``between_cases`` is what remains of it without the change that all cases share, which does not
    affect the ratio of two cases.

    A case whose memory happens to lie badly in one of the processes can take twice as long there.
    To keep such a case from widening the intervals of all others, no case counts for more than
    three robust standard deviations.
    """
    shifts, variances = [], []
    for history in known.values():
        if history.outcome is not None or not history.trusted:
            continue
        first = history.trusted
        repeated = [s for s in history.repeats if s.get("gpu") == first[0].get("gpu")]
        seconds_pair = [[s["s"] for s in samples] for samples in (first, repeated)]
        if min(map(len, seconds_pair)) < CHECKPOINTS[0]:
            continue
        shifts.append(math.log(median(seconds_pair[1]) / median(seconds_pair[0])))
        variances.append(sum(_variance_of_median(np.log(seconds)) for seconds in seconds_pair))
    if len(shifts) < _MIN_REPEATED:
        return None
    logs, noise = np.array(shifts), float(np.mean(variances))
    middle = float(np.median(logs))
    between = _mean_square(logs, noise) - noise
    degrees = len(logs) / (len(logs) - 1)  # the middle is estimated from the same cases
    between_cases = degrees * _mean_square(logs - middle, noise) - noise
    return {
        "cases": len(shifts),
        "ratio": math.exp(middle),
        "between": math.sqrt(max(0.0, between)),
        "between_cases": math.sqrt(max(0.0, between_cases)),
    }


def _mean_square(logs: NDArray[np.float64], noise: float) -> float:
    """Return the mean square of deviations from 0, each cut at three robust standard deviations.

    ``noise`` is the least variance that the deviations are taken to have.
    """
    deviation = max(1.4826 * float(np.median(np.abs(logs))), math.sqrt(noise))
    return float(np.mean(np.square(np.clip(logs, -_CUT * deviation, _CUT * deviation))))


def _variance_of_median(values: NDArray[np.float64]) -> float:
    """Return the variance of a sample's median.

    It is derived from the median absolute deviation by normal theory. The correction for few values
    is by Croux and Rousseeuw, "Time-efficient algorithms for two highly robust estimators of scale"
    (1992). The order-statistic interval is not used here: of six to eight values it is their whole
    range, which would give a variance several times as large.
    """
    n = len(values)
    deviation = float(np.median(np.abs(values - np.median(values))))
    sigma = 1.4826 * _FEW.get(n, n / (n - 0.8)) * deviation
    return math.pi / 2 * sigma**2 / n
