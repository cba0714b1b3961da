from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.commands.importer import is_imported
from analysis.imports.tables import PublicTable
from analysis.model.attention_basis import FILE
from analysis.recordings.imported import COLLECTIONS, VALIDATION
from analysis.recordings.load import load
from kernels.problem import Gemm
from tests.support.command_line import analysis
from tests.support.synthetic import H100, gemm_cases, model_law, random_sizes, record


def jumps(sizes: Sequence[tuple[int, ...]]) -> Any:
    """Return a factor for each shape that imitates how abruptly a library's kernels change."""
    return np.exp(0.3 * np.sign(np.sin(2.1 * np.log2([m for m, *_ in sizes]))))


def a_file(
    folder: Path, framework: str = "TRTLLM", factor: float = 1.0, jumping: bool = False
) -> Path:
    """Write a small table of an H100 in the format of a framework's collector; return its path."""
    doubled = itertools.product((512, 1024, 2048, 4096), repeat=3)
    sizes = sorted({*random_sizes(120, 0), *doubled})
    seconds = model_law()([Gemm(m, n, k, "bf16") for m, n, k in sizes])
    seconds = seconds * jumps(sizes) if jumping else seconds
    frame = pd.DataFrame(sizes, columns=list("mnk")).assign(
        framework=framework, version="1.3.0rc20", device=H100.name, gemm_dtype="bfloat16",
        latency=seconds * factor * 1e3,
    )  # fmt: skip
    path = folder / f"{framework}.parquet"
    frame.to_parquet(path)
    return path


@pytest.mark.long
def test_an_imported_table_answers_for_its_machine_and_a_second_import_does_nothing(
    tmp_path: Path,
) -> None:
    path, place = a_file(tmp_path), ("--results", str(tmp_path))
    slower = a_file(tmp_path, "SGLANG", 1.25)
    first = analysis("import", path, slower, *place)
    assert first.returncode == 0, first.stderr
    assert "TensorRT-LLM 1.3.0rc20. Held-out errors" in first.stdout
    folder = tmp_path / "public" / "nvidia-h100-sxm"
    for name in ("plots/accuracy.png", "recommendations.md", "rules.md", "predicted.csv"):
        assert (folder / name).exists()
    judged = json.loads((folder / "validation.json").read_text())
    assert judged["same"]["median"] < 0.05
    (other,) = judged["other"]
    assert other["source"] == "SGLang 1.3.0rc20"
    assert other["median"] == pytest.approx(1 - 1 / 1.25, abs=0.03)
    before = (folder / "run.json").stat().st_mtime_ns
    again = analysis("import", path, slower, *place)
    assert "already imported" in again.stderr
    assert (folder / "run.json").stat().st_mtime_ns == before

    arguments = ("--machine", "nvidia-h100-sxm", "--gemm", "4096,4096,4096,bf16", "--json", *place)
    answer = json.loads(analysis("predict", *arguments).stdout)
    assert answer["basis"] == "public"
    assert answer["source"].endswith("public measurements, TensorRT-LLM 1.3.0rc20, warm")
    assert answer["hi_us"] / answer["lo_us"] < 1.5  # not the factor of four of shipped constants
    assert json.loads(analysis("recommend", *arguments).stdout)["basis"] == "public"
    rows = {row["slug"]: row for row in json.loads(analysis("machines", "--json", *place).stdout)}
    assert set(rows["nvidia-h100-sxm"]) == {
        "slug", "name", "basis", "rows", "source", "median", "mean", "p95",
    }  # fmt: skip
    assert rows["nvidia-h100-sxm"]["basis"] == "public"
    kinds = {slug: row["basis"] for slug, row in rows.items()}
    assert (kinds["nvidia-h200"], kinds["nvidia-a100-pcie-80gb"]) == ("shipped", "generation")
    assert kinds["nvidia-t4"] == "none"  # no machine of its generation was measured

    result = analysis("rules", "--imported", *place, "--plots", tmp_path)
    assert "\n  twice the size takes less than twice the time: " in result.stdout
    assert (tmp_path / "rules-public.png").exists()


def test_what_cannot_be_imported_is_a_sentence(tmp_path: Path) -> None:
    answer = analysis("import", str(tmp_path / "none.parquet"), "--results", str(tmp_path))
    assert answer.returncode == 2
    assert len(answer.stderr.strip().splitlines()) == 1
    path = str(a_file(tmp_path))
    answer = analysis("import", path, "--machine", "nvidia-b200", "--results", str(tmp_path))
    assert answer.returncode == 2
    assert answer.stderr.startswith("no public table has bf16 times of nvidia-b200")
    assert not (tmp_path / "public").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_an_import_with_a_damaged_validation_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    for name in ("run.json", COLLECTIONS):
        (tmp_path / name).touch()
    (tmp_path / FILE).write_text("{}")
    (tmp_path / VALIDATION).write_text(text)
    monkeypatch.setattr("analysis.commands.importer.is_of_file", lambda _: False)
    table = PublicTable(tmp_path, "NVIDIA H200", "trtllm", "1.0", 9, "package 1", "MIT")
    assert not is_imported(table, tmp_path)


