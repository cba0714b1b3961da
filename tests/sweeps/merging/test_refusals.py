"""Recordings that cannot be merged: the error is one sentence, and no file changes."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.recordings.load import load
from kernels.common.errors import UserError
from kernels.device import select_device
from sweeps.merging.merge import merge
from sweeps.running.opening import begin
from sweeps.running.request import Request
from sweeps.store import SampleLog, read_run
from tests.support.damage import damaged
from tests.support.fakes import planned
from tests.support.mergeable import CPU, H200, change, place, record

LOG = Path("samples", "1-of-1.jsonl")
GPU = {"gpu": 0, "node": 0, "sm_limit_mhz": None}


SEEDS, MOST_SEEDS = 40, 400
"""Number of damaged files that are tried, and the largest number.

More than ``SEEDS`` are tried only while all were merged or all were refused. Few places of a
run.json are harmless, and which of them a seed damages depends on how long the recording took."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    record(folder / "a", planned(2))
    record(folder / "b", planned(4)[2:])
    return folder


@pytest.fixture
def two(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "two")
    return tmp_path / "two"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(two: Path, *names: str, into: str = "all") -> str:
    """Return the error of a merge that is refused, after checking that no file has changed."""
    before = files(two)
    with pytest.raises(UserError) as caught:
        merge([two / name for name in names or ("a", "b")], two / into, two)
    assert files(two) == before
    assert caught.value.exit_code == 2
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def of_plan(two: Path, **parts: object) -> None:
    change(two / "b", plan={**read_run(two / "b")["plan"], **parts})


def of_another_machine(two: Path) -> None:
    change(two / "b", machine=replace(CPU, slug="cpu-other-2t").to_json())


def of_another_cache(two: Path) -> None:
    change(two / "b", machine=replace(CPU, l2_bytes=CPU.l2_bytes + 1).to_json())


def of_no_machine(two: Path) -> None:
    change(two / "b", machine=None)


def of_other_software(two: Path) -> None:
    change(two / "b", software={"torch": "2.12.0", "driver": "580.1"})


def of_another_protocol(two: Path) -> None:
    change(two / "b", protocol=99)


def in_shards(two: Path) -> None:
    of_plan(two, shards=2)


def without_samples(two: Path) -> None:
    shutil.rmtree(two / "b" / "samples")
    change(two / "b", published=True)


def with_more_samples(two: Path) -> None:
    shutil.copy(two / "b" / LOG, two / "b" / "samples" / "1-of-2.jsonl")


def imported(two: Path) -> None:
    names = ("source", "package", "licence", "cache", "how", "framework", "version")
    change(two / "b", public={**dict.fromkeys(names, ""), "rows": 1})


def merged_before(two: Path) -> None:
    change(two / "b", merged=[])


def half_a_document(two: Path) -> None:
    (two / "b" / "run.json").write_text("{")


def without_budget(two: Path) -> None:
    plan = read_run(two / "b")["plan"]
    change(two / "b", plan={k: v for k, v in plan.items() if k != "budget_s"})


def of_no_size(two: Path) -> None:
    plan = read_run(two / "b")["plan"]
    plan["cases"][0]["m"] = "infinite"
    change(two / "b", plan=plan)
    text = (two / "b" / "run.json").read_text().replace('"infinite"', "Infinity")
    (two / "b" / "run.json").write_text(text)


def garbled(two: Path) -> None:
    path = two / "b" / LOG
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line[:9] + b"\n" if i % 2 else line for i, line in enumerate(lines)))


def a_copy(two: Path) -> None:
    shutil.rmtree(two / "b")
    shutil.copytree(two / "a", two / "b")
    change(two / "b", run="2026-02-02T03:04:05Z")


