"""Judge how the times of named cases changed, by the rules of :mod:`analysis.comparing.compare`.

The results may come from several processes of each version, and from other benchmark programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from analysis.comparing.changes import CaseChanges
from analysis.comparing.compare import VERDICTS, ratio_verdicts
from analysis.comparing.gate import LARGEST_LOG, judge_shift
from analysis.units import microseconds, signed_percent
from kernels.common.counts import counted

_OUTSIDE = 0.005  # probability on each side of a 99% interval, which `compare` uses as well
_MAX_LISTED = 20  # cases of each kind that the printed comparison lists


@dataclass(frozen=True)
class NamedComparison:
    """Verdict on every case that has a time in all results.

    Attributes:
        changes: the estimates on which the verdicts are based.
        table: name, old_us, new_us, ratio, ratio_lo, ratio_hi and verdict of each case. If the
            common shift of all cases was estimated and is not significant, the ratios leave it out.
        lost: reason why each lost case has no time in the new results, by the case's name.
    """

    changes: CaseChanges
    table: pd.DataFrame
    lost: dict[str, str]

    def counts(self) -> dict[str, int]:
        """Return the number of cases with each verdict."""
        return {verdict: int((self.table["verdict"] == verdict).sum()) for verdict in VERDICTS}


def compare_by_name(changes: CaseChanges, lost: dict[str, str]) -> NamedComparison:
    """Judge each case by the ratio of its times, new over old, and by the ratio's 99% interval."""
    # A significant common shift counts as a change. The limit matters only for the verdict on the
    # shift, which is not used here.
    _, counted_shift = judge_shift(changes.shift, limit=0.0)
    # Absurd times may have a ratio that is too large for a double.
    log_ratio = np.minimum(changes.deviation + counted_shift, LARGEST_LOG)
    half_width = stats.t.isf(_OUTSIDE, changes.freedom) * changes.error
    table = pd.DataFrame(
        {
            "name": changes.names,
            "old_us": np.exp(changes.old) * 1e6,
            "new_us": np.exp(changes.new) * 1e6,
            "ratio": np.exp(log_ratio),
            "ratio_lo": np.exp(log_ratio - half_width),
            # With few degrees of freedom, the upper end may be too large for a double.
            "ratio_hi": np.exp(np.minimum(log_ratio + half_width, LARGEST_LOG)),
        }
    )
    verdicts = ratio_verdicts(table["ratio"], table["ratio_lo"], table["ratio_hi"])
    return NamedComparison(changes, table.assign(verdict=verdicts), lost)


def named_json(comparison: NamedComparison) -> dict[str, Any]:
    """Return the whole comparison for JSON; unknown values are None.

    ``shift`` is the common shift as a ratio, new over old.
    """
    shift = comparison.changes.shift
    cases = comparison.table.astype(object)
    return {
        "counts": comparison.counts(),
        "shift": None if shift is None else math.exp(shift.log),
        "processes": list(comparison.changes.processes),
        "lost": [{"name": name, "reason": why} for name, why in comparison.lost.items()],
        "cases": cases.where(cases.notna(), None).to_dict("records"),
    }


def named_text(comparison: NamedComparison) -> str:
    """Return text for people: counts, the common shift, and lists of cases.

    Slower, faster, ambiguous and lost cases have separate lists of at most 20 cases each. The
    common shift is left out if it was not estimated.
    """
    table, shift = comparison.table, comparison.changes.shift
    counts = ", ".join(f"{count:,} {verdict}" for verdict, count in comparison.counts().items())
    lines = [f"{counted(len(table), 'case')} compared: {counts}"]
    if shift is not None:
        lines.append(f"common shift of all cases: {signed_percent(math.expm1(shift.log))}")
    for verdict, ascending in (("slower", False), ("faster", True), ("ambiguous", False)):
        rows = table[table["verdict"] == verdict].sort_values("ratio", ascending=ascending)
        if len(rows):
            lines += ["", f"{verdict}: {len(rows):,}"]
        lines += [_case_line(row) for row in rows.head(_MAX_LISTED).to_dict("records")]
    if comparison.lost:
        lines += ["", f"no longer timed: {len(comparison.lost):,}"]
        listed = list(comparison.lost.items())[:_MAX_LISTED]
        lines += [f"  {name} ({why})" for name, why in listed]
    return "\n".join(lines)


def _case_line(row: Mapping[Any, Any]) -> str:
    interval = ""
    if not math.isnan(row["ratio_lo"]):
        interval = f" [{row['ratio_lo']:.3f}, {row['ratio_hi']:.3f}]"
    old, new = microseconds(row["old_us"]), microseconds(row["new_us"])
    return f"  {row['ratio']:.3f}{interval}  {old} → {new} µs  {row['name']}"
