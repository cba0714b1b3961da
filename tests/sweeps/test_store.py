from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.common.errors import UserError
from kernels.problem import Gemm
from sweeps.folding.case_rows import fold_rows
from sweeps.folding.history import spent_seconds
from sweeps.folding.steadiness import canary_report
from sweeps.schema import COLUMNS, IDENTITY, problem_columns, problem_of
from sweeps.store import (
    Event,
    SampleLog,
    make_folder,
    read_events,
    read_run,
    read_timed,
    set_aside,
    write_csv,
    write_run,
    write_table,
    write_whole,
)  # fmt: skip
from tests.support.fakes import planned

ROOT = Path(__file__).resolve().parents[2]


EVENT = {"event": "aside", "case": "ab", "at": 1.5, "worker": "1/1"}


def test_events_read_back(tmp_path: Path) -> None:
    events: list[Event] = [{**EVENT, "event": "sample", "s": 1.5e-6}, {**EVENT, "x": "µ\n"}]
    with SampleLog(tmp_path, (1, 1)) as log:
        for event in events:
            log.append(event)
    assert read_events(tmp_path) == (events, [])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({**EVENT, "event": "host", "seconds": 0.0, "gpu_processes": 2}, ""),
        ({**EVENT, "event": "host", "seconds": 9.5, "steal": 0.1, "others": 0.0}, ""),
        ({"event": "crash", "case": "ab", "worker": "1/1", "cost": 1.0, "message": "x"}, ""),
        ({**EVENT, "event": "something new"}, ""),
        ({**EVENT, "event": "host", "seconds": 1.0, "gpu_processes": "a"}, "gpu_processes is 'a'"),
        ({**EVENT, "event": "sample", "s": 0}, "it.s is 0"),
        ({**EVENT, "event": "sample", "s": "1"}, "it.s is '1'"),
        ({**EVENT, "event": "sample", "s": 1.0, "at": 1e20}, "it.at is 1e+20"),
        ({**EVENT, "event": "confirm", "against": "b", "process": 1.0, "s": [1.0]}, "four entries"),
        ({**EVENT, "event": 7}, "it is not an event"),
        ([1], "it is not an event"),
    ],
)
def test_a_line_of_valid_json_may_still_be_no_event(line: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "1-of-1.jsonl").write_text(json.dumps(line) + "\n")
    events, damaged = read_events(tmp_path)
    assert (len(events), len(damaged)) == ((0, 1) if words else (1, 0))
    assert all(words in sentence for sentence in damaged)


def test_a_line_cut_in_half_is_named_and_spoils_no_other(tmp_path: Path) -> None:
    with SampleLog(tmp_path, (1, 1)) as log:
        for number in range(3):
            log.append({**EVENT, "n": number})
    path = tmp_path / "samples" / "1-of-1.jsonl"
    path.write_bytes(path.read_bytes()[:-5])  # the crash
    with SampleLog(tmp_path, (1, 1)) as log:
        log.append({**EVENT, "n": 3})
    events, damaged = read_events(tmp_path)
    assert events == [{**EVENT, "n": number} for number in (0, 1, 3)]
    assert damaged == ["1-of-1.jsonl line 3 is damaged and was left out: it is not JSON."]


RUN = {
    "schema": 1,
    "protocol": 1,
    "run": "now",
    "machine": {},
    "software": {},
    "plan": {"cases": []},
}


def test_a_second_writer_of_a_shard_is_refused_and_of_another_is_not(tmp_path: Path) -> None:
    with SampleLog(tmp_path, (1, 2)):
        with pytest.raises(
            UserError, match="another process is writing .* another --shard"
        ) as caught:
            SampleLog(tmp_path, (1, 2))
        assert caught.value.exit_code == 1
        SampleLog(tmp_path, (2, 2)).close()
    SampleLog(tmp_path, (1, 2)).close()


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("not a folder")
    with pytest.raises(UserError, match="results exists and is not a folder"):
        make_folder(tmp_path / "results" / "machine")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "1-of-1.jsonl").mkdir()
    with pytest.raises(UserError, match="is a folder and should be a file"):
        SampleLog(tmp_path, (1, 1))


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_whole(path, "old\n")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(UserError, match="could not be written") as caught:
            write_whole(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]  # no leftovers


def test_a_file_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"table\.csv could not be written \(Not a directory\)"):
        write_whole(tmp_path / "file" / "table.csv", "text")


def test_a_damaged_table_has_no_times(tmp_path: Path) -> None:
    assert read_timed(tmp_path) == set()
    cells = dict.fromkeys(COLUMNS, "") | {"op": "gemm", "status": "ok"}
    tables = (
        "status\nok\n",
        ",".join(cells) + "\n" + ",".join(cells.values()) + "\n",
        "status\n" + "x" * 200_000 + "\n",
    )
    for text in tables:
        (tmp_path / "measurements.csv").write_text(text, encoding="utf-8")
        assert read_timed(tmp_path) == set()


