"""Turn the histories of cases into the rows of a run's tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernels.common.counts import counted
from kernels.machine import Machine
from sweeps.folding.history import (
    BLOCKS,
    PROCESSES,
    History,
    SamplePlace,
    histories,
    place_of,
    sensor_medians,
    utc,
)
from sweeps.folding.limits import too_fast
from sweeps.planning.plan import PlanEntry
from sweeps.schema import SCHEMA
from sweeps.store import Event
from sweeps.timing.speed import STEADY, MachineSpeed
from sweeps.timing.statistics import is_narrow, median

_MAX_MESSAGE = 300  # characters of a message in measurements.csv


def fold_rows(
    run: str,
    planned: Sequence[PlanEntry],
    events: Sequence[Event],
    machine: Machine | None = None,
    speeds: Mapping[SamplePlace, MachineSpeed] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of measurements.csv, in the plan's order.

    A planned case has a row if it has a checked time, was refused, failed, or shows launch gaps in
    every sample. A time that is impossible on ``machine`` becomes an error; if ``machine`` is None,
    all times are accepted. ``speeds`` maps each worker and GPU to the machine's speed over the run.
    Intervals are widened to cover changes in this speed, unless ``speeds`` is None.
    """
    history_by_case = histories(events)
    rows = []
    for entry in planned:
        history = history_by_case.get(entry.case.id)
        if history is None or not (history.outcome or history.trusted or history.only_exposed):
            continue
        if history.outcome is not None:
            result = _failed_columns(history.outcome)
        elif history.only_exposed:
            result = _failed_columns(_exposed_outcome(history))
        else:
            result = _measured_columns(entry, history, machine, speeds or {})
        identity = {"schema": SCHEMA, "run": run, **entry.case.columns()}
        rows.append({**identity, **history.facts, **result})
    return rows


def rounds_table(
    planned: Sequence[PlanEntry], history_by_case: Mapping[str, History]
) -> list[dict[str, Any]]:
    """Return the rows of rounds.csv: the checked samples of each planned case, with round numbers.

    Two cases can be compared round by round, so that changes in the machine's speed have less
    effect. Samples without a recorded round are left out.
    """
    table = []
    for case_id in dict.fromkeys(entry.case.id for entry in planned):
        if case_id not in history_by_case:
            continue
        samples = [sample for sample in history_by_case[case_id].trusted if "r" in sample]
        if samples:
            table.append(
                {
                    "case": case_id,
                    "worker": samples[0]["worker"],
                    "gpu": samples[0].get("gpu"),
                    "rounds": " ".join(str(sample["r"]) for sample in samples),
                    "times_us": " ".join(f"{sample['s'] * 1e6:.6g}" for sample in samples),
                }
            )
    return table


