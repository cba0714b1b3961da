"""Fold a run's events into one row per case. Torch-free; the only module that knows both."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.machine import Machine
from sweeps.running.limits import too_fast
from sweeps.running.plan import PlanEntry
from sweeps.schema import SCHEMA
from sweeps.store import Event
from sweeps.timing.sampler import MAX_EXPOSED
from sweeps.timing.statistics import converged, finished, median, median_interval

CANARY = "canary"
_MESSAGE_LENGTH = 300


@dataclass
class History:
    """Everything that is known of one case."""

    samples: dict[int | None, list[Event]] = field(default_factory=lambda: defaultdict(list))
    exposed: list[Event] = field(default_factory=list)
    """Samples in which gaps between launches may show; they enter no time."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    outcome: Event | None = None
    too_long: bool = False
    crashes: int = 0
    sound: dict[int | None, int] = field(default_factory=dict)
    """By GPU: how many of its samples were taken before its latest right result."""
    confirmed: dict[int | None, int] = field(default_factory=dict)
    """Likewise, before its latest right result on inputs that no launch had seen."""

    @property
    def best(self) -> list[Event]:
        """The samples of the GPU that took the most; samples of two GPUs are never pooled."""
        return max(self.samples.values(), key=len, default=[])

    @property
    def trusted(self) -> list[Event]:
        """Those of :attr:`best` that were followed by a right result of the case."""
        best = self.best
        return best[: self.sound.get(best[0].get("gpu"), 0)] if best else []

    @property
    def only_exposed(self) -> bool:
        """Whether launch gaps show in every sample."""
        return bool(self.exposed) and not self.best

    @property
    def closed(self) -> bool:
        """Whether nothing is left to be timed or checked."""
        if self.outcome is not None or self.too_long or len(self.exposed) >= MAX_EXPOSED:
            return True
        best = self.best
        # A crash may come between the last sample and the check after it, which is then still due.
        checked = bool(best) and self.confirmed.get(best[0].get("gpu")) == len(best)
        return checked and finished([s["s"] for s in best])

    @property
    def unnamed(self) -> bool:
        """Whether it has a time and no attempt was made to name its kernels."""
        return bool(self.samples) and self.outcome is None and "kernel" not in self.facts

    def add(self, event: Event) -> None:
        """Add an event of the case."""
        match event["event"]:
            case "sample" if event.get("hidden", True):
                self.samples[event.get("gpu")].append(event)
                if "checking" in event:
                    self._mark_sound(event)
            case "sample":
                self.exposed.append(event)
            case "right":
                self._mark_sound(event)
                self.confirmed[event.get("gpu")] = self.sound[event.get("gpu")]
            case "facts":
                self.facts = {**self.facts, **event["facts"]}
            case "outcome":
                self.outcome = event
            case "too-long":
                self.too_long = True
            case "crash":
                self.crashes += 1

    def _mark_sound(self, event: Event) -> None:
        self.sound[event.get("gpu")] = len(self.samples[event.get("gpu")])


def histories(events: Iterable[Event]) -> dict[str, History]:
    """Sort events by case. The canary is a case like any other."""
    known: dict[str, History] = defaultdict(History)
    for event in events:
        known[event["case"]].add(event)
    return known


def spent_seconds(events: Iterable[Event]) -> float:
    """Measuring time of a run so far, over all its resumes."""
    return sum(event.get("cost", 0.0) for event in events)


def checking_seconds(events: Iterable[Event]) -> float:
    """The part of :func:`spent_seconds` that went into checking results."""
    return sum(event.get("checking", 0.0) for event in events)


def fold_rows(
    run: str, planned: Sequence[PlanEntry], events: Iterable[Event], machine: Machine | None = None
) -> list[dict[str, Any]]:
    """One row per case of the plan that was timed, refused or failed, in the plan's order.

    A time that ``machine`` cannot reach becomes an error.
    """
    known = histories(events)
    rows = []
    for entry in planned:
        history = known.get(entry.case.id)
        if history is None or not (history.outcome or history.trusted or history.only_exposed):
            continue
        row = {"schema": SCHEMA, "run": run, **entry.case.columns(), **history.facts}
        if history.outcome is not None:
            rows.append({**row, **_failed_columns(history.outcome)})
        elif history.only_exposed:
            rows.append({**row, **_failed_columns(_exposed_outcome(history))})
        else:
            rows.append({**row, **_measured_columns(entry, history, machine)})
    return rows


