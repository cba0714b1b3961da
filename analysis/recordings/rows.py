"""The rows of a measurements.csv: every line is read strictly, and checked for what cannot be.

A file may be cut, edited by hand or merged; one bad cell costs its row, which is named, and not the
recording. Where too many are bad, something else is wrong, and nothing should be concluded.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from analysis.recordings.copies import read_copy, state_of, write_copy
from analysis.recordings.damage import MOST_DAMAGED, left_out, say_left_out
from kernels.common.checks import LARGEST_BYTES, LARGEST_SIZE
from kernels.common.documents import NOT_NEGATIVE, misfit
from kernels.common.errors import UserError
from kernels.operation import OPERATIONS
from kernels.problem import DTYPE_BYTES, GEMM_LAYOUTS, TIMED_DTYPES
from sweeps.cases.case import CACHES, MODES
from sweeps.schema import COLUMNS, IDENTITY, SCHEMA, problem_of

STATUSES = ("ok", "wrong", "oom", "unsupported", "error")

_TYPES = {"text": pa.string(), "whole": pa.int64(), "real": pa.float64(), "flag": pa.bool_()}
_FRAME_TYPES = {"text": "string", "whole": "Int64", "real": "float64", "flag": "boolean"}

_LONGEST = 1e12  # microseconds, eleven days
_WORDS = {
    "op": ("gemm", "conv", *OPERATIONS), "dtype": TIMED_DTYPES, "mode": MODES,
    "cache": CACHES, "status": STATUSES,
}  # fmt: skip
_WIDEST = max(DTYPE_BYTES.values())
_RATES = ("tflops", "gbps")
_LEVELS = ("rel_error", "sm_mhz", "power_w")  # at least 0 where they are known


def read_rows(path: Path, run: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows of a measurements.csv, and a sentence for each line that is left out.

    The sentences are said on stderr, too.

    Args:
        path: the file.
        run: the name of the run that its rows are of.

    Raises:
        UserError: it cannot be read, is of another version or of other runs, or too much of it is
            damaged.
    """
    try:
        state = state_of(path, run)  # before it is read: it may be written meanwhile
        known = read_copy(path, state)
        # A copy may come from a stranger, like the table.
        if known is None or not _is_sound(known[0], run):
            known = _checked_rows(path.read_bytes(), path, run)
            write_copy(path, state, *known)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    frame, damaged = known
    say_left_out(path, damaged)
    return frame, damaged


def _is_sound(frame: pd.DataFrame, run: str) -> bool:
    """Whether a table has all columns, of their types, and no row that cannot be."""
    types = {name: _FRAME_TYPES[kind] for name, (kind, _) in COLUMNS.items()}
    same = frame.dtypes.astype(str).to_dict() == types
    return same and not (_faults(frame, run) != "").any()


