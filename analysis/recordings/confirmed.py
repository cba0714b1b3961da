"""Read each run's confirmed.csv: pairs of cases, re-timed to confirm which case is faster."""

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

_ASSUMED = 0.01  # assumed standard deviation of a log time between processes
_AS_CASES = 2  # number of re-timed cases that the assumption counts as
_LEAST_BLOCKS = 4  # fewest blocks that a process needs, because their mean leaves out both extremes
_REMEDY = (
    f"Move the file away; then run {target('sweep', 'recommend --measure')} to re-time the pairs."
)


@dataclass(frozen=True)
class Pair:
    """Two contenders, each a problem and its implementation, timed in blocks in the order A B B A.

    The times come from new processes. Earlier samples led to the choice of one contender as the
    faster one. They are not used, because they make the chosen contender look faster than it is.

    Attributes:
        log_ratios: one tuple for each process, with one value for each block of the process. A
            value is the logarithm of a ratio: the time of ``before`` over the time of ``after``.
        between: standard deviation of a log time between processes, without the change that all
            cases share.
        cases: number of cases that ``between`` is based on; an assumed variance counts as two.
    """

    before: Contender
    after: Contender
    log_ratios: tuple[tuple[float, ...], ...]
    between: float
    cases: int = _AS_CASES


def confirmed_pairs(recording: Recording) -> list[Pair]:
    """Return the pairs of all runs of a recording, each from the best run that re-timed it.

    Pairs with a hand-written kernel come only from the run in the recording's folder.

    Raises:
        UserError: if the confirmed.csv in the recording's folder cannot be used.
    """
    pairs: dict[tuple[Contender, Contender], Pair] = {}
    for part in recording.parts:
        is_own = part.folder == recording.folder
        try:
            ratios_by_pair = _read_ratios(part)
        except UserError:
            if is_own:
                raise
            # The pairs of another run are optional, so its damaged file is ignored.
            continue
        between, between_count = _between(part.run.get("repeats"))
        for (before, after), processes in ratios_by_pair.items():
            # Hand-written kernels change with the checkout, so those of other runs do not count.
            implementations = {implementation for _, implementation in (before, after)}
            if is_own or HAND_WRITTEN.keys().isdisjoint(implementations):
                pair = Pair(before, after, tuple(processes), between, between_count)
                # The runs are sorted, the best first, so the first pair is kept.
                pairs.setdefault((before, after), pair)
    return list(pairs.values())


def _between(repeats: Mapping[str, Any] | None) -> tuple[float, int]:
    """Return the ``between`` and ``cases`` of a run's pairs, as :class:`Pair` describes them.

    The measured variance is averaged with an assumed variance, which counts as much as two cases.
    If ``repeats`` is None, no variance was measured, and the assumed variance is used unchanged.
    """
    # Each variance is weighted by its number of cases.
    cases = _AS_CASES
    weighted_variances = _AS_CASES * _ASSUMED**2
    if repeats:
        # Older recordings only have ``between``.
        measured = repeats.get("between_cases", repeats["between"])
        cases += repeats["cases"]
        weighted_variances += repeats["cases"] * measured**2
    return math.sqrt(weighted_variances / cases), cases


def _read_ratios(part: SourceRun) -> dict[tuple[Contender, Contender], list[tuple[float, ...]]]:
    """Read each pair's log ratios, one tuple per process, from a run's confirmed.csv.

    Damaged lines are left out, and so are pairs with only one undamaged line. The result is empty
    if the file does not exist.

    Raises:
        UserError: if the file or the plan cannot be used.
    """
    # 1. Read the lines, which name cases by their ids in the run's plan.
    path = part.folder / "confirmed.csv"
    if not path.exists():
        return {}
    try:
        planned = {row["id"]: row for row in part.run["plan"]["cases"]}
    except (KeyError, TypeError):
        raise UserError(
            f"{path} identifies cases by ids, but a case in the run's plan has no usable id. "
            f"{_REMEDY}"
        ) from None
    table = read_csv(path, dict.fromkeys(CONFIRMED_COLUMNS, "text"), _REMEDY)
    parsed_lines = [_parse_pair(row, planned) for row in table.rows.to_dict("records")]
    # 2. Report damaged lines, and leave them out.
    table.faults.record(
        [line is None for line in parsed_lines],
        "case and against must be ids of planned cases, and log_ratios must have at least "
        f"{_LEAST_BLOCKS} numbers, all of them finite",
    )
    table.faults.report()
    # 3. Collect the processes of each pair. A claim must rest on more than one process.
    pairs: dict[tuple[Contender, Contender], list[tuple[float, ...]]] = {}
    for line, is_sound in zip(parsed_lines, table.faults.sound, strict=True):
        if line is not None and is_sound:
            contenders, log_ratios = line
            pairs.setdefault(contenders, []).append(log_ratios)
    return {contenders: processes for contenders, processes in pairs.items() if len(processes) > 1}


def _parse_pair(
    row: Mapping[Any, Any], planned: Mapping[str, Mapping[str, object]]
) -> tuple[tuple[Contender, Contender], tuple[float, ...]] | None:
    """Return a line's contenders and its blocks' log ratios, or None if the line is damaged.

    ``planned`` has the columns of each planned case, by the case's id.
    """
    try:
        before = _parse_contender(planned[row["case"]])
        after = _parse_contender(planned[row["against"]])
        log_ratios = tuple(float(text) for text in row["log_ratios"].split())
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    if len(log_ratios) < _LEAST_BLOCKS or not all(map(math.isfinite, log_ratios)):
        return None
    return (before, after), log_ratios


def _parse_contender(row: Mapping[str, object]) -> Contender:
    case = Case.from_columns(row)
    return as_problem(case.problem), case.implementation
