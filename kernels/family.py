"""What every Triton family shares: when it runs, how it ranks its configs, how it is compiled.

A family's file holds its kernel and its :class:`TritonFamily`; nothing here knows an algorithm.
Under ``TRITON_INTERPRET=1`` (set before this is imported) the kernels run on CPU tensors.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from kernels.config import Config, TileConfig
from kernels.constants import default_constants
from kernels.estimate import Shapes, Tiles, estimate
from kernels.launch import Launch
from kernels.machine import Machine
from kernels.operands import TORCH_DTYPES, Operands, element_counts, view_operands
from kernels.problem import Problem

LEAST_CAPABILITY = (8, 0)
INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Call:
    """One launch, spelled out: ``kernel[grid](*arguments, **options)``."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def launch(self) -> None:
        """Launch without synchronising."""
        self.kernel[self.grid](*self.arguments, **self.options)

    def warmup(self) -> Any:
        """Compile through the JIT's own path and cache, without launching."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


class TritonFamily:
    """Base of the hand-written kernels; a family gives its calls and its candidate tiles."""

    name: str

    @property
    def ops(self) -> tuple[str, ...]:
        """Operations that the family computes."""
        raise NotImplementedError

    def calls(self, problem: Problem, operands: Operands, config: TileConfig) -> list[Call]:
        """The launches that compute ``operands.out``, in order."""
        raise NotImplementedError

    def candidates(self, problem: Problem) -> list[TileConfig]:
        """Configs worth trying, before the machine's limits are known."""
        raise NotImplementedError

    def supports(self, problem: Problem, machine: Machine) -> str | None:
        """None, or why not."""
        if problem.op not in self.ops:
            return f"{self.name} does not compute a {problem.op}."
        if machine.kind == "cpu":
            if INTERPRETED:
                return _interpreter_lack()
            return f"{self.name} needs a GPU; `kernels check` runs it in Triton's interpreter."
        if machine.capability is not None and machine.capability < LEAST_CAPABILITY:
            return f"{self.name} needs sm_80 or later, and {machine.name} is {machine.arch}."
        if problem.dtype not in machine.peaks:
            return f"{machine.name} has no {problem.dtype} arithmetic."
        return _toolchain_lack()

    def configs(self, problem: Problem, machine: Machine) -> list[Config | None]:
        """Valid candidates, the one of the smallest estimated time first."""
        if machine.kind == "cpu":  # the interpreter: any tile is right, a small one is fast
            return [TileConfig(32, 32, 32, stages=1, warps=1, group=4)]
        valid = [
            config
            for config in self.candidates(problem)
            if config.invalid(problem.dtype, machine) is None
        ]
        tiles = Tiles(*np.array([(c.bm, c.bn, 1.0) for c in valid]).T)
        shapes = Shapes.of([problem] * len(valid))
        constants = default_constants(machine.generation, problem.dtype)
        time = estimate(shapes, tiles, machine, machine.peak(problem.dtype), constants).time
        return [valid[i] for i in np.argsort(time, kind="stable")]

    def parse_config(self, text: str) -> TileConfig | None:
        """Read a config's text."""
        return TileConfig.parse(text) if text else None

    def prepare(
        self, problem: Problem, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        """Bind the sets. The kernel is compiled at the first launch, unless it was before."""
        if not isinstance(config, TileConfig):
            raise TypeError(f"{self.name} needs a TileConfig; take one from configs().")
        calls = [self.calls(problem, operands, config) for operands in operand_sets]

        def bare(index: int) -> Tensor:
            for call in calls[index]:
                call.launch()
            return operand_sets[index].out

        return Launch(bare)

    def compile_ahead(self, cases: Sequence[tuple[Problem, Config | None]]) -> None:
        """Compile all cases in parallel on the CPU cores; what fails, fails again at its launch."""
        with (
            ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            for problem, config in cases:
                if isinstance(config, TileConfig):
                    for call in self.calls(problem, meta_operands(problem), config):
                        call.warmup()


def meta_operands(problem: Problem, offset: int = 0) -> Operands:
    """Operands without memory, enough to compile for: dtypes, strides and addresses.

    Every address starts ``offset`` elements after one that is divisible by 16 bytes.
    """
    dtype = TORCH_DTYPES[problem.dtype]
    flats = (
        torch.empty(offset + count, dtype=dtype, device="meta")[offset:]
        for count in element_counts(problem)
    )
    return view_operands(problem, *flats)


def input_precision(dtype: str) -> str:
    """What ``tl.dot`` is told: only fp32 has a choice, and IEEE is not Triton's default."""
    return "tf32" if dtype == "tf32" else "ieee"


def _interpreter_lack() -> str | None:
    """Triton 3.6's interpreter turns one-element arrays into integers, which NumPy 2.5 refuses."""
    triton_version, numpy_version = (
        tuple(map(int, version.split(".")[:2])) for version in (triton.__version__, np.__version__)
    )
    if triton_version < (3, 7) and numpy_version >= (2, 5):
        return f"the interpreter of Triton {triton.__version__} needs a NumPy older than 2.5."
    return None


@functools.cache
def _toolchain_lack() -> str | None:
    """Triton builds its launcher with the host's C compiler: say what is missing for that."""
    if INTERPRETED:
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler at the first launch; install gcc or set CC."
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton needs Python's headers at the first launch; install python3-dev."
    return None
