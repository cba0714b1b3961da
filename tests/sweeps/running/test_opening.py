from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels import device as device_module
from kernels import implementations
from kernels.cli import parse_seconds
from kernels.common.errors import UserError
from kernels.device import Device, this_cpu
from kernels.machine import Machine, known_machine
from kernels.problem import Gemm
from sweeps.__main__ import parse_shard, run_command
from sweeps.cases.spec import read_sweep
from sweeps.planning.choice import choose_sweeps, sweep_cases
from sweeps.running import opening as start
from sweeps.running.opening import begin
from sweeps.running.request import DEFAULT_BUDGET, Request
from sweeps.store import SampleLog, read_run, write_json, write_run, write_table
from sweeps.timing.sampler import PROTOCOL
from tests.support.run_requests import NAMES, ids, quiet, request

pytestmark = pytest.mark.usefixtures("quick_ceilings")


def test_a_new_run_has_a_plan_and_says_nothing_of_the_place(tmp_path: Path) -> None:
    run = begin(request(tmp_path), quiet)
    record = read_run(run.folder)
    assert run.folder.name == this_cpu().machine.slug
    assert record["published"] is False
    assert record["plan"]["sweeps"] == sorted(NAMES)
    assert [entry.case.id for entry in run.planned] == [c["id"] for c in record["plan"]["cases"]]
    text = (run.folder / "run.json").read_text()
    assert str(tmp_path) not in text
    assert "/root" not in text


