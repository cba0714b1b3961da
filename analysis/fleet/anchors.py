"""Reads anchors.csv: what the same few cases took on each GPU of a recording.

A job sees what is left of a GPU's speed when it computes without a pause: short bursts run at boost
clocks, which hide by what silicon, cooling and power supply differ. A survey of large systems, with
programs that ran for long, found GPUs of one model to vary by 8 % on average and by 22 % at most
(P. Sinha and others, "Not All GPUs Are Created Equal", arXiv 2208.11035). That is why some anchors
are sustained, and why a GPU's speed is that of those.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.fleet.robust import Array
from analysis.markdown import printable
from analysis.recordings.damage import left_out, say_left_out
from analysis.recordings.load import Recording, load_run
from kernels.common.errors import UserError
from kernels.common.program import command
from kernels.machine import Machine
from sweeps.cases.case import CACHES, MODES, Case
from sweeps.schema import IDENTITY, PHASES
from sweeps.store import ANCHOR_COLUMNS
from sweeps.timing.statistics import Z95

FILE = "anchors.csv"
KINDS = ("sustained", "burst", "memory", "small")
"""What an anchor is bound by: compute without a pause, compute in bursts, memory, its launch."""

SENSORS = ("sm_mhz", "power_w", "temp_c")
_TIMES = ("time_us", "time_lo_us", "time_hi_us")
_ORDINALS = ("gpu", "node")
_NUMBERS = (*_ORDINALS, "samples", *_TIMES, *SENSORS)

_LAUNCH = 5e-6  # seconds: what can be computed in less takes as long as launching it
_LONGEST = 1e12  # microseconds, eleven days
_MOMENT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
_HASH = r"[0-9a-f]{4,32}|"
_ANEW = "Restore the file, or move it away and measure the anchors again."
_IDENTITY_OF = itemgetter(*IDENTITY)


@dataclass(frozen=True)
class Device:
    """A GPU as the recording names it; of a CPU's recording ``gpu`` is None."""

    gpu: int | None
    id: str
    node: int | None
    worker: str
    power_limit_w: float = math.nan
    sm_limit_mhz: float = math.nan


@dataclass(frozen=True)
class Fleet:
    """What the anchors took.

    The arrays are (phases, devices, anchors): ``log_time`` the logarithm of the median's
    microseconds, ``error`` its standard error by its own interval, and the sensors' medians; NaN
    where nothing was measured. ``throttled`` has such an array of truths for each reason that was
    ever reported. ``kinds`` is the kind of each anchor.
    """

    devices: tuple[Device, ...]
    kinds: NDArray[np.str_]
    log_time: Array
    error: Array
    sensors: Mapping[str, Array]
    throttled: Mapping[str, NDArray[np.bool_]]


@dataclass(frozen=True)
class Anchors:
    """A recording's fleet, its machine, and a sentence for each line that was left out."""

    recording: Recording
    fleet: Fleet
    damaged: tuple[str, ...]


def read_anchors(folder: Path) -> Anchors:
    """The anchors of a recording.

    Of several runs the latest counts that timed an anchor on a GPU.

    Raises:
        UserError: a file is missing, unreadable or of another version, or too much is damaged.
    """
    run = load_run(folder)
    machine = Machine.from_json(run["machine"])
    path = folder / FILE
    frame, faults, cases = _read(path)
    table = _checked(frame, faults)
    damaged = left_out(path, faults, len(frame), _ANEW)
    say_left_out(path, damaged)
    if table.empty:
        raise UserError(f"{path} has no time of any anchor; {_written_by()}.")
    fleet = _fleet(table, cases, machine, run)
    return Anchors(Recording(folder, machine, run, pd.DataFrame()), fleet, damaged)


