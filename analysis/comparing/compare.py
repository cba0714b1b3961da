"""Compare two recordings of one machine: did a new driver, library or kernel change anything?

Two cases match if all columns that identify a case, such as its sizes, implementation and config,
are equal. A config that a hand-written kernel chose itself may differ.

A ratio is the new median time over the old one. Its interval has a confidence of 99%, because a
comparison judges hundreds of cases and should raise few false alarms. The interval combines the
intervals of both medians with the scatter of medians between processes
(:mod:`analysis.recordings.repetition`).

The verdict is the first of these that applies:

- ``slower`` or ``faster`` if the interval excludes 1 and the larger median exceeds the smaller one
  by more than 1%;
- ``same`` if the whole interval is between 1/1.03 and 1.03;
- ``ambiguous`` otherwise, for example with too few samples for an interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np
import pandas as pd

from analysis.recordings.load import Recording, workloads_of
from analysis.recordings.named_cases import keyed
from analysis.recordings.repetition import between_processes
from analysis.units import microseconds
from kernels.common.counts import counted
from kernels.common.errors import UserError
from sweeps.schema import IDENTITY, problem_of
from sweeps.timing.statistics import Z95

VERDICTS = ("slower", "faster", "same", "ambiguous")

_Z99 = 2.575829  # standard errors to either side in a 99% interval of normal values
_MIN_CHANGE = 0.01  # smallest change of a median that counts as slower or faster
_SAME = 0.03  # largest change that counts as the same
_TIMES = ["time_us", "time_lo_us", "time_hi_us"]
_MAX_LISTED = 20  # cases of each kind that the printed comparison lists


@dataclass(frozen=True)
class Comparison:
    """Cases that have times in both recordings, and cases that have a time in only one of them.

    Attributes:
        table: one row per case that has both times. In addition to the columns that identify the
            case, the table has the columns problem, class, old_us, new_us, ratio, ratio_lo,
            ratio_hi and verdict. ``config`` is the config in the new recording.
        lost: cases that have a time in the old recording and failed in the new one, with the
            reason.
        only_old: number of cases that have a time in the old recording and no row in the new one.
        only_new: number of cases that have a time only in the new recording.
    """

    old: Recording
    new: Recording
    table: pd.DataFrame
    lost: pd.DataFrame
    only_old: int
    only_new: int

    def counts(self, rows: pd.DataFrame | None = None) -> dict[str, int]:
        """Return the number of cases with each verdict, in the given rows or in the whole table."""
        verdicts = (self.table if rows is None else rows)["verdict"]
        return {verdict: int((verdicts == verdict).sum()) for verdict in VERDICTS}

    @property
    def software(self) -> dict[str, tuple[str | None, str | None]]:
        """Old and new version of each piece of software that changed; a missing version is None."""
        old, new = self.old.run["software"], self.new.run["software"]
        changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        return {name: (old.get(name), new.get(name)) for name in changed}


def compare(old: Recording, new: Recording) -> Comparison:
    """Match the timed cases of two recordings, and judge each pair.

    Raises:
        UserError: if the recordings come from different machines, or have no timed case in common.
    """
    if old.machine.slug != new.machine.slug:
        raise UserError(
            f"{old.folder} is from {old.machine.slug}, but {new.folder} is from "
            f"{new.machine.slug}; give two recordings of one machine."
        )
    # 1. Match the cases by their identity, with the column ``choice`` in place of the config.
    #    keyed() also needs the failed cases: a kernel for which several configs were recorded did
    #    not choose its config itself.
    identity = [name for name in IDENTITY if name != "config"]
    keys = [*identity, "choice"]
    old_rows = keyed(old.rows)
    new_rows = keyed(new.rows)
    before = old_rows[old_rows["status"] == "ok"]
    after = new_rows[new_rows["status"] == "ok"]
    pairs = before.merge(after[[*keys, "config", *_TIMES]], on=keys, suffixes=("_old", "_new"))
    if pairs.empty:
        raise UserError(
            f"{old.folder} and {new.folder} have no timed case in common; compare recordings of "
            "the same sweeps."
        )
    # 2. Compute the ratios and their intervals, and judge them.
    problems = workloads_of(pairs)
    deviations = [*between_processes(old).values(), *between_processes(new).values()]
    below, above = _distances_to_ends(pairs, deviations)
    ratio = pairs["time_us_new"] / pairs["time_us_old"]
    table = pairs[identity].assign(
        config=pairs["config_new"],
        problem=problems,
        **{"class": [problem.shape_class for problem in problems]},
        old_us=pairs["time_us_old"],
        new_us=pairs["time_us_new"],
        ratio=ratio,
        ratio_lo=ratio * np.exp(-below),
        ratio_hi=ratio * np.exp(above),
    )
    table["verdict"] = ratio_verdicts(table["ratio"], table["ratio_lo"], table["ratio_hi"])
    # 3. Collect the cases that failed in the new recording, and count the cases that only one of
    #    the recordings has.
    failed = new_rows[new_rows["status"] != "ok"][[*keys, "config", "status", "message"]]
    lost = before[keys].merge(failed, on=keys).drop(columns="choice")
    return Comparison(
        old=old,
        new=new,
        table=table,
        lost=lost,
        only_old=len(before) - len(pairs) - len(lost),
        only_new=len(after) - len(pairs),
    )


def _distances_to_ends(
    pairs: pd.DataFrame, deviations: Sequence[float]
) -> tuple[pd.Series, pd.Series]:
    """Return the distances from each log ratio to the lower and the upper end of its 99% interval.

    ``deviations`` has each run's standard deviation of log medians between processes.
    """

    def error(side: str, end: str) -> pd.Series:
        """Return the standard error of each log median, from one end of its 95% interval."""
        return np.log(pairs[f"time_{end}_us_{side}"] / pairs[f"time_us_{side}"]).abs() / Z95

    # The recordings come from two processes, so the difference between processes counts once. The
    # largest deviation of any run is used for all cases.
    deviation = max(deviations, default=0.0)
    # The ratio, new over old, is lower if the new time is lower or the old one is higher. The three
    # errors are independent, so their variances are added.
    below = _Z99 * np.sqrt(error("new", "lo") ** 2 + error("old", "hi") ** 2 + deviation**2)
    above = _Z99 * np.sqrt(error("new", "hi") ** 2 + error("old", "lo") ** 2 + deviation**2)
    return below, above


def ratio_verdicts(ratio: pd.Series, lo: pd.Series, hi: pd.Series) -> np.ndarray:
    """Judge each ratio and its interval by the rules in the docstring of this module.

    A ratio without a known interval is ``ambiguous``.
    """
    # The first condition that is true decides. Comparisons with NaN are False.
    is_slower = (lo > 1) & (ratio > 1 + _MIN_CHANGE)
    is_faster = (hi < 1) & (ratio < 1 / (1 + _MIN_CHANGE))
    is_same = (lo > 1 / (1 + _SAME)) & (hi < 1 + _SAME)
    return np.select([is_slower, is_faster, is_same], ["slower", "faster", "same"], "ambiguous")


def summarise(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one row per operation, class, dtype and implementation, and one for all cases.

    ``ratio`` is the geometric mean of the ratios, and ``worst`` is the largest ratio. In the row
    for all cases, ``op``, ``class``, ``dtype`` and ``implementation`` are ``all``.
    """
    table = comparison.table
    columns = ["op", "class", "dtype", "implementation"]
    groups = list(table.groupby(columns, sort=True))
    groups.append((("all",) * len(columns), table))
    summary = []
    for key, rows in groups:
        row = {
            **dict(zip(columns, key, strict=True)),
            "cases": len(rows),
            **comparison.counts(rows),
            "ratio": geometric_mean(rows["ratio"]),
            "worst": float(rows["ratio"].max()),
        }
        summary.append(row)
    return summary


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the whole comparison for JSON; unknown values are None."""
    columns = [*IDENTITY, "old_us", "new_us", "ratio", "ratio_lo", "ratio_hi", "verdict"]
    cases = comparison.table[columns].astype(object)
    lost = comparison.lost.astype(object)
    return {
        "machine": comparison.new.machine.slug,
        "old": comparison.old.run["run"],
        "new": comparison.new.run["run"],
        "software": {name: list(pair) for name, pair in comparison.software.items()},
        "health": [side.health.get("verdict") for side in (comparison.old, comparison.new)],
        "counts": comparison.counts(),
        "lost": lost.where(lost.notna(), None).to_dict("records"),
        "only_old": comparison.only_old,
        "only_new": comparison.only_new,
        "summary": summarise(comparison),
        "cases": cases.where(cases.notna(), None).to_dict("records"),
    }


def comparison_text(comparison: Comparison) -> str:
    """Return text for people: versions, counts, the largest changes and a table of classes."""
    counts = comparison.counts()
    table = comparison.table
    versions = [
        f"{name} {old or '–'} → {new or '–'}" for name, (old, new) in comparison.software.items()
    ]
    # 1. Describe the recordings, and count the cases. Imported tables have no name of a run.
    old_name = comparison.old.run["run"] or str(comparison.old.folder)
    new_name = comparison.new.run["run"] or str(comparison.new.folder)
    lines = [
        f"{comparison.new.machine.name}: {old_name} → {new_name}",
        f"versions: {', '.join(versions) or 'the same'}",
        f"health: {comparison.old.health.get('verdict', 'not judged')} → "
        f"{comparison.new.health.get('verdict', 'not judged')}",
        f"{counted(len(table), 'case')} timed in both recordings: "
        + ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items()),
        f"geometric mean of the ratios new/old: {geometric_mean(table['ratio']):.3f}",
        "timed in the old recording, missing from the new one: "
        f"{counted(comparison.only_old, 'case')}",
        f"timed only in the new recording: {counted(comparison.only_new, 'case')}",
        f"no longer timed: {counted(len(comparison.lost), 'case')}",
    ]
    # 2. List the most changed cases, and those that are no longer timed.
    for verdict, ascending in (("slower", False), ("faster", True)):
        rows = table[table["verdict"] == verdict].sort_values("ratio", ascending=ascending)
        if len(rows):
            lines += ["", f"{verdict}: {len(rows):,}"]
        lines += [_case_line(row) for row in rows.head(_MAX_LISTED).to_dict("records")]
    lines += [
        (
            f"no longer timed: {problem_of(row)} {row['implementation']}"
            f"{_config_suffix(row)} ({row['status']}: {row['message']})"
        )
        for row in comparison.lost.head(_MAX_LISTED).to_dict("records")
    ]
    # 3. Summarise each class in a table.
    lines += [
        "",
        f"{'class':24}{'dtype':6}{'by':20}{'cases':>6}{'slower':>8}{'faster':>8}"
        f"{'same':>6}{'ratio':>8}{'worst':>8}",
    ]
    for row in summarise(comparison):
        lines.append(
            f"{row['class']:24}{row['dtype']:6}{row['implementation']:20}{row['cases']:6}"
            f"{row['slower']:8}{row['faster']:8}{row['same']:6}{row['ratio']:8.3f}"
            f"{row['worst']:8.3f}"
        )
    return "\n".join(lines)


def _case_line(row: dict[Any, Any]) -> str:
    return (
        f"  {row['ratio']:.3f} [{row['ratio_lo']:.3f}, {row['ratio_hi']:.3f}]  "
        f"{microseconds(row['old_us'])} → {microseconds(row['new_us'])} µs  {row['problem']} "
        f"{row['implementation']}{_config_suffix(row)}"
    )


def _config_suffix(row: dict[Any, Any]) -> str:
    return f" {row['config']}" if row["config"] else ""
