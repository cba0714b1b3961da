from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels
from kernels.common.errors import UserError
from kernels.machine import known_machine
from kernels.problem import Conv, Gemm
from sweeps.cases.case import Case
from sweeps.planning import compiling as compiling_module
from sweeps.planning.compiling import compile_cases, compilers, compiling, kernel_key

H200 = known_machine("nvidia-h200")


def gemm(m: int, implementation: str = "triton-tiled", config: str = "bm=64", **how: Any) -> Case:
    return Case("s", Gemm(m, 512, 512, "bf16", **how), implementation, config)


def test_sizes_share_a_kernel_where_triton_sees_no_difference() -> None:
    assert kernel_key(gemm(512)) == kernel_key(gemm(1024))
    others = [gemm(513), gemm(1), gemm(512, config="bm=128"), gemm(512, layout="nn"),
              gemm(512, "triton-splitk")]  # fmt: skip
    assert len({kernel_key(case) for case in [gemm(512), *others]}) == 6
    conv = Case("s", Conv.parse("8,64,28,28,64,3,3,1,1,1,1,bf16"), "triton-conv", "bm=64")
    assert kernel_key(conv) is not None
    assert kernel_key(gemm(512, "cublas", "")) is None
    assert kernel_key(gemm(512, "triton-tiled", "")) is None  # an unsupported problem
    for zero in ("bm=0", "bn=0", "bk=0"):
        assert kernel_key(gemm(512, config=zero)) is None  # an invalid config


def test_compiling_leaves_the_run_its_cores_and_the_card_its_memory() -> None:
    small = replace(H200, memory_bytes=8 << 30)
    assert compilers(H200, 16) == 12
    assert compilers(H200, 8) == 6
    assert compilers(H200, 2) == compilers(H200, 1) == compilers(H200, 0) == 0
    assert compilers(small, 16) == 0  # each process has a context of half a gigabyte on the card
    assert compilers(replace(H200, memory_bytes=24 << 30), 16) == 2


class Shares:
    """Stand-in for the compiling processes, which stores the cases of each."""

    def __init__(self) -> None:
        self.given: list[list[Case]] = []
        self.ended = 0

    def Process(self, target: Any, args: Any, **options: Any) -> Shares:  # noqa: N802
        assert target is compile_cases
        self.given.append(list(args[2]))
        return self

    def start(self) -> None:
        pass

    def kill(self) -> None:
        self.ended += 1

    def join(self) -> None:
        pass


def test_each_kernel_is_compiled_once_in_the_plan_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = Shares()
    monkeypatch.setattr(compiling_module, "get_context", lambda kind: shares)
    monkeypatch.setattr(compiling_module, "compilers", lambda machine, cores: 2)
    cases = [gemm(512), gemm(1024), gemm(513), gemm(512, "cublas", ""), gemm(1), gemm(2)]
    with compiling({"machine": H200, "gpu": 0}, cases):
        # The cases with 512 and 1024 rows share a kernel.
        assert shares.given == [[cases[0], cases[4]], [cases[2], cases[5]]]
        assert shares.ended == 0
    assert shares.ended == 2
    shares.given.clear()
    with compiling({"machine": H200, "gpu": None}, cases):  # a CPU times no Triton kernels
        assert shares.given == []
    monkeypatch.setattr(compiling_module, "compilers", lambda machine, cores: 0)
    with compiling({"machine": H200, "gpu": 0}, cases):  # no core is to spare
        assert shares.given == []


def test_what_cannot_be_compiled_is_left_to_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    class Family:
        def supports(self, problem: Gemm, machine: object) -> str | None:
            return "too large." if problem.m == 2 else None

        def parse_config(self, text: str) -> str:
            if text == "bm=7":
                raise UserError("bm=7 is no power of two.")
            return text

        def compile_ahead(self, cases: list[tuple[Gemm, str]]) -> None:
            ((problem, _),) = cases
            if problem.m == 3:
                raise RuntimeError("ptxas died")
            compiled.append(problem.m)

    monkeypatch.setattr(kernels, "implementations", lambda: {"triton-tiled": Family()})
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(compiling_module, "die_with_parent", lambda: None)
    monkeypatch.setattr(os, "nice", lambda by: by)
    missing = gemm(4, implementation="triton-splitk")
    invalid = gemm(4, config="bm=7")
    compile_cases(H200, 0, [gemm(1), gemm(2), gemm(3), missing, invalid, gemm(5)])
    assert compiled == [1, 5]


def test_a_process_that_cannot_use_the_gpu_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setattr(compiling_module, "compilers", lambda machine, cores: 1)
    with compiling({"machine": H200, "gpu": 0}, [gemm(512)]):
        pass
    assert capfd.readouterr().err == ""
