from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.imports.tables import (
    PACKAGE,
    PublicTable,
    choose_tables,
    find_tables,
    read_rows,
    read_table,
    version_numbers,
)
from analysis.imports.writing import write_imported
from analysis.recordings.imported import read_imported
from analysis.recordings.load import find_recording, load
from analysis.rules.judge import Evidence
from kernels.common.errors import UserError
from kernels.problem import Gemm
from sweeps.schema import COLUMNS
from tests.support.synthetic import H100, model_law, random_sizes

installed = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason=f"{PACKAGE} is not installed"
)


@pytest.mark.parametrize(("column", "value"), [("version", 1.3), ("framework", None)])
def test_a_table_that_does_not_name_its_framework_is_refused(
    tmp_path: Path, column: str, value: object
) -> None:
    path = tmp_path / "table.parquet"
    frame(2).assign(**{column: value}).to_parquet(path)
    with pytest.raises(UserError, match=f"instead of text in the column {column}"):
        read_table(path)


def frame(count: int = 60, device: str = "NVIDIA H100 80GB HBM3") -> pd.DataFrame:
    sizes = random_sizes(count, 0)
    seconds = model_law()([Gemm(m, n, k, "bf16") for m, n, k in sizes])
    return pd.DataFrame(
        {
            "framework": "TRTLLM", "version": "1.3.0rc20", "device": device, "op_name": "gemm",
            "kernel_source": "torch_flow", "gemm_dtype": "bfloat16",
            **dict(zip("mnk", np.array(sizes).T, strict=True)), "latency": seconds * 1e3,
        }
    )  # fmt: skip


def written(folder: Path, rows: pd.DataFrame) -> Path:
    path = folder / "gemm_perf.parquet"
    rows.to_parquet(path)
    return path


def test_a_file_says_itself_whose_it_is(tmp_path: Path) -> None:
    rows = frame()
    rows.loc[:9, "gemm_dtype"] = "fp8"
    table = read_table(written(tmp_path, rows))
    assert (table.slug, table.rows) == ("nvidia-h100-sxm", 50)
    assert table.source == "TensorRT-LLM 1.3.0rc20"


def test_rows_of_another_dtype_and_times_that_are_none_are_left_out(tmp_path: Path) -> None:
    rows = frame()
    rows.loc[0, "gemm_dtype"] = "fp8"
    rows.loc[1, "latency"] = 0.0
    rows.loc[2, "latency"] = np.nan
    read = read_rows(read_table(written(tmp_path, rows)))
    assert len(read) == 57
    assert read["time_us"].tolist() == pytest.approx((rows["latency"][3:] * 1e3).tolist())


def test_the_files_beside_a_table_say_whether_it_is_complete_and_what_else_it_is_for(
    tmp_path: Path,
) -> None:
    pytest.importorskip("yaml")
    here = tmp_path / "1.3.0rc20"
    here.mkdir()
    path = written(here, frame())
    assert (read_table(path).complete, read_table(path).also_for) == (True, ())
    (here / "collection_meta.yaml").write_text("tables:\n  gemm_perf:\n    status: partial\n")
    for version, source in (("1.3.0rc23", "1.3.0rc20"), ("1.3.0rc5", "1.2.0")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "reuse.yaml").write_text(
            f"reuse:\n- table: gemm_perf\n  from_version: {source}\n"
        )
    table = read_table(path)
    assert (table.complete, table.also_for) == (False, ("1.3.0rc23",))
    for text in ("]: no YAML", "tables:\n", "tables: [1]\n", "tables: {gemm_perf: partial}\n"):
        (here / "collection_meta.yaml").write_text(text)
        assert read_table(path).complete
    for text in ("reuse:\n", "reuse: [gemm_perf]\n", "- reuse\n"):
        (tmp_path / "1.3.0rc23" / "reuse.yaml").write_text(text)
        assert read_table(path).also_for == ()


def test_what_is_no_table_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "gemm_perf.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match="cannot be read as a table"):
        read_table(tmp_path / "gemm_perf.parquet")
    with pytest.raises(UserError, match="lacks the columns device, latency"):
        read_table(written(tmp_path, frame().drop(columns=["device", "latency"])))
    with pytest.raises(UserError, match="lacks the column device; give a table"):
        read_table(written(tmp_path, frame().drop(columns=["device"])))
    with pytest.raises(UserError, match="has no rows"):
        read_table(written(tmp_path, frame().head(0)))
    with pytest.raises(UserError, match="does not exist"):
        read_table(tmp_path / "nowhere.parquet")


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"not installed; `python3 sweeps/bootstrap.py public` installs it"
    ):
        find_tables()


