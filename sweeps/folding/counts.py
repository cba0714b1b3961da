"""Progress of a run: counted event by event while it lasts, and by sweep when it is folded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sweeps.folding.history import History
from sweeps.planning.plan import PlanEntry
from sweeps.progress import Reporter
from sweeps.store import Event

STOPPED = "time"
"""Reason given by a call that ends at its time limit. The others are ``done`` and ``budget``."""


def count_by_sweep(
    planned: Sequence[PlanEntry], rows: Sequence[Mapping[str, Any]], known: Mapping[str, History]
) -> dict[str, dict[str, int]]:
    """Count each sweep's cases that are planned, measured and open.

    Open cases are those that more time would advance: they need more samples or a check, or their
    kernels are not named yet.
    """
    counts: dict[str, dict[str, int]] = {}
    for entry in planned:
        count = counts.setdefault(entry.case.sweep, {"planned": 0, "measured": 0, "open": 0})
        count["planned"] += 1
        history = known.get(entry.case.id, History())
        if not history.closed or history.unnamed:
            count["open"] += 1
    for row in rows:
        if row["status"] == "ok":
            counts[row["sweep"]]["measured"] += 1
    return counts


def counts_sentence(record: Mapping[str, Any]) -> str:
    """Return a sentence on what became of a run's cases, from its run.json."""
    counts = record["counts"]
    failed = [
        f"{counts[name]} {name}"
        for name in ("unsupported", "oom", "wrong", "error")
        if counts[name]
    ]
    measured = f"{counts['measured']} of {counts['planned']} cases measured"
    clauses = [f"{measured} in {record['spent_s']:.0f} s", *failed]
    if counts["not_reached"]:
        clauses.append(f"{counts['not_reached']} not reached")
    sentence = ", ".join(clauses)
    left_out = sum(record["plan"]["left_out"].values())
    if left_out:
        sentence += f"; {left_out} more did not fit the budget"
    return f"{sentence}."


class Tally:
    """Progress of a shard, kept up to date event by event."""

    def __init__(self, planned: Sequence[PlanEntry], events: Sequence[Event]) -> None:
        """Count all events of the shard so far. ``planned`` are the cases of this call."""
        self.histories = {entry.case.id: History() for entry in planned}
        self._unplanned: dict[str, History] = defaultdict(History)
        self._seen: set[str] = set()
        self._closed: set[str] = set()
        self._costs: dict[str, float] = defaultdict(float)
        self.spent = 0.0
        """Seconds of the budget that were spent, except on cases that moved to another GPU."""
        self._end: Event | None = None
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Add an event of the shard."""
        case = event["case"]
        self.spent += event.get("cost", 0.0)
        self._costs[case] += event.get("cost", 0.0)
        if event["event"] == "moved":  # the case starts over on another GPU
            self.spent -= self._costs.pop(case)
        if event["event"] == "end":
            self._end = event
        history = self.histories[case] if case in self.histories else self._unplanned[case]
        history.add(event)
        if case in self.histories:
            if event["event"] == "sample":
                self._seen.add(case)
            elif event["event"] == "moved":
                self._seen.discard(case)
                self._closed.discard(case)
            if history.closed:
                self._closed.add(case)

    @property
    def complete(self) -> bool:
        """True if every planned case is finished."""
        return self.closed == len(self.histories)

    @property
    def closed(self) -> int:
        """Number of finished cases."""
        return len(self._closed)

    @property
    def seen(self) -> int:
        """Number of cases that have samples or are finished."""
        return len(self._closed | self._seen)

    def is_over(self, budget: float) -> bool:
        """Return True if the shard ended by itself, with a budget of at least ``budget`` seconds.

        A shard that was stopped earlier or interrupted is not over.
        """
        end = self._end
        return end is not None and end["why"] != STOPPED and end["budget"] >= budget

    def ended(self, why: str, budget: float) -> bool:
        """Return True if the shard's last end had this reason and this budget."""
        return self._end is not None and (self._end["why"], self._end["budget"]) == (why, budget)

    def all(self) -> dict[str, History]:
        """Return the history of every case, including the canary and cases of other calls."""
        return {**self._unplanned, **self.histories}

    def unnamed(self) -> list[str]:
        """Return the cases that have times but no kernel names yet."""
        return [case for case, history in self.histories.items() if history.unnamed]

    def report(self, reporter: Reporter, budget: float) -> None:
        """Tell the reporter how many cases are done and how many seconds of the budget are left."""
        reporter.update(self.seen, len(self.histories), budget - self.spent)
