"""Problems out of a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from kernels.errors import UserError, nearest
from kernels.operation import as_problem
from kernels.problem import Problem
from sweeps.schema import COLUMNS, problem_of

_GEMM = {"op": "gemm", "layout": "nt", "batch": "1"}
_CONV = {
    "op": "conv", "stride": "1", "padding": "0", "dilation": "1", "groups": "1",
    "layout": "nhwc", "pass": "fprop",
}  # fmt: skip
_NEEDED = {
    "gemm": ("m", "n", "k", "dtype"), "conv": ("batch", "c", "h", "w", "kout", "r", "s", "dtype"),
}  # fmt: skip
_HEADER = "m,n,k,dtype and, if you like, layout and batch"


def read_problems(path: Path) -> list[Problem]:
    """The problem of each line, in the file's order.

    The header has ``m,n,k,dtype``, or more of the columns of measurements.csv; a line whose ``op``
    is ``conv`` is a convolution. A cell that is empty or absent has the default of ``--gemm`` and
    ``--conv``.

    Raises:
        UserError: the file or a line cannot be read; it names the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            header = reader.fieldnames or []
            if not {"m", "n", "k", "dtype"} <= set(header) and "op" not in header:
                raise UserError(f"{path} does not begin with the columns {_HEADER}.")
            if len(set(header)) < len(header):
                raise UserError(f"{path} has a column twice.")
            if unknown := [name for name in header if name not in COLUMNS]:
                raise UserError(
                    f"{path} has a column {unknown[0]!r}; {nearest(unknown[0], COLUMNS)}"
                )
            problems = [_problem(path, reader.line_num, row) for row in reader]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file ({error}).") from None
    if not problems:
        raise UserError(f"{path} has no line below its header.")
    return problems


def _problem(path: Path, line: int, cells: dict[Any, Any]) -> Problem:
    if None in cells:  # where the reader puts what is too much
        raise UserError(f"line {line} of {path} has more cells than the header has columns.")
    given = {name: cell.strip() for name, cell in cells.items() if cell and cell.strip()}
    op = given.get("op", "gemm")
    if op not in _NEEDED:
        raise UserError(f"line {line} of {path}: op is {op!r}; {nearest(op, _NEEDED)}")
    if missing := [name for name in _NEEDED[op] if name not in given]:
        raise UserError(f"line {line} of {path} has no {missing[0]}.")
    try:
        return as_problem(problem_of({**(_GEMM if op == "gemm" else _CONV), **given}))
    except UserError as error:
        raise UserError(f"line {line} of {path}: {error}") from None
    except ValueError:
        raise UserError(f"line {line} of {path} has a size that is no whole number.") from None
