"""The wheel in an empty environment, pinned by ``constraints.txt``: built, installed and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from kernels.common.program import ROOT

MEASURING = ("torch", "transformers")
"""What audit and a sweep on a CPU need."""
QUESTION = ("predict", "--machine", "nvidia-h100-sxm", "--gemm", "8192,50257,768,bf16", "--json")


class Installed:
    """An environment and a folder to work in, neither of which knows the checkout."""

    def __init__(self, folder: Path) -> None:
        self.env, self.work = folder / "env", folder / "work"
        self.work.mkdir()
        venv.create(self.env, with_pip=True)
        # Not PYTHONPATH or anything else of whoever runs this.
        self.variables = {"PATH": f"{self.env / 'bin'}:{os.defpath}", "HOME": str(folder)}
        self.variables |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}

    def run(self, *command: str | Path, code: int = 0, cwd: Path | None = None) -> str:
        """Run a command of the environment; what it prints, on both streams if it fails."""
        program = self.env / "bin" / command[0]
        answer = subprocess.run(
            [program, *command[1:]], cwd=cwd or self.work, env=self.variables, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        words = " ".join(map(str, command))
        assert answer.returncode == code, f"{words} exits {answer.returncode}: {answer.stderr}"
        return answer.stdout if not code else answer.stdout + answer.stderr

    def install(self, *packages: str | Path) -> None:
        # Python compiles what is imported; pip would compile all there is.
        self.run("pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check",
                 "-c", ROOT / "constraints.txt", *packages)  # fmt: skip


def build(folder: Path) -> Path:
    """The wheel by way of a source distribution, in an environment whose packages are pinned."""
    code = "from setuptools import build_meta; build_meta.build_sdist('..')"
    source = folder / "source"
    copy_source(source)
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
         "--disable-pip-version-check", "--wheel-dir", str(folder), str(archive)],
        check=True, env={**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")},
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def copy_source(folder: Path) -> None:
    """What git tracks, or would: a build leaves folders behind where it works."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
