"""Count the cases of a run: after each event, and by sweep when the samples are folded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kernels.common.counts import counted
from sweeps.folding.history import History
from sweeps.planning.plan import PlanEntry
from sweeps.progress import Reporter
from sweeps.store import Event

STOPPED = "time"
"""Reason why measuring ended: ``sweeps run`` reached its time limit.

The other reasons are ``done`` and ``budget``."""

# Statuses of cases without a time, in words.
_IN_WORDS = {
    "unsupported": "unsupported", "oom": "out of memory", "wrong": "wrong", "error": "failed",
}  # fmt: skip


def count_by_sweep(
    planned: Sequence[PlanEntry],
    rows: Sequence[Mapping[str, Any]],
    history_by_case: Mapping[str, History],
) -> dict[str, dict[str, int]]:
    """Count the planned, measured and open cases of each sweep.

    A case is open if it needs more samples or a check, or if its kernels are not named yet.
    """
    counts: dict[str, dict[str, int]] = {}
    for entry in planned:
        sweep_counts = counts.setdefault(entry.case.sweep, {"planned": 0, "measured": 0, "open": 0})
        sweep_counts["planned"] += 1
        history = history_by_case.get(entry.case.id, History())
        if not history.closed or history.unnamed:
            sweep_counts["open"] += 1
    for row in rows:
        if row["status"] == "ok":
            counts[row["sweep"]]["measured"] += 1
    return counts


def counts_sentence(record: Mapping[str, Any]) -> str:
    """Return sentences that say how many cases of a run have a time, and why others have none.

    ``record`` is the content of run.json.
    """
    counts = record["counts"]
    verb = "was" if counts["measured"] == 1 else "were"
    measured = f"{counts['measured']:,} of {counted(counts['planned'], 'case')} {verb} measured"
    sentences = [f"{measured} in {record['spent_s']:,.0f} s."]
    untimed = [f"{counts[name]:,} {words}" for name, words in _IN_WORDS.items() if counts[name]]
    if counts["not_reached"]:
        untimed.append(f"{counts['not_reached']:,} not reached")
    if untimed:
        sentences.append(f"Cases without a time: {', '.join(untimed)}.")
    left_out = sum(record["plan"]["left_out"].values())
    if left_out:
        verb = "needs" if left_out == 1 else "need"
        sentences.append(f"{counted(left_out, 'more case')} {verb} a larger budget.")
    return " ".join(sentences)


class Tally:
    """Progress of a shard, updated with each of its events."""

    def __init__(self, planned: Sequence[PlanEntry], events: Sequence[Event]) -> None:
        """Start with the shard's earlier events."""
        self.histories = {entry.case.id: History() for entry in planned}
        self._unplanned: dict[str, History] = defaultdict(History)
        self._seen: set[str] = set()  # planned cases with samples
        self._closed: set[str] = set()  # planned cases that are finished
        self._costs: dict[str, float] = defaultdict(float)  # seconds of the budget, by case
        self.spent = 0.0
        """Seconds of the budget that were spent.

        If a case moved to another GPU, the time that it took before the move is not included."""
        self._end: Event | None = None
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Add an event of the shard."""
        case_id = event["case"]
        # 1. Add up the time.
        cost = event.get("cost", 0.0)
        self.spent += cost
        self._costs[case_id] += cost
        # A moved case starts over on another GPU, so the time spent on it no longer counts.
        if event["event"] == "moved":
            self.spent -= self._costs.pop(case_id)
        if event["event"] == "end":
            self._end = event
        # 2. Add the event to the case's history.
        is_planned = case_id in self.histories
        history = self.histories[case_id] if is_planned else self._unplanned[case_id]
        history.add(event)
        # 3. Update the progress, which only planned cases have.
        if not is_planned:
            return
        if event["event"] == "sample":
            self._seen.add(case_id)
        elif event["event"] == "moved":
            self._seen.discard(case_id)
            self._closed.discard(case_id)
        if history.closed:
            self._closed.add(case_id)

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
        """Return True if the shard has ended with a budget of at least ``budget`` seconds.

        A shard that last stopped at a time limit has not ended.
        """
        end = self._end
        return end is not None and end["why"] != STOPPED and end["budget"] >= budget

    def ended(self, why: str, budget: float) -> bool:
        """Return True if the shard's latest ``end`` event has this reason and this budget."""
        return self._end is not None and (self._end["why"], self._end["budget"]) == (why, budget)

    def all(self) -> dict[str, History]:
        """Return all histories by case id, including those of unplanned cases."""
        return {**self._unplanned, **self.histories}

    def unnamed(self) -> list[str]:
        """Return the ids of the planned cases whose kernels must still be named."""
        return [case for case, history in self.histories.items() if history.unnamed]

    def report(self, reporter: Reporter, budget: float) -> None:
        """Report the number of started or finished cases, and the rest of the budget in seconds."""
        reporter.update(self.seen, len(self.histories), budget - self.spent)
