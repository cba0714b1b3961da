"""The bench on the real CPU, with real kernels, operands, sampler and profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import implementations
from kernels.device import this_cpu
from kernels.machine import cpu_machine, known_machine
from kernels.problem import Conv, Gemm
from kernels.registry import library_for
from sweeps.cases.case import Case
from sweeps.folding.history import CANARY, History
from sweeps.measuring import torch_bench as bench_module
from sweeps.measuring.bench import PoisonedError, Ready, Refusal
from sweeps.measuring.torch_bench import TorchBench
from sweeps.planning.choice import choose_sweeps, sweep_cases
from sweeps.planning.compiling import compilers
from sweeps.timing.arena import Arena, set_bytes
from sweeps.timing.profiler_trace import Kernel
from sweeps.timing.rotation import RotatingLaunch

CPU = cpu_machine(dict.fromkeys(this_cpu().machine.peaks, 1e11), 2e10, 2)
GEMM = Gemm(64, 64, 64, "fp32")
SMALL = Case("s", GEMM, library_for(GEMM, CPU))


def bench(*cases: Case, **machine: int) -> TorchBench:
    return TorchBench(replace(CPU, **machine), "cpu", None, cases)  # type: ignore[arg-type]


def prepare(one: TorchBench, *cases: Case) -> tuple[list[Ready | Refusal], list[tuple[str, ...]]]:
    visited: list[tuple[str, ...]] = []
    return list(one.prepare(cases, {}, lambda ids, seconds: visited.append(tuple(ids)))), visited


def test_a_case_is_checked_and_ready() -> None:
    (ready,), visited = prepare(bench(SMALL), SMALL)
    assert isinstance(ready, Ready)
    assert ready.facts["rel_error"] < 1e-5
    assert ready.subject.launches >= 1
    assert visited == [(SMALL.id,), (SMALL.id,)]  # compiled, then prepared


def test_what_cannot_be_timed_is_refused_with_a_sentence() -> None:
    huge = replace(SMALL, problem=Gemm(40_000, 40_000, 40_000, "fp32"))
    other = replace(SMALL, implementation="cublas")
    results, _ = prepare(bench(SMALL, huge, other, memory_bytes=1 << 32), huge, other)
    assert [(r.case, r.status) for r in results if isinstance(r, Refusal)] == [
        (huge, "oom"), (other, "unsupported"),
    ]  # fmt: skip
    assert all(isinstance(r, Refusal) and r.message.endswith(".") for r in results)


def test_a_missing_implementation_costs_only_its_cases() -> None:
    """A run may be resumed where Triton is not installed."""
    missing = replace(SMALL, implementation="missing")
    (refused, ready), _ = prepare(bench(SMALL), missing, SMALL)
    assert isinstance(refused, Refusal)
    assert "missing" in refused.message
    assert isinstance(ready, Ready)


def test_a_wrong_result_has_no_time_and_says_how_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        real(a, b, out=out)
        out[-1, -1] += 100
        return out

    monkeypatch.setattr(torch, "mm", wrong)
    (refused,), _ = prepare(bench(SMALL), SMALL)
    assert isinstance(refused, Refusal)
    assert refused.status == "wrong"
    assert refused.facts["rel_error"] > 0.1


def test_sustained_work_leaves_the_cache_behind_between_two_uses_of_a_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(SMALL, problem=Gemm(512, 512, 512, "fp32"), mode="sustained")
    one = bench(case, l2_bytes=8 << 20)
    monkeypatch.setattr(one.sampler, "estimate", lambda launch, **_: 1e-4)
    (ready,), _ = prepare(one, case)
    assert isinstance(ready, Ready)
    assert ready.subject.launches > ready.subject.sets
    assert (ready.subject.sets - 1) * set_bytes(case.problem) >= 2 * (8 << 20)


def test_a_cold_burst_uses_no_set_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench(SMALL)
    monkeypatch.setattr(one.sampler, "estimate", lambda launch, **_: 1e-5)
    (ready,), _ = prepare(one, SMALL)
    assert isinstance(ready, Ready)
    assert 2 <= ready.subject.launches <= ready.subject.sets


def test_cold_weights_are_others_at_each_launch_and_the_activations_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(SMALL, cache="weights-cold")
    one = bench(case)
    monkeypatch.setattr(one.sampler, "estimate", lambda launch, **_: 1e-5)
    seen: list[tuple[int, int]] = []
    real = torch.mm

    def spy(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.append((a.data_ptr(), b.data_ptr()))
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", spy)
    (ready,), _ = prepare(one, case)
    assert isinstance(ready, Ready)
    assert 2 <= ready.subject.launches <= ready.subject.sets
    warmed: list[int] = []
    warm = ready.subject.warm
    ready.subject.warm = lambda: warmed.append(warm())  # type: ignore[arg-type]
    seen.clear()
    assert one.sampler.sample(ready.subject).seconds > 0
    activations, weights = zip(*seen, strict=True)
    assert len(set(activations)) == 1
    assert len(set(weights)) == len(weights) == ready.subject.launches
    (total,) = warmed  # the sum of the first operand
    assert float(total) == pytest.approx(float(one._arena.sets(GEMM, 1)[0].a.sum()))


@pytest.mark.parametrize("config", ["offset=1", "ld_multiple=64"])
def test_operands_that_are_stored_otherwise_take_no_memory_beside_the_arena(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(SMALL, problem=Gemm(64, 50, 33, "fp32"), config=config)
    one = bench(case)
    (inputs, results), made = one._arena._memory(case.problem), []
    real = torch.mm

    def spy(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        made.append((a, b, out))
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", spy)
    (ready,), _ = prepare(one, case)
    assert isinstance(ready, Ready)
    for a, b, out in made:
        for tensor, memory in ((a, inputs), (b, inputs), (out, results)):
            assert tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    a, b, out = made[-1]
    if config == "offset=1":
        assert {tensor.data_ptr() % 16 for tensor in (a, b, out)} == {4}
    else:
        assert (a.stride(), b.stride(), out.stride()) == ((64, 1), (1, 64), (64, 1))


def test_the_default_sweeps_leave_room_on_a_card_of_24_gb() -> None:
    """The arenas, the contexts of compiling processes, the flush buffer, and PyTorch's 1.5 GB fit.

    The remaining memory is for workspaces and results that libraries allocate.
    """
    card = known_machine("nvidia-geforce-rtx-4090")
    free = card.memory_bytes - 1.5e9
    arena = Arena("meta", card.l2_bytes, int(bench_module._SMALL_SHARE * free))
    for sweep in choose_sweeps(()).values():
        for case in sweep_cases(sweep, card):
            arena.reserve(case.problem, 512, case.shared_a, bench_module._storage_of(case))
    arenas = sum(map(sum, arena._needed.values()))
    taken = arenas + 2 * card.l2_bytes + compilers(card, 64) * 5e8
    assert 0.3 * free < taken < 0.7 * free


def named(one: TorchBench, *cases: Case) -> dict[str, str]:
    return {
        case.id: facts["kernel"]
        for case, facts in one.kernel_columns(cases, lambda ids, seconds: None)
    }


def test_a_cpu_names_its_kernels_while_it_prepares() -> None:
    one = bench(SMALL)
    (ready,), _ = prepare(one, SMALL)
    assert isinstance(ready, Ready)
    assert "gemm" in ready.facts["kernel"] or "matmul" in ready.facts["kernel"]
    known = {SMALL.id: History(facts=ready.facts)}
    (again,) = one.prepare([SMALL], known, lambda ids, seconds: None)
    assert isinstance(again, Ready)
    assert "kernel" not in again.facts  # known kernels are not traced again


def test_a_case_whose_kernels_cannot_be_named_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(launch: object) -> list[object]:
        raise RuntimeError("the profiler is not permitted")

    monkeypatch.setattr(bench_module, "cpu_tracer", lambda: nullcontext(refuse))
    (ready,), _ = prepare(bench(SMALL), SMALL)
    assert isinstance(ready, Ready)
    assert ready.facts["kernel"] == ""


def test_a_gpu_s_cases_share_one_session_and_lost_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second launch cannot be prepared, and the records of the third are lost."""
    sizes = (64, 96, 128, 160)
    cases = [replace(SMALL, problem=Gemm(m, 64, 64, "fp32")) for m in sizes]
    one = bench(*cases)
    one.gpu = 0
    real = one._launch
    sessions: list[int] = []

    def launch(case: Case, implementation: Any, sets: int) -> Any:
        if case is cases[1]:
            raise ValueError("no such config")
        return real(case, implementation, sets)

    def trace(launches: Iterable[Callable[[], object]]) -> list[list[Kernel] | None]:
        sessions.append(len([launch() for launch in launches]))
        return [[Kernel("gemm", 1e-6)], [], None, [Kernel("other", 1e-6)]]

    monkeypatch.setattr(one, "_launch", launch)
    monkeypatch.setattr(one, "recover_from", lambda error: ("error", str(error)))
    monkeypatch.setattr(bench_module, "trace_gpu", trace)
    assert named(one, *cases) == {cases[0].id: "gemm", cases[1].id: "", cases[3].id: "other"}
    assert sessions == [4]

    def poisoned(error: Exception) -> tuple[str, str]:
        raise PoisonedError("illegal memory access")

    monkeypatch.setattr(one, "recover_from", poisoned)
    with pytest.raises(PoisonedError):
        named(one, *cases)


