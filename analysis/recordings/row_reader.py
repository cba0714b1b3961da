"""Read the rows of a measurements.csv, and leave out damaged rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.recordings.csv_file import MOST_DAMAGED, Faults, read_csv
from kernels.common.checks import LARGEST_BYTES, LARGEST_SIZE
from kernels.common.documents import NOT_NEGATIVE, misfit
from kernels.common.errors import UserError
from kernels.operation import OPERATIONS
from kernels.problem import DTYPE_BYTES, GEMM_LAYOUTS, TIMED_DTYPES
from sweeps.cases.case import CACHES, MODES
from sweeps.schema import COLUMNS, IDENTITY, SCHEMA, problem_of

STATUSES = ("ok", "wrong", "oom", "unsupported", "error")

_REMEDY = "Restore the file, or move the folder away and measure again."
_LONGEST = 1e12  # longest time that is accepted, in microseconds: 11.6 days
_COLDEST = -300  # lower limit of a temperature in °C, below absolute zero
_UNREACHABLE = 1e18  # upper limit of rates and temperatures, which no machine reaches
_WORDS = {
    "op": ("gemm", "conv", *OPERATIONS), "dtype": TIMED_DTYPES, "mode": MODES,
    "cache": CACHES, "status": STATUSES,
}  # fmt: skip
"""Words that are allowed in a column, by the column's name."""

_WIDEST = max(DTYPE_BYTES.values())  # bytes of an element of the widest dtype
_RATES = ("tflops", "gbps")
_LEVELS = ("rel_error", "sm_mhz", "power_w")  # columns of finite values of at least 0