def test_the_same_command_goes_on_with_the_plan(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    again = begin(request(tmp_path), quiet)
    assert ids(again) == ids(first)
    assert again.budget == 20.0
    assert not (first.folder / "runs").exists()


def test_the_same_command_resumes_if_its_parts_add_up_to_more_than_its_budget(
    tmp_path: Path,
) -> None:
    """80% of 17 s plus the time for advice is 17.000000000000004 s in floating point."""
    command = replace(request(tmp_path), budget=17.0, leave=0.2)
    assert ids(begin(command, quiet)) == ids(begin(command, quiet))


def test_the_plain_command_means_all_default_sweeps_whatever_was_measured_before(
    tmp_path: Path,
) -> None:
    first = begin(request(tmp_path), quiet)
    bare = begin(Request(results=tmp_path, device="cpu"), quiet)
    assert ids(bare)[: len(first.planned)] == ids(first)
    assert set(choose_sweeps(())) <= set(read_run(bare.folder)["plan"]["sweeps"])
    assert bare.budget == DEFAULT_BUDGET["cpu"]
    assert ids(begin(Request(results=tmp_path, device="cpu"), quiet)) == ids(bare)  # once


def test_named_sweeps_add_to_the_recording_and_are_measured_alone(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    mine = begin(Request(("depthwise",), 5.0, tmp_path, device="cpu"), quiet)
    assert {entry.case.sweep for entry in mine.planned} == {"depthwise"}
    plan = read_run(first.folder)["plan"]
    assert plan["sweeps"] == sorted([*NAMES, "depthwise"])
    assert [case["id"] for case in plan["cases"]] == [*ids(first), *ids(mine)]
    again = begin(Request((NAMES[0],), 5.0, tmp_path, device="cpu"), quiet)
    assert {entry.case.sweep for entry in again.planned} == {NAMES[0]}  # only the named sweep
    assert not (first.folder / "runs").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget": 10.0}, "a budget of 10 s is too small"),
        ({"shard": (1, 2)}, "planned for 1 shard; leave --shard out"),
    ],
)
def test_another_plan_is_refused_in_a_sentence(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    begin(request(tmp_path), quiet)
    with pytest.raises(UserError, match="--fresh") as caught:
        begin(replace(request(tmp_path), **change), quiet)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_larger_budget_goes_on_with_the_plan_and_with_what_did_not_fit_it(
    tmp_path: Path,
) -> None:
    small = begin(replace(request(tmp_path), budget=2.0), quiet)
    left_out = read_run(small.folder)["plan"]["left_out"]
    assert left_out
    large = begin(replace(request(tmp_path), budget=60.0), quiet)
    assert large.budget == 60.0
    assert ids(large)[: len(small.planned)] == ids(small)
    assert len(large.planned) > len(small.planned)
    plan = read_run(small.folder)["plan"]
    assert sum(plan["left_out"].values()) < sum(left_out.values())
    assert ids(begin(replace(request(tmp_path), budget=60.0), quiet)) == ids(large)  # once


def test_shards_keep_their_cases_when_the_budget_grows(tmp_path: Path) -> None:
    small = [begin(replace(request(tmp_path, shard=(i, 2)), budget=2.0), quiet) for i in (1, 2)]
    large = [begin(replace(request(tmp_path, shard=(i, 2)), budget=60.0), quiet) for i in (1, 2)]
    for before, after in zip(small, large, strict=True):
        assert set(ids(before)) <= set(ids(after))
    assert not set(ids(large[0])) & set(ids(large[1]))


def test_sweeps_are_added_to_a_recording(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    added = Request(("depthwise",), 30.0, tmp_path, device="cpu", add=True)
    more = begin(added, quiet)
    assert {entry.case.sweep for entry in more.planned} == {"depthwise"}  # only it is measured
    plan = read_run(first.folder)["plan"]
    assert plan["sweeps"] == sorted([*NAMES, "depthwise"])
    assert [case["id"] for case in plan["cases"]] == [*ids(first), *ids(more)]
    assert ids(begin(added, quiet)) == ids(more)
    with pytest.raises(UserError, match="only if it has one shard"):
        begin(replace(added, shard=(1, 2)), quiet)


def test_shards_with_named_dtypes_are_resumed_but_get_no_others(tmp_path: Path) -> None:
    shards = [replace(request(tmp_path, shard=(i, 2)), dtypes=("fp32",)) for i in (1, 2)]
    first, other = [begin(shard, quiet) for shard in shards]
    assert ids(begin(shards[0], quiet)) == ids(first)
    assert not set(ids(first)) & set(ids(other))
    with pytest.raises(UserError, match="only if it has one shard"):
        begin(replace(shards[0], dtypes=("bf16",)), quiet)


def test_what_is_recorded_elsewhere_is_not_added_either(tmp_path: Path) -> None:
    main, extra = tmp_path / "main", tmp_path / "extra"
    recorded = begin(Request(("depthwise",), 20.0, main, device="cpu"), quiet)
    rows = [{"status": "ok", **entry.case.columns()} for entry in recorded.planned]
    write_table(recorded.folder, rows)
    begin(Request(("cache",), 20.0, extra, device="cpu"), quiet)
    added = Request(
        ("depthwise", "square"), 20.0, extra, device="cpu", skip_recorded=main, add=True
    )
    assert {entry.case.sweep for entry in begin(added, quiet).planned} == {"square"}
    plan = read_run(extra / recorded.folder.name)["plan"]
    assert plan["recorded_elsewhere"] == ["depthwise"]


def test_what_is_added_has_its_budget_from_now_on(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    with SampleLog(first.folder, (1, 1)) as log:
        log.append({"event": "aside", "case": "", "cost": 19.0, "at": 1.7e9, "worker": "1/1"})
    more = begin(Request(("depthwise",), 30.0, tmp_path, device="cpu", add=True), quiet)
    assert more.budget == 49.0


def test_a_call_can_end_before_its_budget(tmp_path: Path) -> None:
    assert begin(request(tmp_path), quiet).stop_at is None
    assert begin(request(tmp_path, stop_at=1000.0), quiet).stop_at == 1000.0


def test_a_call_that_had_no_time_to_measure_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(["cache"], "20s", tmp_path, device="cpu", stop_after="0.001s")
    assert "0 of " in capsys.readouterr().err


def test_fresh_sets_the_old_run_aside(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    (first.folder / "measurements.csv").write_text("old")
    said: list[str] = []
    begin(replace(request(tmp_path, fresh=True), budget=30.0), said.append)
    kept = list((first.folder / "runs").glob("*/measurements.csv"))
    assert [path.read_text() for path in kept] == ["old"]
    assert "Setting the old run aside: a fresh run was requested. The old run is kept" in said[-1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"protocol": PROTOCOL + 1}, "the timing protocol or the file format has changed"),
        ({"software": {"torch": "1.0"}}, "but the recorded run used torch 1.0"),
    ],
)
def test_another_pytorch_or_protocol_starts_anew(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    first = begin(request(tmp_path), quiet)
    write_run(first.folder, {**read_run(first.folder), **change})
    said: list[str] = []
    begin(request(tmp_path), said.append)
    assert why in said[-1]
    assert read_run(first.folder)["protocol"] == PROTOCOL


@pytest.mark.parametrize("ended", [True, False])
def test_an_unusable_run_that_is_over_is_measured_again(tmp_path: Path, ended: bool) -> None:
    first = begin(request(tmp_path), quiet)
    record = read_run(first.folder)
    record["run"] = "2026-11-01T12:30:00Z"
    record["health"] = {"verdict": "unusable", "reasons": ["other processes had 80%"]}
    write_run(first.folder, record)
    with SampleLog(first.folder, (1, 1)) as log:
        where = {"case": "", "worker": "1/1", "cost": 0.0, "at": 1.0}
        log.append({"event": "end" if ended else "aside", "why": "budget", "budget": 20.0, **where})
    said: list[str] = []
    begin(request(tmp_path), said.append)
    kept = first.folder / "runs" / "2026-11-01T12-30-00Z" / "run.json"
    assert kept.exists() == ended
    kept_run = "is unusable (other processes had 80%). The old run is kept in"
    assert any(kept_run in s for s in said) == ended
    assert (read_run(first.folder)["run"] == record["run"]) == (not ended)


@pytest.mark.parametrize("verdict", ["quiet", "unusable"])
def test_what_an_unusable_run_recorded_is_measured_elsewhere(tmp_path: Path, verdict: str) -> None:
    """`make rules` skips sweeps that are recorded, unless the recording is unusable."""
    first = begin(request(tmp_path), quiet)
    record = read_run(first.folder)
    write_run(first.folder, {**record, "health": {"verdict": verdict, "reasons": []}})
    machine = Machine.from_json(record["machine"])
    # The table has all cases, although a slow machine's plan leaves some of them out.
    every = [case for s in choose_sweeps(NAMES).values() for case in sweep_cases(s, machine)]
    write_table(first.folder, [{**case.columns(), "status": "ok"} for case in every])
    other = replace(request(tmp_path / "rules"), skip_recorded=tmp_path)
    if verdict == "quiet":
        with pytest.raises(UserError, match="already recorded"):
            begin(other, quiet)
    else:
        assert begin(other, quiet).planned


def test_the_shards_of_a_plan_are_named(tmp_path: Path) -> None:
    begin(request(tmp_path, shard=(1, 2)), quiet)
    with pytest.raises(UserError, match="give --gpus or a shard such as --shard 1/2"):
        begin(request(tmp_path), quiet)


def test_samples_without_a_plan_are_set_aside_not_taken_over(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    (first.folder / "samples" / "1-of-1.jsonl").write_text("{}\n")
    (first.folder / "run.json").unlink()  # a crash between the steps of setting aside
    begin(request(tmp_path), quiet)
    (kept,) = (first.folder / "runs").glob("*/samples/1-of-1.jsonl")
    assert kept.read_text() == "{}\n"
    assert not (first.folder / "samples" / "1-of-1.jsonl").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}', ""])
def test_an_unreadable_plan_is_a_sentence_and_a_fresh_run_keeps_it(
    tmp_path: Path, text: str
) -> None:
    first = begin(request(tmp_path), quiet)
    (first.folder / "run.json").write_text(text)
    with pytest.raises(UserError, match="FRESH=1"):
        begin(request(tmp_path), quiet)
    assert (first.folder / "run.json").read_text() == text
    begin(request(tmp_path, fresh=True), quiet)
    assert [path.read_text() for path in (first.folder / "runs").glob("*/run.json")] == [text]


@pytest.mark.parametrize("text", [None, "{\n", '{"id": "x"}\n', "3\n"])
def test_a_run_without_its_cases_is_a_sentence_and_a_fresh_run_keeps_it(
    tmp_path: Path, text: str | None
) -> None:
    first = begin(request(tmp_path), quiet)
    cases = first.folder / "plan.jsonl"
    cases.unlink() if text is None else cases.write_text(text)
    with pytest.raises(UserError, match="FRESH=1"):
        begin(request(tmp_path), quiet)
    begin(request(tmp_path, fresh=True), quiet)
    assert len(read_run(first.folder)["plan"]["cases"]) > 0
    assert len([*(first.folder / "runs").glob("*/run.json")]) == 1


def test_a_plan_of_older_recordings_is_in_run_json(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    record = read_run(first.folder)
    write_json(first.folder / "run.json", record)
    (first.folder / "plan.jsonl").unlink()
    assert read_run(first.folder) == record
    assert [e.case for e in begin(request(tmp_path), quiet).planned] == [
        e.case for e in first.planned
    ]


def test_a_fresh_run_that_cannot_be_planned_leaves_the_old_one(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    with pytest.raises(UserError, match="no case of"):
        begin(replace(request(tmp_path, fresh=True), budget=0.001), quiet)
    assert (first.folder / "run.json").exists()
    assert not (first.folder / "runs").exists()


def test_a_run_in_progress_is_not_set_aside(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    with (
        SampleLog(first.folder, (1, 1)),
        pytest.raises(UserError, match="another process is writing"),
    ):
        begin(request(tmp_path, fresh=True), quiet)
    assert (first.folder / "run.json").exists()


def test_a_published_recording_is_left_alone(tmp_path: Path) -> None:
    first = begin(request(tmp_path), quiet)
    published = tmp_path / "published" / first.folder.name
    published.parent.mkdir()
    first.folder.rename(published)
    before = (published / "run.json").read_bytes()
    second = begin(request(tmp_path), quiet)
    assert second.folder == first.folder
    assert (published / "run.json").read_bytes() == before


def test_shards_share_one_plan(tmp_path: Path) -> None:
    parts = [begin(request(tmp_path, shard=(i, 3)), quiet) for i in (1, 2, 3)]
    cases = [entry.case.id for part in parts for entry in part.planned]
    assert len(cases) == len(set(cases)) == len(read_run(parts[0].folder)["plan"]["cases"])


def test_a_budget_too_small_for_anything_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no case of .* fits a budget of 0.001 s"):
        begin(replace(request(tmp_path), budget=0.001), quiet)
    # The message names the budget that the user gave, including the share that is kept for advice.
    with pytest.raises(UserError, match="no case of .* fits a budget of 0.001 s"):
        begin(replace(request(tmp_path), budget=0.001, leave=0.2), quiet)


def test_a_gpu_run_plans_all_dtypes_and_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H200 is planned for on a machine without a GPU."""
    h200 = Device(known_machine("nvidia-h200"), "cuda:0", 0)
    monkeypatch.setattr(start, "select_device", lambda kind, gpu: h200)
    monkeypatch.setattr(start, "take_part", lambda folder, request, device: 0)
    monkeypatch.setattr(device_module, "nvidia_driver", lambda: "580.159.03")
    run = begin(Request(results=tmp_path), quiet)
    assert run.folder.name == "nvidia-h200"
    assert run.budget == 600.0
    assert len(run.planned) > 3000
    seen = {(e.case.implementation, e.case.problem.dtype) for e in run.planned}
    assert {("cublas", d) for d in ("fp32", "tf32", "fp16", "bf16")} <= seen
    assert {("cudnn", d) for d in ("fp32", "tf32", "fp16", "bf16")} <= seen
    tiled = [e.case for e in run.planned if e.case.implementation == "triton-tiled"]
    assert tiled
    record = json.loads((run.folder / "run.json").read_text())
    assert record["software"]["driver"] == "580.159.03"
    assert set(record["plan"]["sweeps"]) == set(choose_sweeps(()))


def test_unknown_sweeps_name_the_nearest() -> None:
    with pytest.raises(UserError, match="sweep 'sqare' is not known; did you mean 'square'"):
        choose_sweeps(["sqare"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1.5h", 5400), ("45", 45), ("", None), (None, None)],
)
def test_budgets(text: str | None, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["10x", "m", "-5s", "0s"])
def test_bad_budgets(text: str) -> None:
    with pytest.raises(UserError, match="--budget is .*; give a time"):
        parse_seconds(text)


def test_shard_texts() -> None:
    assert parse_shard("2/4") == (2, 4)
    for text in ("0/4", "5/4", "x", "1"):
        with pytest.raises(UserError, match="--shard takes I/N"):
            parse_shard(text)


def test_a_spent_budget_leaves_cases_unreached_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = begin(request(tmp_path), quiet)
    count = len(started.planned)
    with SampleLog(started.folder, (1, 1)) as log:  # one case has used up the budget
        seen = {"case": started.planned[0].case.id, "at": 1.7e9, "worker": "1/1"}
        log.append({"event": "sample", "s": 1e-5, "n": 1, "cost": 20.0, "checking": 0.1, **seen})
        log.append({"event": "facts", "facts": {"kernel": "gemm"}, "cost": 0.0, **seen})
    run_command(list(NAMES), "20s", tmp_path, device="cpu")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"1 of {count} cases was measured in 20 s." in captured.err
    assert f"Cases without a time: {count - 1} not reached." in captured.err
    counts = read_run(started.folder)["counts"]
    assert 0 < counts["measured"] == counts["planned"] - counts["not_reached"]
    assert len((started.folder / "measurements.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("word", "count"), [("", 1), ("best 3", 3), ("all", None), ("bm=64;bn=64", 1)]
)
def test_a_sweep_may_time_the_best_candidates_or_all(
    tmp_path: Path, word: str, count: int | None
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'question = "Why?"\nop = "gemm"\n[[block]]\nm = 512\nn = 512\nk = 512\ndtype = "bf16"\n'
        f'implementation = "triton-tiled"\nconfig = "{word}"\n'
    )
    machine = known_machine("nvidia-h200")
    configs = [case.config for case in sweep_cases(read_sweep(path), machine)]
    family = implementations()["triton-tiled"]
    ranked = [str(c) for c in family.configs(Gemm(512, 512, 512, "bf16"), machine)]
    assert configs == ([word] if "=" in word else ranked[:count])


def test_a_config_that_cannot_be_read_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'question = "Why?"\nop = "gemm"\n[[block]]\nm = 8\nn = 8\nk = 8\n'
        'implementation = "triton-tiled"\nconfig = "best"\n'
    )
    with pytest.raises(UserError, match=r"mine.toml: config 'best' is invalid: config key 'best'"):
        sweep_cases(read_sweep(path), known_machine("nvidia-h200"))


def test_a_sweep_for_gpus_says_so_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="families has no cases for this CPU"):
        begin(Request(names=("families",), budget=20.0, results=tmp_path, device="cpu"), quiet)


def test_what_is_recorded_whole_elsewhere_is_left_out(tmp_path: Path) -> None:
    main, extra = tmp_path / "main", tmp_path / "extra"
    names = ("cache", "depthwise")
    recorded = begin(Request(("cache",), 20.0, main, device="cpu"), quiet)
    rows = [{"status": "ok", **entry.case.columns()} for entry in recorded.planned]
    write_table(recorded.folder, rows)
    request = Request(names, 20.0, extra, device="cpu", skip_recorded=main)
    run = begin(request, quiet)
    assert {entry.case.sweep for entry in run.planned} == {"depthwise"}
    plan = json.loads((run.folder / "run.json").read_text())["plan"]
    assert plan["recorded_elsewhere"] == ["cache"]
    assert begin(request, quiet).planned == run.planned  # the same command resumes the run
    with pytest.raises(UserError, match="already recorded") as caught:
        begin(
            Request(("cache",), 20.0, tmp_path / "third", device="cpu", skip_recorded=main), quiet
        )
    assert caught.value.exit_code == 0
    # Sweeps that are needed together are measured in one recording.
    both = begin(
        Request(("cache,depthwise",), 20.0, tmp_path / "fifth", device="cpu", skip_recorded=main),
        quiet,
    )
    assert {entry.case.sweep for entry in both.planned} == {"cache", "depthwise"}
    # A case that has no time yet is not recorded.
    write_table(recorded.folder, [*rows[:-1], {**rows[-1], "status": "error"}])
    again = begin(
        Request(names, 20.0, tmp_path / "fourth", device="cpu", skip_recorded=main), quiet
    )
    assert {entry.case.sweep for entry in again.planned} == {"cache", "depthwise"}
    # Without names, all default sweeps are asked for. None of them is recorded.
    unnamed = begin(Request((), 20.0, tmp_path / "sixth", device="cpu", skip_recorded=main), quiet)
    assert "square" in {entry.case.sweep for entry in unnamed.planned}
    (recorded.folder / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"Restore this file, or leave out --skip-recorded\.$"):
        begin(Request(names, 20.0, tmp_path / "seventh", device="cpu", skip_recorded=main), quiet)


def test_candidates_of_what_a_machine_cannot_run_are_one_case(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'question = "Why?"\nop = "gemm"\n[[block]]\nm = 8\nn = 8\nk = 8\ndtype = "bf16"\n'
        'implementation = "triton-tiled"\nconfig = "all"\n'
    )
    (case,) = sweep_cases(read_sweep(path), known_machine("nvidia-v100-sxm2-16gb"))
    assert case.config == ""  # its row in measurements.csv will say that sm_80 is needed


def test_a_plan_without_sweeps_is_refused_as_damaged(tmp_path: Path, quick_ceilings: None) -> None:
    folder = begin(request(tmp_path), quiet).folder
    record = read_run(folder)
    del record["plan"]["sweeps"]
    write_run(folder, record)
    with pytest.raises(UserError, match="run.json is damaged: plan has no 'sweeps'"):
        begin(request(tmp_path), quiet)
