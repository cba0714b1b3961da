"""Tensor Core use and Amdahl's bound are right for simulated traces with known answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.rules.inputs import rule_inputs
from analysis.rules.judge import NOT_MEASURED
from analysis.rules.rules_report import effect_text, rules_markdown
from analysis.rules.tensor_cores import model_rules, read_profiled_steps, step_markdown
from kernels.common.errors import UserError
from sweeps.schema import SCHEMA
from tests.support.gpu_traces import GpuTrace
from tests.support.synthetic import H100, gemm_cases, measured_in_turn, record

NVJET = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
SIMT = "ampere_sgemm_128x64_nn"
Step = Callable[[GpuTrace], None]


def profiled(folder: Path, *models: dict[str, Any], kind: str = "gpu") -> Path:
    machine = {**H100.to_json(), "kind": kind}
    document = {"schema": SCHEMA, "protocol": 1, "machine": machine, "software": {},
                "models": models}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.json").write_text(json.dumps(document))
    return folder


def model(folder: Path, dtype: str, seconds: float, step: Step) -> dict[str, Any]:
    """Write the trace of a model's step, and return the model's entry of models.json."""
    made = GpuTrace()
    step(made)
    name = f"traces/net-{dtype}.json.gz"
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    made.write(folder / name)
    return {"model": "net", "dtype": dtype, "images": 8, "seconds": [seconds] * 8, "trace": name}


def gemm(dtype: str, us: float, kernel: str) -> Step:
    return lambda made: made.gemm(64, 64, 64, dtype, [(kernel, us)])


def relu(made: GpuTrace) -> None:
    made.op("aten::relu", kernels=[("elementwise_kernel", 500.0)])


def both(*steps: Step) -> Step:
    def run(made: GpuTrace) -> None:
        for step in steps:
            step(made)

    return run


def test_a_steps_table_says_who_is_eligible_who_is_used_and_the_bound(tmp_path: Path) -> None:
    step = both(
        gemm("bf16", 1200.0, NVJET),
        lambda made: made.gemm(64, 64, 32, "bf16", [(SIMT, 200.0)]),
        gemm("fp32", 100.0, SIMT), relu,
    )  # fmt: skip
    (timed,) = read_profiled_steps(profiled(tmp_path, model(tmp_path, "bf16", 1e-3, step)))
    assert timed.matrix_share == pytest.approx(0.75)
    assert timed.bound == pytest.approx(4.0)
    assert timed.used_share == pytest.approx(6 / 7)
    why = [timed.why_not_eligible(operation) for operation in timed.account.operations]
    assert why == ["", "not a matrix operation", "", "exact FP32, because TF32 is not allowed"]
    page = step_markdown(timed)
    assert "at most 4.00×" in page
    assert "those that use Tensor Cores take 86% of the time." in page
    assert "| mm | 64×64×64 bf16 nt | 1 | yes | yes | 1,200 µs | 60.0% |" in page


@pytest.mark.parametrize(
    ("fast", "verdict", "effect"), [(0.5e-3, "holds", 1.0), (0.25e-3, "no longer", 2.0)]
)
def test_amdahls_rule_holds_unless_tf32_gains_more_than_it_could(
    tmp_path: Path, fast: float, verdict: str, effect: float
) -> None:
    steps = read_profiled_steps(
        profiled(tmp_path,
                 model(tmp_path, "fp32", 1e-3, both(gemm("fp32", 500.0, SIMT), relu)),
                 model(tmp_path, "tf32", fast, gemm("fp32", 10.0, NVJET)))
    )  # fmt: skip
    row = model_rules(steps)["amdahl"]
    assert row.verdict == verdict
    assert row.effect == pytest.approx(effect)
    assert "at most 2.00×" in row.reason


def test_eligible_work_without_tensor_cores_is_reported(tmp_path: Path) -> None:
    steps = read_profiled_steps(
        profiled(tmp_path, model(tmp_path, "bf16", 1e-3, gemm("bf16", 1000.0, NVJET)),
                 model(tmp_path, "tf32", 1e-3, gemm("fp32", 1000.0, SIMT)))
    )  # fmt: skip
    row = model_rules(steps)["tc-used"]
    assert row.verdict.startswith("depends: ")
    assert (row.lo, row.hi) == (0.0, 1.0)
    assert model_rules(steps[:1])["tc-used"].verdict == "holds"
    assert effect_text(row) == f"{row.effect:.0%} [{row.lo:.0%}, {row.hi:.0%}]"
    # The report says that the interval is not a 95% interval.
    page = rules_markdown([row], H100, "a trace")
    assert (
        "`tc-used` extends from the lowest to the highest share among the profiled steps of models."
    ) in page


def test_a_cpus_profile_has_shares_and_a_bound_but_judges_no_rule(tmp_path: Path) -> None:
    entry = model(tmp_path, "fp32", 1.0, gemm("fp32", 1.0, SIMT))
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": 5.0, "pid": 1, "tid": 1}
        for name, ts in (("aten::mm", 0.0), ("aten::relu", 10.0))
    ]
    (tmp_path / entry["trace"]).write_text(json.dumps({"traceEvents": events}))
    (step,) = read_profiled_steps(profiled(tmp_path, entry, kind="cpu"))
    assert {row.verdict for row in model_rules([step]).values()} == {NOT_MEASURED}
    page = step_markdown(step)
    assert "none here" in page
    assert "at most 2.00×" in page


def test_attention_in_fp32_says_how_it_uses_tensor_cores(tmp_path: Path) -> None:
    kernel = "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)"

    def attention(made: GpuTrace) -> None:
        shape, stride = [8, 12, 1024, 64], [786432, 65536, 64, 1]
        made.op(
            "aten::_scaled_dot_product_efficient_attention", [*[shape] * 3, [], [], [], []],
            [*[stride] * 3, [], [], [], []], ["float"] * 3 + [""] * 4,
            ["", "", "", "", "True", "0.", "True"], [(kernel, 487.0)],
        )  # fmt: skip

    step = model(tmp_path, "fp32", 1e-3, attention)
    (timed,) = read_profiled_steps(profiled(tmp_path, step))
    line = next(line for line in step_markdown(timed).splitlines() if "heads of 64" in line)
    assert "| no: FP32, with each multiplication computed as three in TF32 | yes |" in line


def test_steps_without_matrix_operations_are_left_out(tmp_path: Path) -> None:
    """The second step has a matrix operation, but the profiler lost the record of its kernel."""
    entry = model(tmp_path, "bf16", 1e-3, relu)
    assert read_profiled_steps(profiled(tmp_path, entry)) == []
    made = GpuTrace()
    made.gemm(64, 64, 64, "bf16", [(NVJET, 1.0)], lost_kernel=True)
    made.write(tmp_path / entry["trace"])
    assert read_profiled_steps(tmp_path) == []
    del entry["trace"]  # as an earlier version wrote it
    assert read_profiled_steps(profiled(tmp_path, entry)) == []


def test_a_step_that_was_profiled_again_replaces_the_old_one(tmp_path: Path) -> None:
    case = gemm_cases([(64, 64, 64)], "alignment")
    folder = tmp_path / "rules" / H100.slug
    old = folder / "runs" / "2026-01-01T00-00-00Z"
    record(old, case, [1e-5], run="2026-01-01T00:00:00Z")
    record(folder, case, [1e-5])
    measured_in_turn(old, folder)
    for place, seconds in ((old, 3.0), (folder, 2.0)):
        entry = model(place, "bf16", seconds, gemm("bf16", 1000.0, NVJET))
        profiled(place, entry)
    (step,) = rule_inputs(H100.slug, tmp_path).steps
    assert step.seconds[0] == 2.0


def test_a_damaged_profile_says_what_to_do(tmp_path: Path) -> None:
    assert read_profiled_steps(tmp_path) == []
    entry = model(tmp_path, "bf16", 1e-3, gemm("bf16", 1.0, NVJET))
    for damaged in ("{", "[" * 100_000, "[]", json.dumps({"schema": SCHEMA})):
        (tmp_path / "models.json").write_text(damaged)
        with pytest.raises(UserError, match="to write it again"):
            read_profiled_steps(tmp_path)
    (tmp_path / "models.json").write_text(json.dumps({"schema": SCHEMA + 1, "steps": []}))
    with pytest.raises(
        UserError, match=f"has schema {SCHEMA + 1}; this version reads schema {SCHEMA}"
    ):
        read_profiled_steps(tmp_path)
    for wrong in ({"trace": "../escaped"}, {"trace": "traces/.."}, {"seconds": [0.0]},
                  {"model": 17}, {"trace": None}):  # fmt: skip
        profiled(tmp_path, {**entry, **wrong})
        with pytest.raises(UserError, match="run `make rules FRESH=1` to write it again"):
            read_profiled_steps(tmp_path)
    profiled(tmp_path, {**entry, "trace": "traces/none.json.gz"})
    with pytest.raises(UserError, match="none.json.gz cannot be read; run `make rules FRESH=1`"):
        read_profiled_steps(tmp_path)
