"""Read CSV files with times: plain ones, and those of the CUTLASS profiler and of TritonBench.

Each becomes a frame with columns of measurements.csv, one row per case. Rows that are not a case,
or that have no time, are reported and left out.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.imports.cells import CONV_SIZES, checked, identity, middle
from kernels.common.errors import UserError
from kernels.problem import DTYPE_BYTES

HEADER = "m,n,k,dtype,time_us"
"""Columns that a plain file needs for GEMMs."""

_SIZES = ("m", "n", "k")
_DEFAULTS = {
    "batch": "1", "implementation": "", "cache": "warm", "mode": "burst", "config": "",
}  # fmt: skip
_TAKEN = (
    "op", "pass", *_SIZES, *CONV_SIZES, "stride", "padding", "dilation", "groups", "dtype",
    "layout", "implementation", "config", "mode", "cache", "time_us",
)  # fmt: skip
"""Columns that are read from a plain file; other columns are the user's."""


@dataclass(frozen=True)
class FileTimings:
    """Times from a file.

    Attributes:
        rows: one row per case. The columns are those that identify a case, except ``sweep`` and
            ``fill``, then ``time_us`` and, where the file names kernels, ``kernel`` and
            ``kernels``.
        how: how the times were measured.
        cache: where most operands came from.
    """

    rows: pd.DataFrame
    how: str
    cache: str


@dataclass(frozen=True)
class FileDefaults:
    """Dtype and layout of all rows, which the user gives because the file does not have them."""

    dtype: str = ""
    layout: str = ""


def read_timings(path: Path, told: FileDefaults) -> FileTimings | None:
    """Read the times of a CSV file; return None if it has none of the three formats.

    Raises:
        UserError: if the file cannot be read, lacks a column, or has too many damaged rows.
    """
    header = _header(path)
    if _is_tritonbench(header):
        return _read_tritonbench(path, told)
    names = {name.strip().strip('"') for name in header.split(",")}
    if {"Provider", "OperationKind", "Operation", "Disposition", "Runtime"} <= names:
        return _read_cutlass(path)
    if "time_us" in {name.lower() for name in names}:
        return _read_plain(path, told)
    return None


