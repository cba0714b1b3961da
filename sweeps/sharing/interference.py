"""Estimate how much a node's GPUs slow down when all of them work at once.

The estimate is based on the anchors, a few cases that every GPU times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.folding.anchor_rows import latest_anchor_events
from sweeps.folding.history import SamplePlace, place_of
from sweeps.schema import ALONE, TOGETHER
from sweeps.store import Event
from sweeps.timing.statistics import TOLERANCE, median, median_interval


@dataclass(frozen=True)
class SharedSlowdown:
    """Ratio of the anchors' time with all GPUs at work to their time with one GPU at work.

    ``ratio`` is the median over the anchors, and ``lo`` and ``hi`` are the ends of its 95%
    interval.
    """

    ratio: float
    lo: float
    hi: float

    @property
    def slowed(self) -> bool:
        """True if the slowdown exceeds 1% (``TOLERANCE``), and the whole interval is above 1."""
        return self.ratio > 1 + TOLERANCE and self.lo > 1


def interference(events: Sequence[Event]) -> SharedSlowdown | None:
    """Return how much slower a node's GPUs are when all of them work at the same time.

    The anchors are timed in two phases: on one GPU at a time, and on all GPUs at once. Return None
    if fewer than six anchors were timed in both phases. ``events`` are the events of the shards
    that the node's workers measure, each shard's in the order of its sample file.
    """
    # 1. Collect the seconds of the samples: first by anchor, worker and GPU, and then by phase. On
    # a CPU, only the worker differs. After a move, a worker also has samples of its earlier GPU.
    seconds: dict[tuple[str, SamplePlace], dict[str, list[float]]]
    seconds = defaultdict(lambda: defaultdict(list))
    for event in latest_anchor_events(events):
        seconds[event["case"], place_of(event)][event["phase"]].append(event["s"])
    # 2. Compare the two phases.
    gpu_ratios: dict[str, list[float]] = defaultdict(list)
    for (anchor, _), by_phase in seconds.items():
        if ALONE in by_phase and TOGETHER in by_phase:
            gpu_ratios[anchor].append(median(by_phase[TOGETHER]) / median(by_phase[ALONE]))
    anchor_ratios = [median(ratios) for ratios in gpu_ratios.values()]
    interval = median_interval(anchor_ratios)
    if interval is None:
        return None
    lo, hi = interval
    return SharedSlowdown(median(anchor_ratios), lo, hi)
