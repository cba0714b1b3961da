"""Kernels compiled for architectures that are not here, in processes outside the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.compilecheck import ARCHES, Row, _complaints, _Job, _jobs
from kernels.config import TileConfig
from kernels.machine import machine_of_arch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Everything for Hopper, through the command."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels", "compile", "--arch", "sm_90", "--json"]
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    found: list[dict[str, Any]] = json.loads(answer.stdout)
    return found


def test_a_row_each_for_dtype_layout_and_alignment(rows: list[dict[str, Any]]) -> None:
    keys = {(row["dtype"], row["layout"], row["alignment"]) for row in rows}
    assert len(keys) == len(rows) == 4 * 4 * 2
    assert set(rows[0]) == {
        "kernel", "config", "dtype", "layout", "alignment", "arch", "mma", "registers",
        "spill_bytes", "shared_bytes", "ok", "message",
    }  # fmt: skip


def test_tensor_cores_are_used_and_fp32_is_exact(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["dtype"] == "fp32":
            assert row["mma"] == "fma"
        elif row["dtype"] in ("fp16", "bf16"):
            assert row["mma"] == "wgmma"
        else:
            assert row["mma"] in ("wgmma", "mma.sync")
        assert row["ok"]
        assert 0 < row["registers"] <= 255
        assert row["spill_bytes"] == 0
        assert row["shared_bytes"] <= 227 << 10


JOB = _Job("triton-tiled", TileConfig(), "bf16", "nt", 16, "sm_90")
GOOD: dict[str, Any] = {"mma": "wgmma", "registers": 200, "spill_bytes": 0, "shared_bytes": 1 << 17}


@pytest.mark.parametrize(
    ("job", "facts", "words"),
    [
        (JOB, {}, None),
        (JOB, {"mma": "mma.sync"}, "mma.sync instead of wgmma"),
        (JOB, {"spill_bytes": 8}, "8 bytes of registers are spilled"),
        (JOB, {"shared_bytes": 1 << 18}, "bytes of shared memory"),
        (replace(JOB, arch="sm_100"), {}, "instead of tcgen05"),
        (replace(JOB, arch="sm_80"), {"mma": "mma.sync"}, None),
        (replace(JOB, dtype="fp32"), {"mma": "mma.sync"}, "instead of fma"),
        (replace(JOB, dtype="tf32", layout="nn"), {"mma": "mma.sync"}, None),
        (replace(JOB, dtype="tf32"), {"mma": "mma.sync"}, "instead of wgmma"),
    ],
)
def test_what_counts_as_not_ok(job: _Job, facts: dict[str, Any], words: str | None) -> None:
    complaints = " ".join(_complaints(job, machine_of_arch(job.arch), {**GOOD, **facts}))
    assert complaints == "" if words is None else words in complaints


def test_all_architectures_of_the_contract_have_jobs() -> None:
    for arch in ARCHES:
        assert len(_jobs(arch, every_candidate=False)) == 32
        assert len(_jobs(arch, every_candidate=True)) > 100


def test_a_row_says_everything() -> None:
    assert Row.__doc__ is not None


AHEAD = """
import triton
from kernels import tiled
from kernels.compilecheck import _TargetDriver
from kernels.machine import machine_of_arch
from kernels.operands import random_operands
from kernels.problem import Gemm
from kernels.registry import all_implementations

if __name__ == "__main__":
    machine = machine_of_arch("sm_90")
    triton.runtime.driver.set_active(_TargetDriver(machine))
    family = all_implementations()["triton-tiled"]
    specs = ("256,256,256,bf16", "255,256,77,fp16,tn", "64,1,64,fp32,nn,3")
    problems = [Gemm.parse(spec) for spec in specs]
    cases = [(problem, family.configs(problem, machine)[0]) for problem in problems]
    family.compile_ahead(cases)
    cache = tiled.matmul_tiled.device_caches[90][0]
    compiled = len(cache)
    for problem, config in cases:
        for call in family.calls(problem, random_operands(problem, "cpu"), config):
            call.warmup()
    print(compiled, len(cache))
"""


def test_what_is_compiled_ahead_is_what_a_launch_asks_for(tmp_path: Path) -> None:
    """Operands without memory must give the very keys that real operands give."""
    script = tmp_path / "ahead.py"
    script.write_text(AHEAD)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, str(script)], env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.stdout.split() == ["3", "3"], answer.stderr
