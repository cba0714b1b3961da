"""All runs of one machine with the same software versions, combined into one recording.

Each case is taken from the best run that has it. A run that was set aside is still used, because a
later one may be shorter or disturbed. Between two times of a case, these rules decide in order:

1. a time with an interval is better than one without;
2. a time from a quieter run is better;
3. a time that has converged is better;
4. the newer time is better.

A case whose results were wrong in the folder's own run stays wrong. Hand-written kernels change
with the checkout, so they are only taken from the folder's own run. An unusable run counts only if
there is no other, and then no advice is given. A run that is not as fast as the best one is left
out, because it is of another machine with the same name or of a machine in another state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.recordings.load import Recording, library_rows, load, load_run
from kernels.common.errors import UserError
from sweeps.folding.health import UNUSABLE, VERDICTS, health_sentence
from sweeps.schema import IDENTITY
from sweeps.store import other_software

_LARGE_ERROR = 0.15
_AS_FAST = 0.10  # median difference up to which two runs are of one machine in one state
_MIN_COMMON = 6
_RANKS = ["not_wrong", "no_time", "no_interval", "noise", "unconverged", "age"]


def load_runs(folder: Path) -> Recording:
    """Load a folder's run together with the machine's other runs with the same software versions.

    Public tables consist of a single run. Another run that cannot be read is left out.

    Raises:
        UserError: if the folder's own run cannot be read.
    """
    # 1. Choose the runs that are usable, and as fast as the best one of them.
    own = load(folder)
    if own.public:
        return own
    usable = usable_runs(own)
    if not usable:
        return own
    best, *others = usable
    recordings = [best, *(other for other in others if _is_as_fast(best, other))]
    if len(recordings) == 1 and best is own:
        return own
    # 2. Combine them. The run that most rows come from stands for all of them.
    rows = _best_rows(recordings, own)
    counts = rows["run"].value_counts()
    parts = [
        part
        for recording in recordings
        for part in recording.parts
        if counts.get(part.run["run"], 0)
    ]
    main = max(recordings, key=lambda recording: counts.get(recording.run["run"], 0))
    return replace(main, folder=folder, rows=rows, damaged=own.damaged, parts=tuple(parts))


def usable_runs(own: Recording) -> list[Recording]:
    """Return a run and its machine's other runs with the same versions, except unusable ones.

    The quietest run comes first; of equally quiet runs, the newest.
    """
    usable = [recording for recording in (own, *_others(own)) if not recording.unusable]
    # A run is named after its time. Sorting by noise keeps the order of equally quiet runs.
    usable.sort(key=lambda recording: recording.run["run"], reverse=True)
    usable.sort(key=lambda recording: _noise(recording.run))
    return usable


def why_unusable(folder: Path) -> str:
    """Say why nothing should be advised from a folder's runs; empty if advice is possible."""
    health = load_run(folder).get("health") or {}
    if health.get("verdict") != UNUSABLE or not load_runs(folder).unusable:
        return ""
    return f"the run in {folder} is unusable ({'; '.join(health['reasons'])})"


def _is_as_fast(first: Recording, second: Recording) -> bool:
    """Return True if two runs are of one machine in one state, judged by the cases that both timed.

    Machines of one name may differ, as virtual ones do. If too few cases are in both runs, the
    canary GEMM decides. Two runs without a canary count as the same.
    """
    first_times = dict(zip(_identities(first.ok), first.ok["time_us"], strict=True))
    second_times = dict(zip(_identities(second.ok), second.ok["time_us"], strict=True))
    common = first_times.keys() & second_times.keys()
    first_canary = first.run.get("canary")
    second_canary = second.run.get("canary")
    if len(common) >= _MIN_COMMON:
        ratio = float(np.median([second_times[case] / first_times[case] for case in common]))
    elif first_canary and second_canary:
        ratio = second_canary["median_us"] / first_canary["median_us"]
    else:
        return True
    return abs(math.log(ratio)) <= math.log1p(_AS_FAST)


