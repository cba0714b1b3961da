"""Compute the time of a model's step, with an interval, from the step's operations.

The time of a step is the time of its matrix operations (GEMMs, convolutions and attention) plus the
time in which all other operations move their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from analysis.advice.times import times_of
from analysis.audit.bandwidth import moving_seconds
from analysis.audit.padding import with_padding
from analysis.audit.runtime import COMPILE, RECOMPUTED, Runtime, optimizer_bytes
from analysis.audit.step_totals import summed
from analysis.model.attention_basis import AttentionBasis, AttentionTime, find_attention
from analysis.model.basis import Basis
from analysis.model.query import group_of
from kernels.common.errors import UserError
from kernels.config import ceil_div
from kernels.machine import Machine
from kernels.problem import Gemm, Problem
from sweeps.capture.captured import (
    FORWARD,
    WGRAD,
    Attention,
    Captured,
    GroupedGemm,
    MovedBytes,
    Product,
    Work,
)

ASSUMED_SHARE = 0.5
"""Share of the peak that attention is assumed to reach if attention was not measured (as on a CPU)
and the user gives no share."""

ATTENTION_RANGE = 1.5
"""Factor by which an assumed time of attention may be wrong, in either direction."""

BACKWARD = 2.5
"""Ratio of the time of attention's backward pass to the time of its forward pass.

The backward pass has five GEMMs instead of two (Dao 2023, FlashAttention-2), and is assumed to
reach the same share of the peak.
"""

MOVED_RANGE = 1.5
"""Factor by which the time of other operations may be wrong, in either direction: caches may hold
part of the data, and small kernels take longer than their bytes suggest."""

OTHER_OPERATIONS = "other"
"""Label for all other operations together, such as normalisation, activations and the optimizer."""

_LEAST_QUERIES = 128
"""Smallest number of queries at which an attention call is assumed to reach a share of the peak.
Memory limits calls with fewer queries."""


@dataclass(frozen=True)
class AccountLine:
    """A matrix operation of a step, with its time.

    Attributes:
        time_us: time of one instance in µs; NaN if the operation is not counted.
        lo_us: lower end of the time's interval, which is a 95% interval if the time was measured
            with an interval, and otherwise a 90% interval.
        hi_us: upper end of that interval.
        basis: source of the time, such as ``measured`` or ``assumed``.
        limit: what limits the operation, such as ``compute`` or ``memory``.
        peak_share: share of the dtype's peak that the operation reaches.
        in_sums: factors that scale the lower and the upper half of the interval when times are
            summed, because the errors may be more or less correlated than the sum assumes.
        spread: for attention predicted from measured calls,
            :attr:`analysis.model.attention_basis.AttentionTime.spread`; otherwise 0.
    """

    product: Product
    time_us: float
    lo_us: float
    hi_us: float
    basis: str
    limit: str
    peak_share: float
    in_sums: tuple[float, float] = (1.0, 1.0)
    spread: float = 0.0

    @property
    def total_us(self) -> float:
        """Time of all instances in µs."""
        return self.product.count * self.time_us

    @property
    def part_of_sum(self) -> tuple[float, float, float]:
        """Time of all instances in µs with its interval, as (time, lo, hi).

        The interval is scaled by ``in_sums``.
        """
        below, above = self.in_sums
        lo = self.time_us - below * (self.time_us - self.lo_us)
        hi = self.time_us + above * (self.hi_us - self.time_us)
        count = self.product.count
        return self.total_us, count * lo, count * hi


@dataclass(frozen=True)
class OtherOperations:
    """Bytes that other operations of one kind move, and the time that they take for it, in µs."""

    what: str
    bytes: int
    time_us: float


@dataclass(frozen=True)
class Account:
    """Time of a model's step on a machine, by operation. All times are in µs.

    Attributes:
        machine: slug of the machine.
        not_counted: names of operations whose time is not counted.
        attention: source of the attention times, in words; "" if no attention time is predicted
            from measured calls.
    """

    machine: str
    lines: tuple[AccountLine, ...]
    other: tuple[OtherOperations, ...]
    parameters: int
    not_counted: tuple[str, ...]
    attention: str = ""

    @property
    def rows(self) -> list[AccountLine]:
        """Lines merged by role, path, pass and shape, in order of decreasing time."""
        counts: dict[tuple[object, ...], int] = {}
        first_lines: dict[tuple[object, ...], AccountLine] = {}
        for line in self.lines:
            product = line.product
            key = (product.role, product.path, product.pass_, product.work)
            counts[key] = counts.get(key, 0) + product.count
            first_lines.setdefault(key, line)
        rows = [
            replace(line, product=replace(line.product, count=counts[key]))
            for key, line in first_lines.items()
        ]
        # Rows that are not counted, whose time is NaN, come last.
        return sorted(rows, key=lambda row: math.inf if math.isnan(row.total_us) else -row.total_us)

    @property
    def products_us(self) -> float:
        """Time of all counted matrix operations in µs."""
        return sum(line.total_us for line in self.counted)

    @property
    def counted(self) -> list[AccountLine]:
        """Lines whose time is counted."""
        return [line for line in self.lines if not math.isnan(line.time_us)]

    @property
    def by_role(self) -> dict[str, float]:
        """Time of the step in µs by role, largest first.

        The last entry, ``other``, is the time of all other operations and of the matrix operations
        whose role is unknown.
        """
        role_us: dict[str, float] = {}
        for line in self.counted:
            role = line.product.role
            role_us[role] = role_us.get(role, 0.0) + line.total_us
        others_us = role_us.pop(OTHER_OPERATIONS, 0.0) + sum(other.time_us for other in self.other)
        longest_first = dict(sorted(role_us.items(), key=lambda item: -item[1]))
        return {**longest_first, OTHER_OPERATIONS: others_us}

    @property
    def step_us(self) -> float:
        """Time of all counted matrix operations and of all other operations in µs."""
        return self.products_us + sum(other.time_us for other in self.other)

    @property
    def flops(self) -> int:
        """FLOPs of all matrix operations, including those that are not counted."""
        return sum(line.product.count * line.product.work.flops for line in self.lines)

    @property
    def interval_us(self) -> tuple[float, float]:
        """90% interval of the step's time in µs, with a lower end of at least 0."""
        # Measured times have 95% intervals. They are added up as if they were 90% intervals, so the
        # result may be slightly too wide.
        products = summed([line.part_of_sum for line in self.counted])
        moved = sum(other.time_us for other in self.other)
        # The errors of matrix operations and of all other operations are assumed to be independent,
        # so they add up in quadrature.
        below = math.hypot(products.time - products.lo, moved * (1 - 1 / MOVED_RANGE))
        above = math.hypot(products.hi - products.time, moved * (MOVED_RANGE - 1))
        return max(self.step_us - below, 0.0), self.step_us + above

    def share(self, line: AccountLine) -> float:
        """Return the share of the step's time that a line takes."""
        return line.total_us / self.step_us


