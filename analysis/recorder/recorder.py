"""Carry out the parts of a recording within a time budget, and say what is missing.

``record.json`` in the machine's folder keeps which commands have ended, and when the recording was
worked on. What a sweep still lacks is in its own run.json.
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
from kernels.common.errors import UserError
from kernels.common.program import FOLDER, ROOT, command_words
from sweeps.process import die_with_parent, undisturbed
from sweeps.store import (
    folder_for,
    other_software,
    read_run,
    set_aside,
    write_json,
    write_whole,
)

RunCommand = Callable[[Sequence[str], float], tuple[int | None, str]]
"""Runs a command within some seconds: its exit code, None if it did not end; and its output."""

_START_SECONDS = {"gpu": 15.0, "cpu": 5.0}
"""What a command takes before it does anything: importing PyTorch, a context, filled operands."""
_IMPORT_SECONDS = 4.0  # of these, until a command counts its own time
_END_SECONDS = 15.0  # the archive, and what a stopped command needs to fold its samples
_PATIENCE, _MIN_PATIENCE = 3.0, 90.0  # times the expected seconds; seconds, of other commands
_MIN_SECONDS = 5.0  # with less, a sweep is not begun
_GRACE = 6.0  # between asking a command to stop and ending it
_ANCHOR_SECONDS = {"gpu": 60.0, "cpu": 30.0}


@dataclass(frozen=True)
class RecorderPlace:
    """The machine and where its results lie, as ``sweeps doctor --name --json`` tells."""

    slug: str
    name: str
    kind: str
    folder: Path
    results: Path
    software: Mapping[str, str]

    def folder_of(self, step: RecorderStep) -> Path:
        """The folder that a step writes to."""
        return folder_for(self.results / step.place, self.slug) if step.place else self.folder

    @property
    def folders(self) -> list[Path]:
        """All folders of the machine, its main one first."""
        places = [folder_for(self.results / place, self.slug) for place in PLACES]
        return [self.folder, *places]


@dataclass
class RecorderState:
    """What ``record.json`` says."""

    path: Path
    slices: list[dict[str, Any]] = field(default_factory=list)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, place: RecorderPlace) -> RecorderState:
        """The state of a folder; a new one where there is none that can be gone on with."""
        path = place.folder / "record.json"
        try:
            document = json.loads(path.read_bytes())
            return cls(path, list(document["slices"]), dict(document["ended"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(path)

    def write(self, place: RecorderPlace) -> None:
        """Write it whole."""
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
    """Run ``-m command``; its exit code (None: the time was over before it ended), its output.

    What it says on stderr is passed on. A command whose time is over is asked to stop, as a batch
    system asks, and folds what it has.
    """
    process = subprocess.Popen(
        [*interpreter, *command_words(command)],
        cwd=FOLDER,
        stdout=subprocess.PIPE,
        text=True,
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
    """Ask a command to stop, end it and all that it started, and return what it had printed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return output


