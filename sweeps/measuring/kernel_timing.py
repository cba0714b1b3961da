"""Time a user's kernel with the sampler, outside of any run.

Launches get copies of the kernel's tensor arguments, so that a cold launch does not find its
arguments in the cache. The copies are reused: if the kernel writes to an argument, a later launch
on the same copy reads what an earlier launch wrote.

This module needs PyTorch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.errors import UserError, WrongResultError
from kernels.correctness.reference import TOLERANCE
from kernels.device import make_current, select_device
from kernels.machine import cpu_machine
from sweeps.timing.arena import Arena
from sweeps.timing.clock import CpuClock, CudaClock
from sweeps.timing.rotation import ResultRotation
from sweeps.timing.sampler import Sampler, Subject
from sweeps.timing.telemetry import Telemetry, gpu_telemetry

CACHES = ("cold", "warm")
_MAX_SETS = 512  # largest number of copies of the arguments
_COPIES_SHARE = 0.25  # share of the device's free memory that these copies may take
_LEAST_CACHE = 32 << 20  # bytes; a CPU's cache is assumed to be at least this large
_DEFAULT_MEMORY = 1 << 30  # bytes of memory to assume if a host does not report its memory
_TOLERANCES = {
    torch.float32: TOLERANCE["fp32"], torch.float16: TOLERANCE["fp16"],
    torch.bfloat16: TOLERANCE["bf16"],
}  # fmt: skip


@dataclass(frozen=True)
class KernelSamples:
    """Samples of a kernel.

    Attributes:
        result: value that the first launch returned.
        seconds: seconds per launch, for each sample.
        launches: number of launches in each sample.
        sets: number of argument copies that a sample's launches use in turn.
        rel_error: error of a launch after the samples, as :meth:`TimedKernel.checked_error` returns
            it; None if there is no reference.
    """

    result: Any
    seconds: tuple[float, ...]
    launches: int
    sets: int
    rel_error: float | None


@dataclass(frozen=True)
class TimedKernel:
    """Kernel with its arguments and, to check its result, a reference.

    Attributes:
        function: function that launches the kernel once, without synchronising; see ``prepares``.
        arguments: arguments of the function; a launch gets copies of the tensors among them.
        reference: function that returns the expected result, a tensor. Like a launch, it gets
            copies of the tensors among the arguments; copies of floating-point tensors are in
            float64. None means that results are not checked.
        tolerance: largest value that :meth:`checked_error` may return. None means the project's
            tolerance for the result's dtype or, if that dtype has none, for fp32.
        prepares: True if the function launches nothing itself, but returns a callable without
            arguments that launches the kernel.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    reference: Callable[..., Any] | None = None
    tolerance: float | None = None
    prepares: bool = False

    @property
    def gpu(self) -> int | None:
        """Ordinal of the first CUDA tensor's GPU, or None if no argument is a CUDA tensor."""
        cuda_tensors = [
            argument
            for argument in self.arguments
            if isinstance(argument, Tensor) and argument.is_cuda
        ]
        return cuda_tensors[0].get_device() if cuda_tensors else None

    @property
    def nbytes(self) -> int:
        """Total size in bytes of the tensors among the arguments."""
        return sum(argument.nbytes for argument in self.arguments if isinstance(argument, Tensor))

    def launch_on_copies(self) -> Callable[[], Any]:
        """Copy the tensor arguments, and return a callable that launches the kernel on the copies.

        A copy of a dense tensor has the strides of the original.
        """
        copies = [
            argument.detach().clone() if isinstance(argument, Tensor) else argument
            for argument in self.arguments
        ]
        if self.prepares:
            launch: Callable[[], Any] = self.function(*copies)
            return launch
        return functools.partial(self.function, *copies)

    def expected(self) -> Tensor | None:
        """Return the result of the reference, or None if there is no reference.

        Raises:
            UserError: if the reference does not return a tensor.
        """
        if self.reference is None:
            return None
        # The reference gets copies, because it may write to its arguments.
        expected = self.reference(*map(_copied_for_reference, self.arguments))
        if not isinstance(expected, Tensor):
            raise UserError(
                f"the reference returned an object of type {type(expected).__name__}, not a "
                "tensor. Only a single tensor can be checked: make the reference return one, or "
                "pass no reference."
            )
        return expected

    def checked_error(self, result: Any, expected: Tensor | None) -> float | None:
        """Check a result against the expected one, and return the largest error.

        The error is relative to the largest absolute expected value, or absolute if all expected
        values are 0. Return None if ``expected`` is None.

        Raises:
            WrongResultError: if the result is not a tensor of the expected shape, or if its error
                is NaN or larger than the tolerance.
        """
        if expected is None:
            return None
        # 1. Refuse a result of another type or shape.
        is_tensor = isinstance(result, Tensor)
        if not is_tensor or result.shape != expected.shape:
            returned = f"an object of type {type(result).__name__}"
            if is_tensor:
                returned = f"a tensor of shape {tuple(result.shape)}"
            raise WrongResultError(
                f"the kernel returned {returned}, but the reference returned a tensor of shape "
                f"{tuple(expected.shape)}. Make both return one tensor of the same shape."
            )
        if not expected.numel():
            return 0.0
        # 2. Compute the largest error.
        is_complex = result.is_complex() or expected.is_complex()
        dtype = torch.complex128 if is_complex else torch.float64
        precise_expected = expected.detach().to(dtype)
        differences = result.detach().to(dtype) - precise_expected
        largest_value = float(precise_expected.abs().max())
        scale = 1.0 if largest_value == 0.0 else largest_value
        error = float(differences.abs().max()) / scale
        if math.isnan(error):
            raise WrongResultError(
                "the error of the result is NaN, because the kernel or the reference returned NaN "
                "or infinite values. Correct the function that returned them."
            )
        # 3. Compare it with the tolerance.
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = _TOLERANCES.get(result.dtype, TOLERANCE["fp32"])
        if error > tolerance:
            relative = ""
            if largest_value != 0.0:
                relative = " times the reference's largest absolute value"
            raise WrongResultError(
                f"the largest error of the result is {error:.3g}{relative}; at most "
                f"{tolerance:.3g} is allowed. Correct the kernel, or raise the tolerance."
            )
        return error


