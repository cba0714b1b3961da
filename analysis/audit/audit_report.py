"""Format an audit for people, for pull requests and for scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.advice.verdict import LEAVE_IT, verdict_text
from analysis.audit.account import OTHER_OPERATIONS, Account, AccountLine
from analysis.audit.levers import Lever
from analysis.audit.memory import Memory
from analysis.markdown import table_row
from analysis.units import signed_percent, three_digits
from kernels.common.counts import counted

_MOST_ROWS = 16  # maximum number of matrix operations on a terminal
_COMPARED_LEVERS = 2  # maximum number of levers of each machine in a comparison
_MARKDOWN_ROWS = 10  # maximum number of rows, including other operations, in Markdown


@dataclass(frozen=True)
class AuditReport:
    """Results of an audit on one machine.

    Attributes:
        title: the model and its step, in words.
        fits_with: command-line options, each of which should make the step fit in memory; empty if
            the step already fits, if the size of the memory is unknown, or if no such option is
            found.
        levers: changes of dimensions, in the order of :func:`analysis.audit.levers.find_levers` or,
            if the user gave the changes, in the user's order.
        refused: changes that the user gave and that cannot be judged, each with the reason.
        warnings: sentences about arguments that are probably mistakes, and about what may slow the
            step down.
        source: description of the measurements or constants that the times are based on.
    """

    title: str
    account: Account
    memory: Memory
    fits_with: Sequence[str]
    levers: Sequence[Lever]
    refused: Mapping[str, str]
    warnings: Sequence[str]
    assumptions: Sequence[str]
    source: str


def duration(us: float) -> str:
    """Format a time, given in µs, in a suitable unit, such as ``12.3 ms`` or ``1,220 s``."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        # A time that three digits would round up to 1 s or 1 ms is written in that unit.
        if us >= 0.9995 * size:
            return f"{three_digits(us / size)} {unit}"
    return f"{us:.3g} µs"


def duration_range(lo_us: float, hi_us: float) -> str:
    """Format an interval as ``52.1–71.1 µs``, or as ``977 µs – 3.96 ms`` if the units differ."""
    low, high = duration(lo_us), duration(hi_us)
    number, unit = low.split()
    return f"{number}–{high}" if high.endswith(f" {unit}") else f"{low} – {high}"


def products_frame(account: Account) -> pd.DataFrame:
    """Return a table with one row per distinct matrix operation, as in ``--json``.

    Times are for one instance, in µs. ``share`` is the share of the step's time that all instances
    take.
    """
    return pd.DataFrame([_product_record(account, row) for row in account.rows])


def levers_frame(levers: Sequence[Lever]) -> pd.DataFrame:
    """Return a table with one row per lever, as in ``--json``."""
    return pd.DataFrame([lever_json(lever) for lever in levers])


def _product_record(account: Account, row: AccountLine) -> dict[str, Any]:
    product = row.product
    is_counted = not math.isnan(row.time_us)
    return {
        "role": product.role,
        "path": product.path,
        "pass": product.pass_,
        "count": product.count,
        "problem": product.work.spec(),
        "flops": product.work.flops,
        "time_us": row.time_us if is_counted else None,
        "lo_us": row.lo_us if is_counted else None,
        "hi_us": row.hi_us if is_counted else None,
        "share": account.share(row) if is_counted else None,
        "peak_share": row.peak_share if is_counted else None,
        "limit": row.limit,
        "basis": row.basis,
        "names": dict(product.names),
    }


def lever_json(lever: Lever) -> dict[str, Any]:
    """Return one lever as a record.

    If the lever changes several dimensions, ``from`` and ``to`` map the names of these dimensions
    to values.
    """
    before: Any
    after: Any
    if len(lever.changes) == 1:
        (only_change,) = lever.changes.values()
        before, after = only_change
    else:
        before = {name: old for name, (old, _) in lever.changes.items()}
        after = {name: new for name, (_, new) in lever.changes.items()}
    return {
        "dimension": lever.name,
        "from": before,
        "to": after,
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


def audit_json(report: AuditReport, mode: str) -> dict[str, Any]:
    """Return the whole audit for JSON; ``mode`` is the kind of step, such as ``train``."""
    account = report.account
    lo_us, hi_us = account.interval_us
    other_records = [
        {"what": other.what, "bytes": other.bytes, "time_us": other.time_us}
        for other in account.other
    ]
    return {
        "machine": account.machine,
        "mode": mode,
        "source": report.source,
        "assumptions": list(report.assumptions),
        "not_counted": list(account.not_counted),
        "products": [_product_record(account, row) for row in account.rows],
        "other": other_records,
        "step_us": account.step_us,
        "lo_us": lo_us,
        "hi_us": hi_us,
        "flops": account.flops,
        "parameters": account.parameters,
        "levers": [lever_json(lever) for lever in report.levers],
        "refused": dict(report.refused),
        "warnings": list(report.warnings),
        "memory": report.memory.to_json(),
        "fits_with": list(report.fits_with),
    }


_HEAD = ("role", "pass", "count", "M×N×K", "each", "share", "of peak", "limit", "basis")


def _cells(account: Account, row: AccountLine) -> list[str]:
    """Return one operation's cells for the columns :data:`_HEAD`."""
    product = row.product
    operation = [product.role, product.pass_, str(product.count), str(product.work)]
    if math.isnan(row.time_us):
        return [*operation, "–", "–", "–", "", row.basis]
    return [
        *operation,
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
            f"{other.what}, {three_digits(other.bytes / 1e9)} GB",
            duration(other.time_us),
            f"{other.time_us / account.step_us:.1%}",
            "",
            "memory",
            "estimate",
        ]
        for other in account.other
    ]