def as_problem(work: Work) -> Problem | None:
    """Return a matrix operation as a GEMM or convolution, or None for attention.

    A grouped GEMM becomes a batched GEMM, in which each active expert gets the same number of rows.
    """
    if isinstance(work, Attention):
        return None
    if not isinstance(work, GroupedGemm):
        return work
    # If there are fewer rows than experts, each row goes to a different expert.
    active_experts = min(work.experts, work.m)
    rows = int(ceil_div(work.m, active_experts))
    if work.pass_ == WGRAD:  # the weight gradient of an expert sums over the expert's rows
        return Gemm(work.n, work.k, rows, work.dtype, work.layout, active_experts)
    return Gemm(rows, work.n, work.k, work.dtype, work.layout, active_experts)


def account_of(captured: Captured, runtime: Runtime, basis: Basis) -> Account:
    """Compute the time of a model's step on a machine.

    Raises:
        UserError: if the step does not suit the machine or the runtime, or if measurements cannot
            be read.
    """
    machine = basis.model.machine
    products = runtime.products(captured)
    padding_bytes = 0
    if runtime.kind == COMPILE:
        products, padding_bytes = with_padding(products, basis)
    # 1. Predict each distinct problem once.
    problem_of = {product.work: as_problem(product.work) for product in products}
    distinct = list(
        dict.fromkeys(problem for problem in problem_of.values() if problem is not None)
    )
    answer_to = dict(zip(distinct, times_of(distinct, basis), strict=True))
    # 2. Find what is known about attention in each dtype, unless the user assumes a share of the
    #    peak.
    attention_bases: dict[str, AttentionBasis | None] = {}
    if runtime.attention is None:
        dtypes = dict.fromkeys(
            product.work.dtype for product in products if isinstance(product.work, Attention)
        )
        attention_bases = {
            dtype: find_attention(machine, dtype, basis.attention_folder) for dtype in dtypes
        }
    sources = [
        attention_basis.source(runtime.attention_kernel)
        for attention_basis in attention_bases.values()
        if attention_basis is not None
    ]
    if runtime.attention_kernel and attention_bases and not sources:
        raise UserError(
            f"attention in {' or '.join(attention_bases)} was not measured on {machine.slug}; "
            "leave --attention-kernel out."
        )
    # 3. Create a line for each matrix operation.
    lines = []
    for product in products:
        problem = problem_of[product.work]
        if isinstance(product.work, Attention):
            lines.append(_attention_line(product, product.work, runtime, machine, attention_bases))
        else:
            assert problem is not None
            lines.append(_problem_line(product, problem, answer_to[problem], basis))
    missing = [f"attention: {line.product.work}" for line in lines if math.isnan(line.time_us)]
    # 4. Add the bytes of all other operations. Only a step with a backward pass has an optimizer.
    moved = captured.moved_fused if runtime.kind == COMPILE else captured.moved
    if any(product.pass_ not in (FORWARD, RECOMPUTED) for product in products):
        optimizer = f"optimizer ({runtime.optimizer})"
        moved = (*moved, MovedBytes(optimizer, optimizer_bytes(captured, runtime)))
    moved = (*moved, MovedBytes("padded copies", padding_bytes))
    other = tuple(
        OtherOperations(
            entry.what, entry.bytes, moving_seconds(entry.what, entry.bytes, basis) * 1e6
        )
        for entry in moved
        if entry.bytes
    )
    # The step may consist of only attention that is not counted.
    if not other and len(missing) == len(lines):
        raise UserError(
            f"this step has no operation whose time can be counted on {machine.slug}; give another "
            "machine or --dtype."
        )
    return Account(
        machine=machine.slug,
        lines=tuple(lines),
        other=other,
        parameters=captured.parameters,
        not_counted=tuple(dict.fromkeys((*captured.uncounted, *missing))),
        # All attention of a step nearly always has one dtype, so the first source is enough.
        attention=sources[0] if sources else "",
    )


