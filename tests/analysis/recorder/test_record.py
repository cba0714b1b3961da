"""Tests of recordings in slices, on a simulated machine whose commands only advance its clock."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.commands.record import find_place, plan_lines
from analysis.recorder.archive import write_archive
from analysis.recorder.parts import RecorderPart, RecorderStep, all_parts
from analysis.recorder.recorder import (
    Recorder,
    RecorderPlace,
    part_seconds,
    run_command,
    select_parts,
)
from kernels.common.errors import UserError
from tests.support.command_line import analysis

PARTS = all_parts()
START = 15.0  # seconds that a simulated command takes to start
KILLED = "killed"


class Node:
    """A simulated machine, whose commands advance its clock and write what real commands write.

    Attributes:
        kill: number of commands after which the recorder is killed; None for never.
        fails: name of a step whose command always fails.
        hangs: name of a step whose command never ends by itself.
        share: time that a sweep needs in all, as a share of its expected time.
    """

    def __init__(self, results: Path, kind: str = "gpu", fails: str = "") -> None:
        self.place = RecorderPlace(
            "machine", "A machine", kind, results / "machine", results, {"torch": "2"}
        )
        self.clock = 0.0
        self.done: list[str] = []
        self.commands: list[list[str]] = []
        self.kill: int | None = None
        self.fails = fails
        self.hangs = ""
        self.share = 0.5
        self._work: dict[str, float] = {}

    def slice(
        self, budget: float, parts: Sequence[RecorderPart] = PARTS
    ) -> tuple[Recorder, list[str]]:
        notes: list[str] = []
        recorder = Recorder(
            self.place, parts, budget, ["--gpu", "0"], notes.append, self.run, lambda: self.clock
        )  # fmt: skip
        recorder.record()
        return recorder, notes

    def run(self, command: Sequence[str], limit: float) -> tuple[int | None, str]:
        self.commands.append(list(command))
        if command[:3] == ["sweeps", "doctor", "--again"]:
            self.clock += min(limit, START)
            return 0, json.dumps({"ratio": 1.01, "sentence": "8 cases take 1.010× the time."})
        if self.kill is not None and len(self.done) >= self.kill:
            raise KeyboardInterrupt(KILLED)
        step = next(
            s for part in PARTS for s in part.steps
            if tuple(command[: len(s.command)]) == tuple(
                word.format(slug=self.place.folder_of(s).name, results=self.place.results)
                for word in s.command
            )
        )  # fmt: skip
        if step.name == self.fails:
            self.clock += START
            return 1, ""
        if step.name == self.hangs:
            self.clock += limit
            return None, ""
        self.done.append(step.name)
        return self._sweep(step, command) if step.sweeps else self._other(step, limit)

    def _other(self, step: RecorderStep, limit: float) -> tuple[int | None, str]:
        seconds = START + 0.5 * (step.expected(self.place.kind) or 0.0)
        self.clock += min(seconds, limit)
        return (0, "{}") if seconds <= limit else (None, "")

    def _sweep(self, step: RecorderStep, command: Sequence[str]) -> tuple[int, str]:
        stop = float(command[command.index("--stop-after") + 1].removesuffix("s"))
        budget = float(command[command.index("--budget") + 1].removesuffix("s"))
        expected = step.expected(self.place.kind) or 0.0
        assert budget <= expected
        left = self._work.setdefault(step.name, self.share * expected)
        worked = min(left, stop - START, budget)
        assert stop > START, "a command was started without enough time to do anything"
        self._work[step.name] = left - worked
        self.clock += START + worked
        folder = self.place.folder_of(step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "measurements.csv").write_text("")
        run = {"schema": 1, "protocol": 1, "run": "now", "machine": {}, "plan": {"cases": []},
               "software": dict(self.place.software)}  # fmt: skip
        path = folder / "run.json"
        counts = json.loads(path.read_text())["sweeps"] if path.exists() else {}
        open_ = 7 if self._work[step.name] > 0 else 0
        for name in step.sweeps:
            counts[name] = {"planned": 9, "measured": 9 - open_, "open": open_}
        path.write_text(json.dumps({**run, "sweeps": counts}))
        return 0, ""


def names(part: str) -> list[str]:
    return [step.name for one in PARTS if one.name == part for step in one.steps]


ALL = [step.name for part in PARTS for step in part.steps]
FIRST = ("machine", "clock", "real-layers", "convolutions", "families", "sustained")
"""Parts that a slice of ten minutes on a GPU completes or begins."""


def test_a_whole_recording_does_everything_once_in_the_order_of_its_worth(tmp_path: Path) -> None:
    node = Node(tmp_path)
    recorder, _ = node.slice(3000)
    assert node.done == ALL
    assert recorder.missing() == []
    assert node.clock <= 3000
    # A first slice has no earlier slice to compare anchors with.
    assert not any("--again" in command for command in node.commands)
    on_device = next(
        command for command in node.commands if command[:3] == ["sweeps", "doctor", "--clock"]
    )
    assert on_device[-4:] == ["--results", f"{tmp_path}", "--gpu", "0"]
    (rules,) = (c for c in node.commands if "--skip-recorded" in c)
    assert rules[rules.index("--results") + 1] == str(tmp_path / "rules")


def test_a_resumed_sweep_is_announced_with_the_time_that_is_left_of_its_own(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.share = 1.0
    notes = [line for _ in range(30) for line in node.slice(200)[1]]
    sweeps = [line for line in notes if line.startswith("sweep-defaults takes about ")]
    seconds = [int(line.split()[3].replace(",", "")) for line in sweeps]
    assert len(seconds) > 2
    assert seconds[0] == 600
    assert seconds[1] < 500


def test_ten_minutes_have_a_bit_of_everything_that_nobody_has_published(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.slice(600)
    assert node.clock <= 600
    assert {name for part in FIRST for name in names(part)} <= {*node.done}


def test_three_slices_of_nine_minutes_have_what_is_worth_most(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for _ in range(3):
        began = node.clock
        recorder, notes = node.slice(540)
        assert node.clock - began <= 540
    assert any("8 cases take 1.010×" in line for line in notes)  # printed from the second slice on
    missing = " ".join(recorder.missing())
    for part in FIRST:
        assert f"{part}:" not in missing
    assert "kernels:" in missing
    document = json.loads((node.place.folder / "record.json").read_text())
    assert [bool(one.get("anchors")) for one in document["slices"]] == [False, True, True]
    assert document["slices"][1]["anchors"]["ratio"] == 1.01


def test_a_slice_that_is_too_short_for_anchors_is_left_to_a_step(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.slice(540)
    done = len(node.done)
    node.slice(40)
    assert not any("--again" in command for command in node.commands)
    assert len(node.done) > done


def test_many_short_slices_end_with_everything(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for _ in range(60):
        began = node.clock
        recorder, _ = node.slice(200)
        assert node.clock - began <= 200
        if not recorder.missing():
            break
    assert recorder.missing() == []
    assert set(node.done) == set(ALL)


@pytest.mark.parametrize("kill", range(len(ALL)))
def test_a_recording_that_is_killed_in_any_step_goes_on_there(tmp_path: Path, kill: int) -> None:
    node = Node(tmp_path)
    node.kill = kill
    with pytest.raises(KeyboardInterrupt, match=KILLED):
        node.slice(3000)
    assert node.done == ALL[:kill]
    node.kill = None
    recorder, _ = node.slice(3000)
    assert node.done == ALL  # no command ran twice
    assert recorder.missing() == []


def test_what_failed_is_named_and_tried_last_in_each_slice(tmp_path: Path) -> None:
    node = Node(tmp_path, fails="clock")
    recorder, _ = node.slice(3000)
    assert recorder.missing() == ["clock: clock failed with exit code 1"]
    assert not recorder.can_resume()
    assert set(node.done) == set(ALL) - {"clock"}
    recorder, _ = node.slice(3000)
    assert sum(command[:3] == ["sweeps", "doctor", "--clock"] for command in node.commands) == 2
    node.fails = ""
    recorder, _ = node.slice(3000)
    assert recorder.missing() == []
    assert set(node.done) == set(ALL)


def test_a_command_that_hangs_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    """The checks of all kernels may hang on an untested GPU."""
    node = Node(tmp_path)
    node.hangs = "checks"
    for _ in range(6):
        recorder, _ = node.slice(540)
    assert set(node.done) == set(ALL) - {"checks"}
    assert "machine: checks did not finish in time" in recorder.missing()
    hung = [i for i, command in enumerate(node.commands) if command[:2] == ["kernels", "check"]]
    others = [i for i, command in enumerate(node.commands) if command[:2] == ["sweeps", "run"]]
    assert len(hung) >= 2
    assert hung[1] > max(others)  # the second attempt comes after all other commands


def test_a_sweep_that_needs_more_than_its_time_leaves_the_rest_theirs(tmp_path: Path) -> None:
    """The sweep resumes when all other steps are done."""
    node = Node(tmp_path)
    node.share = 3.0
    first: dict[str, int] = {}
    for number in range(60):
        recorder, _ = node.slice(540)
        for name in node.done:
            first.setdefault(name, number)
        if not recorder.can_resume():
            break
    assert set(node.done) == set(ALL)
    assert recorder.missing() == []
    assert max(first.values()) <= 8  # no step waited for sweeps that exceeded their time
    assert number > 8


def test_other_software_starts_anew_and_sets_the_old_recording_aside(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.slice(3000)
    node.done.clear()
    node.place = replace(node.place, software={"torch": "3"})
    # The recorder only sets the main folder aside. `sweeps run` would set aside the other folders,
    # which the simulated command does not do.
    (tmp_path / "rules" / "machine" / "run.json").unlink()
    (tmp_path / "families" / "machine" / "run.json").unlink()
    recorder, notes = node.slice(3000)
    assert node.done == ALL
    difference = "torch 3 is installed, but the recorded run used torch 2."
    assert f"{difference} The old recording is kept in" in notes[0]
    assert (tmp_path / "machine" / "doctor.json").exists()  # that of the new recording
    (kept,) = (tmp_path / "machine" / "runs").iterdir()
    assert {path.name for path in kept.iterdir()} >= {"run.json", "record.json", "doctor.json"}
    assert recorder.missing() == []


def test_checks_of_other_software_do_not_count_without_a_run(tmp_path: Path) -> None:
    node = Node(tmp_path)
    machine = select_parts(PARTS, ["machine"])
    node.slice(3000, machine)
    node.place = replace(node.place, software={"torch": "3"})
    node.slice(3000, machine)
    assert node.done == names("machine") * 2


def test_a_file_in_the_place_of_the_results_is_reported(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    with pytest.raises(UserError, match="is not a folder; move it away"):
        Node(tmp_path / "results").slice(3000)


def test_a_plan_leaves_a_recording_of_other_software_where_it_is(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.slice(3000)
    other = replace(node.place, software={"torch": "3"})
    recorder = Recorder(other, PARTS, 3000, [], print, node.run)
    assert not any("(done)" in line for line in recorder.plan())
    assert (tmp_path / "machine" / "record.json").exists()
    assert not (tmp_path / "machine" / "runs").exists()


def test_an_interrupt_leaves_an_archive_of_what_there_is(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.kill = 3
    with pytest.raises(KeyboardInterrupt):
        node.slice(3000)
    with tarfile.open(tmp_path / "machine.tar.gz") as archive:
        assert {"machine/doctor.json", "machine/record.json"} <= set(archive.getnames())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"software": {"torch": "2"}}',
        '{"slices": [], "ended": {"doctor": {}}}',
        '{"slices": [], "ended": {"doctor": 1}}',
    ],
)
def test_a_damaged_state_costs_only_itself(tmp_path: Path, text: str) -> None:
    node = Node(tmp_path)
    node.slice(3000)
    (tmp_path / "machine" / "record.json").write_text(text)
    recorder, _ = node.slice(3000)
    assert recorder.missing() == []


def test_parts_can_be_named(tmp_path: Path) -> None:
    node = Node(tmp_path)
    recorder, _ = node.slice(3000, select_parts(PARTS, ["sustained", "machine"]))
    assert node.done == names("machine") + names("sustained")
    assert recorder.missing() == []
    with pytest.raises(UserError, match="part 'sustaned' is not known; use one of machine, clock"):
        select_parts(PARTS, ["sustaned"])


def test_a_cpu_is_not_asked_what_only_a_gpu_can_answer(tmp_path: Path) -> None:
    node = Node(tmp_path, kind="cpu")
    recorder, _ = node.slice(3000)
    assert recorder.missing() == []
    assert not {"sweep-families", "gpu-tests"} & set(node.done)
    assert all("families" not in line and "kernels " not in line for line in recorder.plan())


def test_the_parts_fit_their_budgets() -> None:
    for kind, budget, start in (("gpu", 3000, 15), ("cpu", 300, 0)):
        steps = [step for part in PARTS for step in part.steps if step.expected(kind)]
        seconds = sum(part_seconds(part, kind) for part in PARTS)
        assert seconds + start * len(steps) <= budget, kind


def test_an_archive_has_everything_but_samples_and_weighs_little(tmp_path: Path) -> None:
    for place in ("machine", "rules/machine", "families/machine", "other"):
        (tmp_path / place / "samples").mkdir(parents=True)
        (tmp_path / place / "samples" / "1-of-1.jsonl").write_text("{}")
        (tmp_path / place / "run.json").write_text(place)
    (tmp_path / "machine" / "plots").mkdir()
    (tmp_path / "machine" / "plots" / "roofline.svg").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "machine" / "runs" / "old").mkdir(parents=True)
    (tmp_path / "machine" / "runs" / "old" / "run.json").write_text("old")
    folders = [tmp_path / place for place in ("machine", "rules/machine", "families/machine")]
    with tarfile.open(write_archive(tmp_path, folders)) as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == [
            "families/machine/run.json", "machine/run.json", "rules/machine/run.json",
            "machine/plots/roofline.svg",
        ]  # fmt: skip
        assert {(m.uid, m.uname, m.gname) for m in members} == {(0, "", "")}
    path = write_archive(tmp_path, folders, limit=300)
    assert path.stat().st_size < 600
    with tarfile.open(path) as archive:
        left_out = archive.extractfile("left-out.txt")
        assert isinstance(left_out, io.BufferedReader)
        assert left_out.read() == b"machine/plots/roofline.svg\n"


def test_a_command_s_answer_and_exit_code_come_back() -> None:
    code, output = run_command([sys.executable], ["json.tool", "--help"], 600)
    assert code == 0
    assert "usage" in output
    code, output = run_command([sys.executable], ["json.tool", "/no/such/file"], 600)
    assert code not in (0, None)
    script = "import sys; sys.stdout.buffer.write(b'\\xff passed')"
    code, output = run_command([sys.executable, "-c", script], [], 600)
    assert (code, output) == (0, "\ufffd passed")


STUBBORN = """
import os, signal, sys, time
from pathlib import Path
def fold(*_):
    Path({folded!r}).write_text("folded")
    sys.exit(130)
