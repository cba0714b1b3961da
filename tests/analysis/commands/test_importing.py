from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
from synthetic import H100, model_law, random_sizes

from kernels.problem import Gemm

ROOT = Path(__file__).resolve().parents[3]


def analysis(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "analysis", *arguments], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def a_file(folder: Path) -> Path:
    """A small table of an H100, as a framework's collector writes it."""
    sizes = sorted(set(random_sizes(300, 0)))
    seconds = model_law()([Gemm(m, n, k, "bf16") for m, n, k in sizes])
    frame = pd.DataFrame(sizes, columns=list("mnk")).assign(
        framework="TRTLLM", version="1.3.0rc20", device=H100.name, gemm_dtype="bfloat16",
        latency=seconds * 1e3,
    )  # fmt: skip
    path = folder / "gemm_perf.parquet"
    frame.to_parquet(path)
    return path


def test_an_imported_table_answers_for_its_machine_and_a_second_import_does_nothing(
    tmp_path: Path,
) -> None:
    path, place = a_file(tmp_path), ("--results", str(tmp_path))
    first = analysis("import", str(path), *place)
    assert first.returncode == 0, first.stderr
    assert "TensorRT-LLM 1.3.0rc20; on rows not seen" in first.stdout
    folder = tmp_path / "public" / "nvidia-h100-sxm"
    assert (folder / "plots" / "accuracy.png").exists()
    before = (folder / "run.json").stat().st_mtime_ns
    again = analysis("import", str(path), *place)
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
    assert (rows["nvidia-h200"]["basis"], rows["nvidia-h200"]["rows"]) == ("generation", None)


def test_what_cannot_be_imported_is_a_sentence(tmp_path: Path) -> None:
    answer = analysis("import", str(tmp_path / "none.parquet"), "--results", str(tmp_path))
    assert answer.returncode == 2
    assert len(answer.stderr.strip().splitlines()) == 1
    path = str(a_file(tmp_path))
    answer = analysis("import", path, "--machine", "nvidia-b200", "--results", str(tmp_path))
    assert answer.returncode == 2
    assert answer.stderr.startswith("there is no table of 'nvidia-b200'")
    assert not (tmp_path / "public").exists()
