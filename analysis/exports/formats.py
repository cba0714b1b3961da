"""Convert a recording to the format of another program.

- ``pytest-benchmark``: JSON that ``pytest-benchmark compare``, benchmark-action and Bencher read.
  ``extra_info`` has every non-empty column of the case.
- ``csv`` and ``parquet``: one row for each measured case, with the columns of measurements.csv and
  the samples in ``samples_us``.
- ``xla-perf-table``: XLA's ``GemmPerfTable`` as text, with the vendor library's FLOP/s for 16-bit
  GEMMs.
"""

from __future__ import annotations

import io
import json
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.recordings.case_times import CaseTimes
from analysis.recordings.load import Recording, bursts, library_rows
from analysis.recordings.named_cases import case_names, keyed, sample_count, seconds_of
from analysis.recordings.repetition import case_ids, rounds_of
from kernels.common.errors import UserError
from kernels.problem import Gemm
from sweeps.schema import COLUMNS, problem_of

SAMPLES = "samples_us"
"""Column with a case's samples in microseconds."""

PYTEST_BENCHMARK_VERSION = "5.3.1"
"""Version of pytest-benchmark whose format :func:`as_pytest_benchmark` writes."""


def as_pytest_benchmark(recording: Recording) -> bytes:
    """Return a recording as JSON in the format of pytest-benchmark.

    If a case has no samples, its statistics are derived from its median and interval.

    Raises:
        UserError: if the recorded samples cannot be read.
    """
    # case_names() needs the columns that keyed() adds, and keyed() also needs the failed cases.
    rows = keyed(recording.rows)
    rows = rows[rows["status"] == "ok"]
    samples = _samples(recording, rows)
    records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    benchmarks = []
    for name, row, samples_us in zip(case_names(rows), records, samples, strict=True):
        case = {column: row[column] for column in COLUMNS if row.get(column) not in (None, "")}
        benchmarks.append(
            {
                "group": row["sweep"] or None,
                "name": name,
                "fullname": name,
                "params": None,
                "param": None,
                "extra_info": case,
                "options": {},
                "stats": _stats(samples_us, row),
            }
        )
    run, machine = recording.run, recording.machine
    document = {
        "machine_info": {
            "node": "",
            "processor": machine.name,
            "machine": machine.slug,
            "cpu": {"brand_raw": machine.name},
            "software": dict(run["software"]),
        },
        "commit_info": {"id": None, "time": None, "dirty": False},
        "benchmarks": benchmarks,
        "datetime": run["run"],
        "version": PYTEST_BENCHMARK_VERSION,
    }
    return json.dumps(document, indent=1, ensure_ascii=False, default=_plain).encode()


def as_csv(recording: Recording) -> bytes:
    """Return a CSV file with one line for each measured case; spaces separate the samples.

    Raises:
        UserError: if the recorded samples cannot be read.
    """
    cases = _measured_cases(recording)
    cases[SAMPLES] = [" ".join(map(repr, samples)) for samples in cases[SAMPLES]]
    return cases.to_csv(index=False).encode()


def as_parquet(recording: Recording) -> bytes:
    """Return a Parquet file with one row for each measured case; samples are lists of numbers.

    Raises:
        UserError: if the recorded samples cannot be read.
    """
    buffer = io.BytesIO()
    _measured_cases(recording).to_parquet(buffer, index=False)
    return buffer.getvalue()


_XLA_TYPES = {"fp16": "f16", "bf16": "bf16"}  # XLA's names of dtypes


def as_xla_perf_table(recording: Recording) -> bytes:
    """Return a text proto with the vendor library's FLOP/s for each shape of a 16-bit GEMM.

    Only bursts in the recording's usual cache state (:attr:`Recording.cache`) are used. The fastest
    layout of each shape counts. GEMMs in fp32 are left out, because XLA multiplies fp32 with or
    without TF32, depending on its flags.

    Raises:
        UserError: if the recording is not from a GPU, or has no such burst of a 16-bit GEMM.
    """
    rows = library_rows(bursts(recording.products, recording.cache))
    rows = rows[(rows["op"] == "gemm") & rows["dtype"].isin(list(_XLA_TYPES))]
    if recording.machine.capability is None or rows.empty:
        raise UserError(
            f"An XLA table holds only {' and '.join(_XLA_TYPES)} GEMMs of a GPU's vendor library "
            f"that were timed in bursts with a {recording.cache} cache, but {recording.folder} has "
            "none. Give a recording that has such GEMMs."
        )
    # 1. Collect the FLOP/s of each shape (batch, M, N, K), by the dtypes in XLA's notation.
    speeds: dict[tuple[int, int, int, int], dict[str, int]] = {}
    for row in rows.to_dict("records"):
        gemm = problem_of(row)
        assert isinstance(gemm, Gemm)
        speed = round(gemm.flops / (row["time_us"] * 1e-6))
        speed_by_types = speeds.setdefault((gemm.batch, gemm.m, gemm.n, gemm.k), {})
        xla_type = _XLA_TYPES[gemm.dtype]
        types = f"{xla_type}x{xla_type}->{xla_type}"  # of both operands and of the result
        # The fastest layout counts.
        speed_by_types[types] = max(speed, speed_by_types.get(types, 0))
    # 2. Write one entry for each shape.
    lines = ["entries {", f'  key: "{recording.machine.arch}"', "  value {"]
    for (batch, m, n, k), speed_by_types in sorted(speeds.items()):
        lines.append("    entries {")
        lines += [f"      b: {batch}", f"      m: {m}", f"      n: {n}", f"      k: {k}"]
        lines += [
            f'      flops {{ key: "{types}" value: {speed} }}'
            for types, speed in sorted(speed_by_types.items())
        ]
        lines.append("    }")
    return "\n".join([*lines, "  }", "}", ""]).encode()


