"""Format an audit for people, for pull requests and for scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.advice.verdict import LEAVE_IT, verdict_text
from analysis.audit.account import OTHER_OPERATIONS, Account, AccountLine
from analysis.audit.levers import Lever
from analysis.markdown import table_row

_MOST_ROWS = 16


def duration(us: float) -> str:
    """Format a time given in µs as ``12.3 ms``, or in µs or s if that reads better."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= 0.9995 * size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} µs"


def products_frame(account: Account) -> pd.DataFrame:
    """Return one row per distinct product, as in ``--json``.

    Times are those of one instance; shares are those of the whole step.
    """
    return pd.DataFrame([_product(account, row) for row in account.rows])


def levers_frame(levers: Sequence[Lever]) -> pd.DataFrame:
    """Return one row per lever, as in ``--json``."""
    return pd.DataFrame([lever_json(lever) for lever in levers])


def _product(account: Account, row: AccountLine) -> dict[str, Any]:
    product = row.product
    counted = not math.isnan(row.time_us)
    return {
        "role": product.role,
        "path": product.path,
        "pass": product.pass_,
        "count": product.count,
        "problem": product.work.spec(),
        "flops": product.work.flops,
        "time_us": row.time_us if counted else None,
        "lo_us": row.lo_us if counted else None,
        "hi_us": row.hi_us if counted else None,
        "share": account.share(row) if counted else None,
        "peak_share": row.peak_share if counted else None,
        "limit": row.limit,
        "basis": row.basis,
        "names": dict(product.names),
    }


def lever_json(lever: Lever) -> dict[str, Any]:
    """Return one lever as a record.

    If it changes several dimensions, ``from`` and ``to`` have a value for each.
    """
    many = len(lever.changes) > 1
    before = {name: a for name, (a, _) in lever.changes.items()}
    after = {name: b for name, (_, b) in lever.changes.items()}
    return {
        "dimension": lever.name,
        "from": before if many else next(iter(before.values())),
        "to": after if many else next(iter(after.values())),
        "gain": lever.gain.value,
        "lo": lever.gain.lo,
        "hi": lever.gain.hi,
        "products_gain": lever.products,
        "share": lever.share,
        "parameters": lever.parameters,
        "flops": lever.flops,
        "bytes": lever.bytes,
        "verdict": lever.verdict,
        "probability": lever.probability,
        "expected_gain": lever.expected_gain,
        "evidence": lever.evidence,
        "reason": lever.reason,
    }


def audit_json(
    account: Account, levers: Sequence[Lever], mode: str, assumptions: Sequence[str], source: str
) -> dict[str, Any]:
    """Return the whole audit as one document."""
    low, high = account.interval_us
    return {
        "machine": account.machine,
        "mode": mode,
        "source": source,
        "assumptions": list(assumptions),
        "not_counted": list(account.not_counted),
        "products": [_product(account, row) for row in account.rows],
        "other": [{"what": o.what, "bytes": o.bytes, "time_us": o.time_us} for o in account.other],
        "step_us": account.step_us,
        "lo_us": low,
        "hi_us": high,
        "flops": account.flops,
        "parameters": account.parameters,
        "levers": [lever_json(lever) for lever in levers],
    }


_HEAD = ("role", "pass", "count", "M×N×K", "each", "share", "of peak", "limit", "basis")


def _cells(account: Account, row: AccountLine) -> list[str]:
    product = row.product
    if math.isnan(row.time_us):
        return [
            product.role,
            product.pass_,
            str(product.count),
            str(product.work),
            "–",
            "–",
            "–",
            "",
            row.basis,
        ]
    return [
        product.role,
        product.pass_,
        str(product.count),
        str(product.work),
        duration(row.time_us),
        f"{account.share(row):.1%}",
        f"{row.peak_share:.0%}",
        row.limit,
        row.basis,
    ]


def _other_rows(account: Account) -> list[list[str]]:
    return [
        [
            OTHER_OPERATIONS,
            "",
            "",
            f"{other.what}, {other.bytes / 1e9:.3g} GB",
            duration(other.time_us),
            f"{other.time_us / account.step_us:.1%}",
            "",
            "memory",
            "estimate",
        ]
        for other in account.other
    ]