class Recorder:
    """One slice of a recording."""

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
        """
        Args:
            place: the machine.
            parts: what to record, in order.
            budget: seconds that this slice may take in all.
            device: the options that pick the device.
            note: prints a line.
            run: runs a command within some seconds; see :func:`run_command`.
            now: the host's clock, in seconds.
            began: when the budget began, by ``now``; None: now.
        """
        self._place = place
        self._parts = parts
        self._now = now
        self._deadline = (now() if began is None else began) + budget
        self._device = list(device)
        self._note = note
        self._run = run
        self._set_aside_other_software()
        self._state = RecorderState.read(place)

    def _set_aside_other_software(self) -> None:
        """What another PyTorch or driver measured makes room before anything new is written."""
        folder = self._place.folder
        if not (folder / "run.json").exists():
            return
        why = other_software(read_run(folder)["software"], self._place.software)
        if why:
            self._note(f"{why}. The old recording is kept in {set_aside(folder)}.")

    def record(self) -> Path:
        """Go on with what is not done until the time is over; returns the archive.

        Whatever ends it, an interrupt included, the archive has what is there.
        """
        began = self._now()
        place, state = self._place, self._state
        place.folder.mkdir(parents=True, exist_ok=True)
        current: dict[str, Any] = {"began": _utc(), "steps": []}
        anchored = bool(state.slices) and (place.folder / "measurements.csv").exists()
        state.slices.append(current)
        try:
            if anchored:
                current["anchors"] = self._anchors()
            for step in self._open_steps():
                if self._fits(step, first=not current["steps"]):
                    current["steps"].append(step.name)
                    self._carry_out(step)
        finally:
            with undisturbed():
                current["seconds"] = round(self._now() - began, 1)
                state.write(place)
                archive = write_archive(place.results, place.folders)
        return archive

    def missing(self) -> list[str]:
        """A sentence for each part that is not complete."""
        sentences = []
        for part in self._parts:
            missing = [text for step in self._steps(part) if (text := self._lacks(step))]
            if missing:
                sentences.append(f"{part.name}: {'; '.join(missing)}")
        return sentences

    def can_resume(self) -> bool:
        """Whether another call would do more than try what failed."""
        return any(not self._failed(step) for step in self._open_steps())

    def plan(self) -> list[str]:
        """A line for each part: what it is for, what it should take, what of it is done."""
        kind = self._place.kind
        return [
            f"{part.name:14} {part_seconds(part, kind):5.0f} s  {part.purpose}"
            + (" (done)" if not any(map(self._lacks, self._steps(part))) else "")
            for part in self._parts
            if self._steps(part)
        ] + [total_line(self._parts, kind)]

    # --- What is there --------------------------------------------------------------------------

    def _steps(self, part: RecorderPart) -> list[RecorderStep]:
        return [step for step in part.steps if step.expected(self._place.kind) is not None]

    def _open_steps(self) -> Iterator[RecorderStep]:
        """What can still be done: every step for its time, sweeps with what time is left, and last
        what failed in an earlier slice, because it may fail or hang again.
        """
        steps = [step for part in self._parts for step in self._steps(part)]
        failed = [step for step in steps if self._failed(step)]
        steps = [step for step in steps if step not in failed]
        for step in steps:
            if self._lacks(step) and not self._used_up(step):
                yield step
        for step in steps:
            if self._open_cases(step)[0] and not self._failed(step):
                yield step
        yield from failed

    def _failed(self, step: RecorderStep) -> bool:
        """Whether a step's command failed, or took its whole time without ending, if it is none
        that can be resumed.
        """
        ended = self._state.ended.get(step.name)
        if ended is None or ended["finished"]:
            return ended is not None and bool(ended["exit"])
        return not step.sweeps and ended["seconds"] >= (step.expected(self._place.kind) or 0.0)

    def _used_up(self, step: RecorderStep) -> bool:
        """Whether a sweep has used its share of time: the steps after it come first now."""
        return bool(step.sweeps) and self._seconds_left(step) < _MIN_SECONDS

    def _seconds_left(self, step: RecorderStep) -> float:
        """The rest of the seconds that a step should take, over all slices."""
        used = self._state.ended.get(step.name, {}).get("seconds", 0.0)
        return (step.expected(self._place.kind) or 0.0) - used

    def _lacks(self, step: RecorderStep) -> str:
        """What of a step is not there yet; empty if it is done."""
        ended = self._state.ended.get(step.name)
        if ended is None:
            return f"{step.name} was not started"
        if not ended["finished"]:
            return f"{step.name} did not finish in time"
        if ended["exit"]:
            return f"{step.name} failed with exit code {ended['exit']}"
        remaining, left_out = self._open_cases(step)
        if remaining:
            return f"{step.name} has {remaining} open cases"
        return f"{step.name} left out {left_out} cases that do not fit its time" if left_out else ""

    def _open_cases(self, step: RecorderStep) -> tuple[int, int]:
        """Cases of a step's sweeps that are planned and not measured, and those not planned."""
        folder = self._place.folder_of(step)
        if not step.sweeps or not (folder / "run.json").exists():
            return 0, 0
        run = read_run(folder)
        counts, left_out = run.get("sweeps", {}), run["plan"].get("left_out", {})
        names = dict.fromkeys(step.sweeps)
        remaining = sum(counts[name]["open"] for name in names if name in counts)
        return remaining, sum(left_out.get(name, 0) for name in names)

    # --- Doing it -------------------------------------------------------------------------------

    @property
    def _left(self) -> float:
        return self._deadline - _END_SECONDS - self._now()

    def _fits(self, step: RecorderStep, first: bool) -> bool:
        """Whether there is time to begin a step.

        A sweep that is stopped goes on in another slice. Another command that is stopped leaves
        nothing, so it needs the time that it should take; as a slice's first, it may try anyway.
        """
        if step.sweeps or first:
            return self._left > _START_SECONDS[self._place.kind]
        return self._left > (step.expected(self._place.kind) or 0.0)

    def _carry_out(self, step: RecorderStep) -> None:
        place, left = self._place, self._left
        expected = step.expected(place.kind) or 0.0
        self._note(f"{step.name}: about {expected:.0f} s, {left:.0f} s are left …")
        command = self._command(step)
        # A command that hangs costs its own time, not that of all that comes after it.
        limit = min(left, max(_PATIENCE * expected, _MIN_PATIENCE))
        if step.sweeps:
            limit = left
            seconds = expected if self._used_up(step) else self._seconds_left(step)
            stop_after = max(left - _IMPORT_SECONDS, 1.0)
            command += ["--budget", f"{seconds:.0f}s", "--stop-after", f"{stop_after:.0f}s"]
        began = self._now()
        code, output = self._run(command, limit)
        took = self._now() - began
        before = self._state.ended.get(step.name, {})
        self._state.ended[step.name] = {
            "finished": code is not None,
            "exit": code,
            "at": _utc(),
            "seconds": round(before.get("seconds", 0.0) + took, 1),
        }
        if step.output and output.strip():
            # Tracebacks have paths, and a path may have a user's name.
            told = output.replace(str(ROOT), ".").replace(str(Path.home()), "~")
            write_whole(place.folder / step.output, told)
        self._state.write(place)
        if code:
            self._note(f"{step.name} ended with exit code {code}.")

    def _command(self, step: RecorderStep) -> list[str]:
        place = self._place
        words = {"slug": place.folder_of(step).name, "results": str(place.results)}
        command = [word.format(**words) for word in step.command]
        if step.command[0] in ("sweeps", "analysis") and "--results" not in command:
            command += ["--results", str(place.results / step.place)]
        return command + (self._device if step.on_device else [])

    def _anchors(self) -> dict[str, Any] | None:
        """Whether this is still the machine of the earlier slices, at the same speed."""
        command = ["sweeps", "doctor", "--again", "--json", "--results", str(self._place.results)]
        limit = min(_ANCHOR_SECONDS[self._place.kind], self._left / 2)
        code, output = self._run([*command, *self._device], limit)
        if code:
            return None
        try:
            report: dict[str, Any] = json.loads(output)
        except ValueError:  # stopped before it had an answer
            return None
        self._note(report["sentence"])
        return report


def total_line(parts: Sequence[RecorderPart], kind: str) -> str:
    """What all parts should take together, the starts of their commands included."""
    steps = [step for part in parts for step in part.steps if step.expected(kind) is not None]
    seconds = sum(step.expected(kind) or 0.0 for step in steps)
    starts = _START_SECONDS[kind] * len(steps)
    total = f"{'in all':14} {seconds + starts:5.0f} s"
    return f"{total}, {starts:.0f} of them to start {len(steps)} commands"


def part_seconds(part: RecorderPart, kind: str) -> float:
    """What a part should take on a kind of machine."""
    return sum(step.expected(kind) or 0.0 for step in part.steps)


def select_parts(parts: Sequence[RecorderPart], names: Sequence[str]) -> list[RecorderPart]:
    """The named parts, in their own order; all if none is named.

    Raises:
        UserError: a part is not known.
    """
    known = [part.name for part in parts]
    for name in names:
        if name not in known:
            raise UserError(f"part {name!r} is not known; use one of {', '.join(known)}.")
    return [part for part in parts if not names or part.name in names]


def _utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
