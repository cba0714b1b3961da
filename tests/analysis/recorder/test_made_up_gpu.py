"""Run the commands of a recording on a simulated H200; in the long tier, all of them."""

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

pytestmark = pytest.mark.long

ALL = [step.name for part in all_parts() for step in part.steps]
# All tests of a group run in one worker, so the fixture records only once.
RECORDED = pytest.mark.xdist_group("recorded")


def record_simulated(results: Path, *parts: str) -> tuple[Path, Path, str]:
    """Record the named parts of a simulated H200, or all of them if no part is named.

    Returns:
        The machine's folder, the path of the archive, and the text on stderr.
    """
    named = [word for part in parts for word in ("--part", part)]
    answer = record("--results", str(results), *named, interpreter=FAKE)
    assert answer.returncode == 0, answer.stderr
    return results / "nvidia-h200", Path(answer.stdout.strip()), answer.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Record some of the parts, which takes about a minute."""
    return record_simulated(
        tmp_path_factory.mktemp("results"), "machine", "convolutions", "sustained"
    )


def test_every_part_runs_on_a_gpu_and_nothing_is_missing(tmp_path: Path) -> None:
    folder, archive, stderr = record_simulated(tmp_path)
    assert "missing" not in stderr
    assert "exit code" not in stderr
    ended = json.loads((folder / "record.json").read_text())["ended"]
    assert list(ended) == ALL
    assert {step["exit"] for step in ended.values()} == {0}
    assert archive.stat().st_size < 16_000_000
    with tarfile.open(archive) as packed:
        packed_names = {Path(member.name).name for member in packed.getmembers()}
    assert packed_names >= {
        "run.json", "measurements.csv", "record.json", "doctor.json", "checks.json", "clock.json",
        "models.json", "rules.json", "recommendations.csv", "roofline.png", "families.md",
    }  # fmt: skip
    assert not any(name.endswith(".jsonl") for name in packed_names)
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
    # Every row has a kernel's name, although the simulated profiler loses some records.
    assert all(row["kernel"].startswith("fake_") for row in rows)
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