def _checked_rows(data: bytes, path: Path, run: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The sound rows of a file's content, and a sentence for each of the others."""
    frame, unread = parse_measurements(data)
    whole = len(frame) + len(unread)
    _check_origin(frame, path, run)
    faults = _faults(frame, run)
    sound = np.flatnonzero(faults == "")
    faults[sound[frame.iloc[sound].duplicated(list(IDENTITY))]] = "its case was there before"
    bad = np.flatnonzero(faults != "")
    lines = _line_numbers(data, unread) if len(bad) else np.empty(0, dtype=np.intp)
    by_line = dict.fromkeys(unread, "it cannot be read")
    by_line |= {int(lines[i]): str(faults[i]) for i in bad}
    remedy = "Restore the file, or move the folder away and measure again."
    damaged = left_out(path, by_line, whole, remedy)
    return frame[faults == ""].reset_index(drop=True) if len(bad) else frame, damaged


def parse_measurements(data: bytes) -> tuple[pd.DataFrame, list[int]]:
    """The table of a measurements.csv and the numbers of the lines that cannot be read."""
    # Arrow ends a line at a carriage return by itself, too, and lines would be numbered otherwise.
    data = data.replace(b"\r\n", b"\n").replace(b"\r", b" ")
    header = data.partition(b"\n")[0].decode("utf-8", errors="replace")
    if header.split(",") != list(COLUMNS):
        raise UserError("measurements.csv does not begin with the columns of this version.")
    try:
        table = _parse(data)
        unread: list[int] = []
    except pa.ArrowInvalid:
        good, unread = _drop_unreadable(data)
        table = _parse(good)
    frame = pd.DataFrame(
        {
            name: table.column(name).to_pandas().astype(_FRAME_TYPES[kind])
            for name, (kind, _) in COLUMNS.items()
        }
    )
    return frame, unread


def _parse(data: bytes) -> pa.Table:
    """Read strictly: every line has every column, every cell its type. Floats are exact."""
    convert = arrow_csv.ConvertOptions(
        column_types={name: _TYPES[kind] for name, (kind, _) in COLUMNS.items()},
        include_columns=list(COLUMNS),
        null_values=[""],
        strings_can_be_null=False,
        true_values=["true"],
        false_values=["false"],
    )
    return arrow_csv.read_csv(io.BytesIO(data), convert_options=convert)


def _drop_unreadable(data: bytes) -> tuple[bytes, list[int]]:
    """The readable lines of a damaged file, and the numbers of the others."""
    header, *lines = data.split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, 2) if line]
    whole = [(number, line) for number, line in numbered if _has_all_cells(line)]
    most = max(1, int(MOST_DAMAGED * len(numbered))) - (len(numbered) - len(whole))
    good = dict(_parseable(header, whole, [most]))
    unread = [number for number, _ in numbered if number not in good]
    return b"\n".join([header, *good.values()]) + b"\n", unread


def _has_all_cells(line: bytes) -> bool:
    try:
        cells = next(csv.reader([line.decode("utf-8")], strict=True))
    except (UnicodeDecodeError, csv.Error):
        return False
    return len(cells) == len(COLUMNS)


def _parseable(
    header: bytes, lines: list[tuple[int, bytes]], left: list[int]
) -> list[tuple[int, bytes]]:
    """The lines whose cells parse, by bisection: Arrow does not say which line is damaged.

    ``left`` counts how many damaged lines more the file may have; after those it is refused anyhow,
    and the rest is not looked at.
    """
    if not lines or left[0] < 0:
        return []
    try:
        _parse(b"\n".join([header, *(line for _, line in lines)]) + b"\n")
    except pa.ArrowInvalid:
        half = len(lines) // 2
        if not half:
            left[0] -= 1
            return []
        return _parseable(header, lines[:half], left) + _parseable(header, lines[half:], left)
    return lines


def _line_numbers(data: bytes, unread: Sequence[int]) -> NDArray[np.intp]:
    """The line of each row that was read."""
    skipped = set(unread)
    lines = data.split(b"\n")[1:]
    numbers = [n for n, line in enumerate(lines, 2) if line.strip(b"\r") and n not in skipped]
    return np.array(numbers, dtype=np.intp)


def _check_origin(frame: pd.DataFrame, path: Path, run: str) -> None:
    """Refuse a file that is mostly of something else; single rows of something else are damaged."""
    if frame.empty:
        return
    schemas = frame["schema"].dropna()
    if (schemas != SCHEMA).mean() > MOST_DAMAGED:
        other = schemas[schemas != SCHEMA].iloc[0]
        raise UserError(f"{path} has rows of schema {other}; this reads {SCHEMA}.")
    others = sorted(set(frame["run"].dropna()) - {run, ""})
    if (frame["run"] != run).mean() > MOST_DAMAGED:
        raise UserError(
            f"{path} has rows of other runs than its run.json ({', '.join(others)}); rows of "
            "different runs or machines do not mix."
        )


def _faults(frame: pd.DataFrame, run: str) -> NDArray[np.object_]:
    """What of each row cannot be; empty of a sound one. The first fault that is found is told."""
    faults = np.full(len(frame), "", dtype=object)

    def tell(wrong: Any, why: Any) -> None:
        where = np.asarray(wrong, dtype=bool) & (faults == "")
        if where.any():
            faults[where] = np.broadcast_to(np.asarray(why, dtype=object), len(frame))[where]

    tell((frame["schema"] != SCHEMA).fillna(True), "its schema is another")
    tell((frame["run"] != run).fillna(True), "it is of another run")
    for column, words in _WORDS.items():
        tell(~frame[column].isin(words), f"{column} is none of {', '.join(words)}")
    _tell_times(frame, tell)
    _tell_problems(frame, faults)
    return faults