def summary_lines(report: AuditReport) -> list[str]:
    """Summarise an audit: the step's time, whether the step fits in memory, and the best change."""
    account, memory = report.account, report.memory
    time_text = f"Step: {duration(account.step_us)} ({duration_range(*account.interval_us)})."
    needed_gb = three_digits(memory.total / 1e9)
    available_gb = three_digits(memory.available / 1e9)
    memory_text = f"Memory: {needed_gb} of {available_gb} GB"
    worthwhile = [lever for lever in report.levers if lever.verdict != LEAVE_IT]
    change_text = "Best change: no change is worth making."
    if worthwhile:
        best = max(worthwhile, key=lambda lever: lever.expected_gain)
        verdict_words = verdict_text(best.verdict, best.probability)
        change_text = (
            f"Best change: {best.words}; step gain {signed_percent(best.gain.value)}, "
            f"{verdict_words}."
        )
    if memory.fits is None:
        unknown_text = f"Memory: {needed_gb} GB; the machine did not report how much it has."
        return [time_text, unknown_text, change_text]
    if memory.fits:
        return [time_text, f"{memory_text}; the step fits.", change_text]
    # Not fitting matters more than the time, so it comes first.
    remedies = f" It fits with {' or '.join(report.fits_with)}." if report.fits_with else ""
    return [f"{memory_text}; THE STEP DOES NOT FIT.{remedies}", time_text, change_text]


def role_table(account: Account) -> list[list[str]]:
    """Return a head and a row with the share of the step's time that each role takes."""
    times = account.by_role
    shares = [f"{us / account.step_us:.0%}" for us in times.values()]
    return [["time by role", *times], ["share", *shares]]


def memory_table(memory: Memory) -> list[list[str]]:
    """Return a head and a row with the memory that a step needs for each use."""
    uses = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "gradients": memory.gradients,
        "KV cache": memory.kv_cache,
    }
    sizes = {name: f"{three_digits(size / 1e9)} GB" for name, size in uses.items() if size}
    if memory.gradients:
        sizes["gradients"] += " (later, in place of activations)"
    return [["memory by use", *sizes], ["size", *sizes.values()]]


def _listed(title: str, phrases: Sequence[str]) -> list[str]:
    """Format phrases as a list in Markdown, below a line with the title."""
    return [f"{title}:", *(f"- {phrase}" for phrase in phrases)]


_LEVER_HEAD = ("change", "step gain", "90% interval", "verdict", "basis", "FLOPs", "parameters")


def _lever_cells(lever: Lever) -> list[str]:
    gain = lever.gain
    return [
        lever.words,
        signed_percent(gain.value),
        f"{signed_percent(gain.lo)} to {signed_percent(gain.hi)}",
        verdict_text(lever.verdict, lever.probability),
        lever.evidence,
        f"{lever.flops:+.2%}",
        f"{lever.parameters:+.2%}",
    ]


def _lever_lines(levers: Sequence[Lever]) -> list[str]:
    """Format levers as an aligned table, each with its reason on the next line."""
    if not levers:
        return []
    head, *rows = aligned_lines([_LEVER_HEAD, *map(_lever_cells, levers)])
    lines = [head]
    for row, lever in zip(rows, levers, strict=True):
        lines += [row, f"    {lever.reason}"]
    return lines


def _refused_lines(report: AuditReport) -> list[str]:
    return [f"{words} cannot be judged: {why}" for words, why in report.refused.items()]


def sources(report: AuditReport) -> str:
    """Name the sources of an audit's times."""
    attention = report.account.attention
    return report.source + (f"; attention: {attention}" if attention else "")


