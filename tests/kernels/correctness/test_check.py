"""Rows of ``kernels check`` for failures and for results that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.config import Config
from kernels.correctness import check
from kernels.correctness.check import CheckRow, check_all
from kernels.device import Device
from kernels.launch import Launch
from kernels.machine import cpu_machine
from kernels.problem import Gemm

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Fake:
    """Implementation that computes GEMMs with a given function."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def supports(self, problem: Any, machine: Any) -> str | None:
        return None

    def configs(self, problem: Any, machine: Any) -> list[Config | None]:
        return [None]

    def prepare(self, problem: Any, sets: Any, config: Any) -> Launch:
        return Launch(lambda index: self._compute(sets[index].a, sets[index].b), sets)


def checked(compute: Compute, monkeypatch: pytest.MonkeyPatch) -> CheckRow:
    """Return the row of a check of a GEMM that is computed with a given function."""
    monkeypatch.setattr(check, "all_implementations", lambda: {"fake": Fake(compute)})
    device = Device(cpu_machine({"fp32": 1.0}, 1.0, 1), "cpu")
    (row,) = check_all(["fake"], [Gemm(8, 8, 8, "fp32")], device)
    return row


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_error_that_is_not_finite_is_none(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    row = checked(lambda a, b: torch.full((8, 8), value), monkeypatch)
    assert (row.status, row.rel_error) == ("wrong", None)


@pytest.mark.parametrize("text", ["", " \n", "too large\nmore"])
def test_any_failure_becomes_a_row(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(text)

    row = checked(fail, monkeypatch)
    expected = "too large" if "large" in text else "no message"
    assert (row.status, row.message) == ("error", f"RuntimeError: {expected}")
