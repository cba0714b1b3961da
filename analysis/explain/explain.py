"""Judge each operation of a trace: what its shape should take, why it takes longer, what to change.

An operation's time is compared with the best evidence about its shape on the machine: measured, in
a public table, or predicted, each with an interval. Sizes to change to are those that
:mod:`analysis.advice.recommend` names. What a change would save is never more than the difference
between the traced time and the expected time of the other size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from analysis.advice.answers import answers_to
from analysis.advice.options import Question
from analysis.advice.recommend import Advice
from analysis.advice.sizes import dimensions
from analysis.advice.times import times_of
from analysis.advice.verdict import LEAVE_IT, verdict_text
from analysis.audit.account import as_problem, attention_time
from analysis.audit.audit_report import duration
from analysis.model.attention_basis import find_attention
from analysis.model.basis import Basis, find_basis
from analysis.recordings.load import recorded_machines, slug_at
from analysis.traces.trace_account import (
    COPY_BOUND,
    HOST_BOUND,
    LAUNCH_BOUND,
    MULTIPLYING,
    ProfileAccount,
    ProfiledOperation,
    account_of,
)
from kernels.common.errors import UserError
from kernels.common.program import target
from kernels.config import ceil_div
from kernels.machine import (
    Machine,
    cpu_model,
    cpu_slug,
    cpu_threads,
    instruction_set,
    slug_of_device,
)
from kernels.names import read_name
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Conv, Gemm, Problem
from sweeps.capture.captured import Attention, Work

USED, ELIGIBLE, NOT_ELIGIBLE = "used", "eligible", "no"
"""Use of Tensor Cores by an operation that uses them, that could, and that could not."""

_LEAST_SAVING = 0.005  # share of the traced time; a finding that would save less is left out
_MOST_NAMED = 3  # operations that a finding names, besides the first
_LEAST_IDLE = 0.1  # share of the span in which a GPU is idle for one reason, to be a finding
_LEAST_PART = 0.1  # share of an operation's time in transposes, or in reductions, to be named
_MOST_ASKED = 400  # shapes for which other sizes are tried, those that take longest; one second
_ROUND = 8  # elements; sizes that are not a multiple of it are padded to one
_LEAST_SHAPES = 5  # shapes by which a slow machine is told from slow shapes
_MOST_PADDING = 0.5  # most extra FLOPs for which a padding to a multiple of 8 is considered

_CONVERTS = re.compile("nchwToNhwc|nhwcToNchw|tensorTransform", re.IGNORECASE)

_IDLE_WORDS = {
    LAUNCH_BOUND: "the host launches kernels more slowly than the GPU computes them; a CUDA graph, "
    "torch.compile(mode='reduce-overhead') or a larger batch would help",
    HOST_BOUND: "the host was busy with something else, such as loading data, or waited for the "
    "GPU",
    COPY_BOUND: "data was copied between host and device; pinned memory and non_blocking copies "
    "would help",
}


class ExpectedTime(NamedTuple):
    """Expected time of one call in µs, with its interval and what it rests on."""

    time_us: float
    lo_us: float
    hi_us: float
    source: str


class TraceFinding(NamedTuple):
    """Time that could be saved: of what, why, and how much in µs."""

    subject: str
    text: str
    saves_us: float


@dataclass(frozen=True)
class ExplainedOperation:
    """An operation of a trace, next to what it should take.

    Attributes:
        operation: the operation, with its time.
        tensor_cores: one of :data:`USED`, :data:`ELIGIBLE` and :data:`NOT_ELIGIBLE`; None if the
            names of its kernels do not tell.
        expected: expected time of one call; None if nothing is known about it.
        peak_share: rate of its arithmetic over the machine's peak; None if the shape is not known.
        bandwidth_share: rate of its least traffic over the machine's bandwidth; None likewise.
        finding: what is wrong with it; empty if nothing is.
        change: sizes to change, such as ``N 50257 → 50264``; empty if none is better.
        advice: the advice behind ``change``.
        saves_us: what could be saved of all its calls; 0 without a finding.
    """

    operation: ProfiledOperation
    tensor_cores: str | None
    expected: ExpectedTime | None
    peak_share: float | None
    bandwidth_share: float | None
    finding: str = ""
    change: str = ""
    advice: Advice | None = None
    saves_us: float = 0.0


@dataclass(frozen=True)
class TraceVerdict:
    """Verdict on one or several traces of a job.

    Attributes:
        files: names of the traces.
        machine: the machine that the times are compared with.
        account: where the time went.
        operations: the operations; those by which most could be saved come first, then those that
            take longest.
        findings: what could be saved, the largest saving first.
        source: what the expected times rest on.
        slowdown: factor by which most shapes took longer than expected, which is the machine's;
            findings are beyond it. It is 1 if most shapes took as long as expected.
    """

    files: tuple[str, ...]
    machine: Machine
    account: ProfileAccount
    operations: tuple[ExplainedOperation, ...]
    findings: tuple[TraceFinding, ...]
    source: str
    slowdown: float = 1.0

    def gain(self, saves_us: float) -> float:
        """Return the gain of the traced time if some of it is saved, as a fraction."""
        rest = max(self.account.span_us - saves_us, 1e-3 * self.account.span_us)
        return self.account.span_us / rest - 1


def explain_traces(
    paths: Sequence[Path],
    machine: str | None,
    results: Path,
    against: Path | None = None,
    question: Question | None = None,
) -> TraceVerdict:
    """Explain the traces of a job, such as one of each rank.

    Args:
        paths: the traces.
        machine: the machine to compare with; None for the one that the traces name.
        results: folder of all machines' results.
        against: folder to look for results in first: that of one machine, or of several.
        question: how far sizes may change; by default, padding by 12.5%, or to the next multiple of
            8 if that is further.

    Raises:
        UserError: if a trace or a recording cannot be read, or the machine is not known.
    """
    account = account_of(paths)
    basis = _basis(account, machine, results, against)
    return judge_account(tuple(path.name for path in paths), account, basis, question)


def _basis(
    account: ProfileAccount, machine: str | None, results: Path, against: Path | None
) -> Basis:
    """Return what is known about the machine of a trace."""
    if against is not None:
        if (against / "run.json").exists():  # the folder of one machine
            if machine is not None:
                raise UserError(
                    f"{against} is the folder of one machine, so leave --machine out, or give "
                    "--against the folder that it is in."
                )
            folder = against.resolve()
            return find_basis(folder.name, folder.parent)
        if not against.is_dir():
            raise UserError(f"{against} is not a folder; give one with results to --against.")
    name = machine or _machine_of(account)
    if against is not None:
        with suppress(UserError):  # it may be one that only the other folder has
            if slug_at(against, name) in recorded_machines(against):
                return find_basis(name, against)
    if machine is None and account.kind == "cpu" and name not in recorded_machines(results):
        raise UserError(
            f"the trace is of a CPU, and {name} is not recorded. Run {target('sweep', 'run')} "
            "here first, or name the trace's machine by --machine."
        )
    try:
        return find_basis(name, results)
    except UserError:
        if machine is not None:
            raise
        raise UserError(
            f"the trace is of {account.device_names[0]!r}, which is neither known nor recorded; "
            "name a machine by --machine."
        ) from None


def _machine_of(account: ProfileAccount) -> str:
    """Return the slug of the machine that a trace names; that of this CPU if it is of a CPU."""
    if account.kind == "cpu":
        if account.device_names:
            raise UserError(
                f"the trace is of {account.device_names[0]!r} and has no kernels. Record it with "
                "ProfilerActivity.CUDA among the activities, or name a CPU by --machine."
            )
        return cpu_slug(cpu_model(), instruction_set(), cpu_threads())
    if not account.device_names:
        raise UserError("the trace does not name its GPU; name the machine by --machine.")
    slugs = dict.fromkeys(map(slug_of_device, account.device_names))
    if len(slugs) > 1:
        raise UserError(
            f"the traces are of several kinds of GPUs ({', '.join(slugs)}); explain them one by "
            "one, or name a machine by --machine."
        )
    return next(iter(slugs))


def judge_account(
    files: tuple[str, ...], account: ProfileAccount, basis: Basis, question: Question | None = None
) -> TraceVerdict:
    """Judge the operations of an account on a machine.

    Raises:
        UserError: if the machine's recording cannot be read.
    """
    machine = basis.model.machine
    if account.kind != machine.kind:
        raise UserError(
            f"the trace is of a {account.kind.upper()}, and {machine.slug} is a "
            f"{machine.kind.upper()}; name the trace's machine by --machine."
        )
    # 1. Find what each shape should take, and which other sizes take less.
    times = _expected_times(account, basis)
    advice = _advice(account, basis, question)
    # 2. Judge each operation, without what slowed down the whole machine.
    slowdown = _slowdown(account, times)
    judged = [_judged(o, machine, times, advice, slowdown) for o in account.operations]
    judged.sort(key=lambda entry: (-entry.saves_us, -entry.operation.time_us))
    # 3. List what could be saved, also of the time in which the GPU was idle. Small savings are no
    # findings, unless they are of one size and large together.
    groups = _of_one_size(judged)
    large = [group for group in groups if _saving_of(group) >= _LEAST_SAVING * account.span_us]
    named = {id(entry) for group in large for entry in group}
    operations = [
        entry
        if id(entry) in named
        else replace(entry, finding="", change="", advice=None, saves_us=0.0)
        for entry in judged
    ]
    operations.sort(key=lambda entry: (-entry.saves_us, -entry.operation.time_us))
    findings = [*map(_operation_finding, large), *_idle_findings(account)]
    findings.sort(key=lambda finding: -finding.saves_us)
    sources = {entry.expected.source for entry in operations if entry.expected is not None}
    source = basis.source if len(sources) != 1 else next(iter(sources))
    return TraceVerdict(
        files, machine, account, tuple(operations), tuple(findings), source, slowdown
    )


def _slowdown(account: ProfileAccount, times: Mapping[Work, ExpectedTime]) -> float:
    """Return the median of traced over expected times if most shapes take too long, else 1."""
    pairs = [(o.each_us, _sum_of([times.get(w) for w in o.works])) for o in account.operations]
    known = [(us, expected) for us, expected in pairs if expected is not None]
    slow = sum(us > expected.hi_us for us, expected in known)
    if len(known) < _LEAST_SHAPES or slow <= len(known) / 2:
        return 1.0
    return median(us / expected.time_us for us, expected in known)


def _of_one_size(judged: Sequence[ExplainedOperation]) -> list[list[ExplainedOperation]]:
    """Return operations with a finding, in groups of which the same size should change.

    A layer's size is in its forward pass and in both gradients, and in those of every batch.
    """
    groups: dict[object, list[ExplainedOperation]] = {}
    for entry in judged:
        if entry.finding:
            groups.setdefault(_changed_size(entry) or id(entry), []).append(entry)
    return list(groups.values())


def _saving_of(group: Sequence[ExplainedOperation]) -> float:
    return sum(entry.saves_us for entry in group)


def _operation_finding(group: Sequence[ExplainedOperation]) -> TraceFinding:
    """Return the finding about operations of which the same size should change, or about one."""
    first, *others = group
    subject, text = subject_of(first.operation), first.finding
    changed = _changed_size(first)
    if others and changed is not None:
        before, _, meaning = changed
        names = [subject_of(other.operation) for other in others[:_MOST_NAMED]]
        if len(others) > _MOST_NAMED:
            names.append(f"{len(others) - _MOST_NAMED} more")
        text = f"{text}. This is for {subject}; the same size is in {' and '.join(names)}"
        subject = f"the size {before} ({meaning}) of {len(group)} operations"
    return TraceFinding(subject, text, _saving_of(group))


def _changed_size(entry: ExplainedOperation) -> tuple[int, int, str] | None:
    """Return a size before and after a change, and its meaning; None unless one size changes."""
    advice = entry.advice
    if advice is None or len(advice.changed) != 1:
        return None
    (name,) = advice.changed
    return getattr(advice.problem, name), getattr(advice.instead, name), advice.roles


def subject_of(operation: ProfiledOperation) -> str:
    """Return the words that name an operation: its name, module and shape."""
    shape = operation.shape or operation.kernel
    place = f" of {operation.module}" if operation.module else ""
    return f"{operation.op}{place}, {shape}" if shape else f"{operation.op}{place}"


def _expected_times(account: ProfileAccount, basis: Basis) -> dict[Work, ExpectedTime]:
    """Return what a call of each shape should take; shapes of which nothing is known are missing.

    For fp32 shapes on a GPU with TF32, the time in TF32 is found, too.
    """
    machine = basis.model.machine
    works = dict.fromkeys(work for o in account.operations for work in o.works)
    # 1. GEMMs and convolutions, which are predicted together.
    problems: dict[Problem, list[Work]] = {}
    for work in works:
        problem = as_problem(work)
        if problem is not None and problem.dtype in machine.peaks:
            problems.setdefault(problem, []).append(work)
    for problem in list(problems):
        if (faster := in_tf32(problem, machine)) is not None:
            problems.setdefault(faster, [faster])
    times: dict[Work, ExpectedTime] = {}
    rows = times_of(list(problems), basis) if problems else []
    for problem, row in zip(problems, rows, strict=True):
        ends = float(row["lo_us"]), float(row["hi_us"])
        time = ExpectedTime(float(row["time_us"]), *ends, row["source"])
        times.update(dict.fromkeys(problems[problem], time))
    # 2. Attention, of which only GPUs' times in 16 bits are known.
    for work in works:
        if isinstance(work, Attention):
            known = find_attention(machine, work.dtype, basis.folder)
            if known is not None and work.dtype in machine.peaks:
                call = attention_time(work, known, None)
                source = known.source(None)
                times[work] = ExpectedTime(1e6 * call.seconds, 1e6 * call.lo, 1e6 * call.hi, source)
    return times


def in_tf32(work: Work, machine: Machine) -> Problem | None:
    """Return an fp32 problem in TF32; None for another dtype, or if the machine has no TF32."""
    if not isinstance(work, Gemm | Conv) or work.dtype != "fp32" or "tf32" not in machine.peaks:
        return None
    return replace(work, dtype="tf32")


def _advice(
    account: ProfileAccount, basis: Basis, question: Question | None
) -> dict[Problem, Advice]:
    """Return the advice on the shapes that take longest, as far as they may change."""
    machine = basis.model.machine
    asked: dict[Problem, Question] = {}
    for operation in account.operations:
        for work in operation.works:
            if isinstance(work, Gemm | Conv) and work.dtype in machine.peaks:
                asked.setdefault(work, question or _padding(work))
        if len(asked) >= _MOST_ASKED:
            break
    advice: dict[Problem, Advice] = {}
    for each in dict.fromkeys(asked.values()):
        problems = [problem for problem, its in asked.items() if its == each]
        answers = answers_to(problems, basis, each)
        advice |= {answer.advice.problem: answer.advice for answer in answers}
    return advice


def _padding(problem: Problem) -> Question:
    """Return the query for padding by 12.5%, or to the next multiples of 8 if that is further."""
    growth = 1.0
    for name in dimensions(problem):
        size = getattr(problem, name)
        growth *= int(ceil_div(size, _ROUND)) * _ROUND / size if size > _ROUND else 1.0
    usual = Question()
    return replace(usual, allowance=max(usual.allowance, min(growth - 1, _MOST_PADDING)))


def _judged(
    operation: ProfiledOperation,
    machine: Machine,
    times: Mapping[Work, ExpectedTime],
    advice: Mapping[Problem, Advice],
    slowdown: float,
) -> ExplainedOperation:
    """Judge one operation: by its expected time, its kernels and other sizes.

    What is expected of it takes longer by the machine's ``slowdown``.
    """
    # 1. Describe it.
    expected = _sum_of([times.get(work) for work in operation.works])
    entry = ExplainedOperation(
        operation,
        tensor_core_use(operation, machine),
        expected,
        _peak_share(operation, machine),
        operation.bytes / (operation.each_us * 1e-6) / machine.bandwidth
        if operation.bytes and operation.each_us
        else None,
    )
    if expected is None:
        return entry
    # 2. Collect what could be saved, and why.
    reasons = kernel_reasons(operation, entry.tensor_cores)
    savings: list[tuple[float, str]] = []
    excess = operation.each_us - slowdown * expected.time_us
    if operation.each_us > slowdown * expected.hi_us:
        savings.append(
            (
                operation.calls * excess,
                f"takes {operation.each_us / expected.time_us:.1f}× the expected time",
            )
        )
    transposes = _transposed_share(operation)
    if transposes >= _LEAST_PART and any(
        getattr(w, "layout", "") == "nchw" for w in operation.works
    ):
        savings.append((transposes * operation.time_us, "store images in channels_last"))
    faster = _sum_of(
        [times.get(tf32) if (tf32 := in_tf32(work, machine)) else None for work in operation.works]
    )
    if entry.tensor_cores == ELIGIBLE and faster and slowdown * faster.time_us < operation.each_us:
        saves = operation.calls * (operation.each_us - slowdown * faster.time_us)
        savings.append((saves, f"TF32 is expected to take {duration(faster.time_us)}"))
    # 3. Add the change of size that saves most.
    best = _best_change(operation, times, advice, slowdown)
    if best is not None:
        change, saves = best
        words = verdict_text(change.verdict, change.probability)
        gain = change.gain
        text = (
            f"{change.question} {change.change} ({change.roles}): {words}, {gain.value:+.1%} "
            f"({gain.lo:+.1%} to {gain.hi:+.1%}, {change.evidence})"
        )
        savings.append((saves, text))
        entry = replace(entry, change=change.change, advice=change)
    if not savings:
        return entry
    savings.sort(key=lambda saving: -saving[0])
    finding = "; ".join([*(text for _, text in savings), *reasons])
    return replace(entry, finding=finding, saves_us=savings[0][0])


def _sum_of(parts: Sequence[ExpectedTime | None]) -> ExpectedTime | None:
    """Return the sum of a call's expected times; None if one of them is not known."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return ExpectedTime(
        sum(part.time_us for part in known),
        sum(part.lo_us for part in known),
        sum(part.hi_us for part in known),
        known[0].source,
    )


