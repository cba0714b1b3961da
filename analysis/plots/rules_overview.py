"""Plot what public tables say about the field's rules: a panel per rule, a line per GPU."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.plots.style import NEUTRAL, panels, save, verbatim

_VERDICT_STYLE = {
    "holds": ("#0072B2", "o"),
    "holds, weaker": ("#009E73", "s"),
    "depends": ("#CC79A7", "^"),
    "no effect": (NEUTRAL, "D"),
    "no longer": ("#D55E00", "v"),
}
_TITLE_WIDTH = 28  # characters of a panel's title


def overview_data(documents: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return a row per rule and machine: ``statement, name, verdict, effect, lo, hi``.

    ``name`` is the machine's, and ``verdict`` is only the part before a colon.

    Args:
        documents: verdicts of :func:`analysis.rules.inputs.imported_rules`, one per machine.
    """
    return pd.DataFrame(
        [
            {
                "name": document["name"],
                **{key: rule[key] for key in ("statement", "effect", "lo", "hi")},
                "verdict": rule["verdict"].split(":")[0],
            }
            for document in documents
            for rule in document["rules"]
        ]
    )


def write_overview(documents: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write ``rules-public.png`` and ``.svg``: rules that public tables answer, on every GPU."""
    data = overview_data(documents)
    packages = sorted({document["package"] for document in documents})
    caption = f"bf16 GEMMs, {', '.join(packages)}  ·  lines are 95% intervals"
    return save(draw_overview(data), caption, folder, "rules-public")


def draw_overview(data: pd.DataFrame) -> Figure:
    """Draw the effects on all machines, with one panel per rule.

    Args:
        data: table from :func:`overview_data`.
    """
    # 1. Count the verdicts for the title, in which commas separate them.
    statements = data["statement"].unique()
    names = data["name"].unique()
    counts = [
        f"{str(verdict).replace(',', '')} {count} times"
        for verdict, count in data["verdict"].value_counts().items()
    ]
    title = f"{len(statements)} rules on {len(names)} GPUs: {', '.join(counts)}"
    # 2. Draw each rule's panel, with the machines in the same order from top to bottom.
    size = (4.0 + 3.2 * len(statements), 2.6 + 0.42 * len(names))
    figure, axes = panels(len(statements), title, size, share_y=True)
    places = {name: -place for place, name in enumerate(names)}
    for panel, statement in zip(axes, statements, strict=True):
        rows = data[data["statement"] == statement]
        for verdict, (color, marker) in _VERDICT_STYLE.items():
            judged = rows[rows["verdict"] == verdict]
            effect = judged["effect"].to_numpy(dtype=float)
            to_ends = [np.abs(judged[end].to_numpy(dtype=float) - effect) for end in ("lo", "hi")]
            panel.errorbar(
                effect,
                judged["name"].map(places),
                xerr=to_ends,
                fmt=marker,
                color=color,
                capsize=3,
                label=verdict,
            )
        panel.axvline(1, color=NEUTRAL, linewidth=1, zorder=0)
        panel.set_title(verbatim(textwrap.fill(statement, _TITLE_WIDTH)), loc="left", fontsize=12)
        # Every panel shows a range around 1, however small the effects are.
        high = max(rows["hi"].max(), 1.1)
        panel.set_xlim(min(0.98, rows["lo"].min()), 1 + 1.06 * (high - 1))
        panel.set_xlabel("effect, as a ratio")
    # 3. The legend has only verdicts that a rule got on some machine.
    axes[0].set_yticks(list(places.values()), [verbatim(name) for name in places])
    handles, labels = axes[0].get_legend_handles_labels()
    shown = [i for i, label in enumerate(labels) if (data["verdict"] == label).any()]
    figure.legend(
        [handles[i] for i in shown], [labels[i] for i in shown], loc="upper right", ncols=len(shown)
    )
    return figure
