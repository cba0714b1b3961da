"""Seconds of what is more than one product, or none: from its products, or from its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kernels.constants import default_constants
from kernels.estimate import Array
from kernels.machine import Machine
from kernels.operation import Workload
from kernels.problem import Problem


def workload_seconds(
    products: Sequence[Sequence[tuple[int, Problem]]],
    others: Sequence[float],
    seconds_of: Callable[[Sequence[int], Sequence[Problem]], Array],
) -> Array:
    """Seconds of each workload: the sum over its products, all of them estimated in one call.

    Args:
        products: those of each workload, with how many there are of each.
        others: the seconds of each workload that has no products.
        seconds_of: given the workload's position and the problem of each product, its seconds.
    """
    parts = [(i, *part) for i, own in enumerate(products) for part in own]
    seconds = np.where([bool(own) for own in products], 0.0, others)
    if parts:
        owners, counts, problems = zip(*parts, strict=True)
        np.add.at(seconds, list(owners), np.array(counts) * seconds_of(owners, problems))
    return seconds


def moving_seconds(workload: Workload, machine: Machine) -> float:
    """A launch, and the workload's least bytes at the datasheet's bandwidth."""
    launch = default_constants(machine.generation, workload.dtype).launch
    return launch + workload.bytes / machine.bandwidth
