"""Report which operations could use Tensor Cores, which do, and what that could speed up.

This is the table that PyProf and DLProf used to print, made from recorded data: a model's
profiled step (``models.json``) or the rows of a sweep. The name of a kernel says whether it uses
Tensor Cores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.markdown import table_row
from analysis.recordings.load import kernels_of, workloads_of
from analysis.rules.catalogue import all_rules
from analysis.rules.judge import RuleResult, not_measured
from analysis.rules.rule_finding import UNCERTAIN
from kernels.common.errors import UserError
from kernels.common.program import target
from kernels.names import read_name
from kernels.operation import products_of
from sweeps.schema import SCHEMA
from sweeps.timing.statistics import median, median_interval

_MATRIX = re.compile(r"(^|_)(mm|addmm|bmm|baddbmm|linear)$|convolution|attention|_rnn|lstm")
_EXACT = "FP32 is IEEE: TF32 is not asked for"
_NO_PRODUCT = "not a matrix operation"
_MAX_OPERATIONS = 25
_MIN_USED_SHARE = 0.9  # share of the eligible time above which a model counts as using them


@dataclass(frozen=True)
class StepOperation:
    """One kind of operation of a model's step or of a sweep.

    ``why_not`` is empty if the operation is eligible for Tensor Cores. ``used`` is None if no
    kernel's name shows it. ``share`` is the share of the whole time.
    """

    operation: str
    shape: str
    dtype: str
    calls: int
    matrix: bool
    why_not: str
    used: bool | None
    kernel: str
    seconds: float
    share: float


@dataclass(frozen=True)
class TimedStep:
    """A model's step in one dtype, or a sweep, and the operations that its time went to."""

    name: str
    dtype: str
    kind: str  # kind of the machine: gpu or cpu
    operations: Sequence[StepOperation]
    seconds: Sequence[float] = ()

    @property
    def matrix_share(self) -> float:
        """Share of the operations' time that is spent in matrix operations."""
        return sum(o.share for o in self.operations if o.matrix)

    @property
    def bound(self) -> float:
        """Amdahl's bound: the speed-up if matrix work took no time; infinite without other work."""
        rest = 1 - self.matrix_share
        return 1 / rest if rest > 1e-9 else float("inf")

    @property
    def used_share(self) -> float | None:
        """Share of the eligible time in Tensor Core kernels; None if no kernel's name shows it."""
        known = [o for o in self.operations if not o.why_not and o.used is not None]
        total = sum(o.seconds for o in known)
        return sum(o.seconds for o in known if o.used) / total if total else None


def read_profiled_steps(folder: Path) -> list[TimedStep]:
    """Return the profiled steps of a folder; empty if no model was profiled.

    Models without operations are left out.

    Raises:
        UserError: if the file cannot be read, or has another schema version.
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
    try:
        kind = str(document["machine"]["kind"])
        return [_model_step(entry, kind) for entry in document["models"] if entry["operations"]]
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        raise UserError(unreadable) from None


def _model_step(entry: dict[str, Any], kind: str) -> TimedStep:
    total = sum(operation["seconds"] for operation in entry["operations"])
    operations = []
    for op in entry["operations"]:
        matrix = bool(_MATRIX.search(op["operation"]))
        kernels = op["kernels"]
        main = max(kernels, key=kernels.__getitem__, default="")
        shape = " ".join("×".join(map(str, s)) for s in op["shapes"][:3])
        operations.append(
            StepOperation(
                op["operation"],
                shape,
                op["dtype"],
                op["calls"],
                matrix,
                _why_not(matrix, op["dtype"]),
                _used(list(kernels)),
                main,
                op["seconds"],
                op["seconds"] / total,
            )
        )
    return TimedStep(entry["model"], entry["dtype"], kind, operations, entry["seconds"])


def sweep_step(rows: pd.DataFrame, name: str, kind: str) -> TimedStep:
    """Return the rows of a sweep as a step, in which each case is an operation.

    Raises:
        UserError: if the sweep has no measured row.
    """
    rows = rows[rows["sweep"] == name]
    if rows.empty:
        raise UserError(f"the recording has no measured case of the sweep {name!r}.")
    total = float(rows["time_us"].sum())
    cases = zip(
        workloads_of(rows),
        kernels_of(rows),
        rows["kernel"].fillna(""),
        rows["time_us"],
        strict=True,
    )
    operations = []
    for workload, kernels, main, time_us in cases:
        matrix = bool(products_of(workload))
        operations.append(
            StepOperation(
                workload.op,
                str(workload),
                workload.dtype,
                1,
                matrix,
                _why_not(matrix, workload.dtype),
                _used(kernels),
                main,
                time_us * 1e-6,
                time_us / total,
            )
        )
    return TimedStep(name, "", kind, sorted(operations, key=lambda o: -o.seconds))


def _why_not(matrix: bool, dtype: str) -> str:
    """Return why an operation is not eligible for Tensor Cores; empty if it is."""
    if not matrix:
        return _NO_PRODUCT
    return _EXACT if dtype == "fp32" else ""


def _used(kernels: Sequence[str]) -> bool | None:
    """Return True if any kernel uses Tensor Cores; None if no kernel's name shows it."""
    uses = [read_name(name).tensor_cores for name in kernels]
    if any(uses):
        return True
    return False if False in uses else None


def step_markdown(step: TimedStep) -> str:
    """Return the table of a step in Markdown, with Amdahl's bound below it."""
    lines = [
        f"## {step.name}{' in ' + step.dtype if step.dtype else ''}",
        "",
        "| operation | shapes | dtype | calls | eligible | uses Tensor Cores | time | share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for o in step.operations[:_MAX_OPERATIONS]:
        eligible = f"no: {o.why_not}" if o.why_not else "yes"
        used = {True: "yes", False: "no", None: "–"}[o.used]
        used = "none here" if step.kind == "cpu" else used
        cells = [o.operation, o.shape, o.dtype, str(o.calls), eligible, used]
        lines.append(table_row([*cells, f"{o.seconds * 1e6:.0f} µs", f"{o.share:.1%}"]))
    left_out = step.operations[_MAX_OPERATIONS:]
    if left_out:
        share = sum(o.share for o in left_out)
        lines.append(f"| {len(left_out)} others | | | | | | | {share:.1%} |")
    lines += ["", f"{step.matrix_share:.0%} of the time is in matrix operations."]
    if np.isfinite(step.bound):
        lines[-1] += (
            f" However fast they became, the whole step could be at most {step.bound:.2f}× as fast."
        )
    if step.kind == "gpu" and step.used_share is not None:
        lines.append(f"Of the eligible time, {step.used_share:.0%} is in Tensor Core kernels.")
    return "\n".join(lines) + "\n"


def step_json(step: TimedStep) -> dict[str, Any]:
    """Return the shares and all operations of a step, for JSON."""
    bound = step.bound if np.isfinite(step.bound) else None
    return {
        "name": step.name,
        "dtype": step.dtype,
        "matrix_share": step.matrix_share,
        "amdahl_bound": bound,
        "used_share": step.used_share,
        "operations": [asdict(o) for o in step.operations],
    }


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