def _header(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from None


def _read(path: Path, separator: str = ",", lower: bool = False) -> pd.DataFrame:
    """Read all cells as stripped text, with the line number in the column ``line``.

    Empty cells are empty text.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                path,
                sep=separator,
                dtype=str,
                keep_default_na=False,
                encoding="utf-8-sig",
                skipinitialspace=True,
                skip_blank_lines=False,
                index_col=False,
            )
    except pd.errors.ParserWarning:
        raise UserError(f"{path} has lines with more cells than its header.") from None
    except (ValueError, UnicodeDecodeError) as error:  # parser errors of pandas are ValueErrors
        raise UserError(f"{path} is not a CSV file ({str(error).splitlines()[0]}).") from None
    if not len(frame):
        raise UserError(f"{path} has no line below its header.")
    frame.columns = pd.Index([str(name).strip() for name in frame.columns])
    if lower:
        frame.columns = frame.columns.str.lower()
    if not frame.columns.is_unique:
        repeated = frame.columns[frame.columns.duplicated()][0]
        raise UserError(f"{path} has column {repeated!r} twice.")
    written = ~(frame == "").all(axis=1)
    return frame.assign(line=np.arange(2, len(frame) + 2))[written]


# --- A plain file ---------------------------------------------------------------------------------


def _read_plain(path: Path, defaults: FileDefaults) -> FileTimings:
    frame = _read(path, lower=True)
    # 1. Fill the cells and columns that the file lacks: with the user's dtype and layout, and with
    #    the project's defaults.
    for name, default in {**_DEFAULTS, "dtype": defaults.dtype, "layout": defaults.layout}.items():
        if name in frame:
            frame[name] = frame[name].mask(frame[name] == "", default)
        elif default or name in _DEFAULTS:
            frame[name] = default
    # 2. A row without an operation is a convolution if it has filters, otherwise a GEMM.
    op = frame["op"] if "op" in frame else pd.Series("", index=frame.index)
    filters = frame["kout"] if "kout" in frame else pd.Series("", index=frame.index)
    frame["op"] = op.mask(op == "", filters.where(filters == "", "conv").replace("", "gemm"))
    # 3. Require the columns of the operations that occur, and check the cells.
    needed = ["dtype", "time_us"]
    needed += [name for name in _SIZES if (frame["op"] == "gemm").any()]
    needed += [name for name in CONV_SIZES if (frame["op"] == "conv").any()]
    if missing := [name for name in needed if name not in frame]:
        raise UserError(
            f"{path} has no column {missing[0]!r}. A file of times begins with {HEADER} and may "
            "have layout, batch, implementation, cache and a convolution's columns."
        )
    rows = checked(path, frame[["line", *(name for name in _TAKEN if name in frame)]], "")
    return FileTimings(middle(rows), "as its file says", _most_common(rows["cache"]))


# --- The CUTLASS profiler -------------------------------------------------------------------------

_CUTLASS_DTYPES = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "tf32": "tf32"}
_PASSED = ("passed", "not_verified")
_CUTLASS_KINDS = ("gemm", "conv2d")
_CUTLASS_CONV = (
    "conv_kind", "n", "h", "w", "c", "k", "r", "s", "stride_h", "stride_w", "pad_h", "pad_w",
    "dilation_h", "dilation_w", "Activation",
)  # fmt: skip


def _read_cutlass(path: Path) -> FileTimings:
    """Read one row per kernel and problem; keep each provider's fastest kernel for a problem.

    A and B are ``bf16:row`` or ``bf16:column``. If C is column-major, the transposed GEMM Cᵀ = Bᵀ
    Aᵀ is computed. Runtime is in milliseconds and was measured over back-to-back launches.
    """
    frame = _read(path)
    products = "A" in frame
    needed = ("Status", *((*_SIZES, "A", "B", "C") if products else _CUTLASS_CONV))
    if missing := [name for name in needed if name not in frame]:
        raise UserError(f"{path} has no column {missing[0]!r}; let the profiler write it again.")
    ran = frame["Disposition"].isin(_PASSED) & frame["Status"].isin(("success", ""))
    frame = frame[ran & frame["OperationKind"].isin(_CUTLASS_KINDS)]
    if not len(frame):
        raise UserError(f"{path} has no passed kernel of a dense GEMM or 2-D convolution.")
    cells = _cutlass_gemms(frame) if products else _cutlass_convs(frame)
    operation = frame["Operation"]
    # Kernels with TF32 in their name multiply single-precision operands as TF32.
    on_tensor_cores = operation.str.contains("tf32", case=False) & (cells["dtype"] == "fp32")
    cells["dtype"] = cells["dtype"].mask(on_tensor_cores, "tf32")
    cells["implementation"] = frame["Provider"].str.lower()
    cells["cache"], cells["mode"], cells["config"] = "warm", "burst", ""
    cells["time_us"] = pd.to_numeric(frame["Runtime"], errors="coerce") * 1e3
    cells["kernel"], cells["line"] = operation, frame["line"]
    # The profiler has more dtypes than we do; such rows are not damaged.
    cells = cells[cells["dtype"].isin(DTYPE_BYTES)]
    if not len(cells):
        raise UserError(f"{path} has no kernel in fp32, tf32, fp16 or bf16.")
    rows = checked(path, cells, "cublas" if products else "cudnn")
    rows = rows.sort_values("time_us", kind="stable")
    rows = rows.drop_duplicates(identity(rows)).sort_index().reset_index(drop=True)
    rows["kernels"] = [json.dumps([[name, 1.0]]) for name in rows["kernel"]]
    return FileTimings(
        rows, "Runtime of the CUTLASS profiler, the fastest kernel of each shape", "warm"
    )


def _cutlass_gemms(frame: pd.DataFrame) -> pd.DataFrame:
    (a, a_order), (b, b_order), (_, c_order) = (_typed(frame[name]) for name in "ABC")
    by_column = c_order == "column"
    letters = pd.DataFrame(
        {
            # The first operand of Cᵀ = Bᵀ Aᵀ is Bᵀ, which is stored as named if B is by columns.
            "first": _letter(a_order).mask(by_column, _letter(b_order, "column")),
            "second": _letter(b_order).mask(by_column, _letter(a_order, "column")),
        }
    )
    return pd.DataFrame(
        {
            "op": "gemm",
            "m": frame["m"].mask(by_column, frame["n"]),
            "n": frame["n"].mask(by_column, frame["m"]),
            "k": frame["k"],
            "batch": _given(frame, "batch_count"),
            "dtype": a.map(_CUTLASS_DTYPES).where(a == b, ""),
            "layout": letters["first"] + letters["second"],
        }
    ).fillna({"dtype": ""})


def _given(frame: pd.DataFrame, name: str) -> pd.Series:
    """Return a column's cells, with 1 where a cell or the whole column is missing."""
    if name not in frame:
        return pd.Series("1", index=frame.index)
    return frame[name].mask(frame[name] == "", "1")


def _typed(column: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Split ``bf16:row`` into type and order."""
    parts = column.str.partition(":")
    return parts[0], parts[2]


def _letter(order: pd.Series, as_named: str = "row") -> pd.Series:
    """Return ``n`` where operands have the order ``as_named``, ``t`` where they have the other."""
    return order.map({"row": "t", "column": "t"} | {as_named: "n"}).fillna("")


def _cutlass_convs(frame: pd.DataFrame) -> pd.DataFrame:
    dtype, layout = _typed(frame["Activation"])
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
            "groups": _given(frame, "groups"),
            "dtype": dtype.map(_CUTLASS_DTYPES).fillna(""),
            "layout": layout,
        }
    )


# --- TritonBench ----------------------------------------------------------------------------------

_TRITONBENCH_SHAPES = {"(M, N, K)": ("m", "n", "k"), "(B, M, N, K)": ("batch", "m", "n", "k")}
_LATENCY = "-latency"
_ATEN = ("aten_matmul", "aten_addmm", "aten_bmm")  # implementations of PyTorch, which call cuBLAS
_MILLISECONDS = r"^([0-9.]+(?:[eE][+-]?[0-9]+)?)(?:$|\s*\()"


def _is_tritonbench(header: str) -> bool:
    first, *metrics = header.split(";")
    return first.strip('"') in _TRITONBENCH_SHAPES and any(m.endswith(_LATENCY) for m in metrics)


def _read_tritonbench(path: Path, defaults: FileDefaults) -> FileTimings:
    """Read one row per shape, with ``name-latency`` for each implementation, in milliseconds.

    TritonBench flushes the cache before each launch, and both operands are stored as named (layout
    nn) unless it was told otherwise. The file contains neither the layout nor the dtype.
    """
    if not defaults.dtype:
        raise UserError(
            f"{path} is TritonBench's CSV, which does not name its dtype; give --dtype."
        )
    # 1. Read the sizes, which are the numbers in the first column.
    frame = _read(path, ";")
    shape = frame.columns[0]
    names = _TRITONBENCH_SHAPES[shape]
    sizes = frame[shape].str.findall(r"\d+").str[: len(names)]
    columns = [
        pd.Series([row[i] if len(row) > i else "" for row in sizes], index=frame.index)
        for i in range(len(names))
    ]
    base = {"op": "gemm", "batch": "1", **dict(zip(names, columns, strict=True))}
    # 2. Make a row of each implementation's latency.
    parts = []
    for metric in (name for name in frame.columns if name.endswith(_LATENCY)):
        name = metric.removesuffix(_LATENCY)
        # Newer versions write ``0.0123 (±1.5%)``. A failed case has an error message or nothing.
        milliseconds = frame[metric].str.extract(_MILLISECONDS, expand=False)
        part = pd.DataFrame(
            {
                **base,
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
        parts.append(part[milliseconds.notna()])
    # 3. Check the rows, and keep the median of repeated ones.
    rows = middle(checked(path, pd.concat(parts), "cublas"))
    return FileTimings(rows, "latency of TritonBench, cache flushed before each launch", "cold")


def _most_common(words: pd.Series) -> str:
    return str(words.value_counts().index[0])
