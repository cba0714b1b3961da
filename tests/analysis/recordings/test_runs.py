"""Test how runs are combined: a worse run never replaces a better one.

Unusable runs are left out if there is any other run.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.advice.measurements import read_measurements
from analysis.recordings.load import load
from analysis.recordings.runs import health_lines, load_runs
from sweeps.store import read_run, write_run
from tests.support.command_line import analysis
from tests.support.synthetic import H100, gemm_cases, record

CASES = gemm_cases([(1024, 1024, 1024), (1024, 1024, 1088), (2048, 1024, 1024), (1024, 2048, 1024)])
QUIET: dict[str, Any] = {"health": {"verdict": "quiet", "reasons": []}}
NOISY: dict[str, Any] = {"health": {"verdict": "noisy", "reasons": ["it is busy"]}}
UNUSABLE: dict[str, Any] = {"health": {"verdict": "unusable", "reasons": ["launches waited"]}}
EARLIER, LATER = "2026-01-01T00:00:00Z", "2026-01-09T00:00:00Z"


def machine_folder(results: Path, earlier: dict[str, Any], later: dict[str, Any]) -> Path:
    """Record a machine's folder with two runs: the earlier one, set aside, and the later one."""
    folder = results / H100.slug
    earlier = {"cases": CASES, "seconds": 1e-5, "half_width": 0.004, **earlier}
    later = {"cases": CASES, "seconds": 1.05e-5, "half_width": 0.004, **later}
    for run_folder, run, options in (
        (folder / "runs" / "2026-01-01T00-10-00Z", EARLIER, earlier),
        (folder, LATER, later),
    ):
        cases, seconds = options.pop("cases"), options.pop("seconds")
        half_width = options.pop("half_width")
        record(run_folder, cases, [seconds] * len(cases), half_width, run=run, **options)
    return folder


def times(folder: Path) -> dict[str, float]:
    rows = load_runs(folder).rows
    return {f"{row.m},{row.n},{row.k}": round(row.time_us, 3) for row in rows.itertuples()}


def test_a_newer_run_as_good_as_the_old_one_counts(tmp_path: Path) -> None:
    folder = machine_folder(tmp_path, QUIET, QUIET)
    assert set(times(folder).values()) == {10.5}
    assert len(load_runs(folder).parts) == 1


def test_a_copy_of_a_run_counts_once(tmp_path: Path) -> None:
    folder = machine_folder(tmp_path, QUIET, {**NOISY, "cases": CASES[:2]})
    lines = health_lines(load_runs(folder))
    for original, copy in ((folder, "copy"), (folder / "runs" / "2026-01-01T00-10-00Z", "again")):
        (folder / "runs" / copy).mkdir()
        for name in ("run.json", "measurements.csv"):
            shutil.copy(original / name, folder / "runs" / copy / name)
    assert len(load_runs(folder).parts) == 1
    assert health_lines(load_runs(folder)) == lines


@pytest.mark.parametrize("inner", ["", "plots"])
def test_the_current_folder_can_be_named(
    inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = machine_folder(tmp_path, QUIET, {**NOISY, "cases": CASES[:2]})
    (folder / inner).mkdir(exist_ok=True)
    monkeypatch.chdir(folder / inner)
    assert times(Path(".." if inner else ".")) == times(folder)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (QUIET, NOISY),
        (QUIET, UNUSABLE),
        (NOISY, UNUSABLE),
        (QUIET, {**QUIET, "half_width": 0.03}),  # a shorter run, whose times have not converged
        (NOISY, {**QUIET, "half_width": math.nan}),  # interrupted, so its times have no interval
    ],
)
def test_a_worse_run_never_takes_a_better_ones_place(
    earlier: dict[str, Any], later: dict[str, Any], tmp_path: Path
) -> None:
    folder = machine_folder(tmp_path, earlier, later)
    assert set(times(folder).values()) == {10.0}
    recording = load_runs(folder)
    assert recording.run["run"] == EARLIER
    assert recording.folder == folder  # answers are written there
    reason = "it is unusable" if later is UNUSABLE else "better runs have all its cases"
    assert health_lines(recording)[-1] == f"The run of {LATER} is left out, because {reason}."


