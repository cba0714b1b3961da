"""Collect a machine's recordings and profiled training steps, and judge the rules by them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.recordings.imported import PLACE, import_again, is_complete
from analysis.recordings.load import (
    PUBLISHED,
    Recording,
    find_recording,
    load,
    load_run,
    recorded_machines,
)
from analysis.recordings.runs import usable_runs
from analysis.rules.judge import NOT_MEASURED, Evidence, RuleResult, judge_all
from analysis.rules.tensor_cores import TimedStep, model_rules, read_profiled_steps
from kernels.common.aliases import slug_meant
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, target
from kernels.machine import Machine, known_machines


@dataclass(frozen=True)
class RuleInputs:
    """Recordings and profiled training steps of one machine, for judging the rules.

    Attributes:
        recordings: one or more recordings with the same machine, PyTorch and driver.
        steps: profiled training steps, at most one for each model and dtype.
        folder: folder of the machine's sweeps, to which the verdicts are written; it may not exist
            yet.
    """

    recordings: Sequence[Recording]
    steps: Sequence[TimedStep]
    folder: Path

    @property
    def machine(self) -> Machine:
        """Machine of all recordings."""
        return self.recordings[0].machine

    @property
    def public(self) -> bool:
        """True if the recordings were imported; few rules can be tested with an import."""
        return self.recordings[0].public

    @property
    def caption(self) -> str:
        """Caption of the first recording, with the dates of all recordings; imports have none."""
        dates = {date for recording in self.recordings for date in recording.dates}
        return self.recordings[0].caption(sorted(dates))


def rule_inputs(machine: str | None, results: Path = RESULTS) -> RuleInputs:
    """Collect the recordings and the profiled steps by which rules are judged on a machine.

    Only recordings with the same machine, PyTorch and driver as the newest recording are used.
    Profiled steps come from the folders of these recordings.

    Args:
        machine: name of the machine, or an unambiguous part of the name; None for the machine that
            was measured last.
        results: folder of all results; its subfolder ``rules`` has the measurements for rules.

    Raises:
        UserError: if the name of the machine is unknown or ambiguous, or if its results are missing
            or cannot be read.
    """
    # 1. Read all usable runs of the machine's folders. If a folder has no usable run, keep its
    # unusable recording, so that the results can say so.
    recordings: list[Recording] = []
    for folder in _recording_folders(machine, results):
        recording = load(folder)
        if recording.public:
            recordings.append(recording)
        else:
            recordings += usable_runs(recording) or [recording]
    # 2. Keep the recordings with the machine, PyTorch and driver of the newest recording.
    newest = max(recordings, key=lambda recording: _time_of_change(recording.folder))
    recorded_slug = newest.machine.slug
    kept = [
        recording
        for recording in recordings
        if recording.machine.slug == recorded_slug and _versions(recording) == _versions(newest)
    ]
    steps: dict[tuple[str, str], TimedStep] = {}
    for recording in sorted(kept, key=lambda recording: _time_of_change(recording.folder)):
        for step in read_profiled_steps(recording.folder):
            # A step in the folder of a newer recording replaces that of an older recording.
            steps[step.name, step.dtype] = step
    # 3. Verdicts are written next to the sweeps, even if only measurements for rules are kept.
    parents = (results, results / PUBLISHED, results / PLACE)
    sweep_folders = [recording.folder for recording in kept if recording.folder.parent in parents]
    verdict_folder = sweep_folders[0] if sweep_folders else results / recorded_slug
    return RuleInputs(kept, list(steps.values()), verdict_folder)


def _recording_folders(machine: str | None, results: Path) -> list[Path]:
    """Return the folders of a machine's measurements for rules and of its sweeps, if they exist.

    A published or imported recording is never mixed with a user's own measurements.

    Raises:
        UserError: if the name of the machine is unknown or ambiguous, or if neither folder exists.
    """
    # 1. Find the machine: the named one, or the one that was measured last.
    slug = ""
    if machine is not None:
        recorded = recorded_machines(results / "rules") | recorded_machines(results)
        slug = slug_meant(machine, [*known_machines(), *sorted(recorded)])
    elif runs := [*results.glob("*/run.json"), *results.glob("rules/*/run.json")]:
        slug = max((path.parent for path in runs), key=_time_of_change).name
    # 2. Find its folders. A recording that is not directly in the folder of results is published or
    # imported.
    rules_folder = _find_folder(slug, results / "rules")
    sweeps_folder = _find_folder(slug, results)
    if sweeps_folder is not None and sweeps_folder.parent != results:
        if rules_folder is None:
            # A published recording has its measurements for rules next to it.
            rules_folder = _find_folder(slug, sweeps_folder.parent / "rules")
        else:
            sweeps_folder = None
    folders = [folder for folder in (rules_folder, sweeps_folder) if folder is not None]
    if not folders:
        scope = f" of machine {slug!r}" if slug else ""
        raise UserError(
            f"there are no results{scope} to judge rules by; run {target('rules', 'record')} first."
        )
    return folders


def _time_of_change(folder: Path) -> float:
    return (folder / "run.json").stat().st_mtime


def _find_folder(slug: str, results: Path) -> Path | None:
    return find_recording(slug, results) if slug in recorded_machines(results) else None


def _versions(recording: Recording) -> tuple[Any, ...]:
    return tuple(recording.run["software"].get(name) for name in ("torch", "driver"))


def judge_inputs(inputs: RuleInputs) -> list[RuleResult]:
    """Judge every rule by the recordings and the profiled steps, and return the results.

    Raises:
        UserError: if a rounds.csv or the predictions of an import cannot be read.
    """
    evidence = [
        Evidence.from_unusable(recording)
        if recording.unusable
        else Evidence.from_recording(recording)
        for recording in inputs.recordings
    ]
    return judge_all(evidence, model_rules(inputs.steps))


def imported_rules(results: Path) -> list[dict[str, Any]]:
    """Return one document per complete import, with verdicts on the rules that the import can test.

    Raises:
        UserError: if no complete import has a verdict on a rule, or if an import cannot be read.
    """
    documents: list[dict[str, Any]] = []
    for folder in sorted((results / PLACE).glob("*")):
        if not is_complete(folder):
            continue
        run = load_run(folder)
        path = folder / "rules.json"
        try:
            rows = json.loads(path.read_bytes())
            judged = [row for row in rows if row["verdict"] != NOT_MEASURED]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path} cannot be read. {import_again(folder)}") from None
        documents.append(
            {
                "machine": folder.name,
                "name": run["machine"]["name"],
                "source": run["public"]["source"],
                "package": run["public"]["package"],
                "rules": judged,
            }
        )
    if not any(document["rules"] for document in documents):
        raise UserError(
            f"no imported table has verdicts on rules; run {target('import', 'import')} first."
        )
    return documents
