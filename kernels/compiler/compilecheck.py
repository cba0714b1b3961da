"""Compilation of the Triton kernels for named architectures, on a machine without a GPU.

The method ``warmup`` of Triton's JIT compiles a kernel as a launch would. A stand-in for the GPU's
driver tells the JIT which architecture to compile for. PTX shows which matrix instruction the
compiler chose and what an iteration of the inner loop does. ``ptxas -v`` shows how many registers a
thread uses and how many bytes are spilled.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.cache import get_cache_manager

from kernels.common.checks import check_word
from kernels.common.errors import UserError, error_summary
from kernels.compiler.assembly import BULK_COPY, InnerLoop, inner_loop
from kernels.compiler.machinecode import NO_LOOP, LoopCode, disassemble, loop_code
from kernels.config import MIN_ASYNC_ROWS, TileConfig, TiledConfig
from kernels.machine import Machine, known_machines, machine_of_arch, usable_processors
from kernels.problem import (
    DTYPE_BYTES,
    GEMM_LAYOUTS,
    PASSES,
    TIMED_DTYPES,
    WIDE_BYTES,
    Conv,
    Gemm,
    Problem,
)
from kernels.registry import all_implementations
from kernels.triton.family import MIN_CAPABILITY, LaunchSpec, TritonFamily, meta_operands

ARCHES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
_ALIGNED, _MISALIGNED = 16, 1  # alignment of rows: a multiple of 16 bytes, or an odd length
_SIZE = 4096  # M, N and K of the GEMMs

_CONV_CHANNELS, _CONV_SIZE = 256, 14  # channels, and height and width, of the convolutions
_SLACK = 0.1  # tolerated deviation of an inner loop's work from the tile's needs, on aligned shapes
# In fp32 the persistent kernel transposes operands in shared memory, which configs do not count.
_SHARED_SLACK = 0.15  # tolerated deviation of shared memory from what a config counts


@dataclass(frozen=True)
class CompileRow:
    """Outcome of compiling the kernels of one call: the main kernel, and any helper kernels.

    ``ok`` is False if compiling failed, or if the code is not as expected. ``message`` then says
    why. If ``ok`` is True, ``message`` describes unusual code, or is empty.

    The fields of the inner loop are those of :class:`LoopCode` and of :class:`InnerLoop`, whose
    field ``instruction`` is called ``mma`` here. The fields ``products`` and ``copied`` are
    relative to what the tile needs: bm · bn · bk multiply-adds, and the bytes of (bm + bn) · bk
    elements.
    """

    kernel: str
    operation: str
    config: str
    dtype: str
    layout: str
    alignment: int
    arch: str
    mma: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    copy_bytes: int
    products: float
    copied: float
    instructions: int
    matrix: int
    waits_for_all: bool
    launches: int  # number of kernels in one call
    ok: bool
    message: str


@dataclass(frozen=True)
class _Facts:
    """Facts about the code of one kernel, or of all kernels of one call.

    For several kernels, ``registers``, ``spill_bytes`` and ``shared_bytes`` are each the maximum
    over the kernels. ``launches`` counts the kernels. The other fields describe the main kernel.
    """

    loop: InnerLoop
    registers: int
    spill_bytes: int
    shared_bytes: int
    bulk_copies: bool  # whether TMA copies operands
    moves_registers: bool  # whether warps that copy give registers to warps that multiply
    serialised: str = ""  # codes of ptxas's warnings that each wgmma waits for the previous one
    code: LoopCode = NO_LOOP
    launches: int = 1


@dataclass(frozen=True)
class _Job:
    """Problem and config of a Triton family, to be compiled for one architecture."""

    family: str
    config: TileConfig
    problem: Problem
    alignment: int
    arch: str
    chosen: bool = True  # whether this config would be chosen, or is only a candidate


def compile_rows(
    arches: Sequence[str],
    every_candidate: bool = False,
    names: Sequence[str] = (),
    done: Callable[[CompileRow], None] | None = None,
) -> list[CompileRow]:
    """Compile the Triton families' kernels; return a row per problem, config and architecture.

    Args:
        arches: architectures such as ``sm_90``; each stands for the first machine in
            ``machines.toml`` that has it.
        every_candidate: whether to compile all candidate configs, experimental ones included,
            instead of only the chosen config.
        names: names of the families to compile; all families if empty.
        done: function that is called with each row, in the order of the result.

    Raises:
        UserError: if an architecture is not known, or is too old for the kernels.
    """
    capabilities = {
        machine.arch: machine.capability
        for machine in known_machines().values()
        if machine.capability is not None
    }
    supported = [arch for arch, capability in capabilities.items() if capability >= MIN_CAPABILITY]
    for arch in arches:
        if arch in capabilities and arch not in supported:
            raise UserError(
                f"--arch {arch} is too old for the Triton kernels; give sm_80 or later."
            )
        check_word("architecture", arch, supported)
    jobs = [
        job
        for arch in arches
        for job in _jobs(arch, every_candidate)
        if not names or job.family in names
    ]
    rows = []
    context = get_context("spawn")  # a forked process could inherit locks that Triton or LLVM holds
    with ProcessPoolExecutor(usable_processors(), mp_context=context) as pool:
        for row in pool.map(_compile, jobs, chunksize=4):
            rows.append(row)
            if done is not None:
                done(row)
    return rows


def _jobs(arch: str, every_candidate: bool) -> list[_Job]:
    machine = machine_of_arch(arch)
    families = [
        implementation
        for implementation in all_implementations().values()
        if isinstance(implementation, TritonFamily)
    ]
    jobs = []
    for family, alignment in itertools.product(families, (_ALIGNED, _MISALIGNED)):
        problems: list[Problem] = []
        for op in family.ops:
            problems += _gemms(alignment) if op == "gemm" else _convs(alignment)
        for problem in problems:
            if family.refusal(problem) is not None:
                continue
            configs = family.configs(problem, machine, experimental=every_candidate)
            # The first config is the one that would be chosen. It is never experimental, because
            # an experimental config follows an ordinary one with the same estimated time.
            if not every_candidate:
                configs = configs[:1]
            for rank, config in enumerate(configs):
                # Unlike a vendor library, a Triton family has only configs with a tile.
                assert isinstance(config, TileConfig)
                chosen = rank == 0
                jobs.append(_Job(family.name, config, problem, alignment, arch, chosen))
    return jobs


def _gemms(alignment: int) -> list[Problem]:
    """Return a GEMM per dtype and layout: 4096³, or 4095³ (odd strides) for misaligned rows."""
    size = _SIZE if alignment == _ALIGNED else _SIZE - 1
    return [
        Gemm(size, size, size, dtype, layout)
        for dtype, layout in itertools.product(TIMED_DTYPES, GEMM_LAYOUTS)
    ]


def _convs(alignment: int) -> list[Problem]:
    """Return a ResNet's 3 × 3 convolution per dtype and pass.

    It has 256 channels, or 255 for misaligned rows.
    """
    channels = _CONV_CHANNELS if alignment == _ALIGNED else _CONV_CHANNELS - 1
    return [
        Conv(
            n=32,
            c=channels,
            h=_CONV_SIZE,
            w=_CONV_SIZE,
            kout=channels,
            r=3,
            s=3,
            stride=(1, 1),
            padding=(1, 1),
            dilation=(1, 1),
            groups=1,
            dtype=dtype,
            layout="nhwc",
            pass_=pass_,
        )
        for dtype, pass_ in itertools.product(TIMED_DTYPES, PASSES)
    ]


_NO_DEVICE = "this driver has no device; it only reports which architecture to compile for"


class _TargetDriver(DriverBase):
    """Stand-in for a GPU's driver; it only reports which architecture to compile for.

    The JIT keeps one cache per device, so each architecture is reported as a separate device.
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
        raise RuntimeError(_NO_DEVICE)

    def get_benchmarker(self) -> Any:
        raise RuntimeError(_NO_DEVICE)


