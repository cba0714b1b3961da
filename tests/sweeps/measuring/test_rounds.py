from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sweeps.cases.case import Case
from sweeps.folding.case_rows import fold_rows
from sweeps.folding.history import CANARY, histories
from sweeps.measuring import rounds as rounds_module
from sweeps.measuring.bench import PoisonedError, Ready
from sweeps.measuring.rounds import CHUNK, FIRST_CHUNK, Rounds
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from sweeps.timing.clock import LaunchCall
from sweeps.timing.sampler import Sampler, Subject
from sweeps.timing.statistics import CHECKPOINTS
from sweeps.timing.telemetry import Reading, Telemetry
from tests.support.fakes import FakeBench, planned
from tests.support.fakes import case as fake_case


def go(
    cases: list[PlanEntry],
    budget: float = 1e6,
    spent: float = 0.0,
    earlier: list[Event] | None = None,
    **bench: Any,
) -> tuple[str, list[Event], FakeBench]:
    events: list[Event] = []
    device = FakeBench([entry.case for entry in cases], **bench)
    rounds = Rounds(
        cases, histories(earlier or []), device, "1/1", budget, spent, events.append,
        lambda case, seconds: None, seed=0,
    )  # fmt: skip
    return rounds.run(), events, device


def samples_of(events: list[Event]) -> Counter[str]:
    return Counter(e["case"] for e in events if e["event"] == "sample")


def test_every_case_is_sampled_until_it_is_finished() -> None:
    cases = planned(200)
    end, events, _ = go(cases)
    assert end == "done"
    counts = samples_of(events)
    del counts[CANARY]
    assert set(counts) == {entry.case.id for entry in cases}
    assert set(counts.values()) <= set(CHECKPOINTS)
    assert sum(e["event"] == "facts" for e in events) == 200


def test_a_finished_case_keeps_no_memory() -> None:
    """A launch holds operands and memory of its library, which a GPU of 24 GB needs for others."""
    cases = planned(3 * CHUNK)
    device = FakeBench([entry.case for entry in cases])
    prepare, alive = device.prepare, list[weakref.ref[Subject]]()

    def spied(*arguments: Any) -> Iterator[Any]:
        for result in prepare(*arguments):
            assert isinstance(result, Ready)
            alive.append(weakref.ref(result.subject))
            yield result

    device.prepare = spied  # type: ignore[assignment,method-assign]
    rounds = Rounds(cases, {}, device, "1/1", 1e6, 0.0, lambda event: None,
                    lambda case, seconds: None, seed=0)  # fmt: skip
    assert rounds.run() == "done"
    assert len(alive) == len(cases)
    gc.collect()
    assert not any(subject() for subject in alive)


def test_rounds_visit_each_open_case_once_in_a_new_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "FIRST_CHUNK", CHUNK)
    cases = planned(20)
    _, events, _ = go(cases)
    order = [e["case"] for e in events if e["event"] == "sample" and e["case"] != CANARY]
    rounds = [order[20 * i : 20 * (i + 1)] for i in range(6)]
    assert all(len(set(one)) == 20 for one in rounds)
    assert len({tuple(one) for one in rounds}) == 6


def test_cases_are_prepared_in_chunks_in_the_plans_order_and_the_device_woken_after() -> None:
    cases = planned(3 * CHUNK)
    _, events, device = go(cases)
    assert [case.id for case in device.prepared] == [entry.case.id for entry in cases]
    chunks = [1]  # the first event reports that the first case was prepared
    for before, event in itertools.pairwise(events):
        if event["event"] == "facts":
            chunks += [0] * (before["event"] == "sample")
            chunks[-1] += 1
    # The first chunks are small, so that the first samples come early even if preparing is slow.
    assert chunks == [FIRST_CHUNK, 16, 32, CHUNK, CHUNK, 8]
    assert len(device.clock.waking) == 6


@pytest.mark.slow
def test_all_cases_are_sampled_once_before_any_is_twice() -> None:
    """A case's samples then lie far apart, and noisy early cases do not delay later cases."""
    _, events, _ = go(planned(20 * CHUNK), canary="raise", spread=0.3)
    order = [e["case"] for e in events if e["event"] == "sample"]
    assert len(set(order[: 20 * CHUNK])) == 20 * CHUNK


def test_the_budget_ends_the_run_and_is_kept() -> None:
    cases = planned(100, expected=0.001)
    end, events, _ = go(cases, budget=0.2, seconds=1e-5)
    assert end == "budget"
    spent = sum(e["cost"] for e in events)
    assert 0.9 * 0.2 < spent < 1.1 * 0.2


