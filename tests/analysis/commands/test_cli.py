from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.model.fitted import analyse, write_predictions
from analysis.recordings.load import load
from analysis.units import microseconds
from analysis.words import share_of
from kernels.common.errors import UserError
from kernels.machine import known_machines
from tests.support.command_line import analysis
from tests.support.synthetic import recorded

PREDICT_KEYS = {
    "time_us", "tflops", "limit", "tile", "tiles", "waves", "tail_efficiency", "tile_efficiency",
    "bytes", "lo_us", "hi_us", "explanation",
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    recorded(folder / "nvidia-h100-sxm", 150)
    return folder


def test_predict_for_machines_with_and_without_a_recording(results: Path) -> None:
    for slug in ("nvidia-h100-sxm", "nvidia-b200"):
        answer = analysis("predict", "--machine", slug, "--gemm", "4096,4096,4096,bf16", "--json",
                          "--results", str(results))  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        row = json.loads(answer.stdout)
        assert set(row) >= PREDICT_KEYS
        assert row["lo_us"] < row["time_us"] < row["hi_us"]
    assert "nvidia-v100-pcie-32gb" in known_machines()


def test_what_was_measured_is_answered_as_measured_and_machines_stand_side_by_side(
    results: Path, tmp_path: Path
) -> None:
    row = load(results / "nvidia-h100-sxm").products.iloc[0]
    known = f"{row.m},{row.n},{row.k},bf16"
    file = tmp_path / "shapes.csv"
    file.write_text(f"m,n,k,dtype\n{known}\n{row.m + 1},{row.n},{row.k},bf16\n")
    machines = ("--machine", "nvidia-h100-sxm", "--machine", "nvidia-b200", "--results", results)
    rows = json.loads(analysis("predict", "--file", file, *machines, "--json").stdout)
    evidence = [(r["problem"].split(",")[0], r["machine"], r["evidence"]) for r in rows]
    assert evidence == [
        (str(row.m), "nvidia-h100-sxm", "measured"), (str(row.m), "nvidia-b200", "predicted"),
        (str(row.m + 1), "nvidia-h100-sxm", "predicted"),
        (str(row.m + 1), "nvidia-b200", "predicted"),
    ]  # fmt: skip
    # The interval is that of a second run. Both runs are equally uncertain, so it is √2 times as
    # wide as the interval of the first run.
    time, lo, hi = row["time_us"], row["time_lo_us"], row["time_hi_us"]
    ends = time, time * (lo / time) ** 2**0.5, time * (hi / time) ** 2**0.5
    assert [rows[0][name] for name in ("time_us", "lo_us", "hi_us")] == pytest.approx(ends)
    text = analysis("predict", "--gemm", known, *machines).stdout
    assert f"nvidia-h100-sxm: {known},nt,1: measured {microseconds(row['time_us'])} µs" in text
    assert text.splitlines()[2].startswith(f"nvidia-b200: {known},nt,1: ")
    only = ("--file", file, "--machine", "nvidia-h100-sxm", "--results", results, "--json")
    advice = json.loads(analysis("recommend", *only).stdout)
    assert [answer["problem"] for answer in advice] == [rows[0]["problem"], rows[2]["problem"]]


def test_predict_takes_convolutions_and_prints_two_lines(results: Path) -> None:
    answer = analysis("predict", "--machine", "nvidia-h200", "--conv",
                      "32,64,56,56,64,3,3,1,1,1,1,bf16", "--results", str(results))  # fmt: skip
    assert answer.returncode == 0
    first, second = answer.stdout.splitlines()
    assert first.endswith("TFLOP/s")
    assert second.startswith("    limited by ")


@pytest.mark.slow
def test_report_writes_everything_and_recommend_answers_from_it(results: Path) -> None:
    answer = analysis("report", "--results", str(results))
    assert answer.returncode == 0, answer.stderr
    folder = results / "nvidia-h100-sxm"
    for name in ("predicted.csv", "calibration.json", "recommendations.md", "plots/roofline.png"):
        assert (folder / name).exists(), name
    assert answer.stdout.count("•") >= 3
    result = analysis(
        "recommend", "--machine", "nvidia-h100-sxm", "--gemm", "1000,1001,1000,bf16", "--json",
        "--results", str(results),
    )  # fmt: skip
    document = json.loads(result.stdout)
    assert document["verdict"] in ("do it", "likely", "leave it")
    assert document["problem"] == "1000,1001,1000,bf16,nt,1"


def test_calibrate_plot_and_table(results: Path) -> None:
    document = json.loads(analysis("calibrate", "--results", str(results), "--json").stdout)
    assert document["groups"]["cublas gemm bf16"]["rows"] > 100
    assert "roofline.png" in analysis("plot", "--results", str(results)).stdout
    drawn = analysis("plot", "roofline", "roofline", "conv-layouts", "--results", str(results))
    assert drawn.returncode == 0
    assert len(drawn.stdout.splitlines()) == 1
    assert "has too little data for conv-layouts; name other plots" in drawn.stderr
    assert "recommendations.md" in analysis("table", "--results", str(results)).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict", "--machine", "nvidia-h200"), "add --gemm, --conv, --attention or --file."),
        (("recommend", "--machine", "nvidia-h200"), "add --gemm, --conv or --file."),
        (("predict", "--machine", "nvidai-h200", "--gemm", "8,8,8,bf16"), "'nvidia-h200'"),
        (("predict", "--machine", "nvidia-h200", "--gemm", "8,8"), "--gemm takes"),
        (("recommend", "--machine", "nvidia-h200", "--gemm", "8,8,8,bf16", "--pad", "x"), "--pad"),
        (("predict", "--machine", "nvidia-v100-sxm2-16gb", "--gemm", "8,8,8,bf16"), "compute bf16"),
        (("predict", "--gemm", "8,8,8,bf16", "--attention-kernel", "vllm"), "needs --attention"),
        (("rules", "--plots", "x"), "--plots needs --table"),
        (("plot", "square", "--sweep", "steps", "--machine", "cpu-intel-xeon-avx512bf16-1t"),
         "with --sweep steps; name other plots, or leave --sweep out"),
    ],
)  # fmt: skip
def test_usage_errors(arguments: tuple[str, ...], words: str) -> None:
    answer = analysis(*arguments)
    assert answer.returncode == 2
    assert words in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("calibration.json", "{", "cannot be read; run `python -m analysis calibrate"),
        ("calibration.json", '{"groups": {"a": 1}}', "calibration.json cannot be read"),
        pytest.param(
            "calibration.json", "[" * 100_000, "calibration.json cannot be read", id="nested"
        ),
        ("run.json", "[]", r"run.json is damaged: the document is [], not a mapping"),
        ("run.json", '{"schema": 7}', "run.json is damaged: the document has no 'protocol'"),
    ],
)
def test_broken_files_are_sentences(tmp_path: Path, name: str, text: str, words: str) -> None:
    folder = tmp_path / "nvidia-h100-sxm"
    recorded(folder, 20)
    (folder / name).write_text(text)
    answer = analysis("predict", "--machine", "nvidia-h100-sxm", "--gemm", "8,8,8,bf16",
                      "--results", str(tmp_path))  # fmt: skip
    assert answer.returncode == 2
    assert words in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_validate_also_tells_how_many_shapes_are_predicted_per_second(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h100-sxm"
    recorded(folder, 40)
    command = ("validate", str(folder), "--machine", "nvidia-h100-sxm", "--calibrate", "12")
    answer = analysis(*command, "--json")
    assert answer.returncode == 0, answer.stderr
    speed = json.loads(answer.stdout)["shapes_per_second"]
    assert set(speed) == {"physics", "full"}
    assert min(speed.values()) > 0
    assert "Shapes predicted per second on one core" in analysis(*command).stdout


def test_the_learning_curve_and_the_noise_floor_are_in_the_json_document(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h100-sxm"
    recorded(folder, 60)
    command = ("validate", folder, "--machine", "nvidia-h100-sxm", "--calibrate", "12", "--json")
    plain = json.loads(analysis(*command).stdout)
    assert not {"curve", "noise_floor"} & plain.keys()
    answer = analysis(*command, "--curve", "--again", folder)
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert document["noise_floor"]["median"] == 0
    point = document["curve"][0]
    assert (point["holdout"], point["count"]) == ("rows", 32)
    assert point["errors"].keys() == {"rows", "median", "mean", "p95"}


def test_a_recording_is_not_judged_as_another_machines(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h100-sxm"
    recorded(folder, 40)
    answer = analysis("validate", str(folder), "--machine", "nvidia-l40s", "--calibrate", "12")
    assert answer.returncode == 2
    assert "no row for nvidia-l40s; its rows are from nvidia-h100-sxm" in answer.stderr


@pytest.mark.parametrize(
    ("trees", "words"),
    [
        # The first tree splits its rows but has no branches. The second one has fewer features than
        # the model.
        ({"width": 1, "feature": "AA==", "number": "AAAAAA=="}, "calibration.json cannot be read"),
        ({"width": 1, "feature": "/w==", "number": "AAAAAA=="}, "was written by another version"),
    ],
)
def test_trees_of_a_stranger_are_checked(
    tmp_path: Path, trees: dict[str, object], words: str
) -> None:
    folder = tmp_path / "nvidia-h100-sxm"
    write_predictions(analyse(recorded(folder, 20)))
    path = folder / "calibration.json"
    document = json.loads(path.read_text())
    document["groups"]["cublas gemm bf16"]["residual"] = {
        "seen": 0.1,
        "unseen": 0.1,
        "trees": trees,
    }
    path.write_text(json.dumps(document))
    answer = analysis("predict", "--machine", "nvidia-h100-sxm", "--gemm", "8,8,8,bf16",
                      "--results", str(tmp_path))  # fmt: skip
    assert answer.returncode == 2
    assert words in answer.stderr
    assert "python -m analysis calibrate" in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_an_empty_results_folder_is_a_sentence(tmp_path: Path) -> None:
    answer = analysis("plot", "--results", str(tmp_path))
    assert answer.returncode == 2
    assert answer.stderr.strip() == "nothing is recorded yet; run `make sweep` first."


def test_shares() -> None:
    assert share_of("12.5%", "pad") == 0.125
    assert share_of("0.1", "pad") == 0.1
    with pytest.raises(UserError):
        share_of("200%", "pad")
