"""Format the verdict on a trace for people, for pull requests and for scripts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.audit.audit_report import aligned_lines, duration, duration_range
from analysis.explain.explain import ExplainedOperation, TraceVerdict
from analysis.explain.kernel_evidence import NOT_ELIGIBLE
from analysis.markdown import plain, table_row
from analysis.traces.trace_account import ProfileAccount
from kernels.common.counts import counted

_MOST_ROWS = 10  # maximum number of operations in a table
_MOST_FINDINGS = 5  # maximum number of findings
_SHOWN_MODULES = 2  # number of innermost modules around an operation that a table names
_LONGEST_OPERATION = 52  # maximum length of an operation's name in a table, as for a kernel's
_LONGEST_NAME = 41  # maximum length of a kernel's name in a table; not shortened in JSON and CSV

RECORDING_SHAPES = """\
with torch.profiler.profile(record_shapes=True) as profiler:
    step()
profiler.export_chrome_trace("trace.json.gz")"""
"""Python code that records a trace with the shapes of its operations."""

_OF_KERNELS = ("Tensor Cores", "kernel")
_HEAD = (
    "operation", "problem", "calls", "each", "share", "expected", "of peak", "of bandwidth",
    *_OF_KERNELS,
)  # fmt: skip
# Namespaces of PyTorch's own kernels, which say nothing about a kernel.
_ATEN = re.compile(r"^(?:at::native::|\(anonymous namespace\)::)+")
# CUTLASS's template, and the kernel within it without its namespaces.
_CUTLASS = re.compile(r"cutlass::Kernel2?<(?:\w+::)*(\w+)")


@dataclass(frozen=True)
class TraceExplanation:
    """Explanation of traces as text, a DataFrame, JSON or Markdown.

    Printing an explanation prints the output of ``rooftile explain``.
    """

    verdict: TraceVerdict

    @property
    def operations(self) -> pd.DataFrame:
        """Table with one row per operation, and the operation's fields in ``--json`` as columns."""
        account = self.verdict.account
        return pd.DataFrame([_operation(account, entry) for entry in self.verdict.operations])

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``rooftile explain --json`` prints."""
        verdict, account = self.verdict, self.verdict.account
        bound = account.bound if math.isfinite(account.bound) else None
        return {
            "machine": verdict.machine.slug,
            "source": verdict.source,
            "traces": list(verdict.files),
            "gpu_time_us": account.total_us,
            "span_us": account.span_us,
            "idle_us": sum(account.idle_us.values()),
            "idle": account.idle_us,
            "devices": [
                {
                    "trace": device.file,
                    "span_us": device.span_us,
                    "busy_us": device.busy_us,
                    "idle": dict(device.idle_us),
                }
                for device in account.devices
            ],
            "operations": [_operation(account, entry) for entry in verdict.operations],
            "findings": [
                {
                    "subject": finding.subject,
                    "finding": finding.text,
                    "saves_us": finding.saves_us,
                    "gain": verdict.gain(finding.saves_us),
                }
                for finding in verdict.findings
            ],
            "amdahl": {"matrix_share": account.matrix_share, "bound": bound},
            "slowdown": verdict.slowdown,
            "notes": notes(verdict),
        }

    def markdown(self) -> str:
        """Return the explanation as a Markdown page for a pull request."""
        verdict, account = self.verdict, self.verdict.account
        lines = [f"## {plain(headline(verdict))}", ""]
        lines += [f"- {plain(line)}" for line in finding_lines(verdict)]
        head, *rows = _table(verdict)
        lines += ["", table_row(head), "|" + "---|" * len(head), *map(table_row, rows)]
        lines += ["", *(plain(line) for line in _closing(verdict))]
        if not account.with_shapes:
            lines += ["", "```py", *RECORDING_SHAPES.splitlines(), "```"]
        return "\n".join([*lines, ""])

    def __str__(self) -> str:
        verdict, account = self.verdict, self.verdict.account
        lines = [headline(verdict)]
        if verdict.findings:
            lines += ["", *finding_lines(verdict)]
        lines += ["", *aligned_lines(_table(verdict))]
        left_out = len(verdict.operations) - _MOST_ROWS
        if left_out > 0:
            lines.append(f"… and {left_out:,} more; --json and --csv list all operations.")
        lines += ["", *_closing(verdict)]
        if not account.with_shapes:
            lines += ["", *(f"    {line}" for line in RECORDING_SHAPES.splitlines())]
        return "\n".join(lines)


def _operation(account: ProfileAccount, entry: ExplainedOperation) -> dict[str, Any]:
    """Return an operation as a record for JSON and CSV.

    ``total_us`` and ``saves_us`` cover all calls; all other times are for one call. If the change
    answers a choose query, ``gain`` is per FLOP. Unknown values are None.
    """
    operation, expected, advice = entry.operation, entry.expected, entry.advice
    return {
        "op": operation.op,
        "module": operation.module,
        "problem": " + ".join(work.spec() for work in operation.works) or None,
        "dtype": operation.dtype or None,
        "matrix": operation.matrix,
        "calls": operation.calls,
        "time_us": operation.each_us,
        "total_us": operation.time_us,
        "share": operation.time_us / account.total_us if account.total_us else 0.0,
        "kernel": operation.kernel or None,
        "tile": operation.kernel_name.tile_text() or None,
        "tensor_cores": entry.tensor_cores,
        "peak_share": entry.peak_share,
        "bandwidth_share": entry.bandwidth_share,
        "predicted_us": None if expected is None else expected.time_us,
        "lo_us": None if expected is None else expected.lo_us,
        "hi_us": None if expected is None else expected.hi_us,
        "finding": entry.finding or None,
        "change": entry.change or None,
        "verdict": None if advice is None else advice.verdict,
        "probability": None if advice is None else advice.probability,
        "gain": None if advice is None else advice.gain.value,
        "reason": None if advice is None else advice.reason,
        "saves_us": entry.saves_us,
    }


def headline(verdict: TraceVerdict) -> str:
    """Return a line with the traced time and the largest possible saving, if there is one."""
    account = verdict.account
    traces = verdict.files[0] if len(verdict.files) == 1 else f"{len(verdict.files)} traces"
    noun = "kernels" if account.kind == "gpu" else "operations"
    title = (
        f"{traces} on {verdict.machine.slug}: {duration(account.total_us)} of {noun} in "
        f"{duration(account.span_us)}"
    )
    if not account.with_shapes and not verdict.findings:
        return f"{title}. No shapes were recorded."
    if not verdict.findings:
        return f"{title}. No change would save much time."
    first = verdict.findings[0]
    saving = _saving(verdict, first.saves_us)
    return f"{title}. Largest possible saving, {saving}: {first.subject}."


def _saving(verdict: TraceVerdict, saves_us: float) -> str:
    """Format a saving with its share of the trace's span, such as ``5.5 ms (28.1%)``."""
    return f"{duration(saves_us)} ({saves_us / verdict.account.span_us:.1%})"


