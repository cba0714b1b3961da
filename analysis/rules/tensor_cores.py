"""Report which operations could use Tensor Cores, which do, and how much a step could gain.

The tables are like those that PyProf and DLProf used to print. They come from traces of the
training steps that ``models.json`` lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.markdown import plain, printable, table_row
from analysis.rules.catalogue import all_rules
from analysis.rules.judge import RuleResult, not_measured
from analysis.rules.rule_finding import UNCERTAIN
from analysis.traces.trace_account import ProfileAccount, ProfiledOperation, account_of
from kernels.common.counts import counted
from kernels.common.documents import POSITIVE, misfit
from kernels.common.errors import UserError
from kernels.common.program import target
from sweeps.schema import SCHEMA
from sweeps.timing.statistics import median, median_interval

_EXACT_FP32 = "exact FP32, because TF32 is not allowed"
_FP32_IN_PARTS = "FP32, with each multiplication computed as three in TF32"
_NOT_MATRIX = "not a matrix operation"
_REWRITE = target("rules FRESH=1", "profile --fresh")
_MAX_OPERATIONS = 25  # maximum number of operations in a step's table
# Smallest :attr:`TimedStep.used_share` of a step that counts as using Tensor Cores.
_MIN_USED_SHARE = 0.9
_MODELS = {
    "machine": {"kind": str},
    "models": [{"model": str, "dtype": str, "seconds": [POSITIVE], "trace?": str}],
}
_TRACE = re.compile(r"traces/[a-z0-9][a-z0-9.-]*")  # paths that stay in the folder of traces


@dataclass(frozen=True)
class TimedStep:
    """A model's training step in one dtype, timed several times and traced once.

    Attributes:
        dtype: dtype of the step; ``tf32`` means fp32 with TF32 allowed.
        kind: kind of the machine, ``gpu`` or ``cpu``.
        seconds: duration of each timed run of the step.
    """

    name: str
    dtype: str
    kind: str
    account: ProfileAccount
    seconds: Sequence[float] = ()

    @property
    def matrix_share(self) -> float:
        """Share of the operations' time that is spent in matrix operations."""
        return self.account.matrix_share

    @property
    def bound(self) -> float:
        """Amdahl's bound; see :attr:`ProfileAccount.bound`."""
        return self.account.bound

    @property
    def used_share(self) -> float | None:
        """Share of the eligible operations' time that is spent in operations using Tensor Cores.

        Operations whose use of Tensor Cores is not known are left out. The share is None if no
        eligible operation remains.
        """
        with_known_use = [
            operation
            for operation in self.account.operations
            if not self.why_not_eligible(operation) and operation.uses_tensor_cores is not None
        ]
        total = sum(operation.time_us for operation in with_known_use)
        used = sum(operation.time_us for operation in with_known_use if operation.uses_tensor_cores)
        return used / total if total else None

    def why_not_eligible(self, operation: ProfiledOperation) -> str:
        """Return why an operation is not eligible for Tensor Cores, or "" if it is eligible."""
        if not operation.matrix:
            return _NOT_MATRIX
        if operation.dtype == "fp32" and self.dtype != "tf32":
            # PyTorch's attention in fp32 uses Tensor Cores, whether TF32 is allowed or not.
            return _FP32_IN_PARTS if operation.uses_tensor_cores else _EXACT_FP32
        return ""


