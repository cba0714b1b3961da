"""Test what is read of public tables of attention times."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.attention_shapes import FULL
from analysis.imports import attention_tables
from analysis.imports.attention_tables import AttentionTable, read_calls
from analysis.model.attention_basis import fit_tables
from kernels.common.errors import UserError


def table(folder: Path, dtypes: list[str]) -> AttentionTable:
    """A table of encoder attention with one call for each dtype."""
    path = folder / "h100_sxm-vllm-0.1.parquet"
    calls = [
        {"attn_dtype": dtype, "latency": 1.0, "kernel_source": "flash", "num_heads": 8,
         "isl": 1024, "batch_size": 2, "head_dim": 64}
        for dtype in dtypes
    ]  # fmt: skip
    pd.DataFrame(calls).to_parquet(path)
    return AttentionTable(path, "nvidia-h100-sxm", "vllm", "0.1", FULL)


@pytest.mark.parametrize(("dtypes", "calls"), [(["bfloat16", "fp8"], 1), (["fp8"], 0)])
def test_only_calls_in_bf16_are_read(tmp_path: Path, dtypes: list[str], calls: int) -> None:
    shapes, seconds = read_calls(table(tmp_path, dtypes))
    assert len(seconds) == len(shapes.batch) == calls


@pytest.mark.parametrize("dtypes", [["fp8"], ["bfloat16"], ["bfloat16"] * 9])
def test_a_table_with_few_calls_in_bf16_has_no_fit(tmp_path: Path, dtypes: list[str]) -> None:
    assert fit_tables([table(tmp_path, dtypes)]) == {}


def test_a_framework_without_causal_calls_has_no_fit(tmp_path: Path) -> None:
    """The fit for causal calls predicts the kinds of calls without a fit, so it must exist."""
    assert fit_tables([table(tmp_path, ["bfloat16"] * 12)]) == {}


@pytest.mark.parametrize("content", [b"", b"not a table"])
def test_a_damaged_table_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "context_attention_perf.parquet").write_bytes(content)
    monkeypatch.setattr(attention_tables, "package_folders", lambda: ([tmp_path], "package 1", ""))
    with pytest.raises(UserError, match="cannot be read as a table .*; re-install aiconf"):
        attention_tables.find_attention_tables()


def test_a_table_with_a_damaged_page_gets_a_sentence(tmp_path: Path) -> None:
    damaged = table(tmp_path, ["bfloat16"])
    content = bytearray(damaged.path.read_bytes())
    content[4:200] = bytes(196)
    damaged.path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as a table"):
        read_calls(damaged)
