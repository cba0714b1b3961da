"""Read the rows of a measurements.csv, and leave out those with impossible values."""

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
_LONGEST = 1e12  # microseconds; eleven days
_WORDS = {
    "op": ("gemm", "conv", *OPERATIONS), "dtype": TIMED_DTYPES, "mode": MODES,
    "cache": CACHES, "status": STATUSES,
}  # fmt: skip
_WIDEST = max(DTYPE_BYTES.values())
_RATES = ("tflops", "gbps")
_LEVELS = ("rel_error", "sm_mhz", "power_w")  # columns of values that cannot be below 0


def read_rows(path: Path, run: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Read the rows of a measurements.csv, with a sentence for each line that is left out.

    The sentences are printed to stderr, too.

    Args:
        path: the file.
        run: name of the run that the rows must belong to.

    Raises:
        UserError: if the file cannot be read, is of another version or of other runs, or is too
            badly damaged.
    """
    table = read_csv(path, {name: kind for name, (kind, _) in COLUMNS.items()}, _REMEDY)
    _check_origin(table.rows[table.faults.sound], path, run)
    _tell_faults(table.rows, table.faults, run)
    return table.sound_rows()


def _check_origin(frame: pd.DataFrame, path: Path, run: str) -> None:
    """Refuse a file if more than a tenth of its rows are of another schema or run.

    Fewer such rows only count as damaged.
    """
    if frame.empty:
        return
    schemas = frame["schema"].dropna()
    if (schemas != SCHEMA).mean() > MOST_DAMAGED:
        other_schema = schemas[schemas != SCHEMA].iloc[0]
        raise UserError(
            f"{path} has rows of schema {other_schema}; this version reads {SCHEMA}. Measure "
            "again, or read it with the version of Rooftile that wrote it."
        )
    other_runs = sorted(set(frame["run"].dropna()) - {run, ""})
    if (frame["run"] != run).mean() > MOST_DAMAGED:
        raise UserError(
            f"{path} has rows of other runs than its run.json ({', '.join(other_runs)}), which "
            f"cannot be mixed. {_REMEDY}"
        )


def _tell_faults(rows: pd.DataFrame, faults: Faults, run: str) -> None:
    """Record what is impossible about each row."""
    faults.tell((rows["schema"] != SCHEMA).fillna(True), "its schema differs")
    faults.tell((rows["run"] != run).fillna(True), "it belongs to another run")
    for column, words in _WORDS.items():
        faults.tell(~rows[column].isin(words), f"{column} is not one of {', '.join(words)}")
    _tell_times(rows, faults.tell)
    _tell_problems(rows, faults)
    sound = np.flatnonzero(faults.sound)
    repeated = np.zeros(len(rows), dtype=bool)
    repeated[sound] = rows.iloc[sound].duplicated(list(IDENTITY))
    faults.tell(repeated, "its case appeared before")


def _tell_times(frame: pd.DataFrame, tell: Any) -> None:
    """Check times, their intervals and numbers of samples, rates, and the machine's state."""
    ok = (frame["status"] == "ok").to_numpy(dtype=bool)
    columns = ("time_us", "time_lo_us", "time_hi_us", *_RATES, *_LEVELS, "temp_c")
    value = {name: frame[name].to_numpy(dtype=float, na_value=np.nan) for name in columns}
    time, lo, hi = (value[name] for name in columns[:3])
    has_interval = ~np.isnan(lo) | ~np.isnan(hi)
    with np.errstate(invalid="ignore"):
        tell(ok & ~((time > 0) & (time <= _LONGEST)), "time_us is not a time")
        tell(
            ok & has_interval & ~((lo > 0) & (lo <= time) & (time <= hi) & (hi <= _LONGEST)),
            "its interval does not contain the time",
        )
        for name in _RATES:
            tell(ok & ~(np.isnan(value[name]) | _within(value[name], 0)), f"{name} is not a rate")
        for name in _LEVELS:  # a wrong kernel's error may be as large as a float can be
            tell(
                ~(np.isnan(value[name]) | ((value[name] >= 0) & np.isfinite(value[name]))),
                f"{name} is below 0 or infinite",
            )
        tell(
            ~(np.isnan(value["temp_c"]) | _within(value["temp_c"], -300)), "temp_c is out of range"
        )
    samples = frame["samples"].fillna(1).to_numpy(dtype=float)
    tell(ok & (samples < 1), "it has no samples")


def _within(values: NDArray[np.float64], least: float) -> NDArray[np.bool_]:
    return (values >= least) & (values < 1e18)


def _tell_problems(frame: pd.DataFrame, faults: Faults) -> None:
    """Check that sizes make a problem. GEMMs, which are most rows, are checked together."""
    sizes = frame[["m", "n", "k", "batch"]].to_numpy(dtype=float, na_value=0.0)
    m, n, k, batch = sizes.T
    sound = ((sizes >= 1) & (sizes <= LARGEST_SIZE)).all(axis=1)
    sound &= batch * (m * n + n * k + m * k) * _WIDEST <= LARGEST_BYTES
    sound &= frame["layout"].isin(GEMM_LAYOUTS).to_numpy(dtype=bool)
    simple = sound & (frame["op"] == "gemm").to_numpy(dtype=bool)
    # All rows of a kernel have the same listing, so each different one is read once.
    listings = frame["kernels"].fillna("")
    listed = listings.map({text: _fault_of_kernels(text) for text in listings.unique()})
    faults.tell(listed != "", listed.to_numpy(dtype=object))
    rows = np.flatnonzero(faults.sound & ~simple)
    records = frame.iloc[rows].to_dict("records") if len(rows) else []
    problem_faults = np.full(len(frame), "", dtype=object)
    for i, record in zip(rows, records, strict=True):
        problem_faults[i] = _fault_of_problem(record)
    faults.tell(problem_faults != "", problem_faults)


def _fault_of_problem(record: Mapping[str, Any]) -> str:
    try:
        problem_of(record)
    except UserError as error:
        return str(error).rstrip(".")
    except (ValueError, TypeError, KeyError, OverflowError):
        return "a size of its problem is missing or not a number"
    return ""


def _fault_of_kernels(text: str) -> str:
    if not text:
        return ""
    try:
        listing = json.loads(text)
    except ValueError:
        return "kernels is not JSON"
    if not isinstance(listing, list) or any(
        not isinstance(entry, list)
        or len(entry) != 2
        or not isinstance(entry[0], str)
        or misfit(entry[1], NOT_NEGATIVE)
        for entry in listing
    ):
        return "kernels is not a list of names and shares"
    return ""
