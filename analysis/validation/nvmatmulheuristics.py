"""NVIDIA's nvMatmulHeuristics as a baseline, where somebody has installed it; never a dependency.

``pip install nvidia-matmul-heuristics``; its estimates need no GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np

from kernels.machine import Machine
from kernels.problem import Gemm, Problem
from kernels.timemodel.estimate import Array

_GPUS = {
    "nvidia-a100-sxm-80gb": "A100_SXM_80GB",
    "nvidia-a100-pcie-80gb": "A100_PCIE_80GB",
    "nvidia-l4": "L4",
    "nvidia-l40s": "L40S",
    "nvidia-h100-sxm": "H100_SXM",
    "nvidia-h100-pcie": "H100_PCIE",
    "nvidia-h200": "H200_SXM",
    "nvidia-b200": "B200",
}
_PRECISIONS = {"bf16": "TST", "fp16": "HSH", "fp32": "SSS"}
"""One letter each for operands, accumulator and result."""


def heuristic_seconds(machine: Machine, dtype: str, problems: Sequence[Problem]) -> Array | None:
    """Its estimated time of each problem's best kernel.

    None where it is not installed, does not know the machine or the dtype, or a problem is no
    plain GEMM.
    """
    known = machine.slug in _GPUS and dtype in _PRECISIONS
    gemms = [p for p in problems if isinstance(p, Gemm) and p.batch == 1]
    if not known or len(gemms) < len(problems):
        return None
    try:
        library = importlib.import_module("nvMatmulHeuristics")
    except ImportError:
        return None
    interface = library.NvMatmulHeuristicsInterface(
        library.NvMatmulHeuristicsTarget.GENERIC,
        precision=_PRECISIONS[dtype],
        flags=library.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
    )
    device = interface.createHardwareDescriptor()
    gpu = library.NvMatmulHeuristicsNvidiaGpu[_GPUS[machine.slug]]
    interface.setHardwarePredefinedGpu(device, gpu)
    layouts = library.NvMatmulHeuristicsMatmulLayout
    seconds = []
    for gemm in gemms:
        layout = layouts[f"{gemm.layout.upper()}_ROW_MAJOR"]
        best = interface.get_with_mnk(gemm.m, gemm.n, gemm.k, layout, 1, device)
        seconds.append(best[0]["runtime"] if best else np.nan)
    interface.destroyHardwareDescriptor(device)
    interface.handle = None  # version 0.1.0.27 crashes the process where it destroys this itself
    return np.array(seconds)
