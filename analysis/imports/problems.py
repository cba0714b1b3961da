"""Read problems that people write as text, tuples, lines of a CSV file or rows of a DataFrame."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import pandas as pd

from kernels import operation
from kernels.common.errors import UserError, nearest
from kernels.problem import Conv, Gemm, Problem
from sweeps.schema import COLUMNS, problem_of

_GEMM_DEFAULTS = {"op": "gemm", "layout": "nt", "batch": "1"}
_CONV_DEFAULTS = {
    "op": "conv", "stride": "1", "padding": "0", "dilation": "1", "groups": "1",
    "layout": "nhwc", "pass": "fprop",
}  # fmt: skip
_NEEDED = {
    "gemm": ("m", "n", "k", "dtype"), "conv": ("batch", "c", "h", "w", "kout", "r", "s", "dtype"),
}  # fmt: skip
_MOST_GEMM_FIELDS = 6  # maximum number of fields of a GEMM; a convolution has at least 12

Shape = str | tuple[Any, ...] | list[Any] | Gemm | Conv
"""A problem as people write it: text such as ``"8192,50257,768,bf16"``, a tuple or list of its
fields, or a :class:`Gemm` or :class:`Conv`."""


def as_problems(shapes: Shape | Iterable[Shape] | pd.DataFrame) -> list[Problem]:
    """Convert one or several shapes to problems, in the same order.

    Args:
        shapes: one shape, several shapes, or a DataFrame. A shape is a :class:`Gemm`, a
            :class:`Conv`, or text, a tuple or a list with the shape's fields in the order in which
            ``--gemm`` or ``--conv`` takes them. A DataFrame has the columns ``m``, ``n``, ``k`` and
            ``dtype``, or a column ``op`` and the columns that its operations need. A DataFrame
            without a column ``m`` may instead have shapes in a column ``problem`` or ``shape``.
            Other columns are ignored.

    Raises:
        UserError: if no shape is given, if a shape is invalid, or if a DataFrame does not describe
            problems.

    >>> as_problems(["4096,50257,768,bf16", (64, 64, 64, "fp32", "nn")])
    [Gemm(m=4096, n=50257, k=768, dtype='bf16', layout='nt', batch=1), \
Gemm(m=64, n=64, k=64, dtype='fp32', layout='nn', batch=1)]
    """
    if isinstance(shapes, pd.DataFrame):
        return _problems_of_frame(shapes)
    if _has_fields(shapes):
        return [_as_problem(shapes)]
    # Anything else that is not a collection is one shape, or is not a shape, such as a number.
    # _as_problem raises an error in the second case.
    if isinstance(shapes, (str, Mapping)) or not isinstance(shapes, Iterable):
        return [_as_problem(shapes)]
    problems = [_as_problem(shape) for shape in shapes]
    if not problems:
        raise UserError("no shape was given; give at least one.")
    return problems


def _has_fields(shapes: object) -> bool:
    """Return True if ``shapes`` holds one shape's fields, not several shapes."""
    # The first field is a size.
    return isinstance(shapes, (tuple, list)) and bool(shapes) and isinstance(shapes[0], Real)


def _as_problem(shape: object) -> Problem:
    if isinstance(shape, (Gemm, Conv)):
        return shape
    if isinstance(shape, (tuple, list)):
        # Fields at the end may be missing or None. They then have their defaults.
        text = ",".join(_cell(field) for field in shape).rstrip(",")
    elif isinstance(shape, str):
        text = shape
    else:
        raise UserError(
            f"{shape!r} is not a shape; give text such as '8192,50257,768,bf16', or a tuple."
        )
    if text.count(",") < _MOST_GEMM_FIELDS:
        return Gemm.parse(text)
    return Conv.parse(text)


