"""The command ``record`` as a process, on this machine or on a made-up GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from kernels.common.program import ROOT

FAKE = (sys.executable, str(ROOT / "tests" / "support" / "fake_gpu.py"))


def record(
    *arguments: str, interpreter: Sequence[str] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*interpreter, "-m", "analysis", "record", *arguments], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
