"""The account of a step: what each product takes, what else is moved, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from analysis.advice.times import times_of
from analysis.audit.runtime import COMPILE, Runtime, optimizer_bytes
from analysis.audit.step_totals import summed
from analysis.model.basis import Basis
from analysis.model.query import group_of
from kernels.common.errors import UserError
from kernels.config import ceil_div
from kernels.problem import Gemm, Problem
from sweeps.capture.captured import (
    WGRAD,
    Attention,
    Captured,
    GroupedGemm,
    MovedBytes,
    Product,
    Work,
)

ATTENTION_RANGE = 1.5
"""What the assumed time of attention may be wrong by, either way."""

MOVED_RANGE = 1.5
"""Likewise of what is no product: caches hold some of it, and small launches take longer."""

NO_PRODUCT = "no product"
"""What normalisation, activations, the optimizer and the like are called together."""


@dataclass(frozen=True)
class AccountLine:
    """One product of the account, its times of one instance in µs; NaN where it is not counted.

    ``in_sums`` are by how much its interval is wider in a sum, below and above: a model's errors
    may be more alike than assumed, or less (:class:`analysis.model.fit.Fit`).
    """

    product: Product
    time_us: float
    lo_us: float
    hi_us: float
    basis: str
    limit: str
    peak_share: float
    in_sums: tuple[float, float] = (1.0, 1.0)

    @property
    def total_us(self) -> float:
        """Of all instances."""
        return self.product.count * self.time_us

    @property
    def part_of_sum(self) -> tuple[float, float, float]:
        """The time of all instances, with the interval that it has as a part of a step."""
        below, above = self.in_sums
        lo = self.time_us - below * (self.time_us - self.lo_us)
        hi = self.time_us + above * (self.hi_us - self.time_us)
        count = self.product.count
        return self.total_us, count * lo, count * hi


@dataclass(frozen=True)
class OtherOperations:
    """What is no product: the bytes that it moves and how long that takes at least."""

    what: str
    bytes: int
    time_us: float


@dataclass(frozen=True)
class Account:
    """What a step takes on a machine. Times in µs, the interval holds nine in ten."""

    machine: str
    lines: tuple[AccountLine, ...]
    other: tuple[OtherOperations, ...]
    parameters: int
    not_counted: tuple[str, ...]

    @property
    def rows(self) -> list[AccountLine]:
        """Lines of the same product, role, place and pass as one, those that take most first."""
        counts: dict[tuple[object, ...], int] = {}
        first: dict[tuple[object, ...], AccountLine] = {}
        for line in self.lines:
            product = line.product
            key = (product.role, product.path, product.pass_, product.work)
            counts[key] = counts.get(key, 0) + product.count
            first.setdefault(key, line)
        rows = [
            replace(line, product=replace(line.product, count=counts[key]))
            for key, line in first.items()
        ]
        return sorted(rows, key=lambda row: -row.total_us if row.total_us >= 0 else 1.0)

    @property
    def products_us(self) -> float:
        """Of all products that are counted."""
        return sum(line.total_us for line in self.counted)

    @property
    def counted(self) -> list[AccountLine]:
        """Lines that have a time."""
        return [line for line in self.lines if not math.isnan(line.time_us)]

    @property
    def by_role(self) -> dict[str, float]:
        """Microseconds of the step by role, largest first; last what is no product, together."""
        roles: dict[str, float] = {}
        for line in self.counted:
            role = line.product.role
            roles[role] = roles.get(role, 0.0) + line.total_us
        ordered = sorted(roles.items(), key=lambda item: -item[1])
        return {**dict(ordered), NO_PRODUCT: sum(other.time_us for other in self.other)}

    @property
    def step_us(self) -> float:
        """Of products and all else."""
        return self.products_us + sum(other.time_us for other in self.other)

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(line.product.count * line.product.work.flops for line in self.lines)

    @property
    def interval_us(self) -> tuple[float, float]:
        """The 90 % interval of the step."""
        products = summed([line.part_of_sum for line in self.counted])
        moved = sum(other.time_us for other in self.other)
        low = math.hypot(products.time - products.lo, moved * (1 - 1 / MOVED_RANGE))
        high = math.hypot(products.hi - products.time, moved * (MOVED_RANGE - 1))
        return max(self.step_us - low, 0.0), self.step_us + high

    def share(self, line: AccountLine) -> float:
        """Of the step."""
        return line.total_us / self.step_us


def as_problem(work: Work) -> Problem | None:
    """What the model predicts of it: experts as a batch, each with the same share of the rows."""
    if isinstance(work, Attention):
        return None
    if not isinstance(work, GroupedGemm):
        return work
    active = min(work.experts, work.m)
    rows = int(ceil_div(work.m, active))
    if work.pass_ == WGRAD:
        return Gemm(work.n, work.k, rows, work.dtype, work.layout, active)
    return Gemm(rows, work.n, work.k, work.dtype, work.layout, active)


def account_of(captured: Captured, runtime: Runtime, basis: Basis) -> Account:
    """What a step takes on a machine.

    Raises:
        UserError: a width cannot be divided, or the machine does not compute a dtype.
    """
    products = runtime.products(captured)
    problems = {p.work: as_problem(p.work) for p in products}
    asked = list(dict.fromkeys(problem for problem in problems.values() if problem is not None))
    rows = dict(zip(asked, times_of(asked, basis), strict=True))
    lines = []
    for product in products:
        problem = problems[product.work]
        if isinstance(product.work, Attention):
            lines.append(_attention(product, product.work, runtime, basis))
        else:
            assert problem is not None
            lines.append(_line(product, problem, rows[problem], basis))
    moved = captured.moved_fused if runtime.kind == COMPILE else captured.moved
    if any(p.pass_ not in ("forward", "recompute") for p in products):
        moved = (
            *moved,
            MovedBytes(f"optimizer ({runtime.optimizer})", optimizer_bytes(captured, runtime)),
        )
    bandwidth = reached_bandwidth(basis)
    other = tuple(
        OtherOperations(each.what, each.bytes, each.bytes / bandwidth * 1e6)
        for each in moved
        if each.bytes
    )
    missing = [f"attention: {line.product.work}" for line in lines if math.isnan(line.time_us)]
    return Account(
        basis.model.machine.slug,
        tuple(lines),
        other,
        captured.parameters,
        tuple(dict.fromkeys((*captured.uncounted, *missing))),
    )


def _line(product: Product, problem: Problem, row: Mapping[str, Any], basis: Basis) -> AccountLine:
    peak = basis.model.machine.peak(product.work.dtype)
    share = product.work.flops / (row["time_us"] * 1e-6) / peak
    times = row["time_us"], row["lo_us"], row["hi_us"]
    if row["evidence"] == "measured":
        return AccountLine(product, *times, "measured", row["limit"], share)
    fit = basis.model.fit(group_of(basis.library(problem), problem))
    in_sums = (fit.sum_low, fit.sum_high) if fit.has_like(problem) else (1.0, 1.0)
    return AccountLine(product, *times, row["basis"], row["limit"], share, in_sums)


def _attention(product: Product, work: Attention, runtime: Runtime, basis: Basis) -> AccountLine:
    """By its FLOPs at an assumed share of the peak; a few queries are not bound by those."""
    nothing = math.nan
    if work.queries < 128:
        return AccountLine(product, nothing, nothing, nothing, "not counted", "", nothing)
    peak = basis.model.machine.peak(work.dtype)
    time = work.flops / (runtime.attention * peak) * 1e6
    return AccountLine(
        product,
        time,
        time / ATTENTION_RANGE,
        time * ATTENTION_RANGE,
        "assumed",
        "compute",
        runtime.attention,
    )


def reached_bandwidth(basis: Basis) -> float:
    """Bytes per second that large products reach: calibrated where any of them were measured."""
    machine = basis.model.machine
    for dtype in ("bf16", "fp16", "fp32"):
        if dtype in machine.peaks:
            problem = Gemm(8192, 8192, 8192, dtype)
            fit = basis.model.fit(group_of(basis.library(problem), problem))
            return machine.bandwidth * fit.constants.dram
    raise UserError(f"{machine.name} computes none of bf16, fp16 and fp32.")
