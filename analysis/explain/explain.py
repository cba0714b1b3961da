"""Judge a trace's operations: how long each should take, why it takes longer, and what to change.

An operation's time is compared with the expected time of its shape on the machine. The expected
time comes from a recording, from a public table or from the time model. A change of sizes saves at
most the difference between the traced time and the expected time with the recommended sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from analysis.advice.answers import answers_to
from analysis.advice.options import Question
from analysis.advice.recommend import Advice
from analysis.advice.sizes import SizeConstraints, dimensions, role
from analysis.advice.verdict import LEAVE_IT, verdict_text
from analysis.audit.audit_report import duration
from analysis.explain.expected_times import ExpectedTime, expected_times, in_tf32, sum_of
from analysis.explain.kernel_evidence import (
    ELIGIBLE,
    LEAST_PART,
    kernel_reasons,
    share_of_converting,
    tensor_core_use,
)
from analysis.model.basis import Basis, find_basis
from analysis.recordings.load import recorded_machines, slug_at
from analysis.traces.trace_account import (
    COPY_BOUND,
    HOST_BOUND,
    LAUNCH_BOUND,
    ProfileAccount,
    ProfiledOperation,
    account_of,
)
from kernels.common.counts import counted, enumerated
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
from kernels.problem import Conv, Gemm, Problem
from sweeps.capture.captured import Work

_LEAST_SAVING = 0.005  # smallest saving that is a finding, as a share of the traced span
_MOST_NAMED = 3  # maximum number of operations that a finding names after the first
_LEAST_IDLE = 0.1  # idle time is a finding if one reason causes at least this share of the span
_MOST_PROPOSALS = 4  # maximum number of new values that are compared for one size
_MOST_ASKED = 400  # about this many shapes get advice on sizes; 400 take about a second
_ROUND = 8  # elements; sizes above 8 may be padded to the next multiple of 8
_LEAST_SHAPES = 5  # fewest shapes that can show whether the whole machine was slow
_MOST_PADDING = 0.5  # largest share of FLOPs that padding to multiples of 8 may add

_IDLE_WORDS = {
    LAUNCH_BOUND: (
        "the host launches kernels more slowly than the GPU runs them; a CUDA graph, "
        "torch.compile(mode='reduce-overhead') or a larger batch would help"
    ),
    HOST_BOUND: "the host was busy with something else, such as loading data, or waited for the "
    "GPU; loading data in the background or synchronising less often may help",
    COPY_BOUND: "data was copied between host and device; pinned memory and non_blocking copies "
    "would help",
}


class TraceFinding(NamedTuple):
    """A way to save time.

    Attributes:
        subject: the operations or the idle time, in words.
        text: reasons and remedies in words.
        saves_us: time in µs that could be saved, over all calls of the operations.
        by_host: True if the GPU was idle because of the host.
    """

    subject: str
    text: str
    saves_us: float
    by_host: bool = False


class _Saving(NamedTuple):
    """Time in µs that could be saved over all calls of an operation, with a remedy or a reason.

    ``by_tf32`` is True if the remedy is to compute in TF32.
    """

    us: float
    text: str
    by_tf32: bool = False


@dataclass(frozen=True)
class ExplainedOperation:
    """An operation of a trace, its expected time, and what could be saved.

    Attributes:
        operation: the operation, with its traced time.
        tensor_cores: result of :func:`tensor_core_use`.
        expected: expected time of one call; None if it is not known.
        peak_share: share of the machine's peak that the operation's arithmetic reaches; None if it
            is not known.
        bandwidth_share: share of the machine's bandwidth that the operation's minimum traffic uses;
            None if it is not known.
        finding: remedies that could save time, and reasons why the operation is slow; an empty
            string if too little time could be saved, or if the expected time is not known.
        change: sizes to change, such as ``N 50257 → 50264``; an empty string if no change is
            recommended.
        advice: the advice that recommends ``change``, or None.
        saves_us: largest possible saving in µs, over all calls; 0 without a finding.
        by_tf32: True if the largest possible saving comes from computing in TF32.
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
    by_tf32: bool = False


