from __future__ import annotations

import itertools
import json
from pathlib import Path

import pandas as pd
import pytest
from command_line import analysis
from synthetic import H100, model_law, random_sizes

from kernels.problem import Gemm


def a_file(folder: Path, framework: str = "TRTLLM", factor: float = 1.0) -> Path:
    """A small table of an H100, as a framework's collector writes it."""
    doubled = itertools.product((512, 1024, 2048, 4096), repeat=3)
    sizes = sorted({*random_sizes(300, 0), *doubled})
    seconds = model_law()([Gemm(m, n, k, "bf16") for m, n, k in sizes])
    frame = pd.DataFrame(sizes, columns=list("mnk")).assign(
        framework=framework, version="1.3.0rc20", device=H100.name, gemm_dtype="bfloat16",
        latency=seconds * factor * 1e3,
    )  # fmt: skip
    path = folder / f"{framework}.parquet"
    frame.to_parquet(path)
    return path


def test_an_imported_table_answers_for_its_machine_and_a_second_import_does_nothing(
    tmp_path: Path,
) -> None:
    path, place = a_file(tmp_path), ("--results", str(tmp_path))
    slower = a_file(tmp_path, "SGLANG", 1.25)
    first = analysis("import", path, slower, *place)
    assert first.returncode == 0, first.stderr
    assert "TensorRT-LLM 1.3.0rc20; on rows not seen" in first.stdout
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
    assert "imported already" in again.stderr
    assert (folder / "run.json").stat().st_mtime_ns == before

    asked = ("--machine", "nvidia-h100-sxm", "--gemm", "4096,4096,4096,bf16", "--json", *place)
    answer = json.loads(analysis("predict", *asked).stdout)
    assert answer["basis"] == "public"
    assert answer["source"].endswith("public rows, TensorRT-LLM 1.3.0rc20, warm")
    assert answer["hi_us"] / answer["lo_us"] < 1.5  # not the factor of four of shipped constants
    assert json.loads(analysis("recommend", *asked).stdout)["basis"] == "public"
    rows = {row["slug"]: row for row in json.loads(analysis("machines", "--json", *place).stdout)}
    assert set(rows["nvidia-h100-sxm"]) == {
        "slug", "name", "basis", "rows", "source", "median", "mean", "p95",
    }  # fmt: skip
    assert rows["nvidia-h100-sxm"]["basis"] == "public"
    kinds = {slug: row["basis"] for slug, row in rows.items()}
    assert (kinds["nvidia-h200"], kinds["nvidia-a100-pcie-80gb"]) == ("shipped", "generation")
    assert kinds["nvidia-t4"] == "none"  # nothing carries over from one generation to another

    told = analysis("rules", "--imported", *place, "--plots", tmp_path)
    assert "\n  twice the size takes less than twice the time: " in told.stdout
    assert (tmp_path / "rules-public.png").exists()


def test_what_cannot_be_imported_is_a_sentence(tmp_path: Path) -> None:
    answer = analysis("import", str(tmp_path / "none.parquet"), "--results", str(tmp_path))
    assert answer.returncode == 2
    assert len(answer.stderr.strip().splitlines()) == 1
    path = str(a_file(tmp_path))
    answer = analysis("import", path, "--machine", "nvidia-b200", "--results", str(tmp_path))
    assert answer.returncode == 2
    assert answer.stderr.startswith("there is no table of nvidia-b200")
    assert not (tmp_path / "public").exists()
