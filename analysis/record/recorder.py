"""Carry out the parts of a recording within a time, and say what is missing.

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

from analysis.record.archive import write_archive
from analysis.record.parts import Part, Step
from kernels.errors import UserError
from sweeps.process import die_with_parent
from sweeps.store import read_run, write_json, write_whole

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[[Sequence[str], float], tuple[int | None, str]]
"""Runs a command within some seconds: its exit code, None if it did not end; and its output."""

_START_SECONDS = {"gpu": 25.0, "cpu": 12.0}
"""What a command takes before it does anything: importing PyTorch, a context, filled operands."""
_END_SECONDS = 10.0  # the archive, and what a stopped command needs to fold its samples
_TRIES = 2  # of a command that fails
_GRACE = 6.0  # between asking a command to stop and ending it
_ANCHOR_SECONDS = {"gpu": 60.0, "cpu": 30.0}


@dataclass(frozen=True)
class Place:
    """The machine and where its results lie, as ``sweeps machine --json`` tells."""

    slug: str
    name: str
    kind: str
    folder: Path
    results: Path
    software: Mapping[str, str]

    def folder_of(self, step: Step) -> Path:
        """The folder that a step writes to."""
        return self.results / step.place / self.folder.name if step.place else self.folder


@dataclass
class State:
    """What ``record.json`` says."""

    path: Path
    slices: list[dict[str, Any]] = field(default_factory=list)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, place: Place) -> State:
        """The state of a folder; a new one where there is none, or of other software."""
        path = place.folder / "record.json"
        try:
            document = json.loads(path.read_bytes())
            if document["software"] == dict(place.software):
                return cls(path, list(document["slices"]), dict(document["ended"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nothing is there, or nothing that can be gone on with
        return cls(path)

    def write(self, place: Place) -> None:
        """Write it whole."""
        document = {"schema": 1, "software": dict(place.software), "slices": self.slices,
                    "ended": self.ended}  # fmt: skip
        write_json(self.path, document)


def run_command(
    interpreter: Sequence[str], command: Sequence[str], limit: float
) -> tuple[int | None, str]:
    """Run ``-m command``; its exit code (None: the time was over before it ended), its output.

    What it says on stderr is passed on. A command whose time is over is asked to stop, as a batch
    system asks, and folds what it has.
    """
    process = subprocess.Popen(
        [*interpreter, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip
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
        place: Place,
        parts: Sequence[Part],
        budget: float,
        device: Sequence[str],
        note: Callable[[str], None],
        run: Run,
        now: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        """
        Args:
            place: the machine.
            parts: what is wanted, in order.
            budget: seconds that this slice may take in all.
            device: the options that pick the device.
            note: tells a line.
            run: runs a command within some seconds; see :func:`run_command`.
            now: seconds of the host.
            began: moment of ``now`` from which the budget counts; None: this one.
        """
        self._place = place
        self._parts = parts
        self._now = now
        self._deadline = (now() if began is None else began) + budget
        self._device = list(device)
        self._note = note
        self._run = run
        self._state = State.read(place)

    def record(self) -> Path:
        """Go on with what is not done until the time is over; returns the archive."""
        state, place = self._state, self._place
        began = self._now()
        place.folder.mkdir(parents=True, exist_ok=True)
        current: dict[str, Any] = {"began": _utc(), "steps": []}
        try:
            if state.slices and (place.folder / "measurements.csv").exists():
                current["anchors"] = self._anchors()
            state.slices.append(current)
            for step in self._open_steps():
                if not self._fits(step, first=not current["steps"]):
                    continue  # a shorter one may still fit
                current["steps"].append(step.name)
                self._carry_out(step)
        finally:
            current["seconds"] = round(self._now() - began, 1)
            if current not in state.slices:
                state.slices.append(current)
            state.write(place)
        return write_archive(place.results, place.folder.name)

    def missing(self) -> list[str]:
        """A sentence for each part that is not complete."""
        sentences = []
        for part in self._parts:
            steps = [s for s in part.steps if s.expected(self._place.kind) is not None]
            lacking = [self._lacks(step) for step in steps]
            said = [text for text in lacking if text]
            if said:
                sentences.append(f"{part.name}: {'; '.join(said)}")
        return sentences

    def plan(self) -> list[str]:
        """A line for each part: what it is for, what it should take, what of it is done."""
        return [
            f"{part.name:14} {part_seconds(part, self._place.kind):5.0f} s  {part.purpose}"
            + (" (done)" if not any(map(self._lacks, self._steps(part))) else "")
            for part in self._parts
            if self._steps(part)
        ]

    # --- What is there --------------------------------------------------------------------------

    def _steps(self, part: Part) -> list[Step]:
        return [step for step in part.steps if step.expected(self._place.kind) is not None]

    def _open_steps(self) -> Iterator[Step]:
        for part in self._parts:
            for step in self._steps(part):
                tries = self._state.ended.get(step.name, {}).get("tries", 0)
                if self._lacks(step) and tries < _TRIES:
                    yield step

    def _lacks(self, step: Step) -> str:
        """What of a step is not there yet; empty if it is done."""
        ended = self._state.ended.get(step.name)
        if ended is None:
            return f"{step.name} was not begun"
        if not ended["finished"]:
            return f"{step.name} did not end in time"
        if ended["exit"]:
            return f"{step.name} failed with exit code {ended['exit']}"
        open_ = self._open_cases(step)
        return f"{step.name} has {open_} cases open" if open_ else ""

    def _open_cases(self, step: Step) -> int:
        folder = self._place.folder_of(step)
        if not step.sweeps or not (folder / "run.json").exists():
            return 0
        counts = read_run(folder).get("sweeps", {})
        return sum(counts[name]["open"] for name in step.sweeps if name in counts)

    # --- Doing it -------------------------------------------------------------------------------

    @property
    def _left(self) -> float:
        return self._deadline - _END_SECONDS - self._now()

    def _fits(self, step: Step, first: bool) -> bool:
        """Whether beginning a step is of use.

        A sweep goes on another time. Of another command nothing is left if it is stopped, so it
        needs the time that it should take; as a slice's first, it may try with what there is.
        """
        if step.sweeps or first:
            return self._left > _START_SECONDS[self._place.kind]
        return self._left > (step.expected(self._place.kind) or 0.0)

    def _carry_out(self, step: Step) -> None:
        place, left = self._place, self._left
        expected = step.expected(place.kind) or 0.0
        self._note(f"{step.name}: about {expected:.0f} s, {left:.0f} s are left …")
        words = {"slug": place.folder.name, "results": str(place.results)}
        command = [word.format(**words) for word in step.command]
        if step.command[0] != "pytest":
            # Profiles name their folder themselves.
            if "--results" not in command and step.command[0] != "kernels":
                command += ["--results", str(place.results / step.place)]
            command += self._device if step.on_device else []
        if step.sweeps:
            command += ["--budget", f"{expected:.0f}s", "--stop-after", f"{left:.0f}s"]
        began = self._now()
        code, output = self._run(command, left + (_GRACE / 2 if step.sweeps else 0.0))
        failures = self._state.ended.get(step.name, {}).get("tries", 0) + bool(code)
        self._state.ended[step.name] = {
            "finished": code is not None, "exit": code, "tries": failures,
            "seconds": round(self._now() - began, 1), "at": _utc(),
        }  # fmt: skip
        if step.output and output.strip():
            write_whole(place.folder / step.output, output)
        self._state.write(place)
        if code:
            self._note(f"{step.name} ended with exit code {code}.")

    def _anchors(self) -> dict[str, Any] | None:
        """Whether this is still the machine of the earlier slices, at the same speed."""
        command = ["sweeps", "anchors", "--json", "--results", str(self._place.results)]
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


def part_seconds(part: Part, kind: str) -> float:
    """What a part should take on a kind of machine."""
    return sum(step.expected(kind) or 0.0 for step in part.steps)


def select_parts(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
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