def _compile(job: _Job) -> CompileRow:
    """Compile a job's kernels and return a row, which reports the error if compiling fails."""
    machine = machine_of_arch(job.arch)
    triton.runtime.driver.set_active(_TargetDriver(machine))
    facts = _NO_FACTS
    try:
        facts = _family_facts(job)
        complaints = _complaints(job, machine, facts)
    except Exception as error:  # the row reports the failure, and the other rows are still compiled
        complaints = [error_summary(error)]
    problem, loop = job.problem, facts.loop
    products, copied = _loop_shares(job, loop)
    operation = problem.pass_ if isinstance(problem, Conv) else problem.op
    return CompileRow(
        kernel=job.family,
        operation=operation,
        config=str(job.config),
        dtype=problem.dtype,
        layout=problem.layout,
        alignment=job.alignment,
        arch=job.arch,
        mma=loop.instruction,
        registers=facts.registers,
        spill_bytes=facts.spill_bytes,
        shared_bytes=facts.shared_bytes,
        copy_bytes=loop.copy_bytes,
        products=products,
        copied=copied,
        instructions=facts.code.instructions,
        matrix=facts.code.matrix,
        waits_for_all=facts.code.waits_for_all,
        launches=facts.launches,
        ok=not complaints,
        message=" ".join(complaints) or _remark(job, facts),
    )


