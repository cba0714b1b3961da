"""Audit a model: predict the time of its step on each machine, and the gains of other sizes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.audit.account import Account, account_of
from analysis.audit.audit_report import (
    AuditReport,
    as_markdown,
    as_text,
    audit_json,
    duration,
    levers_frame,
    products_frame,
)
from analysis.audit.levers import Lever, find_levers, try_levers
from analysis.audit.memory import memory_of, what_fits
from analysis.audit.runtime import COMPILE, EAGER, Runtime
from analysis.model.basis import Basis
from kernels.common.counts import counted
from kernels.common.errors import UserError, nearest
from sweeps.capture.captured import FORWARD, Captured, Dimension, with_names

if TYPE_CHECKING:
    from sweeps.capture.step import ModelSource, ModelStep


# Time in µs that a slow host takes for each operation of an eager training step. It was measured on
# ResNet-50 and a U-Net, whose kernels need less time (results/accuracy/gpu-steps.json).
_SLOW_HOST_US = 53.0


@dataclass(frozen=True)
class Audit:
    """Audit of a model on one machine; printing the audit shows the text of ``rooftile audit``.

    Attributes:
        report: time and memory of the step, and the changes of dimensions (levers).
        basis: the machine's time model and measurements, on which the times are based.
    """

    report: AuditReport
    basis: Basis
    step: ModelStep

    @property
    def account(self) -> Account:
        """Time of the step by operation."""
        return self.report.account

    @property
    def levers(self) -> Sequence[Lever]:
        """Changes of dimensions with their gains, in the order of :attr:`AuditReport.levers`."""
        return self.report.levers

    @property
    def products(self) -> pd.DataFrame:
        """Table of the matrix operations.

        Times are for one instance, in µs. Shares of the step's time are for all instances.
        """
        return products_frame(self.account)

    @property
    def changes(self) -> pd.DataFrame:
        """Table with one row per lever, as in ``--json``; gains are fractions."""
        return levers_frame(self.levers)

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``rooftile audit --json`` prints."""
        return audit_json(self.report, self.step.mode)

    def markdown(self) -> str:
        """Return the audit as a Markdown page for a pull request."""
        return as_markdown(self.report)

    def __str__(self) -> str:
        return as_text(self.report)


@dataclass(frozen=True)
class LeverSearch:
    """Options that limit which changes of a model are tried.

    Attributes:
        vary: the only dimensions to vary; if empty, all dimensions are varied.
        more_parameters: largest fraction by which combined changes may increase the number of
            parameters.
        multiple: number that divides every proposed width; None for 64, or for 8 if no multiple of
            64 is near.
        tries: values to try for each dimension, instead of a search; not allowed together with
            ``vary`` or ``multiple``.
    """

    vary: tuple[str, ...] = ()
    more_parameters: float = 0.01
    multiple: int | None = None
    tries: Mapping[str, Sequence[int]] = field(default_factory=dict)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Postpone garbage collection.

    It can take up to a fifth of the time if a model is captured many times.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collection()
def audit(
    source: ModelSource,
    step: ModelStep,
    runtime: Runtime,
    bases: list[Basis],
    search: LeverSearch | None = None,
) -> list[Audit]:
    """Audit a model on each machine.

    ``source`` comes from :func:`sweeps.capture.sources.find_source`, and ``bases`` has the result
    of :func:`analysis.model.basis.find_basis` for each machine.

    Raises:
        UserError: if the model cannot be built or run, if it has no operation that can be audited,
            if the arguments do not suit one another, or if measurements cannot be read.
    """
    from sweeps.capture.capture import capture, dimensions  # needs torch
    from sweeps.capture.sources import Factory
    from sweeps.capture.step import TRAIN

    # 1. Capture the original model, and name the dimensions that its sizes come from.
    trains = step.mode == TRAIN
    search = search or LeverSearch()
    _check_options(source, trains, runtime, search)
    captured = capture(source, step)
    _check_not_empty(source, captured)
    varied = dimensions(source, step, captured, search.vary or tuple(search.tries))
    captured = with_names(captured, varied)
    captures: dict[tuple[tuple[str, int], ...], Captured] = {}

    def capture_changed(changes: Mapping[str, int]) -> Captured:
        key = tuple(sorted(changes.items()))
        if key not in captures:
            captures[key] = capture(source, step, changes)
        return captures[key]

    # 2. For each machine, compute the time of the step, the gains of other sizes and the memory.
    audits = []
    for basis in bases:
        account = account_of(captured, runtime, basis)
        refused: dict[str, str] = {}
        if search.tries:
            tried = _combinations(search.tries, source.sizes)
            levers, refused = try_levers(captured, tried, capture_changed, runtime, basis, account)
        else:
            levers = find_levers(
                captured,
                varied,
                capture_changed,
                runtime,
                basis,
                account,
                search.more_parameters,
                search.multiple,
            )
        machine = basis.model.machine
        memory = memory_of(captured, runtime, machine, trains)
        # A factory defines the inputs of its module, so --batch has no effect.
        batch = None if isinstance(source, Factory) else step.batch
        remedies = (
            what_fits(captured, runtime, machine, trains, batch) if memory.fits is False else []
        )
        report = AuditReport(
            title=_title(source, step, batch),
            account=account,
            memory=memory,
            fits_with=remedies,
            levers=levers,
            refused=refused,
            warnings=[*_warnings(source, step), *_host_warnings(captured, runtime, account, basis)],
            assumptions=_assumptions(captured, varied, step, runtime),
            source=basis.source,
        )
        audits.append(Audit(report, basis, step))
    return audits


