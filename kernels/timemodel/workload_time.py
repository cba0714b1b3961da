"""Estimate a workload's time from its GEMMs and convolutions, or from its bytes if it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kernels.machine import Machine
from kernels.operation import Workload
from kernels.problem import Problem
from kernels.timemodel.constants import default_constants
from kernels.timemodel.estimate import Array


def workload_seconds(
    products: Sequence[Sequence[tuple[int, Problem]]],
    seconds_without_gemms: Sequence[float],
    seconds_of: Callable[[Sequence[int], Sequence[Problem]], Array],
) -> Array:
    """Return the seconds of each workload, summed over its GEMMs and convolutions.

    Args:
        products: GEMMs and convolutions of each workload, as (count, problem) pairs.
        seconds_without_gemms: seconds of each workload, used only if it has neither GEMMs nor
            convolutions.
        seconds_of: function of (positions, problems) that returns the seconds of each problem. A
            position is the index in ``products`` of the workload to which the problem belongs.
    """
    # 1. List all GEMMs, each with its workload's position and its number of occurrences.
    listed = [
        (position, count, problem)
        for position, gemms in enumerate(products)
        for count, problem in gemms
    ]
    # 2. Add up the times of the GEMMs. A workload without GEMMs only moves data.
    seconds = np.where([bool(gemms) for gemms in products], 0.0, seconds_without_gemms)
    if listed:
        # np.add.at sums repeated positions, because one workload may have several GEMMs.
        positions, counts, problems = zip(*listed, strict=True)
        np.add.at(seconds, list(positions), np.array(counts) * seconds_of(positions, problems))
    return seconds


def moving_seconds(workload: Workload, machine: Machine) -> float:
    """Return the seconds of a launch plus the seconds of the minimum traffic at full bandwidth.

    The machine's bandwidth must be known; a CPU's bandwidth is 0 until it is measured.
    """
    launch = default_constants(machine.generation, workload.dtype).launch
    return launch + workload.bytes / machine.bandwidth