FORMATS: Mapping[str, tuple[str, Callable[[Recording], bytes]]] = {
    "pytest-benchmark": ("json", as_pytest_benchmark),
    "csv": ("csv", as_csv),
    "parquet": ("parquet", as_parquet),
    "xla-perf-table": ("pbtxt", as_xla_perf_table),
}
"""Usual file extension of each format, and the function that converts a recording to the format."""


def _samples(recording: Recording, rows: pd.DataFrame) -> list[list[float]]:
    """Return the samples of each row in µs; a list is empty if no samples were recorded."""
    rounds = rounds_of(recording)
    return [
        [seconds * 1e6 for _, seconds in sorted(rounds.get(case, {}).items())]
        for case in case_ids(rows)
    ]


def _measured_cases(recording: Recording) -> pd.DataFrame:
    """Return the columns of measurements.csv and the samples of all rows that have a time."""
    rows = recording.ok
    columns = [name for name in COLUMNS if name in rows]
    return rows[columns].assign(**{SAMPLES: _samples(recording, rows)})


def _plain(value: Any) -> Any:
    """Convert a NumPy number to a Python number, for JSON."""
    return value.item()


# --- pytest-benchmark's statistics ----------------------------------------------------------------


def _stats(samples_us: Sequence[float], row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a case's statistics under pytest-benchmark's names, with times in seconds.

    Without samples, the statistics are derived from the case's median and interval.
    """
    if samples_us:
        samples_s = [sample_us * 1e-6 for sample_us in samples_us]
        return {**_statistics(samples_s), "data": samples_s, "iterations": 1}
    median = seconds_of(row.get("time_us"))
    lo = seconds_of(row.get("time_lo_us"))
    hi = seconds_of(row.get("time_hi_us"))
    summary = CaseTimes.from_interval(median, lo, hi, sample_count(row))
    # The error is that of the logarithm, so its product with the median is the error in seconds.
    deviation = summary.error * median * math.sqrt(summary.count)
    least = median if math.isnan(lo) else lo
    most = median if math.isnan(hi) else hi
    return {
        "min": least, "max": most, "mean": median, "stddev": deviation, "rounds": summary.count,
        "median": median, "iqr": 0.0, "q1": median, "q3": median, "iqr_outliers": 0,
        "stddev_outliers": 0, "outliers": "0;0", "ld15iqr": least, "hd15iqr": most,
        "ops": 1 / median, "total": median * summary.count, "iterations": 1,
    }  # fmt: skip


def _statistics(samples_s: Sequence[float]) -> dict[str, Any]:
    """Return the statistics that pytest-benchmark computes from one or more samples in seconds.

    Quartiles follow Hazen's definition, as in pytest-benchmark.
    """
    # 1. Compute the mean, the standard deviation and the quartiles.
    ordered = sorted(samples_s)
    count = len(ordered)
    mean = statistics.mean(ordered)
    deviation = statistics.stdev(ordered) if count > 1 else 0.0
    first, third = map(float, np.quantile(ordered, [0.25, 0.75], method="hazen"))
    iqr = third - first
    # 2. Count the samples that differ from the mean by more than the standard deviation.
    stddev_outliers = sum(not mean - deviation <= sample <= mean + deviation for sample in ordered)
    # 3. Count the samples that lie more than 1.5 interquartile ranges outside the quartiles. The
    #    others are ordered[first_inside:end_inside].
    first_inside = bisect_left(ordered, first - 1.5 * iqr)
    end_inside = bisect_right(ordered, third + 1.5 * iqr)
    iqr_outliers = first_inside + count - end_inside
    return {
        "min": ordered[0], "max": ordered[-1], "mean": mean, "stddev": deviation, "rounds": count,
        "median": statistics.median(ordered), "iqr": iqr, "q1": first, "q3": third,
        "iqr_outliers": iqr_outliers, "stddev_outliers": stddev_outliers,
        "outliers": f"{stddev_outliers};{iqr_outliers}",
        "ld15iqr": ordered[first_inside], "hd15iqr": ordered[end_inside - 1],
        "ops": 1 / mean, "total": sum(ordered),
    }  # fmt: skip