def test_a_last_sample_that_uses_up_the_time_still_ends_the_work() -> None:
    cases = planned(1, expected=0.001)

    def measure(budget: float) -> tuple[str, list[Event]]:
        events: list[Event] = []
        bench = FakeBench([entry.case for entry in cases])
        rounds = Rounds(cases, {}, bench, "1/1", budget, 0.0, events.append,
                        lambda case, seconds: None, seed=0, longest=1.0)  # fmt: skip
        return rounds.run(), events

    _, events = measure(1e6)
    costs = [event["cost"] for event in events]
    last = max(i for i, event in enumerate(events) if event["event"] == "sample")
    end, again = measure(sum(costs[:last]) + costs[last] / 2)
    assert samples_of(again) == samples_of(events)
    assert end == "done"


def test_what_was_spent_before_counts() -> None:
    end, events, _ = go(planned(10), budget=5.0, spent=5.0)
    assert (end, events) == ("budget", [])


def test_no_case_is_begun_whose_six_samples_do_not_fit() -> None:
    _, events, _ = go(planned(10, expected=1.0), budget=3.5)
    first_sample = next(i for i, e in enumerate(events) if e["event"] == "sample")
    assert sum(e["event"] == "facts" for e in events[:first_sample]) == 3


def test_where_the_plan_was_too_hopeful_fewer_cases_are_begun_and_each_is_done() -> None:
    """Six samples of case m take 12 m ms (each has a warm-up), which is five times the plan's."""
    cases = [PlanEntry(entry.case, 0.0024 * m) for m, entry in enumerate(planned(400), 1)]
    random.Random(0).shuffle(cases)
    end, events, device = go(cases, budget=500.0, seconds=1e-3, spread=0.3, canary="raise")
    assert end == "budget"
    counts = samples_of(events)
    assert CHUNK < len(device.prepared) < 400
    assert min(counts.values()) >= 6


def test_a_case_that_takes_far_longer_than_planned_is_left() -> None:
    cases = planned(400, expected=0.0001)  # case m takes m × 0.1 ms per sample
    _, events, _ = go(cases, budget=1.0, seconds=1e-3)
    too_long = {e["case"] for e in events if e["event"] == "too-long"}
    assert too_long
    assert not too_long & set(samples_of(events))


def test_failures_are_outcomes_and_the_others_go_on() -> None:
    behaviours = {1: "wrong", 2: "oom", 3: "unsupported", 4: "raise", 5: "raise-in-sample"}
    cases = planned(8)
    end, events, _ = go(cases, behaviours=behaviours)
    assert end == "done"
    outcomes = {e["case"]: (e["status"], e["message"]) for e in events if e["event"] == "outcome"}
    by_m = {entry.case.problem.m: entry.case.id for entry in cases}  # type: ignore[union-attr]
    assert [outcomes[by_m[m]][0] for m in range(1, 6)] == [
        "wrong", "oom", "unsupported", "error", "error",
    ]  # fmt: skip
    assert outcomes[by_m[5]][1] == "RuntimeError: launch failed"
    measured = set(samples_of(events)) - {CANARY}
    assert measured == {by_m[6], by_m[7], by_m[8]}


def test_a_wrong_row_says_how_wrong() -> None:
    cases = planned(2)
    _, events, _ = go(cases, behaviours={1: "wrong"})
    facts = {e["case"]: e["facts"] for e in events if e["event"] == "facts"}
    assert facts[cases[0].case.id] == {"rel_error": 0.5}


def test_a_chunk_that_is_refused_as_a_whole_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds_module, "FIRST_CHUNK", CHUNK)
    cases = planned(3 * CHUNK)
    refused = dict.fromkeys(range(1, 2 * CHUNK + 1), "unsupported")
    end, events, device = go(cases, behaviours=refused)
    assert end == "done"
    assert len(set(samples_of(events)) - {CANARY}) == CHUNK
    assert len(device.clock.waking) == 1  # refused chunks do not wake the device


def test_where_time_is_short_every_case_has_six_samples_before_any_has_more() -> None:
    cases = planned(30, expected=1e-5)
    # The noise never converges, so every case could use 30 samples.
    end, events, _ = go(cases, budget=0.7, seconds=1e-4, spread=0.3, canary="raise")
    assert end == "budget"
    counts = samples_of(events)
    assert min(counts[entry.case.id] for entry in cases) >= 6
    six_s = 6 * 1e-4 * sum(range(1, 31))
    assert sum(e["cost"] for e in events) > six_s  # the remaining time was used for more samples


def test_a_canary_that_fails_is_gone_and_the_cases_go_on() -> None:
    end, events, _ = go(planned(5), canary="raise")
    assert end == "done"
    assert CANARY not in samples_of(events)
    crash = {"event": "crash", "case": CANARY, "worker": "1/1", "cost": 0.0, "message": "gone"}
    end, events, _ = go(planned(5), canary="abort", earlier=[crash])
    assert end == "done"