@pytest.mark.parametrize(("text", "expected"), [("{}", True), ("{", False)])
def test_an_import_with_damaged_attention_fits_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: bool
) -> None:
    for name in ("run.json", COLLECTIONS, VALIDATION):
        (tmp_path / name).touch()
    (tmp_path / FILE).write_text(text)
    table = PublicTable(tmp_path, "NVIDIA H200", "trtllm", "1.0", 9, "package 1", "MIT")
    monkeypatch.setattr("analysis.commands.importer.is_of_file", lambda _: True)
    monkeypatch.setattr(
        "analysis.commands.importer.read_collections", lambda _: {table.source: None}
    )
    assert is_imported(table, tmp_path) == expected


def a_csv(folder: Path, count: int = 120) -> Path:
    """Write a user's CSV file, with the factors of :func:`jumps` and times that are 10% longer."""
    sizes = random_sizes(count, 7)
    seconds = model_law()([Gemm(m, n, k, "bf16") for m, n, k in sizes]) * 1.1 * jumps(sizes)
    frame = pd.DataFrame(sizes, columns=list("mnk")).assign(dtype="bf16", time_us=seconds * 1e6)
    path = folder / "mine.csv"
    frame.to_csv(path, index=False)
    return path


@pytest.mark.long
def test_a_file_of_ones_own_answers_and_a_table_becomes_its_prior(tmp_path: Path) -> None:
    path, place = a_csv(tmp_path), ("--results", tmp_path)
    here = ("--machine", "h100-sxm", *place)
    first = analysis("import", path, *here)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("nvidia-h100-sxm: 120 measurements, mine.csv. Held-out errors: ")
    assert "already imported" in analysis("import", path, *here).stderr
    m, n, k = random_sizes(120, 7)[0]
    answer = json.loads(analysis("predict", "--gemm", f"{m},{n},{k},bf16", "--json", *here).stdout)
    assert (answer["basis"], answer["evidence"]) == ("recorded", "measured")
    assert answer["source"] == "120 measurements from mine.csv, warm"
    result = analysis("recommend", "--gemm", f"{m},{n},{k},bf16", "--json", *here)
    assert json.loads(result.stdout)["basis"] == "recorded"
    folder = tmp_path / "public" / "nvidia-h100-sxm"
    judged = analysis("validate", path, "--machine", "h100-sxm", "--calibrate", "64", "--json")
    assert json.loads(judged.stdout)["rows"] == 120 - 64

    # An imported table does not replace the file's recording, but becomes its prior.
    result = analysis("import", a_file(tmp_path, jumping=True), *place)
    assert result.returncode == 0, result.stderr
    assert "120 measurements, mine.csv" in result.stdout
    assert (folder / "collections.parquet").exists()
    arguments = ("predict", "--gemm", "776,888,992,bf16", "--json", *here)
    source = json.loads(analysis(*arguments).stdout)["source"]
    assert "mine.csv, warm, on top of TensorRT-LLM 1.3.0rc20 of nvidia-h100-sxm" in source
    again = analysis("import", tmp_path / "TRTLLM.parquet", *place)
    assert "TensorRT-LLM 1.3.0rc20 is already imported as the prior of your file" in again.stderr


@pytest.mark.slow
def test_a_file_of_convolutions_is_imported_with_their_speeds(tmp_path: Path) -> None:
    passes = ("fprop", "dgrad", "wgrad")
    rows = [
        {"op": "conv", "batch": 8, "c": c, "h": 28, "w": 28, "kout": 64, "r": 3, "s": 3,
         "stride": "2x2", "padding": "1", "dtype": "bf16", "pass": pass_, "time_us": 20 + c / 10}
        for c, pass_ in itertools.product((32, 48, 64, 96), passes)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "convs.csv", index=False)
    here = ("--machine", "h100-sxm", "--results", tmp_path)
    done = analysis("import", tmp_path / "convs.csv", *here)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "public" / "nvidia-h100-sxm"
    assert (folder / "plots" / "roofline.png").exists()
    for row in load(folder).rows.to_dict("records"):
        flops = 2 * 8 * row["c"] * 64 * 9 * 14 * 14  # of the output's 14×14 pixels in every pass
        assert row["tflops"] == pytest.approx(flops / row["time_us"] / 1e6)