def test_a_line_that_is_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "1-of-1.jsonl").write_text("[" * 200_000 + "\n")
    events, damaged = read_events(tmp_path)
    assert events == []
    assert damaged == ["1-of-1.jsonl line 1 is damaged and was left out: it is not JSON."]


def test_a_full_disk_while_sampling_keeps_every_whole_line(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from sweeps.store import SampleLog; from kernels.common.errors import UserError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))\n"
        "log = SampleLog(Path(sys.argv[1]), (1, 1))\n"
        f"event = {EVENT}\n"
        "try:\n    for n in range(1000): log.append({'n': n, **event})\n"
        "except UserError as error: print(error); sys.exit(error.exit_code)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert answer.returncode == 1
    assert "could not be written" in answer.stdout
    events, _ = read_events(tmp_path)
    assert [event["n"] for event in events] == list(range(len(events)))
    assert len(events) > 100


def test_a_full_disk_at_the_start_does_not_keep_the_shard_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "samples" / "1-of-1.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"event": ')  # a crash cut this line short
    write = os.write
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "write", lambda file, data: 0 if data == b"\n" else write(file, data))
        # ``caught`` keeps the unfinished log alive, so the claim is not released by its deletion.
        with pytest.raises(UserError) as caught:
            SampleLog(tmp_path, (1, 1))
    SampleLog(tmp_path, (1, 1)).close()
    assert "No space left on device" in str(caught.value)
    assert path.read_bytes().endswith(b"\n")


def test_dev_full_is_a_full_disk(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "1-of-1.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        SampleLog(tmp_path, (1, 1)).append({"n": 1})


def test_a_run_reads_back_with_its_cases_on_a_line_each(tmp_path: Path) -> None:
    cases = [entry.to_json() for entry in planned(3)]
    run = {
        **RUN,
        "plan": {"budget_s": 5.0, "cases": cases, "left_out": {}},
        "published": False,
    }
    write_run(tmp_path, run)
    assert read_run(tmp_path) == run
    assert len((tmp_path / "plan.jsonl").read_text().splitlines()) == 3
    assert '"id":' not in (tmp_path / "run.json").read_text()
    write_run(tmp_path, {**run, "plan": {"cases": []}})
    assert read_run(tmp_path)["plan"] == {"cases": []}
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="run.json cannot be read"):
        read_run(tmp_path)


def test_an_old_run_is_set_aside_whole(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "samples").mkdir()
    first, second = set_aside(tmp_path), None
    (tmp_path / "run.json").write_text("{}")
    second = set_aside(tmp_path)
    assert first != second
    assert {p.name for p in first.iterdir()} == {"run.json", "samples"}
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


# --- Folding -------------------------------------------------------------------------------------


def sample(case: str, seconds: float, **more: object) -> dict[str, object]:
    return {"event": "sample", "case": case, "s": seconds, "n": 10, "cost": 0.5, "checking": 0.0,
            "at": 1.7e9,
            "worker": "1/1", **more}  # fmt: skip


def test_a_row_is_the_median_with_its_interval_rates_and_facts() -> None:
    entry = planned(4)[3]
    case = entry.case
    events = [
        {"event": "facts", "case": case.id, "facts": {"rel_error": 1e-7, "kernel": "k"},
         "cost": 1.0, "at": 1.7e9, "worker": "1/1"},
        *(sample(case.id, s * 1e-6, sm_mhz=1900.0 + s, throttled=["sw_power_cap"])
          for s in (3, 1, 2, 6, 5, 4)),
    ]  # fmt: skip
    (row,) = fold_rows("run", [entry], events)
    assert (row["status"], row["samples"], row["converged"]) == ("ok", 6, False)
    assert row["time_us"] == pytest.approx(3.5)
    assert (row["time_lo_us"], row["time_hi_us"]) == pytest.approx((1.0, 6.0))
    assert row["tflops"] == pytest.approx(case.problem.flops / 3.5e-6 / 1e12)
    assert row["gbps"] == pytest.approx(case.problem.bytes / 3.5e-6 / 1e9)
    assert row["sm_mhz"] == pytest.approx(1903.5)
    assert row["throttled"] == "sw_power_cap"
    assert (row["kernel"], row["rel_error"]) == ("k", 1e-7)
    assert spent_seconds(events) == pytest.approx(4.0)
    assert set(row) <= set(COLUMNS)
    assert {name: row[name] for name in IDENTITY if name in row} == case.columns()