signal.signal(signal.SIGTERM, fold)
print("begun", flush=True)
Path({begun!r}).write_text("")
while True:
    time.sleep(0.01)
"""


def test_a_command_whose_time_is_over_is_asked_to_fold(tmp_path: Path) -> None:
    """The time limit grows until it ends after the command has started.

    How long the start takes depends on the load of this machine.
    """
    begun, folded = tmp_path / "begun", tmp_path / "folded"
    module = tmp_path / "stubborn.py"
    module.write_text(STUBBORN.format(begun=str(begun), folded=str(folded)))
    seconds = 0.5
    while not folded.exists():
        begun.unlink(missing_ok=True)
        script = ["-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import stubborn"]
        code, output = run_command([sys.executable, *script], ["x"], seconds)
        assert code is None
        assert output in ("begun\n", "")
        assert begun.exists() or not folded.exists()
        seconds *= 2


@pytest.mark.slow
def test_the_machine_is_told_by_a_process_and_so_is_what_is_wrong(tmp_path: Path) -> None:
    place = find_place(tmp_path, ["--device", "cpu"])
    assert (place.kind, place.folder) == ("cpu", tmp_path / place.slug)
    assert "torch" in place.software
    with pytest.raises(UserError, match="--device takes auto, gpu or cpu, not 'tpu'"):
        find_place(tmp_path, ["--device", "tpu"])


def test_the_arithmetic_of_a_gpu_that_is_not_here() -> None:
    lines = plan_lines(select_parts(PARTS, ["real-layers"]), "nvidia-h200", 16)
    assert lines[0].startswith("real-layers: 90 s")
    assert "s at six samples each" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--part", "everything"), "part 'everything' is not known"),
        (("--budget", "5s"), "--budget is 5 s, but starting the first command takes about 30 s"),
        (("--budget", "soon"), "--budget is 'soon'; give a time"),
        (("--plan", "--machine", "nvidia-h2000"), "nvidia-h200"),
        (("--plan", "--machine", "nvidia-h2000", "--part", "machine"), "nvidia-h200"),
        (("--plan", "--machine", "nvidia-h200", "--budget", "9m"), "does not depend on a budget"),
        (("--machine", "nvidia-h200"), "--machine and --cores need --plan"),
        (("--plan", "--cores", "4"), "--cores needs --machine"),
        (("--plan", "--cores", "0"), "--cores"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], words: str) -> None:
    answer = analysis("record", *arguments)
    assert answer.returncode == 2
    assert words in answer.stderr
