"""Combine a machine's runs with the same PyTorch and driver into one recording.

The recording of a folder combines the run in it, called the folder's own run, with the machine's
other runs. Each case is taken from one run. Older runs, which are kept in the subfolder ``runs``,
are used too, because a newer run may be shorter or disturbed. If several runs timed a case, these
rules choose the time, the most important rule first:

1. a time with an interval is better than a time without an interval;
2. a time from a quieter run is better;
3. a time that has converged is better;
4. the newer time is better.

A case whose result was wrong in the folder's own run stays marked as wrong, unless that run is left
out. Hand-written kernels change with the checkout, so they are only taken from the folder's own
run. Unusable runs are left out. If all runs are unusable, only the folder's own run is read, and no
advice is based on it. A run whose speed differs by more than 10% from that of the quietest run is
left out, because it was probably measured on another machine with the same name, or on the same
machine in another state.
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
from kernels.common.counts import counted
from kernels.common.errors import UserError
from sweeps.folding.health import NOISY, UNUSABLE, VERDICTS, health_sentence
from sweeps.schema import IDENTITY
from sweeps.store import differing_software

_LARGE_ERROR = 0.15  # smallest median error of held-out predictions at which a report warns
_AS_FAST = 0.10  # largest median difference between two runs of one machine in one state
_MIN_COMMON = 6  # fewest common cases that show whether two runs are equally fast
_RANKS = ["not_wrong", "no_time", "no_interval", "noise", "unconverged", "age"]
"""Columns that rows are sorted by in ascending order, the most important column first."""


def load_runs(folder: Path) -> Recording:
    """Load a folder's run, combined with the machine's other runs as this module describes.

    Other runs that cannot be read are left out.

    Raises:
        UserError: if the folder's own run cannot be read.
    """
    # 1. Choose the usable runs that are as fast as the best of them.
    folder_run = load(folder)
    if folder_run.public:
        return folder_run
    usable = usable_runs(folder_run)
    if not usable:
        return folder_run
    best, *others = usable
    recordings = [best, *(other for other in others if _is_as_fast(best, other))]
    if len(recordings) == 1 and best is folder_run:
        return folder_run
    # 2. Combine them. The result has the run.json of the run that most rows come from.
    rows = _best_rows(recordings, folder_run)
    counts = rows["run"].value_counts()
    parts = []
    for recording in recordings:
        parts += [part for part in recording.parts if counts.get(part.run["run"], 0)]
    main = max(recordings, key=lambda recording: counts.get(recording.run["run"], 0))
    # Only the damaged lines of the folder's own measurements.csv are reported.
    return replace(main, folder=folder, rows=rows, damaged=folder_run.damaged, parts=tuple(parts))


def usable_runs(folder_run: Recording) -> list[Recording]:
    """Return a machine's usable runs with the same PyTorch and driver as the given run.

    The given run is included if it is usable. The quietest run comes first.
    """
    runs = [folder_run, *_other_runs(folder_run)]
    usable = [recording for recording in runs if not recording.unusable]
    # Runs are named after their start, so this puts the newest first. The second sort is stable: it
    # keeps that order among equally quiet runs.
    usable.sort(key=lambda recording: recording.run["run"], reverse=True)
    usable.sort(key=lambda recording: _noise_rank(recording.run))
    return usable


def why_unusable(folder: Path) -> str:
    """Return why no advice can be based on a folder's runs, or "" if advice is possible.

    Raises:
        UserError: if the folder's own run cannot be read.
    """
    health = load_run(folder).get("health") or {}
    if health.get("verdict") != UNUSABLE or not load_runs(folder).unusable:
        return ""
    reasons = health["reasons"]  # the worst reason comes first
    worst_reason = f" ({reasons[0]})" if reasons else ""
    return f"the run in {folder} is unusable{worst_reason}"


def _is_as_fast(first: Recording, second: Recording) -> bool:
    """Return True unless the speeds of two runs are known to differ by more than 10%.

    Hand-written kernels are not compared, because they change with the checkout.
    """
    first_rows = library_rows(first.ok)
    second_rows = library_rows(second.ok)
    first_times = dict(zip(_identities(first_rows), first_rows["time_us"], strict=True))
    second_times = dict(zip(_identities(second_rows), second_rows["time_us"], strict=True))
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
    """Return the identity of each row's case; columns that do not apply are empty."""
    identity = rows[list(IDENTITY)].astype(object)
    return list(identity.where(identity.notna(), "").itertuples(index=False, name=None))


