"""All implementations by name, and the vendor library that PyTorch calls for a problem.

The functions import PyTorch and Triton when they are called, so importing this module is cheap.
"""

from __future__ import annotations

import functools

from kernels.launch import Implementation
from kernels.machine import Machine
from kernels.operation import Workload


@functools.cache
def all_implementations() -> dict[str, Implementation]:
    """Return all implementations by name: the vendor libraries, then the Triton families.

    The Triton families are left out if Triton is not installed.
    """
    from kernels.library.vendor import libraries

    listed: list[Implementation] = [*libraries(), *_triton_families()]
    return {implementation.name: implementation for implementation in listed}


def _triton_families() -> list[Implementation]:
    try:
        import triton  # noqa: F401  imported only to see whether it is installed
    except ImportError:
        return []
    from kernels.triton.conv import TritonConv
    from kernels.triton.persistent import TritonPersistent
    from kernels.triton.splitk import TritonSplitK
    from kernels.triton.streamk import TritonStreamK
    from kernels.triton.tiled import TritonTiled

    return [TritonTiled(), TritonSplitK(), TritonStreamK(), TritonPersistent(), TritonConv()]


def library_for(problem: Workload, machine: Machine) -> str:
    """Return the name of the vendor library that PyTorch calls for a problem.

    If no library supports the problem on the machine, return the name of the first one that
    computes the operation on this kind of machine.
    """
    from kernels.library.vendor import libraries

    candidates = [
        library for library in libraries() if problem.op in library.serves.get(machine.kind, {})
    ]
    for library in candidates:
        if library.supports(problem, machine) is None:
            return library.name
    return candidates[0].name