def test_what_belongs_to_no_case_is_on_the_budget() -> None:
    class Slow(FakeBench):
        def canary(self) -> Subject | None:
            self.clock.pause(3.0)
            return super().canary()

    events: list[Event] = []
    cases = planned(3)
    bench = Slow([entry.case for entry in cases])
    rounds = Rounds(
        cases, {}, bench, "1/1", 1e6, 0.0, events.append, lambda case, seconds: None, seed=0
    )
    rounds.run()
    assert sum(e["cost"] for e in events) == pytest.approx(bench.clock.seconds, rel=1e-3)


@pytest.mark.parametrize("behaviour", ["wrong-in-batch", "raise-in-sample", "wrong-after"])
def test_a_sample_or_check_that_fails_is_on_the_budget(behaviour: str) -> None:
    class SlowToFail(FakeBench):
        def recover_from(self, error: Exception) -> tuple[str, str]:
            self.clock.pause(3.0)  # the device recovers slowly
            return super().recover_from(error)

    events: list[Event] = []
    cases = planned(3)
    bench = SlowToFail([entry.case for entry in cases], behaviours={2: behaviour})
    rounds = Rounds(
        cases, {}, bench, "1/1", 1e6, 0.0, events.append, lambda case, seconds: None, seed=0
    )
    rounds.run()
    assert sum(e["cost"] for e in events) == pytest.approx(bench.clock.seconds, rel=1e-3)


def test_a_broken_context_is_not_an_outcome() -> None:
    with pytest.raises(PoisonedError):
        go(planned(3), behaviours={2: "poison"})


def test_resuming_goes_on_where_the_samples_end() -> None:
    cases = planned(30)
    _, full, _ = go(cases)
    earlier = [e for e in full if e["case"] != CANARY][:120]
    _, more, device = go(cases, earlier=earlier)
    finished_before = {case for case, count in samples_of(earlier).items() if count in CHECKPOINTS}
    assert not finished_before & {c.id for c in device.prepared}
    together = samples_of(earlier) + samples_of(more)
    assert all(together[entry.case.id] in CHECKPOINTS for entry in cases)


def test_samples_of_another_gpu_are_not_taken_over() -> None:
    cases = planned(1)
    _, first, _ = go(cases, gpu=0)
    assert all(e["gpu"] == 0 for e in first)
    partial = [e for e in first if e["event"] == "facts"] + [
        e for e in first if e["event"] == "sample" and e["case"] != CANARY
    ][:4]
    _, second, _ = go(cases, earlier=partial, gpu=1)
    assert samples_of(second)[cases[0].case.id] >= 6  # GPU 0's four samples do not count


def test_a_case_whose_launch_gaps_show_is_given_up_after_six_samples() -> None:
    cases = planned(3)
    # The numbers count launches, of which a warm sample has two.
    _, events, _ = go(cases, exposed={1: 99, 2: 4})
    by_m = {entry.case.problem.m: entry.case.id for entry in cases}  # type: ignore[union-attr]
    taken = {m: [e.get("hidden", True) for e in events if e["event"] == "sample"
                 and e["case"] == case] for m, case in by_m.items()}  # fmt: skip
    assert taken[1] == [False] * 6
    assert taken[2].count(False) == 2
    assert taken[2].count(True) in CHECKPOINTS  # samples with gaps do not count
    assert False not in taken[3]
    _, more, device = go(cases, earlier=events)
    assert device.prepared == []  # a case that was given up is not tried again
    assert not samples_of(more)


def test_a_short_call_leaves_no_case_because_of_its_own_shortness() -> None:
    """The limit on a case is a share of the run's budget, not of what this call has left."""
    cases = planned(3, expected=12.0)
    events: list[Event] = []
    bench = FakeBench([entry.case for entry in cases], seconds=1.0, canary="raise")
    rounds = Rounds(
        cases, {}, bench, "1/1", 1e4, 0.0, events.append, lambda ids, seconds: None, limit=40.0
    )
    assert rounds.run() == "budget"
    assert not [e for e in events if e["event"] == "too-long"]
    assert 12.0 < sum(e["cost"] for e in events) < 60.0


def test_power_is_told_of_sustained_work_alone() -> None:
    class Sensors(Telemetry):
        def between(self, begin: float, end: float) -> Reading:
            return Reading(1980.0, 640.0, 60.0)

    events: list[Event] = []
    cases = planned(2)
    bench = FakeBench([entry.case for entry in cases], sustained=(2,), canary="raise")
    bench.sampler = Sampler(bench.clock, telemetry=Sensors())
    Rounds(cases, {}, bench, "1/1", 1e6, 0.0, events.append, lambda ids, seconds: None).run()
    powers = {e["case"]: e.get("power_w") for e in events if e["event"] == "sample"}
    assert powers == {cases[0].case.id: None, cases[1].case.id: 640.0}
    assert all(e["sm_mhz"] == 1980.0 for e in events if e["event"] == "sample")