def confirmed_table(
    events: Iterable[Event], history_by_case: Mapping[str, History]
) -> list[dict[str, Any]]:
    """Return the rows of confirmed.csv, which compares the two cases of each re-timed pair.

    A row has the log ratios that one process measured for a pair, one for each block of samples. A
    ratio is the time of the pair's first case divided by the time of the pair's second case.

    A process counts if it timed all :data:`BLOCKS` blocks of the pair, on the same worker and GPU
    as the latest process that did so. A pair has rows for the latest :data:`PROCESSES` processes
    that count. A pair is left out if fewer processes count, or if one of its cases was refused or
    failed.
    """
    # 1. Collect the blocks of each pair, by the process that timed them. A process is identified by
    # its start time.
    blocks_by_pair: dict[tuple[str, str], dict[float, list[Event]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for event in events:
        if event["event"] == "confirm":
            blocks_by_pair[event["case"], event["against"]][event["process"]].append(event)
    # 2. Make the rows of each pair from the processes that count.
    table = []
    for (case_id, against_id), blocks_by_process in blocks_by_pair.items():
        histories_of_pair = (history_by_case.get(case_id), history_by_case.get(against_id))
        if any(history is not None and history.outcome for history in histories_of_pair):
            continue
        for number, process in enumerate(_counting_processes(blocks_by_process), 1):
            blocks = blocks_by_process[process]
            log_ratios = [_log_ratio(block["s"]) for block in blocks]
            table.append(
                {
                    "case": case_id,
                    "against": against_id,
                    "process": number,
                    "worker": blocks[0]["worker"],
                    "gpu": blocks[0].get("gpu"),
                    "log_ratios": " ".join(f"{log_ratio:.6g}" for log_ratio in log_ratios),
                }
            )
    return table


def _counting_processes(blocks_by_process: Mapping[float, Sequence[Event]]) -> list[float]:
    """Return the start times of the processes that :func:`confirmed_table` uses."""
    places = {
        process: place_of(blocks[0])
        for process, blocks in blocks_by_process.items()
        if len(blocks) == BLOCKS
    }
    if not places:
        return []
    latest_place = places[max(places)]
    counting = sorted(process for process, place in places.items() if place == latest_place)
    return counting[-PROCESSES:] if len(counting) >= PROCESSES else []


def _log_ratio(seconds: Sequence[float]) -> float:
    """Return log(a / b), where a and b are the geometric means of A's and B's times in a block."""
    first_a, first_b, second_b, second_a = seconds
    return math.log(first_a * second_a / (first_b * second_b)) / 2


def _exposed_outcome(history: History) -> Event:
    message = (
        "launch gaps show in every sample. Launching may wait for the device or take too long to "
        "be hidden, or the process may be stopped repeatedly. Unset CUDA_LAUNCH_BLOCKING if it is "
        "set, and stop other programs before the next run."
    )
    return {**history.exposed[-1], "status": "error", "message": message}


def _failed_columns(outcome: Event) -> dict[str, Any]:
    """Return the columns of a case that has an outcome instead of a time."""
    message = " ".join(str(outcome["message"]).split())[:_MAX_MESSAGE]
    return {
        "status": outcome["status"],
        "message": message,
        "time_utc": utc(outcome["at"]),
        "worker": outcome["worker"],
        "gpu": outcome.get("gpu"),
    }


def _measured_columns(
    entry: PlanEntry,
    history: History,
    machine: Machine | None,
    speeds: Mapping[SamplePlace, MachineSpeed],
) -> dict[str, Any]:
    """Return the columns of a timed case, or those of an error if the time is impossible."""
    # 1. Take the median and its interval.
    samples = history.trusted
    seconds = [sample["s"] for sample in samples]
    speed = speeds.get(place_of(samples[-1]), STEADY)
    median_seconds = median(seconds)
    interval = speed.interval(seconds, [sample["at"] for sample in samples])
    # 2. Refuse a time that the machine cannot reach.
    problem = entry.case.problem
    is_impossible, speed_remark = False, ""
    if machine is not None:
        is_impossible, speed_remark = too_fast(entry.case, median_seconds, machine)
    if is_impossible:
        return _failed_columns({**samples[-1], "status": "error", "message": speed_remark})
    # 3. Make the columns.
    reasons = {reason for sample in samples for reason in sample.get("throttled", ())}
    remarks = (speed_remark, _gap_remark(history), _crash_remark(history))
    row: dict[str, Any] = {
        "status": "ok",
        "message": " ".join(remark for remark in remarks if remark),
        "time_utc": utc(samples[-1]["at"]),
        "worker": samples[-1]["worker"],
        "gpu": samples[-1].get("gpu"),
        "time_us": median_seconds * 1e6,
        "samples": len(samples),
        "converged": is_narrow(median_seconds, interval),
        "tflops": problem.flops / median_seconds / 1e12,
        "gbps": problem.bytes / median_seconds / 1e9,
        **sensor_medians(samples),
        "throttled": ";".join(sorted(reasons)),
    }
    if interval is not None:
        row["time_lo_us"], row["time_hi_us"] = interval[0] * 1e6, interval[1] * 1e6
    return row


def _gap_remark(history: History) -> str:
    count = len(history.exposed)
    if count == 0:
        return ""
    verb = "is" if count == 1 else "are"
    return f"launch gaps show in {counted(count, 'more sample')}, which {verb} left out."


def _crash_remark(history: History) -> str:
    if not history.crashes:
        return ""
    times = "once" if history.crashes == 1 else f"{history.crashes} times"
    cause = f": {history.last_crash}" if history.last_crash else ""
    return f"the process crashed {times} while handling this case{cause}."