def test_under_six_samples_there_is_no_interval() -> None:
    (entry,) = planned(1)
    (row,) = fold_rows("run", [entry], [sample(entry.case.id, 1e-6) for _ in range(5)])
    assert "time_lo_us" not in row
    assert row["converged"] is False


def test_samples_of_two_gpus_are_not_pooled() -> None:
    (entry,) = planned(1)
    events = [sample(entry.case.id, 1e-6, gpu=0)] * 3 + [sample(entry.case.id, 9e-6, gpu=1)] * 7
    (row,) = fold_rows("run", [entry], events)
    assert (row["gpu"], row["samples"]) == (1, 7)
    assert row["time_us"] == pytest.approx(9.0)


def test_only_ok_rows_have_times_and_messages_are_one_line() -> None:
    (entry,) = planned(1)
    outcome = {"event": "outcome", "case": entry.case.id, "status": "error", "at": 1.7e9,
               "message": "RuntimeError: many\n  lines", "cost": 0.0, "worker": "1/1"}  # fmt: skip
    (row,) = fold_rows("run", [entry], [sample(entry.case.id, 1e-6), outcome])
    assert row["status"] == "error"
    assert "time_us" not in row
    assert row["message"] == "RuntimeError: many lines"


def test_rows_follow_the_plan_and_unreached_cases_have_none() -> None:
    cases = planned(5)
    events = [sample(cases[i].case.id, 1e-6) for i in (4, 0, 2)]
    assert [row["m"] for row in fold_rows("run", cases, events)] == [1, 3, 5]


def test_samples_whose_gaps_show_never_enter_a_median() -> None:
    (entry,) = planned(1)
    exposed = [sample(entry.case.id, 9e-6, hidden=False) for _ in range(3)]
    hidden = [sample(entry.case.id, 1e-6) for _ in range(6)]
    (row,) = fold_rows("run", [entry], [*exposed, *hidden])
    assert (row["status"], row["samples"]) == ("ok", 6)
    assert row["time_us"] == row["time_hi_us"] == pytest.approx(1.0)
    assert row["message"] == "launch gaps show in 3 more samples, which are left out."


def test_a_case_of_which_every_sample_shows_gaps_is_an_error_with_the_reason() -> None:
    (entry,) = planned(1)
    (row,) = fold_rows("run", [entry], [sample(entry.case.id, 9e-6, hidden=False)] * 2)
    assert row["status"] == "error"
    assert "launch gaps show in every sample" in row["message"]
    assert "time_us" not in row


def test_facts_that_come_later_are_added() -> None:
    (entry,) = planned(1)
    event = {"event": "facts", "case": entry.case.id, "worker": "1/1"}
    facts = [{**event, "facts": {"rel_error": 1e-7}}, {**event, "facts": {"kernel": "gemm"}}]
    (row,) = fold_rows("run", [entry], [*facts, sample(entry.case.id, 1e-6)])
    assert (row["rel_error"], row["kernel"]) == (1e-7, "gemm")


def test_drift_is_the_canarys_last_quarter_over_its_first() -> None:
    events = [sample("canary", s) for s in [1.0] * 10 + [1.1] * 10]
    report = canary_report(events)
    assert report is not None
    assert report["drift"] == pytest.approx(0.1)
    assert canary_report(events[:5]) is None


def test_the_table_is_written_by_repr(tmp_path: Path) -> None:
    write_table(
        tmp_path, [{"schema": 1, "time_us": 0.1 + 0.2, "converged": True, "message": 'a,"b'}]
    )
    header, line, _ = (tmp_path / "measurements.csv").read_text().split("\n")
    assert header.split(",") == list(COLUMNS)
    assert "0.30000000000000004" in line
    assert ",true," in line
    assert '"a,""b"' in line


def test_a_table_has_plain_numbers_whatever_computed_them(tmp_path: Path) -> None:
    rows = [{"gain": np.float64(0.1) + np.float64(0.2), "count": np.int64(3)}]
    write_csv(tmp_path / "t.csv", ["gain", "count"], rows)
    assert (tmp_path / "t.csv").read_text() == "gain,count\n0.30000000000000004,3\n"


def test_the_data_dictionary_describes_every_column() -> None:
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    first_cells = " ".join(re.findall(r"^\| (.*?) \|", text, re.MULTILINE))
    for name in COLUMNS:
        assert f"`{name}`" in first_cells, name


@pytest.mark.parametrize("size", [3.5, float("inf"), float("nan"), "3.0"])
def test_a_size_that_is_not_whole_is_refused(size: object) -> None:
    columns = problem_columns(Gemm(3, 4, 5, "fp32"))
    assert problem_of({**columns, "m": 3.0}) == Gemm(3, 4, 5, "fp32")
    with pytest.raises(ValueError, match="3.5|inf|nan|3.0"):
        problem_of({**columns, "m": size})