def test_what_a_process_died_of_together_is_done_one_by_one() -> None:
    other = replace(SMALL, problem=Gemm(96, 64, 64, "fp32"))
    one = bench(SMALL, other)
    one.careful = {SMALL.id}
    results, visited = prepare(one, SMALL, other)
    assert len(results) == 2
    assert visited == [(other.id,), (SMALL.id,), (other.id,)]


def test_a_compiler_that_fails_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench(SMALL)

    def fail(cases: object) -> None:
        raise RuntimeError("no space left on device")

    implementation = implementations()[SMALL.implementation]
    monkeypatch.setattr(implementation, "compile_ahead", fail)
    monkeypatch.setattr(
        bench_module, "implementations", lambda: {SMALL.implementation: implementation}
    )
    (ready,), _ = prepare(one, SMALL)
    assert isinstance(ready, Ready)


def test_the_canary_has_its_place_even_among_small_cases() -> None:
    one = bench(SMALL)
    canary = one.canary()
    assert canary is not None
    assert canary.key == CANARY
    assert one.sampler.sample(canary).seconds > 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), "oom"),
        (torch.OutOfMemoryError("CUDA out of memory."), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "oom"),
        (RuntimeError("no kernel image"), "error"),
    ],
)
def test_failures_have_a_status(error: Exception, status: str) -> None:
    assert bench(SMALL).recover_from(error)[0] == status


def test_cold_results_that_a_library_allocates_rotate_on_a_gpu() -> None:
    conv = Conv.parse("2,8,8,8,8,3,3,1,1,1,1,fp32")
    allocating = replace(SMALL, problem=conv, implementation=library_for(conv, CPU))
    cases = [SMALL, allocating, replace(allocating, cache="warm")]
    one = bench(*cases)
    one.gpu = 0  # makes the bench rotate results as on a GPU
    results, _ = prepare(one, *cases)
    rotate = [
        isinstance(ready.subject.launch, RotatingLaunch)
        for ready in results
        if isinstance(ready, Ready)
    ]
    assert rotate == [False, True, False]
    subject = results[1].subject  # type: ignore[union-attr]
    sample = one.sampler.sample(subject)
    assert sample.hidden
    assert subject.samples