def _tell_times(frame: pd.DataFrame, tell: Any) -> None:
    """Times are above 0, inside their intervals, and of one sample at least."""
    ok = (frame["status"] == "ok").to_numpy(dtype=bool)
    columns = ("time_us", "time_lo_us", "time_hi_us", *_RATES, *_LEVELS, "temp_c")
    value = {name: frame[name].to_numpy(dtype=float, na_value=np.nan) for name in columns}
    time, lo, hi = (value[name] for name in columns[:3])
    told = ~np.isnan(lo) | ~np.isnan(hi)
    with np.errstate(invalid="ignore"):
        tell(ok & ~((time > 0) & (time <= _LONGEST)), "time_us is no time")
        tell(ok & told & ~((lo > 0) & (lo <= time) & (time <= hi) & (hi <= _LONGEST)),
             "the interval of its time does not hold the time")  # fmt: skip
        for name in _RATES:
            tell(ok & ~(np.isnan(value[name]) | _within(value[name], 0)), f"{name} is no rate")
        for name in _LEVELS:  # of a wrong kernel the error may be as large as a float can be
            tell(~(np.isnan(value[name]) | ((value[name] >= 0) & np.isfinite(value[name]))),
                 f"{name} is below 0 or infinite")  # fmt: skip
        tell(~(np.isnan(value["temp_c"]) | _within(value["temp_c"], -300)), "temp_c is absurd")
    samples = frame["samples"].fillna(1).to_numpy(dtype=float)
    tell(ok & (samples < 1), "it has no samples")


def _within(values: NDArray[np.float64], least: float) -> NDArray[np.bool_]:
    return (values >= least) & (values < 1e18)


def _tell_problems(frame: pd.DataFrame, faults: NDArray[np.object_]) -> None:
    """Sizes make a problem. GEMMs, which are most rows, are looked at together."""
    sizes = frame[["m", "n", "k", "batch"]].to_numpy(dtype=float, na_value=0.0)
    m, n, k, batch = sizes.T
    sound = ((sizes >= 1) & (sizes <= LARGEST_SIZE)).all(axis=1)
    sound &= batch * (m * n + n * k + m * k) * _WIDEST <= LARGEST_BYTES
    sound &= frame["layout"].isin(GEMM_LAYOUTS).to_numpy(dtype=bool)
    simple = sound & (frame["op"] == "gemm").to_numpy(dtype=bool)
    # A listing is the same in all rows of a kernel, so each is read once.
    listings = frame["kernels"].fillna("")
    listed = listings.map({text: _fault_of_kernels(text) for text in listings.unique()})
    where = np.flatnonzero((faults == "") & (listed != "").to_numpy(dtype=bool))
    faults[where] = listed.to_numpy(dtype=object)[where]
    rows = np.flatnonzero((faults == "") & ~simple)
    records = frame.iloc[rows].to_dict("records") if len(rows) else []
    for i, record in zip(rows, records, strict=True):
        faults[i] = _fault_of_problem(record)


def _fault_of_problem(record: Mapping[str, Any]) -> str:
    try:
        problem_of(record)
    except UserError as error:
        return str(error).rstrip(".")
    except (ValueError, TypeError, KeyError, OverflowError):
        return "a size of its problem is missing or no number"
    return ""


def _fault_of_kernels(text: str) -> str:
    if not text:
        return ""
    try:
        listing = json.loads(text)
    except ValueError:
        return "kernels is no JSON"
    if not isinstance(listing, list) or any(
        not isinstance(one, list) or len(one) != 2 or not isinstance(one[0], str)
        or misfit(one[1], NOT_NEGATIVE) for one in listing
    ):  # fmt: skip
        return "kernels is no list of names and shares"
    return ""
