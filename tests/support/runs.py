"""Runs over a made-up bench: their files, how they end, and their rows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from sweeps.planning.plan import PlanEntry
from sweeps.running.run import Run
from sweeps.running.supervisor import carry_out
from sweeps.schema import SCHEMA
from sweeps.store import write_run
from sweeps.timing.sampler import PROTOCOL
from tests.support.fakes import Silent


def a_run(
    path: Path, cases: list[PlanEntry], patience: float = 1e6, repeats: bool = False,
    **arguments: Any,
) -> Run:  # fmt: skip
    """``patience``: seconds after which a visit hangs; so many that a busy machine's never does."""
    folder = path
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    if not (folder / "run.json").exists():
        plan = {"budget_s": 1e6, "shards": 1, "cases": [entry.to_json() for entry in cases]}
        versions = {"schema": SCHEMA, "protocol": PROTOCOL, "machine": {}, "software": {}}
        write_run(folder, {**versions, "run": "now", "plan": plan})
    return Run(
        folder, cases, 1e6, bench="tests.support.fakes:FakeBench", arguments=arguments,
        min_patience=patience, repeats=repeats,
    )  # fmt: skip


def carry(run: Run) -> tuple[str, list[str]]:
    """How it ended, and what was said beside the announcement of its beginning."""
    said: list[str] = []
    end = carry_out(run, Silent(), said.append)
    return end, [text for text in said if not text.startswith(("Measuring ", "Naming ", "Timing "))]


def rows_of(folder: Path) -> dict[int, dict[str, str]]:
    lines = (folder / "measurements.csv").read_text(encoding="utf-8").splitlines()
    header = lines[0].split(",")
    return {int(row["m"]): row for row in csv.DictReader(lines[1:], fieldnames=header)}