def _problem_line(
    product: Product, problem: Problem, answer: Mapping[str, Any], basis: Basis
) -> AccountLine:
    """Return the line of a GEMM or convolution; ``answer`` is its row from :func:`times_of`."""
    seconds = answer["time_us"] * 1e-6
    peak = basis.model.machine.peak(product.work.dtype)
    in_sums = (1.0, 1.0)
    if answer["evidence"] == "measured":
        source = "measured"
    else:
        source = answer["basis"]
        # The factors for sums were fitted to measured shapes, so they hold only for similar ones.
        fit = basis.model.fit_of(group_of(basis.library(problem), problem))
        if fit.has_like(problem):
            in_sums = (fit.sum_low, fit.sum_high)
    return AccountLine(
        product,
        time_us=answer["time_us"],
        lo_us=answer["lo_us"],
        hi_us=answer["hi_us"],
        basis=source,
        limit=answer["limit"],
        peak_share=product.work.flops / seconds / peak,
        in_sums=in_sums,
    )


def _attention_line(
    product: Product,
    work: Attention,
    runtime: Runtime,
    machine: Machine,
    attention_bases: Mapping[str, AttentionBasis | None],
) -> AccountLine:
    """Return the line of an attention call.

    If ``attention_bases`` has no fits for the call's dtype, a share of the peak is assumed, and
    calls with fewer than :data:`_LEAST_QUERIES` queries are not counted.
    """
    peak = machine.peak(work.dtype)
    basis = attention_bases.get(work.dtype)
    if basis is not None:
        time = attention_time(work, basis, runtime.attention_kernel)
        return AccountLine(
            product,
            time_us=time.seconds * 1e6,
            lo_us=time.lo * 1e6,
            hi_us=time.hi * 1e6,
            basis=basis.kind if work.pass_ == FORWARD else "assumed",
            limit=time.limit,
            peak_share=work.flops / time.seconds / peak,
            spread=time.spread,
        )
    if work.queries < _LEAST_QUERIES:
        return AccountLine(
            product,
            time_us=math.nan,
            lo_us=math.nan,
            hi_us=math.nan,
            basis="not counted",
            limit="",
            peak_share=math.nan,
        )
    share = ASSUMED_SHARE if runtime.attention is None else runtime.attention
    time_us = work.flops / (share * peak) * 1e6
    return AccountLine(
        product,
        time_us=time_us,
        lo_us=time_us / ATTENTION_RANGE,
        hi_us=time_us * ATTENTION_RANGE,
        basis="assumed",
        limit="compute",
        peak_share=share,
    )


def attention_time(work: Attention, basis: AttentionBasis, framework: str | None) -> AttentionTime:
    """Predict the time of an attention call from the fits to measured calls.

    Only forward passes were measured. A backward pass is assumed to take :data:`BACKWARD` times as
    long, and both ends of its interval are moved outwards by the factor :data:`ATTENTION_RANGE`.
    ``framework`` is None if the framework is unknown.

    Raises:
        UserError: if attention was not measured with the framework, or if the machine does not
            support the call's dtype.
    """
    time = basis.predict(work, framework)
    if work.pass_ == FORWARD:
        return time
    return time._replace(
        seconds=BACKWARD * time.seconds,
        lo=BACKWARD * time.lo / ATTENTION_RANGE,
        hi=BACKWARD * time.hi * ATTENTION_RANGE,
    )
