from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.common.errors import UserError, WrongResultError
from sweeps.measuring import kernel_timing
from sweeps.measuring.kernel_timing import TimedKernel, timer_for
from sweeps.timing.sampler import Subject
from sweeps.timing.statistics import CHECKPOINTS

A, B = torch.randn(32, 48), torch.randn(48, 16)


def test_a_cold_kernel_rotates_through_copies() -> None:
    seen: list[int] = []

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        seen.append(a.data_ptr())
        return a @ b

    samples = timer_for(None).time(TimedKernel(matmul, (A, B), torch.matmul))
    assert torch.equal(samples.result, A @ B)
    assert CHECKPOINTS[0] <= len(samples.seconds) <= CHECKPOINTS[-1]
    assert all(seconds > 0 for seconds in samples.seconds)
    assert samples.sets == samples.launches
    assert A.data_ptr() not in seen
    assert len(set(seen)) >= samples.sets
    assert samples.rel_error is not None
    assert samples.rel_error < 1e-5


def test_a_batch_has_as_many_copies_as_launches_if_they_fit() -> None:
    timer = timer_for(None)
    assert timer._set_count(1000, 1e-5) == 50  # a batch of half a millisecond
    assert timer._set_count(1000, 1e-9) == 512
    assert timer._set_count(10**15, 1e-5) == 1
    assert timer._set_count(0, 1.0) == 1


def test_kernels_of_one_device_share_a_timer() -> None:
    assert timer_for(None) is timer_for(None)


def test_a_warm_kernel_has_one_copy() -> None:
    samples = timer_for(None).time(TimedKernel(torch.matmul, (A, B)), "warm")
    assert (samples.sets, samples.rel_error) == (1, None)