def _identities(rows: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Return what identifies each row's case, with an empty text where a column does not apply."""
    identity = rows[list(IDENTITY)].astype(object)
    return list(identity.where(identity.notna(), "").itertuples(index=False, name=None))


def _others(own: Recording) -> Iterator[Recording]:
    """Yield the machine's other runs with the same versions, which were set aside."""
    slug = own.machine.slug
    machine_folder = own.folder.with_name(slug)
    for folder in (machine_folder, *machine_folder.glob("runs/*")):
        if folder == own.folder or not (folder / "measurements.csv").exists():
            continue
        try:
            run = load_run(folder)
            is_same_machine = run["machine"]["slug"] == slug
            if is_same_machine and not other_software(run["software"], own.run["software"]):
                yield load(folder)
        except (UserError, KeyError, TypeError, AttributeError):
            continue  # a folder of another version, or of something else


def _best_rows(recordings: Sequence[Recording], own: Recording) -> pd.DataFrame:
    """Return each case once, from the best run that timed it, in the order of the runs."""
    # 1. Collect all rows. Hand-written kernels are only taken from the folder's own run.
    rows = pd.concat(
        [
            recording.rows if recording is own else library_rows(recording.rows)
            for recording in recordings
        ],
        ignore_index=True,
    )
    # 2. Rank them by the rules of this module, the best first. The age of a run is its position,
    #    because the newest of equally quiet runs comes first.
    ages = {recording.run["run"]: age for age, recording in enumerate(recordings)}
    noise = {recording.run["run"]: _noise(recording.run) for recording in recordings}
    # A wrong result in the folder's own run goes first, so that no other run's time replaces it.
    ranks = pd.DataFrame(
        {
            "not_wrong": (rows["status"] != "wrong") | (rows["run"] != own.run["run"]),
            "no_time": rows["status"] != "ok",
            "no_interval": rows["time_lo_us"].isna(),
            "noise": rows["run"].map(noise).astype(int),
            "unconverged": ~rows["converged"].fillna(False).astype(bool),
            "age": rows["run"].map(ages).astype(int),
        }
    )
    # 3. Keep the best row of each case.
    best_first = ranks.sort_values(_RANKS, kind="stable").index
    identity = pd.Series(_identities(rows)).loc[best_first]
    keep = best_first[~identity.duplicated().to_numpy()].sort_values()
    return rows.loc[keep].reset_index(drop=True)


def _noise(run: Mapping[str, Any]) -> int:
    """Return the rank of a run's verdict; a run that was never judged counts as noisy."""
    verdict = (run.get("health") or {}).get("verdict", "noisy")
    return VERDICTS.index(verdict) if verdict in VERDICTS else VERDICTS.index("noisy")


def health_lines(recording: Recording, error: float = 0.0) -> list[str]:
    """Say how far the times can be trusted and which runs they are from, for the head of a report.

    Args:
        recording: the recording.
        error: median error of predictions on held-out rows. Where it is large, times do not follow
            the shapes.
    """
    lines = []
    if not recording.health and not recording.public:
        lines.append("Health: not judged; the recording predates the check.")
    elif recording.health:
        lines.append(health_sentence(recording.run))
    if error >= _LARGE_ERROR:
        lines.append(
            f"Held-out predictions miss by {error:.0%} in the median: the times may belong to "
            "other shapes."
        )
    if count := len(recording.damaged):
        subject = "1 line" if count == 1 else f"{count} lines"
        present, past = ("is", "was") if count == 1 else ("are", "were")
        lines.append(f"{subject} of measurements.csv {present} damaged and {past} left out.")
    if len(recording.parts) > 1:
        counts = recording.ok["run"].value_counts()
        runs = []
        for part in recording.parts:
            name = part.run["run"]
            verdict = (part.run.get("health") or {}).get("verdict", "not judged")
            runs.append(f"{counts.get(name, 0)} of {name} ({verdict})")
        lines.append(f"Times come from {len(runs)} runs: {', '.join(runs)}.")
    own_run = recording.run if recording.public else load_run(recording.folder)
    if recording.parts and own_run["run"] not in {part.run["run"] for part in recording.parts}:
        lines.append(
            f"The run of {own_run['run']} is left out: another run is better and covers all its "
            "cases, or this one ran at another speed."
        )
    return lines


def health_reasons(recording: Recording) -> list[str]:
    """Say in sentences what made a run noisy or unusable, with likely causes."""
    reasons = recording.health.get("reasons", ())
    return [f"{reason[:1].upper()}{reason[1:]}." for reason in reasons]
