"""Read CSV files with times: plain files, and files from the CUTLASS profiler and TritonBench.

Each file becomes a table with one row per case and with the column names of measurements.csv.
Damaged rows are reported and left out. Cases that failed in the CUTLASS profiler or in TritonBench
are left out without a report. The same holds for the profiler's rows with an operation or a dtype
that Rooftile does not support.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.imports.cells import CONV_SIZES, case_columns, checked, median_times
from kernels.common.errors import UserError
from kernels.problem import DTYPE_BYTES

HEADER = "m,n,k,dtype,time_us"
"""Columns that a plain file needs for GEMMs."""

_SIZES = ("m", "n", "k")
_DEFAULTS = {
    "batch": "1", "implementation": "", "cache": "warm", "mode": "burst", "config": "",
}  # fmt: skip
"""Defaults for empty cells and missing columns in a plain file."""

_READ_COLUMNS = (
    "op", "pass", *_SIZES, *CONV_SIZES, "stride", "padding", "dilation", "groups", "dtype",
    "layout", "implementation", "config", "mode", "cache", "time_us",
)  # fmt: skip
"""Columns that are read from a plain file; other columns are ignored."""


@dataclass(frozen=True)
class FileTimings:
    """Times that were read from a file.

    Attributes:
        rows: one row per case, with ``time_us`` and the columns that describe the case. Rows from
            the CUTLASS profiler also have the columns ``kernel`` and ``kernels``.
        how: description of the measurement, such as ``times as given in the file``.
        cache: cache state of most rows, ``cold`` or ``warm``.
    """

    rows: pd.DataFrame
    how: str
    cache: str


@dataclass(frozen=True)
class FileDefaults:
    """Dtype and layout that the user gave for rows that lack them; empty if not given."""

    dtype: str = ""
    layout: str = ""


def read_timings(path: Path, defaults: FileDefaults) -> FileTimings | None:
    """Read the times of a CSV file; return None if the file has none of the three formats.

    Raises:
        UserError: if the file cannot be read as a table of times, too many of its rows are damaged,
            or neither the file nor ``defaults`` gives a dtype.
    """
    header = _header(path)
    if _is_tritonbench(header):
        return _read_tritonbench(path, defaults)
    column_names = {name.strip().strip('"') for name in header.split(",")}
    if column_names >= _CUTLASS_COLUMNS:
        return _read_cutlass(path)
    # In a plain file, the names of the columns may be in upper or lower case.
    if "time_us" in {name.lower() for name in column_names}:
        return _read_plain(path, defaults)
    return None


def _header(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.readline().strip()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); check its path and permissions."
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8; give a CSV file in UTF-8.") from None


def _read_cells(path: Path, separator: str = ",", *, lower: bool = False) -> pd.DataFrame:
    """Read all cells as text, and add a column ``line`` with the line number of each row.

    If ``lower`` is true, the names of the columns are converted to lower case.
    """
    read = functools.partial(
        pd.read_csv,
        path,
        sep=separator,
        dtype=str,
        keep_default_na=False,
        encoding="utf-8-sig",
        skipinitialspace=True,
        skip_blank_lines=False,
        index_col=False,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = read()
        # pandas renames a column that occurs twice, so the names are also read as they are.
        original_names = read(header=None, nrows=1).iloc[0].str.strip()
    except pd.errors.ParserWarning:
        raise UserError(
            f"{path} has lines with more cells than its header; remove the extra cells."
        ) from None
    except ValueError as error:  # parser errors of pandas and UnicodeDecodeError are ValueErrors
        raise UserError(
            f"{path} is not a valid CSV file ({str(error).splitlines()[0]}); correct the file, and "
            "save it in UTF-8."
        ) from None
    if not len(frame):
        raise UserError(f"{path} has no line below its header; add a line for each case.")
    frame.columns = pd.Index([str(name).strip() for name in frame.columns])
    if lower:
        frame.columns = frame.columns.str.lower()
        original_names = original_names.str.lower()
    # Columns without a name, such as those that a spreadsheet adds at the end, are ignored.
    repeated = original_names[original_names.duplicated() & (original_names != "")]
    if len(repeated):
        raise UserError(f"{path} has the column {repeated.iloc[0]!r} twice; remove one of them.")
    has_content = ~(frame == "").all(axis=1)
    return frame.assign(line=np.arange(2, len(frame) + 2))[has_content]


# --- A plain file ---------------------------------------------------------------------------------


def _read_plain(path: Path, defaults: FileDefaults) -> FileTimings:
    """Read a plain CSV file: a table that a user wrote, with a column ``time_us``."""
    frame = _read_cells(path, lower=True)
    # 1. Fill the cells and columns that the file lacks: with the user's dtype and layout, and with
    #    the project's defaults. If neither the file nor the user gives a dtype, the column stays
    #    missing, and step 3 reports it. If neither gives a layout, checked() fills in the default
    #    layout of each operation.
    for name, default in {**_DEFAULTS, "dtype": defaults.dtype, "layout": defaults.layout}.items():
        if name in frame:
            frame[name] = frame[name].mask(frame[name] == "", default)
        elif default or name in _DEFAULTS:
            frame[name] = default
    # 2. A row without an operation is a convolution if it has a number of filters, otherwise a
    #    GEMM.
    op = frame["op"] if "op" in frame else pd.Series("", index=frame.index)
    filters = frame["kout"] if "kout" in frame else pd.Series("", index=frame.index)
    default_op = filters.map(lambda cell: "conv" if cell else "gemm")
    frame["op"] = op.mask(op == "", default_op).str.lower()
    # 3. Require the columns of the operations that occur, and check the cells.
    needed = ["dtype", "time_us"]
    if (frame["op"] == "gemm").any():
        needed += _SIZES
    if (frame["op"] == "conv").any():
        needed += CONV_SIZES
    # Rows of any other operation are checked like convolutions, and reported as damaged. This is
    # only possible if the file has the columns of convolutions.
    unknown = frame.loc[~frame["op"].isin(("gemm", "conv")), "op"]
    if len(unknown) and not set(CONV_SIZES) <= set(frame.columns):
        raise UserError(f"{path} has the operation {unknown.iloc[0]!r}; op must be gemm or conv.")
    if missing := [name for name in needed if name not in frame]:
        raise UserError(
            f"{path} has no column {missing[0]!r}; add it. Times of GEMMs need the columns "
            f"{HEADER}. Times of convolutions need {','.join(CONV_SIZES)},dtype,time_us."
        )
    present = [name for name in _READ_COLUMNS if name in frame]
    rows = checked(path, frame[["line", *present]], "")
    return FileTimings(median_times(rows), "times as given in the file", most_common(rows["cache"]))


# --- The CUTLASS profiler -------------------------------------------------------------------------

_CUTLASS_DTYPES = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "tf32": "tf32"}
_PASSED = ("passed", "not_verified")  # dispositions of kernels that ran and were not found wrong
_CUTLASS_KINDS = ("gemm", "conv2d")
_ROUNDED = r"f16(?:gemm|fprop|dgrad|wgrad)"
"""Pattern in the names of kernels that round 32-bit operands to fp16 or bf16."""

_CUTLASS_COLUMNS = {"Provider", "OperationKind", "Operation", "Disposition", "Runtime"}
"""A CSV file with all of these columns is from the CUTLASS profiler."""

_CUTLASS_CONV = (
    "conv_kind", "n", "h", "w", "c", "k", "r", "s", "stride_h", "stride_w", "pad_h", "pad_w",
    "dilation_h", "dilation_w", "Activation",
)  # fmt: skip


def _read_cutlass(path: Path) -> FileTimings:
    """Read the fastest kernel of each provider and problem from a CUTLASS profiler file.

    The columns A, B and C have the dtype and the storage order of each matrix, such as
    ``bf16:row``. If C is column-major, the row is read as the transposed GEMM Cᵀ = Bᵀ Aᵀ, whose
    result is row-major, as Rooftile expects. The times in the column Runtime are in milliseconds,
    and come from back-to-back launches.
    """
    # 1. Read the kernels that ran.
    frame = _read_cells(path)
    # The profiler writes one file per kind of operation. Only a file of GEMMs has operands A, B, C.
    has_gemms = "A" in frame
    columns_of_kind = (*_SIZES, "A", "B", "C") if has_gemms else _CUTLASS_CONV
    needed = ("Status", *columns_of_kind)
    if missing := [name for name in needed if name not in frame]:
        raise UserError(
            f"{path} has no column {missing[0]!r}; run the CUTLASS profiler again to create a "
            "complete file."
        )
    ran = frame["Disposition"].isin(_PASSED) & frame["Status"].isin(("success", ""))
    frame = frame[ran & frame["OperationKind"].isin(_CUTLASS_KINDS)]
    if not len(frame):
        raise UserError(
            f"{path} has no dense GEMM or 2-D convolution that ran successfully; profile one."
        )
    # 2. Translate the columns.
    cells = _cutlass_gemms(frame) if has_gemms else _cutlass_convs(frame)
    operation = frame["Operation"]
    # Kernels with TF32 in their name multiply single-precision operands as TF32. Kernels that match
    # _ROUNDED, such as s1688bf16gemm, round such operands to 16 bits, which no dtype of ours
    # describes. All other kernels multiply them in fp32.
    is_fp32 = cells["dtype"] == "fp32"
    is_tf32 = operation.str.contains("tf32", case=False)
    cells["dtype"] = cells["dtype"].mask(is_fp32 & is_tf32, "tf32")
    cells["dtype"] = cells["dtype"].mask(is_fp32 & operation.str.contains(_ROUNDED), "")
    cells["implementation"] = frame["Provider"].str.lower()
    cells["cache"] = "warm"
    cells["mode"] = "burst"
    cells["config"] = ""
    cells["time_us"] = pd.to_numeric(frame["Runtime"], errors="coerce") * 1e3
    cells["kernel"] = operation
    cells["line"] = frame["line"]
    # The profiler has more dtypes than we do. Rows in other dtypes are sound, so they are dropped
    # without a report.
    cells = cells[cells["dtype"].isin(DTYPE_BYTES)]
    if not len(cells):
        raise UserError(
            f"{path} has no kernel in fp32, tf32, fp16 or bf16; profile a kernel in one of these "
            "dtypes."
        )
    # 3. Check the cells, and keep the fastest kernel of each provider and problem.
    rows = checked(path, cells, "cublas" if has_gemms else "cudnn")
    rows = rows.sort_values("time_us", kind="stable")
    rows = rows.drop_duplicates(case_columns(rows)).sort_index().reset_index(drop=True)
    rows["kernels"] = [json.dumps([[name, 1.0]]) for name in rows["kernel"]]
    return FileTimings(
        rows, "Runtime from the CUTLASS profiler for the fastest kernel of each shape", "warm"
    )


def _cutlass_gemms(frame: pd.DataFrame) -> pd.DataFrame:
    """Translate the profiler's columns of GEMMs to Rooftile's columns, all as text.

    The dtype is empty if Rooftile does not support it, or if A and B have different dtypes.
    """
    a_dtype, a_order = _dtype_and_order(frame["A"])
    b_dtype, b_order = _dtype_and_order(frame["B"])
    _, c_order = _dtype_and_order(frame["C"])
    # The operands of Cᵀ = Bᵀ Aᵀ are Bᵀ and Aᵀ. Bᵀ is row-major, our letter n, if B is column-major.
    is_transposed = c_order == "column"
    first_letter = _layout_letters(a_order, "row").mask(
        is_transposed, _layout_letters(b_order, "column")
    )
    second_letter = _layout_letters(b_order, "row").mask(
        is_transposed, _layout_letters(a_order, "column")
    )
    return pd.DataFrame(
        {
            "op": "gemm",
            "m": frame["m"].mask(is_transposed, frame["n"]),
            "n": frame["n"].mask(is_transposed, frame["m"]),
            "k": frame["k"],
            "batch": _cells_or_one(frame, "batch_count"),
            "dtype": a_dtype.map(_CUTLASS_DTYPES).where(a_dtype == b_dtype, ""),
            "layout": first_letter + second_letter,
        }
    ).fillna({"dtype": ""})


def _cells_or_one(frame: pd.DataFrame, name: str) -> pd.Series:
    if name not in frame:
        return pd.Series("1", index=frame.index)
    return frame[name].mask(frame[name] == "", "1")


def _dtype_and_order(column: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Split cells such as ``bf16:row`` into dtype and storage order."""
    parts = column.str.partition(":")
    return parts[0], parts[2]