def with_another_limit(two: Path) -> None:
    for name, watts in (("a", 700.0), ("b", 500.0)):
        change(two / name, machine=H200.to_json())
        place(two / name, [{**GPU, "power_limit_w": watts}])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            of_another_machine,
            f"is a recording of {CPU.slug}, but .*b is a recording of cpu-other-2t; merge only",
        ),
        (of_another_cache, "are recordings of machines that differ in l2_bytes"),
        (of_no_machine, "b: invalid machine description"),
        (of_other_software, "with torch 2.12.0. Measure one of them again"),
        (of_another_protocol, "b was measured with a timing protocol or a file format that this"),
        (in_shards, "b was measured in shards"),
        (without_samples, "b has no samples .published recordings have none."),
        (with_more_samples, "b has sample files other than 1-of-1.jsonl"),
        (imported, "b is an imported table, which has no samples"),
        (merged_before, "b is itself a merged recording"),
        (half_a_document, "b/run.json cannot be read"),
        (without_budget, "b: run.json is damaged: plan has no 'budget_s'"),
        (of_no_size, "b: a case of the plan has missing or invalid values"),
        (
            garbled,
            "lines of .*b/samples/1-of-1.jsonl are damaged. The first of them is line 2: .*Restore",
        ),
        (a_copy, "a and .*b have samples in common"),
        (with_another_limit, "a GPU of .*b has a power limit of 500 W, but a GPU of .*a .* 700 W"),
    ],
)
def test_what_does_not_belong_together(
    two: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(two)
    assert re.search(words, refused(two)), words


def test_what_is_no_set_of_recordings(two: Path) -> None:
    assert "merging needs at least two recordings" in refused(two, "a")
    (two / "link").symlink_to(two / "a")
    assert "link is given twice" in refused(two, "a", "b", "link")
    assert "nowhere has no run.json" in refused(two, "a", "nowhere")
    long = "x" * 5000
    assert "has no run.json" in refused(two, "a", long)


def test_a_place_that_is_taken_or_within_a_source(two: Path) -> None:
    (two / "all").mkdir()
    assert "all already exists" in refused(two)
    assert "lies in" in refused(two, into="a/all")


def test_a_place_that_cannot_be_made(two: Path) -> None:
    (two / "file").write_text("")
    with pytest.raises(UserError, match="could not be created .*; choose another folder"):
        merge([two / "a", two / "b"], two / "file" / "all", two)
    assert {path.name for path in two.iterdir()} == {"a", "b", "file"}


def test_a_recording_that_is_written_at_the_moment(two: Path) -> None:
    with (
        SampleLog(two / "b", (1, 1)),
        pytest.raises(UserError, match="another process is writing .*; wait for it or stop it"),
    ):
        merge([two / "a", two / "b"], two / "all", two)
    assert not (two / "all").exists()


def test_no_run_goes_on_with_a_merged_recording(tmp_path: Path) -> None:
    machine = select_device("cpu", 0).machine
    for name, entries in (("a", planned(2)), ("b", planned(4)[2:])):
        record(tmp_path / name, entries, machine=replace(CPU, slug=machine.slug))
    result = merge([tmp_path / "a", tmp_path / "b"], None, tmp_path)
    before = files(result.folder)
    for shard in ((1, 1), (1, 2)):
        request = Request(("square",), 20.0, tmp_path / "merged", shard=shard, device="cpu")
        with pytest.raises(UserError, match="was merged from several recordings"):
            begin(request, print)
    now = files(result.folder)
    assert {name: now[name] for name in before} == before
    assert json.loads(now["run.json"])["merged"][0]["worker"] == "1/2"


@pytest.mark.parametrize("name", ["run.json", str(LOG)])
def test_a_file_with_one_thing_wrong_is_merged_or_refused(
    made: Path, tmp_path: Path, name: str
) -> None:
    ends: set[str] = set()
    for seed in range(MOST_SEEDS):
        if seed >= SEEDS and len(ends) == 2:
            break
        folder = tmp_path / str(seed)
        shutil.copytree(made, folder)
        draw = random.Random(f"{name} {seed}")
        path = folder / "a" / name
        path.write_bytes(
            damaged(path.read_bytes(), "json" if name == "run.json" else "jsonl", draw)
        )
        try:
            result = merge([folder / "a", folder / "b"], None, folder / "results")
        except UserError:
            ends.add("refused")
            assert {path.name for path in folder.iterdir()} == {"a", "b"}
        else:
            ends.add("merged")
            assert load(result.folder).machine.slug == CPU.slug
    assert ends == {"refused", "merged"}
