"""Triton's launchers pass the requested grids, sizes, strides and pointers to the driver."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.common.program import ROOT
from kernels.config import HAND_WRITTEN
from tests.support.launching.launch import PROBLEMS


def test_every_kernel_has_shapes_to_be_launched_with() -> None:
    assert set(PROBLEMS) == set(HAND_WRITTEN)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, as Triton's launchers do")
def test_launchers_pass_on_what_was_asked_for(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "tests.support.launching.launch", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    assert {row["family"] for row in rows} == set(HAND_WRITTEN)
    assert not [row for row in rows if row["differs"]]
    kernels = {row["kernel"] for row in rows}
    assert {"matmul_tiled", "matmul_splitk", "add_parts", "matmul_streamk", "add_shared",
            "matmul_persistent", "matmul_persistent_plain", "conv_data",
            "conv_filter", "transpose"} <= kernels  # fmt: skip
    assert all(row["parameters"] >= 4 for row in rows)
