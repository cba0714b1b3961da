"""What processes of a run do besides measuring: time cases or pairs of them again, name kernels."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from sweeps.cases.case import Case
from sweeps.folding.history import BLOCKS
from sweeps.measuring.bench import Bench, OnStart, Ready, make_event
from sweeps.store import Event
from sweeps.timing.sampler import Subject
from sweeps.timing.statistics import CHECKPOINTS

_PAIRS_AT_ONCE = 8  # whose blocks alternate; what an interruption loses at most
_TRIES = 3  # of a block in which launch gaps show


def repeat_cases(
    cases: Sequence[Case],
    bench: Bench,
    worker: str,
    emit: Callable[[Event], None],
    on_start: OnStart,
) -> None:
    """Time some cases again, in a process of its own: how well do medians repeat?

    Each gets as many samples as a second checkpoint has, in shuffled rounds; their events are
    ``repeat``. A case that fails this time is left out.
    """
    sampler = bench.sampler
    begin = sampler.now()
    ready = [r for r in bench.prepare(cases, {}, on_start) if isinstance(r, Ready)]
    sampler.wake()
    emit(make_event(bench, worker, "aside", "", sampler.now() - begin))
    shuffle = random.Random(0).shuffle
    for _ in range(CHECKPOINTS[1]):
        shuffle(ready)
        for result in list(ready):
            on_start([result.case.id], result.subject.cost)
            try:
                sample = sampler.sample(result.subject)
            except Exception as error:
                bench.failure(error)
                ready.remove(result)
                continue
            if sample.hidden:
                emit(make_event(bench, worker, "repeat", sample.key, sample.cost, s=sample.seconds))


def confirm_pairs(
    cases: Sequence[Case],
    bench: Bench,
    worker: str,
    emit: Callable[[Event], None],
    on_start: OnStart,
) -> None:
    """Time pairs of cases anew: what does the second of each gain over the first?

    This process has taken none of the samples that the pairs were chosen by, and has operands of
    its own. Every pair gets :data:`BLOCKS` blocks, in shuffled rounds over a few pairs. In a block
    the second case is timed twice between two samples of the first, so that a machine whose speed
    changes steadily does not matter. A case that fails gets that outcome, and its pairs are left
    out.

    Args:
        cases: the pairs, one after the other.
        bench: where they run.
        worker: the shard's name, for the events.
        emit: called with an event for every block, whose ``process`` is this one's beginning.
        on_start: called before every visit.
    """
    process = time.time()
    pairs = list(zip(cases[::2], cases[1::2], strict=True))
    for begin in range(0, len(pairs), _PAIRS_AT_ONCE):
        _confirm_some(pairs[begin : begin + _PAIRS_AT_ONCE], process, bench, worker, emit, on_start)


def _confirm_some(
    pairs: Sequence[tuple[Case, Case]],
    process: float,
    bench: Bench,
    worker: str,
    emit: Callable[[Event], None],
    on_start: OnStart,
) -> None:
    sampler = bench.sampler
    begin = sampler.now()
    cases = list(dict.fromkeys(case for pair in pairs for case in pair))
    ready: dict[Case, Subject] = {}

    def fail(case: Case, status: str, message: str) -> None:
        ready.pop(case, None)
        emit(make_event(bench, worker, "outcome", case.id, 0.0, status=status, message=message))

    for result in bench.prepare(cases, {}, on_start):
        if isinstance(result, Ready):
            ready[result.case] = result.subject
        else:
            fail(result.case, result.status, result.message)
    sampler.wake()
    emit(make_event(bench, worker, "aside", cases[0].id, sampler.now() - begin))
    due = list(pairs)
    shuffle = random.Random(process).shuffle
    for number in range(BLOCKS):
        shuffle(due)
        for pair in due:
            begin = sampler.now()
            seconds = []
            try:
                case = pair[0]
                for _ in range(_TRIES if all(case in ready for case in pair) else 0):
                    samples = []
                    for case in (pair[0], pair[1], pair[1], pair[0]):
                        on_start([case.id], ready[case].cost)
                        samples.append(sampler.sample(ready[case]))
                    if all(sample.hidden for sample in samples):
                        seconds = [sample.seconds for sample in samples]
                        break
                for case in pair if seconds and number == BLOCKS - 1 else ():
                    _check_after(ready[case], on_start)
            except Exception as error:  # a wrong result, too
                fail(case, *bench.failure(error))
                continue
            if seconds:
                emit(
                    make_event(
                        bench,
                        worker,
                        "confirm",
                        pair[0].id,
                        sampler.now() - begin,
                        against=pair[1].id,
                        process=process,
                        s=seconds,
                    )
                )


def _check_after(subject: Subject, on_start: OnStart) -> None:
    on_start([subject.key], subject.cost + subject.checking)
    if subject.checker is not None:
        subject.checker.after()


def name_kernels(
    cases: Sequence[Case],
    bench: Bench,
    worker: str,
    emit: Callable[[Event], None],
    on_start: OnStart,
) -> None:
    """Report the names of the cases' kernels. This loads a profiler: time nothing afterwards.

    Args:
        cases: those that have times and no names yet.
        bench: where they run.
        worker: the shard's name, for the events.
        emit: called with every event.
        on_start: called before every visit.
    """
    begin = bench.sampler.now()
    for case, facts in bench.name(cases, on_start):
        now = bench.sampler.now()
        emit(make_event(bench, worker, "facts", case.id, now - begin, facts=dict(facts)))
        begin = now