def _layout_letters(orders: pd.Series, untransposed: str) -> pd.Series:
    """Return the layout letter of one operand in each row, or "?" if the storage order is unknown.

    An empty string would not do, because an empty layout means the default layout.
    ``untransposed`` is the storage order whose letter is ``n``.
    """
    letters = {"row": "t", "column": "t"}
    letters[untransposed] = "n"
    return orders.map(letters).fillna("?")


def _cutlass_convs(frame: pd.DataFrame) -> pd.DataFrame:
    """Translate the profiler's columns of convolutions to Rooftile's columns, all as text."""
    dtype, layout = _dtype_and_order(frame["Activation"])
    # Our cells hold the values of both directions, such as ``1x1``.
    pairs = {
        ours: frame[f"{theirs}_h"] + "x" + frame[f"{theirs}_w"]
        for ours, theirs in (("stride", "stride"), ("padding", "pad"), ("dilation", "dilation"))
    }
    return pd.DataFrame(
        {
            "op": "conv",
            "pass": frame["conv_kind"],
            "batch": frame["n"],
            "c": frame["c"],
            "h": frame["h"],
            "w": frame["w"],
            "kout": frame["k"],
            "r": frame["r"],
            "s": frame["s"],
            **pairs,
            "groups": _cells_or_one(frame, "groups"),
            "dtype": dtype.map(_CUTLASS_DTYPES).fillna(""),
            "layout": layout,
        }
    )