@dataclass(frozen=True)
class TraceVerdict:
    """Verdict on one or several traces of a job.

    Attributes:
        files: names of the traces.
        machine: the machine whose expected times the traced times are compared with.
        account: traced time by operation, and idle time by reason.
        operations: traced operations with their expected times, the largest possible saving first.
        findings: ways to save time, the largest saving first.
        source: measurements or constants that the expected times are based on, in words.
        slowdown: factor by which the whole machine is slower than expected. It is the median ratio
            of traced to expected times if at least five shapes have expected times and most of
            these shapes took longer than the upper end of their expected interval; otherwise, it
            is 1. An operation counts as slow only if its traced time exceeds ``slowdown`` times the
            upper end of its expected interval.
    """

    files: tuple[str, ...]
    machine: Machine
    account: ProfileAccount
    operations: tuple[ExplainedOperation, ...]
    findings: tuple[TraceFinding, ...]
    source: str
    slowdown: float = 1.0

    def gain(self, saves_us: float) -> float:
        """Return the relative gain in speed if ``saves_us`` µs of the traced span are saved."""
        span_us = self.account.span_us
        # Savings are upper bounds, so their sum may exceed the span. Some time always remains.
        remaining_us = max(span_us - saves_us, 1e-3 * span_us)
        return span_us / remaining_us - 1


def explain_traces(
    paths: Sequence[Path],
    machine: str | None,
    results: Path,
    against: Path | None = None,
    question: Question | None = None,
) -> TraceVerdict:
    """Explain the traces of a job, for example one trace of each rank.

    Args:
        paths: the traces.
        machine: the machine to compare with; None to find it from ``against`` or the traces.
        results: folder of all machines' results.
        against: folder to search before ``results``, with the results of one machine or of several
            machines.
        question: the pad or choose query; None for a query that allows padding by 12.5%, or by up
            to 50% if the next multiples of 8 need it.

    Raises:
        UserError: if a trace or a recording cannot be read, if the machine is unknown or does not
            fit the traces, or if another argument is invalid.
    """
    account = account_of(paths)
    basis = _basis(account, machine, results, against)
    return judge_account(tuple(path.name for path in paths), account, basis, question)


def _basis(
    account: ProfileAccount, machine: str | None, results: Path, against: Path | None
) -> Basis:
    """Return the model and measurements of the machine that a trace is compared with."""
    # 1. If the given folder belongs to one machine, compare with that machine.
    if against is not None:
        if (against / "run.json").exists():
            if machine is not None:
                raise UserError(
                    f"{against} is the folder of one machine, so it already names the machine. "
                    f"Leave --machine out, or give {against.parent} to --against."
                )
            folder = against.resolve()
            return find_basis(folder.name, folder.parent)
        if not against.is_dir():
            raise UserError(f"{against} is not a folder; --against takes a folder with results.")
    # 2. Look for the machine in the given folder, then in the folder of all results.
    name = machine or _machine_of(account)
    if against is not None:
        slug = None
        with suppress(UserError):  # a name that fits no machine there may fit one in ``results``
            slug = slug_at(against, name)
        if slug in recorded_machines(against):
            return find_basis(name, against)
    if machine is None and account.kind == "cpu" and name not in recorded_machines(results):
        raise UserError(
            f"the trace is from a CPU, and this CPU ({name}) is not recorded. Run "
            f"{target('sweep', 'run')} here first, or name the trace's machine with --machine."
        )
    if machine is None and account.kind == "gpu":
        try:
            slug_at(results, name)
        except UserError:
            raise UserError(
                f"the trace is from {account.device_names[0]!r}, which is neither known nor "
                "recorded; name a machine with --machine."
            ) from None
    return find_basis(name, results)


def _machine_of(account: ProfileAccount) -> str:
    """Return the slug of the GPU that a trace names, or of this CPU if the trace is from a CPU."""
    if account.kind == "cpu":
        if account.device_names:
            raise UserError(
                f"the trace is from {account.device_names[0]!r} and has no kernels. Record it with "
                "ProfilerActivity.CUDA among the activities, or name a CPU with --machine."
            )
        return cpu_slug(cpu_model(), instruction_set(), cpu_threads())
    if not account.device_names:
        raise UserError("the trace does not name its GPU; name the machine with --machine.")
    slugs = dict.fromkeys(map(slug_of_device, account.device_names))
    if len(slugs) > 1:
        raise UserError(
            f"the traces are from several kinds of GPUs ({', '.join(slugs)}); explain them one by "
            "one, or name a machine with --machine."
        )
    (slug,) = slugs
    return slug