def _exposed_outcome(history: History) -> Event:
    """The outcome of a case all of whose samples have launch gaps in them."""
    message = (
        f"gaps between launches show in all {len(history.exposed)} samples: launching waits for "
        "the device (is CUDA_LAUNCH_BLOCKING set?) or takes longer than can be hidden, or the "
        "process is stopped again and again."
    )
    return {**history.exposed[-1], "status": "error", "message": message}


def _failed_columns(outcome: Event) -> dict[str, Any]:
    message = " ".join(str(outcome["message"]).split())[:_MESSAGE_LENGTH]
    return {
        "status": outcome["status"], "message": message, "time_utc": _utc(outcome["at"]),
        "worker": outcome["worker"], "gpu": outcome.get("gpu"),
    }  # fmt: skip


def _measured_columns(
    entry: PlanEntry, history: History, machine: Machine | None
) -> dict[str, Any]:
    samples = history.trusted
    seconds = [sample["s"] for sample in samples]
    middle, interval = median(seconds), median_interval(seconds)
    problem = entry.case.problem
    impossible, sentence = too_fast(entry.case, middle, machine) if machine else (False, "")
    if impossible:
        return _failed_columns({**samples[-1], "status": "error", "message": sentence})
    reasons = {reason for sample in samples for reason in sample.get("throttled", ())}
    gaps = len(history.exposed)
    left_out = f"launch gaps show in {gaps} more samples, which are left out." if gaps else ""
    row: dict[str, Any] = {
        "status": "ok",
        "message": " ".join(filter(None, [sentence, left_out])),
        "time_utc": _utc(samples[-1]["at"]),
        "worker": samples[-1]["worker"],
        "gpu": samples[-1].get("gpu"),
        "time_us": middle * 1e6,
        "samples": len(samples),
        "converged": converged(seconds),
        "tflops": problem.flops / middle / 1e12,
        "gbps": problem.bytes / middle / 1e9,
        "throttled": ";".join(sorted(reasons)),
    }
    if interval is not None:
        row["time_lo_us"], row["time_hi_us"] = interval[0] * 1e6, interval[1] * 1e6
    for name in ("sm_mhz", "power_w", "temp_c"):
        values = [sample[name] for sample in samples if sample.get(name) is not None]
        row[name] = median(values) if values else None
    return row


def canary_report(events: Iterable[Event]) -> dict[str, Any] | None:
    """How steady the machine was: the canary's spread, and its last quarter over its first.

    ``certain`` says whether those quarters' intervals leave no doubt that it drifted. Samples of
    several shards or GPUs do not mix: those of the one that took most are reported.
    """
    by_place: dict[Any, list[float]] = defaultdict(list)
    samples = (e for e in events if e["event"] == "sample" and e.get("hidden", True))
    for event in sorted((e for e in samples if e["case"] == CANARY), key=lambda e: e["at"]):
        by_place[event["worker"], event.get("gpu")].append(event["s"])
    seconds = max(by_place.values(), key=len, default=[])
    if len(seconds) < 8:
        return None
    ordered = sorted(seconds)
    quarter, tenth = len(seconds) // 4, len(seconds) // 10
    first, last = seconds[:quarter], seconds[-quarter:]
    before, after = median_interval(first), median_interval(last)
    apart = before and after and (before[1] < after[0] or after[1] < before[0])
    return {
        "samples": len(seconds),
        "median_us": median(seconds) * 1e6,
        "spread": (ordered[-1 - tenth] - ordered[tenth]) / median(seconds),
        "drift": median(last) / median(first) - 1,
        "certain": bool(apart),
    }


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
