"""An attack: evil kernels in a whole run, with its real child, bench, clock and files."""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kernels.device import this_cpu
from kernels.machine import Machine, cpu_machine
from kernels.operation import Workload
from sweeps.cases.case import Case
from sweeps.planning.plan import PlanEntry
from sweeps.running.run import Run
from sweeps.running.supervisor import carry_out
from sweeps.schema import SCHEMA
from sweeps.store import write_run
from sweeps.timing.sampler import PROTOCOL
from tests.support.fakes import Silent


@functools.cache
def cpu() -> Machine:
    """This CPU with ceilings that nothing reaches, and a cache that is flushed quickly."""
    facts = cpu_machine(dict.fromkeys(this_cpu().machine.peaks, 1e15), 1e12, 2)
    return replace(facts, l2_bytes=1 << 20, memory_bytes=1 << 31)


def evil(name: str, problem: Workload, cache: str = "cold", mode: str = "burst") -> Case:
    return Case("attack", problem, f"evil-{name}", "", mode, cache)


def attack(
    folder: Path, cases: Iterable[Case], patience: float = 20.0
) -> dict[str, dict[str, str]]:
    """The rows of a run over the cases, by case."""
    planned = [PlanEntry(case, 0.01) for case in cases]
    (folder / "samples").mkdir(parents=True)
    plan = {"budget_s": 1e6, "shards": 1, "cases": [entry.to_json() for entry in planned]}
    versions = {"schema": SCHEMA, "protocol": PROTOCOL, "software": {}}
    write_run(folder, {**versions, "machine": cpu().to_json(), "run": "now", "plan": plan})
    arguments = {"machine": cpu(), "device": "cpu", "gpu": None}
    run = Run(
        folder, planned, 1e6, "tests.support.evil:evil_bench", arguments, min_patience=patience
    )
    carry_out(run, Silent(), lambda text: None)
    with open(folder / "measurements.csv", encoding="utf-8", newline="") as file:
        return {Case.from_columns(row).id: row for row in csv.DictReader(file)}
