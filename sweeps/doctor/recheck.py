"""Re-time a few recorded cases, to see whether this machine is as fast as the recorded machine.

A recording may span several sessions, each on a newly assigned node, so a later session may run on
a different machine.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.common.counts import counted
from kernels.common.errors import UserError, error_summary
from kernels.config import HAND_WRITTEN
from kernels.device import Device
from kernels.machine import Machine
from sweeps.cases.case import Case
from sweeps.measuring.torch_bench import open_bench
from sweeps.store import read_run
from sweeps.timing.statistics import CHECKPOINTS, median, median_interval

TOLERANCE = 0.03
"""Tolerance of the comparison with the recorded times.

The machine is judged to be as fast as recorded if the median ratio of present to recorded times is
within a factor of ``1 + TOLERANCE`` of 1."""


def choose_cases(rows: Sequence[Mapping[str, str]], count: int) -> list[tuple[Case, float]]:
    """Return up to ``count`` recorded cases, each with its recorded seconds per launch.

    The candidates are GEMMs and convolutions that a vendor library computed in burst mode. If at
    least ``count`` candidates have converged, the others are dropped. The remaining candidates are
    sorted by time, and evenly spaced ones are chosen.
    """
    # 1. Select the rows that can be chosen.
    usable = [
        row
        for row in rows
        if row["status"] == "ok"
        and row["mode"] == "burst"
        and row["implementation"] not in HAND_WRITTEN
        and row["op"] in ("gemm", "conv")
    ]
    converged = [row for row in usable if row["converged"] == "true"]
    candidates = converged if len(converged) >= count else usable
    if not candidates:
        return []
    # 2. Sort the rows by time, and choose evenly spaced ones. If there are fewer rows than
    # ``count``, some positions coincide, and the set drops the duplicates.
    candidates.sort(key=lambda row: float(row["time_us"]))
    last = len(candidates) - 1
    intervals = max(1, count - 1)  # between the chosen positions; one case has none
    positions = sorted({round(i * last / intervals) for i in range(count)})
    chosen = [candidates[position] for position in positions]
    return [(Case.from_columns(row), float(row["time_us"]) * 1e-6) for row in chosen]


def time_again(device: Device, folder: Path, count: int) -> dict[str, Any]:
    """Re-time up to ``count`` cases of the measurements.csv in a machine's results folder.

    Cases that cannot be re-timed are left out.

    Returns:
        The result of :func:`judge_ratios`, with the added entry ``sentence``: the result in words.

    Raises:
        UserError: if measurements.csv is missing or damaged, if run.json or plan.jsonl is damaged
            or cannot be read, or if the device cannot be used.
        OSError: if measurements.csv cannot be read.
        PoisonedError: if the device does not recover from a failed launch.
    """
    # 1. Choose the cases.
    path = folder / "measurements.csv"
    if not path.exists():
        raise UserError(f"{path} does not exist, so no case can be re-timed; run a sweep first.")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            chosen = choose_cases(list(csv.DictReader(file)), count)
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(
            f"{path} is damaged ({error_summary(error)}), so no case can be re-timed; restore "
            "it, or move its folder away and run the sweep again."
        ) from None
    recorded = {case.id: seconds for case, seconds in chosen}
    cases = [case for case, _ in chosen]
    # 2. Prepare them on the recorded machine, whose ceilings were measured if it is a CPU.
    described = read_run(folder)["machine"]
    machine = Machine.from_json(described) if described else device.machine
    bench, ready = open_bench(machine, device.gpu, cases)
    subjects = [result.subject for result in ready]
    # 3. Take eight samples of each case, in rounds, so that a short disturbance does not hit all
    # samples of one case.
    bench.sampler.wake()
    for _ in range(CHECKPOINTS[1]):
        for subject in list(subjects):  # a copy, because subjects that fail are removed
            try:
                bench.sampler.sample(subject)
            except Exception as error:
                bench.recover_from(error)  # raises an error if the device has not recovered
                subjects.remove(subject)
    # 4. Compare the times. A subject whose samples all showed launch gaps has no time.
    ratios = [
        median(subject.samples) / recorded[subject.key] for subject in subjects if subject.samples
    ]
    judged = judge_ratios(ratios)
    return {**judged, "sentence": _sentence(judged)}


def judge_ratios(ratios: Sequence[float]) -> dict[str, Any]:
    """Judge whether the machine is as fast as recorded, from ratios of present to recorded times.

    Returns:
        A mapping with these entries. If ``ratios`` is empty, all except ``cases`` are None.

        - ``cases``: the number of ratios;
        - ``ratio``: the median ratio;
        - ``lo`` and ``hi``: the bounds of the median's 95% interval; None for fewer than six cases;
        - ``same``: True if the machine is as fast as recorded, within :data:`TOLERANCE`.
    """
    if not ratios:
        return {"cases": 0, "ratio": None, "lo": None, "hi": None, "same": None}
    ratio = median(ratios)
    interval = median_interval(ratios)
    lo, hi = (None, None) if interval is None else interval
    # In logarithms, a slower and a faster machine are judged by the same factor.
    same = abs(math.log(ratio)) <= math.log1p(TOLERANCE)
    return {"cases": len(ratios), "ratio": ratio, "lo": lo, "hi": hi, "same": same}


def _sentence(judged: Mapping[str, Any]) -> str:
    """Return the result of :func:`judge_ratios` in words."""
    ratio = judged["ratio"]
    if ratio is None:
        return "No recorded case could be re-timed."
    if judged["same"]:
        verdict = "as fast as recorded"
    elif ratio > 1:
        verdict = "slower than recorded"
    else:
        verdict = "faster than recorded"
    return (
        f"This machine is {verdict}: re-timed cases take {ratio:.3f}× the recorded time "
        f"(median of {counted(judged['cases'], 'case')})."
    )