def a_table(framework: str, version: str, rows: int) -> PublicTable:
    return PublicTable(Path("t"), "NVIDIA H200", framework, version, rows, "", "")


def test_the_preferred_framework_s_latest_is_taken_unless_it_knows_few_shapes() -> None:
    old, new = a_table("TRTLLM", "1.3.0rc9", 900), a_table("TRTLLM", "1.3.0rc20", 900)
    sglang, vllm = a_table("SGLang", "0.5.14", 950), a_table("VLLM", "0.24.0", 950)
    assert choose_tables([vllm, old, new, sglang]) == {"nvidia-h200": new}
    few = a_table("TRTLLM", "1.3.0rc20", 100)
    assert choose_tables([few, sglang, vllm]) == {"nvidia-h200": sglang}
    assert choose_tables([a_table("TRTLLM", "1.3.0", 0)]) == {}
    assert choose_tables([replace(new, complete=False), vllm]) == {"nvidia-h200": vllm}
    ascending = ["1.3.0.dev1+g20dc1ca", "1.3.0a1", "1.3.0b2", "1.3.0rc9", "1.3.0rc20", "1.3.0",
                 "1.3.0.post2", "1.10"]  # fmt: skip
    assert sorted(sorted(ascending), key=version_numbers) == ascending


def test_an_imported_table_is_a_recording_that_is_read_like_our_own(tmp_path: Path) -> None:
    rows = frame()
    folder = write_imported(read_table(written(tmp_path, rows)), H100, tmp_path)
    with pytest.raises(UserError, match="nothing is recorded"):  # the import is not complete yet
        find_recording("nvidia-h100-sxm", tmp_path)
    (folder / "validation.json").write_text("{}")
    assert find_recording("nvidia-h100-sxm", tmp_path) == folder
    assert folder == tmp_path / "public" / "nvidia-h100-sxm"
    recording = load(folder)
    assert list(recording.rows.columns) == list(COLUMNS)
    assert len(recording.products) == len(rows)
    assert recording.cache == "warm"
    assert recording.products["time_us"].tolist() == pytest.approx((rows["latency"] * 1e3).tolist())
    assert "TensorRT-LLM 1.3.0rc20" in recording.caption()
    pd.DataFrame({"m": [1.5], "n": 2, "k": 3, "time_us": 1.0}).to_parquet(
        folder / "measurements.parquet"
    )
    with pytest.raises(UserError, match=r"cannot be read \(cannot safely cast"):
        read_imported(folder)
    pd.DataFrame({"m": [1], "n": 2, "k": 3, "batch": 0, "time_us": 1.0}).to_parquet(
        folder / "measurements.parquet"
    )
    with pytest.raises(UserError, match="row 1 of .* has an invalid size or time"):
        read_imported(folder)
    (folder / "measurements.parquet").write_bytes(b"damaged")
    with pytest.raises(UserError, match="away; then run `python -m analysis import --machine"):
        read_imported(folder)


@pytest.mark.parametrize("text", [None, "", "lo_us\n1.0\n", "time_us\nx\n"])
def test_rules_need_the_predictions_of_a_complete_import(tmp_path: Path, text: str | None) -> None:
    folder = write_imported(read_table(written(tmp_path, frame())), H100, tmp_path)
    if text is not None:
        (folder / "predicted.csv").write_text(text)
    with pytest.raises(UserError, match=r"predicted.csv is missing or damaged. Move .* away"):
        Evidence.from_recording(load(folder))


@installed
def test_the_package_has_a_table_of_every_gpu_that_it_is_known_for() -> None:
    tables = choose_tables(find_tables())
    known = {
        "nvidia-a100-sxm-80gb", "nvidia-h100-sxm", "nvidia-h200", "nvidia-b200", "nvidia-b300",
        "nvidia-gb200", "nvidia-gb300", "nvidia-l40s", "nvidia-rtx-pro-6000",
    }  # fmt: skip
    assert known <= set(tables)
    for slug in known:
        table = tables[slug]
        framework = "SGLang" if slug == "nvidia-a100-sxm-80gb" else "TensorRT-LLM"
        assert table.source.startswith(framework)
        assert table.rows > 30_000
        assert table.licence == "Apache-2.0"
        assert importlib.metadata.version(PACKAGE) in table.package
        assert table.complete
    # The newest folders only refer to the table of an earlier version.
    assert tables["nvidia-b200"].also_for
    rows = read_rows(tables["nvidia-h200"])
    assert len(rows) == tables["nvidia-h200"].rows
    # All N and K are multiples of 8, so the tables do not show the effect of alignment.
    assert (rows[["n", "k"]] % 8 == 0).all().all()