# Facts of a call whose compilation failed.
_NO_FACTS = _Facts(
    InnerLoop("", products=0, copied=0, copy_bytes=0),
    registers=0,
    spill_bytes=0,
    shared_bytes=0,
    bulk_copies=False,
    moves_registers=False,
)


def _family_facts(job: _Job) -> _Facts:
    family = all_implementations()[job.family]
    assert isinstance(family, TritonFamily)
    offset = 0 if job.alignment == _ALIGNED else 1
    operands = meta_operands(job.problem, offset)
    calls = family.unbound_calls(job.problem, operands, job.config)
    kernels = [_inspect(call, job.config.warps) for call in calls]
    # The main kernel is the one that multiplies. Others transpose operands, or add parts.
    main = max(kernels, key=lambda kernel: kernel.loop.products)
    return replace(
        main,
        registers=max(kernel.registers for kernel in kernels),
        spill_bytes=max(kernel.spill_bytes for kernel in kernels),
        shared_bytes=max(kernel.shared_bytes for kernel in kernels),
        launches=len(kernels),
    )


def _inspect(call: LaunchSpec, warps: int) -> _Facts:
    """Compile one launch, and read its PTX, its machine code and the output of ``ptxas``."""
    kernel, log = _compile_with_log(call)
    usage = _RESOURCES.search(log)
    if usage is None:
        raise RuntimeError(
            "the output of ptxas has no register counts; install the Triton of constraints.txt."
        )
    ptx = kernel.asm["ptx"]
    stored_bytes, loaded_bytes, registers = map(int, usage.groups())
    return _Facts(
        inner_loop(ptx, warps),
        registers=registers,
        spill_bytes=stored_bytes + loaded_bytes,
        shared_bytes=kernel.metadata.shared,
        bulk_copies=BULK_COPY in ptx,
        moves_registers="setmaxnreg" in ptx,
        serialised=" ".join(sorted(set(_SERIALISED.findall(log)))),
        code=loop_code(disassemble(kernel.asm["cubin"])),
    )


_LOG = "ptxas.log"
_SERIALISED = re.compile(r"\b(C75\d\d)\b")
"""Pattern of the code in a ptxas warning about serialised wgmma instructions.

An example is C7515, "Potential Performance Loss: wgmma.mma_async instructions are serialized".
"""
_RESOURCES = re.compile(
    r"(\d+) bytes spill stores, (\d+) bytes spill loads\b.*?\bUsed (\d+) registers", re.DOTALL
)


def _compile_with_log(call: LaunchSpec) -> tuple[Any, str]:
    """Return a launch's kernel, and the log of the ``ptxas`` run that assembled the kernel.

    The log is kept next to the kernel in Triton's cache, because the numbers that it reports cannot
    be obtained later. A second run of ``ptxas`` with other options would report different
    register counts. The resource dump of the binary does not show spills.

    An ordinary launch caches a kernel without its log. If the log is missing or incomplete, or if
    the PTX is missing, the kernel is compiled again.
    """
    kernel, log = _warm_up(call)
    cache = get_cache_manager(kernel.hash)
    if not log:  # ptxas did not run, because the kernel was cached
        log_file = cache.get_file(_LOG)
        log = Path(log_file).read_text(encoding="utf-8") if log_file else ""
        if "ptx" in kernel.asm and _RESOURCES.search(log):
            return kernel, log
        call.kernel.device_caches.clear()  # otherwise this process would return its own copy
        kernel, log = _warm_up(call, recompile=True)
    cache.put(log, _LOG, binary=False)
    return kernel, log


def _warm_up(call: LaunchSpec, recompile: bool = False) -> tuple[Any, str]:
    """Return a launch's kernel, and the text that ``ptxas`` printed, or "" if it did not run."""
    knobs = triton.knobs
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = recompile
        return call.warmup(), log.getvalue()


def _loop_shares(job: _Job, loop: InnerLoop) -> tuple[float, float]:
    """Return the multiply-adds and copied bytes of the inner loop, relative to the tile's needs."""
    config = job.config
    needed_products = config.bm * config.bn * config.bk
    needed_bytes = (config.bm + config.bn) * config.bk * DTYPE_BYTES[job.problem.dtype]
    return loop.products / needed_products, loop.copied / needed_bytes