def _copied_for_reference(argument: Any) -> Any:
    """Return a copy of a tensor, in float64 if it has a floating-point dtype.

    Return any other argument unchanged.
    """
    if not isinstance(argument, Tensor):
        return argument
    dtype = torch.float64 if argument.is_floating_point() else argument.dtype
    return argument.detach().to(dtype, copy=True)


class KernelTimer:
    """Timer of kernels on one device."""

    def __init__(self, gpu: int | None) -> None:
        """Open the GPU with the ordinal ``gpu``, or the CPU if ``gpu`` is None.

        Raises:
            UserError: if the GPU cannot be used.
        """
        self._gpu = gpu
        clock: CpuClock | CudaClock = CpuClock()
        telemetry = Telemetry()
        if gpu is None:
            # Unlike select_device, this does not change the number of threads that PyTorch uses.
            # The peak and the bandwidth are not needed here.
            machine = cpu_machine({"fp32": 0.0}, 0.0, torch.get_num_threads())
            device_name = "cpu"
            cache_bytes = max(machine.l2_bytes, _LEAST_CACHE)
        else:
            device = select_device("gpu", gpu)
            machine, device_name = device.machine, device.torch_name
            cache_bytes = machine.l2_bytes
            make_current(gpu)
            clock = CudaClock(torch, device_name)
            telemetry = gpu_telemetry(gpu)
        telemetry.start()
        self._memory_bytes = machine.memory_bytes
        self._rotation = ResultRotation(cache_bytes)
        # This arena only flushes the cache. It holds no operands, so it gets 0 bytes for them.
        flush = Arena(device_name, cache_bytes, 0).flush
        self._sampler = Sampler(clock, flush, telemetry)

    def time(self, kernel: TimedKernel, cache: str = "cold") -> KernelSamples:
        """Check a kernel, sample it until :attr:`Subject.finished` is true, and check it again.

        With ``cache="cold"``, the cache does not contain a launch's arguments. With
        ``cache="warm"``, an earlier launch has just read them.

        Raises:
            WrongResultError: if :meth:`TimedKernel.checked_error` refuses a result.
            UserError: if ``cache`` is invalid, if the reference does not return a tensor, or if
                gaps between the kernel's launches show in every sample.
            Exception: any error that the kernel or the reference raises.
        """
        check_cache(cache)
        make_current(self._gpu)  # a timer of another GPU may have been used in between
        # 1. Check a first launch: a wrong result raises an error.
        expected = kernel.expected()
        result = kernel.launch_on_copies()()
        kernel.checked_error(result, expected)
        # 2. Estimate the time of a launch, and make the copies that a batch needs.
        first_launch = kernel.launch_on_copies()
        warm_up_result = first_launch()
        seconds = self._sampler.estimate(_Launches([first_launch]), warmed_up=True)
        set_count = 1 if cache == "warm" else self._set_count(kernel.nbytes, seconds)
        further_launches = [kernel.launch_on_copies() for _ in range(set_count - 1)]
        launches = _Launches([first_launch, *further_launches])
        subject = Subject("kernel", launches, set_count, cache=cache)
        # 3. Let the results rotate if the kernel allocates them, which returns another tensor each
        # time. The memory of such results would otherwise stay in the cache. Other objects, such as
        # a tuple of tensors, cannot be rotated.
        is_rotatable = isinstance(warm_up_result, Tensor) and warm_up_result.nbytes > 0
        if is_rotatable and self._gpu is not None and set_count > 1:
            # Only the comparison is kept: a second result would take up memory while the kernel is
            # sampled.
            allocates_result = first_launch() is not warm_up_result
            if allocates_result:
                rotating = self._rotation.launch(launches, warm_up_result)
                subject.launch, subject.renew = rotating, rotating.renew
        # 4. Take the samples.
        self._sampler.set_batch(subject, seconds)
        while not subject.finished:
            self._sampler.sample(subject)
        if not subject.samples:
            raise UserError(
                "this kernel's launches cannot be timed: gaps between them show in every sample, "
                "probably because the kernel waits for the GPU. Pass a function that does not "
                "synchronise."
            )
        # 5. Check a launch on new copies again, because a kernel may be right only at first.
        error = kernel.checked_error(kernel.launch_on_copies()(), expected)
        return KernelSamples(result, tuple(subject.samples), subject.launches, set_count, error)

    def _set_count(self, nbytes: int, seconds: float) -> int:
        """Return how many copies a cold batch gets, if a launch takes about ``seconds``."""
        if self._gpu is None:
            # Other processes may use the other half. A host may report 0 bytes.
            free_bytes = self._memory_bytes // 2 or _DEFAULT_MEMORY
        else:
            free_bytes, _ = torch.cuda.mem_get_info(self._gpu)
        copies_that_fit = int(_COPIES_SHARE * free_bytes) // max(nbytes, 1)
        return max(1, min(self._sampler.launches("burst", seconds), _MAX_SETS, copies_that_fit))


class _Launches:
    """Launches of a kernel, one for each copy of the kernel's arguments."""

    def __init__(self, launches: Sequence[Callable[[], Any]]) -> None:
        self._launches = launches

    def __call__(self, index: int) -> Any:
        return self._launches[index]()


def check_cache(cache: str) -> None:
    """Check that a cache state is one of :data:`CACHES`.

    Raises:
        UserError: if it is not.
    """
    if cache not in CACHES:
        raise UserError(f"cache is {cache!r}; use {' or '.join(map(repr, CACHES))}.")


@functools.cache
def timer_for(gpu: int | None) -> KernelTimer:
    """Return the timer of the GPU with the ordinal ``gpu``, or of the CPU if ``gpu`` is None.

    Raises:
        UserError: if the GPU cannot be used.
    """
    return KernelTimer(gpu)
