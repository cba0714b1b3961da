"""Fold a run's samples into its tables, its counts and its health, without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernels.common.errors import UserError
from kernels.machine import Machine
from sweeps.folding.anchor_rows import anchor_rows, steady_report, steady_rows
from sweeps.folding.case_rows import confirmed_table, fold_rows, rounds_table
from sweeps.folding.counts import count_by_sweep
from sweeps.folding.health import health
from sweeps.folding.history import checking_seconds, histories, spent_seconds
from sweeps.folding.raised_ceilings import raise_ceilings
from sweeps.folding.steadiness import canary_report, machine_speeds, repeats_report
from sweeps.planning.plan import PlanEntry
from sweeps.store import (
    START_OVER,
    folding,
    planning,
    read_events,
    read_run,
    write_anchors,
    write_confirmed,
    write_json,
    write_rounds,
    write_run,
    write_steady,
    write_table,
)

_FOLDED = Path("samples", "folded.json")  # file with the size of each sample file at the last fold
_MAX_DAMAGED = 0.1  # largest share of sample lines that may be damaged


def too_damaged(events: int, damaged: int) -> bool:
    """Return True if so many sample lines are damaged that the samples cannot be trusted.

    ``events`` and ``damaged`` are the numbers of intact and of damaged lines.
    """
    # One damaged line is always tolerated, because a crash may cut the last line.
    return damaged > max(1, _MAX_DAMAGED * (events + damaged))


def fold(folder: Path, written: Iterable[Path] | None = None) -> dict[str, Any]:
    """Fold all shards' samples into the run's tables and run.json. Return the content of run.json.

    Args:
        folder: the run's folder.
        written: sample files that the caller has finished writing. If the last fold has already
            read these files completely, the run is not folded again. If ``written`` is None, the
            run is always folded.

    Raises:
        UserError: if run.json or the plan cannot be read, too many sample lines are damaged, a file
            cannot be written, or another process is still planning or folding the run after 15
            minutes.
        OSError: if a sample file cannot be read.
    """
    with folding(folder):
        record = read_run(folder)
        if written is not None and _is_folded(folder, written):
            return record
        # 1. Read the plan and the samples. The files' sizes are read first, so that lines that are
        # appended in the meantime count as not folded.
        sizes = _sizes((folder / "samples").glob("*.jsonl"))
        planned = [PlanEntry.from_json(row) for row in record["plan"]["cases"]]
        events, damaged = read_events(folder)
        if too_damaged(len(events), len(damaged)):
            raise UserError(
                f"{folder} has too many damaged sample lines ({len(damaged):,}), so its tables "
                f"were not changed. For example, {damaged[0]} {START_OVER}"
            )
        # 2. Raise a CPU's ceilings to the highest values of the run.
        machine = Machine.from_json(record["machine"]) if record["machine"] else None
        speeds = machine_speeds(events)
        history_by_case = histories(events)
        ceiling_entries: dict[str, Any] = {}
        if machine is not None:
            raised = raise_ceilings(record, machine, events, planned, history_by_case)
            machine = raised.machine
            if raised.record is not None:
                raised_facts = {"peaks": dict(machine.peaks), "bandwidth": machine.bandwidth}
                ceiling_entries = {
                    "machine": {**record["machine"], **raised_facts},
                    "ceilings": raised.record,
                }
        # 3. Write the tables.
        rows = fold_rows(record["run"], planned, events, machine, speeds)
        write_table(folder, rows)
        write_rounds(folder, rounds_table(planned, history_by_case))
        write_confirmed(folder, confirmed_table(events, history_by_case))
        anchors = [PlanEntry.from_json(row) for row in record.get("anchors", ())]
        anchor_table = anchor_rows(record["run"], anchors, events, record.get("gpus", ()))
        if anchor_table:
            write_anchors(folder, anchor_table)
        steady_table = steady_rows(record["run"], anchors, events)
        if steady_table:
            write_steady(folder, steady_table)
        # 4. Count the cases and judge the run.
        statuses = [row["status"] for row in rows]
        folded = {
            **ceiling_entries,
            "counts": {
                "planned": len(planned),
                "measured": statuses.count("ok"),
                "not_reached": len(planned) - len(rows),
                **{name: statuses.count(name) for name in ("wrong", "oom", "unsupported", "error")},
                "damaged_lines": len(damaged),
            },
            "sweeps": count_by_sweep(planned, rows, history_by_case),
            "spent_s": round(spent_seconds(events), 3),
            "checking_s": round(checking_seconds(events), 3),
            "canary": canary_report(events),
            "repeats": repeats_report(history_by_case),
        }
        steady = steady_report(anchor_table)
        if steady:
            folded["steady"] = steady
        folded["health"] = health(
            {**record, **folded}, machine, planned, rows, events, speeds.values()
        )
        # 5. Update run.json. Other nodes may have changed it in the meantime, by planning or by
        # joining the run, so it is read again.
        with planning(folder):
            record = {**read_run(folder), **folded}
            write_run(folder, record)
        write_json(folder / _FOLDED, {"sizes": sizes})
        return record


def _sizes(paths: Iterable[Path]) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in paths if path.exists()}


def _is_folded(folder: Path, written: Iterable[Path]) -> bool:
    """Return True if the last fold has read everything in these sample files."""
    try:
        folded_sizes = json.loads((folder / _FOLDED).read_text(encoding="utf-8"))["sizes"]
        return all(folded_sizes.get(name) == size for name, size in _sizes(written).items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False  # the run was never folded, or the file is damaged
