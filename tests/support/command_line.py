"""Command lines of the three packages, run in this process, which saves each a start-up."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest.mock import patch

import typer

import analysis.__main__ as analysis_main
import kernels.__main__ as kernels_main
import sweeps.__main__ as sweeps_main
from kernels.cli import run

ANALYSIS, KERNELS, SWEEPS = analysis_main.app, kernels_main.app, sweeps_main.app

_ABSURD = (
    r"(?i).*\b(?:nan|inf|infinity)\b.*|.*\d{25}.*|.*(?<!\w)-\d[\d.,]* ?(?:[mkMG]?B|[µmn]?s)\b.*"
)


class Said(NamedTuple):
    """What a command left: its exit code, what it printed, and warnings of libraries."""

    code: int
    out: str
    err: str
    warned: list[str]

    @property
    def faults(self) -> list[str]:
        """What no user should see: a raw exception, a library's warning, an absurd number."""
        text = self.out + self.err
        raw = re.findall(r"Traceback|.*for a traceback, add --debug.*", text)
        absurd = re.findall(_ABSURD, self.out)
        codes = [] if self.code in (0, 1, 2) else [f"exit {self.code}"]
        silent = ["fails without a word"] if self.code and not self.err.strip() else []
        return [*raw, *absurd, *codes, *silent, *self.warned]


def said(app: typer.Typer, *arguments: str) -> Said:
    """Run a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        patch.object(sys, "argv", ["x", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            run(app, "x")
        except SystemExit as end:
            code = end.code
    warned = [f"{w.category.__name__}: {w.message}" for w in caught]
    return Said(code, out.getvalue(), err.getvalue(), warned)


def command(app: typer.Typer, *arguments: object) -> subprocess.CompletedProcess[str]:
    """What a command line leaves, as if a process of its own had run it."""
    told = said(app, *map(str, arguments))
    return subprocess.CompletedProcess([*map(str, arguments)], told.code, told.out, told.err)


def analysis(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``python -m analysis``, in this process."""
    return command(ANALYSIS, *arguments)
