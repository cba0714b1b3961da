"""Fold a run's events into one row per case. Torch-free; the only module that knows both."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.machine import Machine
from sweeps.planning.plan import PlanEntry
from sweeps.running.limits import too_fast
from sweeps.schema import SCHEMA
from sweeps.store import Event
from sweeps.timing.sampler import MAX_EXPOSED
from sweeps.timing.speed import STEADY, MachineSpeed
from sweeps.timing.statistics import finished, is_narrow, median

CANARY = "canary"

BLOCKS = 5
"""Blocks of samples, A B B A, of a pair of cases in each process that times it anew. Their number
is fixed beforehand: stopping once a gain looks certain would make it look larger than it is."""
PROCESSES = 2
"""Processes that time a pair anew: what the samples of one share shows by how far they differ."""

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
    last_crash: str = ""
    sound: dict[int | None, int] = field(default_factory=dict)
    """By GPU: how many of its samples were taken before its latest right result."""
    verified: dict[int | None, int] = field(default_factory=dict)
    """Likewise, before its latest right result on inputs that no launch had seen."""

    repeats: list[Event] = field(default_factory=list)
    """Samples of another process, which tell how well medians repeat; they enter no time."""

    @property
    def every_sample(self) -> Iterator[Event]:
        """The samples of all GPUs."""
        return itertools.chain.from_iterable(self.samples.values())

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
        checked = bool(best) and self.verified.get(best[0].get("gpu")) == len(best)
        return checked and finished([s["s"] for s in best])

    @property
    def weight(self) -> tuple[bool, bool, int, bool]:
        """Which of two workers' histories of one case counts: the greater.

        A result that was found to be wrong stays wrong; then a time counts before none, and of two
        times the one with more samples.
        """
        failed = self.outcome is not None
        wrong = self.outcome is not None and self.outcome["status"] == "wrong"
        return wrong, not failed and bool(self.trusted), len(self.trusted), failed

    @property
    def unnamed(self) -> bool:
        """Whether it has a time and no attempt was made to name its kernels."""
        return bool(self.samples) and self.outcome is None and "kernel" not in self.facts

    def add(self, event: Event) -> None:
        """Add an event of the case. One that has ``moved`` begins anew, on another GPU."""
        match event["event"]:
            case "sample" if event.get("hidden", True):
                self.samples[event.get("gpu")].append(event)
                if "checking" in event:
                    self._mark_sound(event)
            case "sample":
                self.exposed.append(event)
            case "repeat":
                self.repeats.append(event)
            case "right":
                self._mark_sound(event)
                self.verified[event.get("gpu")] = self.sound[event.get("gpu")]
            case "facts":
                self.facts = {**self.facts, **event["facts"]}
            case "outcome":
                self.outcome = event
            case "too-long":
                self.too_long = True
            case "moved":
                vars(self).update(vars(History()))
            case "crash":
                self.crashes += 1
                self.last_crash = str(event.get("message", ""))

    def _mark_sound(self, event: Event) -> None:
        self.sound[event.get("gpu")] = len(self.samples[event.get("gpu")])


def histories(events: Iterable[Event]) -> dict[str, History]:
    """Sort events by case. The canary is a case like any other.

    Of a case that several workers timed, as in a merged recording, the history of one counts
    (:attr:`History.weight`; the first, of equals), and nothing of another's enters it.
    """
    known: dict[str, dict[str, History]] = defaultdict(lambda: defaultdict(History))
    for event in events:
        known[event["case"]][event["worker"]].add(event)
    return {
        case: max(by_worker.values(), key=lambda history: history.weight)
        for case, by_worker in known.items()
    }


def spent_seconds(events: Iterable[Event]) -> float:
    """Measuring time of a run so far, over all its resumes."""
    return sum(event.get("cost", 0.0) for event in events)


def checking_seconds(events: Iterable[Event]) -> float:
    """The part of :func:`spent_seconds` that went into checking results."""
    return sum(event.get("checking", 0.0) for event in events)


def timed(events: Iterable[Event]) -> Iterator[Event]:
    """The samples whose time counts: no launch gaps show in them."""
    return (e for e in events if e["event"] == "sample" and e.get("hidden", True))


Place = tuple[str, int | None]
"""A worker and the GPU that it measured on: samples of different ones are not of one machine."""


def place_of(event: Event) -> Place:
    """Where a sample was taken."""
    return event["worker"], event.get("gpu")


def fold_rows(
    run: str,
    planned: Sequence[PlanEntry],
    events: Sequence[Event],
    machine: Machine | None = None,
    speeds: Mapping[Place, MachineSpeed] | None = None,
) -> list[dict[str, Any]]:
    """One row per case of the plan that was timed, refused or failed, in the plan's order.

    Args:
        run: the run's name.
        planned: its cases.
        events: all of its events.
        machine: its facts; a time that it cannot reach becomes an error.
        speeds: the machine's speed over the run, for which intervals are widened; steady if None.
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
            rows.append({**row, **_measured_columns(entry, history, machine, speeds or {})})
    return rows


