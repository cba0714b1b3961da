"""Report which operations could use Tensor Cores, which do, and what that could speed up.

This is the table that PyProf and DLProf used to print, made from the traces of two models' training
steps, which ``models.json`` names. The command ``explain`` makes it of any trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.markdown import plain, printable, table_row
from analysis.rules.catalogue import all_rules
from analysis.rules.judge import RuleResult, not_measured
from analysis.rules.rule_finding import UNCERTAIN
from analysis.traces.trace_account import ProfileAccount, ProfiledOperation, account_of
from kernels.common.documents import POSITIVE, misfit
from kernels.common.errors import UserError
from kernels.common.program import target
from sweeps.schema import SCHEMA
from sweeps.timing.statistics import median, median_interval

_EXACT = "FP32 is IEEE: TF32 is not asked for"
_NO_PRODUCT = "not a matrix operation"
_MAX_OPERATIONS = 25
_MIN_USED_SHARE = 0.9  # share of the eligible time above which a model counts as using them
_MODELS = {
    "machine": {"kind": str},
    "models": [{"model": str, "dtype": str, "seconds": [POSITIVE], "trace?": str}],
}
_TRACE = re.compile(r"traces/[a-z0-9][a-z0-9.-]*")


@dataclass(frozen=True)
class TimedStep:
    """A model's step in one dtype: the seconds of several steps, and the account of one."""

    name: str
    dtype: str
    kind: str  # kind of the machine: gpu or cpu
    account: ProfileAccount
    seconds: Sequence[float] = ()

    @property
    def matrix_share(self) -> float:
        """Share of the operations' time that is spent in matrix operations."""
        return self.account.matrix_share

    @property
    def bound(self) -> float:
        """Amdahl's bound: the speed-up if matrix work took no time; infinite without other work."""
        return self.account.bound

    @property
    def used_share(self) -> float | None:
        """Share of the eligible time in Tensor Core kernels; None if no kernel's name shows it."""
        known = [
            operation
            for operation in self.account.operations
            if not self.why_not(operation) and operation.uses_tensor_cores is not None
        ]
        total = sum(o.time_us for o in known)
        return sum(o.time_us for o in known if o.uses_tensor_cores) / total if total else None

    def why_not(self, operation: ProfiledOperation) -> str:
        """Return why an operation is not eligible for Tensor Cores; empty if it is.

        Operations in fp32 are eligible in a step that asks for TF32.
        """
        if not operation.matrix:
            return _NO_PRODUCT
        return _EXACT if operation.dtype == "fp32" and self.dtype != "tf32" else ""


