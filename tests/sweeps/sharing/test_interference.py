from __future__ import annotations

import random

import pytest

from sweeps.schema import ALONE, TOGETHER
from sweeps.sharing.interference import interference
from sweeps.store import Event


def anchors(
    slowdown: float, noise: float = 0.002, cases: int = 10, workers: int = 4, seed: int = 0
) -> list[Event]:
    """Return the anchors' events of GPUs whose speeds differ and that slow one another down."""
    draw = random.Random(seed)
    events: list[Event] = []
    for worker in range(1, workers + 1):
        speed = draw.gauss(1, 0.03)
        where = {"worker": f"{worker}/{workers}", "gpu": worker - 1}
        events.append({"event": "anchoring", "case": "", **where})
        for phase, factor in ((ALONE, 1.0), (TOGETHER, slowdown)):
            events += [
                {"event": "anchor", "case": str(case), **where, "phase": phase,
                 "s": (case + 1) * 1e-5 * factor / speed * draw.gauss(1, noise)}
                for case in range(cases) for _ in range(8)
            ]  # fmt: skip
    return events


@pytest.mark.parametrize("seed", range(20))
def test_what_is_planted_is_found_and_nothing_else(seed: int) -> None:
    for slowdown in (1.0, 1.005, 1.03, 1.5):
        change = interference(anchors(slowdown, seed=seed))
        assert change is not None
        assert change.ratio == pytest.approx(slowdown, rel=0.003)
        assert change.lo <= change.ratio <= change.hi
        assert change.slowed == (slowdown > 1.01)


def test_noise_is_not_taken_for_it() -> None:
    found = [interference(anchors(1.0, noise=0.1, seed=seed)) for seed in range(50)]
    assert sum(change is not None and change.slowed for change in found) <= 5


def test_few_anchors_and_one_phase_say_nothing() -> None:
    assert interference(anchors(1.5, cases=5)) is None
    alone = [event for event in anchors(1.5) if event.get("phase") != TOGETHER]
    assert interference(alone) is None


def test_the_latest_times_count() -> None:
    change = interference([*anchors(1.5), *anchors(1.0)])
    assert change is not None
    assert not change.slowed


def test_the_gpus_of_a_worker_that_moved_are_not_pooled() -> None:
    """The second GPU of worker 1/1 is half as fast, and has not worked together with others."""
    moved = [
        {**event, "gpu": 1, "s": 2 * event["s"]} if "s" in event else {**event, "gpu": 1}
        for event in anchors(1.0, noise=0.0, workers=1)
        if event.get("phase") != TOGETHER
    ]
    change = interference([*anchors(1.2, noise=0.0, workers=1), *moved])
    assert change is not None
    assert change.ratio == pytest.approx(1.2)
