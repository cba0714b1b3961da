"""Plot a model's step by role, and the gains of its levers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis.advice.verdict import LEAVE_IT
from analysis.audit.account import OTHER_OPERATIONS, Account
from analysis.audit.levers import Lever
from analysis.plots.style import NEUTRAL, panels, save

# Okabe and Ito's palette and two more colours. Other operations are hatched in grey.
_COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
    "#7A5195", "#A6761D",
)  # fmt: skip
_HATCHED = "#BBBBBB"
_CAPTION = (
    "GEMMs, convolutions and attention as measured or predicted; hatched: estimates from bytes "
    "moved. Bars: 90% intervals."
)
_TOGETHER = ("q", "k", "v")
"""Roles that are drawn as one part of a step."""


def plot_step(accounts: Mapping[str, Account], title: str, folder: Path) -> Path:
    """Draw where the time of a step goes, with one stacked bar per machine."""
    size = (10.0, 2.2 + 0.9 * len(accounts))
    figure, (axes,) = panels(1, f"{title}: {step_finding(accounts)}", size)
    shares = [drawn_roles(account) for account in accounts.values()]
    roles = list(dict.fromkeys(role for each in shares for role in each))
    colors = {
        role: _COLORS[i % len(_COLORS)]
        for i, role in enumerate(role for role in roles if role != OTHER_OPERATIONS)
    }
    labelled: set[str] = set()
    for row, (account, share) in enumerate(zip(accounts.values(), shares, strict=True)):
        left = 0.0
        for role, time in sorted(share.items(), key=lambda item: roles.index(item[0])):
            plain = role != OTHER_OPERATIONS
            axes.barh(
                row,
                time / 1e3,
                left=left,
                height=0.6,
                edgecolor="white",
                color=colors[role] if plain else _HATCHED,
                hatch="" if plain else "//",
                label=None if role in labelled else role,
            )
            labelled.add(role)
            left += time / 1e3
        low, high = (end / 1e3 for end in account.interval_us)
        axes.plot([low, high], [row + 0.38] * 2, color=NEUTRAL, linewidth=2)
    axes.set(yticks=range(len(accounts)), yticklabels=list(accounts), xlabel="time of a step, ms")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncol=5, frameon=False)
    return save(figure, _CAPTION, folder, "audit-step")


def drawn_roles(account: Account) -> dict[str, float]:
    """Return the time of each part of a step that takes any, in µs, with q, k and v as one."""
    drawn: dict[str, float] = {}
    for role, time in account.by_role.items():
        name = ", ".join(_TOGETHER) if role in _TOGETHER else role
        if time > 0:
            drawn[name] = drawn.get(name, 0.0) + time
    return drawn


def step_finding(accounts: Mapping[str, Account]) -> str:
    """Say which role takes most of the step on the first machine."""
    account = next(iter(accounts.values()))
    products = [item for item in drawn_roles(account).items() if item[0] != OTHER_OPERATIONS]
    role, time = max(products, key=lambda item: item[1])
    return f"{role} takes {time / account.step_us:.0%}"


def levers_finding(levers: Mapping[str, Sequence[Lever]]) -> str:
    """Say which lever gains most of those that are worth it, over all machines."""
    worth = [x for found in levers.values() for x in found if x.verdict != LEAVE_IT]
    if not worth:
        return "no other size is worth changing to"
    best = max(worth, key=lambda lever: lever.gain.value)
    return f"{best.words} gains {best.gain.value:.1%} of the step"


def plot_levers(levers: Mapping[str, Sequence[Lever]], title: str, folder: Path) -> Path:
    """Draw what each lever gains of the step, with its interval; one panel per machine."""
    most = max((len(each) for each in levers.values()), default=1)
    count = max(len(levers), 1)
    size = (9.0 * count, 2.0 + 0.45 * max(most, 1))
    figure, axes = panels(count, f"{title}: {levers_finding(levers)}", size)
    for panel, (machine, found) in zip(axes, levers.items(), strict=False):
        places = np.arange(len(found))
        for place, lever in zip(places, found, strict=True):
            worth = lever.verdict != LEAVE_IT
            gain = [100 * part for part in lever.gain]
            panel.plot(gain[1:], [place] * 2, color=_COLORS[0] if worth else _HATCHED, linewidth=3)
            panel.plot(
                gain[0], place, "o" if worth else "s", color=_COLORS[0] if worth else NEUTRAL
            )
        panel.axvline(0.0, color=NEUTRAL, linewidth=1)
        panel.set(
            yticks=places,
            yticklabels=[lever.words for lever in found],
            title=machine,
            xlabel="gain of the whole step, %",
        )
        panel.invert_yaxis()
    caption = (
        "Points: expected gain of the whole step; round where the change is worth making. Lines: "
    )
    return save(figure, f"{caption}90% intervals.", folder, "audit-levers")
