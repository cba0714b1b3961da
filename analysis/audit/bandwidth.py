"""Memory bandwidth that operations reach, from which the time of moving bytes follows."""

from __future__ import annotations

from analysis.model.basis import Basis
from analysis.model.query import group_of
from kernels.common.errors import UserError
from kernels.problem import Gemm


def reached_bandwidth(basis: Basis) -> float:
    """Return the memory bandwidth that large GEMMs reach, in bytes per second.

    Raises:
        UserError: if the machine supports none of bf16, fp16 and fp32.
    """
    machine = basis.model.machine
    for dtype in ("bf16", "fp16", "fp32"):
        if dtype in machine.peaks:
            large_gemm = Gemm(8192, 8192, 8192, dtype)
            fit = basis.model.fit_of(group_of(basis.library(large_gemm), large_gemm))
            return machine.bandwidth * fit.constants.dram
    raise UserError(f"{machine.name} supports none of bf16, fp16 and fp32; give another --machine.")