def finding_lines(verdict: TraceVerdict) -> list[str]:
    """Return a line for each of the first five findings, and a line that counts any others."""
    lines = [
        f"{finding.subject}: {finding.text}. Possible saving: {_saving(verdict, finding.saves_us)}."
        for finding in verdict.findings[:_MOST_FINDINGS]
    ]
    left_out = len(verdict.findings) - _MOST_FINDINGS
    if left_out > 0:
        lines.append(f"Not shown: {counted(left_out, 'more finding')} with smaller savings.")
    return lines


def _table(verdict: TraceVerdict) -> list[list[str]]:
    """Return the table's header row, and a row for each of the first ten operations."""
    first = verdict.operations[:_MOST_ROWS]
    table = [list(_HEAD), *(_cells(verdict.account, entry) for entry in first)]
    columns = len(_HEAD)
    # A trace from a CPU has no kernels.
    if verdict.account.kind != "gpu":
        columns -= len(_OF_KERNELS)
    return [row[:columns] for row in table]


def _cells(account: ProfileAccount, entry: ExplainedOperation) -> list[str]:
    operation, expected = entry.operation, entry.expected
    share = operation.time_us / account.total_us if account.total_us else 0.0
    expected_text = "–"
    if expected is not None:
        interval = duration_range(expected.lo_us, expected.hi_us)
        expected_text = f"{duration(expected.time_us)} ({interval})"
    use = entry.tensor_cores or "unknown"
    module = ".".join(operation.module.split(".")[-_SHOWN_MODULES:])
    # An operation of torch.compile is a kernel, whose name lists all that was fused.
    name = _cut(operation.op, _LONGEST_OPERATION)
    return [
        f"{name} ({module})" if module else name,
        operation.shape or "–",
        str(operation.calls),
        duration(operation.each_us),
        f"{share:.1%}",
        expected_text,
        _percent(entry.peak_share),
        _percent(entry.bandwidth_share),
        "–" if use == NOT_ELIGIBLE else use,
        _shortened(operation.kernel) or "–",
    ]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _shortened(kernel: str) -> str:
    """Return a kernel's name without its return type, cut to :data:`_LONGEST_NAME` characters.

    The namespaces of PyTorch's own kernels are left out, too. If the kernel is an argument of
    CUTLASS's wrapper template, the argument's name is returned instead of the template's.
    """
    match = _CUTLASS.search(kernel)
    name = match.group(1) if match else _ATEN.sub("", _without_return_type(kernel))
    return _cut(name, _LONGEST_NAME)