def read_rows(path: Path, run: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the sound rows of a measurements.csv, and a sentence for each damaged line.

    Damaged lines are also reported on stderr. ``run`` is the run that the rows must belong to.

    Raises:
        UserError: if the file cannot be read, is too badly damaged, or has too many rows of another
            schema or run.
    """
    table = read_csv(path, {name: kind for name, (kind, _) in COLUMNS.items()}, _REMEDY)
    _check_origin(table.rows[table.faults.sound], path, run)
    _record_faults(table.rows, table.faults, run)
    return table.sound_rows()


def _check_origin(frame: pd.DataFrame, path: Path, run: str) -> None:
    """Refuse a file if more than a tenth of its sound rows have another schema or another run."""
    if frame.empty:
        return
    schemas = frame["schema"].dropna()
    other_schemas = schemas[schemas != SCHEMA]
    if len(other_schemas) > MOST_DAMAGED * len(frame):
        raise UserError(
            f"{path} has measurements with schema {other_schemas.iloc[0]}, but this version reads "
            f"schema {SCHEMA}. Measure again, or read the file with the version of Rooftile that "
            "wrote it."
        )
    if (frame["run"] != run).mean() > MOST_DAMAGED:
        other_runs = sorted(set(frame["run"].dropna()) - {run, ""})
        others = ", ".join(other_runs) or "an unnamed run"
        raise UserError(
            f"{path} has measurements from {others}, but the run.json next to it describes the run "
            f"{run}. Measurements from several runs cannot be mixed. {_REMEDY}"
        )


def _record_faults(rows: pd.DataFrame, faults: Faults, run: str) -> None:
    faults.record((rows["schema"] != SCHEMA).fillna(True), "this version cannot read its schema")
    faults.record((rows["run"] != run).fillna(True), "it belongs to another run")
    for column, words in _WORDS.items():
        faults.record(~rows[column].isin(words), f"{column} is not one of {', '.join(words)}")
    _record_measurement_faults(rows, faults)
    _record_problem_faults(rows, faults)
    # Only sound rows count as earlier rows of a case, so that a damaged row does not exclude a
    # sound one.
    sound = np.flatnonzero(faults.sound)
    repeated = np.zeros(len(rows), dtype=bool)
    repeated[sound] = rows.iloc[sound].duplicated(list(IDENTITY))
    faults.record(repeated, "an earlier line has the same case")


def _record_measurement_faults(frame: pd.DataFrame, faults: Faults) -> None:
    """Record a fault for each row with an impossible measured value."""
    ok = (frame["status"] == "ok").to_numpy(dtype=bool)

    def values_of(name: str) -> NDArray[np.float64]:
        values: NDArray[np.float64] = frame[name].to_numpy(dtype=float, na_value=np.nan)
        return values

    time = values_of("time_us")
    lo = values_of("time_lo_us")
    hi = values_of("time_hi_us")
    samples = values_of("samples")
    with np.errstate(invalid="ignore"):
        # 1. Check the times and rates.
        is_time = (time > 0) & (time <= _LONGEST)
        faults.record(ok & ~is_time, "time_us is not a valid time")
        has_interval = ~np.isnan(lo) | ~np.isnan(hi)
        contains_time = (lo > 0) & (lo <= time) & (time <= hi) & (hi <= _LONGEST)
        faults.record(ok & has_interval & ~contains_time, "its interval does not contain the time")
        for name in _RATES:
            rates = values_of(name)
            is_rate = np.isnan(rates) | _is_within(rates, 0)
            faults.record(ok & ~is_rate, f"{name} is not a valid rate")
        # 2. Check the levels. They have no upper limit, because one of them is the result's error,
        #    and the error of a wrong kernel may be any finite number.
        for name in _LEVELS:
            levels = values_of(name)
            is_level = np.isnan(levels) | ((levels >= 0) & np.isfinite(levels))
            faults.record(~is_level, f"{name} is below 0 or infinite")
        # 3. Check the temperature, which may be below 0.
        temperature = values_of("temp_c")
        is_temperature = np.isnan(temperature) | _is_within(temperature, _COLDEST)
        faults.record(~is_temperature, "temp_c is out of range")
        # 4. Check the number of samples, which is only known for rows with times.
        faults.record(ok & (samples < 1), "it has no samples")


def _is_within(values: NDArray[np.float64], least: float) -> NDArray[np.bool_]:
    return (values >= least) & (values < _UNREACHABLE)


def _record_problem_faults(frame: pd.DataFrame, faults: Faults) -> None:
    """Record a fault for each row whose problem or list of kernels is invalid."""
    # 1. Find the rows that are certainly valid GEMMs, all at once, because most rows are valid
    #    GEMMs. The total size of the three matrices is computed for the widest dtype. The dtype is
    #    not checked here, because a row with an unknown dtype already has a fault.
    sizes = frame[["m", "n", "k", "batch"]].to_numpy(dtype=float, na_value=0.0)
    m, n, k, batch = sizes.T
    is_valid_gemm = (frame["op"] == "gemm").to_numpy(dtype=bool)
    is_valid_gemm &= ((sizes >= 1) & (sizes <= LARGEST_SIZE)).all(axis=1)
    elements = batch * (m * n + n * k + m * k)
    is_valid_gemm &= elements * _WIDEST <= LARGEST_BYTES
    is_valid_gemm &= frame["layout"].isin(GEMM_LAYOUTS).to_numpy(dtype=bool)
    # 2. Check each row's list of kernels. Many rows have the same list, so each distinct list is
    #    parsed only once.
    listings = frame["kernels"].fillna("")
    kernel_faults = listings.map({text: _fault_of_kernels(text) for text in listings.unique()})
    faults.record(kernel_faults != "", kernel_faults.to_numpy(dtype=object))
    # 3. Construct the problem of each other row that has no fault yet. The constructor's error says
    #    what is wrong.
    rows = np.flatnonzero(faults.sound & ~is_valid_gemm)
    records = frame.iloc[rows].to_dict("records") if len(rows) else []
    problem_faults = np.full(len(frame), "", dtype=object)
    for i, record in zip(rows, records, strict=True):
        problem_faults[i] = _fault_of_problem(record)
    faults.record(problem_faults != "", problem_faults)


def _fault_of_problem(record: Mapping[str, Any]) -> str:
    """Return why a row does not describe a valid problem, or "" if it does."""
    try:
        problem_of(record)
    except UserError as error:
        return str(error).rstrip(".")
    except (ValueError, TypeError, KeyError, OverflowError):
        return "a size of its problem is missing or not a number"
    return ""


def _fault_of_kernels(text: str) -> str:
    """Return what is wrong with a row's JSON list of kernels, or "" if nothing is wrong."""
    if not text:
        return ""
    try:
        listing = json.loads(text)
    except (ValueError, RecursionError):
        return "kernels is not JSON"
    if not isinstance(listing, list) or not all(map(_is_name_and_share, listing)):
        return "kernels is not a list of names and shares"
    return ""


def _is_name_and_share(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    name, share = entry
    return isinstance(name, str) and not misfit(share, NOT_NEGATIVE)
