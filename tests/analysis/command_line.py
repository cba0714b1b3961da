"""Runs ``python -m analysis`` as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def analysis(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "analysis", *map(str, arguments)], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
