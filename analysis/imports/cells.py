"""Convert cells of files to cases with times: check them, translate them, report the bad ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.recordings.csv_file import Faults
from kernels.common.checks import LARGEST_BYTES, LARGEST_SIZE
from kernels.common.errors import UserError
from kernels.problem import CONV_LAYOUTS, DTYPE_BYTES, GEMM_LAYOUTS, PASSES
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
_SLOWEST_US = 1e12  # eleven days
_WIDEST = max(DTYPE_BYTES.values())
_REMEDY = "Fix or remove them."


def checked(path: Path, cells: pd.DataFrame, library: str) -> pd.DataFrame:
    """Convert cells to numbers and words, and leave out rows that are not a case with a time.

    Args:
        path: the file, for messages.
        cells: one column per property, as text (times may be numbers), and ``line``, the line
            number.
        library: the implementation where none is named. If it is empty, GEMMs are on cuBLAS and
            convolutions on cuDNN.

    Raises:
        UserError: if there are no rows, or too many of them are damaged.
    """
    if not len(cells):
        raise UserError(f"{path} has no row with a time.")
    cells = cells.reset_index(drop=True)
    are_gemms = cells["op"] == "gemm"
    faults = Faults(path, cells["line"], _REMEDY)
    _tell_faults(cells, are_gemms, faults, _gemm_faults)
    _tell_faults(cells, ~are_gemms, faults, _conv_faults)
    faults.leave_out()
    rows = cells[faults.sound].drop(columns="line")
    rows["time_us"] = pd.to_numeric(rows["time_us"])
    rows["dtype"] = our_dtypes(rows["dtype"])
    named = rows["implementation"] != ""
    usual = pd.Series(np.where(rows["op"] == "gemm", "cublas", "cudnn"), index=rows.index)
    rows["implementation"] = rows["implementation"].where(named, library or usual)
    are_gemms = rows["op"] == "gemm"
    converted = [_convert_gemms(rows[are_gemms])] if are_gemms.any() else []
    converted += [_convert_convolutions(rows[~are_gemms])] if not are_gemms.all() else []
    combined = pd.concat(converted).sort_index().reset_index(drop=True)
    for name in combined:
        if COLUMNS.get(name, ("",))[0] == "whole":  # a value that does not apply is missing
            combined[name] = pd.to_numeric(combined[name], errors="coerce").astype("Int64")
    return combined


def _convert_gemms(rows: pd.DataFrame) -> pd.DataFrame:
    layout = rows["layout"] if "layout" in rows else pd.Series("", index=rows.index)
    sizes = {name: pd.to_numeric(rows[name]).astype("int64") for name in ("m", "n", "k", "batch")}
    return rows.assign(layout=layout.mask(layout == "", "nt").str.lower(), **sizes)


def _convert_convolutions(rows: pd.DataFrame) -> pd.DataFrame:
    """Add the sizes of the GEMM that each convolution implies."""
    problems = [problem_columns(problem_of(_conv_record(row))) for row in rows.to_dict("records")]
    return rows.assign(**pd.DataFrame(problems, index=rows.index))


def _conv_record(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the columns of a convolution, with defaults in place of empty cells."""
    given = {str(name): cell for name, cell in row.items() if cell not in ("", None)}
    defaults = {"layout": "nhwc", **_CONV_DEFAULTS}
    return {**defaults, **given, "dtype": our_dtypes(pd.Series([given.get("dtype", "")])).iloc[0]}


def our_dtypes(names: pd.Series) -> pd.Series:
    """Translate names such as ``torch.bfloat16`` to ours; unknown names stay."""
    names = names.str.removeprefix("torch.").str.lower()
    return names.map(_DTYPES).fillna(names)


def _tell_faults(
    cells: pd.DataFrame,
    kind_rows: pd.Series,
    faults: Faults,
    check: Callable[[pd.DataFrame], list[tuple[pd.Series, str, str]]],
) -> None:
    """Record what is wrong with the rows of one kind of operation."""
    if not kind_rows.any():
        return
    time = pd.to_numeric(cells["time_us"], errors="coerce")
    checks = [
        ((time > 0) & (time < _SLOWEST_US), "time_us", "not a time in microseconds"),
        (
            our_dtypes(cells["dtype"]).isin(DTYPE_BYTES),
            "dtype",
            f"not one of {', '.join(DTYPE_BYTES)}",
        ),
        (cells["cache"].isin(_CACHES), "cache", f"not one of {', '.join(_CACHES)}"),
        (cells["mode"].isin(_MODES), "mode", f"not one of {', '.join(_MODES)}"),
        *check(cells[kind_rows]),
    ]
    for sound, name, why in checks:
        wrong = kind_rows & ~sound.reindex(cells.index, fill_value=True).astype(bool)
        texts = cells[name] if name in cells else pd.Series("", index=cells.index)
        faults.tell(wrong, [f"{name} is {cell!r}, {why}" for cell in texts])


def _gemm_faults(cells: pd.DataFrame) -> list[tuple[pd.Series, str, str]]:
    names = ("m", "n", "k", "batch")
    sizes = [(_is_size(cells[name]), name, "not a size") for name in names]
    layout = pd.Series("", index=cells.index)
    if "layout" in cells:
        layout = cells["layout"].str.lower()
    m, n, k, batch = (pd.to_numeric(cells[name], errors="coerce") * 1.0 for name in names)
    fits = _WIDEST * batch * (m * k + k * n + m * n) <= LARGEST_BYTES
    return [
        *sizes,
        (fits, "m", "too large together with n, k and batch for any machine"),
        (
            layout.str.lower().isin(("", *GEMM_LAYOUTS)),
            "layout",
            f"not one of {', '.join(GEMM_LAYOUTS)}",
        ),
    ]


def _conv_faults(cells: pd.DataFrame) -> list[tuple[pd.Series, str, str]]:
    sizes = [(_is_size(cells[name]), name, "not a size") for name in CONV_SIZES]
    valid = []
    for row in cells.to_dict("records"):
        try:
            problem_of(_conv_record(row))
            valid.append(True)
        except (ValueError, KeyError):
            valid.append(False)
    words = f"layout must be {' or '.join(CONV_LAYOUTS)}, and pass {' or '.join(PASSES)}"
    return [
        *sizes,
        (
            pd.Series(valid, index=cells.index),
            "op",
            f"but the row is not a convolution: {words}",
        ),
    ]


def _is_size(cells: pd.Series) -> pd.Series:
    digits = cells.astype(str).str.fullmatch(r"[0-9]{1,13}")
    sizes = pd.to_numeric(cells.where(digits, "0"))
    return (sizes >= 1) & (sizes <= LARGEST_SIZE)


def identity(rows: pd.DataFrame) -> list[str]:
    """Return the columns that identify the case of a row."""
    return [name for name in rows if name not in ("time_us", "kernel", "kernels")]


def middle(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per case, with the median of its times if it was timed several times."""
    names = identity(rows)
    if not rows.duplicated(names).any():
        return rows
    return rows.groupby(names, sort=False, dropna=False, as_index=False)["time_us"].median()
