"""Audit a model: the time of its step on each machine, and what other sizes would gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.audit.account import Account, account_of
from analysis.audit.audit_report import (
    as_markdown,
    as_text,
    audit_json,
    levers_frame,
    products_frame,
)
from analysis.audit.levers import Lever, find_levers
from analysis.audit.runtime import Runtime
from analysis.model.basis import Basis
from kernels.common.errors import UserError
from sweeps.capture.captured import Captured, Dimension, with_names

if TYPE_CHECKING:
    from sweeps.capture.step import ModelSource, ModelStep


@dataclass(frozen=True)
class Audit:
    """Audit of a model on one machine.

    Printing it gives the command's output. ``account`` has the time of the step and its parts,
    ``levers`` are other sizes with their gains, the best first, and ``basis`` is what the times
    rest on.
    """

    account: Account
    levers: list[Lever]
    basis: Basis
    step: ModelStep
    assumptions: tuple[str, ...]

    @property
    def products(self) -> pd.DataFrame:
        """Table with one row per distinct product.

        Times are those of one instance in µs; shares are those of the step.
        """
        return products_frame(self.account)

    @property
    def changes(self) -> pd.DataFrame:
        """Table with one row per lever, the best first; gains are fractions of the step's speed."""
        return levers_frame(self.levers)

    def to_json(self) -> dict[str, Any]:
        """Return the document that the command prints with ``--json``."""
        mode, source = self.step.mode, self.basis.source
        return audit_json(self.account, self.levers, mode, self.assumptions, source)

    def markdown(self, title: str) -> str:
        """Return a page for a pull request."""
        return as_markdown(title, self.account, self.levers, self.assumptions)

    def __str__(self) -> str:
        return as_text(self.account, self.levers, self.assumptions)


def audit(
    source: ModelSource,
    step: ModelStep,
    runtime: Runtime,
    bases: list[Basis],
    vary: tuple[str, ...] = (),
    more_parameters: float = 0.01,
) -> list[Audit]:
    """Audit a model on each machine.

    Args:
        source: the model, from :func:`sweeps.capture.sources.find_source`.
        step: the step that is computed.
        runtime: how the model is run.
        bases: what times on each machine rest on, from :func:`analysis.model.basis.find_basis`.
        vary: the only dimensions to vary; all if empty.
        more_parameters: how many more parameters the joint change may have, as a fraction.

    Raises:
        UserError: if the model cannot be built or has nothing to audit, if a machine does not
            compute its dtype, or if layers are to be recomputed in a step that does not train.
    """
    from sweeps.capture.capture import capture, dimensions  # needs torch
    from sweeps.capture.step import TRAIN

    if runtime.recompute and step.mode != TRAIN:
        raise UserError("--recompute is only for training: no other mode computes layers twice.")
    captured = capture(source, step)
    if not captured.products:
        what = (
            f" except {', '.join(captured.uncounted)}, which is not counted"
            if captured.uncounted
            else ""
        )
        raise UserError(
            f"{source.name} has no GEMM or convolution{what}, so there is nothing to audit."
        )
    named = dimensions(source, step, captured, vary)
    captured = with_names(captured, named)
    known: dict[tuple[tuple[str, int], ...], Captured] = {}

    def changed(changes: Mapping[str, int]) -> Captured:
        key = tuple(sorted(changes.items()))
        if key not in known:
            known[key] = capture(source, step, changes)
        return known[key]

    found = []
    for basis in bases:
        account = account_of(captured, runtime, basis)
        levers = find_levers(captured, named, changed, runtime, basis, account, more_parameters)
        assumed = _assumptions(captured, named, step, runtime)
        found.append(Audit(account, levers, basis, step, assumed))
    return found


def _assumptions(
    captured: Captured, named: list[Dimension], step: ModelStep, runtime: Runtime
) -> tuple[str, ...]:
    """Return the assumptions that the figures rest on, in addition to the machine's times."""
    how = "each operation reads and writes memory"
    if runtime.kind == "compile":
        how = (
            "operations between two GEMMs are fused, and Inductor may pad a vocabulary itself "
            "(`shape_padding`)"
        )
    said = [
        f"{step.mode} in {step.dtype}",
        f"{runtime.kind}: {how}",
    ]
    if step.autocast:
        said.append("parameters in fp32, cast for each GEMM")
    said += runtime.changes(captured)
    if step.mode == "train":
        said.append(f"optimizer {runtime.optimizer} with its state in the parameters' dtype")
    if not named:
        said.append("no dimension was found that changes a GEMM")
    return (*said, *captured.assumptions)
