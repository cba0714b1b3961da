"""Test the model of attention: planted constants are recovered, recorded errors reach goals."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.advice.attention import attention_row, parse_attention
from analysis.attention_shapes import CONTEXT, DECODE, FULL, AttentionShapes
from analysis.model.attention import AttentionConstants, AttentionFit, fit_constants, peak_of
from analysis.model.attention_basis import (
    FILE,
    AttentionBasis,
    find_attention,
    fits_to_json,
    kind_of,
)
from analysis.model.basis import find_basis
from analysis.model.forest import Forest
from kernels.common.errors import UserError
from kernels.machine import known_machine, known_machines
from sweeps.capture.captured import Attention
from tests.support.published import ACCURACY
from tests.support.synthetic import H100

PLANTED = AttentionConstants(
    share=0.62,
    width=0.3,
    half=700.0,
    launch=8e-6,
    memory=0.8,
    waves=0.9,
    ramp=4e5,
    cached=4.0,
    fits=0.8,
)


def random_shapes(count: int, decoding: bool = False) -> AttentionShapes:
    rng = np.random.default_rng(7)
    kv_heads = rng.choice([1, 2, 4, 8], count).astype(float)
    keys = rng.choice([256, 512, 1024, 2048, 4096, 8192], count).astype(float)
    return AttentionShapes(
        batch=rng.choice([1, 2, 4, 8, 16, 64], count).astype(float),
        heads=kv_heads * rng.choice([1, 2, 4, 8], count),
        kv_heads=kv_heads,
        queries=np.ones(count) if decoding else keys,
        keys=keys,
        width=rng.choice([64, 128, 192, 256], count).astype(float),
        seen=keys,
    )


@pytest.mark.parametrize("kind", [CONTEXT, FULL, DECODE])
def test_planted_constants_come_back(kind: str) -> None:
    shapes = random_shapes(600, kind == DECODE)
    noise = np.random.default_rng(1).normal(0, 0.02, 600)
    truth = PLANTED.seconds(shapes, kind, H100)
    fitted = fit_constants(shapes, truth * np.exp(noise), kind, H100)
    errors = np.abs(fitted.seconds(shapes, kind, H100) / truth - 1)
    assert np.quantile(errors, 0.95) < 0.02
    if kind != DECODE:  # the time of decoding hardly depends on arithmetic
        assert fitted.share == pytest.approx(PLANTED.share, rel=0.1)


def test_trees_learn_what_the_formula_lacks_and_say_how_well() -> None:
    shapes = random_shapes(3000)
    truth = PLANTED.seconds(shapes, CONTEXT, H100) * np.where(shapes.width == 64, 1.3, 1.0)
    truth *= np.where(shapes.keys == 2048, 0.8, 1.0)
    measured = truth * np.exp(np.random.default_rng(1).normal(0, 0.03, 3000))
    fit = AttentionFit.from_times(shapes, measured, CONTEXT, H100)
    others = random_shapes(400)
    truth = PLANTED.seconds(others, CONTEXT, H100) * np.where(others.width == 64, 1.3, 1.0)
    truth *= np.where(others.keys == 2048, 0.8, 1.0)
    assert np.mean(np.abs(fit.seconds(others, CONTEXT, H100) / truth - 1)) < 0.03
    # Noise of 3% has a 90% interval of ±4.9%.
    assert fit.low == pytest.approx(-0.05, abs=0.015)
    assert fit.high == pytest.approx(0.05, abs=0.015)
    again = AttentionFit.from_json(json.loads(json.dumps(fit.to_json())))
    assert again.seconds(others, CONTEXT, H100) == pytest.approx(
        fit.seconds(others, CONTEXT, H100), rel=1e-5
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("4,2048,32,8,128,bf16", CONTEXT),
        ("4,2048,32,8,128,bf16,full", FULL),
        ("4,2048,32,8,128,bf16,decode", DECODE),
    ],
)
def test_work_is_counted_as_everywhere(text: str, kind: str) -> None:
    work = parse_attention(text)
    assert kind_of(work) == kind
    sizes = (4, 32, 8, work.queries, 2048, 128, 2048)
    shapes = AttentionShapes(*(np.array([float(size)]) for size in sizes))
    assert shapes.flops(kind)[0] == work.flops
    # Keys and values have 8 heads, queries and results have 32. An element has two bytes.
    assert shapes.bytes()[0] == 2 * 4 * 128 * (2 * 8 * 2048 + 2 * 32 * work.queries)


def test_decoding_without_a_fit_is_a_causal_call_with_one_query() -> None:
    machine = known_machine("nvidia-h100-sxm")
    known = find_attention(machine, "bf16", None)
    assert known is not None
    framework = known.framework(None)
    fit = known.fits[framework][CONTEXT]
    only_causal = replace(known, fits={framework: {CONTEXT: fit}})
    decoding = only_causal.predict(parse_attention("4,2048,32,8,128,bf16,decode"))
    one_query = AttentionShapes(*(np.array([size]) for size in (4.0, 32, 8, 1, 2048, 128, 2048)))
    assert decoding.seconds == fit.seconds(one_query, CONTEXT, machine, True)[0]


def test_a_window_limits_what_is_seen() -> None:
    sizes = (1, 8, 8, 4096, 4096, 128, 256)
    shapes = AttentionShapes(*(np.array([float(size)]) for size in sizes))
    work = Attention(1, 8, 8, 4096, 4096, 128, 128, "bf16", causal=True, window=256)
    assert shapes.flops(CONTEXT)[0] == work.flops


def time_of(text: str, slug: str, named: str | None = None) -> Any:
    work = parse_attention(text)
    known = find_attention(known_machine(slug), work.dtype, None)
    assert known is not None
    return known.predict(work, named)


@pytest.mark.parametrize("slug", ["nvidia-h100-sxm", "nvidia-a100-sxm-80gb", "nvidia-b200"])
def test_longer_sequences_take_longer_and_reach_more(slug: str) -> None:
    machine = known_machine(slug)
    shares = []
    for length in (512, 2048, 8192):
        text = f"8,{length},16,16,128,bf16"
        shares.append(parse_attention(text).flops / time_of(text, slug).seconds / peak_of(machine))
    assert 0.05 < shares[0] < shares[1] < shares[2] < 0.9


def test_narrow_heads_reach_less_of_an_h100() -> None:
    """With heads of width 64, the same FLOPs take at least a fifth longer in public tables."""
    wide = time_of("8,2048,16,16,128,bf16", "nvidia-h100-sxm").seconds
    narrow = time_of("8,2048,32,32,64,bf16", "nvidia-h100-sxm").seconds
    assert 1.1 < narrow / wide < 1.6


def test_decoding_is_limited_by_the_cache() -> None:
    work = parse_attention("8,4096,32,32,128,bf16,decode")
    time = time_of("8,4096,32,32,128,bf16,decode", "nvidia-l40s")
    cache = 2 * work.batch * work.keys * work.kv_heads * work.width * 2
    assert time.limit == "memory"
    assert cache / 864e9 <= time.seconds < 2 * cache / 864e9


def test_a_named_framework_is_surer() -> None:
    text = "8,2048,16,16,128,bf16"
    any_, named = (time_of(text, "nvidia-h100-sxm", name) for name in (None, "vllm"))
    assert any_.seconds == named.seconds
    assert any_.lo < named.lo < named.hi < any_.hi
    with pytest.raises(UserError, match="did you mean 'vllm'"):
        time_of(text, "nvidia-h100-sxm", "vlm")


def test_what_answers_rest_on(tmp_path: Path) -> None:
    kinds = {}
    for slug in ("nvidia-h100-sxm", "nvidia-rtx-4090", "nvidia-v100-sxm2-16gb"):
        known = find_attention(known_machine(slug), "fp16", tmp_path)
        assert known is not None
        kinds[slug] = known.kind, known.measured_on
    assert kinds["nvidia-h100-sxm"] == ("shipped", "nvidia-h100-sxm")
    assert kinds["nvidia-rtx-4090"] == ("generation", "nvidia-l40s")
    assert kinds["nvidia-v100-sxm2-16gb"][0] == "generation"
    assert find_attention(known_machine("nvidia-h100-sxm"), "fp32", tmp_path) is None
    shapes = random_shapes(300)
    fit = AttentionFit.from_times(shapes, PLANTED.seconds(shapes, CONTEXT, H100), CONTEXT, H100)
    (tmp_path / FILE).write_text(json.dumps(fits_to_json({"vllm": {CONTEXT: fit}})))
    known = find_attention(H100, "bf16", tmp_path)
    assert known is not None
    assert known.kind == "public"
    # The file has no fit for calls without a mask. They are predicted as causal calls with twice
    # the work.
    whole = known.predict(parse_attention("8,2048,16,16,128,bf16,full"))
    half = known.predict(parse_attention("8,2048,16,16,128,bf16"))
    assert 1.5 < whole.seconds / half.seconds < 2.5


def test_a_window_makes_causal_and_other_calls_equal_without_a_fit_for_the_others() -> None:
    a100 = find_attention(known_machine("nvidia-a100-sxm-80gb"), "bf16", None)
    assert a100 is not None
    assert FULL not in a100.fits[a100.framework(None)]
    causal = Attention(4, 16, 16, 4096, 4096, 128, 128, "bf16", causal=True, window=256)
    whole = replace(causal, causal=False)
    assert whole.flops == causal.flops
    assert a100.predict(whole) == a100.predict(causal)


def test_a_dtype_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="bf16"):
        time_of("8,2048,16,16,128,bf16", "nvidia-v100-sxm2-16gb")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"vllm": 3}',
        '{"vllm": {"context": {}}}',
        '{"vllm": {}}',
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_damaged_fits_get_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match="cannot be read. Run .*analysis import"):
        find_attention(H100, "bf16", tmp_path)


def test_trees_from_other_features_need_another_import(tmp_path: Path) -> None:
    forest = Forest(12, np.array([-1], np.int8), np.array([0.1], np.float32))
    fits = {"vllm": {CONTEXT: AttentionFit(PLANTED, -0.1, 0.1, 10, forest)}}
    (tmp_path / FILE).write_text(json.dumps(fits_to_json(fits)))
    with pytest.raises(UserError, match="attention.json cannot be read. Run .*analysis import"):
        find_attention(H100, "bf16", tmp_path)


@pytest.mark.parametrize(("name", "value"), [("calls", math.inf), ("low", 10**400), ("high", None)])
def test_a_fit_with_a_bad_number_is_refused(name: str, value: object) -> None:
    document = AttentionFit(PLANTED, -0.1, 0.1, 10).to_json()
    assert AttentionFit.from_json(document).calls == 10
    with pytest.raises(ValueError, match=name):
        AttentionFit.from_json({**document, name: value})


def test_a_framework_that_is_not_listed_is_assumed_if_it_is_the_only_one() -> None:
    fits = {"another": {CONTEXT: AttentionFit(PLANTED, -0.1, 0.1, 10)}}
    known = AttentionBasis(H100, H100.slug, fits, "public", {CONTEXT: (-0.5, 0.5)})
    assert known.framework(None) == "another"
    assert known.predict(parse_attention("8,2048,16,16,128,bf16")).seconds > 0


@pytest.mark.parametrize(
    "text",
    [
        "8",
        "8,2048,32,8,128",
        "0,2048,32,8,128,bf16",
        "8,2048,32,8,x,bf16",
        "8,2048,32,8,128,bf16,x",
    ],
)
def test_what_is_no_call_gets_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match="--attention (as|is)"):
        parse_attention(text)


def test_a_mask_without_a_dtype_is_not_taken_for_the_dtype() -> None:
    with pytest.raises(UserError, match="dtype 'causal' is not known"):
        parse_attention("8,2048,32,8,128,causal")


def test_a_call_may_have_spaces_and_upper_case() -> None:
    assert parse_attention("8, 2048, 32, 8, 128, BF16, Full") == parse_attention(
        "8,2048,32,8,128,bf16,full"
    )


def test_a_size_has_the_limit_of_a_gemm_s() -> None:
    with pytest.raises(UserError, match="HEAD_DIM is too large"):
        parse_attention("8,2048,32,8,99999999999999,bf16")


def test_a_dtype_that_the_machine_does_not_compute_is_refused(tmp_path: Path) -> None:
    basis = find_basis("nvidia-v100-sxm2-16gb", tmp_path)
    assert attention_row(parse_attention("8,2048,32,8,128,fp16"), basis, None)["time_us"] > 0
    with pytest.raises(UserError, match="does not compute bf16"):
        attention_row(parse_attention("8,2048,32,8,128,bf16"), basis, None)


def test_an_answer_has_what_a_gemm_s_has(tmp_path: Path) -> None:
    basis = find_basis("nvidia-h100-sxm", tmp_path)
    row = attention_row(parse_attention("8,2048,32,8,128,bf16"), basis, None)
    assert row["lo_us"] < row["time_us"] < row["hi_us"]
    assert row["tflops"] == pytest.approx(row["peak_share"] * peak_of(H100) / 1e12)
    with pytest.raises(
        UserError, match=r"attention in fp32 cannot be predicted .*; give bf16 or fp16 as"
    ):
        attention_row(parse_attention("8,2048,32,8,128,fp32"), basis, None)


def test_every_known_gpu_has_an_answer() -> None:
    for machine in known_machines().values():
        known = find_attention(machine, "fp16", None)
        assert known is not None
        assert known.predict(parse_attention("8,2048,32,8,128,fp16")).seconds > 0


def test_recorded_errors_reach_their_goals() -> None:
    record = json.loads((ACCURACY / "attention.json").read_text(encoding="utf-8"))
    by_gpu: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in record["collections"]:
        for name in ("rows", "heads", "lengths"):
            by_gpu[row["kind"], row["machine"]][name].append(row[name])

    def median(kind: str, name: str) -> float:
        means = [np.mean(errors[name]) for (of, _), errors in by_gpu.items() if of == kind]
        assert len(means) >= 8
        return float(np.median(means))

    assert median(CONTEXT, "rows") <= 0.05
    assert median(CONTEXT, "heads") <= 0.06
    assert median(CONTEXT, "lengths") <= 0.07
    assert median(DECODE, "rows") <= 0.08
    held = [row["coverage_90"] for row in record["another_framework"]["trees"]]
    assert 0.86 <= np.mean(held) <= 0.94
