"""Whether GPUs of a node slow one another down when all of them work: by their anchors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.folding.anchor_rows import latest_anchor_events
from sweeps.schema import ALONE, TOGETHER
from sweeps.store import Event
from sweeps.timing.statistics import TOLERANCE, median, median_interval


@dataclass(frozen=True)
class SharedSlowdown:
    """What anchors take together over what they take alone, with the 95 % interval of the median
    over the anchors.
    """

    ratio: float
    lo: float
    hi: float

    @property
    def slowed(self) -> bool:
        """Whether it takes longer by more than its interval, and than a time's is meant to be."""
        return self.ratio > 1 + TOLERANCE and self.lo > 1


def interference(events: Sequence[Event]) -> SharedSlowdown | None:
    """What working together changes; None where fewer than six anchors tell.

    Of each anchor, the median over the GPUs counts; of those, the median.

    Args:
        events: of the shards that were measured together.
    """
    seconds: dict[tuple[str, str], dict[str, list[float]]]
    seconds = defaultdict(lambda: defaultdict(list))
    for event in latest_anchor_events(events):
        seconds[event["case"], event["worker"]][event["phase"]].append(event["s"])
    ratios = defaultdict(list)
    for (case, _), times in seconds.items():
        if {ALONE, TOGETHER} <= times.keys():
            ratios[case].append(median(times[TOGETHER]) / median(times[ALONE]))
    of_anchors = [median(each) for each in ratios.values()]
    interval = median_interval(of_anchors)
    return None if interval is None else SharedSlowdown(median(of_anchors), *interval)
