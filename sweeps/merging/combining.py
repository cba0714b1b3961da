"""Write the run.json, the plan and the samples of a merged recording.

A merged recording looks like a run with shards: the i-th of N recordings becomes the i-th shard,
whose worker name is ``i/N``. The merged plan has every case once, as planned by the first recording
that has the case.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.machine import Machine
from sweeps.merging.numbering import merged_gpus, numbers_of_gpus, renumbered
from sweeps.merging.source import MergeSource
from sweeps.planning.plan import PlanEntry
from sweeps.store import make_folder, write_run, write_whole


def write_merged(folder: Path, sources: Sequence[MergeSource]) -> None:
    """Write the run.json, the plan and the samples of the merged recording into a new folder.

    Raises:
        UserError: if the folder or a file cannot be written.
    """
    count = len(sources)
    gpu_numbers = numbers_of_gpus(sources)
    make_folder(folder / "samples")
    for i, (source, new_numbers) in enumerate(zip(sources, gpu_numbers, strict=True), 1):
        lines = _lines(source, _worker_name(i, count), new_numbers)
        write_whole(folder / "samples" / f"{i}-of-{count}.jsonl", b"".join(lines))
    write_run(folder, _merged_record(sources, gpu_numbers))


def _worker_name(number: int, count: int) -> str:
    return f"{number}/{count}"


def _lines(source: MergeSource, worker: str, new_numbers: Mapping[int, int]) -> Iterator[bytes]:
    """Yield the lines of a recording's sample file, with a new worker name and new GPU numbers.

    Damaged lines are copied unchanged, so that folding counts them.
    """
    for line in source.lines:
        if isinstance(line, bytes):
            yield line + b"\n"
        else:
            event = renumbered(line, worker, new_numbers)
            text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
            # A message may contain half of a surrogate pair, which UTF-8 cannot represent.
            yield text.encode(errors="replace") + b"\n"


def _merged_record(
    sources: Sequence[MergeSource], gpu_numbers: Sequence[Mapping[int, int]]
) -> dict[str, Any]:
    """Return the run.json of the merged recording as it is before folding."""
    count = len(sources)
    # All recordings have the same schema, protocol and versions of PyTorch and the driver. Other
    # software is described as in the first recording.
    first_facts = {name: sources[0].record[name] for name in ("schema", "protocol", "software")}
    record = {
        **first_facts,
        "published": False,
        "run": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _merged_machine(sources).to_json(),
        "merged": [
            {
                "worker": _worker_name(i, count),
                "run": source.record["run"],
                "health": source.record.get("health"),
            }
            for i, source in enumerate(sources, 1)
        ],
        "anchors": [entry.to_json() for entry in _anchors(sources)],
        "plan": _merged_plan(sources),
    }
    # The run.json of a CPU has no list of GPUs.
    gpus = merged_gpus(sources, gpu_numbers)
    return {**record, "gpus": gpus} if gpus else record


def _merged_machine(sources: Sequence[MergeSource]) -> Machine:
    """Return the first recording's machine; a CPU gets the highest ceilings of all recordings."""
    machines = [source.machine for source in sources]
    if machines[0].kind != "cpu":
        return machines[0]
    dtypes = dict.fromkeys(dtype for machine in machines for dtype in machine.peaks)
    # A recording may lack the peak of a dtype, and then does not count for it.
    peaks = {
        dtype: max(machine.peaks[dtype] for machine in machines if dtype in machine.peaks)
        for dtype in dtypes
    }
    bandwidth = max(machine.bandwidth for machine in machines)
    return replace(machines[0], peaks=peaks, bandwidth=bandwidth)


def _anchors(sources: Sequence[MergeSource]) -> list[PlanEntry]:
    anchors: dict[str, PlanEntry] = {}
    for source in sources:
        for entry in source.anchors:
            anchors[entry.case.id] = entry
    return list(anchors.values())


def _merged_plan(sources: Sequence[MergeSource]) -> dict[str, Any]:
    plans = [source.record["plan"] for source in sources]
    cases: dict[str, PlanEntry] = {}
    for i, source in enumerate(sources, 1):
        for entry in source.planned:
            cases.setdefault(entry.case.id, replace(entry, shard=i))
    case_counts = Counter(entry.case.sweep for entry in cases.values())
    elsewhere = {name for plan in plans for name in plan["recorded_elsewhere"]}
    return {
        "budget_s": sum(plan["budget_s"] for plan in plans),
        "left_s": 0.0,  # no time for advice, because a merged recording cannot be resumed
        "shards": len(sources),
        "sweeps": sorted({name for plan in plans for name in plan["sweeps"]}),
        "left_out": _left_out(sources, case_counts),
        # A sweep that one recording left out as recorded elsewhere may be in another recording.
        "recorded_elsewhere": sorted(elsewhere - case_counts.keys()),
        "cases": [entry.to_json() for entry in cases.values()],
    }


def _left_out(sources: Sequence[MergeSource], case_counts: Mapping[str, int]) -> dict[str, int]:
    """Estimate, for each sweep, how many of its cases are in none of the plans.

    A recording stores how many cases of a sweep it left out, but not which ones. For each
    recording, the number of cases that it planned is therefore added to the number that it left
    out. The largest of these sums is the estimated size of the sweep. The result is this size minus
    the number of the sweep's cases in the merged plan. Sweeps without missing cases are not listed.
    """
    totals: Counter[str] = Counter()
    for source in sources:
        source_counts = Counter(entry.case.sweep for entry in source.planned)
        for name, count in source.record["plan"]["left_out"].items():
            totals[name] = max(totals[name], source_counts[name] + count)
    unplanned = {name: total - case_counts.get(name, 0) for name, total in totals.items()}
    return {name: count for name, count in unplanned.items() if count > 0}