def read_problems(path: Path) -> list[Problem]:
    """Read the problems in a CSV file, one on each line below the header.

    The header has the columns ``m``, ``n``, ``k`` and ``dtype``, or a column ``op`` and the columns
    that the file's operations need. Other columns of measurements.csv are allowed, too. Optional
    fields have defaults.

    Raises:
        UserError: if the file cannot be read as a list of problems.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            _check_header(str(path), reader.fieldnames or [])
            problems = [
                problem_from_cells(f"line {reader.line_num} of {path}", row) for row in reader
            ]
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); check its path and permissions."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{path} is not a CSV file ({error}); give a CSV file in UTF-8 with one line per shape."
        ) from None
    if not problems:
        raise UserError(f"{path} has no line below its header; add a line for each shape.")
    return problems


def _problems_of_frame(frame: pd.DataFrame) -> list[Problem]:
    for name in ("problem", "shape"):
        if name in frame and "m" not in frame:
            return as_problems(list(frame[name]))
    columns = {*_GEMM_DEFAULTS, *_CONV_DEFAULTS, *_NEEDED["gemm"], *_NEEDED["conv"]}
    described = frame[[name for name in frame.columns if name in columns]]
    _check_header("the DataFrame", list(described.columns))
    rows: Sequence[Mapping[str, Any]] = described.to_dict("records")
    problems = []
    for index, row in zip(frame.index, rows, strict=True):
        cells = {name: _cell(value) for name, value in row.items()}
        problems.append(problem_from_cells(f"row {index} of the DataFrame", cells))
    if not problems:
        raise UserError("the DataFrame has no rows; add one per shape.")
    return problems


def _cell(value: object) -> str:
    """Convert a cell or a field to text: 3.0 to ``3``, (2, 1) to ``2x1``, a missing cell to ""."""
    if isinstance(value, (tuple, list)):
        return "x".join(map(_cell, value))
    if value is None or value is pd.NA or value != value:  # only NaN differs from itself
        return ""
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real) and float(value).is_integer():
        return str(int(float(value)))
    return str(value)


def _check_header(name: str, header: Sequence[str]) -> None:
    """Check that the columns of a header can describe problems."""
    missing = [column for column in _NEEDED["gemm"] if column not in header]
    if missing and "op" not in header:
        raise UserError(
            f"{name} has no column {missing[0]!r}. Add m, n, k and dtype for GEMMs, or op, batch, "
            "c, h, w, kout, r, s and dtype for convolutions."
        )
    if repeated := [column for column in header if header.count(column) > 1]:
        raise UserError(f"{name} has the column {repeated[0]!r} twice; remove one of them.")
    if unknown := [column for column in header if column not in COLUMNS]:
        raise UserError(
            f"{name} has an unknown column {unknown[0]!r}; {nearest(unknown[0], COLUMNS)}"
        )


def problem_from_cells(label: str, cells: Mapping[Any, Any]) -> Problem:
    """Return the problem that a row describes.

    Args:
        label: name of the row in error messages, such as ``line 3 of shapes.csv``.
        cells: text of the row's cells, by column. An empty string or None means the column's
            default, if it has one.

    Raises:
        UserError: if the row does not describe a GEMM or a convolution.
    """
    if None in cells:  # csv.DictReader puts excess cells under the key None
        raise UserError(
            f"{label} has more cells than the header has columns; remove the extra cells."
        )
    given = {name: cell.strip() for name, cell in cells.items() if cell and cell.strip()}
    op = given.get("op", "gemm")
    if op not in _NEEDED:
        raise UserError(f"{label}: op is {op!r}; {nearest(op, _NEEDED)}")
    if missing := [name for name in _NEEDED[op] if name not in given]:
        noun = "GEMM" if op == "gemm" else "convolution"
        raise UserError(f"{label} has no {missing[0]}, which every {noun} needs; add it.")
    defaults = _GEMM_DEFAULTS if op == "gemm" else _CONV_DEFAULTS
    try:
        return operation.as_problem(problem_of({**defaults, **given}))
    except UserError as error:
        raise UserError(f"{label}: {error}") from None
    except ValueError:
        raise UserError(f"{label} has a size that is not a whole number; correct it.") from None
