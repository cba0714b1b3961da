"""Turn the anchors' samples into anchors.csv, steady.csv and the ``steady`` entry of run.json.

Anchors are a few cases that every worker of a run times before its share of the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sweeps.folding.history import SENSORS, place_of, sensor_medians, utc
from sweeps.planning.plan import PlanEntry
from sweeps.schema import ALONE, IDENTITY, problem_of
from sweeps.store import Event
from sweeps.timing.statistics import median, median_interval

_SETTLED = 0.5  # share of sustained work after which power and clocks count as steady


def anchor_rows(
    run: str,
    anchors: Sequence[PlanEntry],
    events: Sequence[Event],
    gpus: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the rows of anchors.csv: one for each worker, GPU, anchor and phase.

    The phases are those of :data:`sweeps.schema.PHASES`. The rows are computed from the latest
    timing of the anchors. A sustained anchor's row covers only its :func:`settled_windows`.
    ``energy_j`` is the board's energy per launch in joules; it is None for bursts and wherever the
    energy is unknown. ``gpus`` is the entry ``gpus`` of run.json.
    """
    # 1. Collect the samples of each row.
    samples_by_key: dict[tuple[str, Any, str, str], list[Event]] = defaultdict(list)
    for event in latest_anchor_events(events):
        key = event["worker"], event.get("gpu"), event["case"], event["phase"]
        samples_by_key[key].append(event)
    # 2. Make the rows.
    gpu_records = {record["gpu"]: record for record in gpus}
    cases = {entry.case.id: entry.case for entry in anchors}
    rows = []
    for (worker, gpu, case_id, phase), every_sample in samples_by_key.items():
        if case_id not in cases:
            continue
        # Sustained work counts from the moment at which it is steady. All samples of a burst count.
        settled = settled_windows(every_sample)
        samples = settled or every_sample
        gpu_record = gpu_records.get(gpu, {})
        seconds = [event["s"] for event in samples]
        interval = median_interval(seconds)
        reasons = {reason for event in samples for reason in event.get("throttled", ())}
        row = {
            "run": run,
            "worker": worker,
            "gpu": gpu,
            "gpu_id": gpu_record.get("id"),
            # A CPU has no record in ``gpus``, so its row gets the number of the first node.
            "node": gpu_record.get("node", 0),
            "phase": phase,
            "time_utc": utc(samples[-1]["at"]),
            **cases[case_id].columns(),
            "samples": len(seconds),
            "time_us": median(seconds) * 1e6,
            "energy_j": _joules_per_launch(settled),
            **sensor_medians(samples),
            "throttled": ";".join(sorted(reasons)),
        }
        if interval is not None:
            row["time_lo_us"], row["time_hi_us"] = interval[0] * 1e6, interval[1] * 1e6
        rows.append(row)
    return rows


def steady_rows(
    run: str,
    anchors: Sequence[PlanEntry],
    events: Sequence[Event],
) -> list[dict[str, Any]]:
    """Return the rows of steady.csv: one for each window of the sustained anchors.

    A window is one batch of launches. Only windows from the latest timing of the anchors have a
    row.
    """
    cases = {entry.case.id: entry.case for entry in anchors}
    rows = []
    for event in latest_anchor_events(events):
        case = cases.get(event["case"])
        is_sustained = "t" in event
        if case is None or not is_sustained:
            continue
        rows.append(
            {
                "run": run,
                "worker": event["worker"],
                "gpu": event.get("gpu"),
                **case.columns(),
                "elapsed_s": event["t"],
                "time_us": event["s"] * 1e6,
                "tflops": case.problem.flops / event["s"] / 1e12,
                **{name: event.get(name) for name in (*SENSORS, "joules")},
                "throttled": ";".join(event.get("throttled", ())),
            }
        )
    return rows


def steady_report(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the list ``steady`` of run.json, which compares sustained anchors with bursts.

    A sustained anchor has an entry if the same worker and GPU also timed the anchor in bursts while
    the run used no other GPU of the node. ``share`` is the sustained speed divided by the burst
    speed. The bounds ``lo`` and ``hi`` of ``share`` follow from the 95% intervals of the sustained
    time and the burst time. They are None if either time has no interval.
    """

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a key that identifies the worker, the GPU and the anchor, except for its mode."""
        identity = [row.get(name) for name in IDENTITY if name != "mode"]
        return row["worker"], row["gpu"], *identity

    bursts = {key(row): row for row in rows if row["mode"] == "burst" and row["phase"] == ALONE}
    report = []
    for row in rows:
        burst = bursts.get(key(row))
        if row["mode"] != "sustained" or burst is None:
            continue
        problem = problem_of(row)
        have_intervals = "time_lo_us" in row and "time_lo_us" in burst
        report.append(
            {
                "gpu": row["gpu"],
                "problem": str(problem),
                "tflops": problem.flops / row["time_us"] / 1e6,  # 1 FLOP/µs is 1e6 FLOP/s
                "share": burst["time_us"] / row["time_us"],
                "lo": burst["time_lo_us"] / row["time_hi_us"] if have_intervals else None,
                "hi": burst["time_hi_us"] / row["time_lo_us"] if have_intervals else None,
                **{name: row[name] for name in ("sm_mhz", "power_w", "energy_j")},
            }
        )
    return report


def settled_windows(samples: Sequence[Event]) -> list[Event]:
    """Return the windows of sustained work in which power and clocks are assumed to be steady.

    The ``t`` of a window is its start, in seconds since the anchor began. A window is returned if
    its ``t`` is at least half of the last window's ``t``. ``samples`` are one anchor's samples from
    a single timing. For a burst anchor, the result is empty.
    """
    # Only windows of sustained work have ``t``, the seconds until they start.
    windows = [event for event in samples if "t" in event]
    last_begin = max((event["t"] for event in windows), default=0.0)
    return [event for event in windows if event["t"] >= _SETTLED * last_begin]


def _joules_per_launch(windows: Sequence[Event]) -> float | None:
    """Return the mean energy per launch in joules, from readings of the board's energy counter.

    Return None if there are fewer than two readings, or if the counter did not increase.
    """
    with_reading = [i for i, event in enumerate(windows) if event.get("joules") is not None]
    if len(with_reading) < 2:
        return None
    # The counter is read at the end of each window. The launches of the first window are therefore
    # already part of its reading. Those of windows without a reading are part of a later one.
    first, last = with_reading[0], with_reading[-1]
    launches = sum(event["n"] for event in windows[first + 1 : last + 1])
    joules: float = windows[last]["joules"] - windows[first]["joules"]
    return joules / launches if joules > 0 else None


def latest_anchor_events(events: Sequence[Event]) -> Iterator[Event]:
    """Yield the samples from the latest timing of the anchors, for each worker and GPU.

    A resumed run may time its anchors again. The events of each worker must be in the order of the
    worker's sample file.
    """
    # Later events replace earlier ones of the same worker and GPU.
    latest_begin = {
        place_of(event): i for i, event in enumerate(events) if event["event"] == "anchoring"
    }
    for i, event in enumerate(events):
        if event["event"] == "anchor" and i > latest_begin.get(place_of(event), -1):
            yield event
