from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.common.errors import UserError
from kernels.machine import cpu_machine, known_machine
from kernels.problem import Conv, Gemm
from sweeps.cases.case import Case
from sweeps.planning.plan import (
    Costs,
    PlanEntry,
    _bit_reversal_order,
    expected_seconds,
    make_plan,
    naming_reserve,
    planned_seconds,
)
from sweeps.store import read_run
from tests.support.published import PUBLISHED

H200 = known_machine("nvidia-h200")
CPU = cpu_machine({"fp32": 2e11, "bf16": 4e11}, 3e10, 2)


def sweep(name: str, *sizes: int) -> list[Case]:
    return [Case(name, Gemm(size, size, size, "fp32"), "cublas") for size in sizes]


@given(st.integers(1, 300))
def test_spreading_out_keeps_every_case(count: int) -> None:
    cases = sweep("s", *range(1, count + 1))
    assert sorted(c.problem.m for c in _bit_reversal_order(cases)) == list(range(1, count + 1))  # type: ignore[union-attr]


def test_any_beginning_covers_the_axis() -> None:
    order = [c.problem.m for c in _bit_reversal_order(sweep("s", *range(64)[1:], 64))]  # type: ignore[union-attr]
    for count in (4, 8, 16, 32):
        seen = sorted(order[:count])
        gaps = [b - a for a, b in zip([0, *seen], [*seen, 65], strict=True)]
        assert max(gaps) <= 2 * 65 / count


def test_every_sweep_is_represented_and_gets_a_like_share_of_the_time() -> None:
    sweeps = {"small": sweep("small", *[256] * 1, *range(257, 700)),
              "large": sweep("large", *range(2048, 2248))}  # fmt: skip
    plan = make_plan(sweeps, CPU, 70)
    spent = {"small": 0.0, "large": 0.0}
    for entry in plan.planned:
        spent[entry.case.sweep] += entry.expected
    assert 0.5 < spent["small"] / spent["large"] < 2
    names = [entry.case.sweep for entry in plan.planned[:10]]
    assert set(names) == {"small", "large"}


@given(st.floats(1, 600))
def test_the_plan_fits_the_budget_and_no_case_takes_two_percent_of_it(budget: float) -> None:
    sweeps = {"s": sweep("s", *range(64, 4000, 61)), "t": sweep("t", 128, 8192)}
    plan = make_plan(sweeps, CPU, budget)
    assert sum(entry.expected for entry in plan.planned) <= budget
    for name in sweeps:
        costs = [entry.expected for entry in plan.planned if entry.case.sweep == name]
        assert all(cost <= 0.02 * budget for cost in costs) or min(costs) > 0.02 * budget
    assert len(plan.planned) + sum(plan.left_out.values()) == sum(map(len, sweeps.values()))


def test_of_a_sweep_whose_cases_are_all_long_a_small_budget_gets_the_shortest() -> None:
    large_cache = replace(CPU, l2_bytes=260 << 20, bandwidth=8e9)
    cold = sweep("cold", 64, 128, 256, 4096, 8192)
    warm = [replace(case, sweep="warm", cache="warm") for case in cold]
    plan = make_plan({"cold": cold, "warm": warm}, large_cache, 8)
    assert {entry.case.sweep for entry in plan.planned} == {"cold", "warm"}
    assert {entry.case.problem.m for entry in plan.planned} <= {64, 128, 256}  # type: ignore[union-attr]
    assert sum(entry.expected for entry in plan.planned) <= 8


def grid(name: str, sizes: list[int], ks: list[int]) -> list[Case]:
    return [Case(name, Gemm(m, 256, k, "fp32"), "mkl", cache=cache)
            for m in sizes for k in ks for cache in ("cold", "warm")]  # fmt: skip


@given(st.floats(2, 60))
def test_lines_are_planned_whole_or_not_at_all(budget: float) -> None:
    cases = grid("s", list(range(1000, 1017)), [64, 1024, 8192])
    planned = {entry.case for entry in make_plan({"s": cases}, CPU, budget).planned}
    by_k = {k: [case in planned for case in cases if case.problem.k == k]  # type: ignore[union-attr]
            for k in (64, 1024, 8192)}  # fmt: skip
    whole = [k for k, there in by_k.items() if all(there)]
    if whole:  # otherwise not even one line fits
        assert all(all(there) or not any(there) for there in by_k.values())


def test_where_no_line_fits_a_sweep_gives_what_it_can() -> None:
    cases = grid("s", list(range(1000, 1017)), [8192])
    planned = make_plan({"s": cases}, CPU, 2).planned
    assert 0 < len(planned) < len(cases)


def test_where_no_line_fits_implementations_are_still_planned_together() -> None:
    cases = [
        replace(case, implementation=implementation)
        for case in grid("families", list(range(1000, 1017)), [8192])
        for implementation in ("mkl", "onednn")
    ]
    planned = make_plan({"families": cases}, CPU, 3).planned
    problems = [entry.case.problem for entry in planned]
    assert 0 < len(planned) < len(cases)
    assert all(problems.count(problem) == 2 for problem in problems)


