"""Base class of the Triton families: it ranks configs, and compiles and launches kernels.

If ``TRITON_INTERPRET=1`` is set before this module is imported, the kernels run on CPU tensors.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from kernels.common.program import command
from kernels.config import HAND_WRITTEN, Config, TileConfig, ceil_div
from kernels.launch import Launch
from kernels.machine import Machine, usable_processors
from kernels.operands import TORCH_DTYPES, Operands, element_counts, view_operands
from kernels.operation import Workload, as_problem
from kernels.problem import DTYPE_BYTES, TIMED_DTYPES, WIDE_BYTES, Problem
from kernels.timemodel.constants import Constants, default_constants
from kernels.timemodel.estimate import Array, Shapes, Tiles, estimate
from kernels.triton.blocks import add_parts

MIN_CAPABILITY = (8, 0)
INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class LaunchSpec:
    """One launch of a kernel: ``kernel[grid](*arguments, **options)``."""

    kernel: Any  # function with @triton.jit; its type depends on TRITON_INTERPRET
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def launch(self, scratch: Tensor | None) -> None:
        """Launch without synchronising, with views of ``scratch`` in place of meta tensors."""
        self.kernel[self.grid](*self.bound(scratch), **self.options)

    def bound(self, scratch: Tensor | None) -> list[Any]:
        """Return the arguments, with views of ``scratch`` in place of meta tensors.

        If ``scratch`` is None, the arguments are returned unchanged.
        """
        return [
            scratch.as_strided(argument.shape, argument.stride(), argument.storage_offset())
            if scratch is not None and isinstance(argument, Tensor) and argument.is_meta
            else argument
            for argument in self.arguments
        ]

    def warmup(self) -> Any:
        """Compile the kernel through the JIT's usual path and cache, but do not launch it."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


