"""Carry out the parts of a recording within a time budget, and say what is missing.

A slice is what one call of ``analysis record`` records.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.recorder.archive import write_archive
from analysis.recorder.parts import PLACES, RecorderPart, RecorderStep
from kernels.common.counts import counted
from kernels.common.documents import NOT_NEGATIVE, Each, Maybe, Number, misfit
from kernels.common.errors import UserError
from kernels.common.program import FOLDER, ROOT, command_words
from sweeps.process import die_with_parent, undisturbed
from sweeps.store import (
    differing_software,
    make_folder,
    read_run,
    set_aside,
    why_software_differs,
    write_json,
    write_whole,
)

RunCommand = Callable[[Sequence[str], float], tuple[int | None, str]]
"""Function that runs a command with a time limit in seconds.

It returns the exit code and the text on stdout. The exit code is None if the command was stopped at
the limit."""

_START_SECONDS = {"gpu": 15.0, "cpu": 5.0}
"""Seconds that a command needs to import PyTorch, create a context and fill operands before it
begins to measure, by kind of machine."""

_IMPORT_SECONDS = 4.0
"""Seconds from the start of ``sweeps run`` until its ``--stop-after`` begins to count."""

_END_SECONDS = 15.0
"""Seconds reserved for writing the archive, and for a stopped command to save its results."""

_PATIENCE = 3.0
"""Time limit of a command that does not measure sweeps, as a multiple of its expected time."""

_MIN_PATIENCE = 90.0
"""Minimum time limit, in seconds, of a command that does not measure sweeps.

A limit is shorter only if less time is left in the slice."""

_MIN_SECONDS = 5.0
"""Seconds below which the rest of a sweep's expected time counts as used up."""

_GRACE = 6.0
"""Seconds between asking a command to stop and killing it."""

_ANCHOR_SECONDS = {"gpu": 60.0, "cpu": 30.0}
"""Time limit, in seconds, for re-timing anchor cases (cases of an earlier slice), by kind of
machine."""


_STATE = {
    "software": Each(str),
    "slices": [dict],
    "ended": Each({"finished": bool, "exit": Maybe(Number(whole=True)), "seconds": NOT_NEGATIVE}),
}
"""Format of the fields of ``record.json`` that are read back."""


@dataclass(frozen=True)
class RecorderPlace:
    """A machine and the folders of its results.

    Attributes:
        kind: ``gpu`` or ``cpu``.
        folder: the machine's main folder in ``results``.
        results: folder of all machines' results.
        software: version of each software component, by its name.
    """

    slug: str
    name: str
    kind: str
    folder: Path
    results: Path
    software: Mapping[str, str]

    def folder_of(self, step: RecorderStep) -> Path:
        """Return the folder that a step writes the machine's results to."""
        return self.results / step.place / self.slug if step.place else self.folder

    @property
    def folders(self) -> list[Path]:
        """All folders that steps may write to, the main folder first."""
        places = [self.results / place / self.slug for place in PLACES]
        return [self.folder, *places]


@dataclass
class RecorderState:
    """Content of ``record.json``.

    Attributes:
        slices: one entry per call of ``analysis record``, with the start time, the duration in
            seconds and the names of the started steps. Entries after the first may also have
            ``anchors``: the report on re-timed cases of an earlier slice, or None without a report.
        ended: last outcome of each step's command, and the total seconds of all runs of the
            command, by the step's name.
    """

    path: Path
    slices: list[dict[str, Any]] = field(default_factory=list)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, place: RecorderPlace) -> RecorderState:
        """Read a recording's state.

        The state is empty if ``record.json`` is missing or damaged, or was written with a different
        PyTorch or driver version.
        """
        path = place.folder / "record.json"
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return cls(path)
        if misfit(document, _STATE) or differing_software(document["software"], place.software):
            return cls(path)
        return cls(path, document["slices"], document["ended"])

    def write(self, place: RecorderPlace) -> None:
        """Write the state, together with the software versions of ``place``."""
        document = {
            "schema": 1,
            "software": dict(place.software),
            "slices": self.slices,
            "ended": self.ended,
        }
        write_json(self.path, document)