def test_a_kernel_may_prepare_its_launch() -> None:
    prepared: list[int] = []

    def prepare(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
        prepared.append(a.data_ptr())
        return functools.partial(torch.mm, a, b, out=torch.empty(32, 16))

    kernel = TimedKernel(prepare, (A, B), torch.matmul, prepares=True)
    samples = timer_for(None).time(kernel)
    assert len(prepared) == samples.sets + 2  # each of the two checks prepares a launch, too
    assert torch.equal(samples.result, A @ B)


def test_what_is_not_a_tensor_is_passed_on() -> None:
    kernel = TimedKernel(lambda a, scale: a * scale, (A, 3), lambda a, scale: a * scale)
    assert torch.equal(timer_for(None).time(kernel, "warm").result, A * 3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda a: a * 1.01, "error of the result is 0.01 times the reference's largest"),
        (lambda a: a * float("nan"), "error of the result is NaN, because"),
        (
            lambda a: a[1:],
            r"returned a tensor of shape \(31, 48\), but the reference returned a tensor of shape "
            r"\(32, 48\)",
        ),
        (lambda a: None, "returned an object of type NoneType"),
    ],
)
def test_a_wrong_kernel_is_not_timed(wrong: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(WrongResultError, match=words):
        timer_for(None).time(TimedKernel(wrong, (A,), torch.clone))


def test_an_error_is_absolute_if_the_reference_is_zero() -> None:
    kernel = TimedKernel(lambda a: torch.full_like(a, 0.5), (A,), torch.zeros_like)
    with pytest.raises(WrongResultError, match=r"error of the result is 0\.5; at most"):
        timer_for(None).time(kernel)


def test_a_kernel_that_goes_wrong_later_is_caught() -> None:
    calls: list[int] = []

    def late(a: Tensor) -> Tensor:
        calls.append(1)
        return a * (1.0 if len(calls) == 1 else 1.1)

    with pytest.raises(WrongResultError):
        timer_for(None).time(TimedKernel(late, (A,), torch.clone))


def test_a_tolerance_may_be_given() -> None:
    kernel = TimedKernel(lambda a: a * 1.01, (A,), torch.clone, 0.02)
    samples = timer_for(None).time(kernel, "warm")
    assert samples.rel_error == pytest.approx(0.01, rel=1e-3)


def test_timers_of_two_gpus_may_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = timer_for(None)
    made_current: list[int | None] = []
    monkeypatch.setattr(kernel_timing, "make_current", made_current.append)
    timer.time(TimedKernel(torch.clone, (A,)), "warm")
    assert made_current == [None]


def test_an_unknown_cache_state_is_a_sentence() -> None:
    with pytest.raises(UserError, match="use 'cold' or 'warm'"):
        timer_for(None).time(TimedKernel(torch.clone, (A,)), "hot")


@pytest.mark.parametrize("result", [(A, B), 1.0, None])
def test_a_reference_that_returns_no_tensor_is_a_sentence(result: object) -> None:
    kernel = TimedKernel(torch.clone, (A,), lambda a: result)
    words = f"returned an object of type {type(result).__name__}, not a tensor"
    with pytest.raises(UserError, match=words):
        timer_for(None).time(kernel)


@pytest.mark.parametrize("wide", [torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_results_of_every_dtype_are_compared(wide: torch.dtype) -> None:
    kernel = TimedKernel(lambda a: a.clone(), (A.to(wide),), torch.clone)
    assert timer_for(None).time(kernel, "warm").rel_error == 0.0


def test_imaginary_parts_are_compared() -> None:
    right = TimedKernel(lambda a: a.clone(), (A + 1j,), torch.clone)
    assert timer_for(None).time(right, "warm").rel_error == 0.0
    wrong = TimedKernel(lambda a: a.conj().clone(), (A + 1j,), torch.clone)
    with pytest.raises(WrongResultError):
        timer_for(None).time(wrong)


@pytest.mark.filterwarnings("error")
def test_a_module_with_parameters_is_checked_without_a_warning() -> None:
    scale = torch.nn.Parameter(torch.tensor(2.0))
    kernel = TimedKernel(lambda a: a * scale, (A,), lambda a: a * scale)
    assert timer_for(None).time(kernel, "warm").rel_error == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_reference_may_write_to_its_arguments(dtype: torch.dtype) -> None:
    total = torch.zeros(4, dtype=dtype)
    kernel = TimedKernel(lambda a: a.add_(1), (total,), lambda a: a.add_(1))
    expected = kernel.expected()
    assert kernel.checked_error(kernel.launch_on_copies()(), expected) == 0.0
    assert not total.any()


def test_an_empty_result_has_no_error() -> None:
    kernel = TimedKernel(lambda a: a[:0] + 1, (A,), lambda a: a[:0] + 1)
    assert timer_for(None).time(kernel, "warm").rel_error == 0.0


def test_a_kernel_on_a_gpu_may_return_several_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of such results is not rotated."""
    timer = timer_for(None)
    monkeypatch.setattr(kernel_timing, "make_current", lambda gpu: None)
    monkeypatch.setattr(timer, "_set_count", lambda nbytes, seconds: 4)
    monkeypatch.setattr(timer, "_gpu", 0)
    samples = timer.time(TimedKernel(lambda a: (a + 1, a), (A,)))
    assert isinstance(samples.result, tuple)


def test_only_two_results_take_up_memory_when_sampling_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are the one that is returned and the one whose shape the rotated memory has."""
    timer = timer_for(None)
    results: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    set_batch = timer._sampler.set_batch

    def add_one(a: Tensor) -> Tensor:
        result = a + 1
        results.append(weakref.ref(result))
        return result

    def count_and_set(subject: Subject, seconds: float) -> None:
        alive.append(sum(result() is not None for result in results))
        set_batch(subject, seconds)

    monkeypatch.setattr(kernel_timing, "make_current", lambda gpu: None)
    monkeypatch.setattr(timer, "_set_count", lambda nbytes, seconds: 4)
    monkeypatch.setattr(timer, "_gpu", 0)
    monkeypatch.setattr(timer._sampler, "set_batch", count_and_set)
    timer.time(TimedKernel(add_one, (A,)))
    assert alive == [2]
