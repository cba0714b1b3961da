from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.advice.sizes import dimensions
from analysis.rules.catalogue import all_rules, rule_sweeps
from analysis.rules.pairing import PAIRINGS, TimedCase
from kernels.machine import known_machine
from kernels.problem import Conv, Gemm
from sweeps.cases.case import Case
from sweeps.planning.choice import choose_sweeps, sweep_cases
from sweeps.planning.lines import NEAR, _near_pairs, lines_of, series_of, share_out
from sweeps.planning.plan import make_plan

H200 = known_machine("nvidia-h200")


def case(m: int, n: int = 4096, k: int = 4096, dtype: str = "bf16", sweep: str = "s") -> Case:
    return Case(sweep, Gemm(m, n, k, dtype), "cublas")


def test_what_is_compared_is_one_series() -> None:
    along = [case(4096), case(9000), case(64)]
    dtypes = [case(4096, dtype="fp32"), case(4096, dtype="tf32")]
    near = [case(4200, 4100, 4000, sweep="t")]
    assert set(series_of([*along, *dtypes, *near])) == {0}


def test_lines_have_all_that_differs_in_one_size() -> None:
    gemms = [Gemm(m, n, 64, dtype) for dtype in ("bf16", "fp32")
             for m, n in ((8, 8), (9, 8), (10, 8), (8, 9), (8, 10), (500, 700))]  # fmt: skip
    lines = lines_of([Case("s", gemm, "mkl") for gemm in gemms])
    sizes = [{(gemms[i].m, gemms[i].n) for i in line} for line in lines]
    assert sizes == [{(8, 8), (9, 8), (10, 8)}, {(8, 8), (8, 9), (8, 10)}, {(500, 700)}]
    assert all(len(line) == 2 * len(own) for line, own in zip(lines, sizes, strict=True))
    # Squares differ in all three sizes, so each forms a group by itself.
    assert len(lines_of([Case("s", Gemm(n, n, n, "fp32"), "mkl") for n in (64, 128, 256)])) == 3


def test_what_nobody_compares_is_shared_out() -> None:
    cases = [
        case(4096), case(4096, 1024, 1024, sweep="t"), case(4096, dtype="fp32", sweep="u"),
        case(int(4096 * NEAR) + 2, sweep="v"),
    ]  # fmt: skip
    assert series_of(cases) == [0, 1, 2, 3]
    assert series_of(cases, [("s", "u")]) == [0, 1, 0, 2]


def test_near_problems_that_a_series_has_both_of_link_no_other_sweep() -> None:
    cases = [case(m, sweep=sweep) for sweep in "st" for m in (4096, 4100)]
    assert series_of(cases) == [0, 0, 1, 1]


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_no_rule_compares_cases_of_two_shards(shards: int) -> None:
    """The cases are those of the sweeps that rules need, as planned for an H200."""
    groups = [tuple(name.split(",")) for name in rule_sweeps()]
    names = list(dict.fromkeys(name for group in groups for name in group))
    cases = {name: sweep_cases(s, H200) for name, s in choose_sweeps(names).items()}
    planned = make_plan(cases, H200, 1e9, shards, together=groups).planned
    shard = [entry.shard for entry in planned]
    assert len(set(shard)) == shards
    timed = [
        TimedCase(e.case.problem, e.case.implementation, e.case.config, e.case.cache,
                  e.case.sweep, 1.0, 0.01)
        for e in planned
    ]  # fmt: skip
    compared = 0
    for rule in all_rules().values():
        if not rule.pairing:
            continue
        where = [i for i, one in enumerate(timed) if one.sweep in rule.sweeps]
        pairing = PAIRINGS[rule.pairing]
        matches = list(pairing([timed[i] for i in where], H200, **rule.options))
        assert matches, f"{rule.id} has no pair in its sweeps"
        for match in matches:
            sides = {shard[where[match.against]], shard[where[match.following]]}
            compared += 1
            assert len(sides) == 1, (rule.id, match)
    assert compared > 1000


@pytest.mark.parametrize("shards", [2, 4, 8, 32])
def test_the_default_plan_keeps_what_advice_compares_on_one_gpu(shards: int) -> None:
    cases = {name: sweep_cases(s, H200) for name, s in choose_sweeps(()).items()}
    planned = make_plan(cases, H200, 600, shards).planned
    by_problem: dict[Gemm, set[int | None]] = defaultdict(set)
    for entry in planned:
        if isinstance(entry.case.problem, Gemm) and entry.case.mode == "burst":
            by_problem[entry.case.problem].add(entry.shard)
    for problem, there in by_problem.items():
        for more in (1, 8, problem.n // 10):
            other = Gemm(problem.m, problem.n + more, problem.k, problem.dtype, problem.layout,
                         problem.batch)  # fmt: skip
            if other in by_problem:
                assert there & by_problem[other], (problem, other)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.sampled_from("stu")), min_size=1, max_size=40),
    st.integers(1, 6),
)
def test_shares_are_whole_series_and_as_equal_as_they_can_be(
    sizes: Sequence[tuple[int, str]], shards: int
) -> None:
    cases = [case(m, m, m, sweep=sweep) for m, sweep in dict.fromkeys(sizes)]
    seconds = [1.0 + i % 3 for i in range(len(cases))]
    numbers, shares = series_of(cases), share_out(cases, seconds, shards)
    assert len({*zip(numbers, shares, strict=True)}) == len(set(numbers))
    load: dict[int, float] = defaultdict(float)
    longest: dict[int, float] = defaultdict(float)
    for number, share, taken in zip(numbers, shares, seconds, strict=True):
        load[share] += taken
        longest[number] += taken
    best = max(sum(seconds) / shards, *longest.values())
    assert max(load.values()) <= best + max(longest.values())
    # A case that has a shard keeps it, and the rest of its series goes to that shard.
    again = share_out(cases, seconds, shards, assigned={cases[0].id: shards})
    assert {share for n, share in zip(numbers, again, strict=True) if n == numbers[0]} == {shards}


def test_only_problems_that_advice_compares_are_near() -> None:
    wide = Conv.parse("32,64,28,28,64,3,3,1,1,1,1,bf16")
    square = Gemm(1024, 1024, 1024, "bf16")
    for problem in (wide, square):
        for field in fields(problem):
            value = getattr(problem, field.name)
            if type(value) is not int or value < 8:
                continue
            changed: dict[str, Any] = {field.name: value + value // 8}
            near = replace(problem, **changed)
            cases = [Case("a", problem, "library"), Case("b", near, "library")]
            assert bool(list(_near_pairs(cases))) == (field.name in dimensions(problem)), field.name
