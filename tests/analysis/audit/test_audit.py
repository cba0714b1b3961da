"""Check the account of a step and its levers on a machine with shipped constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.advice.verdict import DO_IT, LEAVE_IT, LIKELY, Gain
from analysis.audit.account import Account, account_of, as_problem
from analysis.audit.audit import LeverSearch, _warnings, audit
from analysis.audit.audit_report import (
    as_comparison,
    as_text,
    duration,
    levers_frame,
    products_frame,
)
from analysis.audit.candidates import candidates
from analysis.audit.levers import Lever, _resized, find_levers, try_levers
from analysis.audit.memory import kv_cache_bytes
from analysis.audit.runtime import RECOMPUTED, Runtime
from analysis.audit.step_totals import SumChange, gain_of_step, summed
from analysis.model.basis import Basis, find_basis
from kernels.common.errors import UserError
from kernels.common.program import RESULTS
from kernels.problem import Gemm
from sweeps.capture.capture import capture, dimensions
from sweeps.capture.captured import Attention, Captured, Dimension, GroupedGemm, Product
from sweeps.capture.sources import find_source
from sweeps.capture.step import ModelStep

STEP = ModelStep(batch=4, seq=512)
GPT2 = find_source("gpt2")
LLAMA = find_source("llama-3-8b", {"layers": 4})


@pytest.fixture(scope="module")
def h100(tmp_path_factory: pytest.TempPathFactory) -> Basis:
    return find_basis("nvidia-h100-sxm", tmp_path_factory.mktemp("no-results"))


@pytest.fixture(scope="module")
def gpt2() -> Captured:
    return capture(GPT2, STEP)


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(LLAMA, STEP)


def flops(products: list[Product]) -> int:
    return sum(product.count * product.work.flops for product in products)


def test_too_long_a_sequence_is_warned_of_with_the_options_that_shorten_it() -> None:
    assert not _warnings(GPT2, ModelStep("decode", seq=1000, tokens=24))
    (decoding,) = _warnings(GPT2, ModelStep("decode", seq=1, tokens=2000))
    assert decoding.endswith("has 2,001 tokens; give a smaller --seq or --tokens.")
    (prefill,) = _warnings(GPT2, ModelStep("prefill", seq=2000, tokens=2000))
    assert prefill.endswith("has 2,000 tokens; give a smaller --seq.")


def test_a_step_of_many_small_operations_may_wait_for_the_host(h100: Basis) -> None:
    source = find_source("gpt2")
    for step, runtime, is_warned in (
        (ModelStep(batch=1, seq=128), Runtime(), True),
        (ModelStep(batch=1, seq=128), Runtime(kind="compile"), False),
        (ModelStep("prefill", batch=1, seq=128), Runtime(), False),
        (ModelStep(batch=32, seq=1024), Runtime(), False),
    ):
        search = LeverSearch(tries={"vocab": [50304]})
        (result,) = audit(source, step, runtime, [h100], search)
        assert any("slow host" in warning for warning in result.report.warnings) == is_warned


def levers_of(basis: Basis, vary: tuple[str, ...], vocab: int = 50257) -> list[Lever]:
    source = find_source("gpt2", {"vocab": vocab})
    captured = capture(source, STEP)
    account = account_of(captured, Runtime(), basis)

    def changed(changes: Mapping[str, int]) -> Captured:
        return capture(source, STEP, changes)

    named = dimensions(source, STEP, captured, vary)
    return find_levers(captured, named, changed, Runtime(), basis, account)


def test_the_step_is_the_sum_of_its_lines(gpt2: Captured, h100: Basis) -> None:
    account = account_of(gpt2, Runtime(), h100)
    lines = sum(line.product.count * line.time_us for line in account.lines)
    other = sum(each.time_us for each in account.other)
    assert account.step_us == pytest.approx(lines + other)
    assert sum(account.share(row) for row in account.rows) == pytest.approx(lines / (lines + other))
    assert account.flops == gpt2.flops
    low, high = account.interval_us
    assert 0 < low < account.step_us < high
    assert {row.basis for row in account.rows} == {"shipped", "assumed"}
    (optimizer,) = (each for each in account.other if each.what.startswith("optimizer"))
    assert optimizer.bytes == 7 * gpt2.parameter_bytes
    without = account_of(gpt2, Runtime(optimizer="none"), h100)
    assert account.step_us - without.step_us == pytest.approx(optimizer.time_us)


def test_kinds_of_other_operations_reach_their_share_of_the_bandwidth(
    gpt2: Captured, h100: Basis
) -> None:
    other = {each.what: each for each in account_of(gpt2, Runtime(), h100).other}
    rates = {what: each.bytes / each.time_us for what, each in other.items()}
    shares = {what: rate / rates["activation"] for what, rate in rates.items()}
    assert shares["elementwise"] == pytest.approx(1)
    assert shares["strided access"] == pytest.approx(0.37)
    assert shares["optimizer (adamw)"] == pytest.approx(0.52)


def test_the_shares_by_role_add_up_if_a_module_has_an_unknown_name(
    gpt2: Captured, h100: Basis
) -> None:
    account = account_of(gpt2, Runtime(), h100)
    assert sum(account.by_role.values()) == pytest.approx(account.step_us)
    lines = tuple(
        replace(line, product=replace(line.product, role="other"))
        if line.product.role == "head"
        else line
        for line in account.lines
    )
    renamed = replace(account, lines=lines)
    assert sum(renamed.by_role.values()) == pytest.approx(account.step_us)
    assert "head" not in renamed.by_role


def test_products_that_share_an_input_may_be_one(llama: Captured, h100: Basis) -> None:
    apart = Runtime().products(llama)
    fused = Runtime(fuse=("qkv", "gate_up")).products(llama)
    assert flops(fused) == flops(apart)
    works = {(p.role, p.pass_): p.work for p in fused}
    tokens, hidden, out = 4 * 512, 4096, 4096 + 2 * 1024
    assert works["qkv", "forward"] == Gemm(tokens, out, hidden, "bf16", "nt")
    assert works["qkv", "dgrad"] == Gemm(tokens, hidden, out, "bf16", "nn")
    assert works["qkv", "wgrad"] == Gemm(out, hidden, tokens, "bf16", "tn")
    assert works["gate_up", "wgrad"] == Gemm(2 * 14336, hidden, tokens, "bf16", "tn")
    assert not {"q", "k", "v", "gate", "up"} & {p.role for p in fused}
    for product in fused:
        assert fused[product.forward_position].path == product.path
    times = [account_of(llama, how, h100).step_us for how in (Runtime(fuse=("qkv",)), Runtime())]
    assert times[0] < times[1]


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_tensor_parallelism_divides_every_wide_product(llama: Captured, degree: int) -> None:
    whole, part = Runtime().products(llama), Runtime(tp=degree).products(llama)
    assert flops(part) * degree == flops(whole)
    by_pass = {p.pass_: p.work for p in part if p.role == "down"}
    tokens, hidden, ffn = 4 * 512, 4096, 14336 // degree
    assert by_pass == {
        "forward": Gemm(tokens, hidden, ffn, "bf16", "nt"),
        "dgrad": Gemm(tokens, ffn, hidden, "bf16", "nn"),
        "wgrad": Gemm(hidden, ffn, tokens, "bf16", "tn"),
    }


def test_what_a_degree_cannot_divide(llama: Captured, gpt2: Captured, h100: Basis) -> None:
    with pytest.raises(UserError, match="--tp 16 does not divide the number of KV heads .8."):
        Runtime(tp=16).products(llama)
    heads = [p for p in Runtime(tp=4).products(gpt2) if p.role == "head" and p.pass_ == "forward"]
    assert [p.sizes["n"] for p in heads] == [12565]  # a quarter of 50257, rounded up
    levers = find_levers(
        gpt2, dimensions(GPT2, STEP, gpt2, ("vocab",)), lambda c: capture(GPT2, STEP, c),
        Runtime(tp=4), h100, account_of(gpt2, Runtime(tp=4), h100),
    )  # fmt: skip
    assert levers[0].verdict == LIKELY
    assert levers[0].changes["vocab"][1] % 32 == 0


def test_a_degree_that_divides_nothing_gets_a_sentence(llama: Captured) -> None:
    with pytest.raises(UserError, match="--tp 7 does not divide"):
        Runtime(tp=7).products(llama)


def test_convolutions_are_said_to_remain_whole(gpt2: Captured) -> None:
    sizes = {"stem": 16, "width": 16, "classes": 10}
    images = capture(find_source("resnet-50", sizes), ModelStep("prefill", batch=1))
    conv = next(product.work for product in images.products if product.work.op == "conv")
    assert conv in [product.work for product in Runtime(tp=2).products(images)]
    (split,) = Runtime(tp=2).changes(images)
    assert "divided by 2 (convolutions and other operations are not divided, and" in split
    split = Runtime(tp=2).changes(gpt2)[0]
    assert "divided by 2 (other operations are not divided, and" in split


def test_a_part_of_a_sum_has_the_sum_in_brackets() -> None:
    work = Gemm(512, 4096, 768, "bf16")
    names = {"m": "fixed", "n": "hidden + 1024", "k": "hidden"}
    product = Product(work, "up", "layer.up", "forward", 1, 0, 0, names)
    (part,) = Runtime(tp=2).products(Captured((product,), (), (), 1, 2))
    assert part.names == {"m": "fixed", "n": "(hidden + 1024) / 2", "k": "hidden"}


def test_a_part_of_the_batch_of_attentions_gemms_is_divided_in_its_name() -> None:
    work = Gemm(512, 512, 64, "bf16", "nt", 96)
    names = {"m": "fixed", "n": "fixed", "k": "fixed", "batch": "8·heads"}
    product = Product(work, "attention", "layer.attention", "forward", 1, 0, 0, names)
    (part,) = Runtime(tp=2).products(Captured((product,), (), (), 1, 2))
    assert (part.sizes["batch"], part.names["batch"]) == (48, "8·heads / 2")


def test_recomputed_layers_and_chunks_of_the_loss(gpt2: Captured) -> None:
    plain = Runtime().products(gpt2)
    again = Runtime(recompute=True).products(gpt2)
    layers = [p for p in plain if p.pass_ == "forward" and "*" in p.path]
    assert flops([p for p in again if p.pass_ == RECOMPUTED]) == flops(layers)
    chunked = Runtime(loss_chunks=8).products(gpt2)
    assert flops(chunked) == flops(plain)
    uneven = [p for p in Runtime(loss_chunks=3).products(gpt2) if p.role == "head"]
    assert [(p.count, p.sizes["m"]) for p in uneven if p.pass_ == "forward"] == [(2, 683), (1, 682)]
    assert flops(Runtime(loss_chunks=10**6).products(gpt2)) == flops(plain)
    heads = {p.pass_: (p.count, p.work) for p in chunked if p.role == "head"}
    assert heads["forward"] == (8, Gemm(256, 50257, 768, "bf16", "nt"))
    assert heads["wgrad"] == (8, Gemm(50257, 768, 256, "bf16", "tn"))


def test_only_the_original_forward_pass_is_resized() -> None:
    forward = Product(Gemm(512, 4096, 768, "bf16"), "up", "layer.up", "forward", 1, 0, 0)
    recomputed = replace(forward, forward_position=1, recomputed=True)
    unknown_gradient = replace(forward, forward_position=2, pass_="dgrad")
    captured = Captured((forward, recomputed, unknown_gradient), (), (), 1, 2)
    dimension = Dimension("hidden", 768, {(0, "k"): 1.0})
    resized = _resized(captured, dimension, 1024, Runtime())
    assert resized == [(Gemm(512, 4096, 1024, "bf16"), 1)]


def test_experts_are_predicted_as_a_batch() -> None:
    forward = GroupedGemm(1024, 4096, 2048, 8, "bf16")
    assert as_problem(forward) == Gemm(128, 4096, 2048, "bf16", "nt", 8)
    few = replace(forward, m=3)  # in decoding, there may be fewer tokens than experts
    assert as_problem(few) == Gemm(1, 4096, 2048, "bf16", "nt", 3)
    weights = replace(forward, layout="tn", pass_="wgrad")
    assert as_problem(weights) == Gemm(4096, 2048, 128, "bf16", "tn", 8)


def test_tokens_may_go_to_few_experts_alone() -> None:
    experts = GroupedGemm(1024, 4096, 2048, 8, "bf16")
    product = Product(experts, "experts", "mlp", "forward", 1, -1, 0, {"experts": "num_experts"})
    captured = Captured((product,), (), (), 1, 2)
    (balanced,) = Runtime().products(captured)
    (skewed,) = Runtime(skew=4).products(captured)
    assert as_problem(balanced.work) == Gemm(128, 4096, 2048, "bf16", "nt", 8)
    assert as_problem(skewed.work) == Gemm(512, 4096, 2048, "bf16", "nt", 2)
    assert skewed.names["experts"] == "num_experts / 4"
    (one,) = Runtime(skew=100).products(captured)
    assert as_problem(one.work) == Gemm(1024, 4096, 2048, "bf16", "nt", 1)
    assert Runtime(skew=4).changes(captured) == [
        "only one in 4 experts gets tokens, and all experts that get tokens get the same share"
    ]
    assert "each expert gets the same share" in Runtime().changes(captured)[0]


def test_causal_attention_counts_half_or_in_full(gpt2: Captured) -> None:
    def attention(runtime: Runtime) -> int:
        return flops([p for p in runtime.products(gpt2) if p.role == "attention"])

    assert attention(Runtime(causal_half=False)) == 2 * attention(Runtime())
    assert "in full" in " ".join(Runtime(causal_half=False).changes(gpt2))


def test_a_share_of_the_peak_may_be_assumed_for_attention(h100: Basis) -> None:
    decoding = capture(GPT2, ModelStep("decode", batch=16, seq=1024))
    account = account_of(decoding, Runtime(attention=0.5), h100)
    (missing,) = account.not_counted
    assert missing.startswith("attention: 16×12 heads of 64, 1 query")
    assert not math.isnan(account.step_us)
    half, whole = (
        account_of(capture(GPT2, STEP), Runtime(attention=share), h100) for share in (0.5, 1.0)
    )
    (one, two) = (
        sum(r.total_us for r in account.rows if isinstance(r.product.work, Attention))
        for account in (half, whole)
    )
    assert one == pytest.approx(2 * two)


def test_attention_of_one_token_takes_the_time_of_the_cache(h100: Basis) -> None:
    decoding = capture(GPT2, ModelStep("decode", batch=64, seq=4096))
    account = account_of(decoding, Runtime(), h100)
    assert not account.not_counted
    (line,) = (line for line in account.lines if isinstance(line.product.work, Attention))
    cache = kv_cache_bytes(decoding)
    bandwidth = h100.model.machine.bandwidth
    assert cache / bandwidth < line.total_us * 1e-6 < 2 * cache / bandwidth
    assert (line.limit, line.basis) == ("memory", "shipped")
    assert "vllm" in account.attention


def test_the_backward_pass_of_attention_is_assumed(gpt2: Captured, h100: Basis) -> None:
    lines = account_of(gpt2, Runtime(), h100).lines
    times = {line.product.pass_: line for line in lines if isinstance(line.product.work, Attention)}
    forward, backward = times["forward"], times["backward"]
    assert (forward.basis, backward.basis) == ("shipped", "assumed")
    assert backward.time_us == pytest.approx(2.5 * forward.time_us)
    assert backward.hi_us / backward.time_us > forward.hi_us / forward.time_us
    named = account_of(gpt2, Runtime(attention_kernel="vllm"), h100)
    surer = next(line for line in named.lines if isinstance(line.product.work, Attention))
    assert surer.hi_us < forward.hi_us
    with pytest.raises(UserError, match="--attention-kernel: there are no attention times of .fa."):
        account_of(gpt2, Runtime(attention_kernel="fa"), h100)


def test_errors_of_a_sum_are_partly_the_same() -> None:
    alone = [(10.0, 8.0, 13.0)]
    assert summed(alone) == pytest.approx((10.0, 8.0, 13.0))
    many = summed(alone * 16)
    assert many.time == 160
    assert 160 - 16 * 2 < many.lo < 160 - 4 * 2


def test_a_model_says_how_alike_the_errors_of_a_sum_are(h100: Basis, gpt2: Captured) -> None:
    group = "cublas gemm bf16"
    fit = h100.model.fits[group]
    wider = replace(fit, sum_low=fit.sum_low * 2, sum_high=fit.sum_high * 2)
    model = replace(h100.model, fits={**h100.model.fits, group: wider})
    one, two = (account_of(gpt2, Runtime(), b) for b in (h100, replace(h100, model=model)))
    assert one.step_us == two.step_us
    assert two.interval_us[0] < one.interval_us[0] < one.interval_us[1] < two.interval_us[1]


def test_a_step_gains_what_its_products_gain() -> None:
    half = gain_of_step(100.0, [SumChange(40.0, (2.0, 2.0, 2.0))])
    assert half == pytest.approx((100 / 80 - 1,) * 3)
    unsure = gain_of_step(100.0, [SumChange(40.0, (2.0, 1.0, 4.0))])
    assert unsure == pytest.approx((0.25, 0.0, 100 / 70 - 1))
    costs = gain_of_step(100.0, [SumChange(40.0, (2.0, 2.0, 2.0))], extra_time=20.0)
    assert costs.value == pytest.approx(0.0)
    uncertain = gain_of_step(100.0, [], extra_error=10.0)
    assert uncertain == pytest.approx((0, 100 / 110 - 1, 100 / 90 - 1))


def test_a_vocabulary_that_nothing_divides_is_the_lever(h100: Basis) -> None:
    levers = levers_of(h100, ("vocab", "hidden"))
    best = levers[0]
    assert best.name == "vocab"
    assert best.verdict == LIKELY
    to = best.changes["vocab"][1]
    assert to % 8 == 0
    assert to > 50257
    assert best.products > best.gain.value > 0.01
    assert "aligned to 16 bytes" in best.reason
    assert 0 < best.parameters < 0.01
    assert {lever.verdict for lever in levers if lever.name != "vocab"} <= {LEAVE_IT}


@pytest.mark.parametrize(("vocab", "bytes_"), [(50258, 4), (50260, 8), (50264, 16)])
def test_the_reason_says_what_the_rows_become_multiples_of(
    h100: Basis, vocab: int, bytes_: int
) -> None:
    captured = capture(GPT2, STEP)

    def changed(changes: Mapping[str, int]) -> Captured:
        return capture(GPT2, STEP, changes)

    (lever,), _ = try_levers(
        captured, [{"vocab": (50257, vocab)}], changed, Runtime(), h100,
        account_of(captured, Runtime(), h100),
    )  # fmt: skip
    assert f"Operands become aligned to {bytes_} bytes." in lever.reason


def test_a_size_that_inductor_pads_to_needs_no_change(h100: Basis) -> None:
    runtime = Runtime(kind="compile")
    step = ModelStep(batch=4, seq=512)
    (compiled,) = audit(GPT2, step, runtime, [h100], LeverSearch(tries={"vocab": (50264,)}))
    (reason,) = compiled.report.refused.values()
    assert reason == "compiled code already pads its GEMMs to these sizes, even without the change."


def test_machines_share_a_warning_about_the_model(h100: Basis) -> None:
    """GPT-2 has 1,024 positions, and every machine warns of a longer sequence."""
    audits = audit(GPT2, ModelStep(batch=4, seq=2048), Runtime(), [h100, h100])
    (warning, *_) = audits[0].report.warnings
    assert as_comparison([result.report for result in audits]).count(warning) == 1


def test_a_change_of_the_number_of_layers_cannot_be_judged(h100: Basis) -> None:
    tries = {"layers": (24,), "hidden": (960,)}
    audits = audit(GPT2, STEP, Runtime(), [h100, h100], LeverSearch(tries=tries))
    assert not audits[0].levers
    (reason,) = audits[0].report.refused.values()
    assert "different number of operations" in reason
    comparison = as_comparison([result.report for result in audits])
    assert comparison.count("layers 12 → 24, hidden 768 → 960 cannot be judged: ") == 2


def test_a_change_that_also_makes_a_dimension_smaller_changes_the_model(h100: Basis) -> None:
    tries = {"vocab": (50304,), "heads": (8,)}
    (result,) = audit(GPT2, STEP, Runtime(), [h100], LeverSearch(tries=tries))
    (lever,) = result.levers
    assert lever.flops > 0
    assert lever.reason.endswith("The model changes; its quality is not predicted.")


def test_a_comparison_says_how_many_changes_it_leaves_out(h100: Basis) -> None:
    tries: dict[str, tuple[int, ...]] = {"vocab": (50264, 50272, 50304)}
    audits = audit(GPT2, STEP, Runtime(), [h100, h100], LeverSearch(tries=tries))
    comparison = as_comparison([result.report for result in audits])
    assert comparison.count("1 more change is left out; --json lists all 3.") == 2
    tries = {"vocab": (50264, 50272)}
    audits = audit(GPT2, STEP, Runtime(), [h100, h100], LeverSearch(tries=tries))
    assert "left out" not in as_comparison([result.report for result in audits])


def test_a_comparison_has_no_time_for_attention_that_a_machine_does_not_count(h100: Basis) -> None:
    cpu = find_basis("cpu-intel-xeon-avx512bf16-1t", RESULTS)
    decode = ModelStep("decode", batch=8, seq=512)
    audits = audit(GPT2, decode, Runtime(), [cpu, h100], LeverSearch(("vocab",)))
    lines = as_comparison([result.report for result in audits]).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["attention"][0] == "–"
    assert len(rows["attention"]) == 4  # a dash, then a time with its unit and a share
    labels = [line.split()[0] for line in lines if line]
    assert labels.index("attention") < labels.index("other")


@pytest.mark.parametrize(
    ("us", "text"),
    [(12.34, "12.3 µs"), (999.5, "1 ms"), (2.5e6, "2.5 s"), (1.2345e9, "1,234 s")],
)
def test_durations_have_no_exponent(us: float, text: str) -> None:
    assert duration(us) == text


def test_a_step_without_a_known_time_is_refused(h100: Basis) -> None:
    call = Attention(1, 2, 2, 16, 16, 64, 64, "fp32")
    product = Product(call, "attention", "", "forward", 1, 0, 0)
    captured = Captured((product,), (), (), parameters=0, parameter_bytes=0)
    with pytest.raises(UserError, match="no operation whose time can be counted on nvidia-h100"):
        account_of(captured, Runtime(), h100)


def test_a_model_may_have_neither_parameters_nor_other_operations(h100: Basis) -> None:
    def captured(width: int) -> Captured:
        product = Product(Gemm(256, width, 1024, "bf16"), "other", "", "forward", 1, 0, 0)
        return Captured((product,), (), (), parameters=0, parameter_bytes=0)

    (lever,), _ = try_levers(
        captured(1000),
        [{"width": (1000, 1024)}],
        lambda changes: captured(changes["width"]),
        Runtime(),
        h100,
        account_of(captured(1000), Runtime(), h100),
    )
    assert lever.parameters == lever.bytes == 0.0


def test_there_may_be_nothing_to_gain(h100: Basis) -> None:
    levers = levers_of(h100, ("vocab",), vocab=50304)
    assert [lever.verdict for lever in levers] == [LEAVE_IT]
    assert DO_IT not in {lever.verdict for lever in levers}  # *do it* needs a measurement


def test_a_lever_s_gain_is_that_of_the_changed_model_s_own_account(h100: Basis) -> None:
    (lever,) = levers_of(h100, ("vocab",))
    before = account_of(capture(GPT2, STEP), Runtime(), h100)
    after = account_of(capture(GPT2, STEP, {"vocab": lever.changes["vocab"][1]}), Runtime(), h100)
    assert lever.gain.value == pytest.approx(before.step_us / after.step_us - 1, rel=1e-6)
    assert lever.flops == pytest.approx(after.flops / before.flops - 1)


def test_candidates_are_sizes_that_an_engineer_would_choose(gpt2: Captured) -> None:
    named = {d.name: d for d in dimensions(GPT2, STEP, gpt2)}
    vocabulary = candidates(named["vocab"], gpt2)
    assert {50304, 50432, 50688, 51200} <= set(vocabulary)
    assert all(value % 64 == 0 for value in vocabulary)
    assert min(vocabulary) > 50257  # a vocabulary cannot shrink
    # The width of each of the 12 heads is a multiple of 8.
    assert candidates(named["hidden"], gpt2) == [672, 864]
    assert candidates(named["heads"], gpt2) == [6, 8, 16, 24]  # and never 13
    # The part of each of four GPUs is aligned, too.
    assert all(value % 32 == 0 for value in candidates(named["vocab"], gpt2, tp=4))
    plain = Dimension("ffn", 3000, {(3, "n"): 1.0})
    assert {2816, 2944, 3008, 3072} <= set(candidates(plain, gpt2))
    assert candidates(plain, gpt2, multiple=100) == [2900, 3100]
    assert all(abs(value / 3000 - 1) <= 0.125 for value in candidates(plain, gpt2))


def test_heads_are_changed_together_with_the_hidden_size(h100: Basis) -> None:
    levers = levers_of(h100, ("hidden", "heads"))
    (pair,) = (lever for lever in levers if len(lever.changes) == 2)
    (hidden, heads) = (pair.changes[name][1] for name in ("hidden", "heads"))
    assert hidden == 64 * heads


def test_a_gain_is_never_minus_zero(h100: Basis) -> None:
    (lever,) = levers_of(h100, ("vocab",))
    (found,) = audit(GPT2, STEP, Runtime(), [h100], LeverSearch(("vocab",)))
    unchanged = replace(lever, gain=Gain(-1e-5, -2e-4, 1e-5))
    text = as_text(replace(found.report, levers=[unchanged]))
    assert "  +0.0%      +0.0% to +0.0%  " in text


def test_a_text_without_levers_has_single_blank_lines(h100: Basis) -> None:
    (found,) = audit(GPT2, STEP, Runtime(), [h100], LeverSearch(("vocab",)))
    assert "\n\n\n" not in as_text(replace(found.report, levers=[]))
    assert "\n\n\n" not in as_text(found.report)


def test_pages_have_every_product_and_lever(gpt2: Captured, h100: Basis, tmp_path: Path) -> None:
    account: Account = account_of(gpt2, Runtime(), h100)
    levers = levers_of(h100, ("vocab",))
    frame = products_frame(account)
    assert frame["count"].mul(frame["flops"]).sum() == gpt2.flops
    assert set(frame["role"]) == {"qkv", "out", "up", "down", "head", "attention"}
    assert levers_frame(levers)["to"].tolist() == [levers[0].changes["vocab"][1]]
    assert 0 < levers_frame(levers)["share"][0] < 1
    (found,) = audit(GPT2, STEP, Runtime(), [h100], LeverSearch(("vocab",)))
    page = found.markdown()
    # A header and a lever, two tables of a header and a row, and a header and ten rows.
    assert page.count("\n| ") == 2 + 4 + 11
    assert page.index("Best change") < page.index("| role")
    for text in (page, str(found)):
        assert "vocab 50257 → 50304" in text
        assert "causal masks counted as half" in text
        assert "gpt2, train, batch 4 on nvidia-h100-sxm\n" in text
        assert "Step: " in text
        assert "; the step fits." in text
