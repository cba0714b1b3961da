"""Compile the Triton kernels for named architectures on a machine without a GPU, and look inside.

Each kernel is compiled through the JIT's own ``warmup``, exactly as a launch would compile it,
with a driver that only says which architecture is wanted. PTX tells which matrix instruction the
compiler found, ``ptxas -v`` how many registers it took and what it spilled.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from kernels.config import TileConfig
from kernels.errors import UserError
from kernels.family import LEAST_CAPABILITY, Call, TritonFamily, meta_operands
from kernels.machine import Machine, machine_of_arch
from kernels.problem import DTYPE_BYTES, GEMM_LAYOUTS, Gemm
from kernels.registry import all_implementations

ARCHES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
_ALIGNED, _MISALIGNED = 16, 1
_SIZE = 4096

_INSTRUCTIONS = (
    ("tcgen05", r"\btcgen05\.mma"),
    ("wgmma", r"\bwgmma\.mma_async"),
    ("mma.sync", r"\bmma\.sync"),
    ("fma", r"\bfma\.rn\.f32"),
)


@dataclass(frozen=True)
class Row:
    """What the compiler made of one kernel; ``ok`` if that is what the hardware can do."""

    kernel: str
    config: str
    dtype: str
    layout: str
    alignment: int
    arch: str
    mma: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    ok: bool
    message: str


@dataclass(frozen=True)
class _Job:
    family: str
    config: TileConfig
    dtype: str
    layout: str
    alignment: int
    arch: str


def compile_rows(
    arches: Iterable[str], every_candidate: bool = False, done: Callable[[Row], None] | None = None
) -> list[Row]:
    """Compile every family × dtype × layout × alignment × architecture, in parallel.

    Args:
        arches: such as ``sm_90``; each is compiled for the first machine of that architecture.
        every_candidate: all valid configs instead of the one that would be chosen for 4096³.
        done: called with each row as it is finished.
    """
    for arch in arches:
        capability = machine_of_arch(arch).capability
        if capability is None or capability < LEAST_CAPABILITY:
            raise UserError(f"the Triton kernels need sm_80 or later, not {arch}.")
    jobs = [job for arch in arches for job in _jobs(arch, every_candidate)]
    rows = []
    context = get_context("spawn")  # a fork would share Triton's and LLVM's locks
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for row in pool.map(_compile, jobs, chunksize=4):
            rows.append(row)
            if done is not None:
                done(row)
    return rows


def _jobs(arch: str, every_candidate: bool) -> list[_Job]:
    machine = machine_of_arch(arch)
    families = [f for f in all_implementations().values() if isinstance(f, TritonFamily)]
    jobs = []
    for family, dtype, layout, alignment in itertools.product(
        families, DTYPE_BYTES, GEMM_LAYOUTS, (_ALIGNED, _MISALIGNED)
    ):
        configs = family.configs(_problem(dtype, layout, alignment), machine)
        for config in configs if every_candidate else configs[:1]:
            assert isinstance(config, TileConfig)
            jobs.append(_Job(family.name, config, dtype, layout, alignment, arch))
    return jobs


def _problem(dtype: str, layout: str, alignment: int) -> Gemm:
    """4096³, or one less each way: odd sizes give odd strides and every mask."""
    size = _SIZE if alignment == _ALIGNED else _SIZE - 1
    return Gemm(size, size, size, dtype, layout)


class _TargetDriver(DriverBase):
    """Stands in for a GPU's driver while compiling: it knows the target and nothing else.

    The JIT keeps its caches per device, so each architecture is a device of its own.
    """

    def __init__(self, machine: Machine) -> None:
        assert machine.capability is not None
        major, minor = machine.capability
        self.arch = 10 * major + minor

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("there is no device: this driver only compiles")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("there is no device: this driver only compiles")


def _compile(job: _Job) -> Row:
    machine = machine_of_arch(job.arch)
    facts = {"mma": "", "registers": 0, "spill_bytes": 0, "shared_bytes": 0}
    triton.runtime.driver.set_active(_TargetDriver(machine))
    try:
        for call in _calls(job):
            found = _inspect(call)
            # Helper kernels are folded into their family's row by maximum.
            facts = {key: max(facts[key], found[key]) for key in facts}
        problems = _complaints(job, machine, facts)
    except Exception as error:  # a row says what failed; the other rows go on
        problems = [f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"]
    message = " ".join(problems) or _remark(job, str(facts["mma"]))
    identity = (
        job.family, str(job.config), job.dtype, job.layout, job.alignment, job.arch
    )  # fmt: skip
    return Row(*identity, **facts, ok=not problems, message=message)  # type: ignore[arg-type]


def _calls(job: _Job) -> list[Call]:
    family = all_implementations()[job.family]
    assert isinstance(family, TritonFamily)
    problem = _problem(job.dtype, job.layout, job.alignment)
    operands = meta_operands(problem, offset=0 if job.alignment == _ALIGNED else 1)
    return family.calls(problem, operands, job.config)


def _inspect(call: Call) -> dict[str, Any]:
    """Compile one launch and read its PTX and the log of the very ``ptxas`` run that made it.

    Running ``ptxas`` again with other options would give other registers; the resource dump of
    the binary hides spills.
    """
    knobs = triton.knobs
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # a kernel from the cache would leave no log
        kernel = call.warmup()
    ptx = kernel.asm["ptx"]
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    if registers is None or spills is None:
        raise RuntimeError("ptxas wrote no resource report.")
    return {
        "mma": next((name for name, pattern in _INSTRUCTIONS if re.search(pattern, ptx)), ""),
        "registers": int(registers.group(1)),
        "spill_bytes": int(spills.group(1)) + int(spills.group(2)),
        "shared_bytes": kernel.metadata.shared,
    }


def _complaints(job: _Job, machine: Machine, facts: dict[str, Any]) -> list[str]:
    wanted = _expected(job)
    complaints = []
    if facts["mma"] not in wanted:
        complaints.append(f"{facts['mma'] or 'no product'} instead of {' or '.join(wanted)}.")
    if facts["spill_bytes"]:
        complaints.append(f"{facts['spill_bytes']} bytes of registers are spilled.")
    if facts["shared_bytes"] > machine.shared_cta_bytes:
        complaints.append(
            f"{facts['shared_bytes']} bytes of shared memory, and a CTA has "
            f"{machine.shared_cta_bytes}."
        )
    return complaints


def _expected(job: _Job) -> tuple[str, ...]:
    """The matrix instructions that this architecture should be using."""
    if job.dtype == "fp32":
        return ("fma",)
    best = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(job.arch, "mma.sync")
    if best == "mma.sync" or job.config.bm < 64:
        return ("mma.sync",)
    if job.dtype == "tf32" and job.layout != "nt":
        return (best, "mma.sync")
    return (best,)


def _remark(job: _Job, mma: str) -> str:
    if job.dtype == "tf32" and job.arch == "sm_90" and mma == "mma.sync":
        return "wgmma takes tf32 operands K-major only (layout nt)."
    return ""
