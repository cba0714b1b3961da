"""Formats of a run's files: run.json, the sample files and ``measurements.csv``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.common.documents import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    Each,
    Maybe,
    Number,
    misfit,
)
from kernels.operation import Operation, Workload, operation_of
from kernels.problem import Conv, Gemm, pair_text, parse_pair

SCHEMA = 1
"""Version of all file formats under ``results/<slug>/``."""

_TEXT, _WHOLE, _REAL, _FLAG = "text", "whole", "real", "flag"

COLUMNS: dict[str, tuple[str, str]] = {
    "schema": (_WHOLE, "version of this table's format"),
    "run": (
        _TEXT,
        "name of the run that measured the case: the UTC time at which the run was planned",
    ),
    "time_utc": (_TEXT, "time of the case's last sample, or of its refusal or failure; ISO 8601"),
    "worker": (_TEXT, "shard that measured the case, such as 1/1"),
    "gpu": (_WHOLE, "ordinal of the GPU within the run; empty on a CPU"),
    "sweep": (_TEXT, "sweep that the case belongs to"),
    "op": (_TEXT, "gemm, conv, or another operation: relu, projections, lstm, …"),
    "pass": (_TEXT, "pass of a convolution: fprop, dgrad or wgrad; empty for other operations"),
    "m": (
        _WHOLE,
        "rows of the GEMM, of the GEMM that a convolution's pass implies for each group of "
        "channels, of one GEMM of a series, or of the GEMM that computes an LSTM's gates from the "
        "input of one step",
    ),
    "n": (_WHOLE, "columns of the GEMM that has m rows"),
    "k": (_WHOLE, "reduction length of the GEMM that has m rows"),
    "batch": (
        _WHOLE,
        "number of GEMMs in a batch or series, of images in a convolution or a memory-bound layer, "
        "or of steps in an LSTM",
    ),
    "c": (_WHOLE, "input channels"),
    "h": (_WHOLE, "input height"),
    "w": (_WHOLE, "input width"),
    "kout": (_WHOLE, "output channels"),
    "r": (_WHOLE, "filter height"),
    "s": (_WHOLE, "filter width"),
    "stride": (_TEXT, "stride, such as 2 for both directions or 2x1 (vertical x horizontal)"),
    "padding": (_TEXT, "padding, in the format of stride"),
    "dilation": (_TEXT, "dilation, in the format of stride"),
    "groups": (_WHOLE, "groups of channels"),
    "dtype": (
        _TEXT,
        "fp32 (IEEE), tf32, fp16 or bf16; in imported tables also fp8, whose time includes "
        "quantising A",
    ),
    "layout": (
        _TEXT,
        "layout: nn, nt, tn or tt for a GEMM, and nhwc or nchw for a convolution or a memory-bound "
        "layer",
    ),
    "implementation": (_TEXT, "implementation: cublas, cudnn, mkl, onednn, triton-tiled, …"),
    "config": (
        _TEXT,
        "tuning parameters of the implementation: key=value pairs, separated by semicolons; empty "
        "for the default",
    ),
    "mode": (
        _TEXT,
        "burst (short batches with pauses) or sustained (at least 0.3 s without a pause)",
    ),
    "cache": (
        _TEXT,
        "cold (operands come from memory), warm (operands come from the last-level cache) or "
        "weights-cold (the first operand comes from the cache, and the second from memory)",
    ),
    "fill": (_TEXT, "distribution of the operands' values"),
    "status": (_TEXT, "ok, wrong, oom, unsupported or error; only ok rows have times"),
    "message": (_TEXT, "reason why the status is not ok, or a remark about a case with a time"),
    "time_us": (_REAL, "median time per launch, including the gap to the next; microseconds"),
    "time_lo_us": (_REAL, "lower end of the median's 95% interval; empty for fewer than 6 samples"),
    "time_hi_us": (_REAL, "upper end of the median's 95% interval; empty for fewer than 6 samples"),
    "samples": (_WHOLE, "number of timed batches that the median is taken over"),
    "converged": (_FLAG, "true if the 95% interval is within ±1% of the median"),
    "tflops": (_REAL, "useful FLOPs divided by the median time, TFLOP/s"),
    "gbps": (
        _REAL,
        "minimum bytes (operands read once, result written once) divided by the median time, GB/s",
    ),
    "rel_error": (
        _REAL,
        "largest error of the checked entries: max |y − ref| / max |ref|, where y is the result "
        "and ref is its float64 reference",
    ),
    "kernel": (_TEXT, "name of the main kernel, which takes the largest share of the time"),
    "tile": (
        _TEXT,
        "tile of the main kernel, rows x columns x depth; empty if the kernel's name does not "
        "contain the tile",
    ),
    "grid": (_TEXT, "grid of CTAs of the main kernel"),
    "kernels": (_TEXT, "all kernels of one launch with their shares of the time, JSON"),
    "tensor_cores": (
        _FLAG,
        "true if the main kernel uses Tensor Cores, judged by its name; empty if the name does not "
        "show this",
    ),
    "sm_mhz": (
        _REAL,
        "median of the samples' mean SM clocks, from the SMs' cycle counters or, if these cannot "
        "be read, from NVML; MHz",
    ),
    "power_w": (
        _REAL,
        "board power, only for sustained cases (a burst is too short); watts",
    ),
    "temp_c": (_REAL, "GPU temperature; °C"),
    "throttled": (_TEXT, "reasons why the clock was throttled, separated by semicolons"),
}
"""Columns of measurements.csv in their order, each with its kind of value and its meaning."""

PHASES = ALONE, TOGETHER = "alone", "together"
"""Phases in which a node's GPUs time the anchors: one GPU at a time, or all GPUs at once.

