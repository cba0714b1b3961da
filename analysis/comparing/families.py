"""Compare hand-written kernels with the vendor library, by class of shape, from one recording.

A ratio is the vendor library's time over the kernel's time, so it is above 1 if the kernel is
faster. The vendor library's time is the shortest that was measured, with or without its autotuner.
The kernel's time is measured with the config that the time model ranks first, without a tuning run.
If all candidate configs of a shape were tried, the config ranked first is also compared with the
fastest candidate.
"""

from __future__ import annotations

from collections import Counter
from statistics import geometric_mean
from typing import Any

import numpy as np
import pandas as pd

from analysis.markdown import plain, table_row
from analysis.recordings.load import Recording, bursts, problems_of
from analysis.recordings.repetition import steady_ratio, with_steady_times
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import target
from kernels.config import HAND_WRITTEN
from kernels.operation import as_problem
from kernels.problem import TIMED_DTYPES, Gemm, Problem
from sweeps.schema import problem_of
from sweeps.store import write_json, write_whole

BEST = "best of all"
"""Family name under which the fastest kernel of each shape is listed."""

CLOSE = 0.9
"""Smallest ratio at which a kernel counts as nearly as fast as the vendor library."""

_SEARCHES = ("candidates", "candidates-conv")  # sweeps that time every config of a kernel
_NOT_CHOSEN = (*_SEARCHES, "warp-specialisation")  # sweeps with configs not chosen by the kernel
_TIMES = ["time_us", "steady_log", "steady_error"]


def compare_families(recording: Recording) -> pd.DataFrame:
    """Compare each family of hand-written kernels with the vendor library, shape by shape.

    Returns:
        One row per shape and family, and one per shape for :data:`BEST`. The columns are problem,
        op, class, dtype, family, config, library_us, time_us, ratio, ratio_lo, ratio_hi,
        best_config and found. The interval from ratio_lo to ratio_hi contains the ratio of a
        repeated recording with 95% probability; unknown ends are NaN. ``best_config`` is the
        config of the fastest candidate, and ``found`` is the speed of the chosen config relative to
        the speed of that candidate. ``best_config`` and ``found`` have values only if all
        candidates were tried, and never for :data:`BEST`.

    Raises:
        UserError: if no shape was timed with both a hand-written kernel and the vendor library, or
            if a rounds.csv cannot be read.
    """
    # 1. Pair the library's best time of each shape with that of each family's chosen config.
    rows = bursts(recording.products).reset_index(drop=True)
    rows = with_steady_times(rows, recording)
    rows["problem"] = problems_of(rows)
    is_hand_written = rows["implementation"].isin(list(HAND_WRITTEN))
    is_search = rows["sweep"].isin(_SEARCHES)
    library = _fastest(rows[~is_hand_written], ["problem"])
    is_chosen = is_hand_written & ~rows["sweep"].isin(_NOT_CHOSEN)
    chosen = _fastest(rows[is_chosen], ["problem", "implementation"])
    pairs = chosen.join(library[_TIMES].add_suffix("_library"), on="problem", how="inner")
    if pairs.empty:
        raise UserError(
            "this recording has no shape that was timed with both a Triton kernel and the vendor "
            f"library; run {target('families', 'record --part kernels')} on a GPU with sm_80 or "
            "later to time both."
        )
    # 2. Compute the ratios.
    library_times = pairs[[f"{name}_library" for name in _TIMES]].set_axis(_TIMES, axis=1)
    ratios = steady_ratio(library_times, pairs)
    table = pd.DataFrame(
        {
            "problem": pairs.index.get_level_values("problem"),
            "family": pairs.index.get_level_values("implementation"),
            "config": pairs["config"].to_numpy(),
            "library_us": pairs["time_us_library"].to_numpy(),
            "time_us": pairs["time_us"].to_numpy(),
            **{name: ratio.to_numpy() for name, ratio in ratios.items()},
        }
    )
    # 3. Compare the chosen configs with the best candidates, where all candidates were tried.
    complete = _fully_searched(recording)
    table = _with_search(table, rows[is_hand_written & is_search], complete)
    # 4. Add the fastest family of each shape.
    best = table.loc[table.groupby("problem", sort=False)["time_us"].idxmin()]
    best = best.assign(family=BEST, found=np.nan, best_config=None)
    table = pd.concat([table, best], ignore_index=True)
    table.insert(1, "op", [problem.op for problem in table["problem"]])
    table.insert(2, "class", [shape_class(problem) for problem in table["problem"]])
    table.insert(3, "dtype", [problem.dtype for problem in table["problem"]])
    return table