def as_comparison(reports: Sequence[AuditReport]) -> str:
    """Compare machines: a paragraph for each machine, and a table with the time of each role.

    All reports are about the same step, so the assumptions of the first report apply to every
    report.
    """
    # 1. Build the table, with one column for each machine.
    accounts = [report.account for report in reports]
    table = [["", *(account.machine for account in accounts)]]
    role_times = [account.by_role for account in accounts]
    # Roles keep the order in which the accounts have them, without duplicates. All other operations
    # come last, even if a later account adds a role that the first account lacks.
    all_roles = dict.fromkeys(role for times in role_times for role in times)
    del all_roles[OTHER_OPERATIONS]
    for role in (*all_roles, OTHER_OPERATIONS):
        cells = []
        for account, times in zip(accounts, role_times, strict=True):
            if role in times:
                cells.append(f"{duration(times[role])}, {times[role] / account.step_us:.0%}")
            else:  # the role's operations are not counted on this machine
                cells.append("–")
        table.append([role, *cells])
    # 2. Write the paragraphs, each with the first levers and all refused changes, and then the
    #    table.
    lines = []
    shared = [
        warning
        for warning in reports[0].warnings
        if all(warning in report.warnings for report in reports)
    ]
    for report in reports:
        lines += [f"{report.title} on {report.account.machine}", *summary_lines(report)]
        lines += [warning for warning in report.warnings if warning not in shared]
        lines += _lever_lines(report.levers[:_COMPARED_LEVERS])
        left_out = len(report.levers) - _COMPARED_LEVERS
        if left_out > 0:
            more = counted(left_out, "more change is", "more changes are")
            lines.append(f"{more} left out; --json lists all {len(report.levers)}.")
        lines += [*_refused_lines(report), ""]
    lines += [*aligned_lines(table), ""]
    if shared:
        lines += [*shared, ""]
    for account in accounts:
        if account.not_counted:
            lines += [*_listed(f"Not counted on {account.machine}", account.not_counted), ""]
    lines += _listed("Assumed", reports[0].assumptions)
    return "\n".join(lines)


def aligned_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    column_count = len(table[0])
    widths = [max(len(row[column]) for row in table) for column in range(column_count)]
    lines = []
    for row in table:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def as_text(report: AuditReport) -> str:
    """Format an audit for a terminal."""
    account = report.account
    rows = [_cells(account, row) for row in account.rows]
    lines = [f"{report.title} on {account.machine}", *summary_lines(report), *report.warnings, ""]
    change_lines = [*_lever_lines(report.levers), *_refused_lines(report)]
    if change_lines:
        lines += [*change_lines, ""]
    for table in (role_table(account), memory_table(report.memory)):
        lines += [*aligned_lines(table), ""]
    lines += aligned_lines([list(_HEAD), *rows[:_MOST_ROWS], *_other_rows(account)])
    if len(rows) > _MOST_ROWS:
        lines.append(
            f"Only the {_MOST_ROWS} matrix operations that take the most time are shown; --json "
            f"lists all {len(rows)}."
        )
    lines += ["", *_listed("Assumed", report.assumptions)]
    if account.not_counted:
        lines += ["", *_listed("Not counted", account.not_counted)]
    return "\n".join(lines)


def as_markdown(report: AuditReport) -> str:
    """Format an audit as Markdown for a pull request."""
    account = report.account
    lines = [f"## {report.title} on {account.machine}", ""]
    lines += [f"- {line}" for line in [*summary_lines(report), *report.warnings]]
    if report.levers:
        head = [*_LEVER_HEAD, "reason"]
        lines += ["", table_row(head), "|" + "---|" * len(head)]
        lines += [table_row([*_lever_cells(lever), lever.reason]) for lever in report.levers]
    if report.refused:
        lines.append("")
        lines += [f"- {line}" for line in _refused_lines(report)]
    for head, row in (role_table(account), memory_table(report.memory)):
        lines += ["", table_row(head), "|" + "---|" * len(head), table_row(row)]
    lines += ["", table_row(_HEAD), "|" + "---|" * len(_HEAD)]
    rows = [*(_cells(account, row) for row in account.rows), *_other_rows(account)]
    lines += [table_row(row) for row in rows[:_MARKDOWN_ROWS]]
    if len(rows) > _MARKDOWN_ROWS:
        more = counted(len(rows) - _MARKDOWN_ROWS, "more row is", "more rows are")
        lines += ["", f"{more} left out."]
    lines += ["", f"Times: {sources(report)}.", "", *_listed("Assumed", report.assumptions)]
    if account.not_counted:
        lines += ["", *_listed("Not counted", account.not_counted)]
    return "\n".join([*lines, ""])
