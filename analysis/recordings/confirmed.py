"""Pairs of cases that were re-timed after one of them was chosen, from each run's confirmed.csv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.recordings.csv_file import read_csv
from analysis.recordings.load import Recording, SourceRun
from kernels.common.errors import UserError
from kernels.common.program import target
from kernels.config import HAND_WRITTEN
from kernels.operation import as_problem
from sweeps.cases.case import Case, Contender
from sweeps.store import CONFIRMED_COLUMNS

_ASSUMED = 0.01  # the standard deviation of a log time between processes if none was measured
_LEAST_BLOCKS = 4  # the fewest blocks of a process; their mean leaves out both extremes
_REMEDY = f"Move it away; {target('sweep', 'confirm')} measures the pairs again."
_AS_CASES = 2  # the number of re-timed cases that the assumption counts as


@dataclass(frozen=True)
class Pair:
    """Two contenders, each a problem and its implementation, timed in alternation (A B B A).

    The processes that timed them had timed neither of them before.

    Attributes:
        before: the first contender.
        after: the second contender.
        log_ratios: logarithms of the first contender's time over the second's, one tuple for each
            process, with one value for each of its blocks.
        between: standard deviation by which a log time differs between processes, as the run found
            by timing other cases again.
        cases: number of those cases.
    """

    before: Contender
    after: Contender
    log_ratios: tuple[tuple[float, ...], ...]
    between: float
    cases: int = _AS_CASES


def confirmed_pairs(recording: Recording) -> list[Pair]:
    """Return the pairs of all runs of a recording; the best run decides if several have a pair.

    Raises:
        UserError: if a file is not what a run writes.
    """
    pairs: dict[tuple[Contender, Contender], Pair] = {}
    for part in recording.parts:
        is_own = part.folder == recording.folder
        try:
            ratios_by_pair = _read_ratios(part)
        except UserError:
            if is_own:
                raise
            continue  # an older run's file may be damaged, because other runs make up for it
        between = _between(part.run.get("repeats"))
        for (before, after), processes in ratios_by_pair.items():
            # Hand-written kernels change with the checkout, so those of other runs do not count.
            implementations = {implementation for _, implementation in (before, after)}
            if is_own or not implementations & HAND_WRITTEN.keys():
                pairs.setdefault((before, after), Pair(before, after, tuple(processes), *between))
    return list(pairs.values())


def _between(repeats: Mapping[str, Any] | None) -> tuple[float, int]:
    """Return how much a log time differs between processes beyond the change that all cases share.

    The measured value is combined with an assumed one, which matters where few cases were timed
    again.

    Returns:
        The standard deviation, and the number of cases that it is known from.
    """
    cases, squares = _AS_CASES, _AS_CASES * _ASSUMED**2
    if repeats:
        cases += repeats["cases"]
        squares += repeats["cases"] * repeats.get("between_cases", repeats["between"]) ** 2
    return math.sqrt(squares / cases), cases


def _read_ratios(part: SourceRun) -> dict[tuple[Contender, Contender], list[tuple[float, ...]]]:
    """Read a run's confirmed.csv, which has one line for each pair and process.

    Returns:
        For each pair, the log ratios of each process that timed it. Pairs that only one process
        timed are left out. Without a file, the result is empty.
    """
    # 1. Read the lines. They name cases by their ids in the run's plan.
    path = part.folder / "confirmed.csv"
    if not path.exists():
        return {}
    try:
        planned = {row["id"]: row for row in part.run["plan"]["cases"]}
    except (KeyError, TypeError):
        raise UserError(f"the plan of {path} cannot be read. {_REMEDY}") from None
    table = read_csv(path, dict.fromkeys(CONFIRMED_COLUMNS, "text"), _REMEDY)
    parsed = [_pair(row, planned) for row in table.rows.to_dict("records")]
    # 2. Report damaged lines, and leave them out.
    table.faults.tell(
        [line is None for line in parsed], "its two cases or their ratios cannot be read"
    )
    table.faults.leave_out()
    # 3. Collect the processes of each pair. A claim must rest on more than one process.
    pairs: dict[tuple[Contender, Contender], list[tuple[float, ...]]] = {}
    for line, is_sound in zip(parsed, table.faults.sound, strict=True):
        if line is not None and is_sound:
            contenders, log_ratios = line
            pairs.setdefault(contenders, []).append(log_ratios)
    return {contenders: processes for contenders, processes in pairs.items() if len(processes) > 1}


def _pair(
    row: Mapping[Any, Any], planned: Mapping[str, Mapping[str, object]]
) -> tuple[tuple[Contender, Contender], tuple[float, ...]] | None:
    """Parse a line: its contenders, and the log ratio of each block; None if it is damaged."""
    try:
        contenders = _contender(planned[row["case"]]), _contender(planned[row["against"]])
        ratios = tuple(float(text) for text in row["log_ratios"].split())
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    are_usable = len(ratios) >= _LEAST_BLOCKS and all(map(math.isfinite, ratios))
    return (contenders, ratios) if are_usable else None


def _contender(row: Mapping[str, object]) -> Contender:
    """Return the problem and the implementation of a case, given its columns."""
    case = Case.from_columns(row)
    return as_problem(case.problem), case.implementation
