"""Recordings over a made-up bench, whole with plan, machine and software, to be merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.machine import Machine, cpu_machine, known_machine
from sweeps.planning.plan import PlanEntry
from sweeps.schema import SCHEMA
from sweeps.store import read_run, write_run
from sweeps.timing.sampler import PROTOCOL
from tests.support.runs import a_run, carry

CPU = cpu_machine({"fp32": 1e11}, 3e10, 2)
H200 = known_machine("nvidia-h200")


def record(
    folder: Path, cases: Sequence[PlanEntry], seconds: float = 1e-4, machine: Machine = CPU,
    anchors: Sequence[PlanEntry] = (), gpu: int | None = None, **bench: Any,
) -> Path:  # fmt: skip
    """Measure cases that take ``seconds`` times their M."""
    folder.mkdir(parents=True)
    write_run(
        folder,
        {
            "schema": SCHEMA, "protocol": PROTOCOL, "published": False,
            "run": "2026-01-02T03:04:05Z", "machine": machine.to_json(),
            "software": {"torch": "2.11.0", "driver": "580.1"},
            "anchors": [entry.to_json() for entry in anchors],
            "plan": {
                "budget_s": 1e5, "left_s": 0.0, "shards": 1, "sweeps": ["fake"], "left_out": {},
                "recorded_elsewhere": [], "cases": [entry.to_json() for entry in cases],
            },
        },
    )  # fmt: skip
    run = a_run(folder, list(cases), seconds=seconds, gpu=gpu, **bench)
    run.anchors, run.anchor_options = anchors, {"seconds": 0.1}
    assert carry(replace(run, place=gpu, names_kernels=False)) == ("done", [])
    return folder


def change(folder: Path, **parts: Any) -> None:
    """Replace parts of a run.json."""
    write_run(folder, {**read_run(folder), **parts})


def place(folder: Path, gpus: Sequence[dict[str, Any]], hosts: Sequence[str] = ()) -> None:
    """Say which GPUs a recording is of: in its run.json and, with nodes, beside its samples."""
    change(folder, gpus=[{k: v for k, v in gpu.items() if k != "hidden"} for gpu in gpus])
    places = [
        {**gpu, "id": gpu.get("id", gpu.get("hidden")), "host": host}
        for gpu, host in zip(gpus, hosts, strict=False)
    ]
    if places:
        (folder / "samples" / "places.json").write_text(json.dumps({"places": places}))