Anchors are a few cases that every GPU times."""

IDENTITY = tuple(COLUMNS)[tuple(COLUMNS).index("sweep") : tuple(COLUMNS).index("fill") + 1]
"""Columns that identify a case."""


_CEILINGS = {"bandwidth": POSITIVE, "peaks": Each(POSITIVE)}

RUN = {
    "schema": COUNT, "protocol": COUNT, "run": str, "machine": Maybe(dict),
    "software": Each(str),
    "plan": {
        "cases": [dict], "budget_s?": NOT_NEGATIVE, "left_s?": Number(), "shards?": SIZE,
        "sweeps?": [str], "left_out?": Each(COUNT), "recorded_elsewhere?": list,
    },
    "published?": bool, "spent_s?": NOT_NEGATIVE, "checking_s?": NOT_NEGATIVE,
    "counts?": Each(COUNT), "sweeps?": Each(Each(COUNT)),
    "canary?": Maybe({"median_us": POSITIVE, "spread": NOT_NEGATIVE, "samples?": COUNT}),
    "repeats?": Maybe({"cases": COUNT, "between": NOT_NEGATIVE, "between_cases?": NOT_NEGATIVE}),
    "ceilings?": Maybe({"start": _CEILINGS, "raised?": Each({"case": str, "from": POSITIVE})}),
    "health?": Maybe({"verdict": str, "reasons": [str]}),
    "gpus?": [{
        "gpu": COUNT, "id?": str, "node": COUNT, "power_limit_w?": Maybe(NOT_NEGATIVE),
        "sm_limit_mhz?": Maybe(NOT_NEGATIVE),
    }],
    "anchors?": [dict], "turns?": [COUNT],
    "steady?": [{
        "gpu": Maybe(COUNT), "problem": str, "tflops": POSITIVE, "share": POSITIVE,
        "lo": Maybe(POSITIVE), "hi": Maybe(POSITIVE), "sm_mhz": Maybe(NOT_NEGATIVE),
        "power_w": Maybe(NOT_NEGATIVE), "energy_j": Maybe(NOT_NEGATIVE),
    }],
    "merged?": [{
        "worker": str, "run": str, "health": Maybe({"verdict": str, "reasons": [str]}),
    }],
    "public?": {
        "source": str, "package": str, "licence": str, "cache": str, "rows": COUNT, "how": str,
        "framework": str, "version": str,
    },
}  # fmt: skip
"""Format of run.json together with the cases of its plan, as a shape for
:func:`kernels.common.documents.misfit`."""

_MOMENT = Number(0, 1e11)  # seconds since 1970, up to the year 5138
_SAMPLE = {
    "case": str, "s": POSITIVE, "at": _MOMENT, "worker": str, "r?": COUNT, "n?": SIZE,
    "gpu?": Maybe(COUNT), "cost?": NOT_NEGATIVE, "checking?": NOT_NEGATIVE, "hidden?": bool,
    "throttled?": [str], "sm_mhz?": Maybe(NOT_NEGATIVE), "power_w?": Maybe(NOT_NEGATIVE),
    "temp_c?": Maybe(Number()),
}  # fmt: skip
_ANY = {name: _SAMPLE[name] for name in ("case", "worker", "gpu?", "cost?", "checking?")}
_EVENTS = {
    "sample": _SAMPLE,
    "repeat": _SAMPLE,
    "facts": {**_ANY, "facts": dict},
    "outcome": {**_ANY, "at": _MOMENT, "status": str, "message": str},
    "anchor": {
        **_SAMPLE,
        "phase": str,
        "t?": NOT_NEGATIVE,
        "joules?": Maybe(NOT_NEGATIVE),
    },
    "place": {**_ANY, "place": COUNT, "at": _MOMENT},
    "end": {**_ANY, "why": str, "budget": NOT_NEGATIVE},
    "ceilings": {**_ANY, **_CEILINGS},
    "confirm": {**_ANY, "against": str, "process": Number(), "s": [POSITIVE]},
    "host": {
        **_ANY,
        "seconds": NOT_NEGATIVE,
        "steal?": NOT_NEGATIVE,
        "others?": NOT_NEGATIVE,
        "gpu_processes?": COUNT,
    },
}
"""Formats of the lines of a sample file, by kind of event.

