"""Draw the cheat sheet of a machine: one page with the rules that have the largest effects."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.imports.public import PublicRows
from analysis.plots.style import NEUTRAL, panels, save
from analysis.rules.catalogue import all_rules
from analysis.rules.inputs import RuleInputs
from analysis.rules.judge import RuleResult
from kernels.machine import Machine

_MAX_RULES_SHOWN = 8  # rules that fit on one page
_TICKS = (0.1, 0.2, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50)  # labels of the axis of effects


def sheet_data(rows: Sequence[RuleResult], with_other_effects: bool = False) -> pd.DataFrame:
    """Return up to eight rules with the largest certain effects, the largest first.

    An effect is certain if its interval does not contain 1. An effect of 1/2 is as large as an
    effect of 2.

    Args:
        rows: results of rules.
        with_other_effects: True to include rules whose effect is not the gain from following their
            advice (:attr:`Rule.worth`).

    Returns:
        A table with the fields of :class:`RuleResult` as columns.
    """
    catalogue = all_rules()
    certain = [row for row in rows if _is_certain(row)]
    shown = [row.to_json() for row in certain if with_other_effects or catalogue[row.id].worth]
    frame = pd.DataFrame(shown, columns=list(RuleResult.__dataclass_fields__))
    effect_sizes = np.abs(np.log(frame["effect"].to_numpy(dtype=float)))
    largest_first = np.argsort(-effect_sizes, kind="stable")
    return frame.iloc[largest_first].head(_MAX_RULES_SHOWN).reset_index(drop=True)


def _is_certain(row: RuleResult) -> bool:
    return row.lo is not None and row.hi is not None and (row.lo > 1 or row.hi < 1)


def write_cheat_sheet(inputs: RuleInputs, rows: Sequence[RuleResult]) -> list[Path]:
    """Write ``cheat-sheet.png`` and ``.svg`` next to the verdicts, if there is a rule to show.

    Returns:
        A list with the path of the PNG file, or an empty list if nothing was written.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    figure = draw_sheet(rows, inputs.machine, with_other_effects=inputs.public)
    if figure is None:
        return []
    return [save(figure, inputs.caption, inputs.folder, "cheat-sheet")]


def write_table_sheet(
    rows: Sequence[RuleResult], machine: Machine, source: PublicRows, folder: Path
) -> list[Path]:
    """Write the cheat sheet of a public table, if there is a rule to show.

    Args:
        rows: results of rules.
        machine: the machine that was measured for the table.
        source: the table.
        folder: folder of the PNG and SVG files.

    Returns:
        A list with the path of the PNG file, or an empty list if nothing was written.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    # Few rules can be tested with a public table, so rules with other effects are included.
    figure = draw_sheet(rows, machine, with_other_effects=True)
    if figure is None:
        return []
    caption = f"{machine.name}  ·  {source.dtype}  ·  {source.name}, {len(source):,} measurements"
    return [save(figure, caption, folder, "cheat-sheet")]


def what_to_do(row: Mapping[Hashable, Any]) -> str:
    """Return the advice of a rule, or advice against the rule if its effect is not above 1.

    ``row`` is a row of the table from :func:`sheet_data`.
    """
    advice = all_rules()[str(row["id"])].do
    if row["effect"] > 1:
        return advice
    return f"Not here: {advice[0].lower()}{advice[1:]}"


def _title(data: pd.DataFrame, machine: Machine) -> str:
    best = data.iloc[0]
    return f"{machine.name}: {what_to_do(best.to_dict())}, {best['effect']:.2f}×"


def draw_sheet(
    rows: Sequence[RuleResult], machine: Machine, with_other_effects: bool = False
) -> Figure | None:
    """Draw the rules of :func:`sheet_data` on one page; return None if there are none."""
    data = sheet_data(rows, with_other_effects)
    if data.empty:
        return None
    size = (14.0, 2.0 + 0.8 * len(data))
    figure, (axes,) = panels(1, _title(data, machine), size)
    # 1. Draw a bar from 1 to each effect, with its interval; the largest effect is at the top.
    positions = np.arange(len(data))[::-1]
    effects = data["effect"].to_numpy(dtype=float)
    # matplotlib expects the distances from each effect to the two ends of its interval.
    to_ends = [np.abs(data[end].to_numpy(dtype=float) - effects) for end in ("lo", "hi")]
    colors = ["#0072B2" if effect > 1 else "#D55E00" for effect in effects]
    axes.barh(positions, effects - 1, left=1, height=0.32, color=colors)
    axes.errorbar(effects, positions, xerr=to_ends, fmt="none", ecolor="#000000", capsize=4)
    # 2. Label the axis of effects, which shows at least 0.9 to 1.25 with a margin at both ends.
    axes.set_xscale("log")
    low = min(data["lo"].min(), 0.9)
    high = max(data["hi"].max(), 1.25)
    axes.set_xlim(low / 1.1, high * 1.3)
    axes.axvline(1, color=NEUTRAL, linewidth=1, zorder=0)
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(data) - 0.3)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    effect_words = "effect of the rule" if with_other_effects else "gain from following the rule"
    axes.set_xlabel(f"{effect_words}; lines are 95% intervals")
    # 3. Write the advice above each bar, with the verdict up to its colon. The x position is a
    #    share of the axes' width, and the y position is in bars, whose distance is 1.
    for position, row in zip(positions, data.to_dict("records"), strict=True):
        note = f"{what_to_do(row)}  ({row['effect']:.2f}×, {row['verdict'].partition(':')[0]})"
        axes.text(
            0.005,
            position + 0.24,
            note,
            transform=axes.get_yaxis_transform(),
            fontsize=12,
            fontweight="bold",
            va="bottom",
        )
    if machine.kind == "cpu":
        axes.set_title(
            "These results are from a CPU; they do not apply to GPUs", loc="left", color=NEUTRAL
        )
    return figure