def test_a_run_at_another_speed_is_left_out(tmp_path: Path) -> None:
    """Machines with the same name may differ, as virtual machines do."""
    cases = gemm_cases([(1024, 1024, k) for k in range(1024, 1536, 64)])
    slower = {**NOISY, "cases": cases, "seconds": 2e-5}
    folder = machine_folder(tmp_path, {**QUIET, "cases": cases}, slower)
    assert set(times(folder).values()) == {10.0}
    assert health_lines(load_runs(folder))[-1] == (
        f"The run of {LATER} is left out, because its speed differs by more than 10% from that of "
        "the best run."
    )


def test_the_speed_of_a_machine_is_not_that_of_kernels_that_change_with_the_checkout(
    tmp_path: Path,
) -> None:
    library = gemm_cases([(1024, 1024, k) for k in range(1024, 1536, 64)])
    triton = [replace(case, implementation="triton-tiled") for case in library]
    folder = machine_folder(
        tmp_path, {**QUIET, "cases": [*library, *triton, *CASES]}, {**NOISY, "cases": triton}
    )
    # The newer run has no library case, so without a canary GEMM it counts as equally fast.
    record(folder, triton, [3e-5] * len(triton), run=LATER, **NOISY)
    recording = load_runs(folder)
    assert {part.run["run"] for part in recording.parts} == {EARLIER, LATER}


def test_cases_that_only_a_worse_run_has_are_taken_from_it(tmp_path: Path) -> None:
    folder = machine_folder(tmp_path, {**QUIET, "cases": CASES[:3]}, {**NOISY, "cases": CASES[1:]})
    found = times(folder)
    assert sorted(found.values()) == [10.0, 10.0, 10.0, 10.5]
    assert found["1024,2048,1024"] == 10.5
    assert len(load_runs(folder).rows) == 4
    lines = health_lines(load_runs(folder))
    assert lines == [
        "Health: quiet.",
        f"3 measured times come from the run of {EARLIER} (quiet).",
        f"1 measured time comes from the run of {LATER} (noisy).",
    ]


def test_a_run_that_shares_no_time_is_not_among_them(tmp_path: Path) -> None:
    folder = machine_folder(tmp_path, {**NOISY, "cases": CASES[:2]}, QUIET)
    assert [part.run["run"] for part in load_runs(folder).parts] == [LATER]


def test_another_software_and_a_broken_run_are_left_out(tmp_path: Path) -> None:
    folder = machine_folder(tmp_path, QUIET, NOISY)
    aside = next((folder / "runs").iterdir())
    whole = (aside / "measurements.csv").read_bytes()
    (aside / "measurements.csv").write_bytes(b"nonsense")
    assert set(times(folder).values()) == {10.5}
    (aside / "measurements.csv").write_bytes(whole)
    run = read_run(aside)
    write_run(aside, {**run, "software": {**run["software"], "torch": "2.12.0"}})
    assert set(times(folder).values()) == {10.5}


def test_what_is_wrong_now_is_not_answered_by_an_older_time(tmp_path: Path) -> None:
    folder = machine_folder(tmp_path, QUIET, QUIET)
    path = folder / "measurements.csv"
    path.write_text(path.read_text(encoding="utf-8").replace(",ok,", ",wrong,"), encoding="utf-8")
    assert not len(load_runs(folder).ok)
    path.write_text(path.read_text(encoding="utf-8").replace(",wrong,", ",oom,"), encoding="utf-8")
    assert set(times(folder).values()) == {10.0}


def test_an_older_checkouts_own_kernels_are_not_taken(tmp_path: Path) -> None:
    mine = [replace(case, implementation="triton-tiled") for case in CASES]
    folder = machine_folder(tmp_path, {**QUIET, "cases": [*CASES, *mine]}, NOISY)
    assert set(load_runs(folder).rows["implementation"]) == {"cublas"}


@pytest.mark.parametrize("key", ["machine", "software"])
def test_a_strange_folder_among_the_runs_is_left_out(key: str, tmp_path: Path) -> None:
    folder = machine_folder(tmp_path, QUIET, NOISY)
    aside = next((folder / "runs").iterdir())
    write_run(aside, {**read_run(aside), key: None})
    assert set(times(folder).values()) == {10.5}


