"""Plot the time of a model's step by role, and the gains from changes of the model's dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis.advice.verdict import LEAVE_IT
from analysis.audit.account import OTHER_OPERATIONS, Account
from analysis.audit.levers import Lever
from analysis.plots.style import NEUTRAL, panels, save

# Colours of roles: Okabe and Ito's palette and two more colours. Other operations are hatched in
# grey.
_COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
    "#7A5195", "#A6761D",
)  # fmt: skip
_HATCHED = "#BBBBBB"
# Height of a bar, and distance from its centre to the line below it. The distance between the
# centres of two bars is 1.
_BAR_HEIGHT, _BELOW_BAR = 0.6, 0.38
_CAPTION = (
    "Times of GEMMs and convolutions are measured or predicted. Times of attention are predicted "
    "or assumed. Times of other operations are estimated from the bytes moved. Hatched parts are "
    "other operations, together with matrix operations whose role is unknown. Lines below the bars "
    "are 90% intervals of the step's time."
)
_TOGETHER = ("q", "k", "v")
"""Roles that are drawn as a single role."""

_TOGETHER_NAME = ", ".join(_TOGETHER)


def plot_step(accounts: Mapping[str, Account], title: str, folder: Path) -> Path:
    """Draw where the time of a step goes, with one stacked bar per machine.

    Args:
        accounts: account of the step's time on each machine, by the label of the machine's bar; not
            empty.
        title: beginning of the plot's title.
        folder: folder of the PNG and SVG files.

    Returns:
        Path of the PNG file.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    size = (10.0, 2.2 + 0.9 * len(accounts))
    figure, (axes,) = panels(1, f"{title}: {step_finding(accounts)}", size)
    # 1. Give each role the same position and colour in all bars. Each bar is a mapping from the
    # roles in it to their times in µs.
    bars = [drawn_roles(account) for account in accounts.values()]
    roles = list(dict.fromkeys(role for bar in bars for role in bar))
    colored = [role for role in roles if role != OTHER_OPERATIONS]
    colors = {role: _COLORS[i % len(_COLORS)] for i, role in enumerate(colored)}
    # 2. Stack the roles of each machine. Only the first part that shows a role is labelled, so that
    # the legend has each role once.
    labelled: set[str] = set()
    for row, (account, bar) in enumerate(zip(accounts.values(), bars, strict=True)):
        left = 0.0
        for role in sorted(bar, key=roles.index):
            width = bar[role] / 1e3  # in ms
            is_colored = role in colors
            axes.barh(
                row,
                width,
                left=left,
                height=_BAR_HEIGHT,
                edgecolor="white",
                color=colors[role] if is_colored else _HATCHED,
                hatch="" if is_colored else "//",
                label=None if role in labelled else role,
            )
            labelled.add(role)
            left += width
        # The interval of the step's time is drawn just below the bar.
        low_us, high_us = account.interval_us
        axes.plot([low_us / 1e3, high_us / 1e3], [row + _BELOW_BAR] * 2, color=NEUTRAL, linewidth=2)
    axes.set(yticks=range(len(accounts)), yticklabels=list(accounts), xlabel="time of a step, ms")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncol=5, frameon=False)
    return save(figure, _CAPTION, folder, "audit-step")


def drawn_roles(account: Account) -> dict[str, float]:
    """Return the time in µs of each role in a step, without roles that take no time.

    The roles q, k and v are combined into a single role.
    """
    drawn: dict[str, float] = {}
    for role, time_us in account.by_role.items():
        name = _TOGETHER_NAME if role in _TOGETHER else role
        if time_us > 0:
            drawn[name] = drawn.get(name, 0.0) + time_us
    return drawn


def step_finding(accounts: Mapping[str, Account]) -> str:
    """Name the known role with the most time on the first machine, or say that none is known."""
    account = next(iter(accounts.values()))
    times_us = drawn_roles(account)
    times_us.pop(OTHER_OPERATIONS, None)
    if not times_us:
        return "no operation has a known role"
    largest = max(times_us, key=lambda role: times_us[role])
    verb = "take" if largest == _TOGETHER_NAME else "takes"
    on_machine = f" on {account.machine}" if len(accounts) > 1 else ""
    return f"{largest} {verb} {times_us[largest] / account.step_us:.0%} of the step{on_machine}"


def levers_finding(levers: Mapping[str, Sequence[Lever]]) -> str:
    """Name the best change, or say that no change is worth making.

    The best change has the largest :attr:`Lever.expected_gain` of all worthwhile changes on all
    machines.
    """
    worthwhile = [
        (machine, lever)
        for machine, machine_levers in levers.items()
        for lever in machine_levers
        if lever.verdict != LEAVE_IT
    ]
    if not worthwhile:
        return "no change of the model's dimensions is worth making"
    machine, best = max(worthwhile, key=lambda machine_lever: machine_lever[1].expected_gain)
    on_machine = f" on {machine}" if len(levers) > 1 else ""
    return f"{best.words} makes the step {best.gain.value:.1%} faster{on_machine}"


def plot_levers(levers: Mapping[str, Sequence[Lever]], title: str, folder: Path) -> Path:
    """Draw each change's gain for the whole step, and the gain's interval, in a panel per machine.

    Args:
        levers: possible changes of the model's dimensions, by the name of the machine.
        title: beginning of the plot's title.
        folder: folder of the PNG and SVG files.

    Returns:
        Path of the PNG file.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    # 1. Choose the size of the figure. The machine with the most levers sets the height.
    panel_count = max(len(levers), 1)
    row_count = max([1, *(len(machine_levers) for machine_levers in levers.values())])
    size = (9.0 * panel_count, 2.0 + 0.45 * row_count)
    figure, axes = panels(panel_count, f"{title}: {levers_finding(levers)}", size)
    # 2. Draw a point and an interval for each lever. Without machines, the only panel stays empty.
    for panel, (machine, machine_levers) in zip(axes, levers.items(), strict=False):
        positions = np.arange(len(machine_levers))
        for position, lever in zip(positions, machine_levers, strict=True):
            is_worthwhile = lever.verdict != LEAVE_IT
            line_color = _COLORS[0] if is_worthwhile else _HATCHED
            point_color = _COLORS[0] if is_worthwhile else NEUTRAL
            marker = "o" if is_worthwhile else "s"
            ends_percent = [100 * lever.gain.lo, 100 * lever.gain.hi]
            panel.plot(ends_percent, [position] * 2, color=line_color, linewidth=3)
            panel.plot(100 * lever.gain.value, position, marker, color=point_color)
        panel.axvline(0.0, color=NEUTRAL, linewidth=1)
        panel.set(
            yticks=positions,
            yticklabels=[lever.words for lever in machine_levers],
            title=machine,
            xlabel="gain for the whole step, %",
        )
        panel.invert_yaxis()
    caption = (
        "Points are estimated gains for the whole step. Round points mark changes that are worth "
        "making. Lines are 90% intervals."
    )
    return save(figure, caption, folder, "audit-levers")