# --- TritonBench ----------------------------------------------------------------------------------

_TRITONBENCH_SHAPES = {"(M, N, K)": ("m", "n", "k"), "(B, M, N, K)": ("batch", "m", "n", "k")}
_LATENCY = "-latency"
_ATEN = ("aten_matmul", "aten_addmm", "aten_bmm")  # implementations of PyTorch, which call cuBLAS
_MILLISECONDS = r"^([0-9.]+(?:[eE][+-]?[0-9]+)?)(?:$|\s*\()"
"""Pattern of a number that fills the whole cell, or that is followed by a parenthesis."""


def _is_tritonbench(header: str) -> bool:
    names = [name.strip('"') for name in header.split(";")]
    return names[0] in _TRITONBENCH_SHAPES and any(name.endswith(_LATENCY) for name in names)


def _read_tritonbench(path: Path, defaults: FileDefaults) -> FileTimings:
    """Read a TritonBench file: one row per shape, one column ``name-latency`` per implementation.

    Latencies are in milliseconds. The file does not name the layout. TritonBench's default, nn, is
    assumed unless the user gives another layout.
    """
    if not defaults.dtype:
        raise UserError(
            f"{path} is a TritonBench CSV file, which does not name its dtype; give --dtype."
        )
    # 1. Read the sizes, which are the numbers in the first column. The last line has averages.
    frame = _read_cells(path, ";")
    shape_column = frame.columns[0]
    frame = frame[frame[shape_column] != "average"]
    size_names = _TRITONBENCH_SHAPES[shape_column]
    numbers_by_row = frame[shape_column].str.findall(r"\d+")
    sizes: dict[str, pd.Series] = {}
    for position, size_name in enumerate(size_names):
        # A damaged shape has too few or too many numbers. Its empty cells are reported below.
        cells = [
            numbers[position] if len(numbers) == len(size_names) else ""
            for numbers in numbers_by_row
        ]
        sizes[size_name] = pd.Series(cells, index=frame.index)
    # 2. Make a row of each implementation's latency.
    rows_by_implementation = []
    for metric in frame.columns:
        if not metric.endswith(_LATENCY):
            continue
        name = metric.removesuffix(_LATENCY)
        # Newer versions write ``0.0123 (±1.5%)``. A failed case has an error message or is empty.
        milliseconds = frame[metric].str.extract(_MILLISECONDS, expand=False)
        rows_of_name = pd.DataFrame(
            {
                "op": "gemm",
                "batch": "1",  # replaced if the file has the sizes of batches
                **sizes,
                "dtype": defaults.dtype,
                "layout": defaults.layout or "nn",
                "implementation": "cublas" if name in _ATEN else name,
                "time_us": pd.to_numeric(milliseconds, errors="coerce") * 1e3,
                "cache": "cold",
                "mode": "burst",
                "config": "",
                "line": frame["line"],
            }
        )
        rows_by_implementation.append(rows_of_name[milliseconds.notna()])
    # 3. Check the rows, and keep the median of repeated ones.
    rows = median_times(checked(path, pd.concat(rows_by_implementation), "cublas"))
    return FileTimings(
        rows, "latency from TritonBench, with the cache flushed before each launch", "cold"
    )


def most_common(words: pd.Series) -> str:
    """Return the word that occurs most often in a column with at least one word."""
    return str(words.value_counts().index[0])


def name_of(path: Path) -> str:
    """Return the name of a file or folder, even if the path is ``.`` or ends in ``..``."""
    # Links are not followed, because the user knows a file by the name of the link.
    return os.path.basename(os.path.abspath(path))
