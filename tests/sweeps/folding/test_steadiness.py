"""Intervals and verdicts of runs on simulated machines, whose noise is known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sweeps.folding.case_rows import fold_rows
from sweeps.folding.health import health
from sweeps.folding.history import histories
from sweeps.folding.steadiness import canary_report, choose_repeats, machine_speeds, repeats_report
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from sweeps.timing.statistics import converged
from tests.support.simulated import (
    MACHINES,
    SimulatedMachine,
    log_normal,
    simulate,
    true_median,
    true_seconds,
)
from tests.support.tiers import quick_and_long

LEAST = 0.90
"""Share of 95% intervals that must contain the true median. Stopping early costs some coverage."""
CHANCE = 3.0
"""Standard errors by which the share may fall below :data:`LEAST`, because there are few cases."""
QUIET = ("log-normal 0.1%", "log-normal 0.3%", "log-normal 0.5%", "exponential 0.5%")
NOISY = (
    *(f"two speeds, {s} s each" for s in ("0.2", "0.5", "1", "2", "5")),
    "neighbour of 1 s in 4", "neighbour of 10 s in 20", "neighbour of 20 s in 80",
)  # fmt: skip


def share_held(
    machine: SimulatedMachine, cases: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, int, str, list[tuple[bool, bool]]]:
    """Simulate a run, and return four facts about it.

    Returns:
        The share of intervals that contain the case's true median; the number of intervals; the
        verdict; and for each case whether its samples alone converged, and whether its row says
        that it converged.
    """
    planned, events, bench = simulate(machine, cases, 1, monkeypatch)
    speeds = machine_speeds(events)
    rows = fold_rows("run", planned, events, None, speeds)
    record: dict[str, Any] = {"canary": canary_report(events), "repeats": None}
    verdict = health(record, None, planned, rows, events, speeds.values())["verdict"]
    rng, known = random.Random(5), histories(events)
    held, factor, certain = [], 0.0, []
    by_size = {row["m"]: row for row in rows}  # only of the cases that the run reached
    for entry in planned:
        row = by_size.get(entry.case.problem.m, {})  # type: ignore[union-attr]
        if "time_lo_us" not in row:
            continue
        if machine.sensitivity or not factor:
            factor = true_median(bench, entry.case, rng) / true_seconds(entry.case)
        truth = factor * true_seconds(entry.case) * 1e6
        held.append(row["time_lo_us"] <= truth <= row["time_hi_us"])
        seconds = [sample["s"] for sample in known[entry.case.id].best]
        certain.append((converged(seconds), row["converged"]))
    return sum(held) / len(held), len(held), verdict, certain


@pytest.mark.parametrize("cases", quick_and_long([300, 1000]))
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if "neighbour" in n else []) for n in MACHINES],
)
def test_intervals_hold_or_the_run_says_that_it_is_noisy(
    name: str, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option ``-rP`` prints the result for each machine."""
    share, count, verdict, certain = share_held(MACHINES[name], cases, monkeypatch)
    before, after = (sum(pair[i] for pair in certain) for i in (0, 1))
    print(f"{name}: {share:.3f} of {count} hold, {verdict}; {before} → {after} converged")
    if "ticks" in name:  # the scheduler's ticks were timed, so no interval is right
        assert verdict == "unusable"
        return
    assert share >= LEAST - CHANCE * (LEAST * (1 - LEAST) / count) ** 0.5
    assert verdict == "quiet" or name not in QUIET
    assert verdict == "noisy" or name not in NOISY
    if name in QUIET:
        assert sum(new for old, new in certain if old) >= 0.95 * before


def test_there_are_as_many_machines_as_are_claimed() -> None:
    assert sum(not machine.slow for machine in MACHINES.values()) == 18
    assert sum(machine.slow for machine in MACHINES.values()) == 20


def test_a_speed_that_changes_is_seen_and_intervals_reach_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every case has samples at both speeds, so its median is one of them or lies between them."""
    planned, events, _ = simulate(MACHINES["two speeds, 5 s each"], 200, 1, monkeypatch)
    (speed,) = machine_speeds(events).values()
    assert 0.07 < speed.spread < 0.11
    plain = fold_rows("run", planned, events)
    widened = fold_rows("run", planned, events, None, machine_speeds(events))
    for one, other in zip(plain, widened, strict=True):
        assert other["time_lo_us"] <= one["time_lo_us"] <= one["time_hi_us"] <= other["time_hi_us"]
        assert other["time_hi_us"] / other["time_lo_us"] > 1.07
        assert other["time_us"] == one["time_us"]


def test_gpus_and_workers_are_not_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker is slower throughout, so neither worker's speed changes."""
    _, events, _ = simulate(SimulatedMachine(log_normal(0.003)), 60, 1, monkeypatch)
    slower = [{**e, "worker": "2/2", "s": 2 * e["s"]} for e in events if "s" in e]
    speeds = machine_speeds([*events, *slower])
    assert set(speeds) == {("1/1", None), ("2/2", None)}
    assert {speed.spread for speed in speeds.values()} == {0.0}