def _other_runs(folder_run: Recording) -> Iterator[Recording]:
    """Yield the machine's other runs with the same PyTorch and driver, each run only once.

    If the given run is itself in a subfolder ``runs``, no other run is found.
    """
    # 1. Find the machine's folder: the folder of the given run, or a folder next to it.
    slug = folder_run.machine.slug
    own_folder = folder_run.folder
    if own_folder.name in ("", ".."):  # the paths "." and ".." do not end in the folder's name
        own_folder = own_folder.resolve()
    machine_folder = own_folder.with_name(slug)
    # 2. Load the runs in it.
    yielded_names = {folder_run.run["run"]}
    for folder in (machine_folder, *machine_folder.glob("runs/*")):
        if folder == own_folder or not (folder / "measurements.csv").exists():
            continue
        try:
            run = load_run(folder)
            is_same_machine = run["machine"]["slug"] == slug
            is_new = run["run"] not in yielded_names
            other_software = differing_software(run["software"], folder_run.run["software"])
            if not is_same_machine or not is_new or other_software:
                continue
            recording = load(folder)
        except (UserError, KeyError, TypeError, AttributeError):
            # Another version of Rooftile wrote the folder, or it is damaged or not a recording.
            continue
        yielded_names.add(run["run"])
        yield recording


def _best_rows(recordings: Sequence[Recording], folder_run: Recording) -> pd.DataFrame:
    """Return the best row of each case; ``recordings`` are sorted, the best run first."""
    # 1. Collect all rows. Hand-written kernels are only taken from the folder's own run.
    rows = pd.concat(
        [
            recording.rows if recording is folder_run else library_rows(recording.rows)
            for recording in recordings
        ],
        ignore_index=True,
    )
    # 2. Rank them by the rules in this module's docstring. Among equally quiet runs the newest
    #    comes first, so the position of a run serves as its age.
    ages = {recording.run["run"]: age for age, recording in enumerate(recordings)}
    noise = {recording.run["run"]: _noise_rank(recording.run) for recording in recordings}
    # A wrong result in the folder's own run goes first, so that no other run's time replaces it.
    ranks = pd.DataFrame(
        {
            "not_wrong": (rows["status"] != "wrong") | (rows["run"] != folder_run.run["run"]),
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


def _noise_rank(run: Mapping[str, Any]) -> int:
    """Return the rank of a run's health; quiet is 0, and an unknown verdict ranks as noisy."""
    verdict = (run.get("health") or {}).get("verdict", NOISY)
    return VERDICTS.index(verdict) if verdict in VERDICTS else VERDICTS.index(NOISY)


def health_lines(recording: Recording, error: float = 0.0) -> list[str]:
    """Return the first lines of a report: how reliable the times are, and the runs they come from.

    ``error`` is the model's median relative error on held-out cases; 0 if unknown.

    Raises:
        UserError: if the folder's own run cannot be read.
    """
    # 1. Say how reliable the times are.
    lines = []
    if not recording.health and not recording.public:
        lines.append("Health: not judged, because the recording predates the health check.")
    elif recording.health:
        lines.append(health_sentence(recording.run))
    # An imported table may assign times to wrong shapes. Our own measurements are only noisy.
    if recording.public and error >= _LARGE_ERROR:
        lines.append(
            f"Predictions of held-out cases have a median error of {error:.0%}; check that the "
            "imported times belong to the right shapes."
        )
    if recording.damaged:
        count = len(recording.damaged)
        verb = "was" if count == 1 else "were"
        lines.append(f"{counted(count, 'damaged line')} of measurements.csv {verb} left out.")
    # 2. Name the runs if there are several, and say why the folder's own run is left out.
    if len(recording.parts) > 1:
        counts = recording.ok["run"].value_counts()
        for part in recording.parts:
            name = part.run["run"]
            verdict = (part.run.get("health") or {}).get("verdict", "not judged")
            count = int(counts.get(name, 0))
            verb = "comes" if count == 1 else "come"
            lines.append(
                f"{counted(count, 'measured time')} {verb} from the run of {name} ({verdict})."
            )
    own_run = recording.run if recording.public else load_run(recording.folder)
    if recording.parts and own_run["run"] not in {part.run["run"] for part in recording.parts}:
        reason = _why_left_out(recording.folder)
        lines.append(f"The run of {own_run['run']} is left out, because {reason}.")
    return lines


def _why_left_out(folder: Path) -> str:
    """Return why :func:`load_runs` uses no row of a folder's own run, as a clause."""
    own_run = load(folder)
    if own_run.unusable:
        return "it is unusable"
    best = usable_runs(own_run)[0]
    if not _is_as_fast(best, own_run):
        return f"its speed differs by more than {_AS_FAST:.0%} from that of the best run"
    return "better runs have all its cases"


def health_reasons(recording: Recording) -> list[str]:
    """Return the reasons why a run was judged noisy or unusable, as sentences."""
    reasons = recording.health.get("reasons", ())
    return [f"{reason[:1].upper()}{reason[1:]}." for reason in reasons]