@pytest.mark.slow
def test_a_failing_import_leaves_what_was_there(tmp_path: Path) -> None:
    path, here = a_csv(tmp_path, 30), ("--machine", "v100-sxm2-16gb", "--results", tmp_path)
    half = pd.read_csv(path).assign(dtype="fp16")
    half.to_csv(tmp_path / "fp16.csv", index=False)
    assert analysis("import", tmp_path / "fp16.csv", *here).returncode == 0
    assert "already imported" in analysis("import", tmp_path / "fp16.csv", *here).stderr
    other = analysis("import", tmp_path / "fp16.csv", *here, "--layout", "nn")
    assert "already imported" not in other.stderr  # with another layout, the file is read again
    failed = analysis("import", path, *here)
    assert failed.returncode == 2
    assert "does not compute bf16; use one of fp32, fp16" in failed.stderr
    kept = analysis("machines", "--json", "--results", tmp_path)
    rows = {row["slug"]: row for row in json.loads(kept.stdout)}
    assert rows["nvidia-v100-sxm2-16gb"]["basis"] == "recorded"


def test_few_own_rows_move_what_is_shipped(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text("m,n,k,dtype,time_us\n8192,8192,8192,bf16,1400\n64,64,64,bf16,3\n")
    here = ("--machine", "h200", "--results", tmp_path)
    assert analysis("import", path, *here).returncode == 0
    arguments = ["--gemm", "4096,4096,4096,bf16", "--gemm", "4096,4096,4096,fp8"]
    rows = json.loads(analysis("predict", *arguments, "--json", *here).stdout)
    assert [row["basis"] for row in rows] == ["recorded", "shipped"]
    assert rows[0]["hi_us"] / rows[0]["lo_us"] < 1.5
    start = "2 measurements from few.csv, warm, on top of shipped constants, fitted to"
    assert start in rows[0]["source"]
    nothing = ("--machine", "h200", "--results", tmp_path / "nothing")
    unmoved = json.loads(analysis("predict", *arguments, "--json", *nothing).stdout)
    # Two rows change the prediction in their dtype a little, and no prediction in another dtype.
    assert 0 < abs(rows[0]["time_us"] / unmoved[0]["time_us"] - 1) < 0.1
    assert rows[1]["time_us"] == unmoved[1]["time_us"]
    known = json.loads(analysis("predict", "--gemm", "64,64,64,bf16", "--json", *here).stdout)
    assert (known["basis"], known["time_us"]) == ("recorded", 3)


@pytest.mark.long
def test_two_files_of_one_machine_compare(tmp_path: Path) -> None:
    path = a_csv(tmp_path, 40)
    slower = pd.read_csv(path).assign(time_us=lambda rows: rows["time_us"] * 1.3)
    slower.to_csv(tmp_path / "slower.csv", index=False)
    for name, file in (("old", "mine.csv"), ("new", "slower.csv")):
        here = ("--machine", "h100-sxm", "--results", tmp_path / name)
        assert analysis("import", tmp_path / file, *here).returncode == 0
    folders = [tmp_path / name / "public" / "nvidia-h100-sxm" for name in ("old", "new")]
    compared = analysis("compare", *folders, "--json")
    assert compared.returncode == 0, compared.stderr  # one time per case cannot show a change
    document = json.loads(compared.stdout)
    assert document["counts"]["ambiguous"] == len(document["cases"]) == 40
    assert all(case["ratio"] == pytest.approx(1.3) for case in document["cases"])


def test_questions_about_a_file_of_times_are_sentences(tmp_path: Path) -> None:
    path, place = a_csv(tmp_path), ("--results", tmp_path)
    misnamed = tmp_path / "misnamed.csv"
    misnamed.write_text("m,n,k,time\n64,64,64,3\n")
    deepbench = tmp_path / "v100-fp16-gemm.csv"
    deepbench.write_text("M,N,K,transA,transB,time_ms\n1760,16,512,T,N,0.02\n")
    folder = record(tmp_path / "recording", gemm_cases([(64, 64, 64)]), [1e-6])
    for arguments, words in (
        ((path,), "belongs to one machine"),
        ((path, path, "--machine", "h200"), "a file of times has to be imported by itself"),
        ((path, "--machine", "h100"), "give the full name"),
        ((path, "--machine", "l20"), "is not known"),
        ((path, "--machine", "h200", "--dtype", "bf61"), "did you mean 'bf16'"),
        ((path, "--machine", "h200", "--layout", "xx"), "--layout is 'xx'"),
        ((tmp_path / "none.csv", "--machine", "h200"), "cannot be read"),
        ((tmp_path / "measurements.csv", "--machine", "h200"), "measurements.csv does not exist"),
        ((tmp_path, "--machine", "h200"), "has no measurements.csv"),
        ((a_file(tmp_path), "--dtype", "bf16"), "are only for a CSV file"),
        ((misnamed, "--machine", "h200", "--dtype", "bf16"), "has no known format"),
        ((folder, "--machine", "h100-sxm", "--dtype", "fp16"), "is a recording or a published"),
        (
            (deepbench, "--machine", "v100-sxm2-16gb", "--layout", "nn"),
            "is a recording or a published",
        ),
    ):
        answer = analysis("import", *arguments, *place)
        assert (answer.returncode, words in answer.stderr) == (2, True), (arguments, answer.stderr)
        assert len(answer.stderr.strip().splitlines()) == 1