def read_profiled_steps(folder: Path) -> list[TimedStep]:
    """Return the profiled steps of a folder, or an empty list if no model was profiled.

    A step is left out if it has no trace, if its trace has no time in matrix operations, or if the
    machine is a GPU and the trace has no GPU activity.

    Raises:
        UserError: if ``models.json`` or a trace cannot be read, or if ``models.json`` has another
            schema.
    """
    path = folder / "models.json"
    if not path.exists():
        return []
    unreadable = f"{path} cannot be read; run {_REWRITE} to write it again."
    try:
        document = json.loads(path.read_bytes())
        schema = document["schema"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(unreadable) from None
    # Check the schema first, because a file with another schema may have other fields.
    if schema != SCHEMA:
        raise UserError(
            f"{path} has schema {schema}; this version reads schema {SCHEMA}. Run {_REWRITE} to "
            "write it again."
        )
    if misfit(document, _MODELS):
        raise UserError(unreadable)
    kind = document["machine"]["kind"]
    traced = [entry for entry in document["models"] if "trace" in entry]
    steps = [_model_step(folder, entry, kind, unreadable) for entry in traced]
    return [step for step in steps if step.account.kind == kind and step.matrix_share]


def _model_step(folder: Path, entry: dict[str, Any], kind: str, unreadable: str) -> TimedStep:
    """Return the step that an entry of models.json describes, with the account of its trace."""
    if not _TRACE.fullmatch(entry["trace"]):
        raise UserError(unreadable)
    path = folder / entry["trace"]
    try:
        account = account_of([path])
    except UserError:
        # The error's advice to record the trace again would not say with which command.
        raise UserError(f"{path} cannot be read; run {_REWRITE} to write it again.") from None
    return TimedStep(
        printable(entry["model"]), printable(entry["dtype"]), kind, account, entry["seconds"]
    )


def step_markdown(step: TimedStep) -> str:
    """Return a step's section in Markdown: longest operations, bound, and use of Tensor Cores."""
    lines = [
        f"## {plain(step.name)} in {plain(step.dtype)}",
        "",
        "| operation | problem | calls | eligible | uses Tensor Cores | time | share |",
        "|---|---|---|---|---|---|---|",
    ]
    total = step.account.total_us
    for operation in step.account.operations[:_MAX_OPERATIONS]:
        reason = step.why_not_eligible(operation)
        if step.kind == "cpu":
            used = "none here"
        else:
            used = {True: "yes", False: "no", None: "–"}[operation.uses_tensor_cores]
        cells = [
            operation.op,
            operation.shape or "–",
            f"{operation.calls:,}",
            f"no: {reason}" if reason else "yes",
            used,
            f"{operation.time_us:,.0f} µs",
            f"{operation.time_us / total:.1%}",
        ]
        lines.append(table_row(cells))
    left_out = step.account.operations[_MAX_OPERATIONS:]
    if left_out:
        share = sum(operation.time_us for operation in left_out) / total
        lines.append(f"| {counted(len(left_out), 'other')} | | | | | | {share:.1%} |")
    summary = f"{step.matrix_share:.0%} of the time is spent in matrix operations."
    if np.isfinite(step.bound):
        summary += (
            f" However fast they became, the whole step could be at most {step.bound:.2f}× as fast."
        )
    lines += ["", summary]
    if step.kind == "gpu" and step.used_share is not None:
        lines.append(
            "Among the eligible operations whose Tensor Core use is known, those that use Tensor "
            f"Cores take {step.used_share:.0%} of the time."
        )
    return "\n".join(lines) + "\n"


def model_rules(steps: Sequence[TimedStep]) -> dict[str, RuleResult]:
    """Return the results of ``amdahl`` and ``tc-used``, the rules about models, by the rule's id.

    The rules are judged only by steps on a GPU.
    """
    on_gpu = [step for step in steps if step.kind == "gpu"]
    return {"amdahl": _amdahl(on_gpu), "tc-used": _tc_used(on_gpu)}


class _SpeedUp(NamedTuple):
    """Speed-up of a model's step with TF32, compared with Amdahl's bound."""

    share_of_bound: float
    interval: tuple[float, float]  # interval of the ratio
    model: str
    ratio: float
    bound: float


def _amdahl(steps: Sequence[TimedStep]) -> RuleResult:
    """Judge the ``amdahl`` rule by the model with the largest speed-up relative to its bound.

    TF32 speeds up only matrix operations, so the speed-up of TF32 over FP32 must not exceed the
    bound of the FP32 step.
    """
    rule = all_rules()["amdahl"]
    by_key = {(step.name, step.dtype): step for step in steps}
    # 1. Compare the steps of each model in FP32 and TF32.
    speed_ups = []
    for (name, dtype), step in by_key.items():
        tf32_step = by_key.get((name, "tf32"))
        if dtype != "fp32" or tf32_step is None or not np.isfinite(step.bound):
            continue
        fp32_seconds = list(step.seconds)
        tf32_seconds = list(tf32_step.seconds)
        fp32_interval = median_interval(fp32_seconds)
        tf32_interval = median_interval(tf32_seconds)
        if fp32_interval is None or tf32_interval is None:
            continue
        ratio = median(fp32_seconds) / median(tf32_seconds)
        # The ratio is lowest if the FP32 step is fast and the TF32 step is slow.
        interval = fp32_interval[0] / tf32_interval[1], fp32_interval[1] / tf32_interval[0]
        speed_ups.append(_SpeedUp(ratio / step.bound, interval, name, ratio, step.bound))
    if not speed_ups:
        return not_measured(rule)
    # 2. Judge the rule by the model with the largest share of its bound, which may exceed 1.
    closest = max(speed_ups, key=lambda speed_up: speed_up.share_of_bound)
    lowest_ratio, highest_ratio = closest.interval
    lo = lowest_ratio / closest.bound
    hi = highest_ratio / closest.bound
    if hi <= 1:
        verdict = "holds"
    elif lo > 1:
        verdict = "no longer"
    else:
        verdict = f"depends: {UNCERTAIN}"
    listing = ", ".join(
        f"{speed_up.model} {speed_up.ratio:.2f}× of at most {speed_up.bound:.2f}×"
        for speed_up in speed_ups
    )
    return RuleResult(
        id=rule.id,
        statement=rule.statement,
        source=rule.source,
        verdict=verdict,
        effect=closest.share_of_bound,
        lo=lo,
        hi=hi,
        predicted=None,
        cases=len(speed_ups),
        reason=f"{rule.effect}; {listing}",
    )


def _tc_used(steps: Sequence[TimedStep]) -> RuleResult:
    """Judge the ``tc-used`` rule by each step's :attr:`~TimedStep.used_share`.

    Steps in exact FP32 and steps whose share is None are left out. The effect is the mean share,
    and its interval extends from the lowest share to the highest.
    """
    rule = all_rules()["tc-used"]
    shares = {
        f"{step.name} {step.dtype}": step.used_share for step in steps if step.dtype != "fp32"
    }
    known_shares = {name: share for name, share in shares.items() if share is not None}
    if not known_shares:
        return not_measured(rule)
    lowest = min(known_shares.values())
    highest = max(known_shares.values())
    listing = ", ".join(f"{name} {share:.0%}" for name, share in known_shares.items())
    if lowest >= _MIN_USED_SHARE:
        verdict = "holds"
    elif highest < _MIN_USED_SHARE:
        verdict = "no longer"
    else:
        verdict = f"depends: {listing}"
    return RuleResult(
        id=rule.id,
        statement=rule.statement,
        source=rule.source,
        verdict=verdict,
        effect=float(np.mean(list(known_shares.values()))),
        lo=lowest,
        hi=highest,
        predicted=None,
        cases=len(known_shares),
        reason=f"{rule.effect}; mean and range of {counted(len(known_shares), 'step')}: {listing}",
    )