def _check_options(
    source: ModelSource, trains: bool, runtime: Runtime, search: LeverSearch
) -> None:
    """Refuse options that do not fit the model, the step or one another."""
    if runtime.recompute and not trains:
        raise UserError(
            "--recompute is only for training, because no other mode has a backward pass; leave "
            "--recompute out."
        )
    if search.tries and search.vary:
        raise UserError(
            "--try compares given values, and --vary limits a search; give only one of them."
        )
    if search.tries and search.multiple is not None:
        raise UserError(
            "--try compares given values, and --multiple limits a search; give only one of them."
        )
    for name in search.tries:
        if not source.sizes:
            raise UserError(
                f"{source.name} has no dimension that --try could change; leave --try out."
            )
        if name not in source.sizes:
            raise UserError(
                f"{source.name} has no dimension {name!r}; {nearest(name, source.sizes)}"
            )


def _check_not_empty(source: ModelSource, captured: Captured) -> None:
    """Refuse a model without any operation that can be audited."""
    if captured.products:
        return
    uncounted = ""
    if captured.uncounted:
        uncounted = f" that is counted (not counted: {', '.join(captured.uncounted)})"
    raise UserError(
        f"{source.name} has no GEMM, convolution or attention{uncounted}; give another model."
    )


def _title(source: ModelSource, step: ModelStep, batch: int | None) -> str:
    """Return a title: model, mode, batch size and, for decoding, the number of earlier tokens.

    ``batch`` is None for a factory, because ``--batch`` does not change its inputs.
    """
    if batch is None:
        title = f"{source.name}, {step.mode}"
    else:
        title = f"{Path(source.name).name}, {step.mode}, batch {batch}"
    if step.mode == "decode":
        title += f", after {counted(step.seq, 'token')}"
    return title


def _warnings(source: ModelSource, step: ModelStep) -> list[str]:
    """Return a list with a warning if sequences exceed the model's positions, otherwise []."""
    tokens, option = step.seq, "--seq"
    if step.mode == "decode":
        tokens, option = step.seq + step.tokens, "--seq or --tokens"
    if source.positions is None or tokens <= source.positions:
        return []
    return [
        f"Warning: the model has {source.positions:,} positions, but each sequence has {tokens:,} "
        f"tokens; give a smaller {option}."
    ]


def _host_warnings(
    captured: Captured, runtime: Runtime, account: Account, basis: Basis
) -> list[str]:
    """Return a list with a warning if a slow host may limit an eager training step, else []."""
    trains = any(product.pass_ != FORWARD for product in captured.products)
    if basis.model.machine.kind != "gpu" or runtime.kind != EAGER or not trains:
        return []
    host_us = captured.operations * _SLOW_HOST_US
    if host_us <= account.step_us:
        return []
    return [
        f"Warning: a slow host may limit this step. Launching its {captured.operations:,} "
        f"operations takes {duration(host_us)} at {_SLOW_HOST_US:g} µs each; --runtime compile "
        "needs fewer launches."
    ]


def _combinations(
    tries: Mapping[str, Sequence[int]], sizes: Mapping[str, int]
) -> list[dict[str, tuple[int, int]]]:
    """Return each combination that changes a size, with old and new values of the changed sizes."""
    combinations = []
    for values in product(*tries.values()):
        changes = {
            name: (sizes[name], value)
            for name, value in zip(tries, values, strict=True)
            if value != sizes[name]
        }
        if changes:
            combinations.append(changes)
    return combinations


def _assumptions(
    captured: Captured, varied: list[Dimension], step: ModelStep, runtime: Runtime
) -> tuple[str, ...]:
    """Return an audit's assumptions about the model and its runtime, as phrases."""
    traffic = "each operation reads and writes memory"
    if runtime.kind == COMPILE:
        traffic = (
            "operations between two matrix operations are fused, and Inductor pads misaligned "
            "GEMMs where that is faster (`shape_padding`)"
        )
    assumptions = [step.dtype, f"{runtime.kind}: {traffic}"]
    if step.autocast:
        assumptions.append("parameters in fp32, cast for each GEMM")
    assumptions += runtime.changes(captured)
    if step.mode == "train":
        assumptions.append(f"optimizer {runtime.optimizer} with its state in the parameters' dtype")
    if runtime.tp > 1:
        assumptions.append(
            "memory, including activations (sequence parallelism), divided evenly among the GPUs"
        )
    if not varied:
        assumptions.append("no change of a dimension affects a GEMM, convolution or attention")
    return (*assumptions, *captured.assumptions)