class TritonFamily(ABC):
    """Base of the Triton families. A family defines its launches and its candidate configs."""

    name: str
    shares_tail = False  # whether all SMs share the work of a partial last wave

    @property
    def config_type(self) -> type[TileConfig]:
        """Type of the family's configs."""
        return HAND_WRITTEN[self.name]

    @property
    @abstractmethod
    def ops(self) -> tuple[str, ...]:
        """Operations that the family computes."""

    @abstractmethod
    def calls(
        self, problem: Problem, operands: Operands, config: TileConfig, scratch: Tensor
    ) -> list[LaunchSpec]:
        """Return the launches that compute ``operands.out``, in order.

        ``scratch`` is a meta tensor of the shape that :meth:`scratch` returns. Each launch replaces
        it, and views of it, with real memory.
        """

    def scratch(self, problem: Problem, config: TileConfig) -> tuple[int, ...]:
        """Return the shape of the dense fp32 scratch array, or () if the launches need none."""
        return ()

    @abstractmethod
    def candidates(self, problem: Problem, machine: Machine) -> list[TileConfig]:
        """Return candidate configs; :meth:`configs` leaves out those that are invalid."""

    def refusal(self, problem: Problem) -> str | None:
        """Return why the family cannot compute the problem on any GPU, or None if it can."""
        return None

    def supports(self, problem: Workload, machine: Machine) -> str | None:
        """Return why the family cannot compute the problem on the machine, or None if it can."""
        if problem.op not in self.ops:
            return f"{self.name} does not compute {problem.op}."
        if problem.dtype not in TIMED_DTYPES:
            return f"{self.name} does not compute {problem.dtype}."
        reason = self.refusal(as_problem(problem))
        if reason is not None:
            return reason
        if machine.kind == "cpu":
            if INTERPRETED:
                return _missing_for_interpreter()
            remedy = f"{command('kernels check')} runs it in Triton's interpreter"
            return f"{self.name} needs a GPU; {remedy}."
        if machine.capability is not None and machine.capability < MIN_CAPABILITY:
            return f"{self.name} needs sm_80 or later, but {machine.name} is {machine.arch}."
        if problem.dtype not in machine.peaks:
            return f"{problem.dtype} is not supported on {machine.name}."
        return _missing_for_launcher()

    def configs(
        self, problem: Workload, machine: Machine, experimental: bool = False
    ) -> list[Config | None]:
        """Return the valid candidates, sorted by their estimated time.

        Experimental configs are left out by default, because on an H100 they were 2–26% slower
        than configs without the experimental feature (the sweep ``warp-specialisation`` in
        results/published/nvidia-h100-sxm). For a CPU, the list has only one config, which Triton's
        interpreter can run.
        """
        problem = as_problem(problem)
        if machine.kind == "cpu":  # the interpreter: any tile works
            return [self.config_type(64, 64, 64, stages=1, warps=1, group=4)]
        valid = [
            config
            for config in self.candidates(problem, machine)
            if config.invalid(problem.dtype, machine) is None
            and (experimental or config.experimental is None)
        ]
        constants = default_constants(machine.generation, problem.dtype, hand_written=True)
        seconds = self.seconds(problem, valid, machine, constants)
        # The sort is stable, so candidates with equal times keep their order.
        return [valid[i] for i in np.argsort(seconds, kind="stable")]

    def seconds(
        self, problem: Problem, configs: Sequence[TileConfig], machine: Machine, c: Constants
    ) -> Array:
        """Estimate how many seconds the problem takes with each config, to rank the configs."""
        gemm = problem.implied_gemm
        tiles = Tiles(
            bm=np.array([config.bm for config in configs], dtype=np.float64),
            bn=np.array([config.bn for config in configs], dtype=np.float64),
            split=np.array([config.parts(gemm) for config in configs], dtype=np.float64),
        )
        shapes = Shapes.from_problems([problem] * len(configs))
        if self.shares_tail:  # a partial wave then costs only its share of a whole one
            c = replace(c, tail=0.0)
        return estimate(shapes, tiles, machine, machine.peak(problem.dtype), c).time

    def parse_config(self, text: str) -> TileConfig | None:
        """Parse a config's text; return None if the text is empty."""
        return self.config_type.parse(text) if text else None

    def prepare(
        self, problem: Workload, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        """Return a launch that computes the problem on any of the operand sets.

        ``operand_sets`` must not be empty.

        Raises:
            TypeError: if the problem is neither a GEMM nor a convolution, or if the config is not
                of the family's type.
        """
        problem = as_problem(problem)
        if not isinstance(config, self.config_type):
            kind = self.config_type.__name__
            raise TypeError(f"{self.name} needs a {kind}; use one from configs().")
        calls = [self.unbound_calls(problem, operands, config) for operands in operand_sets]
        shape, device = self.scratch(problem, config), operand_sets[0].out.device

        def bare(index: int) -> Tensor:
            # Each call gets its scratch memory from PyTorch's caching allocator and gives it back
            # at once, because memory could not hold the scratch arrays of all cases of a sweep.
            # Reusing the memory is safe, because launches on a stream run in order.
            scratch = torch.empty(shape, dtype=torch.float32, device=device) if shape else None
            for call in calls[index]:
                call.launch(scratch)
            return operand_sets[index].out

        return Launch(bare, operand_sets)

    def compile_ahead(self, cases: Sequence[tuple[Workload, Config | None]]) -> None:
        """Compile this family's cases in parallel on the CPU cores, and wait for all of them.

        Cases without a tile config are skipped. If a case does not compile, the error is raised at
        the launch of the case, not here.
        """
        # One processor is left for this thread, which prepares the calls in the meantime.
        with ThreadPoolExecutor(max(1, usable_processors() - 1)) as pool:
            # 1. Compile the kernels. The inner context waits until all are compiled.
            kernels = []
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                for workload, config in cases:
                    if isinstance(config, TileConfig):
                        problem = as_problem(workload)
                        calls = self.unbound_calls(problem, meta_operands(problem), config)
                        kernels += [call.warmup() for call in calls]
            # 2. Build their launchers. The outer context waits for them.
            for kernel in kernels:
                pool.submit(_build_launcher, kernel)

    def unbound_calls(
        self, problem: Problem, operands: Operands, config: TileConfig
    ) -> list[LaunchSpec]:
        """Return the launches of the problem, with a meta tensor in place of the scratch array."""
        shape = self.scratch(problem, config)
        scratch = torch.empty(shape, dtype=torch.float32, device="meta")
        return self.calls(problem, operands, config, scratch)


def _build_launcher(kernel: Any) -> None:
    """Build the launcher of a compiled kernel ahead of its first launch.

    Triton 3.6 runs the host's C compiler for every signature of a kernel, and the first launch
    would wait for it.
    """
    with suppress(Exception):  # the launch repeats a failure, and reports it
        # A kernel that was compiled in the background is the result of a future.
        compiled = kernel.result() if hasattr(kernel, "result") else kernel
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


def meta_operands(problem: Problem, offset: int = 0) -> Operands:
    """Return operands that have the dtype and the strides that compiling needs, but no memory.

    Every operand starts ``offset`` elements after an address that is divisible by 16.
    """
    dtype = TORCH_DTYPES[problem.dtype]
    flats = [
        torch.empty(offset + count, dtype=dtype, device="meta")[offset:]
        for count in element_counts(problem)
    ]
    return view_operands(problem, *flats)


def add_parts_call(parts: Tensor, out: Tensor) -> LaunchSpec:
    """Return the launch that writes the sum of dense fp32 ``parts`` (count, …) to ``out`` (…).

    ``out`` has at most four axes.
    """
    # The kernel takes four axes. Those that are missing are put in front, with a size of 1.
    missing_axes = 4 - out.dim()
    shape = [*[1] * missing_axes, *out.shape]
    stride = (*[0] * missing_axes, *out.stride())
    rows = shape[0] * shape[1] * shape[2]
    grid = (ceil_div(rows, _ADD_ROWS) * ceil_div(shape[3], _ADD_COLUMNS),)
    options = {"ROWS": _ADD_ROWS, "COLUMNS": _ADD_COLUMNS, "num_warps": 4}
    return LaunchSpec(add_parts, grid, (parts, out, parts.shape[0], *shape, stride), options)


_ADD_ROWS, _ADD_COLUMNS = 8, 128  # 8 elements per thread: two loads of four fp32


def wide_unit(dtype: str, *values: int) -> int:
    """Return the largest unit, in elements, that divides all values.

    The unit is a power of two, and is at most 16 bytes long. If a value is 2³¹ or more, the unit is
    1, so that Triton still passes the value as a 64-bit argument.
    """
    if any(value >= 2**31 for value in values):
        return 1
    return math.gcd(WIDE_BYTES // DTYPE_BYTES[dtype], *values)


def in_units(strides: Iterable[tuple[int, ...]], unit: int) -> list[tuple[int | None, ...]]:
    """Convert strides from elements to units, as :func:`kernels.triton.blocks.elements` expects.

    A stride of 1 becomes None.
    """
    converted = []
    for tensor_strides in strides:
        # The unit need not divide a stride of 1, which the kernels know without an argument.
        units = [None if stride == 1 else stride // unit for stride in tensor_strides]
        converted.append(tuple(units))
    return converted


def input_precision(dtype: str) -> str:
    """Return the ``input_precision`` of ``tl.dot`` for a dtype.

    The setting matters only for operands that are stored as fp32, for which Triton's default is
    tf32.
    """
    return "tf32" if dtype == "tf32" else "ieee"


def _missing_for_interpreter() -> str | None:
    """Return why Triton's interpreter cannot run, or None if it can.

    The interpreter of Triton 3.6 and earlier converts one-element arrays to integers. NumPy 2.4 and
    later refuse this conversion.
    """
    triton_version = tuple(map(int, triton.__version__.split(".")[:2]))
    numpy_version = tuple(map(int, np.__version__.split(".")[:2]))
    if triton_version < (3, 7) and numpy_version >= (2, 4):
        return (
            f"Triton {triton.__version__}'s interpreter does not run with NumPy {np.__version__}; "
            "install a version of NumPy before 2.4."
        )
    return None


@functools.cache
def _missing_for_launcher() -> str | None:
    if INTERPRETED:
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler for the first launch; install gcc or set CC."
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton needs Python's headers for the first launch; install python3-dev."
    return None