def anchor_folders(place: Path) -> list[Path]:
    """The recordings with anchors: the folder itself, or all that lie directly in it.

    Raises:
        UserError: there is none.
    """
    if (place / "run.json").exists():
        if not (place / FILE).exists():
            raise UserError(f"{place} has no {FILE}; {_written_by()}.")
        return [place]
    folders = sorted(path.parent for path in place.glob(f"*/{FILE}"))
    if not folders:
        raise UserError(f"no recording in {place} has an {FILE}; {_written_by()}.")
    return folders


def kind_of(case: Case, machine: Machine) -> str:
    """What a case's time says of a GPU, one of :data:`KINDS`: by the machine's ceilings."""
    work = case.problem
    compute = work.flops / machine.peaks.get(work.dtype, math.inf)
    memory = work.bytes / machine.bandwidth
    if max(compute, memory) < _LAUNCH:
        return "small"
    if memory > compute:
        return "memory"
    return case.mode if case.mode in KINDS else "burst"


def _written_by() -> str:
    return f"{command('sweeps run')} writes it, with a budget of a minute or more or with --shard"


def _read(path: Path) -> tuple[pd.DataFrame, dict[int, str], list[Case]]:
    """Every line with its number (``line``) and the place of its case in the list (``case``), what
    is wrong with lines, and the cases.
    """
    lines: list[dict[str, str]] = []
    numbers, codes = [], []
    faults: dict[int, str] = {}
    known: dict[tuple[str, ...], int] = {}
    cases: list[Case] = []
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
        rows = csv.DictReader(io.StringIO(text, newline=""))
        needed = [name for name in ANCHOR_COLUMNS if name != "energy_j"]  # older files lack it
        if missing := [name for name in needed if name not in (rows.fieldnames or ())]:
            raise UserError(f"{path} has no column {missing[0]!r}; restore it, or move it away.")
        for row in rows:
            number = rows.line_num
            if None in row or None in row.values():
                faults[number], row = "it has not as many cells as columns", {}
            numbers.append(number)
            lines.append({name: row.get(name, "") for name in ANCHOR_COLUMNS})
            key = _IDENTITY_OF(lines[-1])
            if key not in known:
                case = _case(lines[-1])
                known[key] = -1 if case is None else len(cases)
                cases += [] if case is None else [case]
            codes.append(known[key])
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except csv.Error as error:
        raise UserError(f"{path} is no CSV ({error}). {_ANEW}") from None
    frame = pd.DataFrame(lines, columns=list(ANCHOR_COLUMNS), dtype=object)
    return frame.assign(line=numbers, case=codes), faults, cases


def _case(row: Mapping[str, str]) -> Case | None:
    try:
        case = Case.from_columns(row)
    except (UserError, ValueError, TypeError, KeyError, OverflowError):
        return None
    return case if case.mode in MODES and case.cache in CACHES else None


def _checked(frame: pd.DataFrame, faults: dict[int, str]) -> pd.DataFrame:
    """The sound rows, their numbers read; adds what is wrong with the others, by the line."""
    table = frame[["run", "worker", "gpu_id", "phase", "time_utc", "throttled", "line", "case"]]
    for name in ("run", "worker"):
        table = table.assign(**{name: table[name].map(printable)})

    def tell(wrong: Any, why: str) -> None:
        for number in frame["line"].to_numpy()[np.asarray(wrong, dtype=bool)]:
            faults.setdefault(int(number), why)

    tell(table["case"] < 0, "its columns are no case")
    tell(~table["phase"].isin(PHASES), f"phase is none of {', '.join(PHASES)}")
    tell(~table["time_utc"].str.match(_MOMENT), "time_utc is no moment")
    tell(~table["gpu_id"].map(lambda text: re.fullmatch(_HASH, text) is not None),
         "gpu_id is no hash")  # fmt: skip
    for name in _NUMBERS:
        values = pd.to_numeric(frame[name].where(frame[name] != ""), errors="coerce")
        values = values.astype(float)
        tell(values.isna() & (frame[name] != ""), f"{name} is no number")
        table = table.assign(**{name: values})
    for name in _ORDINALS:
        value = table[name]
        tell(value.notna() & ~((value >= 0) & (value < 2**31) & (value % 1 == 0)),
             f"{name} is no ordinal")  # fmt: skip
    time, lo, hi = (table[name] for name in _TIMES)
    tell(~((time > 0) & (time <= _LONGEST)), "time_us is no time")
    tell((lo.notna() | hi.notna()) & ~((lo > 0) & (lo <= time) & (time <= hi) & (hi <= _LONGEST)),
         "the interval of its time does not hold the time")  # fmt: skip
    tell(~(table["samples"] >= 1), "it has no samples")
    for name in SENSORS:
        least = -300 if name == "temp_c" else 0
        tell(~(table[name].isna() | ((table[name] >= least) & (table[name] < 1e9))),
             f"{name} is absurd")  # fmt: skip
    return table[~table["line"].isin(list(faults))]


