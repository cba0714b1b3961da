"""A CPU's ceilings over a whole run: the highest that were measured or that a GEMM reached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernels.machine import cpu_machine, known_machine
from kernels.problem import Gemm
from sweeps.cases.case import Case
from sweeps.folding.history import histories
from sweeps.folding.raised_ceilings import gemms_above_peak, raise_ceilings
from sweeps.folding.steadiness import choose_repeats
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event

CPU = replace(cpu_machine({"fp32": 60e9}, 10e9, 2), slug="cpu-test-2t")
FAST = PlanEntry(Case("s", Gemm(512, 512, 512, "fp32"), "mkl"), 0.01)
SLOW = PlanEntry(Case("s", Gemm(500, 512, 512, "fp32"), "mkl"), 0.01)
PLANNED = [FAST, SLOW]


def events_of(entry: PlanEntry, flops: float, kind: str = "sample", count: int = 8) -> list[Event]:
    """Return ``count`` samples of a case at a speed (FLOP/s); they scatter by about a percent."""
    seconds = entry.case.problem.flops / flops
    events: list[Event] = [
        {"event": kind, "case": entry.case.id, "worker": "1/1", "at": 1.0, "cost": 0.0,
         "s": seconds * (1 + 0.002 * i)} for i in range(count)
    ]  # fmt: skip
    right = {"event": "right", "case": entry.case.id, "worker": "1/1", "cost": 0.0}
    return [*events, right] if kind == "sample" else events


def measured(peak: float, bandwidth: float) -> Event:
    return {"event": "ceilings", "case": "", "worker": "1/1", "cost": 0.0, "at": 1.0,
            "peaks": {"fp32": peak}, "bandwidth": bandwidth}  # fmt: skip


def raised(events: list[Event], record: dict[str, Any] | None = None) -> Any:
    return raise_ceilings(record or {}, CPU, events, PLANNED, histories(events))


def test_the_best_of_start_middle_and_end_counts() -> None:
    found = raised([measured(70e9, 8e9), measured(50e9, 12e9)])
    assert found.machine.peaks == {"fp32": 70e9}
    assert found.machine.bandwidth == 12e9
    assert found.record == {"start": {"peaks": {"fp32": 60e9}, "bandwidth": 10e9}}


def test_a_ceiling_that_was_measured_in_a_slow_moment_is_raised_and_said_to_be() -> None:
    """Without raised ceilings, a run once reported 201% of its peak."""
    events = [*events_of(FAST, 120e9), *events_of(SLOW, 50e9), *events_of(FAST, 118e9, "repeat")]
    found = raised(events)
    assert 115e9 < found.machine.peaks["fp32"] < 118e9
    assert found.record["raised"] == {"fp32": {"case": "512×512×512 fp32 nt", "from": 60e9}}
    # A second fold begins with the ceilings that were measured at the start.
    again = raise_ceilings(found.record and {"ceilings": found.record}, found.machine, events,
                           PLANNED, histories(events))  # fmt: skip
    assert again == found


def test_what_no_other_process_confirms_raises_nothing() -> None:
    assert "raised" not in raised(events_of(FAST, 120e9)).record
    slower = [*events_of(FAST, 120e9), *events_of(FAST, 55e9, "repeat")]
    assert raised(slower).machine.peaks == {"fp32": 60e9}
    few = [*events_of(FAST, 120e9), *events_of(FAST, 120e9, "repeat", count=5)]
    assert raised(few).machine.peaks == {"fp32": 60e9}


def test_a_case_within_its_uncertainty_exceeds_nothing() -> None:
    assert gemms_above_peak(PLANNED, histories(events_of(FAST, 60.5e9)), CPU.peaks) == {}


def test_what_exceeds_a_ceiling_is_timed_again() -> None:
    events = [*events_of(FAST, 120e9), *events_of(SLOW, 50e9)]
    known = histories(events)
    exceeding = gemms_above_peak(PLANNED, known, CPU.peaks)
    assert exceeding == {"fp32": FAST}
    many = [PlanEntry(Case("s", Gemm(64 + i, 64, 64, "fp32"), "mkl"), 0.001) for i in range(40)]
    events += [event for entry in many for event in events_of(entry, 1e9)]
    chosen = choose_repeats([*many, *PLANNED], histories(events), 120.0, exceeding.values())
    assert chosen[-1] == FAST
    assert len(chosen) == 25


def test_a_gpus_ceilings_stay_those_of_its_datasheet() -> None:
    machine = known_machine("nvidia-h200")
    found = raise_ceilings({}, machine, [measured(9e15, 9e15)], [], {})
    assert found.machine == machine
    assert found.record is None
