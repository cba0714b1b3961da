"""``python -m analysis``: predict, recommend, validate, calibrate, plot, table, compare, …"""

from __future__ import annotations

# Importing a module of commands registers them.
import analysis.commands.ask
import analysis.commands.audit
import analysis.commands.compare
import analysis.commands.confirming
import analysis.commands.importing
import analysis.commands.record
import analysis.commands.report
import analysis.commands.rules
import analysis.commands.ship
import analysis.commands.validate  # noqa: F401
from analysis.commands.app import app
from kernels.cli import run

if __name__ == "__main__":
    run(app, "python -m analysis")
