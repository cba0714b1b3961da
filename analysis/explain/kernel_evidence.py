"""Determine from an operation's kernels whether it uses Tensor Cores, and why it may be slow."""

from __future__ import annotations

import re

from analysis.traces.trace_account import MULTIPLYING, ProfiledOperation
from kernels.machine import Machine
from kernels.names import read_name
from kernels.problem import DTYPE_BYTES, WIDE_BYTES

USED, ELIGIBLE, NOT_ELIGIBLE = "used", "eligible", "no"
"""Use of Tensor Cores by an operation. ``USED``: the operation uses Tensor Cores. ``ELIGIBLE``: the
operation could use them, but does not. ``NOT_ELIGIBLE``: nothing shows that the operation could use
them."""

LEAST_PART = 0.1  # smallest share of an operation's time at which a kind of kernel is mentioned

_CONVERTS = re.compile("nchwToNhwc|nhwcToNchw|tensorTransform", re.IGNORECASE)


def tensor_core_use(operation: ProfiledOperation, machine: Machine) -> str | None:
    """Return :data:`USED`, :data:`ELIGIBLE` or :data:`NOT_ELIGIBLE` for an operation.

    Return None if the operation could use Tensor Cores, but the kernel names do not show whether it
    does.
    """
    uses_tensor_cores = operation.uses_tensor_cores
    if uses_tensor_cores:
        return USED
    # An operation in fp32 could use Tensor Cores by computing in TF32.
    dtype = "tf32" if operation.dtype == "fp32" else operation.dtype
    if machine.kind == "cpu" or not operation.works or dtype not in machine.peaks:
        return NOT_ELIGIBLE
    return ELIGIBLE if uses_tensor_cores is False else None


def kernel_reasons(operation: ProfiledOperation, tensor_cores: str | None) -> list[str]:
    """Return possible reasons why an operation is slow, based on its kernels and their times.

    ``tensor_cores`` is the result of :func:`tensor_core_use`.
    """
    reasons = []
    if tensor_cores == ELIGIBLE:
        reasons.append("the kernel uses CUDA cores instead of Tensor Cores")
    alignment = operation.kernel_name.alignment
    # If the dtype is unknown, the number of bytes that a load reads is unknown, too, and no load
    # counts as too narrow.
    bytes_each = DTYPE_BYTES.get(operation.dtype, WIDE_BYTES)
    # CUTLASS's kernels for CUDA cores load one element at a time whatever the alignment.
    on_cuda_cores = operation.kernel_name.tensor_cores is False
    if alignment is not None and alignment * bytes_each < WIDE_BYTES and not on_cuda_cores:
        elements = "one element" if alignment == 1 else f"{alignment} elements"
        reasons.append(f"the kernel loads {elements} at a time (align{alignment})")
    converting_share = share_of_converting(operation)
    if converting_share >= LEAST_PART:
        reasons.append(
            f"{converting_share:.0%} of the operation's time is spent on converting layouts"
        )
    reduced_share = operation.share_of_kind("reduce")
    if reduced_share >= LEAST_PART:
        kernel_names = map(read_name, operation.kernels)
        splits_k = any(name.kind in MULTIPLYING and name.split_k for name in kernel_names)
        purpose = "adding up the partial sums of a split K" if splits_k else "reductions"
        reasons.append(f"{reduced_share:.0%} of the operation's time is spent on {purpose}")
    return reasons


def share_of_converting(operation: ProfiledOperation) -> float:
    """Return the share of an operation's time that is spent on converting the layout of images."""
    kernel_us = operation.kernels
    total_us = sum(kernel_us.values())
    converting_us = sum(us for name, us in kernel_us.items() if _CONVERTS.search(name))
    return converting_us / total_us if total_us else 0.0
