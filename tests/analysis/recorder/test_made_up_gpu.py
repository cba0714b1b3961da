"""Commands of a recording, for real, on a simulated H200; in the long tier, every one of them."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from analysis.recorder.parts import all_parts
from analysis.recorder.recorder import run_command
from tests.support.gpu_recording import FAKE, record

pytestmark = pytest.mark.slow

ALL = [step.name for part in all_parts() for step in part.steps]
RECORDED = pytest.mark.xdist_group("recorded")  # one worker, so that it is recorded once


def made_up(results: Path, *parts: str) -> tuple[Path, Path, str]:
    """A recording of a made-up H200: its folder, its archive and what was said; whole or parts."""
    named = [word for part in parts for word in ("--part", part)]
    answer = record("--results", str(results), *named, interpreter=FAKE)
    assert answer.returncode == 0, answer.stderr
    return results / "nvidia-h200", Path(answer.stdout.strip()), answer.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Some parts of a recording, a minute of it."""
    return made_up(tmp_path_factory.mktemp("results"), "machine", "convolutions", "sustained")


@pytest.mark.long
def test_every_part_runs_on_a_gpu_and_nothing_is_missing(tmp_path: Path) -> None:
    """Every branch of the GPU's path runs."""
    folder, archive, said = made_up(tmp_path)
    assert "missing" not in said
    assert "exit code" not in said
    ended = json.loads((folder / "record.json").read_text())["ended"]
    assert list(ended) == ALL
    assert {step["exit"] for step in ended.values()} == {0}
    assert archive.stat().st_size < 16_000_000
    with tarfile.open(archive) as packed:
        found = {Path(member.name).name for member in packed.getmembers()}
    assert found >= {
        "run.json", "measurements.csv", "record.json", "doctor.json", "checks.json", "clock.json",
        "models.json", "rules.json", "recommendations.csv", "roofline.png", "families.md",
    }  # fmt: skip
    assert not any(name.endswith(".jsonl") for name in found)
    families = rows_of(folder.parent / "families" / folder.name)
    assert {"triton-tiled", "triton-persistent", "triton-conv", "cublas"} <= {
        row["implementation"] for row in families
    }
    special = [row for row in families if "specialize=on" in row["config"]]
    assert {row["sweep"] for row in special} == {"warp-specialisation"}


def rows_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "measurements.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@RECORDED
def test_a_gpu_s_rows_have_names_clocks_and_hidden_gaps(recorded: Any) -> None:
    folder, *_ = recorded
    rows = [row for row in rows_of(folder) if row["status"] == "ok"]
    assert len(rows) > 10
    assert all(row["kernel"].startswith("fake_") for row in rows)  # though records were lost
    assert all(row["sm_mhz"] == "1980.0" for row in rows)
    assert {bool(row["power_w"]) for row in rows if row["mode"] == "burst"} == {False}
    assert {row["power_w"] for row in rows if row["mode"] == "sustained"} == {"655.0"}
    assert not [row for row in rows if "launch gaps show" in row["message"]]


@RECORDED
def test_the_next_slice_recognises_the_machine(recorded: Any) -> None:
    folder, *_ = recorded
    command = ["sweeps", "doctor", "--again", "--json", "--device", "gpu"]
    command += ["--results", str(folder.parent)]
    code, output = run_command(FAKE, command, 3600)
    assert code == 0
    report = json.loads(output)
    assert report["same"] is True
    assert report["cases"] == 8
