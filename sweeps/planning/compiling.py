"""Compile hand-written kernels in the background, while a run measures other cases.

Triton keeps compiled kernels in a cache on disk. The compiling processes go through the plan ahead
of the timing process, and fill that cache. If a compiling process dies, the timing process itself
compiles the kernels that are missing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from typing import Any

from kernels.config import HAND_WRITTEN
from kernels.machine import Machine, usable_processors
from kernels.problem import Conv, Gemm
from sweeps.cases.case import Case
from sweeps.process import die_with_parent

_MAX_PROCESSES = 12
_CONTEXT_BYTES = 5e8  # rough size of one process's context on a GPU
_MEMORY_SHARE = 0.05  # share of the GPU's memory that the contexts may take together
_SPARED_CORES = 2  # cores for the run: one launches, the other reads sensors and writes files


def compilers(machine: Machine, cores: int | None = None) -> int:
    """Return the number of processes that may compile in parallel with a run on a GPU.

    ``cores`` is the number of cores that these processes share with the run. None means all cores
    that this process may use.
    """
    most_contexts = int(_MEMORY_SHARE * machine.memory_bytes / _CONTEXT_BYTES)
    spare_cores = (usable_processors() if cores is None else cores) - _SPARED_CORES
    return max(0, min(_MAX_PROCESSES, spare_cores, most_contexts))


def kernel_key(case: Case) -> tuple[object, ...] | None:
    """Return an approximate key of the kernels that Triton compiles for a case.

    Cases with equal keys are assumed to share their kernels. The assumption fails, for example, if
    only one of the cases needs 64-bit offsets into its operands. The missing kernel is then
    compiled when its case is prepared. Return None if the case runs no hand-written kernel, or if
    its config has a tile size of 0.

    Raises:
        UserError: if the config is invalid.
    """
    problem = case.problem
    if case.implementation not in HAND_WRITTEN or not isinstance(problem, Gemm | Conv):
        return None
    if not case.config:  # the kernel does not support this problem
        return None
    # 1. Parse the config. ``bm``, ``bn`` and ``bk`` are the sizes of a tile along m, n and k. A
    # config with a size of 0 is refused only when its case is prepared, but 0 cannot be a divisor
    # here.
    config = HAND_WRITTEN[case.implementation].parse(case.config)
    if 0 in (config.bm, config.bn, config.bk):
        return None
    # 2. Collect what decides which variant of the kernel is compiled. A kernel masks what is
    # outside of a partial tile or K step.
    gemm = problem.implied_gemm
    has_partial_tiles = gemm.m % config.bm > 0 or gemm.n % config.bn > 0
    has_partial_step = gemm.k % config.bk > 0
    if isinstance(problem, Gemm):
        divided_sizes: tuple[int, ...] = (problem.m, problem.n, problem.k)
        variant: tuple[object, ...] = (problem.batch > 1, has_partial_tiles, has_partial_step)
    else:
        group_channels = (problem.c // problem.groups, problem.kout // problem.groups)
        divided_sizes = group_channels
        other_sizes = (problem.n, problem.h, problem.w, problem.p, problem.q, problem.groups)
        variant = (
            has_partial_tiles,
            has_partial_step,
            # A K step, or a tile of a filter's gradient, may cross from one tap to the next.
            *(size % block > 0 for size in group_channels for block in (config.bn, config.bk)),
            problem.pass_,
            problem.r,
            problem.s,
            problem.stride,
            problem.padding,
            problem.dilation,
            *(_specialised(size) for size in other_sizes),
        )
    # 3. Classify the sizes by their divisors. A size's class is the largest power of two up to 16
    # that divides the size. An odd size has the class (1,), which differs from 1, the class of
    # size 1.
    divisor_classes = tuple(1 if size == 1 else (math.gcd(size, 16),) for size in divided_sizes)
    return (
        case.implementation,
        case.config,
        problem.dtype,
        problem.layout,
        *variant,
        divisor_classes,
    )


def _specialised(size: int) -> str:
    """Return the class into which Triton's specialisation puts a size."""
    if size == 1:
        return "1"
    return "multiple of 16" if size % 16 == 0 else "other"


@contextmanager
def compiling(
    bench_arguments: Mapping[str, Any], cases: Sequence[Case], workers: int = 1
) -> Iterator[None]:
    """Compile the kernels of ``cases`` in the background until the ``with`` block ends.

    Nothing is compiled without a GPU, or if :func:`compilers` allows no process. ``cases`` are in
    the order in which they will be timed. ``workers`` is the largest number of workers that share
    the host at one time, including this one.
    """
    # 1. Choose the cases. Kernels that several cases share are compiled for the first of them.
    first_cases: dict[tuple[object, ...], Case] = {}
    for case in cases:
        key = kernel_key(case)
        if key is not None:
            first_cases.setdefault(key, case)
    distinct_cases = list(first_cases.values())
    # 2. Choose the number of processes.
    machine = bench_arguments.get("machine")
    gpu = bench_arguments.get("gpu")
    count = 0
    if machine is not None and gpu is not None:
        cores = max(1, usable_processors() // workers)
        count = min(compilers(machine, cores), len(distinct_cases))
    # 3. Start the processes. Each of them gets every ``count``-th case, so that all processes begin
    # with cases that are timed early.
    context = get_context("spawn")
    processes = [
        context.Process(
            target=compile_cases,
            args=(machine, gpu, distinct_cases[index::count]),
            daemon=True,
            name="rooftile-compiler",
        )
        for index in range(count)
    ]
    for process in processes:
        process.start()
    # 4. Let the caller time its cases, then stop the processes, even if kernels are left.
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def compile_cases(machine: Machine, gpu: int, cases: Sequence[Case]) -> None:
    """Do the work of a compiling process: compile the kernels of ``cases``."""
    die_with_parent()
    os.nice(10)  # the process that launches has priority
    from kernels import implementations
    from kernels.device import make_current

    # If the device fails here, the compilations below fail as well, and the timing process reports
    # it.
    with suppress(Exception):
        make_current(gpu)
    for case in cases:
        with suppress(Exception):  # the timing process reports a failure when it prepares the case
            implementation = implementations()[case.implementation]
            if implementation.supports(case.problem, machine) is None:
                config = implementation.parse_config(case.config)
                implementation.compile_ahead([(case.problem, config)])