def tensor_core_use(operation: ProfiledOperation, machine: Machine) -> str | None:
    """Return whether an operation uses Tensor Cores or could, or None if no name tells.

    Operations in fp32 could use them in TF32.
    """
    used = operation.uses_tensor_cores
    if used:
        return USED
    dtype = "tf32" if operation.dtype == "fp32" else operation.dtype
    if machine.kind == "cpu" or not operation.works or dtype not in machine.peaks:
        return NOT_ELIGIBLE
    return ELIGIBLE if used is False else None


def _peak_share(operation: ProfiledOperation, machine: Machine) -> float | None:
    if not operation.flops or not operation.each_us or operation.dtype not in machine.peaks:
        return None
    return operation.flops / (operation.each_us * 1e-6) / machine.peak(operation.dtype)


def kernel_reasons(operation: ProfiledOperation, tensor_cores: str | None) -> list[str]:
    """Return why an operation may be slow, as far as the names of its kernels tell."""
    reasons = []
    if tensor_cores == ELIGIBLE:
        reasons.append("its kernel uses CUDA cores instead of Tensor Cores")
    facts = operation.kernel_name
    size = DTYPE_BYTES.get(operation.dtype, WIDE_BYTES)
    if facts.alignment is not None and facts.alignment * size < WIDE_BYTES:
        elements = "one element" if facts.alignment == 1 else f"{facts.alignment} elements"
        reasons.append(f"its kernel loads {elements} at a time (align{facts.alignment})")
    if (share := _transposed_share(operation)) >= _LEAST_PART:
        reasons.append(f"{share:.0%} of its time converts layouts")
    split = any(
        name.kind in MULTIPLYING and name.split_k for name in map(read_name, operation.kernels)
    )
    if (share := operation.share_of_kind("reduce")) >= _LEAST_PART:
        what = "adds up the parts of a split K" if split else "is in reductions"
        reasons.append(f"{share:.0%} of its time {what}")
    return reasons


