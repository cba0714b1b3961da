"""Problems that can be timed, and the implementations that compute them.

Importing this package needs neither PyTorch nor Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.problem import Conv, Gemm

if TYPE_CHECKING:
    from kernels.launch import Implementation

__all__ = ["Conv", "Gemm", "implementations"]


def implementations() -> dict[str, Implementation]:
    """Return all implementations by name. This imports PyTorch, and Triton if it is installed."""
    from kernels.registry import all_implementations

    return all_implementations()
