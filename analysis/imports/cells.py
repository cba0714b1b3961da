"""Convert the cells of a file to cases with times, and report damaged rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.recordings.csv_file import Faults
from kernels.common.checks import LARGEST_BYTES, LARGEST_SIZE
from kernels.common.errors import UserError
from kernels.problem import DTYPE_BYTES, GEMM_LAYOUTS
from sweeps.schema import COLUMNS, problem_columns, problem_of

CONV_SIZES = ("batch", "c", "h", "w", "kout", "r", "s")
_DTYPES = {
    "float32": "fp32", "float": "fp32", "f32": "fp32", "float16": "fp16", "half": "fp16",
    "f16": "fp16", "bfloat16": "bf16",
}  # fmt: skip
_CONV_DEFAULTS = {
    "stride": "1", "padding": "0", "dilation": "1", "groups": "1", "pass": "fprop",
}  # fmt: skip
_CACHES = ("cold", "warm")
_MODES = ("burst", "sustained")
_SLOWEST_US = 1e12  # longest time that is accepted, in microseconds: 11.6 days
_EXACT = 2**53  # a float contains each whole number below this one exactly
_WIDEST = max(DTYPE_BYTES.values())  # bytes of an element of the widest dtype
_NO_SIZE = f"not a whole number from 1 to {LARGEST_SIZE:,}"
_REMEDY = "Fix or remove each damaged line."


def checked(path: Path, cells: pd.DataFrame, library: str) -> pd.DataFrame:
    """Convert cells to numbers and Rooftile's names; leave out rows with an invalid case or time.

    The rows that are left out are reported on stderr.

    Args:
        path: the file, which error messages name.
        cells: columns of measurements.csv as text (times may be numbers), and ``line``, the line
            number of each row. The columns ``op``, ``dtype``, ``implementation``, ``cache``,
            ``mode`` and ``time_us`` are required, and so are the sizes of each operation that
            occurs.
        library: implementation of rows that do not name one; if empty, cuBLAS for GEMMs and cuDNN
            for convolutions.

    Raises:
        UserError: if no rows are given, or if too many lines are damaged.
    """
    # 1. Leave out the rows that are not a case with a time, and report them.
    if not len(cells):
        raise UserError(f"{path} has no row with a time; give another file.")
    cells = cells.reset_index(drop=True)
    is_gemm = cells["op"] == "gemm"
    faults = Faults(path, cells["line"], _REMEDY)
    _record_faults(cells, is_gemm, faults, _gemm_checks)
    _record_faults(cells, ~is_gemm, faults, _conv_checks)
    faults.report()
    rows = cells[faults.sound].drop(columns="line")
    is_gemm = rows["op"] == "gemm"
    # 2. Convert the columns that all operations have.
    rows["time_us"] = pd.to_numeric(rows["time_us"])
    rows["dtype"] = rows["dtype"].map(our_dtype)
    assumed: str | pd.Series = library
    if not library:
        assumed = pd.Series(np.where(is_gemm, "cublas", "cudnn"), index=rows.index)
    rows["implementation"] = rows["implementation"].mask(rows["implementation"] == "", assumed)
    # 3. Convert sizes and layouts, and put the rows back into their order.
    converted = []
    if is_gemm.any():
        converted.append(_convert_gemms(rows[is_gemm]))
    if not is_gemm.all():
        converted.append(_convert_convolutions(rows[~is_gemm]))
    combined = pd.concat(converted).sort_index().reset_index(drop=True)
    for name in combined:
        if name in COLUMNS and COLUMNS[name][0] == "whole":
            # A size that does not apply to an operation is a missing value. Its cell was not
            # checked, and may contain anything, such as 1.5.
            numbers = pd.to_numeric(combined[name], errors="coerce")
            is_whole = (numbers % 1 == 0) & (numbers.abs() < _EXACT)
            combined[name] = numbers.where(is_whole).astype("Int64")
    return combined


def _convert_gemms(rows: pd.DataFrame) -> pd.DataFrame:
    layout = rows["layout"] if "layout" in rows else pd.Series("", index=rows.index)
    sizes = {name: pd.to_numeric(rows[name]).astype("int64") for name in ("m", "n", "k", "batch")}
    return rows.assign(layout=layout.mask(layout == "", "nt").str.lower(), **sizes)


def _convert_convolutions(rows: pd.DataFrame) -> pd.DataFrame:
    records = []
    for row in rows.to_dict("records"):
        conv = problem_of(_conv_record(row))
        records.append(problem_columns(conv))
    converted = pd.DataFrame(records, index=rows.index)
    # The new columns replace the sizes in text, and add the sizes of the implicit GEMMs.
    return rows.assign(**converted)


def _conv_record(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a convolution's columns, with defaults in place of empty cells."""
    given = {str(name): cell for name, cell in row.items() if cell not in ("", None)}
    record = {"layout": "nhwc", "dtype": "", **_CONV_DEFAULTS, **given, "op": "conv"}
    record["layout"] = record["layout"].lower()
    record["dtype"] = our_dtype(record["dtype"])
    return record


