"""Whether times of several recordings may be compared: by the anchors and cases that they share.

Ratios are of the medians of two recordings, whose samples stay apart. They are judged as those of a
machine that is timed again (:func:`sweeps.doctor.recheck.judge_ratios`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sweeps.cases.case import Case
from sweeps.doctor.recheck import TOLERANCE, judge_ratios
from sweeps.folding.anchor_rows import anchor_rows
from sweeps.folding.history import histories
from sweeps.merging.source import Source
from sweeps.schema import ALONE
from sweeps.timing.statistics import median

ANCHORS, CASES = "anchors", "cases"
_COUNTED = {
    ANCHORS: ("anchor", "anchors"), CASES: ("case that both timed", "cases that both timed"),
}  # fmt: skip

Times = Mapping[str, float]
"""Seconds by the case's id."""


@dataclass(frozen=True)
class Comparison:
    """Two recordings, by their places among all, and what is judged of their common anchors and of
    the cases that both timed; each is None where there are none.
    """

    one: int
    other: int
    judged: Mapping[str, Mapping[str, Any] | None]

    @property
    def verdict(self) -> str:
        """``apart``: times are not comparable as they are; ``alike``: they agree; ``unclear``;
        ``unknown``: nothing tells.
        """
        found = [one for one in self.judged.values() if one is not None]
        if not found:
            return "unknown"
        if any(one["apart"] for one in found):
            return "apart"
        certain = any(one["lo"] is not None for one in found)
        return "alike" if certain and all(one["same"] for one in found) else "unclear"

    def sentence(self, names: Sequence[str]) -> str:
        """For reading; ``names`` are those of all recordings."""
        one, other = names[self.one], names[self.other]
        seen = " and ".join(_words(what, found) for what, found in self.judged.items() if found)
        match self.verdict:
            case "apart":
                return (
                    f"Times of {one} and {other} are not comparable as they are: in {other} {seen}."
                )
            case "alike":
                return (
                    f"Times of {one} and {other} agree within {TOLERANCE:.0%}: in {other} {seen}."
                )
            case "unclear":
                return (
                    f"Whether times of {one} and {other} are comparable is not certain: in "
                    f"{other} {seen}."
                )
        return (
            f"Nothing tells whether times of {one} and {other} are comparable: they have neither "
            "anchors nor cases in common."
        )


def _words(what: str, judged: Mapping[str, Any]) -> str:
    several = judged["cases"] > 1
    interval = (
        "too few for an interval"
        if judged["lo"] is None
        else f"95 % interval {judged['lo']:.3f} to {judged['hi']:.3f}"
    )
    return (
        f"{judged['cases']} {_COUNTED[what][several]} {'take' if several else 'takes'} "
        f"{judged['ratio']:.3f}× the time ({interval})"
    )


def compare(anchors: Sequence[Times], cases: Sequence[Times]) -> list[Comparison]:
    """Compare any two of the recordings whose times these are."""
    return [
        Comparison(
            one, other, {ANCHORS: _judged(anchors, one, other), CASES: _judged(cases, one, other)}
        )
        for one, other in combinations(range(len(cases)), 2)
    ]


def _judged(times: Sequence[Times], one: int, other: int) -> dict[str, Any] | None:
    common = [case for case in times[one] if case in times[other]]
    return judge_ratios([times[other][c] / times[one][c] for c in common]) if common else None


def times_of_anchors(source: Source) -> Times:
    """What a recording's anchors took while nothing else was measured; of several GPUs the median.

    An anchor that was measured among the cases, too, is here as an anchor alone.
    """
    by_case: dict[str, list[float]] = defaultdict(list)
    for row in anchor_rows(source.record["run"], source.anchors, source.events, source.gpus):
        if row["phase"] == ALONE:
            by_case[Case.from_columns(row).id].append(row["time_us"] * 1e-6)
    return {case: median(seconds) for case, seconds in by_case.items()}


def times_of_cases(source: Source) -> Times:
    """The times of the cases that a recording has measured."""
    known = histories(source.events)
    timed = {}
    for entry in source.planned:
        history = known.get(entry.case.id)
        if history is not None and history.outcome is None and history.trusted:
            timed[entry.case.id] = median([sample["s"] for sample in history.trusted])
    return timed
