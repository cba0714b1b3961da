"""What was recorded on real machines is read, and its tables come out again."""

from __future__ import annotations

import csv
import functools
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from analysis.advice.headlines import headlines, peak
from analysis.advice.recommend import Advice
from analysis.advice.table import build_table
from analysis.advice.verdict import CONFIRMED, DO_IT, LEAVE_IT, MIN_GAIN, PREDICTED
from analysis.model.calibrate import calibrate
from analysis.model.fitted import Analysis, analyse
from analysis.model.query import Query
from analysis.plots.titles import roofline_title
from analysis.recordings.load import load, problems_of
from analysis.rules.inputs import judge_inputs, rule_inputs
from analysis.slices.series import roofline_series
from kernels.common.program import ROOT
from tests.support.published import PUBLISHED, RECORDED
from tests.support.tiers import quick_and_long

pytestmark = pytest.mark.xdist_group("recordings")  # one worker, which calibrates once

PUBLISHED_RUNS = [path.parent for path in sorted(PUBLISHED.glob("*/run.json"))]
RUNS = quick_and_long(PUBLISHED_RUNS)  # calibrating on a GPU's recording takes most of a minute


@functools.cache
def analysed(folder: Path) -> Analysis:
    """Calibrating on a recording takes seconds: once for all tests of it."""
    return analyse(load(folder))


@functools.cache
def table_of(folder: Path) -> list[Advice]:
    """And so does advice on all its shapes."""
    return build_table(analysed(folder))


def test_there_is_a_recording() -> None:
    assert RECORDED in PUBLISHED_RUNS


@pytest.mark.slow
@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_recording_gives_its_published_table_again(folder: Path) -> None:
    analysis = analysed(folder)
    assert not analysis.recording.damaged
    advice = table_of(folder)
    with open(folder / "recommendations.csv", encoding="utf-8", newline="") as file:
        published = {(row["question"], row["problem"]): row for row in csv.DictReader(file)}
    assert {(answer.question, answer.problem.spec()) for answer in advice} == set(published)
    for answer in advice:
        row = published[answer.question, answer.problem.spec()]
        # What rests on measurements is exact; a prediction may differ in the last digits of the
        # fitted constants from one machine to the next, and a close call with it.
        if row["evidence"] == answer.evidence != PREDICTED:
            assert row["verdict"] == answer.verdict
            if answer.measured_gain is not None:
                assert row["instead"] == answer.instead.spec()
                assert float(row["measured_gain"]) == pytest.approx(answer.measured_gain)
    for answer in advice:
        if answer.verdict == DO_IT:
            assert answer.evidence == CONFIRMED
            assert answer.gain.lo >= MIN_GAIN
        if answer.verdict != LEAVE_IT:
            assert answer.gain.value >= MIN_GAIN


@pytest.mark.slow
@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_every_measured_row_has_a_prediction_better_than_the_roofline(folder: Path) -> None:
    analysis = analysed(folder)
    table, machine = analysis.table, analysis.recording.machine
    assert table["predicted_time_us"].notna().all()
    roof = [
        max(row.flops / machine.peak(row.dtype), row.least_bytes / machine.bandwidth) * 1e6
        for row in table.itertuples()
    ]
    ours = (table["predicted_time_us"] / table["time_us"] - 1).abs()
    theirs = (roof / table["time_us"] - 1).abs()
    assert ours.median() < 0.5 * theirs.median()


@pytest.mark.long
@pytest.mark.parametrize("folder", quick_and_long(PUBLISHED_RUNS), ids=lambda folder: folder.name)
def test_the_interval_covers_rows_that_it_never_met(folder: Path) -> None:
    """Calibrated on two thirds of the problems, asked for the third; three times."""
    recording = load(folder)
    third = np.array([zlib.crc32(f"x{p.spec()}".encode()) % 3 for p in problems_of(recording.ok)])
    covered = []
    for part in range(3):
        model = calibrate(recording.machine, recording.ok[third != part]).model
        asked = recording.ok[third == part]
        prediction = model.predict(Query.from_rows(asked))
        seconds = asked["time_us"].to_numpy() * 1e-6
        covered += list((prediction.lo <= seconds) & (seconds <= prediction.hi))
    assert 0.85 <= np.mean(covered) <= 0.95  # 90 % is stated


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_recording_has_its_findings(folder: Path) -> None:
    found = headlines(analysed(folder), table_of(folder))
    assert 5 <= len(found) <= 8
    assert all(finding.lo <= finding.value <= finding.hi for finding in found)
    # All but the digits: another CPU's last digits decide another close call.
    published = json.loads((folder / "findings.json").read_bytes())
    assert [form(one.text) for one in found] == [form(one["text"]) for one in published]


def test_the_front_page_shows_a_recordings_lines() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^ {6}• (.*(?:\n {8}.*)*)", page, re.MULTILINE)
    findings = json.loads((PUBLISHED / "nvidia-h100-sxm" / "findings.json").read_bytes())
    assert [" ".join(line.split()) for line in shown] == [found["text"] for found in findings]


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_the_terminal_and_the_roofline_say_the_same_of_the_ceiling(folder: Path) -> None:
    analysis = analysed(folder)
    found = peak(analysis)
    assert found is not None
    said = dict(re.findall(r"fastest (\w+) GEMM .*?, (\d+%) of the peak", found.text))
    rows = roofline_series(analysis.table, analysis.recording.cache)
    title = roofline_title(rows, analysis.recording.machine)
    assert said
    assert {
        dtype: share for share, dtype in re.findall(r"(\d+%)(?: of the peak)? in (\w+)", title)
    } == said


def form(text: str) -> str:
    """One line, its numbers masked."""
    return re.sub(r"\d[\d,.]*", "#", " ".join(text.split()))


RULES = sorted(PUBLISHED.glob("*/rules.json"))


@pytest.mark.slow
@pytest.mark.parametrize("path", quick_and_long(RULES), ids=lambda path: path.parent.name)
def test_recorded_rules_are_judged_so_again(path: Path) -> None:
    inputs = rule_inputs(path.parent.name, PUBLISHED.parent)
    rows = {row.id: row for row in judge_inputs(inputs)}
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert recorded
    for before in recorded:  # a rule that was written since is not among them
        row = rows[before["id"]]
        assert (row.verdict, row.cases) == (before["verdict"], before["cases"])
        assert row.effect == pytest.approx(before["effect"])
        assert row.lo == pytest.approx(before["lo"])


@pytest.mark.parametrize("folder", PUBLISHED_RUNS, ids=lambda folder: folder.name)
def test_a_recording_names_no_host_user_or_path(folder: Path) -> None:
    text = (folder / "run.json").read_text(encoding="utf-8")
    for word in ("/home", "/root", "/work", "hostname", "GPU-", "serial"):
        assert word not in text