Lines of other events have the format :data:`_ANY`."""


def problem_columns(problem: Workload) -> dict[str, Any]:
    """Return a problem's values for the columns of measurements.csv that apply to the problem."""
    if isinstance(problem, Gemm):
        return {
            "op": "gemm",
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "batch": problem.batch,
            "dtype": problem.dtype,
            "layout": problem.layout,
        }
    if isinstance(problem, Operation):
        return problem.columns()
    gemm = problem.implied_gemm
    return {
        "op": "conv",
        "pass": problem.pass_,
        "m": gemm.m,
        "n": gemm.n,
        "k": gemm.k,
        "batch": problem.n,
        "c": problem.c,
        "h": problem.h,
        "w": problem.w,
        "kout": problem.kout,
        "r": problem.r,
        "s": problem.s,
        "stride": pair_text(problem.stride),
        "padding": pair_text(problem.padding),
        "dilation": pair_text(problem.dilation),
        "groups": problem.groups,
        "dtype": problem.dtype,
        "layout": problem.layout,
    }


def problem_of(row: Mapping[str, Any]) -> Workload:
    """Build a problem from its columns; the inverse of :func:`problem_columns`.

    Sizes may be strings, as in a CSV file.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: if a column is missing or has an invalid
            value.
        UserError: if the columns describe a problem that cannot exist, or if the text of a
            stride, padding or dilation is malformed.
    """
    if row["op"] == "gemm":
        m = _size(row["m"])
        n = _size(row["n"])
        k = _size(row["k"])
        batch = _size(row["batch"])
        return Gemm(m, n, k, row["dtype"], row["layout"], batch)
    if row["op"] != "conv":
        return operation_of(row)
    # The columns are in the order in which Conv.build takes their values.
    sizes = [_size(row[name]) for name in ("batch", "c", "h", "w", "kout", "r", "s")]
    pairs = [parse_pair(str(row[name]), name) for name in ("stride", "padding", "dilation")]
    groups = _size(row["groups"])
    return Conv.build(sizes, pairs, groups, row["dtype"], row["layout"], row["pass"])


def _size(value: Any) -> int:
    """Convert a size to an int. Refuse a fractional part, which ``int`` would drop."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value} is not a whole number")
    return int(value)


def fault_of_event(event: Any) -> str:
    """Return a clause that says why a parsed line is not a valid event, or "" if it is valid."""
    kind = event.get("event") if isinstance(event, dict) else None
    if not isinstance(kind, str):
        return "it is not an event"
    # A block of a re-timed pair has two samples of each case. misfit() does not check lengths.
    if kind == "confirm" and isinstance(event.get("s"), list) and len(event["s"]) != 4:
        return "its list 's' does not have four entries"
    return misfit(event, _EVENTS.get(kind, _ANY))