@pytest.mark.slow
def test_where_all_are_unusable_nothing_is_advised(tmp_path: Path) -> None:
    folder = machine_folder(tmp_path, UNUSABLE, UNUSABLE)
    assert load_runs(folder).unusable
    done = analysis("report", "--machine", H100.slug, "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Health: unusable; launches waited." in done.stdout
    assert "These times do not support any conclusion." in done.stdout
    assert json.loads((folder / "recommendations.json").read_bytes()) == []
    page = (folder / "recommendations.md").read_text(encoding="utf-8")
    assert "These times do not support any advice." in page
    assert page.rstrip().endswith("- Launches waited.")  # the reasons are at the end of the page
    assert json.loads((folder / "findings.json").read_bytes()) == []
    done = analysis("rules", "--machine", H100.slug, "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    reason = "because its run is unusable. Launches waited."
    assert f"is not used to judge the rules, {reason}" in done.stderr
    rules = json.loads((folder / "rules.json").read_bytes())
    assert {rule["verdict"] for rule in rules} == {"not measured here"}


def test_an_answer_rests_on_something_else_than_an_unusable_run(tmp_path: Path) -> None:
    machine_folder(tmp_path, UNUSABLE, UNUSABLE)
    where = ["--machine", H100.slug, "--results", str(tmp_path), "--json"]
    done = analysis("predict", *where, "--gemm", "1024,1024,1024,bf16")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["basis"] == "shipped"
    assert answer["evidence"] == "predicted"


def test_a_cpu_with_nothing_else_is_refused(tmp_path: Path) -> None:
    slug = "cpu-test-2t"
    record(tmp_path / slug, CASES, [1e-5] * 4, run=EARLIER, **UNUSABLE)
    path = tmp_path / slug / "run.json"
    run = read_run(path.parent)
    facts = {"slug": slug, "kind": "cpu", "generation": "cpu", "capability": None}
    machine = {**run["machine"], **facts}
    write_run(path.parent, {**run, "machine": machine})
    done = analysis(
        "recommend", "--machine", slug, "--results", str(tmp_path), "--gemm", "1024,1024,1024,bf16"
    )
    assert done.returncode == 1
    assert "is unusable (launches waited). Measure cpu-test-2t again" in done.stderr


def test_a_single_run_is_read_as_it_is(tmp_path: Path) -> None:
    folder = record(tmp_path / H100.slug, CASES, [1e-5] * 4)
    assert load_runs(folder).rows.equals(load(folder).rows)
    (line,) = health_lines(load_runs(folder))
    assert line == "Health: not judged, because the recording predates the health check."


def test_only_a_file_of_others_is_suspected_of_wrong_times(tmp_path: Path) -> None:
    measured = load(record(tmp_path / H100.slug, CASES, [1e-5] * 4))
    imported = replace(measured, run={**measured.run, "public": {"source": "file.csv"}})
    advice = (
        "Predictions of held-out cases have a median error of 30%; check that the imported times "
        "belong to the right shapes."
    )
    assert advice not in health_lines(measured, 0.3)
    assert health_lines(imported, 0.3) == [advice]
    assert health_lines(imported, 0.1) == []


@pytest.mark.parametrize("canary", [None, {"median_us": 1000.0, "spread": 0.01}])
def test_another_machine_of_the_same_name_is_left_out(
    canary: dict[str, Any] | None, tmp_path: Path
) -> None:
    """The machine of the later run is much faster, as seven common cases or the canary show."""
    cases = gemm_cases([(256 * i, 1024, 1024) for i in range(1, 10)])
    slow = None if canary is None else {**canary, "median_us": 1500.0}
    few = cases[:1] if canary else cases[:8]
    folder = machine_folder(
        tmp_path, {**QUIET, "cases": few, "seconds": 1.5e-5, "canary": slow},
        {**NOISY, "cases": cases[1:], "canary": canary},
    )  # fmt: skip
    assert {part.run["run"] for part in load_runs(folder).parts} == {EARLIER}
    same = {**NOISY, "cases": cases[1:], "seconds": 1.5e-5, "canary": slow}
    folder = machine_folder(tmp_path / "same", {**QUIET, "cases": few, "seconds": 1.5e-5,
                                                "canary": slow}, same)  # fmt: skip
    assert len(load_runs(folder).rows) == 9


def test_times_of_two_runs_make_no_ratio(tmp_path: Path) -> None:
    folder = machine_folder(tmp_path, {**QUIET, "cases": CASES[:1]}, {**NOISY, "cases": CASES[1:2]})
    recording = load_runs(folder)
    measured = read_measurements(recording.products, recording)
    assert len(list(measured.problems)) == 2
    assert measured.ratio(CASES[0].problem, CASES[1].problem) is None  # type: ignore[arg-type]
