"""Test ``analysis fleet`` as a user runs it: what it prints, writes and refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.__main__ import app
from analysis.fleet.fleet_report import (
    _turns_sentences,
    findings,
    make_report,
    report_json,
    report_text,
)
from analysis.fleet.speeds import Interference, SpeedChange, fleet_speeds
from analysis.plots.fleet import draw_fleet, fleet_title
from kernels.cli import run
from tests.studies.fleets import (
    BAD,
    HOT,
    MACHINE,
    MAIN,
    PLAIN,
    SETTINGS,
    Setting,
    record_fleet,
    simulate,
)

AGREED = {
    "gpu", "id", "node", "worker", "speed", "lo", "hi", "kinds", "sm_mhz", "power_w", "temp_c",
    "throttled", "verdict", "explained", "sentence",
}  # fmt: skip


def said(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["x", "fleet", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        run(app, "x")
    return int(ended.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return record_fleet(tmp_path / MACHINE.slug, simulate(MAIN, 0)[0])


def test_json_has_what_is_agreed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, folder, "--json") == 0
    out = capsys.readouterr().out
    document = json.loads(out)
    assert document == json.loads((folder / "fleet.json").read_text(encoding="utf-8"))
    assert {"machine", "gpus", "spread", "margin", "interference"} <= document.keys()
    assert (document["machine"], document["margin"]) == (MACHINE.slug, 0.05)
    assert len(document["gpus"]) == 64
    speeds = [gpu["speed"] for gpu in document["gpus"]]
    assert speeds == sorted(speeds)
    by_gpu = {gpu["gpu"]: gpu for gpu in document["gpus"]}
    bad, hot = by_gpu[BAD], by_gpu[HOT]
    assert (bad["verdict"], bad["explained"], bad["throttled"]) == ("slow", None, [])
    assert hot["throttled"] == ["hw_thermal_slowdown"]
    assert hot["explained"].startswith("clock: hw_thermal_slowdown")
    for gpu in document["gpus"]:
        assert gpu.keys() >= AGREED
        assert gpu["lo"] < gpu["speed"] < gpu["hi"]
        assert gpu["kinds"]["sustained"] == {key: gpu[key] for key in ("speed", "lo", "hi")}
        assert set(gpu["kinds"]) == {"sustained", "burst", "memory", "small"}
    assert {"node", "ratio", "lo", "hi", "slowed"} <= document["interference"][0].keys()


def test_plots_are_written_and_the_title_is_the_finding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, folder) == 0
    assert (folder / "plots" / "fleet.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "plots" / "fleet.svg").read_text(encoding="utf-8")
    assert "2 of 64 GPUs are slow; the reason is unknown for 1 of them" in svg
    assert MACHINE.name in svg
    told = capsys.readouterr()
    assert "fleet.png" in told.err
    lines = told.out.splitlines()
    assert sum(line.startswith("GPU ") for line in lines) == 20
    assert any(line.startswith("… and 44 more GPUs") for line in lines)
    assert len([line for line in lines if line.startswith("• GPU")]) == 2
    assert "nan" not in told.out


@pytest.mark.slow
def test_a_root_gives_a_report_for_each_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record_fleet(folder.parent / "another", simulate(PLAIN, 1)[0])
    assert said(monkeypatch, folder.parent, "--json") == 0
    documents = json.loads(capsys.readouterr().out)
    assert [len(document["gpus"]) for document in documents] == [64, 64]
    assert said(monkeypatch, folder.parent) == 0
    assert capsys.readouterr().out.count("64 GPUs of 8 nodes") == 2


@pytest.mark.long
def test_a_wider_margin_accuses_fewer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {}
    for margin in ("1%", "5%", "0.1", "50%", "100%"):
        assert said(monkeypatch, folder, "--margin", margin, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        slow[margin] = [gpu["gpu"] for gpu in document["gpus"] if gpu["verdict"] == "slow"]
    assert set(slow["0.1"]) == {HOT}
    assert set(slow["0.1"]) < set(slow["5%"]) == {BAD, HOT} <= set(slow["1%"])
    assert slow["50%"] == slow["100%"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "no recording in nowhere has an anchors.csv"),
        (
            [".", "--margin", "much"],
            "--margin takes a share from 0% to 100%, not 'much'. Give a share such as 12.5%",
        ),
        ([".", "--margin", "-5%"], "--margin takes a share"),
    ],
)
def test_bad_input_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], sentence: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert said(monkeypatch, *arguments) == 2
    told = capsys.readouterr()
    assert sentence in told.err
    assert not told.out


@pytest.mark.parametrize("name", SETTINGS)
def test_no_fleet_makes_a_report_stumble(tmp_path: Path, name: str) -> None:
    report = make_report(record_fleet(tmp_path / "x", simulate(SETTINGS[name], 3)[0]), 0.05)
    text = report_text(report)
    assert "nan" not in text + fleet_title(report)
    json.dumps(report_json(report), allow_nan=False)
    assert draw_fleet(report) is not None
    several = SETTINGS[name].per_node > 1
    assert ("Working in parallel causes no significant slowdown" in text) == several


def test_the_legend_of_a_fleet_counts_gpus_without_a_clock(tmp_path: Path) -> None:
    report = make_report(
        record_fleet(tmp_path / "x", simulate(next(iter(SETTINGS.values())), 3)[0]), 0.05
    )
    kind = report.speeds.kinds[report.speeds.overall]
    kind.clock[:] = np.where(np.arange(len(kind.clock)) == 0, 0.0, np.nan)
    figure = draw_fleet(report)
    assert figure is not None
    legend = figure.axes[-1].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    counts = [int(label.partition(", ")[2]) for label in labels if ", " in label]
    assert sum(counts) == len(report.verdicts)


def test_of_one_gpu_there_is_nothing_to_compare(tmp_path: Path) -> None:
    report = make_report(record_fleet(tmp_path / "x", simulate(Setting(1, 1), 0)[0]), 0.05)
    assert findings(report) == ["Only one GPU was timed, so it cannot be compared with others."]
    assert draw_fleet(report) is None
    (gpu,) = report_json(report)["gpus"]
    assert (gpu["speed"], gpu["verdict"]) == (None, "ordinary")


def test_workers_of_a_cpu_are_not_called_gpus(tmp_path: Path) -> None:
    gpus = make_report(record_fleet(tmp_path / "x", simulate(Setting(2, 2), 0)[0]), 0.05)
    recording = gpus.anchors.recording
    on_cpu = replace(recording, machine=replace(recording.machine, kind="cpu"))
    workers = replace(gpus, anchors=replace(gpus.anchors, recording=on_cpu))
    assert "4 GPUs of 2 nodes" in report_text(gpus)
    assert "4 workers of 2 nodes" in report_text(workers)
    assert not any("GPU" in sentence for sentence in findings(workers))


def test_two_gpus_are_compared_with_each_other(tmp_path: Path) -> None:
    fleet, _ = simulate(Setting(1, 2, bad=0.09), 0)
    sentence = findings(make_report(record_fleet(tmp_path / "x", fleet), 0.05))[0]
    assert "slower than GPU 0" in sentence
    assert "it is unknown which GPU is normal" in sentence
    same = replace(fleet, log_time=fleet.log_time[:, [0, 0]], error=fleet.error[:, [0, 0]])
    assert "do not differ" in findings(make_report(record_fleet(tmp_path / "y", same), 0.05))[0]


def test_two_gpus_with_unknown_intervals_are_not_called_equal(tmp_path: Path) -> None:
    fleet, _ = simulate(Setting(1, 2), 0)
    report = make_report(record_fleet(tmp_path / "x", fleet), 0.05)
    # With a single anchor, the scatter between anchors does not show the error either.
    one = np.flatnonzero(fleet.kinds == "sustained")[:1]
    alone = replace(
        fleet,
        kinds=fleet.kinds[one],
        log_time=fleet.log_time[:, :, one],
        error=np.full_like(fleet.error[:, :, one], np.nan),
        sensors={name: values[:, :, one] for name, values in fleet.sensors.items()},
        throttled={reason: seen[:, :, one] for reason, seen in fleet.throttled.items()},
    )
    unknown = fleet_speeds(alone)
    sentence = findings(replace(report, speeds=unknown))[0]
    assert sentence.startswith("It is unknown whether GPU ")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [([3], "node 3 slow"), ([0, 1], "nodes 0 and 1 slow"), (range(9), "4 and 4 more slow")],
)
def test_nodes_that_took_turns_are_listed(nodes: Sequence[int], words: str) -> None:
    (sentence,) = _turns_sentences(nodes, "GPU")
    assert words in sentence


def test_a_node_all_of_whose_gpus_are_slow_is_named(tmp_path: Path) -> None:
    fleet, _ = simulate(PLAIN, 0)
    log = fleet.log_time.copy()
    log[:, 16:24] += 0.12
    report = make_report(record_fleet(tmp_path / "x", replace(fleet, log_time=log)), 0.05)
    assert "All 8 GPUs of node 2 are slow, which points to the node." in findings(report)


def test_one_slow_gpu_is_the_title(tmp_path: Path) -> None:
    fleet, _ = simulate(replace(MAIN, hot=0.0), 0)
    title = fleet_title(make_report(record_fleet(tmp_path / "x", fleet), 0.05))
    assert title.startswith(
        "GPU 3 (00000003) of node 0 is 9% slower than the median in sustained compute: "
        "reason unknown"
    )
    sound = make_report(record_fleet(tmp_path / "y", simulate(PLAIN, 0)[0]), 0.05)
    assert fleet_title(sound).startswith(
        "None of 64 GPUs is clearly slow; the speeds have a standard deviation of 0.8%"
    )


def test_a_thousand_gpus_are_told_in_a_page(tmp_path: Path) -> None:
    fleet, _ = simulate(replace(PLAIN, spread=0.1, nodes=60), 0)
    report = make_report(record_fleet(tmp_path / "x", fleet), 0.05)
    assert len(report_text(report).splitlines()) < 60
    assert "more GPUs are slow or throttled" in report_text(report)


def test_what_is_unknown_is_null(tmp_path: Path) -> None:
    fleet, _ = simulate(Setting(nvml=False, samples_apart=False), 0)
    log = fleet.log_time.copy()
    log[:, 0, fleet.kinds == "sustained"] = np.nan
    folder = record_fleet(tmp_path / "x", replace(fleet, log_time=log))
    document = report_json(make_report(folder, 0.05))
    last: dict[str, Any] = document["gpus"][-1]
    assert last["gpu"] == 0
    assert (last["speed"], last["sm_mhz"], last["clock"]) == (None, None, None)
    assert all(math.isfinite(gpu["speed"]) for gpu in document["gpus"][:-1])


def test_unknown_nodes_are_not_counted(tmp_path: Path) -> None:
    report = make_report(record_fleet(tmp_path / "x", simulate(Setting(2, 2), 0)[0]), 0.05)
    fleet = report.anchors.fleet
    devices = tuple(replace(device, node=None) for device in fleet.devices)
    anchors = replace(report.anchors, fleet=replace(fleet, devices=devices))
    heading = report_text(replace(report, anchors=anchors)).splitlines()[0]
    assert "4 GPUs, " in heading
    assert "node" not in heading


def test_devices_of_an_unknown_node_have_no_node_none(tmp_path: Path) -> None:
    report = make_report(record_fleet(tmp_path / "x", simulate(MAIN, 0)[0]), 0.05)
    slowed = SpeedChange(1.2, 1.1, 1.3, True)
    changes = [Interference(node, slowed, {"memory": slowed}) for node in (None, 1)]
    speeds = replace(report.speeds, interference=tuple(changes))
    text = report_text(replace(report, speeds=speeds))
    assert "When all GPUs of an unknown node work in parallel" in text
    assert "When all GPUs of node 1 work in parallel" in text


def test_a_slowdown_that_only_all_kinds_together_show_is_reported(tmp_path: Path) -> None:
    report = make_report(record_fleet(tmp_path / "x", simulate(MAIN, 0)[0]), 0.05)
    change = Interference(0, SpeedChange(1.02, 1.01, 1.03, True),
                          {"memory": SpeedChange(1.02, 0.99, 1.05, False)})  # fmt: skip
    speeds = replace(report.speeds, interference=(change,))
    sentences = findings(replace(report, speeds=speeds))
    assert (
        "When all GPUs of node 0 work in parallel, the median anchor takes 2.0% (1.0–3.0%) longer "
        "than when one GPU works at a time."
    ) in sentences
    assert not any("no significant slowdown" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("compared", "nodes"),
    [(1, "node 0"),
     (3, "3 of the 3 nodes that were timed with one GPU at a time and with all GPUs in parallel"),
     (8, "8 of 8 nodes")],
)  # fmt: skip
def test_nodes_that_were_timed_in_one_phase_are_not_counted_silently(
    tmp_path: Path, compared: int, nodes: str
) -> None:
    fleet, _ = simulate(PLAIN, 0)  # 8 nodes with 8 GPUs each
    log = fleet.log_time.copy()
    log[1, 8 * compared :] = np.nan
    text = report_text(
        make_report(record_fleet(tmp_path / "x", replace(fleet, log_time=log)), 0.05)
    )
    place = "this node" if compared == 1 else "the median node"
    assert f"slowdown above 1% for the GPUs on {nodes}. On {place}, anchors take" in text


def test_long_names_of_kinds_stay_above_their_columns(tmp_path: Path) -> None:
    fleet, _ = simulate(MAIN, 0)
    log = fleet.log_time.copy()
    log[:, 10:, fleet.kinds == "sustained"] = np.nan  # most GPUs lack a sustained time
    speeds = fleet_speeds(replace(fleet, log_time=log))
    report = make_report(record_fleet(tmp_path / "x", fleet), 0.05)
    assert speeds.overall == "burst"
    lines = report_text(replace(report, speeds=speeds)).splitlines()
    head = next(i for i, line in enumerate(lines) if "sustained" in line and "verdict" in line)
    end = lines[head].index("sustained") + len("sustained")
    assert lines[head + 1][end - 1] in "%–"


def test_gpus_on_nodes_of_their_own_cannot_slow_each_other_down(tmp_path: Path) -> None:
    report = make_report(record_fleet(tmp_path / "x", simulate(Setting(3, 1), 0)[0]), 0.05)
    assert not any("each other" in sentence for sentence in findings(report))
