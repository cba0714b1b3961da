"""Anchors: the same few cases on every GPU of a run, which tell how fast each one is.

They are timed before a run's cases. What that costs is no part of the budget. Where several GPUs of
a node are measured at the same time, each times them alone first, and then all of them together:
what that changes is what they do to one another, through the host or through their power supply.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kernels.machine import Machine
from sweeps.cases.case import Case
from sweeps.cases.spec import all_sweeps
from sweeps.planning.choice import sweep_cases
from sweeps.planning.plan import PlanEntry, make_plan
from sweeps.running.fold import place_of, utc
from sweeps.running.rounds import Bench, Ready, Visit, make_event
from sweeps.schema import ALONE, PHASES
from sweeps.store import Event
from sweeps.timing.sampler import SUSTAINED_SETTLE, Subject
from sweeps.timing.statistics import CHECKPOINTS, median, median_interval

ANCHORS = ("anchors", "anchors-memory")
"""The sweeps that declare them."""

_SUSTAINED_SECONDS = 5.0
_SUSTAINED_SHARE = 0.05  # of a small budget


def anchor_cases(machine: Machine) -> list[PlanEntry]:
    """The anchors of a machine; none where no sweep declares them."""
    known = all_sweeps()
    cases = {name: sweep_cases(known[name], machine) for name in ANCHORS if name in known}
    return list(make_plan(cases, machine, 1e9, in_order=True).planned)


def sustained_seconds(budget: float) -> float:
    """Seconds of sustained work for a run with so many seconds to measure."""
    return min(_SUSTAINED_SECONDS, _SUSTAINED_SHARE * budget)


def time_anchors(
    cases: Sequence[Case], bench: Bench, worker: str, tell: Callable[[Event], None], visit: Visit,
    seconds: float, wait: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Time the anchors on one GPU. A case that fails is left out.

    Work without a pause is timed in the last phase alone, in which all GPUs can do it at once.

    Args:
        cases: the anchors.
        bench: where they run.
        worker: the shard's name, for the events.
        tell: called with an event for every sample.
        visit: called before whatever may crash.
        seconds: of sustained work.
        wait: where other GPUs of the node are measured, too: called with a phase before it, and
            returns when it may begin.
    """
    sampler = bench.sampler
    tell(make_event(bench, worker, "anchoring", "", 0.0))
    ready = [r for r in bench.prepare(cases, {}, visit) if isinstance(r, Ready)]

    def sample(subject: Subject, phase: str) -> None:
        visit([], subject.cost)
        try:
            taken = sampler.sample(subject)
        except Exception as error:
            bench.failure(error)
            return
        reading = taken.reading
        sensors = {"sm_mhz": reading.sm_mhz, "power_w": reading.power_w, "temp_c": reading.temp_c}
        if taken.hidden:
            tell(make_event(bench, worker, "anchor", subject.key, 0.0, phase=phase, s=taken.seconds,
                            throttled=list(reading.throttled), **sensors))  # fmt: skip

    bursts = [result for result in ready if result.case.mode == "burst"]
    phase = ALONE
    for phase in (ALONE,) if wait is None else PHASES:
        if wait is not None:
            wait(phase)
        sampler.wake()
        for _ in range(CHECKPOINTS[1]):
            for result in bursts:
                sample(result.subject, phase)
    for result in ready:
        if result.case.mode == "sustained":
            # Its samples follow one another without a pause, each settling before it is timed.
            count = math.ceil(seconds / max(result.subject.cost, SUSTAINED_SETTLE))
            for _ in range(max(CHECKPOINTS[0], count)):
                sample(result.subject, phase)


def anchor_rows(
    run: str, anchors: Sequence[PlanEntry], events: Sequence[Event],
    gpus: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per GPU, anchor and phase, of the latest time that a GPU timed its anchors.

    Args:
        run: the run's name.
        anchors: the cases.
        events: all of the run's.
        gpus: the places in run.json, with ``gpu``, ``id`` and ``node``.
    """
    taken: dict[tuple[str, Any, str, str], list[Event]] = defaultdict(list)
    for event in of_latest(events):
        taken[event["worker"], event.get("gpu"), event["case"], event["phase"]].append(event)
    known = {place["gpu"]: place for place in gpus}
    cases = {entry.case.id: entry.case for entry in anchors}
    rows = []
    for (worker, gpu, case, phase), samples in taken.items():
        if case not in cases:
            continue
        seconds = [event["s"] for event in samples]
        interval = median_interval(seconds)
        row = {
            "run": run, "worker": worker, "gpu": gpu, "gpu_id": known.get(gpu, {}).get("id"),
            "node": known.get(gpu, {}).get("node", 0), "phase": phase,
            "time_utc": utc(samples[-1]["at"]), **cases[case].columns(), "samples": len(seconds),
            "time_us": median(seconds) * 1e6,
            "throttled": ";".join(sorted({r for e in samples for r in e.get("throttled", ())})),
        }  # fmt: skip
        if interval is not None:
            row["time_lo_us"], row["time_hi_us"] = interval[0] * 1e6, interval[1] * 1e6
        for name in ("sm_mhz", "power_w", "temp_c"):
            values = [event[name] for event in samples if event.get(name) is not None]
            row[name] = median(values) if values else None
        rows.append(row)
    return rows


def of_latest(events: Sequence[Event]) -> Iterator[Event]:
    """The anchors' samples since a worker last began on a GPU: a run that goes on may repeat them.

    The events of a worker are in the order of their file.
    """
    begun = {place_of(e): i for i, e in enumerate(events) if e["event"] == "anchoring"}
    for i, event in enumerate(events):
        if event["event"] == "anchor" and i > begun.get(place_of(event), -1):
            yield event