def read_profiled_steps(folder: Path) -> list[TimedStep]:
    """Return the profiled steps of a folder; empty if no model was profiled.

    Models whose traces show no matrix operation are left out, and so are those of an earlier
    version, which kept no traces.

    Raises:
        UserError: if a file cannot be read, or has another schema version.
    """
    path = folder / "models.json"
    if not path.exists():
        return []
    again = target("rules FRESH=1", "profile --fresh")
    unreadable = f"{path} cannot be read; {again} writes it again."
    try:
        document = json.loads(path.read_bytes())
        schema = document["schema"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(unreadable) from None
    # The schema comes first: a file with another one may have another layout.
    if schema != SCHEMA:
        raise UserError(
            f"{path} has schema {schema}; this version reads {SCHEMA}. {again} writes it again."
        )
    if misfit(document, _MODELS):
        raise UserError(unreadable)
    kind = document["machine"]["kind"]
    traced = [entry for entry in document["models"] if "trace" in entry]
    steps = [_model_step(folder, entry, kind, unreadable) for entry in traced]
    return [step for step in steps if step.account.kind == kind and step.matrix_share]


def _model_step(folder: Path, entry: dict[str, Any], kind: str, unreadable: str) -> TimedStep:
    if not _TRACE.fullmatch(entry["trace"]):
        raise UserError(unreadable)
    account = account_of([folder / entry["trace"]])
    return TimedStep(
        printable(entry["model"]), printable(entry["dtype"]), kind, account, entry["seconds"]
    )


def step_markdown(step: TimedStep) -> str:
    """Return the table of a step in Markdown, with Amdahl's bound below it."""
    lines = [
        f"## {plain(step.name)} in {plain(step.dtype)}",
        "",
        "| operation | problem | calls | eligible | uses Tensor Cores | time | share |",
        "|---|---|---|---|---|---|---|",
    ]
    total = step.account.total_us
    for o in step.account.operations[:_MAX_OPERATIONS]:
        reason = step.why_not(o)
        eligible = f"no: {reason}" if reason else "yes"
        used = {True: "yes", False: "no", None: "–"}[o.uses_tensor_cores]
        used = "none here" if step.kind == "cpu" else used
        cells = [o.op, o.shape or "–", str(o.calls), eligible, used]
        lines.append(table_row([*cells, f"{o.time_us:.0f} µs", f"{o.time_us / total:.1%}"]))
    left_out = step.account.operations[_MAX_OPERATIONS:]
    if left_out:
        share = sum(o.time_us for o in left_out) / total
        lines.append(f"| {len(left_out)} others | | | | | | {share:.1%} |")
    lines += ["", f"{step.matrix_share:.0%} of the time is in matrix operations."]
    if np.isfinite(step.bound):
        lines[-1] += (
            f" However fast they became, the whole step could be at most {step.bound:.2f}× as fast."
        )
    if step.kind == "gpu" and step.used_share is not None:
        lines.append(f"Of the eligible time, {step.used_share:.0%} is in Tensor Core kernels.")
    return "\n".join(lines) + "\n"


def model_rules(steps: Sequence[TimedStep]) -> dict[str, RuleResult]:
    """Return the results of the rules about models: ``amdahl`` and ``tc-used``."""
    on_gpu = [step for step in steps if step.kind == "gpu"]
    return {"amdahl": _amdahl(on_gpu), "tc-used": _tc_used(on_gpu)}


def _amdahl(steps: Sequence[TimedStep]) -> RuleResult:
    """Judge the ``amdahl`` rule: TF32 speeds up only matrix operations.

    The speed-up of TF32 over FP32 must therefore stay below the bound of the FP32 step.
    """
    rule = all_rules()["amdahl"]
    by_key = {(step.name, step.dtype): step for step in steps}
    speed_ups = []  # share of the bound, interval, name, ratio, bound
    for (name, dtype), exact in by_key.items():
        fast = by_key.get((name, "tf32"))
        if dtype != "fp32" or fast is None or not np.isfinite(exact.bound):
            continue
        ends = [median_interval(list(s.seconds)) for s in (exact, fast)]
        if ends[0] is None or ends[1] is None:
            continue
        ratio = median(list(exact.seconds)) / median(list(fast.seconds))
        interval = (ends[0][0] / ends[1][1], ends[0][1] / ends[1][0])
        speed_ups.append((ratio / exact.bound, interval, name, ratio, exact.bound))
    if not speed_ups:
        return not_measured(rule)
    # The model that comes closest to its bound decides.
    value, interval, *_, bound = max(speed_ups)
    lo, hi = (end / bound for end in interval)
    listing = "; ".join(f"{n}: {r:.2f}× of at most {limit:.2f}×" for *_, n, r, limit in speed_ups)
    verdict = "holds" if hi <= 1 else "no longer" if lo > 1 else f"depends: {UNCERTAIN}"
    return RuleResult(
        rule.id,
        rule.statement,
        rule.source,
        verdict,
        value,
        lo,
        hi,
        None,
        len(speed_ups),
        f"{rule.effect}; {listing}",
    )


def _tc_used(steps: Sequence[TimedStep]) -> RuleResult:
    """Judge the ``tc-used`` rule by the shares of eligible time in Tensor Core kernels."""
    rule = all_rules()["tc-used"]
    shares = {f"{s.name} {s.dtype}": s.used_share for s in steps if s.dtype != "fp32"}
    known = {name: share for name, share in shares.items() if share is not None}
    if not known:
        return not_measured(rule)
    low, high = min(known.values()), max(known.values())
    listing = "; ".join(f"{name} {share:.0%}" for name, share in known.items())
    verdict = (
        "holds"
        if low >= _MIN_USED_SHARE
        else "no longer"
        if high < _MIN_USED_SHARE
        else f"depends: {listing}"
    )
    return RuleResult(
        rule.id,
        rule.statement,
        rule.source,
        verdict,
        float(np.mean(list(known.values()))),
        low,
        high,
        None,
        len(known),
        f"{rule.effect}, from the lowest to the highest; {listing}",
    )