def _transposed_share(operation: ProfiledOperation) -> float:
    """Return the share of an operation's time in kernels that convert the layout of images."""
    total = sum(operation.kernels.values())
    converting = [us for name, us in operation.kernels.items() if _CONVERTS.search(name)]
    return sum(converting) / total if total else 0.0


def _best_change(
    operation: ProfiledOperation,
    times: Mapping[Work, ExpectedTime],
    advice: Mapping[Problem, Advice],
    slowdown: float,
) -> tuple[Advice, float] | None:
    """Return the change of size that saves most of an operation's time, and how much in µs.

    A call that computes both gradients of a convolution is divided by their expected times. If a
    call already takes no longer than the other size is expected to take, there is nothing to save.
    """
    expected = _sum_of([times.get(work) for work in operation.works])
    if expected is None:
        return None
    changes = []
    for work in operation.works:
        change = advice.get(work) if isinstance(work, Gemm | Conv) else None
        if change is None or change.verdict == LEAVE_IT or not change.changed:
            continue
        part = operation.each_us * times[work].time_us / expected.time_us
        other_size = slowdown * times[work].time_us / (1 + change.gain.value)
        saves = min(part * (1 - 1 / (1 + change.gain.value)), part - other_size)
        if saves > 0:
            changes.append((change, operation.calls * saves))
    return max(changes, key=lambda item: item[1], default=None)


def _idle_findings(account: ProfileAccount) -> list[TraceFinding]:
    """Return a finding for each reason for which the GPU was idle for a tenth of the time."""
    findings = []
    for reason, us in account.idle_us.items():
        share = us / account.span_us if account.span_us else 0.0
        if share >= _LEAST_IDLE and reason in _IDLE_WORDS:
            findings.append(
                TraceFinding(f"GPU idle for {share:.0%} of the time", _IDLE_WORDS[reason], us)
            )
    return findings
