"""Files with one thing wrong with them: every command answers, or says in a sentence what is."""

from __future__ import annotations

import random
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.common.errors import UserError
from kernels.device import Device
from kernels.machine import cpu_machine
from sweeps.folding.fold import fold
from sweeps.running import opening
from sweeps.running.request import Request
from sweeps.store import SampleLog
from tests.support.command_line import ANALYSIS, SWEEPS, Said, said
from tests.support.damage import damaged, small_recording
from tests.support.synthetic import H100
from tests.support.tiers import quick_and_long, quick_and_slow

ASKED = ("--gemm", "4096,4096,1000,bf16")
OF_MACHINE = {
    "predict": ASKED, "recommend": ASKED, "calibrate": (), "rules": (), "table": (),
    "compare": (), "machines": (),
}  # fmt: skip
RECORDED = {
    "run.json": "json",
    "plan.jsonl": "jsonl",
    "measurements.csv": "csv",
    "rounds.csv": "csv",
    "confirmed.csv": "csv",
    "calibration.json": "json",
    "samples/1-of-1.jsonl": "jsonl",
}
GIVEN = {
    "shapes.csv": (
        "csv",
        "m,n,k,dtype,layout,batch\n4096,4096,1000,bf16,nt,1\n64,64,64,bf16,nn,2\n",
    ),
    "mine.toml": (
        "toml",
        'question = "What?"\nop = "gemm"\n\n[[block]]\nm = { from = 256, to = 1024, step = 256 }\n'
        'n = "m"\nk = 512\ndtype = "bf16"\nwhere = ["flops <= 1e9"]\n\n[[block]]\n'
        'shapes = ["64,64,64", "128,64,32"]\nvary = { n = [-1, 1] }\n',
    ),
    "config.json": (
        "json",
        '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000}',
    ),
}
QUICK, SLOW, ALL = 2, 6, 160  # damaged files of each name; the configs of models take a second each


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one machine, calibrated."""
    results = tmp_path_factory.mktemp("sound")
    small_recording(results / H100.slug)
    done = said(ANALYSIS, "calibrate", "--machine", H100.slug, "--results", str(results))
    assert (done.code, done.faults) == (0, [])
    return results


def attempts(names: Collection[str]) -> list[object]:
    """Each name with every seed; the first few seeds belong to every tier."""
    pairs = [(name, seed) for seed in range(ALL) for name in names]
    early, late = pairs[: SLOW * len(names)], pairs[SLOW * len(names) :]
    return [*quick_and_slow(early, QUICK * len(names)), *quick_and_long(late, 0)]


@pytest.mark.parametrize(("name", "seed"), attempts(RECORDED))
def test_a_damaged_recording_gets_an_answer_or_a_sentence(
    sound: Path, tmp_path: Path, name: str, seed: int
) -> None:
    results = tmp_path / "results"
    shutil.copytree(sound, results)
    folder = results / H100.slug
    draw = random.Random(f"{name} {seed}")
    path = folder / name
    path.write_bytes(damaged(path.read_bytes(), RECORDED[name], draw))
    if name.startswith("samples") or (name in ("run.json", "plan.jsonl") and draw.random() < 0.3):
        with suppress(UserError):
            fold(folder)
    faults = {}
    for command in draw.sample(sorted(OF_MACHINE), 2):
        arguments = [command, *OF_MACHINE[command], "--results", str(results)]
        if command == "compare":
            arguments += [str(folder), str(sound / H100.slug)]
        elif command != "machines":
            arguments += ["--machine", H100.slug]
        if found := said(ANALYSIS, *arguments).faults:
            faults[command] = found
    assert not faults
    assert [entry.name for entry in tmp_path.iterdir()] == ["results"]


@pytest.mark.parametrize(("name", "seed"), attempts(GIVEN))
def test_a_damaged_file_that_is_given_gets_an_answer_or_a_sentence(
    tmp_path: Path, name: str, seed: int
) -> None:
    kind, text = GIVEN[name]
    draw = random.Random(f"{name} {seed}")
    path = tmp_path / name
    path.write_bytes(damaged(text.encode(), kind, draw))
    assert not _reading(path, draw).faults


def _reading(path: Path, draw: random.Random) -> Said:
    results = ("--results", str(path.parent / "none"))
    on = ("--machine", H100.slug)
    if path.suffix == ".toml":
        return said(SWEEPS, "show", "--plan", str(path), *on, "--budget", "10m")
    if path.suffix == ".csv":
        command = draw.choice(["predict", "recommend"])
        return said(ANALYSIS, command, "--file", str(path), *on, *results)
    return said(ANALYSIS, "audit", str(path), *on, "--seq", "64", "--vary", "n_embd", *results)


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of this CPU, on which a run was begun and sampled a little."""
    results = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "with_measured_ceilings", _no_ceilings)
        run = opening.begin(_request(results), _quiet)
    where = {"worker": "1/1", "at": 1.8e9, "cost": 0.01}
    with SampleLog(run.folder, (1, 1)) as log:
        for entry in run.planned:
            log.append(
                {"event": "facts", "case": entry.case.id, "facts": {"rel_error": 0.0}, **where}
            )
            for r in range(1, 8):
                sample = {"s": 1e-4 * r, "n": 3, "r": r}
                log.append({"event": "sample", "case": entry.case.id, **sample, **where})
    return results


def _quiet(text: str) -> None:
    """Nothing is said."""


def _no_ceilings(device: Device) -> Device:
    peaks = dict.fromkeys(device.machine.peaks, 1e11)
    return replace(device, machine=cpu_machine(peaks, 3e10, device.machine.sms))


def _request(results: Path, budget: float = 20.0) -> Request:
    return Request(("square",), budget=budget, results=results, device="cpu")


@pytest.mark.parametrize(("name", "seed"), attempts(["run.json", "samples/1-of-1.jsonl"]))
def test_a_damaged_run_goes_on_or_says_why_not(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    monkeypatch.setattr(opening, "with_measured_ceilings", _no_ceilings)
    results = tmp_path / "results"
    shutil.copytree(begun, results)
    (folder,) = filter(Path.is_dir, results.iterdir())
    draw = random.Random(f"again {name} {seed}")
    path = folder / name
    path.write_bytes(damaged(path.read_bytes(), RECORDED[name], draw))
    with suppress(UserError):
        assert opening.begin(_request(results, draw.choice([20.0, 40.0])), _quiet).planned
    with suppress(UserError):
        fold(folder)