def shape_class(problem: Problem) -> str:
    """Return the problem's class; tf32 GEMMs in layouts other than nt are a separate class.

    Hopper's Tensor Cores read tf32 operands only in layout nt, in which both operands are
    contiguous along K. An operand in another order is slow on Hopper: Triton kernels copy it four
    bytes at a time, unless a separate launch transposes it beforehand. On an H100, cuBLAS takes
    5–8% longer in tt and nn than in nt, and 27% longer in tn (geometric means over 20 shapes).
    """
    if isinstance(problem, Gemm) and problem.dtype == "tf32" and problem.layout != "nt":
        return "tf32, not nt"
    return problem.shape_class


def summarise(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one row per operation, family and class; class ``all`` has all shapes of a family.

    A family that was timed in several dtypes also has a row for each dtype, with a class such as
    ``all bf16``.

    ``ratio`` is the geometric mean of the ratios. ``near`` is the share of shapes whose ratio is at
    least :data:`CLOSE`. ``wins`` is the share of shapes whose ratio is above 1, and ``clear_wins``
    is the share of shapes whose whole interval is above 1. ``worst`` is the smallest ratio.
    ``searched`` is the number of shapes that have a value in the column ``found`` of ``table``, and
    ``found`` is the geometric mean of these values, or None if there are none.
    """
    summary = []
    for (op, family), rows in table.groupby(["op", "family"], sort=False):
        # 1. Group the family's shapes by class, by dtype if it has several, and all together.
        groups = {str(name): members for name, members in rows.groupby("class", sort=True)}
        dtypes = [dtype for dtype in TIMED_DTYPES if (rows["dtype"] == dtype).any()]
        if len(dtypes) > 1:
            for dtype in dtypes:
                groups[f"all {dtype}"] = rows[rows["dtype"] == dtype]
        groups["all"] = rows
        # 2. Summarise each group.
        for name, members in groups.items():
            worst = members.loc[members["ratio"].idxmin()]
            found = members["found"].dropna()
            summary.append(
                {
                    "op": op,
                    "family": family,
                    "class": name,
                    "shapes": len(members),
                    "ratio": geometric_mean(members["ratio"]),
                    "near": float((members["ratio"] >= CLOSE).mean()),
                    "wins": float((members["ratio"] > 1).mean()),
                    "clear_wins": float((members["ratio_lo"] > 1).mean()),
                    "worst": float(worst["ratio"]),
                    "worst_shape": str(worst["problem"]),
                    "searched": len(found),
                    "found": geometric_mean(found) if len(found) else None,
                }
            )
    return summary


def write_families(recording: Recording, table: pd.DataFrame) -> str:
    """Write ``table`` to families.csv, and its summary to families.json and families.md.

    Return the text of families.md.
    """
    summary = summarise(table)
    text = _markdown(recording, summary, _count_without_library(recording))
    shapes = table.assign(problem=[problem.spec() for problem in table["problem"]])
    write_whole(recording.folder / "families.csv", shapes.to_csv(index=False))
    write_json(recording.folder / "families.json", summary)
    write_whole(recording.folder / "families.md", text)
    return text


def _count_without_library(recording: Recording) -> int:
    """Return the number of shapes that were timed only with hand-written kernels."""
    rows = bursts(recording.products)
    is_hand_written = rows["implementation"].isin(list(HAND_WRITTEN))
    timed_by_kernels = set(problems_of(rows[is_hand_written]))
    timed_by_library = set(problems_of(rows[~is_hand_written]))
    return len(timed_by_kernels - timed_by_library)


def _fastest(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return the fastest row for each combination of the keys' values, indexed by the keys."""
    # ``groupby().first()`` would fill an unknown interval of the fastest row from a slower row.
    return rows.sort_values("time_us", kind="stable").drop_duplicates(keys).set_index(keys)


def _fully_searched(recording: Recording) -> set[tuple[Problem, str]]:
    """Return the (shape, family) pairs whose candidates were all tried.

    A candidate that failed counts as tried. If the plan left out any case of a search, no pair is
    returned, because the plan does not say to which shape the case belongs.
    """
    plan = recording.run["plan"]
    if any(sweep in _SEARCHES for sweep in plan.get("left_out", {})):
        return set()
    rows = recording.rows[recording.rows["sweep"].isin(_SEARCHES)]
    tried = Counter(zip(problems_of(rows), rows["implementation"], strict=True))
    planned = Counter(
        (as_problem(problem_of(case)), case["implementation"])
        for case in plan["cases"]
        if case["sweep"] in _SEARCHES
    )
    return {key for key, count in planned.items() if tried[key] == count}


def _with_search(
    table: pd.DataFrame, search_rows: pd.DataFrame, complete: set[tuple[Problem, str]]
) -> pd.DataFrame:
    """Add the columns ``found`` and ``best_config``, with values only for fully searched shapes."""
    keys = ["problem", "family"]
    candidates = search_rows.rename(columns={"implementation": "family"})
    shapes_and_families = zip(candidates["problem"], candidates["family"], strict=True)
    # An empty array without a dtype would be an array of floats, which is not a mask of rows.
    is_complete = np.array([key in complete for key in shapes_and_families], dtype=bool)
    candidates = candidates[is_complete]
    best = _fastest(candidates, keys)[["time_us", "config"]].rename(
        columns={"time_us": "best_us", "config": "best_config"}
    )
    # The chosen config is compared by its time in the search, like the other candidates.
    searched = _fastest(candidates, [*keys, "config"])[["time_us"]].rename(
        columns={"time_us": "searched_us"}
    )
    table = table.join(best, on=keys).join(searched, on=[*keys, "config"])
    table["found"] = table["best_us"] / table["searched_us"]
    return table.drop(columns=["best_us", "searched_us"])


def _markdown(recording: Recording, summary: list[dict[str, Any]], without_library: int) -> str:
    """Return the comparison as a Markdown page with a table for each operation."""
    is_searched = any(row["searched"] for row in summary)
    search_sentence = (
        "The column *chosen/best* is the speed with this config relative to the speed with the "
        "fastest candidate config, as a geometric mean over the shapes for which all candidates "
        "were tried. "
    )
    left_out_sentence = ""
    if without_library:
        left_out_sentence = (
            " The tables leave out shapes on which the vendor library was not timed (number of "
            f"shapes: {without_library})."
        )
    lines = [
        "# Hand-written kernels compared with the vendor library on "
        f"{plain(recording.machine.name)}",
        "",
        plain(recording.caption()).replace("  ·  ", ", ") + ".",
        "",
        "A ratio is the vendor library's time over the time of the kernel. If it is above 1, the "
        "kernel is faster. The column *ratio* is the geometric mean over the shapes of a class. "
        f"*≥ {CLOSE}* is the share of shapes whose ratio is at least {CLOSE}. *wins* is the share "
        "of shapes whose ratio is above 1, and *clear wins* is the share of shapes whose whole 95% "
        "interval is above 1. *worst* is the smallest ratio, and *at* is its shape. "
        "The vendor library runs the kernel that it chooses or the one that its autotuner finds, "
        "whichever is faster. A hand-written kernel runs with the config that the time model "
        "ranks first, without a tuning run. "
        f"{search_sentence if is_searched else ''}"
        f"*{BEST}* is the fastest family of each shape.{left_out_sentence}",
    ]
    titles = [
        "family", "class", "shapes", "ratio", f"≥ {CLOSE}", "wins", "clear wins", "worst", "at",
    ]  # fmt: skip
    if is_searched:
        titles.append("chosen/best")
    for op in dict.fromkeys(row["op"] for row in summary):
        lines += [
            "",
            f"## {op}",
            "",
            table_row(titles),
            "|" + "---|" * len(titles),
            *(_table_line(row, is_searched) for row in summary if row["op"] == op),
        ]
    return "\n".join([*lines, ""])


def _table_line(row: dict[str, Any], is_searched: bool) -> str:
    """Format a row of the summary as a line of the Markdown table."""
    chosen_over_best = "–"
    if row["found"] is not None:
        chosen_over_best = f"{row['found']:.1%} ({counted(row['searched'], 'shape')})"
    cells = [
        row["family"],
        row["class"],
        str(row["shapes"]),
        f"{row['ratio']:.2f}",
        f"{row['near']:.0%}",
        f"{row['wins']:.0%}",
        f"{row['clear_wins']:.0%}",
        f"{row['worst']:.2f}",
        row["worst_shape"],
    ]
    if is_searched:
        cells.append(chosen_over_best)
    return table_row(cells)
