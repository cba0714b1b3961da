"""Predict the time in which operations move their bytes, from the bandwidth that they reach."""

from __future__ import annotations

from analysis.model.basis import Basis
from analysis.model.query import group_of
from kernels.common.errors import UserError
from kernels.problem import Gemm

# Shares of the bandwidth of large GEMMs that PyTorch's kernels reach, by kind of operation. Each is
# the median over the traced models in results/accuracy/gpu-steps.json (H100 SXM, bf16), in which
# the shares also help models that they were not fitted to. Kinds without a share reach all of it.
_SHARES = {
    "copies and casts": 0.78,
    "loss": 0.66,
    "normalisation": 0.51,
    "optimizer (adamw)": 0.52,
    "pooling": 0.33,
    "reduction": 0.44,
    "strided access": 0.37,
}


def moving_seconds(kind: str, moved_bytes: int, basis: Basis) -> float:
    """Return the time that operations of one kind take to move their bytes, in seconds.

    On a GPU, each kind in :data:`_SHARES` reaches only a part of :func:`reached_bandwidth`. All
    other kinds, and every kind on a CPU, are assumed to reach all of it.

    Raises:
        UserError: if the machine supports none of bf16, fp16 and fp32.
    """
    share = _SHARES.get(kind, 1.0) if basis.model.machine.kind == "gpu" else 1.0
    return moved_bytes / (share * reached_bandwidth(basis))


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