def judge_account(
    files: tuple[str, ...], account: ProfileAccount, basis: Basis, question: Question | None = None
) -> TraceVerdict:
    """Compare the operations of traces with their expected times on a machine.

    Args:
        files: names of the traces.
        account: times of the traces.
        basis: model and measurements of the machine.
        question: the query, as in :func:`explain_traces`.

    Raises:
        UserError: if the machine's recording or its attention fits cannot be read, if the trace is
            from a CPU and the machine is a GPU or vice versa, or if the query does not fit a shape.
    """
    machine = basis.model.machine
    if account.kind != machine.kind:
        raise UserError(
            f"the trace is from a {account.kind.upper()}, but {machine.slug} is a "
            f"{machine.kind.upper()}; name the trace's machine with --machine or --against."
        )
    # 1. Find the expected time of each shape, and better sizes.
    times = expected_times(account, basis)
    queries = _queries(account, machine, question)
    advice = _advice(queries, basis)
    # 2. Explain each operation. If the whole machine is slow, this is not counted against single
    #    operations.
    slowdown = _slowdown(account, times)

    def explain_all() -> list[ExplainedOperation]:
        return _largest_saving_first(
            [
                _explained(operation, machine, times, advice, slowdown)
                for operation in account.operations
            ]
        )

    explained = explain_all()
    # 3. A size can have only one new value, although each operation was asked by itself.
    common = _advice_on_common_sizes(explained, queries, basis, times, slowdown)
    if common:
        advice |= common
        explained = explain_all()
    # 4. Keep large savings. Small savings are kept only if one remedy brings several of them, and
    #    their sum is large. The finding about a group describes its first operation, which is the
    #    one with the largest saving.
    groups = _grouped_by_remedy(explained)
    large = [group for group in groups if _saving_of(group) >= _LEAST_SAVING * account.span_us]
    kept = {id(entry) for group in large for entry in group}
    operations = [
        entry
        if id(entry) in kept
        else replace(entry, finding="", change="", advice=None, saves_us=0.0)
        for entry in explained
    ]
    operations = _largest_saving_first(operations)
    # 5. Add the idle time of the GPU to the findings.
    findings = [*map(_operation_finding, large), *_idle_findings(account)]
    findings.sort(key=lambda finding: -finding.saves_us)
    # 6. Name the source of the expected times, or the machine's basis if there are several sources.
    sources = {entry.expected.source for entry in operations if entry.expected is not None}
    source = sources.pop() if len(sources) == 1 else basis.source
    return TraceVerdict(
        files, machine, account, tuple(operations), tuple(findings), source, slowdown
    )


def _largest_saving_first(entries: Sequence[ExplainedOperation]) -> list[ExplainedOperation]:
    return sorted(entries, key=lambda entry: (-entry.saves_us, -entry.operation.time_us))


def _slowdown(account: ProfileAccount, times: Mapping[Work, ExpectedTime]) -> float:
    """Return :attr:`TraceVerdict.slowdown`."""
    traced_and_expected: list[tuple[float, ExpectedTime]] = []
    for operation in account.operations:
        expected = sum_of([times.get(work) for work in operation.works])
        if expected is not None:
            traced_and_expected.append((operation.each_us, expected))
    shape_count = len(traced_and_expected)
    slow_count = sum(traced_us > expected.hi_us for traced_us, expected in traced_and_expected)
    if shape_count < _LEAST_SHAPES or slow_count <= shape_count / 2:
        return 1.0
    return median(traced_us / expected.time_us for traced_us, expected in traced_and_expected)


def _grouped_by_remedy(
    explained: Sequence[ExplainedOperation],
) -> list[list[ExplainedOperation]]:
    """Return the operations with a finding, grouped by their remedy.

    Operations in which TF32 saves the most form one group. Operations in which exactly one size
    should change form a group if they share that size, its meaning in a model and its new value.
    Such operations may be the forward pass and the gradients of one layer, or may belong to several
    layers. Any other operation is a group by itself.
    """
    groups: dict[object, list[ExplainedOperation]] = {}
    for entry in explained:
        if entry.finding:
            key: object = "tf32" if entry.by_tf32 else _size_change(entry) or id(entry)
            groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _saving_of(group: Sequence[ExplainedOperation]) -> float:
    return sum(entry.saves_us for entry in group)


