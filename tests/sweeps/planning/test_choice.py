"""Choosing sweeps by name and by file; a wrong file only blocks its own sweep."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.common.errors import UserError
from kernels.device import Device
from kernels.machine import cpu_machine, known_machine
from sweeps.__main__ import note_broken
from sweeps.cases import spec
from sweeps.cases.spec import all_sweeps, broken_sweeps
from sweeps.planning.choice import choose_sweeps, sweep_cases
from sweeps.planning.lines import lines_of
from sweeps.planning.plan import Costs, expected_seconds, make_plan
from sweeps.running import opening
from sweeps.running.opening import begin
from sweeps.running.request import Request
from sweeps.store import read_run

MINE = """
question = "How fast are mine?"
op = "gemm"

[[block]]
m = [64, 96]
n = 64
k = 64
dtype = "fp32"
"""


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of the folder of sweeps, in which a test may break files."""
    folder = tmp_path / "specs"
    shutil.copytree(spec.FOLDER, folder)
    monkeypatch.setattr(spec, "FOLDER", folder)
    spec._read_folder.cache_clear()
    yield folder
    spec._read_folder.cache_clear()


def own(tmp_path: Path, text: str = MINE, name: str = "mine.toml") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def a_request(tmp_path: Path, *names: str, **more: Any) -> Request:
    return Request(names=names, budget=20.0, results=tmp_path / "results", device="cpu", **more)


def with_ceilings(device: Device) -> Device:
    """Return a CPU with invented ceilings, because measuring them takes seconds."""
    peaks = dict.fromkeys(device.machine.peaks, 1e11)
    return replace(device, machine=cpu_machine(peaks, 3e10, device.machine.sms))


def quiet(text: str) -> None:
    pass


def test_every_sweep_here_can_be_read() -> None:
    assert broken_sweeps() == {}


def test_a_broken_sweep_blocks_only_itself(
    specs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {*all_sweeps()} - {"square"}
    (specs / "square.toml").write_text("question = 3\n", encoding="utf-8")
    spec._read_folder.cache_clear()
    assert {*all_sweeps()} == good
    assert "square" not in choose_sweeps(())
    assert choose_sweeps(["plane"])
    with pytest.raises(UserError, match=r"square\.toml"):
        choose_sweeps(["square"])
    namesake = tmp_path / "elsewhere" / "square.toml"
    namesake.parent.mkdir()
    namesake.write_text('question = "?"\nop = "gemm"\nblock = []\n', encoding="utf-8")
    with pytest.raises(UserError, match="a sweep named 'square' already exists"):
        choose_sweeps([str(namesake)])
    note_broken()
    said = capsys.readouterr().err
    assert "warning: square.toml" in said
    assert "Other sweeps are not affected." in said


def test_a_file_is_a_sweep(tmp_path: Path) -> None:
    name = own(tmp_path)
    (sweep,) = choose_sweeps([name, name]).values()  # a file may be given twice
    assert (sweep.name, sweep.question) == ("mine", "How fast are mine?")


@pytest.mark.parametrize(
    ("name", "words"),
    [("none.toml", r"none\.toml cannot be read \(No such file or directory\)"),
     ("square.toml", "a sweep named 'square' already exists; rename ")],
)  # fmt: skip
def test_a_file_that_cannot_be_a_sweep(name: str, words: str, tmp_path: Path) -> None:
    if name == "square.toml":
        own(tmp_path, name=name)
    with pytest.raises(UserError, match=words):
        choose_sweeps([str(tmp_path / name)])


def test_a_file_adds_to_the_recording_and_its_new_cases_are_added_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "with_measured_ceilings", with_ceilings)
    begin(a_request(tmp_path, "cache"), quiet)
    run = begin(a_request(tmp_path, own(tmp_path)), quiet)
    assert [entry.case.sweep for entry in run.planned] == ["mine"] * 2
    plan = read_run(run.folder)["plan"]
    assert plan["sweeps"] == ["cache", "mine"]
    assert str(tmp_path) not in (run.folder / "run.json").read_text(encoding="utf-8")
    again = begin(a_request(tmp_path, own(tmp_path, MINE.replace("96]", "96, 128]"))), quiet)
    assert sorted(e.case.problem.m for e in again.planned) == [64, 96, 128]  # type: ignore[union-attr]
    # Without names, the default sweeps are meant, even if the file is gone.
    (tmp_path / "mine.toml").unlink()
    more = begin(a_request(tmp_path), quiet)
    assert {*choose_sweeps(())} <= {*read_run(more.folder)["plan"]["sweeps"]}
    wider = begin(Request(results=tmp_path / "results", budget=1e4, device="cpu"), quiet)
    assert "mine" in read_run(wider.folder)["plan"]["sweeps"]


_LINES = ("alignment", "steps", "conv-layouts", "conv-channels")


@pytest.mark.parametrize("budget", [240.0, 480.0])
def test_the_default_plan_of_a_gpu_has_whole_lines(budget: float) -> None:
    """Only the longest cases of a line may be missing, which take too much of the budget."""
    machine = known_machine("nvidia-h200")
    sweeps = {name: sweep_cases(sweep, machine) for name, sweep in choose_sweeps(()).items()}
    planned = {entry.case for entry in make_plan(sweeps, machine, budget, cores=16).planned}
    assert {case.sweep for case in planned} == {name for name, own in sweeps.items() if own}
    whole = 0
    for name, own in sweeps.items():
        seconds = expected_seconds([case.problem for case in own], machine)
        lines = lines_of(own)
        crossings = Counter(i for line in lines for i in line)
        for line in lines:
            there = [i for i in line if own[i] in planned and crossings[i] == 1]
            missing = [i for i in line if own[i] not in planned]
            whole += not missing
            if name in _LINES and there and missing:
                assert max(seconds[i] for i in there) <= min(seconds[i] for i in missing) * 1.01
    assert whole > 20


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("budget", [60.0, 66.0])
def test_what_people_look_for_first_is_whole_on_a_slow_cpu(budget: float, bf16: bool) -> None:
    """An earlier version left out a line of `alignment` on a slow CPU."""
    machine = replace(
        cpu_machine({"fp32": 90e9, "bf16": 180e9 if bf16 else 10e9}, 16e9, 1),
        l2_bytes=32 << 20,
        emulated=() if bf16 else ("bf16",),
    )
    sweeps = {name: sweep_cases(sweep, machine) for name, sweep in choose_sweeps(()).items()}
    plan = make_plan(sweeps, machine, budget, costs=Costs(prepare=0.0))
    assert plan.left_out  # there is not time for all
    assert not plan.left_out.keys() & {"alignment", "steps", "conv-layouts"}