def _cut(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _without_return_type(kernel: str) -> str:
    """Return a C++ signature without its return type.

    The return type may be a template, such as ``std::enable_if<!(false), void>::type``.
    """
    depth = 0  # number of open brackets
    start = 0  # position after the last space that is outside of brackets
    for position, character in enumerate(kernel):
        follows_name = position > start and kernel[position - 1] != ":"
        if character == "(" and depth == 0 and follows_name:  # the parameters begin
            break
        if character in "<(":
            depth += 1
        elif character in ">)":
            depth -= 1
        elif character == " " and depth == 0:
            start = position + 1
    return kernel[start:]


def _closing(verdict: TraceVerdict) -> list[str]:
    """Return the sentences below the table: idle shares, Amdahl's bound, notes and the source."""
    account = verdict.account
    lines = []
    if account.idle_us and account.span_us:
        shares = [f"{reason} {us / account.span_us:.1%}" for reason, us in account.idle_us.items()]
        lines.append(f"Idle share of the GPU's time, by reason: {', '.join(shares)}.")
    if math.isfinite(account.bound):
        lines.append(
            f"{account.matrix_share:.0%} of the operations' time is spent in matrix operations. "
            "However fast they became, the whole step could be at most "
            f"{account.bound:.3g}× as fast."
        )
    return [*lines, *notes(verdict), f"Expected times: {verdict.source}."]


def notes(verdict: TraceVerdict) -> list[str]:
    """Return sentences about properties of the trace that limit what the verdict can say."""
    account = verdict.account
    sentences = []
    if verdict.slowdown > 1:
        sentences.append(
            f"Most shapes take longer than expected (median ratio {verdict.slowdown:.2g}). Other "
            "work, a power limit or heat may have slowed the machine down, or the trace may not be "
            f"from {verdict.machine.slug}. An operation counts as slow only if its ratio is "
            "clearly above this median."
        )
    if not account.with_shapes and account.matrix_share:
        sentences.append(
            "The trace has no shapes, so no time can be compared with an expected time. Record a "
            "trace with record_shapes=True."
        )
    if not account.with_strides:
        sentences.append("The trace has no strides, so the layouts nt and nchw are assumed.")
    if any(finding.by_host for finding in verdict.findings):
        sentences.append(
            "The profiler slows the host down, so the GPU is idle for less time when no profiler "
            "runs."
        )
    if account.graph_us:
        sentences.append(
            f"{account.graph_us / account.total_us:.1%} of the operations' time is spent in "
            "kernels of CUDA graphs. A trace does not show the operations and shapes of such "
            "kernels. To compare the times of these operations with expected times, record a step "
            "without CUDA graphs."
        )
    if account.calls_without_kernel:
        calls = counted(
            account.calls_without_kernel, "call of a matrix operation", "calls of matrix operations"
        )
        sentences.append(
            f"The trace has no kernel for {calls}, for example because the profiler lost a record "
            "or a CUDA graph was being captured."
        )
    if account.left_out:
        were = "was" if account.left_out == 1 else "were"
        events = counted(account.left_out, "event")
        sentences.append(f"{events} without a name or with impossible times {were} left out.")
    return sentences
