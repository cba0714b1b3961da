"""Return the times of problems on a machine: measured if they were measured, else predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from analysis.advice.measurements import Measurements, read_measurements, rows_near
from analysis.model.basis import Basis
from analysis.model.fit import Fit
from analysis.model.predict import explain
from analysis.model.query import group_of
from analysis.recordings.repetition import MeasuredTime
from analysis.recordings.runs import load_runs
from kernels.problem import FP8_INCLUDES, Problem
from sweeps.schema import problem_columns

_PREDICTED = (
    "limit", "tile", "tiles", "waves", "tail_efficiency", "tile_efficiency", "bytes",
)  # fmt: skip


def measurements_near(
    basis: Basis, problems: Sequence[Problem], factor: float = 1.0
) -> Measurements:
    """Return what a machine measured of problems, and of shapes within a factor of them.

    Raises:
        UserError: if the recording cannot be read.
    """
    if basis.folder is None:
        return Measurements({}, warm=all(basis.query(problems).cached))
    recording = load_runs(basis.folder)
    # Only a few of a million rows are near, so all further work is done on those.
    near = replace(recording, rows=rows_near(recording.rows, problems, factor))
    measured = read_measurements(near.products, recording)
    measured.warm = basis.warm
    return measured


def _also(problem: Problem, basis: Basis) -> str:
    """Return further remarks: what an fp8 time contains, and that the memory is too small."""
    memory, gigabytes = basis.model.machine.memory_bytes, problem.bytes / 1e9
    text = f"; {FP8_INCLUDES}" if problem.dtype == "fp8" else ""
    if problem.bytes <= memory:
        return text
    return f"{text}; it needs {gigabytes:,.0f} GB and the machine has {memory / 1e9:.0f} GB"


def times_of(problems: Sequence[Problem], basis: Basis) -> list[dict[str, Any]]:
    """Return one row per problem, as documented for ``predict --json``.

    If this very problem was measured, ``time_us`` is the measured time of the vendor library, and
    ``evidence`` says so. Its interval is then that of a second run. Times of public tables have no
    such interval; theirs is that of a prediction, around the time that :mod:`analysis.model.shift`
    expects under another framework or version.
    """
    measured = measurements_near(basis, problems)
    libraries = [basis.library(problem) for problem in problems]
    frame = basis.model.predict(basis.query(problems)).frame()
    rows = []
    for problem, library, row in zip(problems, libraries, frame.to_dict("records"), strict=True):
        known = measured.times_of(problem).get(library)
        fit = basis.model.fit(group_of(library, problem))
        time = _predicted(row) if known is None else _measured(known, row, fit)
        kind, source = basis.kind_and_source(problem, measured=known is not None)
        rows.append(
            {
                "problem": problem.spec(),
                **problem_columns(problem),
                "machine": basis.model.machine.slug,
                "time_us": time.time * 1e6,
                "tflops": problem.flops / time.time / 1e12,
                **{name: row[name] for name in _PREDICTED},
                "lo_us": time.lo * 1e6,
                "hi_us": time.hi * 1e6,
                "explanation": explain(row, basis.model.machine.kind) + _also(problem, basis),
                "evidence": "predicted" if known is None else "measured",
                "basis": kind,
                "source": source,
            }
        )
    return rows


def _predicted(row: Mapping[str, Any]) -> MeasuredTime:
    """Return a prediction's time and interval in the form of a measurement."""
    return MeasuredTime(*(row[f"{name}_us"] * 1e-6 for name in ("time", "lo", "hi")))


def _measured(known: MeasuredTime, row: Mapping[str, Any], fit: Fit) -> MeasuredTime:
    """Return a measured time with the interval of a repetition, else of a prediction."""
    if not math.isnan(known.lo):
        return MeasuredTime(known.time, *known.repetition)
    spread = fit.spread(row["lo_us"], row["hi_us"])
    expected = float(fit.shift.applied(np.array(known.time)))
    lo = expected * math.exp(fit.low * spread)
    hi = expected * math.exp(fit.high * spread)
    return MeasuredTime(known.time, lo, hi)
