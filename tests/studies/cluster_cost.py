"""What a run on many GPUs costs beside measuring: in jobs, files and seconds.

    python -m tests.studies.cluster_cost [--gpus 1000] [--per-node 8] [--write FILE]

The default sweeps of an H200 are shared out; each worker's file of samples is made up, with the
events that a run writes. Then planning, folding, following and the fleet's report are timed on the
machine that the last line names. Nothing is measured on a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from analysis.commands.fleet import report_on
from kernels.machine import known_machine
from sweeps.cases.spec import all_sweeps
from sweeps.folding.fold import fold
from sweeps.planning.anchor_plan import anchor_cases
from sweeps.planning.choice import sweep_cases
from sweeps.planning.plan import PlanEntry, make_plan, read_plan
from sweeps.schema import PHASES, SCHEMA
from sweeps.sharing.following import Follower
from sweeps.store import Event, make_folder, read_run, samples_path, write_run
from sweeps.timing.sampler import PROTOCOL

BUDGET = 600.0
SAMPLES = 8


def events_of(
    shard: int, total: int, anchors: list[PlanEntry], planned: list[PlanEntry]
) -> Iterator[Event]:
    """What a worker writes, each median off by half a percent."""
    draw = random.Random(shard)
    gpu = shard - 1
    where = {"worker": f"{shard}/{total}", "gpu": gpu, "cost": 0.001}

    def sample(kind: str, entry: PlanEntry, **more: Any) -> Event:
        return {"event": kind, "case": entry.case.id, "s": 1e-4 * draw.gauss(1, 0.005), "n": 10,
                **more, "sm_mhz": 1980.0, "power_w": 650.0, "temp_c": 55.0, "throttled": [],
                "at": 1.8e9 + draw.random(), **where}  # fmt: skip

    yield {"event": "place", "case": "", "place": gpu, "at": 1.8e9, **where}
    yield {"event": "anchoring", "case": "", "at": 1.8e9, **where}
    for phase in PHASES:
        for entry in anchors:
            yield from (sample("anchor", entry, phase=phase) for _ in range(SAMPLES))
    for entry in planned:
        facts = {"kernel": "made_up", "rel_error": 1e-4}
        yield {"event": "facts", "case": entry.case.id, "facts": facts, "at": 1.8e9, **where}
        yield from (sample("sample", entry, r=r) for r in range(SAMPLES))
        yield {"event": "right", "case": entry.case.id, "at": 1.8e9, **where}
    yield {"event": "end", "case": "", "why": "done", "budget": BUDGET, "at": 1.8e9, **where}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of some work, and what it returns."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def look(folder: Path, gpus: int, per_node: int) -> dict[str, Any]:
    """Make the run's files up in a folder, and time what is done with them."""
    machine = known_machine("nvidia-h200")
    sweeps = {name: sweep_cases(sweep, machine) for name, sweep in all_sweeps().items()
              if sweep.default}  # fmt: skip
    planning, plan = timed(lambda: make_plan(sweeps, machine, BUDGET, gpus))
    anchors = anchor_cases(machine)
    places = [{"gpu": g, "id": f"{g:08x}", "node": g // per_node, "power_limit_w": 700.0,
               "sm_limit_mhz": 1980.0} for g in range(gpus)]  # fmt: skip
    make_folder(folder / "samples")
    write_run(folder, {
        "schema": SCHEMA, "protocol": PROTOCOL, "published": False, "run": "2026-11-23T00:00:00Z",
        "machine": machine.to_json(), "software": {"torch": "made up", "driver": "made up"},
        "anchors": [entry.to_json() for entry in anchors], "gpus": places,
        "plan": {"budget_s": BUDGET, "left_s": 0.0, "shards": gpus, "sweeps": sorted(sweeps),
                 "left_out": dict(plan.left_out), "recorded_elsewhere": [],
                 "cases": [entry.to_json() for entry in plan.planned]},
    })  # fmt: skip
    by_shard: dict[int, list[PlanEntry]] = {shard: [] for shard in range(1, gpus + 1)}
    for entry in plan.planned:
        by_shard[entry.shard or 1].append(entry)
    for shard, planned in by_shard.items():
        lines = (json.dumps(e, separators=(",", ":"))
                 for e in events_of(shard, gpus, anchors, planned))  # fmt: skip
        samples_path(folder, (shard, gpus)).write_text("\n".join(lines) + "\n", encoding="utf-8")
    follower = Follower(folder, read_plan(read_run(folder)["plan"]),
                        range(1, gpus + 1), gpus)  # fmt: skip
    following, _ = timed(follower.look)
    again, _ = timed(follower.look)
    folding, record = timed(lambda: fold(folder))
    reporting, _ = timed(lambda: report_on(folder, 0.05))
    seconds = Counter({entry.shard: 0.0 for entry in plan.planned})
    for entry in plan.planned:
        seconds[entry.shard] += entry.expected
    return {
        "gpus": gpus, "nodes": -(-gpus // per_node), "cases": record["counts"]["measured"],
        "gpus_with_cases": len(seconds), "longest_share_s": round(max(seconds.values()), 1),
        "all_shares_s": round(sum(seconds.values()), 1),
        "sample_files_mb": round(megabytes(folder / "samples"), 1),
        "other_files_mb": round(megabytes(folder) - megabytes(folder / "samples"), 1),
        "planning_s": round(planning, 2), "first_look_s": round(following, 2),
        "next_look_s": round(again, 3), "folding_s": round(folding, 2),
        "fleet_s": round(reporting, 2),
        "machine": f"{os.cpu_count()} threads of {cpu_name()}", "python": platform.python_version(),
    }  # fmt: skip


def megabytes(folder: Path) -> float:
    """Of all files in a folder and below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def cpu_name() -> str:
    """As Linux calls it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main(
    gpus: Annotated[int, typer.Option()] = 1000,
    per_node: Annotated[int, typer.Option()] = 8,
    write: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Print the costs as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(look(Path(folder) / "nvidia-h200", gpus, per_node), indent=1) + "\n"
    print(text, end="")
    if write is not None:
        write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
