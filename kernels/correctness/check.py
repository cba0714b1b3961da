"""Check whether implementations compute right results, for the command ``check``."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from kernels.common.errors import error_summary
from kernels.correctness.verify import verify
from kernels.device import Device, make_current
from kernels.operands import random_operands
from kernels.problem import Problem
from kernels.registry import all_implementations

# Kernels tend to be wrong for the sizes and options below. The GEMMs have sizes of 1, primes, sizes
# one above or below a block, long K, batches and every layout. The convolutions have filters larger
# and smaller than the stride, dilation, groups and a single channel.
_GEMM_SIZES = ("1,1,1", "17,33,65", "128,128,128", "127,129,257", "1,256,512", "64,64,2048")
_CONV_SHAPES = (
    "2,8,9,11,16,3,3,1,1,1,1",
    "1,3,17,19,8,7,7,2,3,1,1",
    "2,16,8,8,32,1,1,2,0,1,1",
    "2,8,10,9,8,3,3,2x1,1x0,1x2,2",
    "1,1,7,7,1,3,3,1,1,2,1",
)
_DTYPES = ("fp32", "tf32", "fp16", "bf16")
SUITE = {
    "gemm": [
        *(f"{size},{dtype},nt" for size, dtype in itertools.product(_GEMM_SIZES, _DTYPES)),
        *(
            f"33,70,129,{dtype},{layout},3"
            for dtype, layout in itertools.product(_DTYPES, ("nn", "nt", "tn", "tt"))
        ),
    ],
    "conv": [
        f"{shape},{dtype},{layout},{pass_}"
        for shape, dtype, layout, pass_ in itertools.product(
            _CONV_SHAPES, _DTYPES, ("nhwc", "nchw"), ("fprop", "dgrad", "wgrad")
        )
    ],
}
"""Problems that ``check`` runs by default, as values of ``--gemm`` and ``--conv``."""


@dataclass(frozen=True)
class CheckRow:
    """Outcome of checking one implementation on one problem.

    If ``status`` is ``unsupported`` or ``error``, ``rel_error`` and ``tolerance`` are None. If the
    relative error is infinite or NaN, only ``rel_error`` is None.
    """

    implementation: str
    problem: str
    status: str  # ok, wrong, unsupported or error
    rel_error: float | None
    tolerance: float | None
    message: str


def check_all(names: Iterable[str], problems: Iterable[Problem], device: Device) -> list[CheckRow]:
    """Check each named implementation on each problem, and return one row per check.

    If an implementation raises an exception, the row has the status ``error``.
    """
    names, problems = list(names), list(problems)  # both are iterated several times
    make_current(device.gpu)
    if device.gpu is not None:
        for name in names:
            # Compile on all cores at once. A failure occurs again in _check_one, which reports it.
            with suppress(Exception):
                _compile(name, problems, device)
    return [
        _check_one(name, problem, device) for problem, name in itertools.product(problems, names)
    ]


def _compile(name: str, problems: Iterable[Problem], device: Device) -> None:
    implementation = all_implementations()[name]
    supported = [p for p in problems if implementation.supports(p, device.machine) is None]
    # The first config is the one that _check_one uses.
    implementation.compile_ahead(
        [(problem, implementation.configs(problem, device.machine)[0]) for problem in supported]
    )


def _check_one(name: str, problem: Problem, device: Device) -> CheckRow:
    implementation = all_implementations()[name]
    reason = implementation.supports(problem, device.machine)
    if reason is not None:
        return CheckRow(name, problem.spec(), "unsupported", None, None, reason)
    try:
        operands = random_operands(problem, device.torch_name)
        config = implementation.configs(problem, device.machine)[0]
        result = implementation.prepare(problem, [operands], config)(0)
        # The seed depends only on the problem, so that every check of it makes the same choices.
        seed = zlib.crc32(problem.spec().encode())
        outcome = verify(problem, [operands], [result], seed)
    except Exception as error:  # any error of a library or a compiler becomes a row
        return CheckRow(name, problem.spec(), "error", None, None, error_summary(error))
    # JSON has neither NaN nor infinity, so None stands for both.
    rel_error = outcome.rel_error if math.isfinite(outcome.rel_error) else None
    status = "ok" if outcome.ok else "wrong"
    return CheckRow(name, problem.spec(), status, rel_error, outcome.tolerance, outcome.message)
