"""Bench that prepares cases for timing on a real device through PyTorch."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from kernels import implementations
from kernels.common.errors import UserError, WrongResultError
from kernels.config import DENSE, Storage
from kernels.device import make_current, select_device
from kernels.launch import Implementation, Launch
from kernels.machine import Machine
from kernels.problem import Gemm
from kernels.registry import library_for
from sweeps.cases.case import Case
from sweeps.folding.history import CANARY, History
from sweeps.measuring.bench import OnStart, PoisonedError, Ready, Refusal
from sweeps.measuring.checking import ResultChecker
from sweeps.planning.ceilings import measure_ceilings
from sweeps.timing.arena import Arena, ArenaFullError, set_bytes
from sweeps.timing.clock import CpuClock, CudaClock, SmClock, do_nothing
from sweeps.timing.profiler_trace import Kernel, LaunchOnce, cpu_tracer, kernel_columns, trace_gpu
from sweeps.timing.pulse import pulse_of_this_process
from sweeps.timing.rotation import ResultRotation
from sweeps.timing.sampler import Sampler, Subject
from sweeps.timing.telemetry import Telemetry, gpu_telemetry

_MAX_SETS = 512  # largest number of operand sets of a case
# Share of the free memory for each of six buffers: inputs and results of three storage types.
_ARENA_SHARE = 0.12
# The same share on a small card, where vendor libraries and contexts take a larger part of memory.
_SMALL_SHARE = 0.09
_SMALL_BYTES = 48e9  # a card with less memory is small
_DEFAULT_MEMORY = 1 << 30  # bytes to assume free if a host does not report its memory
# Longest expected seconds of a case's first launch, with loading, JIT compilation and autotuning.
_FIRST_SECONDS = 3.0
# Longest expected seconds of compiling a chunk of cases, or of reading a trace.
_COMPILE_AHEAD_SECONDS = 30.0


class TorchBench:
    """Bench that runs cases on one device through PyTorch."""

    careful: Collection[str] = frozenset()

    def __init__(
        self,
        machine: Machine,
        device: str,
        gpu: int | None,
        cases: Sequence[Case],
        number: int | None = None,
    ) -> None:
        """Open the device (``cpu`` or ``gpu``), and size the arena for ``cases``.

        If ``machine`` is a CPU, its ceilings must be known. ``gpu`` is the GPU's ordinal, or None
        on a CPU. ``number`` is the GPU's number within the run, or None to use the ordinal.

        Raises:
            UserError: if the device cannot be used.
        """
        # 1. Open the device, its clock and its sensors.
        self.machine = machine
        is_numbered = gpu is not None and number is not None
        self.gpu = number if is_numbered else gpu  # number of the GPU in events
        self._index = gpu  # number of the GPU in PyTorch
        self._device = select_device(device, gpu or 0).torch_name
        self._telemetry = Telemetry()
        self._clock: CpuClock | CudaClock = CpuClock()
        make_current(gpu)
        if gpu is not None:
            sm_clock = _open_sm_clock(machine.sms, self._device)
            self._clock = CudaClock(torch, self._device, sm_clock=sm_clock)
            self._telemetry = gpu_telemetry(gpu)
        self._telemetry.start()
        # 2. Create the arena and the sampler.
        is_small = gpu is not None and machine.memory_bytes < _SMALL_BYTES
        buffer_share = _SMALL_SHARE if is_small else _ARENA_SHARE
        max_bytes = int(buffer_share * self._free_memory())
        self._rotation = ResultRotation(machine.l2_bytes)
        self._arena = Arena(self._device, machine.l2_bytes, max_bytes)
        self.sampler = Sampler(
            self._clock, self._arena.flush, self._telemetry, pulse_of_this_process()
        )
        # 3. Size the arena for the canary and the largest cases.
        self._arena.reserve(self._canary_problem(), 1)
        for case in cases:
            # A launch takes at least as long as reading the bytes that only its operand set has.
            # This limits the number of launches in a batch, and therefore the number of sets.
            storage = _storage_of(case)
            own_bytes = set_bytes(case.problem, case.shared_a, storage)
            set_count = self._set_count(case, own_bytes / machine.bandwidth)
            self._arena.reserve(case.problem, set_count, case.shared_a, storage)

    def _free_memory(self) -> int:
        """Return the GPU's free memory or, on a CPU, half of the host's memory, in bytes.

        If the host does not report its memory, return 1 GiB.
        """
        if self.gpu is not None:
            free, _ = torch.cuda.mem_get_info(self._index)
            return free
        return self.machine.memory_bytes // 2 or _DEFAULT_MEMORY

    def _set_count(self, case: Case, seconds: float) -> int:
        """Return the number of operand sets for a case whose launch takes ``seconds``.

        A case with a warm cache needs one set. Any other burst uses no set twice, so it needs a set
        for each launch, up to :data:`_MAX_SETS`. A sustained batch uses its sets in turn, so it
        needs only enough sets that each one is evicted from the cache before it is used again.
        """
        if case.cache == "warm":
            return 1
        set_count = self.sampler.launches(case.mode, seconds)
        if case.mode == "sustained":
            # One set more, because only the other sets are used before a set is used again.
            sets_beyond_cache = math.ceil(2 * self.machine.l2_bytes / set_bytes(case.problem)) + 1
            set_count = min(set_count, sets_beyond_cache)
        # Even if a batch has only one launch, consecutive samples and checks use different sets.
        return max(2, min(set_count, _MAX_SETS))

    def prepare(
        self, cases: Sequence[Case], histories: Mapping[str, History], on_start: OnStart
    ) -> Iterator[Ready | Refusal]:
        """Compile all cases together, except those in :attr:`careful`, then prepare each case."""
        self._compile([case for case in cases if case.id not in self.careful], on_start)
        for case in cases:
            on_start([case.id], _FIRST_SECONDS)
            try:
                yield self._prepare_one(case, histories.get(case.id, History()))
            except Exception as error:  # an error from a library or compiler is the case's outcome
                yield Refusal(case, *self.recover_from(error))

    def kernel_columns(
        self, cases: Sequence[Case], on_start: OnStart
    ) -> Iterator[tuple[Case, Mapping[str, Any]]]:
        """Yield cases with the columns that name the kernels of their launches on a GPU."""
        traced = trace_gpu(self._warm_launches(cases, on_start))
        for case, kernels in zip(cases, traced, strict=True):
            if kernels is not None:
                yield case, kernel_columns(kernels)

    def _warm_launches(self, cases: Sequence[Case], on_start: OnStart) -> Iterator[LaunchOnce]:
        """Prepare each case in turn, and yield a launch of it, or a no-op if preparing it fails."""
        for case in cases:
            on_start([case.id], _FIRST_SECONDS)
            try:
                launch = self._warm_launch(case)
            except Exception as error:
                self.recover_from(error)  # ends this process if the GPU is unusable
                launch = do_nothing
            yield launch
        on_start([], _COMPILE_AHEAD_SECONDS)  # the trace is read next

    def _warm_launch(self, case: Case) -> LaunchOnce:
        """Launch a case once, and return a callable that launches it again.

        The first launch loads modules and compiles kernels, so that the next one does not.
        """
        launch = self._launch(case, implementations()[case.implementation], 1)
        launch(0)
        return functools.partial(launch, 0)

    def ceilings(self) -> tuple[dict[str, float], float] | None:
        """Measure a CPU's peaks and bandwidth now; return None on a GPU.

        The peaks of emulated dtypes are left out, because measuring them takes a long time.
        """
        if self.gpu is not None:
            return None
        return measure_ceilings(
            self.machine, self.machine.peaks.keys() - set(self.machine.emulated)
        )

    def canary(self) -> Subject:
        """Return the canary: a compute-bound GEMM, in fp16 on GPUs with fp16, in fp32 elsewhere.

        Raises:
            Exception: if there is not enough memory.
        """
        problem = self._canary_problem()
        self._arena.capacity(problem)  # raises an error if the arena cannot hold it
        implementation = implementations()[library_for(problem, self.machine)]
        launch = implementation.prepare(problem, self._arena.sets(problem, 1))
        subject = Subject(CANARY, launch.bare, cache="warm", settings=launch.settings)
        with launch.settings():
            self.sampler.set_batch(subject, self.sampler.estimate(launch.bare))
        return subject

    def _canary_problem(self) -> Gemm:
        size = 512 if self.gpu is None else 4096
        dtype = "fp16" if self.gpu is not None and "fp16" in self.machine.peaks else "fp32"
        return Gemm(size, size, size, dtype)

    def _compile(self, cases: Sequence[Case], on_start: OnStart) -> None:
        """Let every implementation compile its cases in parallel, before they are prepared.

        Errors are ignored here, because they occur again when the cases are prepared.
        """
        cases_by_implementation: dict[str, list[Case]] = {}
        for case in cases:
            cases_by_implementation.setdefault(case.implementation, []).append(case)
        for name, cases_to_compile in cases_by_implementation.items():
            on_start([case.id for case in cases_to_compile], _COMPILE_AHEAD_SECONDS)
            with suppress(Exception):
                implementation = implementations()[name]
                requests = [
                    (case.problem, implementation.parse_config(case.config))
                    for case in cases_to_compile
                    if implementation.supports(case.problem, self.machine) is None
                ]
                implementation.compile_ahead(requests)

    def _prepare_one(self, case: Case, history: History) -> Ready | Refusal:
        """Return the checked and prepared case, or a refusal if the case cannot be timed."""
        implementation = implementations()[case.implementation]
        # 1. Leave out what the implementation does not support.
        reason = implementation.supports(case.problem, self.machine)
        if reason is not None:
            return Refusal(case, "unsupported", reason)
        # 2. Check the result of a first launch.
        launch = self._launch(case, implementation, 1)
        begin = self.sampler.now()
        # The number of earlier samples is part of the seed, so that each process checks other
        # entries of the result.
        earlier_samples = [sample["s"] for sample in history.samples.get(self.gpu, ())]
        checker = ResultChecker(case.problem, launch, f"{case.id} {len(earlier_samples)}")
        verdict = checker.check_before_timing()
        checking = self.sampler.now() - begin
        facts: dict[str, Any] = {}
        if math.isfinite(verdict.rel_error):
            facts["rel_error"] = verdict.rel_error
        if not verdict.ok:
            self._arena.restore()
            return Refusal(case, "wrong", verdict.message, facts)
        # 3. Estimate the seconds of a launch. On a CPU, also name its kernels.
        with launch.settings():
            # The duration of the first launch is known only on a CPU. On a GPU, a launch returns
            # before it is done.
            first = checker.first_seconds if self.gpu is None else 0.0
            seconds = self.sampler.estimate(launch.bare, warmed_up=True, first=first)
        if self.gpu is None and "kernel" not in history.facts:
            facts |= _kernels_on_cpu(functools.partial(launch, 0))
        # 4. Make as many operand sets as a batch needs.
        capacity = self._arena.capacity(case.problem, case.shared_a, _storage_of(case))
        set_count = min(self._set_count(case, seconds), capacity)
        if set_count > 1:
            launch = self._launch(case, implementation, set_count)
        # 5. Make the subject that the sampler times.
        subject = Subject(
            key=case.id,
            launch=launch.bare,
            sets=set_count,
            mode=case.mode,
            cache=case.cache,
            settings=launch.settings,
            paced=launch.paced,
            samples=earlier_samples,
            exposed=len(history.exposed),
            checker=checker.for_sets(launch),
            checking=checking,
        )
        if set_count > 1 and checker.allocates and self.gpu is not None:
            # Results are not rotated on a CPU. It has no hand-written kernels to compare with, and
            # its allocator may ask the system for new memory at each launch, which would be timed.
            rotating = self._rotation.launch(launch.bare, launch.sets[0].out)
            subject.launch, subject.renew = rotating, rotating.renew
        if case.shared_a:
            # Summing the shared operand reads all of it into the cache, on a GPU in stream order.
            subject.warm = functools.partial(torch.sum, launch.sets[0].a)
        self.sampler.set_batch(subject, seconds)
        return Ready(case, subject, facts)

    def _launch(self, case: Case, implementation: Implementation, set_count: int) -> Launch:
        """Bind a case's implementation to ``set_count`` operand sets of the arena."""
        storage = _storage_of(case)
        self._arena.capacity(case.problem, storage=storage)  # raises an error if no set fits
        operands = self._arena.sets(case.problem, set_count, case.shared_a, storage)
        return implementation.prepare(
            case.problem, operands, implementation.parse_config(case.config)
        )

    def recover_from(self, error: Exception) -> tuple[str, str]:
        """Recover from an error that a case raised. Return the case's status and a message.

        The status is ``wrong``, ``oom`` or ``error``. After a wrong result, restore the operands,
        because the kernel may have overwritten them.

        Raises:
            PoisonedError: if the GPU's context is broken.
        """
        if self.gpu is not None:
            try:
                torch.cuda.synchronize(self._index)
                torch.cuda.empty_cache()
            except RuntimeError as broken:
                raise PoisonedError(str(broken)) from None
        if isinstance(error, WrongResultError):
            self._arena.restore()
            return "wrong", str(error)
        is_full = isinstance(error, (ArenaFullError, torch.OutOfMemoryError, MemoryError))
        # PyTorch's CPU allocator raises a RuntimeError with these words.
        if is_full or "can't allocate memory" in str(error):
            return "oom", str(error)
        return "error", f"{type(error).__name__}: {error}"


