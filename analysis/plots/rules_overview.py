"""Plot how rules were judged with imported times: one panel per rule, one row per GPU."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.plots.style import NEUTRAL, panels, save, verbatim
from kernels.common.counts import counted

_VERDICT_STYLE = {
    "holds": ("#0072B2", "o"),
    "holds, weaker": ("#009E73", "s"),
    "depends": ("#CC79A7", "^"),
    "no effect": (NEUTRAL, "D"),
    "no longer": ("#D55E00", "v"),
}
_TITLE_WIDTH = 28  # maximum number of characters in a line of a panel's title


def overview_data(documents: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return a table with one row for each verdict on a rule.

    ``documents`` is the result of :func:`analysis.rules.inputs.imported_rules`.

    Returns:
        The columns ``name`` (of the machine), ``statement`` (the rule), ``effect``, ``lo`` and
        ``hi`` (the ends of the effect's interval), and ``verdict`` (without the explanation that
        may follow a colon).
    """
    rows = []
    for document in documents:
        for rule in document["rules"]:
            row = {
                "name": document["name"],
                "statement": rule["statement"],
                "effect": rule["effect"],
                "lo": rule["lo"],
                "hi": rule["hi"],
                "verdict": rule["verdict"].split(":")[0],
            }
            rows.append(row)
    return pd.DataFrame(rows)


def write_overview(documents: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write ``rules-public.png`` and ``.svg`` to a folder, and return the path of the PNG file.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    data = overview_data(documents)
    # A user's file has no package, and it may have cases other than bf16 GEMMs.
    is_packaged = all(document["package"] for document in documents)
    kind_of_cases = "bf16 GEMMs, " if is_packaged else ""
    sources = sorted({document["package"] or document["source"] for document in documents})
    caption = f"{kind_of_cases}{', '.join(sources)}  ·  lines are 95% intervals"
    return save(draw_overview(data), caption, folder, "rules-public")


def draw_overview(data: pd.DataFrame) -> Figure:
    """Draw one panel per rule, with the rule's effect and its interval on each machine.

    ``data`` is a table from :func:`overview_data`.
    """
    # 1. Count the verdicts for the title. Commas separate the verdicts there, so commas within a
    # verdict are removed.
    statements = data["statement"].unique()
    names = data["name"].unique()
    counts = [
        f"{str(verdict).replace(',', '')} {counted(count, 'time')}"
        for verdict, count in data["verdict"].value_counts().items()
    ]
    rules_and_gpus = f"{counted(len(statements), 'rule')} on {counted(len(names), 'GPU')}"
    title = f"{rules_and_gpus}: {', '.join(counts)}"
    # 2. Draw each rule's panel, with the machines in the same order from top to bottom.
    size = (4.0 + 3.2 * len(statements), 2.6 + 0.42 * len(names))
    figure, axes = panels(len(statements), title, size, share_y=True)
    positions = {name: -position for position, name in enumerate(names)}
    for panel, statement in zip(axes, statements, strict=True):
        rows = data[data["statement"] == statement]
        for verdict, (color, marker) in _VERDICT_STYLE.items():
            judged = rows[rows["verdict"] == verdict]
            effect = judged["effect"].to_numpy(dtype=float)
            # Matplotlib takes the distances from the effect to both ends of its interval.
            to_ends = [np.abs(judged[end].to_numpy(dtype=float) - effect) for end in ("lo", "hi")]
            panel.errorbar(
                effect,
                judged["name"].map(positions),
                xerr=to_ends,
                fmt=marker,
                color=color,
                capsize=3,
                label=verdict,
            )
        panel.axvline(1, color=NEUTRAL, linewidth=1, zorder=0)
        panel.set_title(verbatim(textwrap.fill(statement, _TITLE_WIDTH)), loc="left", fontsize=12)
        # Every panel shows at least the effects from 0.98 to 1.1. A panel's right end is 6% further
        # from 1 than the largest upper end of an interval, so that no cap is at the panel's edge.
        low = min(0.98, rows["lo"].min())
        high = max(rows["hi"].max(), 1.1)
        panel.set_xlim(low, 1 + 1.06 * (high - 1))
        panel.set_xlabel("effect, as a ratio")
    # 3. Draw a legend of the verdicts that occur.
    axes[0].set_yticks(list(positions.values()), [verbatim(name) for name in positions])
    handles, labels = axes[0].get_legend_handles_labels()
    shown = [i for i, label in enumerate(labels) if (data["verdict"] == label).any()]
    figure.legend(
        [handles[i] for i in shown], [labels[i] for i in shown], loc="upper right", ncols=len(shown)
    )
    return figure
