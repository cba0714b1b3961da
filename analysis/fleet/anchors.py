"""Read anchors.csv: the times of the same few cases, called anchors, on each GPU of a recording.

A survey of five large systems found that the time of a program varies between GPUs of one model by
8% on average and by up to 22% (P. Sinha et al., "Not All GPUs Are Created Equal", arXiv
2208.11035). Some anchors, called sustained, run without pauses, because short bursts run at boost
clocks, which hide differences in silicon, cooling and power supply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.markdown import printable
from analysis.recordings.csv_file import Faults, read_csv
from analysis.recordings.load import Recording, load_run
from kernels.common.errors import UserError
from kernels.common.program import command
from kernels.machine import Machine
from sweeps.cases.case import CACHES, MODES, Case
from sweeps.schema import IDENTITY, PHASES
from sweeps.store import ANCHOR_COLUMNS
from sweeps.timing.statistics import Z95

Array = NDArray[np.float64]

FILE = "anchors.csv"
KINDS = ("sustained", "burst", "memory", "small")
"""Kinds of anchor, by what limits their speed. ``sustained`` and ``burst`` anchors are limited by
compute, and differ in their timing mode. ``memory`` anchors are limited by the memory's bandwidth,
and ``small`` anchors by their launches."""

SENSORS = ("sm_mhz", "power_w", "temp_c")
_TIMES = ("time_us", "time_lo_us", "time_hi_us")
_ORDINALS = ("gpu", "node")
_COLUMN_KINDS = dict.fromkeys(ANCHOR_COLUMNS, "text") | dict.fromkeys(
    (*_ORDINALS, "samples", *_TIMES, *SENSORS), "real"
)

_LAUNCH = 5e-6  # seconds; work that needs less time takes as long as its launch
_LONGEST = 1e12  # longest time that is accepted, in microseconds: 11.6 days
_COLDEST = -300  # lower limit of a temperature in °C, below absolute zero
_UNREACHABLE = 1e9  # upper limit of sensor readings, which no machine reaches
_MOMENT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
_HASH = r"[0-9a-f]{4,32}|"  # empty for a GPU without an id
_RESTORE = "Restore the file, or move it away and measure the anchors again."


@dataclass(frozen=True)
class FleetDevice:
    """A GPU, or the CPU of one worker.

    Attributes:
        gpu: number of the GPU within its run; None for a CPU.
        id: hash that identifies the GPU; empty if it is unknown.
        node: number of the node within its run; None if it is unknown.
        worker: name of the worker that last measured on the device.
        power_limit_w: power limit in watts; NaN if it is unknown.
        sm_limit_mhz: limit of the SM clock in MHz; NaN if it is unknown.
    """

    gpu: int | None
    id: str
    node: int | None
    worker: str
    power_limit_w: float = math.nan
    sm_limit_mhz: float = math.nan


@dataclass(frozen=True)
class Fleet:
    """Times of the anchors on each device.

    ``log_time``, ``error``, and the values of ``sensors`` and ``throttled`` are arrays of shape
    (phases, devices, anchors). Unknown numbers are NaN.

    Attributes:
        devices: the GPUs, or the CPU of each worker.
        kinds: kind of each anchor.
        log_time: logarithm of the median time in microseconds.
        error: standard error of ``log_time``.
        sensors: median reading of each sensor.
        throttled: for each throttling reason, True where it was reported.
    """

    devices: tuple[FleetDevice, ...]
    kinds: NDArray[np.str_]
    log_time: Array
    error: Array
    sensors: Mapping[str, Array]
    throttled: Mapping[str, NDArray[np.bool_]]


@dataclass(frozen=True)
class Anchors:
    """A recording (without its rows), its fleet, and a sentence for each damaged line."""

    recording: Recording
    fleet: Fleet
    damaged: tuple[str, ...]


def read_anchors(folder: Path) -> Anchors:
    """Read the anchors of a recording; report and leave out damaged lines of anchors.csv.

    If several runs timed an anchor on a device, the latest run counts.

    Raises:
        UserError: if run.json, plan.jsonl or anchors.csv cannot be read, or if anchors.csv has no
            times or too many damaged lines.
    """
    run = load_run(folder)
    machine = Machine.from_json(run["machine"])
    path = folder / FILE
    # Older versions of Rooftile did not write the column energy_j, which is not used here.
    table = read_csv(path, _COLUMN_KINDS, _RESTORE, optional=("energy_j",))
    cases, case_positions = _cases(table.rows)
    # Reports print these names, so unprintable characters are replaced. load_run() replaces them in
    # run.json, too, so a run's name here still matches its name there.
    rows = table.rows.assign(
        case=case_positions,
        run=table.rows["run"].map(printable),
        worker=table.rows["worker"].map(printable),
    )
    _record_faults(rows, table.faults)
    damaged = table.faults.report()
    rows = rows[table.faults.sound]
    if rows.empty:
        raise UserError(f"{path} has no anchor times. {_remedy()}")
    fleet = _fleet(rows, cases, machine, run)
    return Anchors(Recording(folder, machine, run, pd.DataFrame()), fleet, damaged)


def anchor_folders(place: Path) -> list[Path]:
    """Return the given folder if it is a recording, else its subfolders that have anchors.

    Raises:
        UserError: if no anchors are found.
    """
    if (place / "run.json").exists():
        if not (place / FILE).exists():
            raise UserError(f"{place} has no {FILE}. {_remedy()}")
        return [place]
    folders = sorted(path.parent for path in place.glob(f"*/{FILE}"))
    if not folders:
        raise UserError(f"no recording in {place} has an {FILE}. {_remedy()}")
    return folders


def kind_of(case: Case, machine: Machine) -> str:
    """Return the kind of an anchor, which is one of :data:`KINDS`."""
    problem = case.problem
    # If the peak is unknown, only the memory time counts.
    compute_seconds = problem.flops / machine.peaks.get(problem.dtype, math.inf)
    memory_seconds = problem.bytes / machine.bandwidth
    if max(compute_seconds, memory_seconds) < _LAUNCH:
        return "small"
    if memory_seconds > compute_seconds:
        return "memory"
    return case.mode  # the names of both modes are kinds, too


def _remedy() -> str:
    return (
        f"To measure anchors, run {command('sweeps run')} with a budget of at least a minute "
        "(--budget 1m) on a GPU, or divide the run into several shards (--shard)."
    )


def _cases(rows: pd.DataFrame) -> tuple[list[Case], list[int]]:
    """Return the distinct valid cases of a table, and the position of each row's case among them.

    The position is -1 for a row that does not describe a valid case.
    """
    position_of: dict[tuple[str, ...], int] = {}
    cases: list[Case] = []
    positions = []
    for row in rows[list(IDENTITY)].to_dict("records"):
        # Many rows have the same case, so each case is constructed only once.
        identity = tuple(row.values())
        if identity not in position_of:
            case = _case(row)
            if case is None:
                position_of[identity] = -1
            else:
                position_of[identity] = len(cases)
                cases.append(case)
        positions.append(position_of[identity])
    return cases, positions


def _case(row: Mapping[str, str]) -> Case | None:
    try:
        case = Case.from_columns(row)
    except (UserError, ValueError, TypeError, KeyError, OverflowError):
        return None
    return case if case.mode in MODES and case.cache in CACHES else None


def _record_faults(rows: pd.DataFrame, faults: Faults) -> None:
    faults.record(rows["case"] < 0, "its columns do not describe a valid case")
    faults.record(~rows["phase"].isin(PHASES), f"phase is not one of {', '.join(PHASES)}")
    faults.record(~rows["time_utc"].str.match(_MOMENT), "time_utc is not a UTC time")
    faults.record(~rows["gpu_id"].str.fullmatch(_HASH), "gpu_id is not a hexadecimal hash")
    for name in _ORDINALS:
        numbers = rows[name]
        is_ordinal = (numbers >= 0) & (numbers < 2**31) & (numbers % 1 == 0)
        faults.record(
            numbers.notna() & ~is_ordinal, f"{name} is not a whole number from 0 to 2,147,483,647"
        )
    time, lo, hi = rows["time_us"], rows["time_lo_us"], rows["time_hi_us"]
    faults.record(~((time > 0) & (time <= _LONGEST)), "time_us is not a valid time")
    has_interval = lo.notna() | hi.notna()
    contains_time = (lo > 0) & (lo <= time) & (time <= hi) & (hi <= _LONGEST)
    faults.record(has_interval & ~contains_time, "its interval does not contain the time")
    faults.record(~(rows["samples"] >= 1), "it has no samples")
    for name in SENSORS:
        least = _COLDEST if name == "temp_c" else 0
        is_possible = (rows[name] >= least) & (rows[name] < _UNREACHABLE)
        faults.record(rows[name].notna() & ~is_possible, f"{name} is out of range")


def _fleet(
    table: pd.DataFrame, cases: Sequence[Case], machine: Machine, run: Mapping[str, Any]
) -> Fleet:
    """Return the fleet, with the latest times and sensor readings of each device.

    The column ``case`` of ``table`` has positions in ``cases``.
    """
    # 1. Identify each GPU by its id, or by its node and number if it has no id. A GPU may have
    #    served several workers. A CPU is identified by its node and worker.
    node = table["node"].fillna(-1).astype(str)
    gpu = table["gpu"].fillna(-1).astype(str)
    place = node + " " + gpu + " " + table["worker"].where(table["gpu"].isna(), "")
    table = table.assign(device=table["gpu_id"].where(table["gpu_id"] != "", place))
    # 2. Keep the latest run of each anchor on each device, and the run's latest time in each phase.
    table = table.sort_values("time_utc", kind="stable")
    latest_run = table.groupby(["device", "case"])["run"].transform("last")
    table = table[table["run"] == latest_run]
    table = table.drop_duplicates(["device", "case", "phase"], keep="last")
    # 3. Number the devices in the order of their nodes and GPUs, and number the cases left.
    latest_rows = table.drop_duplicates("device", keep="last")
    latest_rows = latest_rows.sort_values(["node", "gpu", "device"])
    device_numbers = {device: number for number, device in enumerate(latest_rows["device"])}
    used_cases = sorted(set(table["case"]))
    anchor_numbers = {case: number for number, case in enumerate(used_cases)}
    # 4. Arrange the columns in arrays of (phases, devices, anchors).
    position = (
        table["phase"].map(PHASES.index).to_numpy(),
        table["device"].map(device_numbers).to_numpy(),
        table["case"].map(anchor_numbers).to_numpy(),
    )
    shape = (len(PHASES), len(device_numbers), len(used_cases))

    def arranged(values: Any, empty: Any = np.nan) -> Any:
        array = np.full(shape, empty)
        array[position] = np.asarray(values)
        return array

    log_time = np.log(table["time_us"].to_numpy(float))
    log_lo = np.log(table["time_lo_us"].to_numpy(float))
    log_hi = np.log(table["time_hi_us"].to_numpy(float))
    reasons_of_rows = table["throttled"].str.split(";")
    all_reasons = sorted({reason for reasons in reasons_of_rows for reason in reasons} - {""})
    return Fleet(
        devices=_devices(latest_rows, run),
        kinds=np.array([kind_of(cases[case], machine) for case in used_cases]),
        log_time=arranged(log_time),
        error=arranged(standard_error(log_lo, log_hi)),
        # A reading of 0 means that the sensor has no value.
        sensors={name: arranged(table[name].where(table[name] != 0)) for name in SENSORS},
        throttled={
            reason: arranged([reason in reasons for reasons in reasons_of_rows], empty=False)
            for reason in all_reasons
        },
    )


def standard_error(log_lo: Array, log_hi: Array) -> Array:
    """Return the standard error of a log median, given both ends of its 95% interval as logs."""
    return (log_hi - log_lo) / (2 * Z95)


def _devices(latest_rows: pd.DataFrame, run: Mapping[str, Any]) -> tuple[FleetDevice, ...]:
    entries = run.get("gpus", [])
    by_id = {entry["id"]: entry for entry in entries if entry.get("id")}
    by_place = {(entry["node"], entry["gpu"]): entry for entry in entries}
    devices = []
    for row in latest_rows.to_dict("records"):
        gpu = None if math.isnan(row["gpu"]) else int(row["gpu"])
        node = None if math.isnan(row["node"]) else int(row["node"])
        run_entry = by_id.get(row["gpu_id"], {})
        # Node and GPU number identify a GPU only within one run.
        if not row["gpu_id"] and row["run"] == run["run"]:
            run_entry = by_place.get((node, gpu), {})
        devices.append(
            FleetDevice(
                gpu=gpu,
                id=row["gpu_id"],
                node=node,
                worker=row["worker"],
                # A limit that is missing or 0 is unknown.
                power_limit_w=run_entry.get("power_limit_w") or math.nan,
                sm_limit_mhz=run_entry.get("sm_limit_mhz") or math.nan,
            )
        )
    return tuple(devices)