def _fleet(
    table: pd.DataFrame, cases: Sequence[Case], machine: Machine, run: Mapping[str, Any]
) -> Fleet:
    """The latest times as arrays."""
    # Without an id, a GPU is known by its place.
    place = table["worker"]
    for name in _ORDINALS:
        place = table[name].fillna(-1).astype(str) + " " + place
    table = table.assign(device=table["gpu_id"].where(table["gpu_id"] != "", place))
    table = table.sort_values("time_utc", kind="stable")
    latest = table.groupby(["device", "case"])["run"].transform("last")
    table = table[table["run"] == latest]
    table = table.drop_duplicates(["device", "case", "phase"], keep="last")
    last = table.drop_duplicates("device", keep="last").sort_values(["node", "gpu", "device"])
    numbers = {device: i for i, device in enumerate(last["device"])}
    used = sorted(set(table["case"]))
    at = (
        table["phase"].map(PHASES.index).to_numpy(),
        table["device"].map(numbers).to_numpy(),
        table["case"].map({case: i for i, case in enumerate(used)}).to_numpy(),
    )
    shape = (len(PHASES), len(numbers), len(used))

    def laid_out(values: Any, empty: Any = np.nan) -> Any:
        array = np.full(shape, empty)
        array[at] = np.asarray(values)
        return array

    log = {name: np.log(table[name].to_numpy(float)) for name in _TIMES}
    reasons = table["throttled"].str.split(";")
    every = sorted({reason for some in reasons for reason in some} - {""})
    return Fleet(
        devices=_devices(last, run),
        kinds=np.array([kind_of(cases[case], machine) for case in used]),
        log_time=laid_out(log["time_us"]),
        error=laid_out(standard_error(log["time_lo_us"], log["time_hi_us"])),
        # A sensor that says 0 says nothing.
        sensors={name: laid_out(table[name].where(table[name] != 0)) for name in SENSORS},
        throttled={one: laid_out([one in some for some in reasons], False) for one in every},
    )


def standard_error(log_lo: Array, log_hi: Array) -> Array:
    """Of the logarithm of a median, by the ends of its 95 % interval."""
    return (log_hi - log_lo) / (2 * Z95)


def _devices(last: pd.DataFrame, run: Mapping[str, Any]) -> tuple[Device, ...]:
    """The devices of the latest rows, with what run.json says of them."""
    places = run.get("gpus", [])
    by_id = {place["id"]: place for place in places if place.get("id")}
    by_place = {(place["node"], place["gpu"]): place for place in places}
    devices = []
    for row in last.to_dict("records"):
        gpu, node = (None if math.isnan(row[name]) else int(row[name]) for name in _ORDINALS)
        facts = by_id.get(row["gpu_id"], {})
        if not row["gpu_id"] and row["run"] == run["run"]:
            facts = by_place.get((node, gpu), {})
        limits = {name: facts.get(name) or math.nan for name in ("power_limit_w", "sm_limit_mhz")}
        devices.append(Device(gpu, row["gpu_id"], node, row["worker"], **limits))
    return tuple(devices)
