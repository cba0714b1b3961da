"""Seconds of workloads that are not one product: of their products, or of moving their bytes."""

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
    moving: Sequence[float],
    seconds_of: Callable[[Sequence[int], Sequence[Problem]], Array],
) -> Array:
    """Seconds of each workload: the sum over its products, all of them estimated in one call.

    Args:
        products: those of each workload, with how many there are of each.
        moving: seconds of each workload that has no products and only moves memory.
        seconds_of: given the workload's position and the problem of each product, its seconds.
    """
    parts = [(i, *part) for i, each in enumerate(products) for part in each]
    seconds = np.where([bool(each) for each in products], 0.0, moving)
    if parts:
        # np.add.at sums repeated indices: one workload may own several products.
        owners, counts, problems = zip(*parts, strict=True)
        np.add.at(seconds, list(owners), np.array(counts) * seconds_of(owners, problems))
    return seconds


def moving_seconds(workload: Workload, machine: Machine) -> float:
    """A launch, and the workload's minimum traffic at the datasheet's bandwidth."""
    launch = default_constants(machine.generation, workload.dtype).launch
    return launch + workload.bytes / machine.bandwidth