def rounds_table(
    planned: Sequence[PlanEntry], known: Mapping[str, History]
) -> list[dict[str, Any]]:
    """The samples behind each case's time that are known to be of a round.

    Two cases' samples of one round, by one worker on one GPU, were taken in one pass over all open
    cases: their ratio feels less of how fast the machine was than samples of two passes.
    """
    table = []
    for case in dict.fromkeys(entry.case.id for entry in planned):
        samples = [s for s in known[case].trusted if "r" in s] if case in known else []
        if samples:
            table.append({
                "case": case, "worker": samples[0]["worker"], "gpu": samples[0].get("gpu"),
                "rounds": " ".join(str(s["r"]) for s in samples),
                "times_us": " ".join(f"{s['s'] * 1e6:.6g}" for s in samples),
            })  # fmt: skip
    return table


def confirmed_table(events: Iterable[Event], known: Mapping[str, History]) -> list[dict[str, Any]]:
    """Of each pair of cases that was timed anew, and of each process that did it, the log time
    ratio of the first over the second in each block, which has two samples of either.

    A process counts if it took all blocks, and a pair if so many processes did on one GPU; if there
    are more of them, the latest count. A pair with a case that failed does not count.

    Args:
        events: of a run.
        known: the histories of its cases.
    """
    taken: dict[tuple[str, str], dict[float, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["event"] == "confirm":
            taken[event["case"], event["against"]][event["process"]].append(event)
    table = []
    for (case, against), by_process in taken.items():
        if any(case_id in known and known[case_id].outcome for case_id in (case, against)):
            continue
        whole = {p: place_of(b[0]) for p, b in by_process.items() if len(b) == BLOCKS}
        whole = {p: place for p, place in whole.items() if place == whole[max(whole)]}
        if len(whole) < PROCESSES:
            continue
        for number, process in enumerate(sorted(whole)[-PROCESSES:], 1):
            blocks = by_process[process]
            ratios = [math.log(s[0] * s[3] / (s[1] * s[2])) / 2 for s in (b["s"] for b in blocks)]
            table.append({
                "case": case, "against": against, "process": number,
                "worker": blocks[0]["worker"], "gpu": blocks[0].get("gpu"),
                "log_ratios": " ".join(f"{x:.6g}" for x in ratios),
            })  # fmt: skip
    return table


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
        "status": outcome["status"], "message": message, "time_utc": utc(outcome["at"]),
        "worker": outcome["worker"], "gpu": outcome.get("gpu"),
    }  # fmt: skip


def _measured_columns(
    entry: PlanEntry,
    history: History,
    machine: Machine | None,
    speeds: Mapping[Place, MachineSpeed],
) -> dict[str, Any]:
    samples = history.trusted
    seconds = [sample["s"] for sample in samples]
    speed = speeds.get(place_of(samples[-1]), STEADY)
    middle, interval = median(seconds), speed.interval(seconds, [s["at"] for s in samples])
    problem = entry.case.problem
    impossible, sentence = too_fast(entry.case, middle, machine) if machine else (False, "")
    if impossible:
        return _failed_columns({**samples[-1], "status": "error", "message": sentence})
    reasons = {reason for sample in samples for reason in sample.get("throttled", ())}
    gaps = len(history.exposed)
    left_out = f"launch gaps show in {gaps} more samples, which are left out." if gaps else ""
    row: dict[str, Any] = {
        "status": "ok",
        "message": " ".join(filter(None, [sentence, left_out, _tried_again(history)])),
        "time_utc": utc(samples[-1]["at"]),
        "worker": samples[-1]["worker"],
        "gpu": samples[-1].get("gpu"),
        "time_us": middle * 1e6,
        "samples": len(samples),
        "converged": is_narrow(middle, interval),
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


def _tried_again(history: History) -> str:
    """What is to be said of a case that was timed after it had taken its process down."""
    if not history.crashes:
        return ""
    times = "once" if history.crashes == 1 else f"{history.crashes} times"
    how = f": {history.last_crash}" if history.last_crash else ""
    return f"before it ran, the process ended {times} while visiting it{how}."


def utc(moment: float) -> str:
    """A moment since 1970 as measurements.csv writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
