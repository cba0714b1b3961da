"""Write a recording in another program's format.

- ``pytest-benchmark``: its JSON, which ``pytest-benchmark compare``, benchmark-action and Bencher
  read. ``extra_info`` has all columns of the case.
- ``csv`` and ``parquet``: one row for each case with all columns of measurements.csv, and the
  samples in ``samples_us``.
- ``xla-perf-table``: XLA's ``GemmPerfTable`` as text: FLOP/s of 16-bit GEMMs by shape.
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
"""Column with the samples of a case in microseconds, in the order in which they were taken."""

PYTEST_BENCHMARK_VERSION = "5.3.1"
"""Version of pytest-benchmark whose format is written."""


def as_pytest_benchmark(recording: Recording) -> bytes:
    """Return the JSON of pytest-benchmark; a case without samples has its median and interval."""
    rows = keyed(recording.ok)
    samples = _samples(recording, rows)
    records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    benchmarks = [
        {
            "group": row["sweep"] or None,
            "name": name,
            "fullname": name,
            "params": None,
            "param": None,
            "extra_info": {
                column: row[column] for column in COLUMNS if row.get(column) not in (None, "")
            },
            "options": {},
            "stats": _stats(taken, row),
        }
        for name, row, taken in zip(case_names(rows), records, samples, strict=True)
    ]
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
    """Return one line for each case; samples are separated by spaces."""
    frame = _frame(recording)
    frame[SAMPLES] = [" ".join(map(repr, samples)) for samples in frame[SAMPLES]]
    return frame.to_csv(index=False).encode()


def as_parquet(recording: Recording) -> bytes:
    """Return one row for each case; samples are a list of numbers."""
    buffer = io.BytesIO()
    _frame(recording).to_parquet(buffer, index=False)
    return buffer.getvalue()


_XLA_TYPES = {"fp16": "f16", "bf16": "bf16"}


def as_xla_perf_table(recording: Recording) -> bytes:
    """Return FLOP/s by shape, of the vendor library's fastest layout, as a text proto.

    XLA multiplies fp32 with or without TF32, depending on its flags, so only 16-bit GEMMs are
    written.

    Raises:
        UserError: if the recording is not of a GPU, or has no such GEMM.
    """
    rows = library_rows(bursts(recording.products, recording.cache))
    rows = rows[(rows["op"] == "gemm") & rows["dtype"].isin(list(_XLA_TYPES))]
    if recording.machine.capability is None or rows.empty:
        raise UserError(
            f"{recording.folder} has no GEMM of a GPU's library in "
            f"{' or '.join(_XLA_TYPES)}, which are all that an XLA table has."
        )
    speeds: dict[tuple[int, int, int, int], dict[str, int]] = {}
    for row in rows.to_dict("records"):
        gemm = problem_of(row)
        assert isinstance(gemm, Gemm)
        kind = _XLA_TYPES[gemm.dtype]
        speed = round(gemm.flops / (row["time_us"] * 1e-6))
        entry = speeds.setdefault((gemm.batch, gemm.m, gemm.n, gemm.k), {})
        key = f"{kind}x{kind}->{kind}"
        entry[key] = max(speed, entry.get(key, 0))
    lines = ["entries {", f'  key: "{recording.machine.arch}"', "  value {"]
    for (batch, m, n, k), flops in sorted(speeds.items()):
        lines += ["    entries {", f"      b: {batch}", f"      m: {m}", f"      n: {n}"]
        lines += [f"      k: {k}"]
        lines += [
            f'      flops {{ key: "{key}" value: {speed} }}' for key, speed in sorted(flops.items())
        ]
        lines.append("    }")
    return "\n".join([*lines, "  }", "}", ""]).encode()


FORMATS: Mapping[str, tuple[str, Callable[[Recording], bytes]]] = {
    "pytest-benchmark": ("json", as_pytest_benchmark),
    "csv": ("csv", as_csv),
    "parquet": ("parquet", as_parquet),
    "xla-perf-table": ("pbtxt", as_xla_perf_table),
}
"""Usual ending of a format's files, and the function that writes it."""


def _samples(recording: Recording, rows: pd.DataFrame) -> list[list[float]]:
    """Return the samples of each row in microseconds, in order; empty where none are recorded."""
    rounds = rounds_of(recording)
    return [
        [seconds * 1e6 for _, seconds in sorted(rounds.get(case, {}).items())]
        for case in case_ids(rows)
    ]


def _frame(recording: Recording) -> pd.DataFrame:
    rows = recording.ok
    columns = [name for name in COLUMNS if name in rows]
    return rows[columns].assign(**{SAMPLES: _samples(recording, rows)})


def _plain(value: Any) -> Any:
    """Return NumPy's numbers as Python's, for JSON."""
    return value.item()


# --- pytest-benchmark's statistics ----------------------------------------------------------------


def _stats(samples_us: Sequence[float], row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the statistics of a case in seconds, under pytest-benchmark's names.

    Without samples, the median stands for the mean, the interval's ends for the extremes, and the
    deviation is the one that makes the interval as wide as it is.
    """
    if samples_us:
        data = [value * 1e-6 for value in samples_us]
        return {**_statistics(data), "data": data, "iterations": 1}
    time, lo, hi = (seconds_of(row.get(f"time{end}_us")) for end in ("", "_lo", "_hi"))
    times = CaseTimes.from_interval(time, lo, hi, sample_count(row))
    deviation = times.error * time * math.sqrt(times.count)
    least, most = (time if math.isnan(end) else end for end in (lo, hi))
    return {
        "min": least, "max": most, "mean": time, "stddev": deviation, "rounds": times.count,
        "median": time, "iqr": 0.0, "q1": time, "q3": time, "iqr_outliers": 0,
        "stddev_outliers": 0, "outliers": "0;0", "ld15iqr": least, "hd15iqr": most,
        "ops": 1 / time, "total": time * times.count, "iterations": 1,
    }  # fmt: skip


def _statistics(data: Sequence[float]) -> dict[str, Any]:
    """Return what pytest-benchmark computes from samples, with its quartiles (Hazen's)."""
    ordered, count = sorted(data), len(data)
    mean = statistics.mean(ordered)
    deviation = statistics.stdev(ordered) if count > 1 else 0.0
    first, third = map(float, np.quantile(ordered, [0.25, 0.75], method="hazen"))
    iqr = third - first
    low = bisect_left(ordered, first - 1.5 * iqr)
    high = bisect_right(ordered, third + 1.5 * iqr)
    far = sum(not mean - deviation <= value <= mean + deviation for value in ordered)
    beyond = low + count - high
    return {
        "min": ordered[0], "max": ordered[-1], "mean": mean, "stddev": deviation, "rounds": count,
        "median": statistics.median(ordered), "iqr": iqr, "q1": first, "q3": third,
        "iqr_outliers": beyond, "stddev_outliers": far, "outliers": f"{far};{beyond}",
        "ld15iqr": ordered[low], "hd15iqr": ordered[min(high, count) - 1], "ops": 1 / mean,
        "total": sum(ordered),
    }  # fmt: skip
