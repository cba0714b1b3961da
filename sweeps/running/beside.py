"""What processes of a run do besides measuring: time some cases again, and name kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sweeps.cases.case import Case
from sweeps.running.rounds import Bench, Ready, Visit, make_event
from sweeps.store import Event
from sweeps.timing.statistics import CHECKPOINTS


def repeat_cases(
    cases: Sequence[Case], bench: Bench, worker: str, tell: Callable[[Event], None], visit: Visit
) -> None:
    """Time some cases again, in a process of its own: how well do medians repeat?

    Each gets as many samples as a second checkpoint has, in shuffled rounds; their events are
    ``repeat``. A case that fails this time is left out.
    """
    sampler = bench.sampler
    begin = sampler.now()
    ready = [r for r in bench.prepare(cases, {}, visit) if isinstance(r, Ready)]
    sampler.wake()
    tell(make_event(bench, worker, "aside", "", sampler.now() - begin))
    shuffle = random.Random(0).shuffle
    for _ in range(CHECKPOINTS[1]):
        shuffle(ready)
        for result in list(ready):
            visit([result.case.id], result.subject.cost)
            try:
                sample = sampler.sample(result.subject)
            except Exception as error:
                bench.failure(error)
                ready.remove(result)
                continue
            if sample.hidden:
                tell(make_event(bench, worker, "repeat", sample.key, sample.cost, s=sample.seconds))


def name_kernels(
    cases: Sequence[Case], bench: Bench, worker: str, tell: Callable[[Event], None], visit: Visit
) -> None:
    """Report the names of the cases' kernels. This loads a profiler: time nothing afterwards.

    Args:
        cases: those that have times and no names yet.
        bench: where they run.
        worker: the shard's name, for the events.
        tell: called with every event.
        visit: called before every visit.
    """
    begin = bench.sampler.now()
    for case, facts in bench.name(cases, visit):
        now = bench.sampler.now()
        tell(make_event(bench, worker, "facts", case.id, now - begin, facts=dict(facts)))
        begin = now