def right_of(planned: list[PlanEntry]) -> list[Event]:
    """Return an event for each case that says that its result was right after the samples."""
    return [{"event": "right", "case": e.case.id, "worker": "1/1", "cost": 0.0} for e in planned]


def with_repeats(
    events: list[Event], planned: list[PlanEntry], apart: float, noise: float = 0.003
) -> list[Event]:
    """Return the events, and eight repeats of each case, whose median differs by a random factor.

    The logarithm of the factor has the standard deviation ``apart``.
    """
    rng = random.Random(3)
    repeats = []
    for entry in planned:
        off = rng.lognormvariate(0.0, apart)
        repeats += [
            {"event": "repeat", "case": entry.case.id, "worker": "1/1", "cost": 0.0, "at": 1.0,
             "s": true_seconds(entry.case) * off * rng.lognormvariate(0.0, noise)}
            for _ in range(8)
        ]  # fmt: skip
    return [*events, *repeats]


@pytest.mark.parametrize(("apart", "noise"), [(0.0, 0.003), (0.02, 0.003), (0.10, 0.003),
                                              (0.02, 0.03), (0.05, 0.03)])  # fmt: skip
def test_what_another_process_differs_by_is_found(
    apart: float, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, events, _ = simulate(SimulatedMachine(log_normal(noise)), 100, 1, monkeypatch)
    events = [*events, *right_of(planned)]
    assert repeats_report(histories(events)) is None
    report = repeats_report(histories(with_repeats(events, planned, apart, noise)))
    assert report is not None
    assert report["cases"] == 100
    assert report["between"] == pytest.approx(apart, abs=0.25 * apart + 0.002)


def test_one_case_that_takes_twice_as_long_does_not_widen_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned, events, _ = simulate(SimulatedMachine(log_normal(0.003)), 24, 1, monkeypatch)
    again = with_repeats([*events, *right_of(planned)], planned, 0.02)
    odd = planned[0].case.id
    doubled = [{**e, "s": 2 * e["s"]} if e["event"] == "repeat" and e["case"] == odd else e
               for e in again]  # fmt: skip
    usual, with_odd = (repeats_report(histories(found)) for found in (again, doubled))
    assert usual is not None
    assert with_odd is not None
    for name in ("between", "between_cases"):
        assert usual[name] <= with_odd[name] < 1.5 * usual[name]
    assert with_odd["ratio"] == pytest.approx(usual["ratio"], abs=0.01)


def test_repeated_are_cheap_finished_cases_from_all_over_the_plan_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned, events, _ = simulate(SimulatedMachine(log_normal(0.003)), 100, 1, monkeypatch)
    planned = [PlanEntry(e.case, 0.01 * (1 + i % 2)) for i, e in enumerate(planned)]
    finished = [*events, *right_of(planned)]
    chosen = choose_repeats(planned, histories(finished), budget=120.0)
    assert len(chosen) == 24
    assert {entry.expected for entry in chosen} == {0.01}
    places = [planned.index(entry) for entry in chosen]
    assert places[0] == 0
    assert places[-1] >= 96
    failure = {"event": "outcome", "status": "wrong", "message": "wrong.", "worker": "1/1"}
    failed = [*finished, {**failure, "case": chosen[0].case.id, "at": 0.0}]
    assert chosen[0] not in choose_repeats(planned, histories(failed), budget=120.0)
    few = choose_repeats(planned, histories(finished), budget=0.4)
    assert len(few) == 10
    assert planned.index(few[-1]) >= 96  # even with a small budget, the whole plan is covered
    assert choose_repeats(planned, histories(finished), budget=0.1) == []
    assert choose_repeats(planned, histories(events[:50]), 120.0) == []
    again = histories(with_repeats(finished, planned, 0.0))
    assert choose_repeats(planned, again, 120.0) == []
