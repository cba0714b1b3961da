"""Test validations with public tables as priors: no prior has seen a tested shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.imports.public import read_source
from analysis.imports.tables import read_table
from analysis.model.nearby import Collection, sizes_of
from analysis.model.offsets import CollectionTrees, TreeSettings
from analysis.model.query import group_of
from analysis.validation import prior_check
from analysis.validation.holdout import FOLDS
from analysis.validation.prior_check import named_collections, validate_with_prior
from kernels.common.errors import UserError
from kernels.problem import Gemm
from tests.support.command_line import analysis
from tests.support.synthetic import H100, model_law, random_sizes
from tests.support.tiers import quick_and_long


def table(folder: Path, framework: str, scale: float, seed: int, grid: bool = False) -> Path:
    """Write a collection of an H100 whose times jump with M, all longer by the factor ``scale``."""
    levels = (128, 384, 512, 768, 1024, 2048, 4096)
    sizes = sorted(set(random_sizes(700, 0)))
    if grid:
        sizes = [(m, n, k) for m in levels for n in levels for k in levels]
    gemms = [Gemm(m, n, k, "bf16") for m, n, k in sizes]
    noise = 0.01 * np.random.default_rng(seed).standard_normal(len(sizes))
    jumps = 0.2 * np.sign(np.sin(2.1 * np.log2([m for m, _, _ in sizes])))
    frame = pd.DataFrame(sizes, columns=list("mnk")).assign(
        framework=framework, version="1", device=H100.name, gemm_dtype="bfloat16",
        latency=model_law()(gemms) * scale * np.exp(jumps + noise) * 1e3,
    )  # fmt: skip
    path = folder / f"{framework}.parquet"
    frame.to_parquet(path)
    return path


@pytest.mark.slow
def test_a_prior_helps_and_is_reported(tmp_path: Path) -> None:
    judged, other = table(tmp_path, "VLLM", 1.15, 1), table(tmp_path, "TRTLLM", 1.0, 2)
    source = read_source(judged, H100)
    named = named_collections(str(other), judged, H100, "bf16")
    helped = validate_with_prior(source, H100, named, 64)
    alone = validate_with_prior(source, H100, [], 64)
    assert len(helped.calibrated) == len(alone.calibrated) == 64
    assert 100 < len(helped.tested) < 180  # a fifth
    assert helped.tested.problems == alone.tested.problems
    assert (helped.errors.mean or 1) < 0.6 * (alone.errors.mean or 0)
    document = helped.to_json()
    assert document["prior"] == ["TensorRT-LLM 1 of nvidia-h100-sxm"]
    assert list(document["weights"]["cublas gemm bf16"]) == document["prior"]
    unmeasured = validate_with_prior(source, H100, named, 0)
    assert unmeasured.errors.median == pytest.approx(1 - 1 / 1.15, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("holdout", quick_and_long(["rows", "levels", "folds"]))
def test_no_prior_has_seen_what_is_tested_or_calibrated_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holdout: str
) -> None:
    judged = table(tmp_path, "VLLM", 1.15, 1, grid=True)
    other = table(tmp_path, "TRTLLM", 1.0, 2, grid=True)
    seen: list[set[tuple[int, ...]]] = []

    plain = Collection.fitted

    def fitted(collection: Collection, settings: TreeSettings) -> CollectionTrees:
        seen.append(set(map(tuple, sizes_of(collection.gemms).tolist())))
        return plain(collection, settings)

    monkeypatch.setattr(Collection, "fitted", fitted)
    named = named_collections(str(other), judged, H100, "bf16")
    source = read_source(judged, H100)
    found = validate_with_prior(source, H100, named, 60, holdout=holdout)
    sizes = sizes_of(source.problems)
    tested = set(map(tuple, sizes_of(found.tested.problems).tolist()))
    chosen = set(map(tuple, sizes[found.calibrated].tolist()))
    if holdout == "folds":
        assert len(seen) == FOLDS
        assert tested == set(map(tuple, sizes.tolist()))  # each shape is tested in one fold
        assert not seen[0] & chosen
        return
    (prior,) = seen
    assert not prior & (tested | chosen)
    if holdout == "levels":
        for column in range(3):
            withheld = {size[column] for size in tested}
            assert not withheld & {size[column] for size in prior}


def test_the_judged_file_is_no_prior_of_itself(tmp_path: Path) -> None:
    judged = table(tmp_path, "VLLM", 1.15, 1)
    with pytest.raises(UserError, match="is the file under test"):
        named_collections(str(judged), judged, H100, "bf16")
    with pytest.raises(UserError, match="has no times in fp8"):
        named_collections(str(table(tmp_path, "SGLANG", 1.0, 3)), judged, H100, "fp8")
    source = read_source(judged, H100)
    with pytest.raises(UserError, match="nothing can be judged"):
        validate_with_prior(source, H100, [], 0)
    with pytest.raises(UserError, match="--holdout must be rows, levels or folds, not 'beyond'"):
        validate_with_prior(source, H100, [], 64, holdout="beyond")
    with pytest.raises(UserError, match="measurements? to calibrate on; give at most"):
        validate_with_prior(source, H100, [], 10_000)


def test_a_machine_brings_its_tables_in_the_requested_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [table(tmp_path, name, 1.0, 1) for name in ("SGLANG", "TRTLLM", "VLLM")]
    frame = pd.read_parquet(paths[2])
    frame.assign(gemm_dtype="fp8").to_parquet(paths[2])
    monkeypatch.setattr(prior_check, "find_tables", lambda: [read_table(path) for path in paths])
    judged = tmp_path / "other.parquet"
    in_bf16 = named_collections("h100-sxm", judged, H100, "bf16")
    assert [collection.source.split()[0] for collection in in_bf16] == ["TensorRT-LLM", "SGLang"]
    (in_fp8,) = named_collections("h100-sxm", judged, H100, "fp8")
    assert in_fp8.source.startswith("vLLM")


def test_all_rows_are_those_of_the_fitted_group(tmp_path: Path) -> None:
    source = read_source(table(tmp_path, "VLLM", 1.15, 1), H100)
    named_otherwise = replace(source, implementations=["torch"] * len(source))
    validation = validate_with_prior(named_otherwise, H100, [], 32)
    tested = validation.tested
    cases = zip(tested.implementations, tested.problems, strict=True)
    assert {group_of(*case) for case in cases} == set(validation.model.fits)


@pytest.mark.slow
def test_the_command_takes_a_prior(tmp_path: Path) -> None:
    judged, other = table(tmp_path, "VLLM", 1.15, 1), table(tmp_path, "TRTLLM", 1.0, 2)
    asked = ("validate", judged, "--machine", "h100-sxm", "--calibrate", "64", "--prior")
    answer = analysis(*asked, other)
    assert answer.returncode == 0, answer.stderr
    assert "this model" in answer.stdout
    both = analysis(*asked, other, "--constants", "nvidia-a100-sxm-80gb")
    assert both.returncode == 2
    assert "--prior and --constants cannot be combined" in both.stderr
