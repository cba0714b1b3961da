"""Run the commands of the analysis package: predict, recommend, audit, compare and others."""

from __future__ import annotations

# Importing a command module registers its commands with the app.
from analysis.commands import (  # noqa: F401
    ask,
    audit,
    compare,
    explain,
    export,
    fleet,
    importing,
    page,
    plot,
    record,
    report,
    rules,
    validate,
)
from analysis.commands.app import app as app
from kernels.cli import run

if __name__ == "__main__":
    run(app, f"python -m {__package__}")