def our_dtype(name: str) -> str:
    """Return Rooftile's name for a dtype such as ``torch.bfloat16``.

    An unknown name is returned in lower case, without the prefix ``torch.``.
    """
    name = name.removeprefix("torch.").lower()
    return _DTYPES.get(name, name)


class _CellCheck(NamedTuple):
    """Check of one column: a mask of its sound cells, and what is wrong with its other cells."""

    is_sound: pd.Series
    column: str
    fault: str | pd.Series
    """One text for all cells, or one for each cell."""


def _record_faults(
    cells: pd.DataFrame,
    is_of_kind: pd.Series,
    faults: Faults,
    further_checks: Callable[[pd.DataFrame], list[_CellCheck]],
) -> None:
    """Record what is wrong with the rows of one kind of operation.

    ``is_of_kind`` is True for these rows. ``further_checks`` gets only these rows.
    """
    if not is_of_kind.any():
        return
    time = pd.to_numeric(cells["time_us"], errors="coerce")
    dtype = cells["dtype"].map(our_dtype)
    checks = [
        _CellCheck((time > 0) & (time < _SLOWEST_US), "time_us", "not a time in microseconds"),
        _CellCheck(dtype.isin(DTYPE_BYTES), "dtype", f"not one of {', '.join(DTYPE_BYTES)}"),
        _CellCheck(cells["cache"].isin(_CACHES), "cache", f"not one of {', '.join(_CACHES)}"),
        _CellCheck(cells["mode"].isin(_MODES), "mode", f"not one of {', '.join(_MODES)}"),
        *further_checks(cells[is_of_kind]),
    ]
    for is_sound, column, fault in checks:
        # The checks of one kind of operation have no result for rows of the other kind.
        wrong = is_of_kind & ~is_sound.reindex(cells.index, fill_value=True).astype(bool)
        column_cells = cells[column] if column in cells else pd.Series("", index=cells.index)
        fault_texts = pd.Series(fault, index=cells.index)
        faults.record(
            wrong,
            [
                f"{column} is {cell!r}, {fault_text}"
                for cell, fault_text in zip(column_cells, fault_texts, strict=True)
            ],
        )


def _gemm_checks(cells: pd.DataFrame) -> list[_CellCheck]:
    names = ("m", "n", "k", "batch")
    sizes = [_CellCheck(_is_size(cells[name]), name, _NO_SIZE) for name in names]
    layout = cells["layout"] if "layout" in cells else pd.Series("", index=cells.index)
    is_layout = layout.str.lower().isin(("", *GEMM_LAYOUTS))  # an empty cell means the default
    # Sizes are converted to floats, because products of large integers would overflow.
    numbers = {name: pd.to_numeric(cells[name], errors="coerce") * 1.0 for name in names}
    m, n, k, batch = numbers["m"], numbers["n"], numbers["k"], numbers["batch"]
    fits = _WIDEST * batch * (m * k + k * n + m * n) <= LARGEST_BYTES
    return [
        *sizes,
        _CellCheck(fits, "m", "which together with n, k and batch is too large for any machine"),
        _CellCheck(is_layout, "layout", f"not one of {', '.join(GEMM_LAYOUTS)}"),
    ]


def _conv_checks(cells: pd.DataFrame) -> list[_CellCheck]:
    """Return the checks of all rows other than GEMMs: convolutions and unknown operations."""
    sizes = [_CellCheck(_is_size(cells[name]), name, _NO_SIZE) for name in CONV_SIZES]
    if "groups" in cells:
        is_given = cells["groups"] != ""
        sizes.append(_CellCheck(~is_given | _is_size(cells["groups"]), "groups", _NO_SIZE))
    # A row with an invalid size is not converted to a problem, because only the first fault of a
    # row is kept.
    has_sizes = np.logical_and.reduce([check.is_sound for check in sizes])
    refusals = pd.Series("", index=cells.index)
    for index, row in cells[has_sizes].iterrows():
        try:
            problem_of(_conv_record(row.to_dict()))
        except UserError as error:
            # The remedy may be a question, which cannot end the report's sentence.
            fault, _, remedy = str(error).removesuffix(".").partition("; ")
            refusals[index] = f"but {fault} ({remedy})" if remedy else f"but {fault}"
    return [
        _CellCheck(cells["op"] == "conv", "op", "not gemm or conv"),
        *sizes,
        _CellCheck(refusals == "", "op", refusals),
    ]


def _is_size(cells: pd.Series) -> pd.Series:
    # The largest size, 2**40, has 13 digits. Longer numbers might not fit into an integer.
    has_digits_only = cells.astype(str).str.fullmatch(r"[0-9]{1,13}")
    sizes = pd.to_numeric(cells.where(has_digits_only, "0"))
    return (sizes >= 1) & (sizes <= LARGEST_SIZE)


def case_columns(rows: pd.DataFrame) -> list[str]:
    """Return the columns that identify a row's case: all but the time and the kernels."""
    return [name for name in rows if name not in ("time_us", "kernel", "kernels")]


def median_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per case, with the case's median time.

    The columns with kernel names are left out if any case was timed several times.
    """
    identity = case_columns(rows)
    if not rows.duplicated(identity).any():
        return rows
    return rows.groupby(identity, sort=False, dropna=False, as_index=False)["time_us"].median()