def _open_sm_clock(sms: int, device: str) -> SmClock | None:
    """Return the reader of the SM clock, or None if Triton cannot be used."""
    try:
        from kernels.triton import sm_clock

        return sm_clock.TritonSmClock(sms, device)
    except Exception:  # a missing package or C compiler, or a GPU that Triton does not know
        return None


def _storage_of(case: Case) -> Storage:
    """Return the storage of a case's operands, which is dense unless the config says otherwise."""
    # An unknown implementation or an invalid config is reported when the case is prepared.
    with suppress(KeyError, UserError):
        config = implementations()[case.implementation].parse_config(case.config)
        if config is not None:
            return config.storage
    return DENSE


def _kernels_on_cpu(launch: LaunchOnce) -> dict[str, Any]:
    """Return the columns that name a launch's kernels; ``kernel`` is empty if none is known.

    A profiler on a GPU slows later launches, but the CPU tracer does not, so the same process may
    continue to measure.
    """
    named: list[Kernel] = []
    # Names are optional, and a launch that fails here fails again when the case is timed.
    with suppress(Exception), cpu_tracer() as trace:
        named = trace(launch)
    return kernel_columns(named)


def open_bench(
    machine: Machine, gpu: int | None, cases: Sequence[Case]
) -> tuple[TorchBench, list[Ready]]:
    """Return a new bench for use outside of any run, and the cases that can be timed on it.

    Raises:
        UserError: if the device cannot be used.
        PoisonedError: if the GPU's context breaks while the cases are prepared.
    """
    bench = TorchBench(machine, machine.kind, gpu, cases)
    # There are no histories of the cases, and no parent process to which to report their start.
    results = bench.prepare(cases, {}, lambda ids, seconds: None)
    return bench, [result for result in results if isinstance(result, Ready)]