def lever_line(lever: Lever) -> str:
    """Describe one lever in words."""
    gain = lever.gain
    return (
        f"{verdict_text(lever.verdict, lever.probability)}: {lever.words}: the step gains "
        f"{gain.value:+.1%} "
        f"({gain.lo:+.1%} to {gain.hi:+.1%}, {lever.evidence}); {lever.flops:+.2%} FLOPs, "
        f"{lever.parameters:+.2%} parameters, {lever.bytes:+.2%} bytes moved; {lever.reason}."
    )


def summary(account: Account, levers: Sequence[Lever]) -> str:
    """Summarise an audit in a paragraph: the step's time, where it goes, what to change."""
    low, high = account.interval_us
    products = account.products_us / account.step_us
    largest = [(role, time) for role, time in account.by_role.items() if role != OTHER_OPERATIONS][
        :3
    ]
    told = ", ".join(f"{role} {time / account.step_us:.0%}" for role, time in largest)
    worth = [lever for lever in levers if lever.verdict != LEAVE_IT]
    advice = f"Most promising change: {worth[0].words}." if worth else "Nothing to gain here."
    return (
        f"On {account.machine} a step should take {duration(account.step_us)} ({duration(low)} "
        f"to {duration(high)}), {products:.0%} of it in GEMMs and convolutions: {told}. {advice}"
    )


def as_comparison(audits: Mapping[str, tuple[Account, Sequence[Lever]]]) -> str:
    """Compare machines: a table with the time of each role, and a paragraph for each machine."""
    accounts = {machine: account for machine, (account, _) in audits.items()}
    by_role = {machine: account.by_role for machine, account in accounts.items()}
    roles = dict.fromkeys(role for shares in by_role.values() for role in shares)
    table = [["", *accounts]]
    for role in roles:
        cells = []
        for machine, account in accounts.items():
            time = by_role[machine].get(role, 0.0)
            cells.append(f"{duration(time)}, {time / account.step_us:.0%}")
        table.append([role, *cells])
    paragraphs = [
        "\n".join([summary(account, levers), *(f"  {lever_line(lever)}" for lever in levers[:2])])
        for account, levers in audits.values()
    ]
    missing = [
        f"Not counted on {machine}: {'; '.join(account.not_counted)}."
        for machine, account in accounts.items()
        if account.not_counted
    ]
    return "\n".join([*_aligned(table), "", *paragraphs, *missing])


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def as_text(account: Account, levers: Sequence[Lever], assumptions: Sequence[str]) -> str:
    """Format an audit for a terminal: the table, the levers, the assumptions and a summary."""
    rows = [_cells(account, row) for row in account.rows]
    left_out = rows[_MOST_ROWS:]
    table = [list(_HEAD), *rows[:_MOST_ROWS], *_other_rows(account)]
    lines = _aligned(table)
    if left_out:
        lines.append(f"… and {len(left_out)} more that take less; --json lists them all.")
    lines.append("")
    lines += [lever_line(lever) for lever in levers]
    lines.append("")
    lines.append(f"Assumed: {'; '.join(assumptions)}.")
    if account.not_counted:
        lines.append(f"Not counted: {'; '.join(account.not_counted)}.")
    lines.append(summary(account, levers))
    return "\n".join(lines)


def as_markdown(
    title: str, account: Account, levers: Sequence[Lever], assumptions: Sequence[str]
) -> str:
    """Format an audit for a pull request."""
    lines = [f"## {title}", "", summary(account, levers), "", table_row(_HEAD)]
    lines.append("|" + "---|" * len(_HEAD))
    lines += [table_row(_cells(account, row)) for row in account.rows]
    lines += [table_row(row) for row in _other_rows(account)]
    lines += ["", *(f"- {lever_line(lever)}" for lever in levers), ""]
    lines.append(f"Assumed: {'; '.join(assumptions)}.")
    if account.not_counted:
        lines += ["", f"Not counted: {'; '.join(account.not_counted)}."]
    return "\n".join([*lines, ""])
