"""Tests of the names of known models, which are checked without importing PyTorch."""

from __future__ import annotations

import subprocess
import sys

from kernels.common.program import ROOT
from sweeps.capture.known import IMAGES, KNOWN
from sweeps.capture.known_names import POSITIONS


def test_they_are_those_of_the_known_models() -> None:
    assert POSITIONS.keys() == KNOWN.keys()
    assert {name for name, longest in POSITIONS.items() if longest is None} == {
        name for name, known in KNOWN.items() if known.takes == IMAGES
    }


def test_a_typo_is_answered_without_pytorch() -> None:
    code = (
        "import sys; from analysis.__main__ import app; from kernels.cli import run\n"
        "sys.argv[1:] = ['audit', 'gpt5', '--machine', 'h100']\n"
        "try: run(app, 'rooftile')\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "did you mean 'gpt2'" in result.stderr
    assert result.stdout.strip() == "False", result.stderr