def test_a_dtype_that_the_gpu_lacks_takes_no_time() -> None:
    v100 = known_machine("nvidia-v100-sxm2-16gb")
    cases = [Case("s", Gemm(8192, 8192, 8192, dtype), "cublas") for dtype in ("fp16", "bf16")]
    plan = make_plan({"s": cases}, v100, 60)
    expected = {entry.case.problem.dtype: entry.expected for entry in plan.planned}
    assert expected["bf16"] < expected["fp16"]


def test_probed_costs_make_a_plan_shorter_or_longer() -> None:
    cases = {"s": grid("s", list(range(1000, 1017)), [64, 1024])}
    usual = make_plan(cases, CPU, 600).planned
    slow = Costs(prepare=0.5, slower={"gemm fp32": [(1e6, 4.0), (1e9, 4.0)]})
    slower = make_plan(cases, CPU, 600, costs=slow).planned
    for before, after in zip(usual, slower, strict=True):
        assert after.expected > before.expected + 0.4
    again = Costs.from_json(json.loads(json.dumps(slow.to_json())), "cpu")
    assert [e.expected for e in make_plan(cases, CPU, 600, costs=again).planned] == [
        e.expected for e in slower
    ]
    damaged = {**slow.to_json(), "slower": {"gemm fp32": [[1e6]]}}
    with pytest.raises(UserError, match="the costs of the plan in run.json are damaged"):
        Costs.from_json(damaged, "cpu")


def test_shards_share_the_plan_and_each_has_the_budget() -> None:
    sweeps = {name: sweep(name, *range(512, 2512, 4)) for name in ("s", "t")}
    one, two = make_plan(sweeps, CPU, 20), make_plan(sweeps, CPU, 20, shards=2)
    assert len(two.planned) > 1.5 * len(one.planned)
    assert 20 < sum(entry.expected for entry in two.planned) <= 40


def test_expected_times_follow_the_machine() -> None:
    gemm = Gemm(4096, 4096, 4096, "fp32")
    on_gpu, on_cpu = (expected_seconds([gemm], machine)[0] for machine in (H200, CPU))
    assert gemm.flops / H200.peak("fp32") < on_gpu < 3 * gemm.flops / H200.peak("fp32")
    assert on_cpu > 100 * on_gpu
    assert expected_seconds([Gemm(8, 8, 8, "tf32")], CPU) == [0.0]  # cannot run: costs nothing


def test_channels_that_a_library_pads_are_not_expected_to_take_several_times_as_long() -> None:
    odd, even = (Conv.parse(f"32,{c},28,28,{c},3,3,1,1,1,1,bf16") for c in (255, 256))
    on_odd, on_even = expected_seconds([odd, even], H200)
    assert on_even < on_odd < 2 * on_even


def test_sustained_cases_are_expected_to_take_their_settling_time() -> None:
    burst = Case("s", Gemm(1024, 1024, 1024, "fp32"), "cublas")
    sustained = Case("s", Gemm(1024, 1024, 1024, "fp32"), "cublas", mode="sustained")
    expected = {
        p.case.mode: p.expected for p in make_plan({"s": [burst, sustained]}, H200, 600).planned
    }
    assert expected["sustained"] > 6 * 0.36 > expected["burst"]


def test_sweeps_can_be_planned_one_after_the_other() -> None:
    sweeps = {"first": sweep("first", *range(64, 128)), "second": sweep("second", 32, 48)}
    names = [entry.case.sweep for entry in make_plan(sweeps, CPU, 600, in_order=True).planned]
    assert names == ["first"] * 64 + ["second"] * 2


SHARED_KERNEL = [
    Case("s", Gemm(m, 512, 512, "bf16"), "triton-tiled", "bm=64;bn=64") for m in (512, 1024, 1537)
]
"""Two sizes that are multiples of 16, and an odd one, which needs another kernel."""


def test_a_kernel_is_compiled_once_next_to_the_run() -> None:
    library = [replace(case, implementation="cublas", config="") for case in SHARED_KERNEL]
    ours, theirs = (
        make_plan({"s": some}, H200, 600, cores=6).planned for some in (SHARED_KERNEL, library)
    )
    # Two seconds by one of four processes; they do not delay the measuring.
    assert sorted(entry.compiling for entry in ours) == pytest.approx([0.0, 0.5, 0.5])
    assert sum(e.expected for e in ours) == pytest.approx(sum(e.expected for e in theirs), abs=1e-2)
    assert planned_seconds(ours) == pytest.approx(1.0)
    assert planned_seconds(theirs) == sum(entry.expected for entry in theirs) < 1.0


def test_a_run_without_compiling_processes_compiles_its_kernels_itself() -> None:
    planned = make_plan({"s": SHARED_KERNEL}, H200, 600, cores=2).planned
    assert [entry.compiling for entry in planned] == [0.0] * 3
    assert 4.0 < sum(entry.expected for entry in planned) < 5.0