def _complaints(job: _Job, machine: Machine, facts: _Facts) -> list[str]:
    """Return a sentence for each unexpected property of the code."""
    expected = _expected_instructions(job)
    complaints = []
    if facts.loop.instruction not in expected:
        instruction = facts.loop.instruction or "no matrix instruction"
        complaints.append(f"The kernel uses {instruction}; {' or '.join(expected)} was expected.")
    if facts.spill_bytes:
        complaints.append(
            f"The kernel has register spills: {facts.spill_bytes:,} bytes are stored or loaded."
        )
    if facts.serialised and job.chosen:
        complaints.append(
            f"Every wgmma waits for the previous one (ptxas warning {facts.serialised})."
        )
    if facts.shared_bytes > machine.shared_cta_bytes:
        complaints.append(
            f"The kernel needs {facts.shared_bytes:,} bytes of shared memory; a CTA can have "
            f"at most {machine.shared_cta_bytes:,}."
        )
    # A config predicts the shared memory only for aligned operands. Configs do not count the
    # memory in which tf32 operands are transposed.
    predicted = job.config.shared_bytes(job.problem.dtype, machine)
    is_predictable = job.alignment == _ALIGNED and not _transposes_tf32(job)
    if is_predictable and not math.isclose(facts.shared_bytes, predicted, rel_tol=_SHARED_SLACK):
        complaints.append(
            f"The kernel uses {facts.shared_bytes:,} bytes of shared memory; {predicted:,} were "
            "predicted from the config."
        )
    # Only a PersistentConfig has the settings ``tma`` and ``specialize``.
    if getattr(job.config, "tma", False) and not facts.bulk_copies:
        complaints.append("The kernel has no TMA copies.")
    if getattr(job.config, "specialize", False) and not facts.moves_registers:
        complaints.append("The kernel has no specialised warps.")
    if job.alignment == _ALIGNED:
        products, copied = _loop_shares(job, facts.loop)
        if not math.isclose(products, 1, rel_tol=_SLACK):
            complaints.append(
                f"The inner loop computes {products:.2f} times the multiply-adds that the tile "
                "needs."
            )
        if not math.isclose(copied, 1, rel_tol=_SLACK):
            complaints.append(
                f"The inner loop copies {copied:.2f} times the bytes that the tile needs."
            )
    return complaints


_ASYNC_INSTRUCTIONS = {9: "wgmma", 10: "tcgen05"}
"""Matrix instructions that read their operands from shared memory, by major compute capability."""


def _expected_instructions(job: _Job) -> tuple[str, ...]:
    """Return the instructions that the kernel's inner loop may use to multiply."""
    if job.problem.dtype == "fp32":
        return ("fma",)
    machine = machine_of_arch(job.arch)
    best = _ASYNC_INSTRUCTIONS.get(machine.major)
    # The asynchronous instructions need tiles of at least MIN_ASYNC_ROWS rows.
    if best is None or job.config.bm < MIN_ASYNC_ROWS:
        return ("mma.sync",)
    # For a tf32 operand that has to be transposed, Triton uses one or the other.
    return (best, "mma.sync") if _transposes_tf32(job) else (best,)


def _transposes_tf32(job: _Job) -> bool:
    """Return True if the kernel reads a tf32 operand in which K is not contiguous.

    wgmma cannot read such an operand, so the kernel transposes it or uses another instruction.
    """
    problem = job.problem
    is_transposed_before = isinstance(job.config, TiledConfig) and job.config.repack
    if problem.dtype != "tf32" or is_transposed_before:
        return False
    return problem.layout != "nt" if isinstance(problem, Gemm) else problem.pass_ != "fprop"


def _remark(job: _Job, facts: _Facts) -> str:
    """Return remarks on unusual but acceptable code, or "" if nothing is unusual."""
    remarks = []
    if facts.serialised:  # only for a candidate, because a chosen config gets a complaint
        remarks.append(
            f"Every wgmma waits for the previous one (ptxas warning {facts.serialised})."
        )
    # Only sm_90 has wgmma.
    if _transposes_tf32(job) and job.arch == "sm_90" and job.config.bm >= MIN_ASYNC_ROWS:
        if facts.loop.instruction == "mma.sync":
            remarks.append(
                "The kernel uses mma.sync, because wgmma reads tf32 operands only in K-major order."
            )
        elif facts.loop.copy_bytes < WIDE_BYTES:
            remarks.append(
                "Operands are transposed to K-major order for wgmma while they are "
                "copied to shared memory."
            )
    if job.alignment == _ALIGNED and facts.loop.copy_bytes < WIDE_BYTES:
        remarks.append(f"The narrowest copies are {facts.loop.copy_bytes} bytes wide.")
    return " ".join(remarks)
