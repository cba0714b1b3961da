"""The baseline that is used only where somebody has installed it; here a stand-in has been."""

from __future__ import annotations

import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.validation.nvmatmulheuristics import heuristic_seconds
from kernels.machine import known_machine
from kernels.problem import Gemm, Problem
from tests.support.synthetic import H100

GEMMS: list[Problem] = [Gemm(64, 128, 256, "bf16"), Gemm(8, 8, 8, "bf16", "tn")]


class Gpu(Enum):
    H100_SXM = 9000


class Interface:
    """Answers with the product of the sizes; the second layout with nothing."""

    def __init__(self, target: Any, precision: str, flags: Any) -> None:
        assert precision == "TST"
        self.handle: int | None = 1

    def createHardwareDescriptor(self) -> str:  # noqa: N802
        return "device"

    def setHardwarePredefinedGpu(self, device: str, gpu: Gpu) -> None:  # noqa: N802
        assert (device, gpu) == ("device", Gpu.H100_SXM)

    def destroyHardwareDescriptor(self, device: str) -> None:  # noqa: N802
        assert device == "device"

    def get_with_mnk(
        self, m: int, n: int, k: int, layout: str, count: int, device: str
    ) -> list[dict[str, float]]:
        return [{"runtime": float(m * n * k)}] if layout == "row-major nt" else []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        NvMatmulHeuristicsInterface=Interface,
        NvMatmulHeuristicsTarget=SimpleNamespace(GENERIC=0),
        NvMatmulHeuristicsFlags=SimpleNamespace(PERF_MODEL_BASED_AUTO_TUNING=8),
        NvMatmulHeuristicsNvidiaGpu=Gpu,
        NvMatmulHeuristicsMatmulLayout={
            "NT_ROW_MAJOR": "row-major nt", "TN_ROW_MAJOR": "row-major tn"
        },
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "nvMatmulHeuristics", module)


@pytest.mark.usefixtures("installed")
def test_each_problem_has_the_time_of_its_best_kernel() -> None:
    found = heuristic_seconds(H100, "bf16", GEMMS)
    assert found is not None
    assert found.tolist() == pytest.approx([64 * 128 * 256, float("nan")], nan_ok=True)


@pytest.mark.usefixtures("installed")
def test_what_it_does_not_know_is_none() -> None:
    assert heuristic_seconds(known_machine("nvidia-v100-sxm2-16gb"), "fp16", GEMMS) is None
    assert heuristic_seconds(H100, "tf32", GEMMS) is None
    assert heuristic_seconds(H100, "bf16", [Gemm(8, 8, 8, "bf16", "nt", 4)]) is None


def test_where_it_is_not_installed_there_is_no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvMatmulHeuristics", None)
    assert heuristic_seconds(H100, "bf16", GEMMS) is None
