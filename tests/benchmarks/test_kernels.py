"""``make bench``: our own kernels, timed through the pytest plugin as any project's would be.

On a GPU the vendor library and every Triton family, on a CPU the vendor library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.device import select_device
from kernels.operands import Operands, random_operands
from kernels.problem import Gemm
from kernels.registry import all_implementations, library_for

pytestmark = pytest.mark.slow

DEVICE = select_device("gpu" if torch.cuda.is_available() else "cpu")
SIZES = (256, 512) if DEVICE.gpu is None else (1024, 4096)
PROBLEMS = [
    Gemm(size, size, size, dtype)
    for size in SIZES
    for dtype in ("fp32", "bf16")
    if dtype in DEVICE.machine.peaks
]
CASES = [
    (name, problem)
    for problem in PROBLEMS
    for name in all_implementations()
    if name == library_for(problem, DEVICE.machine)
    or (DEVICE.gpu is not None and name.startswith("triton"))
]


@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize(
    ("name", "problem"), CASES,
    ids=[f"{name}-m{p.m}_n{p.n}_k{p.k}_{p.dtype}" for name, p in CASES],
)  # fmt: skip
def test_kernel(kernel_benchmark: Any, name: str, problem: Gemm, cache: str) -> None:
    implementation = all_implementations()[name]
    if reason := implementation.supports(problem, DEVICE.machine):
        pytest.skip(reason)

    def prepare(a: Tensor, b: Tensor, out: Tensor) -> Callable[[], Tensor]:
        launch = implementation.prepare(problem, [Operands(a, b, out)])
        return lambda: launch.bare(0)

    operands = random_operands(problem, DEVICE.torch_name)
    kernel_benchmark(
        prepare,
        *operands,
        cache=cache,
        reference=lambda a, b, out: a @ b,
        prepares=True,
    )
