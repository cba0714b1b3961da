"""Who uses Tensor Cores, and Amdahl's bound: from made-up profiles whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.recordings.load import load
from analysis.rules.judge import NOT_MEASURED
from analysis.rules.tensor_cores import (
    model_rules,
    read_profiled_steps,
    step_json,
    step_markdown,
    sweep_step,
)
from kernels.common.errors import UserError
from sweeps.schema import SCHEMA
from tests.support.synthetic import H100, gemm_cases, record

NVJET = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
SIMT = "ampere_sgemm_128x64_nn"


def operation(name: str, seconds: float, dtype: str, kernel: str = "") -> dict[str, Any]:
    return {
        "operation": name, "shapes": [[64, 64], [64, 64]], "dtype": dtype, "calls": 2,
        "seconds": seconds, "kernels": {kernel: seconds} if kernel else {},
    }  # fmt: skip


def profiled(folder: Path, *models: dict[str, Any], kind: str = "gpu") -> Path:
    machine = {**H100.to_json(), "kind": kind}
    document = {"schema": SCHEMA, "protocol": 1, "machine": machine, "software": {},
                "models": models}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.json").write_text(json.dumps(document))
    return folder


def model(dtype: str, step: float, *operations: dict[str, Any]) -> dict[str, Any]:
    return {"model": "net", "dtype": dtype, "images": 8, "seconds": [step] * 8,
            "operations": list(operations)}  # fmt: skip


def test_a_steps_table_says_who_is_eligible_who_is_used_and_the_bound(tmp_path: Path) -> None:
    folder = profiled(
        tmp_path,
        model("bf16", 1e-3, operation("addmm", 6e-4, "bf16", NVJET),
              operation("convolution_backward", 1e-4, "bf16", SIMT),
              operation("mm", 5e-5, "fp32", SIMT), operation("native_layer_norm", 2.5e-4, "bf16")),
    )  # fmt: skip
    (step,) = read_profiled_steps(folder)
    assert step.matrix_share == pytest.approx(0.75)
    assert step.bound == pytest.approx(4.0)
    assert step.used_share == pytest.approx(6 / 7)
    why = {o.operation: o.why_not for o in step.operations}
    assert why["addmm"] == why["convolution_backward"] == ""
    assert why["native_layer_norm"] == "not a matrix operation"
    assert "TF32" in why["mm"]
    page = step_markdown(step)
    assert "at most 4.00×" in page
    assert "86% is in Tensor Core kernels" in page
    assert step_json(step)["amdahl_bound"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("fast", "verdict", "effect"), [(0.5e-3, "holds", 1.0), (0.25e-3, "no longer", 2.0)]
)
def test_amdahls_rule_holds_unless_tf32_gains_more_than_it_could(
    tmp_path: Path, fast: float, verdict: str, effect: float
) -> None:
    half = [operation("mm", 5e-4, "fp32", SIMT), operation("relu", 5e-4, "fp32")]
    steps = read_profiled_steps(
        profiled(tmp_path, model("fp32", 1e-3, *half),
                 model("tf32", fast, operation("mm", 1e-5, "tf32", NVJET)))
    )  # fmt: skip
    row = model_rules(steps)["amdahl"]
    assert row.verdict == verdict
    assert row.effect == pytest.approx(effect)
    assert "at most 2.00×" in row.reason


def test_eligible_work_that_does_not_use_tensor_cores_is_told(tmp_path: Path) -> None:
    steps = read_profiled_steps(
        profiled(tmp_path, model("bf16", 1e-3, operation("mm", 1e-3, "bf16", NVJET)),
                 model("tf32", 1e-3, operation("mm", 1e-3, "tf32", SIMT)))
    )  # fmt: skip
    row = model_rules(steps)["tc-used"]
    assert row.verdict.startswith("depends: ")
    assert (row.lo, row.hi) == (0.0, 1.0)
    assert model_rules(steps[:1])["tc-used"].verdict == "holds"


def test_a_cpus_profile_has_shares_and_a_bound_but_judges_no_rule(tmp_path: Path) -> None:
    folder = profiled(
        tmp_path, model("fp32", 1.0, operation("mm", 0.5, "fp32"), operation("relu", 0.5, "fp32")),
        kind="cpu",
    )  # fmt: skip
    steps = read_profiled_steps(folder)
    assert {row.verdict for row in model_rules(steps).values()} == {NOT_MEASURED}
    page = step_markdown(steps[0])
    assert "none here" in page
    assert "at most 2.00×" in page


def test_a_sweeps_rows_are_operations_too(tmp_path: Path) -> None:
    cases = gemm_cases([(256, 256, 256), (512, 512, 512)], "square")
    rows = load(record(tmp_path, cases, [1e-5, 3e-5])).ok.copy()
    rows["kernels"] = pd.array([json.dumps([[NVJET, 1.0]]), ""], dtype="string")
    step = sweep_step(rows, "square", "gpu")
    assert [o.share for o in step.operations] == [0.75, 0.25]
    assert [o.used for o in step.operations] == [None, True]
    assert step.used_share == 1.0
    assert "Amdahl" not in step_markdown(step)
    with pytest.raises(UserError, match="no measured case of the sweep 'plane'"):
        sweep_step(rows, "plane", "gpu")


def test_a_damaged_profile_says_what_to_do(tmp_path: Path) -> None:
    assert read_profiled_steps(tmp_path) == []
    profiled(tmp_path, model("bf16", 1e-3))  # its kernels were not seen: nothing is known
    assert read_profiled_steps(tmp_path) == []
    nothing = model("bf16", 1e-3, operation("mm", 0.0, "bf16"))
    for damaged in ("{", "[]", json.dumps({"schema": SCHEMA})):
        (tmp_path / "models.json").write_text(damaged)
        with pytest.raises(UserError, match="writes it again"):
            read_profiled_steps(tmp_path)
    (tmp_path / "models.json").write_text(json.dumps({"schema": SCHEMA + 1, "steps": []}))
    with pytest.raises(UserError, match=f"has schema {SCHEMA + 1}; this version reads {SCHEMA}"):
        read_profiled_steps(tmp_path)
    profiled(tmp_path, nothing)
    with pytest.raises(UserError, match="`make rules FRESH=1` writes it again"):
        read_profiled_steps(tmp_path)
