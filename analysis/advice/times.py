"""Look up the times of problems on a machine, or predict those that were not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.advice.measurements import Measurements, read_measurements, rows_near
from analysis.model.basis import Basis
from analysis.model.fit import Fit
from analysis.model.predict import explain
from analysis.model.query import group_of
from analysis.recordings.repetition import MeasuredTime
from analysis.recordings.runs import load_runs
from analysis.units import three_digits
from kernels.common.counts import counted
from kernels.problem import WIDE_BYTES, Gemm, Problem
from kernels.timemodel.estimate import priced_alignment
from sweeps.schema import problem_columns

_PREDICTED = (
    "limit", "tile", "tiles", "waves", "tail_efficiency", "tile_efficiency", "bytes",
)  # fmt: skip
"""Columns that every answer takes from the prediction, even if its time is measured."""


def measurements_near(
    basis: Basis, problems: Sequence[Problem], factor: float = 1.0
) -> Measurements:
    """Return a machine's measurements near the problems, as :func:`rows_near` chooses them.

    The result is empty if the machine has no usable recording.

    Raises:
        UserError: if a recording of the machine cannot be read, or if no recording is usable and
            the machine is a CPU that does not support the dtype of a problem.
    """
    if basis.folder is None:
        return Measurements({}, warm=all(basis.query(problems).cached))
    measured = _read_near(basis.folder, problems, factor)
    if basis.model_folder is not None:
        measured = measured.with_older(_read_near(basis.model_folder, problems, factor))
    # Options that were not measured are predicted in the cache state of the model (warm or cold),
    # which may differ from that of the recording.
    measured.warm = basis.warm
    return measured


def _read_near(folder: Path, problems: Sequence[Problem], factor: float) -> Measurements:
    recording = load_runs(folder)
    # Only a few of up to a million rows are near, and reading all the others would take long.
    near = replace(recording, rows=rows_near(recording.rows, problems, factor))
    return read_measurements(near.products, recording)


def _remarks(problem: Problem, basis: Basis) -> str:
    """Return remarks about misalignment, fp8 and too little memory, to append to an explanation.

    Explanations have no final period, so each remark begins with one and has none at its end. The
    result is "" if no remark applies.
    """
    machine = basis.model.machine
    remarks = ""
    # In fp32, the same kernels run at any alignment, and a CPU has no kernels for alignments.
    on_tensor_cores = machine.kind == "gpu" and problem.dtype != "fp32"
    if isinstance(problem, Gemm) and on_tensor_cores:
        alignment = priced_alignment(problem)
        if alignment < WIDE_BYTES:
            remarks += (
                f". Rows begin at multiples of {counted(alignment, 'byte')}, but the fastest "
                f"kernels need multiples of {WIDE_BYTES}"
            )
    if problem.dtype == "fp8":
        remarks += ". The time includes the quantisation of the activations"
    memory_bytes = machine.memory_bytes  # 0 if the size of the memory is unknown
    if 0 < memory_bytes < problem.bytes:
        needed_gb = three_digits(problem.bytes / 1e9)
        available_gb = three_digits(memory_bytes / 1e9)
        remarks += (
            f". The problem needs {needed_gb} GB of memory, but the machine has {available_gb} GB"
        )
    return remarks


def times_of(problems: Sequence[Problem], basis: Basis) -> list[dict[str, Any]]:
    """Return the row that ``predict --json`` prints for each problem.

    ``evidence`` tells whether ``time_us`` was measured on exactly this problem or predicted.

    Raises:
        UserError: for an unreadable recording or an unsupported dtype.
    """
    measured = measurements_near(basis, problems)
    libraries = [basis.library(problem) for problem in problems]
    frame = basis.model.predict(basis.query(problems)).frame()
    rows = []
    for problem, library, row in zip(problems, libraries, frame.to_dict("records"), strict=True):
        measured_time = measured.times_of(problem).get(library)
        fit = basis.model.fit_of(group_of(library, problem))
        if measured_time is None:
            answer = _predicted_time(row)
        else:
            answer = _with_reported_interval(measured_time, row, fit)
        kind, source = basis.kind_and_source(
            problem,
            measured=measured_time is not None,
            in_model_folder=(problem, library) in measured.older,
        )
        rows.append(
            {
                "problem": problem.spec(),
                **problem_columns(problem),
                "machine": basis.model.machine.slug,
                "time_us": answer.time * 1e6,
                "tflops": problem.flops / answer.time / 1e12,
                **{name: row[name] for name in _PREDICTED},
                "lo_us": answer.lo * 1e6,
                "hi_us": answer.hi * 1e6,
                "explanation": explain(row, basis.model.machine.kind) + _remarks(problem, basis),
                "evidence": "predicted" if measured_time is None else "measured",
                "basis": kind,
                "source": source,
            }
        )
    return rows


def _predicted_time(row: Mapping[str, Any]) -> MeasuredTime:
    return MeasuredTime(row["time_us"] * 1e-6, row["lo_us"] * 1e-6, row["hi_us"] * 1e-6)


def _with_reported_interval(
    measured_time: MeasuredTime, row: Mapping[str, Any], fit: Fit
) -> MeasuredTime:
    """Return a measured time with the interval that is reported for it.

    A measured interval is widened to cover the time that a second run would measure. A time without
    an interval, such as a time from a public table, gets an interval around the time that is
    expected with the user's framework. The measured time may lie outside this interval.
    """
    seconds = measured_time.time
    has_interval = not math.isnan(measured_time.lo)
    if has_interval:
        lo, hi = measured_time.repetition
        return MeasuredTime(seconds, lo, hi)
    # The spread is that of the logarithm of a time.
    spread = fit.spread(row["lo_us"], row["hi_us"])
    expected = float(fit.shift.applied(np.array(seconds)))
    lo = expected * math.exp(fit.low * spread)
    hi = expected * math.exp(fit.high * spread)
    return MeasuredTime(seconds, lo, hi)
