"""Re-time cases, re-time pairs of cases, and name kernels, each in a separate process.

In the functions below, ``worker`` is the shard's name.
"""

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

_PAIRS_AT_ONCE = 8  # pairs whose blocks alternate; an interruption loses at most these pairs
_TRIES = 3  # attempts at a block in which launch gaps show
# Samples of each re-timed case. They are more than an interval needs (CHECKPOINTS[0]), because
# samples with launch gaps are dropped.
_REPEATED_SAMPLES = CHECKPOINTS[1]


def repeat_cases(
    cases: Sequence[Case],
    bench: Bench,
    worker: str,
    emit: Callable[[Event], None],
    on_start: OnStart,
) -> None:
    """Re-time cases, to see how far their medians differ from those of an earlier process.

    The cases are sampled in rounds, in a new order each time. Samples become ``repeat`` events. If
    a sample fails or shows launch gaps, an ``aside`` event reports only how long the sample took. A
    case that fails gets no further samples.

    Raises:
        PoisonedError: if the device does not recover from an error.
    """
    sampler = bench.sampler
    begin = sampler.now()
    results = bench.prepare(cases, {}, on_start)
    ready = [result for result in results if isinstance(result, Ready)]
    sampler.wake()
    # The time to prepare the cases counts as measuring time, but belongs to no single case.
    emit(make_event(bench, worker, "aside", "", sampler.now() - begin))
    shuffle = random.Random(0).shuffle
    for _ in range(_REPEATED_SAMPLES):
        shuffle(ready)
        for result in list(ready):  # a copy, because cases that fail are removed
            on_start([result.case.id], result.subject.cost)
            begin = sampler.now()
            try:
                sample = sampler.sample(result.subject)
            except Exception as error:
                bench.recover_from(error)  # raises an error if the device has not recovered
                ready.remove(result)
                emit(make_event(bench, worker, "aside", result.case.id, sampler.now() - begin))
                continue
            if sample.hidden:
                emit(make_event(bench, worker, "repeat", sample.key, sample.cost, s=sample.seconds))
            else:
                emit(make_event(bench, worker, "aside", sample.key, sample.cost))


def confirm_pairs(
    cases: Sequence[Case],
    bench: Bench,
    worker: str,
    emit: Callable[[Event], None],
    on_start: OnStart,
) -> None:
    """Re-time pairs of cases, to measure how much faster the second case of each pair is.

    The samples by which the pairs were chosen must be from other processes. A pair gets up to
    :data:`BLOCKS` blocks. In each block, the second case is timed twice between two samples of the
    first case, so that a steady change in the machine's speed cancels out. A case that fails gets
    an ``outcome`` event.

    ``cases`` has the two cases of the first pair, then the two cases of the second pair, and so on.

    Raises:
        PoisonedError: if the device does not recover from an error.
    """
    process = time.time()  # identifies this process in the events
    pairs = list(zip(cases[::2], cases[1::2], strict=True))
    for begin in range(0, len(pairs), _PAIRS_AT_ONCE):
        _confirm_batch(
            pairs[begin : begin + _PAIRS_AT_ONCE], process, bench, worker, emit, on_start
        )


def _confirm_batch(
    pairs: Sequence[tuple[Case, Case]],
    process: float,
    bench: Bench,
    worker: str,
    emit: Callable[[Event], None],
    on_start: OnStart,
) -> None:
    """Re-time a few pairs in rounds, as :func:`confirm_pairs` describes."""
    sampler = bench.sampler
    ready: dict[Case, Subject] = {}  # cases that can be timed and have not failed

    def fail(case: Case, status: str, message: str) -> None:
        ready.pop(case, None)
        emit(make_event(bench, worker, "outcome", case.id, 0.0, status=status, message=message))

    def take_block(first: Case, second: Case, is_last: bool) -> list[float]:
        """Sample the cases in the order first, second, second, first.

        Return the seconds per launch of each sample. The list is empty if a case fails, or if
        launch gaps show in every attempt.
        """
        case = first  # the case that runs, so that an error is reported for the right one
        try:
            for _ in range(_TRIES):
                samples = []
                for case in (first, second, second, first):
                    on_start([case.id], ready[case].cost)
                    samples.append(sampler.sample(ready[case]))
                if all(sample.hidden for sample in samples):
                    break
            if not all(sample.hidden for sample in samples):  # launch gaps show in every attempt
                return []
            if is_last:
                for case in (first, second):
                    _check_after(ready[case], on_start)
        except Exception as error:  # including a WrongResultError
            fail(case, *bench.recover_from(error))
            return []
        return [sample.seconds for sample in samples]

    # 1. Prepare each case once, even if it is in several pairs.
    begin = sampler.now()
    cases = list(dict.fromkeys(case for pair in pairs for case in pair))
    for result in bench.prepare(cases, {}, on_start):
        if isinstance(result, Ready):
            ready[result.case] = result.subject
        else:
            fail(result.case, result.status, result.message)
    sampler.wake()
    # The event names a case, so that this time counts towards the time for advice.
    emit(make_event(bench, worker, "aside", cases[0].id, sampler.now() - begin))
    # 2. Take one block of every pair in each round, in a new order each time.
    shuffled = list(pairs)
    shuffle = random.Random(process).shuffle
    for block in range(BLOCKS):
        shuffle(shuffled)
        for first, second in shuffled:
            if first not in ready or second not in ready:  # one of them has failed
                continue
            begin = sampler.now()
            seconds = take_block(first, second, is_last=block == BLOCKS - 1)
            cost = sampler.now() - begin
            if not seconds:
                emit(make_event(bench, worker, "aside", first.id, cost))
                continue
            emit(
                make_event(
                    bench,
                    worker,
                    "confirm",
                    first.id,
                    cost,
                    against=second.id,
                    process=process,
                    s=seconds,
                )
            )


def _check_after(subject: Subject, on_start: OnStart) -> None:
    on_start([subject.key], subject.cost + subject.checking)
    if subject.checker is not None:
        subject.checker.check_after_timing()


def name_kernels(
    cases: Sequence[Case],
    bench: Bench,
    worker: str,
    emit: Callable[[Event], None],
    on_start: OnStart,
) -> None:
    """Report the names of the cases' kernels in ``facts`` events.

    Nothing may be timed in this process afterwards, because a profiler slows launches.

    Raises:
        PoisonedError: if the device does not recover from an error.
        Exception: any error from the profiler.
    """
    begin = bench.sampler.now()
    for case, facts in bench.kernel_columns(cases, on_start):
        now = bench.sampler.now()
        emit(make_event(bench, worker, "facts", case.id, now - begin, facts=dict(facts)))
        begin = now
