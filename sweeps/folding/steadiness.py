"""How steady a machine was over a run: by all samples, by the canary, and by another process."""

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

_REPEATED = 24  # cases that are timed again at the end of a run
_REPEATED_SHARE = 0.05  # of the budget, for that
_REPEATED_SECONDS = 2.0  # at least, if that is no more than a quarter: advice's budgets are small
_MIN_REPEATED = 4
_FEW_CASES = 12  # of which the dear ones are timed again, too
_CUT = 3.0  # robust standard deviations
_FEW = {6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


def machine_speeds(events: Iterable[Event]) -> dict[SamplePlace, MachineSpeed]:
    """How fast each place was over the run."""
    samples: dict[SamplePlace, list[Event]] = defaultdict(list)
    for event in timed(events):
        samples[place_of(event)].append(event)
    speeds = {}
    for place, taken in samples.items():
        number = {case: i for i, case in enumerate({event["case"]: None for event in taken})}
        speeds[place] = machine_speed(
            [number[e["case"]] for e in taken], [e["at"] for e in taken], [e["s"] for e in taken]
        )
    return speeds


def canary_report(events: Iterable[Event]) -> dict[str, Any] | None:
    """How steady the machine was: the canary's spread, and its last quarter over its first.

    ``certain`` says whether those quarters' intervals leave no doubt that it drifted. Samples of
    several shards or GPUs do not mix: those of the one that took most are reported.
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
    before, after = median_interval(first), median_interval(last)
    apart = before and after and (before[1] < after[0] or after[1] < before[0])
    return {
        "samples": len(seconds),
        "median_us": median(seconds) * 1e6,
        "spread": (ordered[-1 - tenth] - ordered[tenth]) / median(seconds),
        "drift": median(last) / median(first) - 1,
        "certain": bool(apart),
    }


def repeating_seconds(budget: float) -> float:
    """Seconds that timing cases again may take after a run with so many seconds to measure."""
    return max(_REPEATED_SHARE * budget, min(_REPEATED_SECONDS, budget / 4))


def choose_repeats(
    planned: Sequence[PlanEntry],
    known: Mapping[str, History],
    budget: float,
    wanted: Collection[PlanEntry] = (),
) -> list[PlanEntry]:
    """Cases with an interval to be timed again: from the cheap half, all over the plan's order; or
    all, where there are few. ``wanted`` ones come on top.

    None if any was timed again before, or if too few have one. What advice asked for is another
    matter: it is timed again for its own sake.
    """
    planned = [entry for entry in planned if entry.case.sweep != CONFIRM] or planned
    if any(known[entry.case.id].repeats for entry in planned if entry.case.id in known):
        return []
    usable = [
        entry
        for entry in planned
        if entry.case.id in known and len(known[entry.case.id].trusted) >= CHECKPOINTS[0]
    ]
    dear = float(np.median([entry.expected for entry in usable])) if usable else 0.0
    few = len(usable) <= _FEW_CASES
    cheap = [entry for entry in usable if few or entry.expected <= dear]
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
    """How well medians repeat in another process: by cases that one timed again after the run.

    ``ratio`` is the second median over the first, as the median over the cases. ``between`` is the
    standard deviation of the ratio's logarithm beyond what both medians' own intervals explain.
    ``between_cases`` is what is left of it without the change that all cases share, which the ratio
    of two cases does not feel.

    A case whose memory happens to lie badly in one of the processes can take twice as long there.
    So that it does not widen the intervals of all others, no case counts for more than three robust
    standard deviations.
    """
    apart, own = [], []
    for history in known.values():
        if history.outcome is not None or not history.trusted:
            continue
        first = history.trusted
        again = [s for s in history.repeats if s.get("gpu") == first[0].get("gpu")]
        both = [[s["s"] for s in samples] for samples in (first, again)]
        if min(map(len, both)) < CHECKPOINTS[0]:
            continue
        apart.append(math.log(median(both[1]) / median(both[0])))
        own.append(sum(_variance_of_median(np.log(seconds)) for seconds in both))
    if len(apart) < _MIN_REPEATED:
        return None
    logs, noise = np.array(apart), float(np.mean(own))
    middle = float(np.median(logs))
    between = _mean_square(logs, noise) - noise
    degrees = len(logs) / (len(logs) - 1)  # the middle is taken from the same cases
    between_cases = degrees * _mean_square(logs - middle, noise) - noise
    return {
        "cases": len(apart),
        "ratio": math.exp(middle),
        "between": math.sqrt(max(0.0, between)),
        "between_cases": math.sqrt(max(0.0, between_cases)),
    }


def _mean_square(logs: NDArray[np.float64], noise: float) -> float:
    """Mean square of deviations from 0, each cut at three robust standard deviations of them all.

    ``noise`` is the variance that they have at least.
    """
    deviation = max(1.4826 * float(np.median(np.abs(logs))), math.sqrt(noise))
    return float(np.mean(np.square(np.clip(logs, -_CUT * deviation, _CUT * deviation))))


def _variance_of_median(values: NDArray[np.float64]) -> float:
    """Of a sample's median, by normal theory from the median absolute deviation.

    With the correction for few values of Croux and Rousseeuw, "Time-efficient algorithms for two
    highly robust estimators of scale" (1992). An order-statistic interval of six to eight values is
    their whole range, which would say several times as much.
    """
    n = len(values)
    deviation = float(np.median(np.abs(values - np.median(values))))
    sigma = 1.4826 * _FEW.get(n, n / (n - 0.8)) * deviation
    return math.pi / 2 * sigma**2 / n
