"""Causes that make a run noisy or unusable, one at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.machine import Machine, cpu_machine, known_machine
from kernels.problem import Gemm
from sweeps.cases.case import Case
from sweeps.folding.health import health, health_sentence
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from sweeps.timing.speed import STEADY, MachineSpeed

CPU = replace(cpu_machine({"fp32": 60e9}, 10e9, 2), slug="cpu-test-2t")
STEADY_RECORD: dict[str, Any] = {
    "canary": {"spread": 0.02},
    "repeats": {"cases": 24, "between": 0.005},
}  # fmt: skip


def row(m: int = 512, time_us: float = 1e5, half: float = 0.004, **more: Any) -> dict[str, Any]:
    """Return the row of a GEMM whose time is far above the lower limit."""
    return {
        "status": "ok", **Case("s", Gemm(m, 512, 512, "fp32"), "mkl").columns(),
        "time_us": time_us, "time_lo_us": time_us * (1 - half), "time_hi_us": time_us * (1 + half),
        "converged": half <= 0.01, "throttled": "", "message": "", **more,
    }  # fmt: skip


def sample(case: str, seconds: float, launches: int = 1) -> Event:
    return {"event": "sample", "case": case, "worker": "1/1", "at": 1.0, "cost": 0.0,
            "s": seconds, "n": launches}  # fmt: skip


def planned(events: list[Event], mode: str = "burst") -> list[PlanEntry]:
    """Return a plan with one case for each case name, and give the events the ids of its cases."""
    cases = {name: i for i, name in enumerate(dict.fromkeys(e["case"] for e in events))}
    entries = [
        PlanEntry(Case("s", Gemm(64 + i, 64, 64, "fp32"), "mkl", mode=mode), 0.1)
        for i in cases.values()
    ]
    for event in events:
        event["case"] = entries[cases[event["case"]]].case.id
    return entries


def host(**shares: float) -> Event:
    return {"event": "host", "case": "", "worker": "1/1", "seconds": 10.0, "steal": 0.0,
            "others": 0.0, **shares}  # fmt: skip


def judge(
    record: dict[str, Any] | None = None,
    rows: list[dict[str, Any]] | None = None,
    events: list[Event] | None = None,
    speed: MachineSpeed = STEADY,
    machine: Machine = CPU,
    entries: Sequence[PlanEntry] = (),
) -> tuple[str, str]:
    """Return the verdict and the first reason, which is empty if there is none."""
    told = health(
        {**STEADY_RECORD, **(record or {})}, machine, entries, rows or [row() for _ in range(20)],
        events or [], [speed],
    )  # fmt: skip
    return told["verdict"], (told["reasons"] or [""])[0]


def test_a_steady_machine_alone_is_quiet() -> None:
    assert judge() == ("quiet", "")
    assert judge(events=[host(others=0.02, steal=0.01)]) == ("quiet", "")


@pytest.mark.parametrize(
    ("record", "verdict", "words"),
    [
        ({"canary": {"spread": 1.5}}, "quiet", ""),  # only the repeats count, and they agree
        ({"canary": {"spread": 0.08}, "repeats": None}, "noisy", "varies by 8%"),
        ({"canary": {"spread": 1.5}, "repeats": None}, "noisy", "varies by 150%"),
        ({"canary": None, "repeats": None}, "quiet", ""),
        ({"repeats": {"cases": 24, "between": 0.05}}, "noisy", "re-timing 24 cases"),
        ({"repeats": {"cases": 24, "between": 0.29}}, "noisy", "re-timing 24 cases"),
        ({"repeats": {"cases": 24, "between": 0.31}}, "unusable", "re-timing 24 cases"),
    ],
)  # fmt: skip
def test_what_the_record_says(record: dict[str, Any], verdict: str, words: str) -> None:
    told = judge(record)
    assert told[0] == verdict
    assert words in told[1]


def test_a_speed_that_changes_is_noise() -> None:
    speed = MachineSpeed(np.arange(4.0), np.zeros(4), -0.05, 0.05, 0.09)
    assert judge(speed=speed) == ("noisy", "the machine's speed changed by 9%")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(half=0.08) for _ in range(20)], "half of the intervals are wider than ±8%"),
        (
            [row(throttled="hw_slowdown") for _ in range(20)],
            "throttled its clock in 100% of the cases",
        ),
        # Too few cases to judge their intervals, but enough to see the throttling.
        ([row(throttled="hw_slowdown")] * 3, "throttled its clock in 100% of the cases"),
    ],
)
def test_what_the_rows_say(rows: list[dict[str, Any]], words: str) -> None:
    told = health(STEADY_RECORD, CPU, [], rows, [], [STEADY])
    assert told["verdict"] == "noisy"
    assert any(words in reason for reason in told["reasons"])


def test_a_power_cap_is_no_disturbance() -> None:
    assert judge(rows=[row(throttled="sw_power_cap") for _ in range(20)])[0] == "quiet"


def test_a_busy_host_is_the_cause_and_not_the_verdict() -> None:
    """An earlier version called such runs unusable, although their medians repeated within 4%."""
    busy = [host(others=0.6, steal=0.1)]
    assert judge(events=busy) == ("quiet", "")
    told = health({**STEADY_RECORD, "repeats": {"cases": 24, "between": 0.04}}, CPU, [],
                  [row() for _ in range(20)], busy, [STEADY])  # fmt: skip
    assert told["verdict"] == "noisy"
    assert told["reasons"] == [
        "re-timing 24 cases in a new process gave medians that differ by 4% beyond their intervals",
        "likely cause: other virtual machines used 10% of the cores' time",
        "likely cause: other processes used 60% of the cores' time",
    ]


@pytest.mark.parametrize(
    ("between", "sentence"),
    [
        (0.01, "Health: quiet; re-timed medians differ by 1% beyond their intervals."),
        (0.04, "Health: noisy; re-timed medians differ by 4% beyond their intervals, which are "
               "widened accordingly."),
        (0.45, "Health: unusable; re-timed medians differ by 45% beyond their intervals."),
    ],
)  # fmt: skip
def test_a_line_says_what_it_means(between: float, sentence: str) -> None:
    record = {**STEADY_RECORD, "repeats": {"cases": 24, "between": between}}
    judged = health(record, CPU, [], [row() for _ in range(20)], [], [STEADY])
    assert health_sentence({**record, "health": judged}) == sentence


def test_a_run_that_is_noisy_for_another_reason_names_it() -> None:
    restless = replace(STEADY, spread=math.log(1.04))
    judged = health(STEADY_RECORD, CPU, [], [row() for _ in range(20)], [], [restless])
    sentence = health_sentence({**STEADY_RECORD, "health": judged})
    assert sentence.startswith("Health: noisy; re-timed medians differ by ")
    assert sentence.endswith(", but the machine's speed changed by 4%.")


def at_ticks(tick: float, cases: int = 40) -> list[Event]:
    """Return samples that last whole ticks, as if launches waited for the scheduler.

    Each case has six samples, each of one to three ticks.
    """
    rng = random.Random(1)
    return [
        sample(f"case {i}", tick * rng.randint(1, 3) + rng.uniform(0, 0.01 * tick))
        for i in range(cases) for _ in range(6)
    ]  # fmt: skip


@pytest.mark.parametrize("tick", [0.004, 0.010, 0.016])
def test_the_tick_is_seen(tick: float) -> None:
    events = at_ticks(tick)
    verdict, reason = judge(events=events, entries=planned(events))
    assert verdict == "unusable"
    assert f"whole ticks of {tick * 1e3:.3g} ms" in reason


def test_few_cases_at_ticks_are_chance_and_sustained_ones_are_meant() -> None:
    few = at_ticks(0.004, cases=7)
    assert judge(events=few, entries=planned(few))[0] == "quiet"
    sustained = at_ticks(0.020)
    assert judge(events=sustained, entries=planned(sustained, "sustained"))[0] == "quiet"
    on_a_gpu = [{**event, "gpu": 0} for event in at_ticks(0.004)]
    assert judge(events=on_a_gpu, entries=planned(on_a_gpu))[0] == "quiet"


def test_a_few_at_ticks_among_many_are_not_the_run() -> None:
    rng = random.Random(1)
    events = [*at_ticks(0.004, cases=10), *(sample(f"short {i}", 5e-4) for i in range(400))]
    rng.shuffle(events)
    assert judge(events=events, entries=planned(events))[0] == "quiet"


def test_times_that_know_nothing_of_ticks_are_not_at_ticks() -> None:
    rng = random.Random(1)
    for _ in range(20):
        times = [10 ** rng.uniform(-4, -1.3) for _ in range(60)]
        events = [sample(f"case {i}", s) for i, s in enumerate(times) for _ in range(6)]
        assert judge(events=events, entries=planned(events))[0] == "quiet"


def test_a_run_of_which_little_is_known_is_not_quiet() -> None:
    """A run that was interrupted after a few seconds has no intervals, canary or repeats."""
    without = {name: value for name, value in row().items() if not name.startswith("time_")}
    rows = [{**without, "time_us": 1e5} for _ in range(20)]
    record = {"canary": None, "repeats": None}
    assert judge(record, rows) == (
        "noisy",
        "fewer than 8 cases have an interval, so the noise cannot be judged",
    )


def test_what_the_cores_do_beside_a_gpu_is_no_noise() -> None:
    machine = known_machine("nvidia-h200")
    assert judge(events=[host(others=0.9)], machine=machine)[0] == "quiet"


def test_another_process_on_the_gpu_is_noise() -> None:
    machine = known_machine("nvidia-h200")
    told = judge(events=[host(), host(gpu_processes=2)], machine=machine)
    assert told == ("noisy", "2 other processes used the GPU")


def test_the_worst_reason_comes_first() -> None:
    events = at_ticks(0.004)
    told = health(
        {**STEADY_RECORD, "repeats": {"cases": 24, "between": 0.05}}, CPU, planned(events),
        [row() for _ in range(20)], events, [STEADY],
    )  # fmt: skip
    assert told["verdict"] == "unusable"
    assert [reason.split()[0] for reason in told["reasons"]] == ["in", "re-timing"]
