"""Time a run's anchors on one GPU.

Anchors are a few cases that every GPU of a run times, so that the GPUs can be compared. They are
timed before the run's other cases and do not count towards the budget.

If the run uses several GPUs of a node, the anchors are timed in two phases. In the first phase,
each GPU times the burst anchors while the other GPUs are idle. In the second phase, all GPUs time
all anchors at once. The difference between the two times of a burst anchor shows how the GPUs
affect one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sweeps.cases.case import Case
from sweeps.measuring.bench import Bench, OnStart, Ready, make_event
from sweeps.schema import ALONE, PHASES
from sweeps.store import Event
from sweeps.timing.sampler import Subject
from sweeps.timing.statistics import CHECKPOINTS
from sweeps.timing.telemetry import Reading

# Samples of each burst anchor in each phase. They are more than an interval needs
# (CHECKPOINTS[0]), because samples with launch gaps are dropped.
_BURST_SAMPLES = CHECKPOINTS[1]


def time_anchors(
    cases: Sequence[Case],
    bench: Bench,
    worker: str,
    emit: Callable[[Event], None],
    on_start: OnStart,
    seconds: float,
    wait: Callable[[str], None] | None = None,
) -> None:
    """Time the anchors on one GPU.

    Burst anchors are sampled in each phase. Burst samples with launch gaps are dropped.

    Each sustained anchor runs for ``seconds``. It runs only in the last phase, so that all GPUs run
    it at once. Each window of a sustained anchor (:class:`sweeps.timing.sampler.Window`) becomes an
    event. The event's ``t`` is the start of the window, in seconds since the anchor began.

    ``wait`` is called with the name of each phase, and returns when that phase may begin. ``wait``
    is None if the run uses no other GPU of the node; there is then only one phase.

    Raises:
        PoisonedError: if the device does not recover from an error.
    """
    sampler = bench.sampler

    def report(key: str, phase: str, launch_seconds: float, reading: Reading, **more: Any) -> None:
        """Emit an event with a cost of 0, because anchors do not count towards the budget."""
        sensors = {"sm_mhz": reading.sm_mhz, "power_w": reading.power_w, "temp_c": reading.temp_c}
        emit(
            make_event(
                bench,
                worker,
                "anchor",
                key,
                0.0,
                phase=phase,
                s=launch_seconds,
                **more,
                throttled=list(reading.throttled),
                **sensors,
            )
        )

    def sample(subject: Subject, phase: str) -> None:
        on_start([], subject.cost)
        try:
            taken = sampler.sample(subject)
        except Exception as error:
            bench.recover_from(error)  # raises an error if the device has not recovered
            return
        if taken.hidden:
            report(subject.key, phase, taken.seconds, taken.reading)

    def hold(subject: Subject, phase: str) -> None:
        # The last batch may end after ``seconds``, and a check of the result follows it.
        on_start([], seconds + 2 * subject.cost)
        try:
            windows = sampler.hold(subject, seconds)
        except Exception as error:
            bench.recover_from(error)  # raises an error if the device has not recovered
            return
        for window in windows:
            report(
                subject.key,
                phase,
                window.seconds,
                window.reading,
                t=window.begin,
                n=window.launches,
                joules=window.joules,
            )

    # 1. Prepare the anchors. The event marks where their samples begin. If a resumed run times the
    # anchors again, only the samples after its last such event count.
    emit(make_event(bench, worker, "anchoring", "", 0.0))
    results = bench.prepare(cases, {}, on_start)
    ready = [result for result in results if isinstance(result, Ready)]
    # 2. Sample the bursts in each phase.
    bursts = [result for result in ready if result.case.mode == "burst"]
    phases = (ALONE,) if wait is None else PHASES
    for phase in phases:
        if wait is not None:
            wait(phase)
        sampler.wake()
        for _ in range(_BURST_SAMPLES):
            for result in bursts:
                sample(result.subject, phase)
    # 3. Run the sustained anchors in the last phase.
    for result in ready:
        if result.case.mode == "sustained":
            hold(result.subject, phases[-1])