def run_command(
    interpreter: Sequence[str], command: Sequence[str], limit: float
) -> tuple[int | None, str]:
    """Run a command with the given interpreter, as :data:`RunCommand` describes.

    At the limit, the command gets SIGTERM, so that it can save what it has measured. If it is still
    running after :data:`_GRACE` seconds, it is killed.
    """
    process = subprocess.Popen(
        [*interpreter, *command_words(command)],
        cwd=FOLDER,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",  # a test may print bytes that are not text
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        output, _ = process.communicate(timeout=max(limit, 0.1))
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, _stop(process)
    except BaseException:
        _stop(process)
        raise


def _stop(process: subprocess.Popen[str]) -> str:
    """Ask a command to stop, kill what is left of its process group, and return its output."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return output


class Recorder:
    """Record one slice of a recording.

    The methods raise a UserError if a run.json or plan.jsonl is damaged or cannot be read.
    """

    def __init__(
        self,
        place: RecorderPlace,
        parts: Sequence[RecorderPart],
        budget: float,
        device: Sequence[str],
        note: Callable[[str], None],
        run: RunCommand,
        now: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        """Read the saved state of the recording.

        The slice may take ``budget`` seconds from the time ``began`` on the clock ``now``. Without
        ``began``, the budget starts at the current time. ``device`` has the options that select the
        device, and ``note`` prints a line for the user.
        """
        self._place = place
        self._parts = parts
        self._now = now
        self._deadline = (now() if began is None else began) + budget
        self._device = list(device)
        self._note = note
        self._run = run
        # Why the folder's run cannot be resumed; empty if it can be. Only record() sets such a run
        # aside, because plan() must not change any file.
        self._why_set_aside = ""
        if (place.folder / "run.json").exists():
            self._why_set_aside = why_software_differs(
                read_run(place.folder)["software"], place.software
            )
        self._state = RecorderState.read(place)

    def record(self) -> Path:
        """Carry out unfinished steps within the budget, and return the path of the archive.

        A recording made with a different PyTorch or driver version is first set aside, so that
        versions are not mixed. If an earlier slice has measured cases and enough time is left, some
        of these cases are re-timed to show whether the machine is as fast as before.
        ``record.json`` and the archive are written even if an error or an interrupt ends a step.

        Raises:
            UserError: if a folder cannot be made, or a file cannot be written.
            OSError: if a file of the old recording cannot be moved, or a file cannot be read for
                the archive.
        """
        began = self._now()
        place = self._place
        if self._why_set_aside:
            old_run = set_aside(place.folder)
            self._note(f"{self._why_set_aside}. The old recording is kept in {old_run}.")
            self._why_set_aside = ""
        slices = self._state.slices
        make_folder(place.folder)
        # Anchors are cases of an earlier slice that are timed again to compare this slice with it.
        has_anchors = bool(slices) and (place.folder / "measurements.csv").exists()
        this_slice: dict[str, Any] = {"began": _utc(), "steps": []}
        slices.append(this_slice)
        try:
            if has_anchors:
                this_slice["anchors"] = self._retime_anchors()
            for step in self._open_steps():
                if self._fits(step, first=not this_slice["steps"]):
                    this_slice["steps"].append(step.name)
                    self._carry_out(step)
        finally:
            with undisturbed():  # another interrupt must not cut off the archive
                this_slice["seconds"] = round(self._now() - began, 1)
                self._state.write(place)
                archive = write_archive(place.results, place.folders)
        return archive

    def missing(self) -> list[str]:
        """Return a line for each unfinished step, with the step's part and the reason."""
        return [
            f"{part.name}: {reason}"
            for part in self._parts
            for step in self._steps(part)
            if (reason := self._unfinished_reason(step))
        ]

    def can_resume(self) -> bool:
        """Return True if another slice would do more than repeat failed steps."""
        return any(not self._failed(step) for step in self._open_steps())

    def plan(self) -> list[str]:
        """Return a line for each part: its expected seconds, its purpose and whether it is done.

        A part without steps for this kind of machine is left out. The last line gives the total of
        all parts.
        """
        kind = self._place.kind
        lines = []
        for part in self._parts:
            steps = self._steps(part)
            if not steps:
                continue
            is_unfinished = any(self._unfinished_reason(step) for step in steps)
            suffix = "" if is_unfinished else " (done)"
            seconds = part_seconds(part, kind)
            lines.append(f"{part.name:14} {seconds:5,.0f} s  {part.purpose}{suffix}")
        return [*lines, total_line(self._parts, kind)]

    # --- State of the steps ---------------------------------------------------------------------

    def _steps(self, part: RecorderPart) -> list[RecorderStep]:
        return [step for step in part.steps if step.expected(self._place.kind) is not None]

    def _open_steps(self) -> Iterator[RecorderStep]:
        """Yield the unfinished steps, in the order in which they should run.

        A step that measures sweeps comes after the other steps if it has used up its expected time.
        Steps that failed in an earlier slice come last, because they may fail or hang again.
        """
        all_steps = [step for part in self._parts for step in self._steps(part)]
        failed = [step for step in all_steps if self._failed(step)]
        promising = [step for step in all_steps if step not in failed]
        for step in promising:
            if self._unfinished_reason(step) and not self._used_up(step):
                yield step
        # The caller runs each step before it asks for the next one, so a step may have failed since
        # the loop above yielded it.
        for step in promising:
            unfinished, _ = self._count_open_cases(step)
            if unfinished and not self._failed(step):
                yield step
        yield from failed

    def _failed(self, step: RecorderStep) -> bool:
        """Return True if a step's command failed, or took its expected time without finishing.

        A stopped sweep has not failed: it can be resumed.
        """
        ended = self._state.ended.get(step.name)
        if ended is None:
            return False
        if ended["finished"]:
            return bool(ended["exit"])
        return not step.sweeps and ended["seconds"] >= (step.expected(self._place.kind) or 0.0)

    def _used_up(self, step: RecorderStep) -> bool:
        return bool(step.sweeps) and self._seconds_left(step) < _MIN_SECONDS

    def _seconds_left(self, step: RecorderStep) -> float:
        used = self._state.ended.get(step.name, {}).get("seconds", 0.0)
        return (step.expected(self._place.kind) or 0.0) - used

    def _unfinished_reason(self, step: RecorderStep) -> str:
        """Return a clause that says why a step is not done, or "" if it is done."""
        ended = self._state.ended.get(step.name)
        if ended is None:
            return f"{step.name} was not started"
        if not ended["finished"]:
            return f"{step.name} did not finish in time"
        if ended["exit"]:
            return f"{step.name} failed with exit code {ended['exit']}"
        unfinished, left_out = self._count_open_cases(step)
        if unfinished:
            return f"{step.name} has {counted(unfinished, 'unfinished case')}"
        if left_out:
            return f"{step.name} left out {counted(left_out, 'case')} for lack of time"
        return ""

    def _count_open_cases(self, step: RecorderStep) -> tuple[int, int]:
        """Count the unfinished cases of a step's sweeps, and the cases that the plan left out.

        An unfinished case needs more samples, a check or the names of its kernels.
        """
        folder = self._place.folder_of(step)
        if not step.sweeps or not (folder / "run.json").exists():
            return 0, 0
        run = read_run(folder)
        counts_by_sweep = run.get("sweeps", {})
        left_out_by_sweep = run["plan"].get("left_out", {})
        names = set(step.sweeps)  # a step may name a sweep twice
        # A sweep without a case in the plan has no counts.
        unfinished = sum(counts_by_sweep[name]["open"] for name in names & counts_by_sweep.keys())
        left_out = sum(left_out_by_sweep.get(name, 0) for name in names)
        return unfinished, left_out

    # --- Carrying out steps ---------------------------------------------------------------------

    @property
    def _left(self) -> float:
        """Seconds left for steps, without the seconds reserved for the end of the slice."""
        return self._deadline - _END_SECONDS - self._now()

    def _fits(self, step: RecorderStep, first: bool) -> bool:
        """Return True if enough time is left to begin a step.

        A sweep only needs the time to start, because another slice can resume it. Any other command
        loses its work if it is stopped, so its whole expected time must be left. The first step of
        a slice also needs only the time to start. Otherwise, calls with a small budget would never
        begin a long command.
        """
        if step.sweeps or first:
            return self._left > _START_SECONDS[self._place.kind]
        return self._left > (step.expected(self._place.kind) or 0.0)

    def _carry_out(self, step: RecorderStep) -> None:
        """Run a step's command within a time limit, and save the command's output and outcome."""
        # 1. Choose the time limit.
        place = self._place
        left = self._left
        expected = step.expected(place.kind) or 0.0
        needed = expected
        command = self._command(step)
        if step.sweeps:
            # A sweep stops by itself, so only the end of the slice limits it. Its budget is the
            # rest of its expected time. A sweep that has used up this time is only resumed if the
            # slice has time to spare, and then gets its whole expected time once more.
            limit = left
            budget = expected if self._used_up(step) else self._seconds_left(step)
            needed = budget
            stop_after = max(left - _IMPORT_SECONDS, 1.0)
            command += ["--budget", f"{budget:.0f}s", "--stop-after", f"{stop_after:.0f}s"]
        else:
            # A command that hangs must not use up the time of the steps after it.
            limit = min(left, max(_PATIENCE * expected, _MIN_PATIENCE))
        self._note(f"{step.name} takes about {needed:,.0f} s; {left:,.0f} s remain …")
        # 2. Run the command, and store how it ended.
        began = self._now()
        code, output = self._run(command, limit)
        took = self._now() - began
        earlier_seconds = self._state.ended.get(step.name, {}).get("seconds", 0.0)
        self._state.ended[step.name] = {
            "finished": code is not None,
            "exit": code,
            "at": _utc(),
            "seconds": round(earlier_seconds + took, 1),
        }
        # 3. Save the command's output and the state of the recording.
        if step.output and output.strip():
            # Tracebacks contain paths, and a path may contain a user's name.
            anonymous = output.replace(str(ROOT), ".").replace(str(Path.home()), "~")
            write_whole(place.folder / step.output, anonymous)
        self._state.write(place)
        if code:
            self._note(
                f"{step.name} failed with exit code {code}. Run the same command later to retry it."
            )

    def _command(self, step: RecorderStep) -> list[str]:
        place = self._place
        placeholders = {"slug": place.folder_of(step).name, "results": str(place.results)}
        command = [word.format(**placeholders) for word in step.command]
        # Other programs take no results folder, and some steps already name theirs.
        if step.command[0] in ("sweeps", "analysis") and "--results" not in command:
            command += ["--results", str(place.results / step.place)]
        return command + (self._device if step.on_device else [])

    def _retime_anchors(self) -> dict[str, Any] | None:
        """Re-time cases of an earlier slice, and say whether the machine is as fast as before.

        The time limit is at most half of the remaining time, so that steps get the other half.

        Returns:
            The report of ``sweeps doctor --again``; None if too little time is left, or if
            the command fails or is stopped early.
        """
        kind = self._place.kind
        limit = min(_ANCHOR_SECONDS[kind], self._left / 2)
        if limit <= _START_SECONDS[kind]:
            return None
        command = ["sweeps", "doctor", "--again", "--json", "--results", str(self._place.results)]
        code, output = self._run([*command, *self._device], limit)
        if code:
            return None
        try:
            report: dict[str, Any] = json.loads(output)
        except ValueError:  # the command was stopped before it printed its report
            return None
        self._note(report["sentence"])
        return report


def total_line(parts: Sequence[RecorderPart], kind: str) -> str:
    """Return a line with the expected seconds of all parts together, including command starts."""
    count = sum(step.expected(kind) is not None for part in parts for step in part.steps)
    start_seconds = _START_SECONDS[kind] * count
    total_seconds = start_seconds + sum(part_seconds(part, kind) for part in parts)
    total = f"{'in all':14} {total_seconds:5,.0f} s"
    return f"{total}, including {start_seconds:,.0f} s to start {counted(count, 'command')}"


def part_seconds(part: RecorderPart, kind: str) -> float:
    """Return the expected seconds of a part, without the starts of its commands."""
    return sum(step.expected(kind) or 0.0 for step in part.steps)


def select_parts(parts: Sequence[RecorderPart], names: Sequence[str]) -> list[RecorderPart]:
    """Return the named parts in the order of ``parts``, or all parts if no name is given.

    Raises:
        UserError: if a name does not belong to any part.
    """
    all_names = [part.name for part in parts]
    for name in names:
        if name not in all_names:
            raise UserError(f"part {name!r} is not known; use one of {', '.join(all_names)}.")
    return [part for part in parts if not names or part.name in names]


def _utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