def test_the_canary_is_sampled_now_and_then() -> None:
    cases = planned(60)
    _, events, _ = go(cases, seconds=1e-2)
    total = sum(e["cost"] for e in events)
    canaries = samples_of(events)[CANARY]
    assert total / 2.0 * 0.4 <= canaries <= total / 2.0 + 2


def test_identity_of_cases() -> None:
    one = planned(1)[0].case
    assert Case.from_columns(one.columns()).id == one.id


def test_every_case_is_found_right_after_its_samples() -> None:
    cases = planned(30)
    _, events, _ = go(cases)
    last = {event["case"]: event["event"] for event in events}
    assert all(last[entry.case.id] == "right" for entry in cases)
    assert all(history.closed for history in histories(events).values() if history.facts)


@pytest.mark.parametrize("behaviour", ["wrong-in-batch", "wrong-after"])
def test_a_kernel_that_was_right_at_first_has_no_time(behaviour: str) -> None:
    cases = planned(3)
    _, events, _ = go(cases, behaviours={2: behaviour})
    rows = fold_rows("run", cases, events)
    assert [row["status"] for row in rows] == ["ok", "wrong", "ok"]
    assert "time_us" not in rows[1]
    assert rows[1]["message"].startswith("a check ")


def test_what_is_open_when_the_budget_ends_is_checked_in_time() -> None:
    cases = planned(8)
    end, events, device = go(cases, budget=0.05, spread=0.3, checking=1e-3, canary="raise")
    assert end == "budget"
    taken = samples_of(events)
    right = {event["case"] for event in events if event["event"] == "right"}
    assert right == set(taken)
    # Sampling ended early enough for the checks.
    assert device.clock.seconds < 0.05 - len(right) * 1e-3 + 0.002


def test_finished_samples_of_a_killed_process_are_checked_and_not_taken_again() -> None:
    cases = planned(4)
    _, events, _ = go(cases)
    killed = [event for event in events if event["event"] != "right"]
    rows = fold_rows("run", cases, killed)
    assert {row["samples"] for row in rows} == {1}  # only the first sample was checked
    _, more, _ = go(cases, earlier=killed)
    assert not samples_of(more) - Counter({CANARY: 100})
    rows = fold_rows("run", cases, [*killed, *more])
    assert {row["samples"] for row in rows} <= set(CHECKPOINTS)


def test_a_case_whose_last_sample_was_checked_is_still_checked_after_its_samples() -> None:
    """A crash may come between the sample and the check, which also uses inputs that are new."""
    cases = planned(1)
    _, events, _ = go(cases, canary="raise")
    samples = [event for event in events if event["event"] == "sample"]
    killed = [*(e for e in events if e["event"] == "facts"), *samples]
    killed[-1] = {**samples[-1], "checking": 0.001}
    history = histories(killed)[cases[0].case.id]
    assert len(history.trusted) == len(history.best)
    assert not history.closed
    _, more, _ = go(cases, earlier=killed, canary="raise")
    assert [e["event"] for e in more if e["case"] == cases[0].case.id][-1] == "right"
    assert not samples_of(more)
    assert histories([*killed, *more])[cases[0].case.id].closed


def test_where_the_machine_becomes_slower_some_cases_still_get_their_interval() -> None:
    """From 0.4 s on, launches take four times as long, so six samples of all cases do not fit."""

    class Slowing(FakeBench):
        def _launch(self, one: Case, behaviour: str) -> LaunchCall:
            quick = super()._launch(one, behaviour)

            def launch(index: int) -> object:
                seconds = quick(index)
                assert isinstance(seconds, float)
                return seconds if self.clock.seconds < 0.4 else 4 * seconds

            return launch

    # A sample of case m takes 2 m × 0.1 ms, including its warm-up.
    cases = [PlanEntry(fake_case(m), 12e-4 * m) for m in range(10, 40)]
    events: list[Event] = []
    bench = Slowing([entry.case for entry in cases], canary="raise")
    budget = 1.1 * sum(entry.expected for entry in cases)
    rounds = Rounds(
        cases, {}, bench, "1/1", budget, 0.0, events.append, lambda ids, s: None, seed=0
    )
    assert rounds.run() == "budget"
    counts = samples_of(events)
    assert len(counts) == len(cases)
    whole = sum(count >= 6 for count in counts.values())
    assert 5 <= whole < len(cases)