def _operation_finding(group: Sequence[ExplainedOperation]) -> TraceFinding:
    first, *others = group
    subject, text = subject_of(first.operation), first.finding
    size_change = _size_change(first)
    if not others:
        return TraceFinding(subject, text, first.saves_us)
    names = [subject_of(other.operation) for other in others[:_MOST_NAMED]]
    if len(others) > _MOST_NAMED:
        names.append(f"{len(others) - _MOST_NAMED} more")
    listed = f"{counted(len(others), 'other operation')}: {enumerated(names)}"
    text = f"{text}. These figures are for {subject}. "
    if first.by_tf32:
        subject = f"TF32 for {len(group)} operations in fp32"
        text += f"TF32 also saves time in {listed}"
    else:
        assert size_change is not None, "operations are grouped by TF32 or by a size change"
        before, _, meaning = size_change
        subject = f"the size {before} ({meaning}) of {len(group)} operations"
        text += f"The same size occurs in {listed}"
    return TraceFinding(subject, text, _saving_of(group))


def _size_change(entry: ExplainedOperation) -> tuple[int, int, str] | None:
    """Return the size that should change, its new value and its meaning in a model.

    The result is None unless exactly one dimension should change.
    """
    advice = entry.advice
    if advice is None or len(advice.changed) != 1:
        return None
    (name,) = advice.changed
    return getattr(advice.problem, name), getattr(advice.instead, name), advice.roles


def subject_of(operation: ProfiledOperation) -> str:
    """Return an operation's name, module and shape; the kernel stands in for an unknown shape."""
    shape = operation.shape or operation.kernel
    place = f" of {operation.module}" if operation.module else ""
    return f"{operation.op}{place} ({shape})" if shape else f"{operation.op}{place}"


def _queries(
    account: ProfileAccount, machine: Machine, question: Question | None
) -> dict[Problem, Question]:
    """Return a query for each of the GEMMs and convolutions that take the longest."""
    # The account has the longest operation first.
    query_of: dict[Problem, Question] = {}
    for operation in account.operations:
        for work in operation.works:
            if isinstance(work, Gemm | Conv) and work.dtype in machine.peaks:
                query_of.setdefault(work, question or _padding(work))
        if len(query_of) >= _MOST_ASKED:
            break
    return query_of


def _advice(query_of: Mapping[Problem, Question], basis: Basis) -> dict[Problem, Advice]:
    # The problems of one query are answered together, which is faster than one at a time.
    advice: dict[Problem, Advice] = {}
    for query in dict.fromkeys(query_of.values()):
        problems = [problem for problem in query_of if query_of[problem] == query]
        answers = answers_to(problems, basis, query)
        advice |= {answer.advice.problem: answer.advice for answer in answers}
    return advice


class _SizeChange(NamedTuple):
    """Change of the dimension ``name`` to the size ``after``."""

    name: str
    after: int


def _size_changes(entry: ExplainedOperation) -> dict[tuple[int, str], _SizeChange]:
    """Return an operation's advised size changes, keyed by the old size and its meaning in a model.

    The result is empty if two of the changed dimensions have the same size and meaning. Such
    dimensions change together, but :func:`_advice_on_common_sizes` changes only one dimension of an
    operation.
    """
    advice = entry.advice
    if advice is None:
        return {}
    changes = {
        (getattr(advice.problem, name), role(advice.problem, name)): _SizeChange(
            name, getattr(advice.instead, name)
        )
        for name in advice.changed
    }
    return changes if len(changes) == len(advice.changed) else {}


