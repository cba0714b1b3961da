"""Measure how long a few cases take on this CPU, before a run is planned.

A GPU is not probed, because the process that plans must not open it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kernels.machine import Machine
from sweeps.cases.case import Case
from sweeps.measuring.bench import Refusal
from sweeps.measuring.torch_bench import TorchBench
from sweeps.planning.plan import Costs, checked_bytes, expected_seconds, kind_of

_SECONDS = 6.0  # seconds after which no further case is probed
_SIZES = (0.1, 0.5, 0.95)  # quantiles of the FLOPs of a kind's cases
# Largest factor between a launch's time and its estimate, in either direction; larger ones are
# reduced to it.
_MAX_FACTOR = 50.0


def probe(cases: Mapping[str, Sequence[Case]], machine: Machine) -> Costs:
    """Prepare, check and time a few cases on a CPU, and return the costs that a plan should expect.

    If none of these cases can be prepared, return the default costs. The ceilings of ``machine``
    must have been measured.
    """
    default_costs = Costs.default(machine.kind)
    chosen = _choose_cases([case for cases_of_sweep in cases.values() for case in cases_of_sweep])
    bench = TorchBench(machine, machine.kind, None, chosen)
    preparing_seconds: list[float] = []
    # Time that each check's passes over the operands would take at full bandwidth.
    moving_seconds: list[float] = []
    checking_seconds: list[float] = []
    # For each kind, the FLOPs of its cases and the ratios of their launch times to the estimates.
    factors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    # 1. Prepare, check and time cases until all are probed or the time is used up.
    probing_began = time.monotonic()
    for case in chosen:
        if time.monotonic() - probing_began > _SECONDS:
            break
        preparing_began = time.monotonic()
        # The bench would announce each case to a parent process, but there is none here.
        (prepared,) = bench.prepare([case], {}, on_start=lambda ids, seconds: None)
        elapsed = time.monotonic() - preparing_began
        if isinstance(prepared, Refusal):
            continue
        subject = prepared.subject
        launch_seconds = bench.sampler.estimate(subject.launch, warmed_up=True)
        (expected,) = expected_seconds([case.problem], machine)
        # The measured time is 0 if the clock is too coarse for a launch. The expected time is 0 if
        # the CPU lacks the dtype.
        if launch_seconds and expected:
            factor = min(max(launch_seconds / expected, 1 / _MAX_FACTOR), _MAX_FACTOR)
            factors[kind_of(case)].append((float(case.problem.flops), factor))
        # The time of preparing includes a check and a launch. The check includes a launch, too.
        preparing_seconds.append(max(0.0, elapsed - subject.checking - launch_seconds))
        moving_seconds.append(checked_bytes(case) / machine.bandwidth)
        checking_seconds.append(subject.checking - launch_seconds)
    if not preparing_seconds:
        return default_costs
    # 2. Fit the costs. A check takes a fixed time plus a multiple of the time to move its bytes.
    check, passes = _fit_checks(np.array(moving_seconds), np.array(checking_seconds))
    return replace(
        default_costs,
        prepare=float(np.median(preparing_seconds)),
        check=check,
        passes=passes,
        slower={kind: sorted(points) for kind, points in factors.items()},
    )


def _choose_cases(cases: Sequence[Case]) -> list[Case]:
    """Return up to three burst cases of each kind.

    The small cases of all kinds come first, because the time might not suffice for all cases.
    """
    kinds: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.mode == "burst" and case.problem.flops:
            kinds[kind_of(case)].append(case)
    for kind_cases in kinds.values():
        kind_cases.sort(key=lambda case: case.problem.flops)
    # The dictionary serves as an ordered set. A kind with few cases has the same case at two
    # quantiles.
    chosen: dict[Case, None] = {}
    for quantile in _SIZES:
        for kind_cases in kinds.values():
            # Rounding down never chooses the largest of several cases, which may take very long.
            index = int(quantile * (len(kind_cases) - 1))
            chosen[kind_cases[index]] = None
    return list(chosen)


def _fit_checks(moving_seconds: np.ndarray, checking_seconds: np.ndarray) -> tuple[float, float]:
    """Fit a line to the measured times of checks, and return its intercept and slope."""
    slope = 0.0
    # If all checks move the same bytes, any slope fits equally well.
    if np.ptp(moving_seconds) > 0:
        slope = max(0.0, float(np.polyfit(moving_seconds, checking_seconds, 1)[0]))
    fixed_seconds = max(0.0, float(np.mean(checking_seconds - slope * moving_seconds)))
    return fixed_seconds, slope