def test_compiling_limits_a_plan_if_it_takes_longer_than_measuring() -> None:
    """Each case needs a kernel of its own: half a second of four processes."""
    cases = [
        Case("s", Gemm(n, n, n, "bf16"), "triton-tiled", f"bm={bm};bn={bn}")
        for n, (bm, bn) in enumerate(itertools.product((16, 32, 64, 128), (16, 32, 64)), 300)
    ]
    few, all_of_them = (
        len(make_plan({"s": cases}, H200, 3, cores=cores).planned) for cores in (6, 14)
    )
    assert few == 4  # 2 s of 92% of the time that naming leaves
    assert all_of_them == len(cases) == 12


def test_autotuned_convolutions_cost_their_search() -> None:
    conv = Conv.parse("32,64,28,28,64,3,3,1,1,1,1,fp16")
    plain, tuned = Case("s", conv, "cudnn"), Case("s", conv, "cudnn", "autotune=on")
    costs = {p.case.config: p.expected for p in make_plan({"s": [plain, tuned]}, H200, 60).planned}
    assert costs["autotune=on"] > costs[""] + 0.2


@given(st.floats(1, 600))
def test_a_plan_leaves_the_time_that_naming_its_cases_takes(budget: float) -> None:
    sweeps = {"small": sweep("small", *range(256, 4096, 8))}
    planned = make_plan(sweeps, H200, budget).planned
    reserve = naming_reserve([entry.case for entry in planned], budget)
    assert sum(entry.expected for entry in planned) + reserve <= budget * (1 + 1e-9)


def test_naming_has_its_place_in_the_budget() -> None:
    gemms = sweep("s", *range(1, 3501))
    assert naming_reserve(gemms, 600) == pytest.approx(43.5)
    assert naming_reserve(gemms, 60) == pytest.approx(12.0)  # a fifth at most
    conv = Case("s", Conv.parse("32,64,28,28,64,3,3,1,1,1,1,fp16"), "cudnn")
    assert naming_reserve([conv] * 100, 600) == pytest.approx(9.1)  # each plan is built again


def test_a_cpu_s_plan_leaves_no_time_for_naming() -> None:
    """On a CPU, kernels are named while cases are prepared."""
    cpu = replace(cpu_machine({"fp32": 90e9}, 16e9, 1), l2_bytes=1 << 20)
    cases = [replace(case, implementation="mkl") for case in sweep("s", *range(64, 9000, 8))]
    planned = make_plan({"s": cases}, cpu, 60).planned
    assert len(planned) < len(cases)
    taken = sum(entry.expected + entry.more for entry in planned)
    assert 0.9 * 60 < taken <= 0.92 * 60  # the share of the budget that a plan fills


def test_no_case_is_too_long_of_what_was_asked_for_by_name() -> None:
    gemm = Gemm(1024, 1024, 1024, "fp32")
    case, short = (Case("s", gemm, "cublas", mode=mode) for mode in ("sustained", "burst"))
    planned = make_plan({"s": [case, short]}, H200, 30).planned
    assert [entry.case for entry in planned] == [short]  # the other takes over two percent
    assert [entry.case for entry in make_plan({"s": [case]}, H200, 30, in_order=True).planned] == [
        case
    ]


def test_planned_cases_survive_json() -> None:
    plan = make_plan({"s": sweep("s", 128, 256)}, CPU, 60)
    for entry in plan.planned:
        again = PlanEntry.from_json(json.loads(json.dumps(entry.to_json())))
        assert again.case == entry.case
        assert abs(again.expected - entry.expected) < 1e-6


def test_checking_results_is_part_of_what_a_case_is_expected_to_take() -> None:
    cases = [Case("s", Gemm(n, n, n, "bf16"), "cublas") for n in (64, 4096)]
    small, large = sorted(make_plan({"s": cases}, H200, 600).planned, key=lambda p: p.checking)
    assert 3 * 8e-4 <= small.checking < large.checking < 0.5 * large.expected
    assert PlanEntry.from_json(large.to_json()).expected == pytest.approx(large.expected, abs=1e-6)


@pytest.mark.parametrize("run", sorted(PUBLISHED.rglob("run.json")), ids=lambda p: p.parent.name)
def test_every_recorded_plan_is_read_again(run: Path) -> None:
    """The plans have GEMMs, convolutions, layers, series and LSTMs."""
    rows = read_run(run.parent)["plan"]["cases"]
    assert [PlanEntry.from_json(row).to_json() for row in rows] == rows


@pytest.mark.parametrize(
    "change", [{"m": "x"}, {"expected_s": None}, {"sweep": 7}, {"sweep": "\ud800"}, {"op": "foo"}]
)
def test_a_damaged_case_of_a_plan_is_one_sentence(change: dict[str, object]) -> None:
    row = PlanEntry(Case("square", Gemm(64, 64, 64, "bf16"), "cublas"), 0.1).to_json()
    with pytest.raises(UserError, match="(a case of the plan|the plan is damaged: case).*FRESH=1"):
        PlanEntry.from_json({**row, **change})