def _advice_on_common_sizes(
    explained: Sequence[ExplainedOperation],
    queries: Mapping[Problem, Question],
    basis: Basis,
    times: Mapping[Work, ExpectedTime],
    slowdown: float,
) -> dict[Problem, Advice]:
    """Return advice that changes a size of several operations to one new value in all of them.

    The advice on each operation ignored the other operations, so the operations of one layer may
    have got different new values. The value that saves most in all operations together is chosen.
    ``explained`` has the largest saving first.
    """
    # 1. Group the operations by the size that should change. If an operation should change several
    #    sizes, the one that most operations share counts.
    changes = [(entry, _size_changes(entry)) for entry in explained]
    counts = Counter(key for _, sizes in changes for key in sizes)
    groups: dict[tuple[int, str], list[tuple[ExplainedOperation, _SizeChange]]] = {}
    for entry, sizes in changes:
        if sizes:
            key = max(sizes, key=counts.__getitem__)
            groups.setdefault(key, []).append((entry, sizes[key]))
    # 2. Compare the new values of each group.
    common: dict[Problem, Advice] = {}
    for members in groups.values():
        if len({entry.change.partition(" ")[2] for entry, _ in members}) == 1:
            continue  # all members agree
        proposals = list(dict.fromkeys(change.after for _, change in members))
        best_us = 0.0
        best: dict[Problem, Advice] = {}
        for after in proposals[:_MOST_PROPOSALS]:
            query_of = {}
            for entry, change in members:
                assert entry.advice is not None, "a change comes from advice"
                problem = entry.advice.problem
                # Within the query's allowance, ``after`` is its only multiple.
                only = SizeConstraints(change=(change.name,), multiple=after, any_size=True)
                query_of[problem] = replace(queries[problem], constraints=only)
            advice = _advice(query_of, basis)
            savings = [
                _best_change(entry.operation, times, advice, slowdown) for entry, _ in members
            ]
            saved_us = sum(saving[1] for saving in savings if saving is not None)
            if saved_us > best_us:
                best_us, best = saved_us, advice
        common |= best
    return common


def _padding(problem: Problem) -> Question:
    """Return a pad query that may add up to 12.5% to the FLOPs, or more to reach multiples of 8.

    The limit is never above 50%. Sizes below 8 do not raise it, because padding them to 8 could
    multiply the FLOPs.
    """
    flops_ratio = 1.0  # ratio of the FLOPs after and before padding to multiples of 8
    for name in dimensions(problem):
        size = getattr(problem, name)
        if size > _ROUND:
            flops_ratio *= int(ceil_div(size, _ROUND)) * _ROUND / size
    usual = Question()
    return replace(usual, allowance=max(usual.allowance, min(flops_ratio - 1, _MOST_PADDING)))


def _explained(
    operation: ProfiledOperation,
    machine: Machine,
    times: Mapping[Work, ExpectedTime],
    advice: Mapping[Problem, Advice],
    slowdown: float,
) -> ExplainedOperation:
    """Compare an operation with its expected time, and find the possible savings.

    ``slowdown`` is the factor by which the whole machine is slower than expected, at least 1.
    """
    # 1. Describe the operation.
    expected = sum_of([times.get(work) for work in operation.works])
    explained = ExplainedOperation(
        operation,
        tensor_core_use(operation, machine),
        expected,
        _peak_share(operation, machine),
        _bandwidth_share(operation, machine),
    )
    if expected is None:
        return explained
    # 2. Find what could be saved at the same size.
    savings = _savings_at_this_size(
        operation, expected, times, machine, slowdown, explained.tensor_cores
    )
    # 3. Find the change of size that saves most.
    best = _best_change(operation, times, advice, slowdown)
    if best is not None:
        change, saves_us = best
        verdict_words = verdict_text(change.verdict, change.probability)
        gain = change.gain
        per_flop = " per FLOP" if change.question == "choose" else ""
        text = (
            f"{change.question} {change.change} ({change.roles}). Verdict: {verdict_words}. "
            f"Expected gain: {gain.value:+.1%}{per_flop} ({gain.lo:+.1%} to {gain.hi:+.1%}, "
            f"{change.evidence})"
        )
        savings.append(_Saving(saves_us, text))
        explained = replace(explained, change=change.change, advice=change)
    # 4. Put the finding into words, the largest saving first.
    if not savings:
        return explained
    savings.sort(key=lambda saving: -saving.us)
    reasons = kernel_reasons(operation, explained.tensor_cores)
    first, *others = [*(saving.text for saving in savings), *reasons]
    finding = ". ".join([first, *(f"{text[0].upper()}{text[1:]}" for text in others)])
    return replace(explained, finding=finding, saves_us=savings[0].us, by_tf32=savings[0].by_tf32)


