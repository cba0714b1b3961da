"""The bench on the real CPU: where kernels, operands, sampler and profiler meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.device import this_cpu
from kernels.machine import of_cpu
from kernels.problem import Gemm
from kernels.registry import library_for
from sweeps import bench as bench_module
from sweeps.arena import set_bytes
from sweeps.bench import TorchBench
from sweeps.case import Case
from sweeps.fold import CANARY
from sweeps.rounds import Ready, Refused

CPU = of_cpu(dict.fromkeys(this_cpu().machine.peaks, 1e11), 2e10, 2)
GEMM = Gemm(64, 64, 64, "fp32")
SMALL = Case("s", GEMM, library_for(GEMM, CPU))


def bench(*cases: Case, **machine: int) -> TorchBench:
    return TorchBench(replace(CPU, **machine), "cpu", None, cases)  # type: ignore[arg-type]


def prepare(one: TorchBench, *cases: Case) -> tuple[list[Ready | Refused], list[str]]:
    visited: list[str] = []
    return list(one.prepare(cases, {}, lambda case, seconds: visited.append(case))), visited


def test_a_case_is_checked_named_and_ready() -> None:
    (ready,), visited = prepare(bench(SMALL), SMALL)
    assert isinstance(ready, Ready)
    assert ready.facts["rel_error"] < 1e-5
    assert ready.subject.launches >= 1
    assert visited[0] == ""  # compiled together
    assert SMALL.id in visited


def test_what_cannot_be_timed_is_refused_with_a_sentence() -> None:
    huge = replace(SMALL, problem=Gemm(40_000, 40_000, 40_000, "fp32"))
    other = replace(SMALL, implementation="cublas")
    results, _ = prepare(bench(SMALL, huge, other, memory_bytes=1 << 32), huge, other)
    assert [(r.case, r.status) for r in results if isinstance(r, Refused)] == [
        (huge, "oom"), (other, "unsupported"),
    ]  # fmt: skip
    assert all(isinstance(r, Refused) and r.message.endswith(".") for r in results)


def test_a_wrong_result_has_no_time_and_says_how_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        real(a, b, out=out)
        out[-1, -1] += 100
        return out

    monkeypatch.setattr(torch, "mm", wrong)
    (refused,), _ = prepare(bench(SMALL), SMALL)
    assert isinstance(refused, Refused)
    assert refused.status == "wrong"
    assert refused.facts["rel_error"] > 0.1


def test_sustained_work_leaves_the_cache_behind_between_two_uses_of_a_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(SMALL, problem=Gemm(512, 512, 512, "fp32"), mode="sustained")
    one = bench(case, l2_bytes=8 << 20)
    monkeypatch.setattr(one.sampler, "estimate", lambda launch, warmed_up: 1e-4)
    (ready,), _ = prepare(one, case)
    assert isinstance(ready, Ready)
    assert ready.subject.launches > ready.subject.sets
    assert (ready.subject.sets - 1) * set_bytes(case.problem) >= 2 * (8 << 20)


def test_a_cold_burst_uses_no_set_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench(SMALL)
    monkeypatch.setattr(one.sampler, "estimate", lambda launch, warmed_up: 1e-5)
    (ready,), _ = prepare(one, SMALL)
    assert isinstance(ready, Ready)
    assert 2 <= ready.subject.launches <= ready.subject.sets


def test_cold_weights_are_others_at_each_launch_and_the_activations_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(SMALL, cache="weights-cold")
    one = bench(case)
    monkeypatch.setattr(one.sampler, "estimate", lambda launch, warmed_up: 1e-5)
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
    (total,) = warmed  # of the values that the launches read
    assert float(total) == pytest.approx(float(one._arena.sets(GEMM, 1)[0].a.sum()))


def test_without_names_there_are_still_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(launch: object) -> list[object]:
        raise RuntimeError("the profiler is not permitted")

    monkeypatch.setattr(bench_module, "trace_cpu", refuse)
    (ready,), _ = prepare(bench(SMALL), SMALL)
    assert isinstance(ready, Ready)
    assert "kernel" not in ready.facts


def test_being_careful_does_everything_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []

    def count(launch: object) -> list[object]:
        traced.append(1)
        return []

    monkeypatch.setattr(bench_module, "trace_cpu", count)
    other = replace(SMALL, problem=Gemm(96, 64, 64, "fp32"))
    one = bench(SMALL, other)
    one.careful = True
    results, visited = prepare(one, SMALL, other)
    assert len(results) == len(traced) == 2
    assert visited == [SMALL.id, other.id, SMALL.id, other.id]  # never several at once


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
    assert bench(SMALL).failure(error)[0] == status
