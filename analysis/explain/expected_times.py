"""Find out how long the operations of a trace should take on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from analysis.advice.times import times_of
from analysis.audit.account import as_problem, attention_time
from analysis.model.attention_basis import find_attention
from analysis.model.basis import Basis
from analysis.traces.trace_account import ProfileAccount
from kernels.machine import Machine
from kernels.problem import Conv, Gemm, Problem
from sweeps.capture.captured import Attention, Work


class ExpectedTime(NamedTuple):
    """Expected time of one call in µs, with its interval and its source in words."""

    time_us: float
    lo_us: float
    hi_us: float
    source: str


def expected_times(account: ProfileAccount, basis: Basis) -> dict[Work, ExpectedTime]:
    """Return the expected time of one call, by shape; shapes without a known time are left out.

    For a GEMM or convolution in fp32 on a machine with TF32, the shape in TF32 is also a key.

    Raises:
        UserError: if the machine's recording or its attention fits cannot be read.
    """
    machine = basis.model.machine
    works = dict.fromkeys(work for operation in account.operations for work in operation.works)
    # 1. Collect the problems of GEMMs and convolutions, and the same problems in TF32.
    works_of: dict[Problem, list[Work]] = {}
    for work in works:
        problem = as_problem(work)
        if problem is not None and problem.dtype in machine.peaks:
            works_of.setdefault(problem, []).append(work)
    for problem in list(works_of):
        if (tf32_problem := in_tf32(problem, machine)) is not None:
            works_of.setdefault(tf32_problem, [tf32_problem])
    # 2. Look up or predict all of them together, which is faster than one at a time.
    times: dict[Work, ExpectedTime] = {}
    rows = times_of(list(works_of), basis) if works_of else []
    for problem, row in zip(works_of, rows, strict=True):
        time = ExpectedTime(
            float(row["time_us"]), float(row["lo_us"]), float(row["hi_us"]), row["source"]
        )
        times.update(dict.fromkeys(works_of[problem], time))
    # 3. Predict attention, which was measured only on GPUs and in 16 bits.
    calls = [work for work in works if isinstance(work, Attention) and work.dtype in machine.peaks]
    bases = {
        dtype: find_attention(machine, dtype, basis.attention_folder)
        for dtype in {work.dtype for work in calls}
    }
    for work in calls:
        attention_basis = bases[work.dtype]
        if attention_basis is not None:
            # A trace does not name the framework that computes the attention.
            call = attention_time(work, attention_basis, framework=None)
            source = attention_basis.source(named=None)
            times[work] = ExpectedTime(1e6 * call.seconds, 1e6 * call.lo, 1e6 * call.hi, source)
    return times


def in_tf32(work: Work, machine: Machine) -> Problem | None:
    """Return an fp32 GEMM or convolution as a TF32 problem.

    The result is None for any other operation, and for a machine without TF32.
    """
    if not isinstance(work, Gemm | Conv) or work.dtype != "fp32" or "tf32" not in machine.peaks:
        return None
    return replace(work, dtype="tf32")


def sum_of(parts: Sequence[ExpectedTime | None]) -> ExpectedTime | None:
    """Return the sum of the expected times of a call's parts.

    The source is that of the first part. The result is None if any time is unknown, or if there are
    no parts.
    """
    known_parts = [part for part in parts if part is not None]
    if not known_parts or len(known_parts) < len(parts):
        return None
    return ExpectedTime(
        sum(part.time_us for part in known_parts),
        sum(part.lo_us for part in known_parts),
        sum(part.hi_us for part in known_parts),
        known_parts[0].source,
    )
