"""Compare two recordings of one machine: did a new driver, library or kernel change anything?

Cases match if they have the same problem, implementation and config. A config that a hand-written
kernel chose matches the one that its other version chose. A ratio is the new time over the old one.
Its interval has 99% confidence, because a comparison judges hundreds of cases. It combines the
intervals of both medians with the difference of medians between processes
(:mod:`analysis.recordings.repetition`).

The verdicts are:

- ``slower`` or ``faster`` if the interval excludes 1 and the medians differ by more than 1%;
- ``same`` if the whole interval is within ±3%;
- ``ambiguous`` in all other cases, and where a case has too few samples for an interval.

A test plants changes in simulated samples: at most 1% of the unchanged cases raise an alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np
import pandas as pd

from analysis.recordings.load import Recording, workloads_of
from analysis.recordings.named_cases import keyed
from analysis.recordings.repetition import between_processes
from kernels.common.errors import UserError
from sweeps.schema import IDENTITY, problem_of
from sweeps.timing.statistics import Z95

VERDICTS = ("slower", "faster", "same", "ambiguous")

_Z99 = 2.575829  # like Z95, for the 99% interval
_MIN_CHANGE = 0.01
_SAME = 0.03
_TIMES = ["time_us", "time_lo_us", "time_hi_us"]
_MAX_LISTED = 20  # cases of each kind that the text lists


@dataclass(frozen=True)
class Comparison:
    """Cases that both recordings timed, and those that only one of them timed.

    ``table`` has the identity of each case, problem, class, old_us, new_us, ratio, ratio_lo,
    ratio_hi and verdict. ``lost`` has the cases that the old recording timed and the new one failed
    to time, with the reason.
    """

    old: Recording
    new: Recording
    table: pd.DataFrame
    lost: pd.DataFrame
    only_old: int
    only_new: int

    def counts(self, rows: pd.DataFrame | None = None) -> dict[str, int]:
        """Return the number of cases with each verdict."""
        verdicts = (self.table if rows is None else rows)["verdict"]
        return {verdict: int((verdicts == verdict).sum()) for verdict in VERDICTS}

    @property
    def software(self) -> dict[str, tuple[str | None, str | None]]:
        """Versions that differ, as (old, new); None if a recording lacks one."""
        old, new = self.old.run["software"], self.new.run["software"]
        names = sorted({*old, *new})
        return {n: (old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)}


def compare(old: Recording, new: Recording) -> Comparison:
    """Match the cases of two recordings, and judge each of them.

    Raises:
        UserError: if the recordings are of different machines, or share no case.
    """
    if old.machine.slug != new.machine.slug:
        raise UserError(
            f"{old.folder} is of {old.machine.slug} and {new.folder} of {new.machine.slug}; give "
            "two recordings of one machine."
        )
    keys = [*(name for name in IDENTITY if name != "config"), "choice"]
    before = keyed(old.ok)
    after = keyed(new.ok)
    pairs = before.merge(after[[*keys, "config", *_TIMES]], on=keys, suffixes=("_old", "_new"))
    if pairs.empty:
        raise UserError(f"{old.folder} and {new.folder} have no timed case in common.")
    problems = workloads_of(pairs)
    below, above = _reaches(pairs, [between_processes(r) for r in (old, new)])
    ratio = pairs["time_us_new"] / pairs["time_us_old"]
    table = pairs[keys[:-1]].assign(
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
    failed = keyed(new.rows[new.rows["status"] != "ok"])[[*keys, "config", "status", "message"]]
    lost = before[keys].merge(failed, on=keys).drop(columns="choice")
    return Comparison(
        old, new, table, lost, len(before) - len(pairs) - len(lost), len(after) - len(pairs)
    )


def _reaches(
    pairs: pd.DataFrame, between: Sequence[Mapping[str, float]]
) -> tuple[pd.Series, pd.Series]:
    """Return how far the intervals of log ratios reach below and above.

    They are NaN where a median has no interval.
    """
    halves = {
        (which, end): np.log(pairs[f"time_{end}_us_{which}"] / pairs[f"time_us_{which}"]).abs()
        / Z95
        for which in ("old", "new")
        for end in ("lo", "hi")
    }
    # A ratio of one case in two processes contains the difference between processes once.
    apart = max((value for part in between for value in part.values()), default=0.0)
    below, above = (
        _Z99 * np.sqrt(halves["new", one] ** 2 + halves["old", other] ** 2 + apart**2)
        for one, other in (("lo", "hi"), ("hi", "lo"))
    )
    return below, above


def ratio_verdicts(ratio: pd.Series, lo: pd.Series, hi: pd.Series) -> np.ndarray:
    """Return the verdict on each ratio and its interval; intervals with NaN ends are ambiguous."""
    return np.select(
        [
            (lo > 1) & (ratio > 1 + _MIN_CHANGE),
            (hi < 1) & (ratio < 1 / (1 + _MIN_CHANGE)),
            (lo > 1 / (1 + _SAME)) & (hi < 1 + _SAME),
        ],
        VERDICTS[:3],
        VERDICTS[3],
    )


def summarise(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one row per class of shape, dtype and implementation, and one for all of them."""
    table = comparison.table
    groups = table.groupby(["op", "class", "dtype", "implementation"], sort=True)
    parts = [
        (dict(zip(("op", "class", "dtype", "implementation"), key, strict=True)), rows)
        for key, rows in groups
    ]
    every = dict.fromkeys(("op", "class", "dtype", "implementation"), "all")
    return [
        {
            **names,
            "cases": len(rows),
            **comparison.counts(rows),
            "ratio": geometric_mean(rows["ratio"]),
            "worst": float(rows["ratio"].max()),
        }
        for names, rows in [*parts, (every, table)]
    ]


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return everything for JSON: summary, counts, and each case by its identity."""
    columns = [*IDENTITY, "old_us", "new_us", "ratio", "ratio_lo", "ratio_hi", "verdict"]
    cases = comparison.table[columns].astype(object)
    lost = comparison.lost.astype(object)
    return {
        "machine": comparison.new.machine.slug,
        "old": comparison.old.run["run"],
        "new": comparison.new.run["run"],
        "software": {name: list(pair) for name, pair in comparison.software.items()},
        "health": [r.health.get("verdict") for r in (comparison.old, comparison.new)],
        "counts": comparison.counts(),
        "lost": lost.where(lost.notna(), None).to_dict("records"),
        "only_old": comparison.only_old,
        "only_new": comparison.only_new,
        "summary": summarise(comparison),
        "cases": cases.where(cases.notna(), None).to_dict("records"),
    }


def comparison_text(comparison: Comparison) -> str:
    """Return a text of changed versions, counts, the most changed cases, and classes."""
    counts = comparison.counts()
    table = comparison.table
    versions = [f"{n} {a or '–'} → {b or '–'}" for n, (a, b) in comparison.software.items()]
    lines = [
        f"{comparison.new.machine.name}: {comparison.old.run['run']} → {comparison.new.run['run']}",
        f"versions: {', '.join(versions) or 'the same'}",
        f"health: {comparison.old.health.get('verdict', 'not judged')} → "
        f"{comparison.new.health.get('verdict', 'not judged')}",
        f"{len(table)} cases in both: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + f"; geometric mean of the ratios {geometric_mean(table['ratio']):.3f}",
        f"only in the old: {comparison.only_old}, only in the new: {comparison.only_new}, "
        f"without a time now: {len(comparison.lost)}",
    ]
    for verdict, ascending in (("slower", False), ("faster", True)):
        rows = table[table["verdict"] == verdict].sort_values("ratio", ascending=ascending)
        lines += ["", f"{verdict}: {len(rows)}"] if len(rows) else []
        lines += [_case(row) for row in rows.head(_MAX_LISTED).to_dict("records")]
    lines += [
        (
            f"without a time now: {problem_of(row)} {row['implementation']} {row['config']} "
            f"({row['status']}: {row['message']})"
        )
        for row in comparison.lost.head(_MAX_LISTED).to_dict("records")
    ]
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


def _case(row: dict[Any, Any]) -> str:
    config = f" {row['config']}" if row["config"] else ""
    return (
        f"  {row['ratio']:.3f} [{row['ratio_lo']:.3f}, {row['ratio_hi']:.3f}]  "
        f"{row['old_us']:.2f} → {row['new_us']:.2f} µs  {row['problem']} "
        f"{row['implementation']}{config}"
    )
