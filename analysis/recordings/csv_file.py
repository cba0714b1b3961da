"""Read a CSV table strictly, and leave out damaged lines.

A file may have been cut off, edited by hand or merged. Damaged lines are reported, and the other
lines are still used. If too many lines are damaged, the undamaged lines cannot be trusted either,
so the whole file is refused.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray
from pyarrow import compute
from pyarrow import csv as arrow_csv

from kernels.cli import note
from kernels.common.counts import counted
from kernels.common.errors import UserError

MOST_DAMAGED = 0.1
"""Largest share of a file's lines that may be damaged.

One damaged line is tolerated in any file that has other lines."""

FRAME_TYPES = {"text": "string", "whole": "Int64", "real": "float64", "flag": "boolean"}
"""Pandas type of each kind of column."""

_KIND_WORDS = {"whole": "a whole number", "real": "a number", "flag": "true or false"}
_ARROW_TYPES = {"whole": pa.int64(), "real": pa.float64(), "flag": pa.bool_()}
_NAMED = 5  # maximum number of damaged lines reported one by one
_REPLACED = "\ufffd"  # the character that decoding puts in place of bytes that are not UTF-8


class Faults:
    """Faults in the rows of a table; only the first fault found in a row is kept."""

    def __init__(self, path: Path, lines: Sequence[int], remedy: str) -> None:
        """Start without faults; ``lines`` has the line number of each row."""
        self._path = path
        self._lines = np.asarray(lines, dtype=np.intp)
        self._remedy = remedy
        self._why = np.full(len(self._lines), "", dtype=object)

    def record(self, wrong: ArrayLike, why: str | Sequence[str] | NDArray[np.object_]) -> None:
        """Record a fault for each row that ``wrong`` selects and that has no fault yet."""
        newly_wrong = np.asarray(wrong, dtype=bool) & self.sound
        if newly_wrong.any():
            why_of_rows = np.broadcast_to(np.asarray(why, dtype=object), len(newly_wrong))
            self._why[newly_wrong] = why_of_rows[newly_wrong]

    @property
    def sound(self) -> NDArray[np.bool_]:
        """Mask of the rows without a fault."""
        return np.asarray(self._why == "", dtype=bool)

    def report(self) -> tuple[str, ...]:
        """Report the damaged lines on stderr, and return a sentence for each of them.

        The caller leaves out the rows that are not :attr:`sound`.

        Raises:
            UserError: if too many lines are damaged.
        """
        # 1. Find the first fault of each damaged line. Lines are counted instead of rows, because
        #    several rows may come from one line. Sound rows of a damaged line are kept.
        fault_of: dict[int, str] = {}
        for line, fault in zip(
            self._lines[~self.sound].tolist(), self._why[~self.sound], strict=True
        ):
            fault_of.setdefault(line, fault)
        lines_with_sound_rows = set(self._lines[self.sound].tolist())
        damaged_count = len(fault_of)
        line_count = len(set(self._lines.tolist()))
        name = self._path.name
        sentences = tuple(
            f"{name} line {line} is damaged and was left out"
            f"{' in part' if line in lines_with_sound_rows else ''}: {fault}."
            for line, fault in sorted(fault_of.items())
        )
        # 2. Refuse the file if too many lines are damaged. One damaged line is always tolerated,
        #    unless the file has no other line.
        has_too_many = damaged_count > max(1, MOST_DAMAGED * line_count)
        if sentences and (has_too_many or damaged_count == line_count):
            line, fault = min(fault_of.items())
            if line_count == 1:
                extent = f"the only line below the header of {self._path} is damaged: {fault}"
            else:
                extent = (
                    f"{damaged_count:,} of {line_count:,} lines of {self._path} are damaged, such "
                    f"as line {line} ({fault})"
                )
            raise UserError(f"{extent}. {self._remedy}")
        # 3. Report the first lines one by one, and count the others.
        for sentence in sentences[:_NAMED]:
            _say_once(f"{self._path.parent}: {sentence}")
        if len(sentences) > _NAMED:
            unnamed = len(sentences) - _NAMED
            more = counted(unnamed, "more damaged line")
            verb = "was" if unnamed == 1 else "were"
            _say_once(f"{self._path.parent}: {more} of {name} {verb} left out.")
        return sentences


@dataclass(frozen=True)
class CsvTable:
    """Rows of a file, in the file's order, and their faults.

    The columns have the types of :data:`FRAME_TYPES`. A cell that does not fit the kind of its
    column is read as missing, and its row has a fault.
    """

    rows: pd.DataFrame
    faults: Faults

    def sound_rows(self) -> tuple[pd.DataFrame, tuple[str, ...]]:
        """Return the rows without a fault, and the sentences that :meth:`Faults.report` returns.

        Raises:
            UserError: if too many lines are damaged.
        """
        sentences = self.faults.report()
        rows = self.rows[self.faults.sound] if sentences else self.rows
        return rows.reset_index(drop=True), sentences


def read_csv(
    path: Path, kinds: Mapping[str, str], remedy: str, optional: Collection[str] = ()
) -> CsvTable:
    """Read a CSV table that this project wrote, and find the damaged lines.

    Args:
        path: path of the file.
        kinds: kind of each column to read: ``text``, ``whole`` (integers), ``real`` or ``flag``
            (true or false). Columns that are not in ``kinds`` are ignored.
        remedy: sentence that says what to do if the file is refused.
        optional: columns that a file may lack; their values are then missing.

    Raises:
        UserError: if the file cannot be read, or has an unsuitable header.
    """
    # 1. Read the lines, without the byte order mark that spreadsheets write. A carriage return ends
    #    a line only if a line feed follows. Elsewhere it is replaced by a space, because it would
    #    split a line in two.
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {remedy}") from None
    text = data.replace(b"\r\n", b"\n").replace(b"\r", b" ").decode("utf-8-sig", errors="replace")
    header, *lines = text.split("\n")
    # 2. Check the header.
    if not _is_well_quoted(header):
        raise UserError(f"the header of {path} has a misplaced quotation mark. {remedy}")
    names = header.split(",")
    if missing := [name for name in kinds if name not in names and name not in optional]:
        raise UserError(f"{path} has no column {missing[0]!r}. {remedy}")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path} has the column {repeated[0]!r} twice. {remedy}")
    # 3. Split the lines into cells, and convert each column. The header is line 1.
    numbered = [(number, line) for number, line in enumerate(lines, 2) if line]
    cells, complete = _split_cells(header, [line for _, line in numbered], kinds)
    faults = Faults(path, [number for number, _ in numbered], remedy)
    faults.record(~complete, "it is not UTF-8 text, or its cells do not match the header")
    columns = {}
    for name, kind in kinds.items():
        values, wrong = _convert(cells.get(name, [""] * len(numbered)), kind)
        faults.record(wrong, f"{name} is not {_KIND_WORDS.get(kind)}")
        columns[name] = values.astype(FRAME_TYPES[kind])
    return CsvTable(pd.DataFrame(columns), faults)


def _split_cells(
    header: str, lines: Sequence[str], columns: Iterable[str]
) -> tuple[dict[str, pa.Array], NDArray[np.bool_]]:
    """Return the cells of the given columns as text, and a mask of the lines that are complete.

    A line is incomplete if it has fewer or more cells than the header, a quotation that does not
    enclose a whole cell, or bytes that are not UTF-8. The cells of an incomplete line are returned
    as empty strings. Columns that the header lacks are left out. ``lines`` must not contain an
    empty line.
    """
    # 1. Leave out the lines that would confuse the parser.
    complete = np.array([_REPLACED not in line and _is_well_quoted(line) for line in lines], bool)
    kept = np.flatnonzero(complete).tolist()
    # 2. Parse the other lines. Arrow calls ``skip`` for each line with too few or too many cells.
    skipped: set[int] = set()

    def skip(row: Any) -> str:
        skipped.add(row.number - 2)  # Arrow counts rows from 1, including the header
        return "skip"

    names = [name for name in columns if name in header.split(",")]
    text = ("\n".join([header, *(lines[i] for i in kept)]) + "\n").encode()
    table = arrow_csv.read_csv(
        io.BytesIO(text),
        # Arrow fails if a line is longer than a block, so the whole text is one block.
        read_options=arrow_csv.ReadOptions(use_threads=False, block_size=len(text)),
        parse_options=arrow_csv.ParseOptions(invalid_row_handler=skip),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=names,
            strings_can_be_null=False,
        ),
    )
    complete[[kept[i] for i in skipped]] = False
    # 3. Put the cells back into the order of the lines. Each column gets an empty cell at its end,
    #    which is copied to the incomplete lines.
    positions = np.full(len(lines), len(table))
    positions[complete] = np.arange(len(table))
    cells = {}
    for name in names:
        column = table.column(name).combine_chunks()
        if not complete.all():
            column = pa.concat_arrays([column, pa.array([""])]).take(pa.array(positions))
        cells[name] = column
    return cells, complete


def _is_well_quoted(line: str) -> bool:
    """Return True if each quotation in a line of CSV encloses a whole cell."""
    if '"' not in line:
        return True
    try:
        # A strict reader raises an error if a quotation is not closed, or ends within a cell. In a
        # cell that does not begin with a quotation mark, quotation marks are text.
        next(csv.reader([line], strict=True))
    except csv.Error:
        return False
    return True


def _convert(cells: Sequence[str] | pa.Array, kind: str) -> tuple[pd.Series, NDArray[np.bool_]]:
    """Return a column's values, and a mask of the cells that are not of the column's kind.

    Such cells, and empty cells, become missing values, except in a column of text.
    """
    text = pa.array(cells, pa.string())
    wrong = np.zeros(len(text), dtype=bool)
    if kind == "text":
        return text.to_pandas(), wrong
    text = compute.if_else(compute.equal(text, ""), pa.scalar(None, pa.string()), text)
    # Most columns have no fault and are converted as a whole. In other columns, each distinct cell
    # is tried separately.
    if not _is_castable(text, kind):
        castable = [
            cell
            for cell in compute.unique(text).to_pylist()
            if _is_castable(pa.array([cell], pa.string()), kind)
        ]
        is_castable = compute.is_in(text, value_set=pa.array(castable, pa.string()))
        wrong = ~is_castable.to_numpy(zero_copy_only=False)
        text = compute.if_else(is_castable, text, pa.scalar(None, pa.string()))
    return text.cast(_ARROW_TYPES[kind]).to_pandas(), wrong


def _is_castable(text: pa.Array, kind: str) -> bool:
    """Return True if every cell is missing or can be converted to the given kind."""
    if kind == "flag":
        is_flag = compute.is_in(text, value_set=pa.array(["true", "false", None], pa.string()))
        return bool(compute.all(is_flag).as_py())
    try:
        text.cast(_ARROW_TYPES[kind])
    except pa.ArrowInvalid:
        return False
    return True


@functools.cache
def _say_once(sentence: str) -> None:
    note(sentence)