def _savings_at_this_size(
    operation: ProfiledOperation,
    expected: ExpectedTime,
    times: Mapping[Work, ExpectedTime],
    machine: Machine,
    slowdown: float,
    tensor_cores: str | None,
) -> list[_Saving]:
    """Return the savings that are possible without changing a size."""
    traced_us = operation.each_us
    savings: list[_Saving] = []
    # 1. The operation takes significantly longer than expected.
    if traced_us > slowdown * expected.hi_us:
        excess_us = traced_us - slowdown * expected.time_us
        text = f"the operation takes {traced_us / expected.time_us:.1f}× the expected time"
        savings.append(_Saving(operation.calls * excess_us, text))
    # 2. A large share of the operation's time is spent on converting the layout of images.
    converting_share = share_of_converting(operation)
    has_nchw = any(getattr(work, "layout", "") == "nchw" for work in operation.works)
    if converting_share >= LEAST_PART and has_nchw:
        converting_us = converting_share * operation.time_us
        savings.append(_Saving(converting_us, "store images in channels_last"))
    # 3. The operation computes in fp32 without Tensor Cores, and TF32 would be faster.
    tf32_works = [in_tf32(work, machine) for work in operation.works]
    tf32_expected = sum_of([times.get(work) if work else None for work in tf32_works])
    if tensor_cores == ELIGIBLE and tf32_expected is not None:
        tf32_us = slowdown * tf32_expected.time_us
        if tf32_us < traced_us:
            text = (
                "compute in TF32; one call is then expected to take "
                f"{duration(tf32_expected.time_us)}"
            )
            savings.append(_Saving(operation.calls * (traced_us - tf32_us), text, by_tf32=True))
    return savings


def _peak_share(operation: ProfiledOperation, machine: Machine) -> float | None:
    if not operation.flops or not operation.each_us or operation.dtype not in machine.peaks:
        return None
    return operation.flops / (operation.each_us * 1e-6) / machine.peak(operation.dtype)


def _bandwidth_share(operation: ProfiledOperation, machine: Machine) -> float | None:
    if not operation.bytes or not operation.each_us:
        return None
    return operation.bytes / (operation.each_us * 1e-6) / machine.bandwidth


def _best_change(
    operation: ProfiledOperation,
    times: Mapping[Work, ExpectedTime],
    advice: Mapping[Problem, Advice],
    slowdown: float,
) -> tuple[Advice, float] | None:
    """Return the change of size that saves the most time, and the saving in µs over all calls.

    If the change answers a choose query, its gain is per FLOP. The saving is then the time saved on
    the original number of FLOPs. The result is None if no change saves time, or if the expected
    time is not known.
    """
    expected = sum_of([times.get(work) for work in operation.works])
    if expected is None:
        return None
    changes = []
    for work in operation.works:
        change = advice.get(work) if isinstance(work, Gemm | Conv) else None
        if change is None or change.verdict == LEAVE_IT or not change.changed:
            continue
        # If a call computes both gradients of a convolution, the time of the call is divided among
        # the gradients in proportion to their expected times.
        traced_us = operation.each_us * times[work].time_us / expected.time_us
        # The gain applies to the traced time, which is that of the original shape.
        gained_us = traced_us * (1 - 1 / (1 + change.gain.value))
        # A call that is already as fast as expected with the recommended size saves nothing.
        after_us = slowdown * times[work].time_us / (1 + change.gain.value)
        saves_us = min(gained_us, traced_us - after_us)
        if saves_us > 0:
            changes.append((change, operation.calls * saves_us))
    return max(changes, key=lambda item: item[1], default=None)


def _idle_findings(account: ProfileAccount) -> list[TraceFinding]:
    """Return a finding for each important reason why the GPU was idle.

    A reason is important if it is in :data:`_IDLE_WORDS` and kept the GPU idle for at least 10% of
    the span.
    """
    findings = []
    for reason, idle_us in account.idle_us.items():
        share = idle_us / account.span_us if account.span_us else 0.0
        if share >= _LEAST_IDLE and reason in _IDLE_WORDS:
            subject = f"GPU idle for {share:.0%} of the time"
            by_host = reason in (LAUNCH_BOUND, HOST_BOUND)
            findings.append(TraceFinding(subject, _IDLE_WORDS[reason], idle_us, by_host))
    return findings
