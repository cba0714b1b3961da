"""A run's health: whether the machine was steady and alone, so that its times may be believed.

``quiet``: nothing was seen that widens what the intervals say. ``noisy``: something was; intervals
are wider for it where it can be reckoned with. ``unusable``: times are of something other than the
machine, and nothing should be advised from them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.machine import Machine
from sweeps.cases.case import Case
from sweeps.planning.plan import PlanEntry
from sweeps.running.fold import timed
from sweeps.running.limits import MEASURED_SLACK, is_from_datasheet, share_of_ceiling
from sweeps.store import Event
from sweeps.timing.speed import MachineSpeed
from sweeps.timing.telemetry import RETRY

VERDICTS = ("quiet", "noisy", "unusable")
"""From the best to the worst."""

UNUSABLE = VERDICTS[-1]

Finding = tuple[str, str]
"""A verdict and its reason, a sentence without its full stop."""

_TICKS = (0.001, 0.002, 1 / 300, 0.004, 0.008, 0.010, 0.012, 0.016, 0.020)
"""Seconds between two decisions of a scheduler, as kernels are configured."""
_NEAR_TICK = 0.03  # of a tick; of times that know nothing of it, twice this share is so near
_MAX_TICKS = 8
_MIN_AT_TICK = 8  # cases, which may resemble one another


@dataclass(frozen=True)
class _Limits:
    """Values from which a run is noisy, and from which it is unusable."""

    noisy: float
    unusable: float = float("inf")

    def verdict(self, value: float) -> str:
        return "unusable" if value >= self.unusable else "noisy" if value >= self.noisy else "quiet"


_SPEED = _Limits(0.03, 0.5)
_CANARY = _Limits(0.05, 1.0)
_BETWEEN = _Limits(0.03, 0.3)
_HALF_WIDTH = _Limits(0.05, 0.5)
_STEAL = _Limits(0.02, 0.3)
_OTHERS = _Limits(0.05, 0.5)
_AT_TICKS = _Limits(0.1, 0.25)
_THROTTLED = _Limits(0.05)
_CEILINGS_APART = 0.15
_FEW_CONVERGED = 0.25
_MIN_ROWS = 8


def health(
    record: Mapping[str, Any],
    machine: Machine | None,
    planned: Sequence[PlanEntry],
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
    speeds: Iterable[MachineSpeed],
) -> dict[str, Any]:
    """The verdict on a run and its reasons, worst first.

    Args:
        record: the run's record, with ``canary`` and ``repeats``.
        machine: its facts.
        planned: its cases.
        rows: of its table.
        events: all of its events.
        speeds: the machine's over the run, of each place.
    """
    ok = [row for row in rows if row["status"] == "ok"]
    found = [
        *_of_time(record, max((speed.spread for speed in speeds), default=0.0)),
        *_of_rows(ok),
        *_of_ticks(events, planned),
        *(_of_ceilings(record, machine, ok) if machine else ()),
        *_of_host(events, machine),
        *_of_merged(record),
    ]
    bad = sorted((f for f in found if f[0] != "quiet"), key=lambda f: -VERDICTS.index(f[0]))
    return {"verdict": bad[0][0] if bad else "quiet", "reasons": [reason for _, reason in bad]}


def health_sentence(judged: Mapping[str, Any]) -> str:
    """What :func:`health` found, for reading."""
    reasons = "; ".join(judged["reasons"])
    return f"Health: {judged['verdict']}" + (f" ({reasons})" if reasons else "") + "."


def _of_time(record: Mapping[str, Any], spread: float) -> Iterator[Finding]:
    """The machine's speed over the run, by all cases, by the canary, and by another process."""
    change = math.expm1(spread)
    yield _SPEED.verdict(change), f"the machine's speed changed by {change:.0%}"
    canary, repeats = record.get("canary"), record.get("repeats")
    if canary:
        yield (
            _CANARY.verdict(canary["spread"]),
            f"the same product, timed every two seconds, scatters by {canary['spread']:.0%}",
        )
    if repeats:
        yield (
            _BETWEEN.verdict(repeats["between"]),
            f"{repeats['cases']} cases timed again by another process differ by "
            f"{repeats['between']:.0%} beyond their intervals",
        )


def _of_rows(ok: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """How wide intervals are, how many have converged, and whether clocks were held back."""
    widths = [(row["time_hi_us"] - row["time_lo_us"]) / 2 / row["time_us"]
              for row in ok if "time_lo_us" in row]  # fmt: skip
    if len(widths) < _MIN_ROWS:
        yield "noisy", f"{len(widths)} times have an interval, which is too few to tell more"
        return
    half = float(np.median(widths))
    yield _HALF_WIDTH.verdict(half), f"half of the intervals are wider than ±{half:.0%}"
    converged = sum(row["converged"] for row in ok) / len(ok)
    if converged < _FEW_CONVERGED:
        yield "noisy", f"{converged:.0%} of the times are certain within ±1 %"
    throttled = sum(not RETRY.isdisjoint(row["throttled"].split(";")) for row in ok) / len(ok)
    yield _THROTTLED.verdict(throttled), f"the clock was held back in {throttled:.0%} of the cases"


def _of_ticks(events: Sequence[Event], planned: Sequence[PlanEntry]) -> Iterator[Finding]:
    """Whether a CPU's batches last whole ticks of the scheduler: launches waited for their turn.

    Sustained batches are left out, since they are made to last 60 ms, and a GPU's have a clock of
    their own.
    """
    bursts = {entry.case.id for entry in planned if entry.case.mode == "burst"}
    batches: dict[str, list[float]] = defaultdict(list)
    for event in timed(events):
        if event["case"] in bursts and event.get("gpu") is None and "n" in event:
            batches[event["case"]].append(event["s"] * event["n"])
    # Whole ticks of 16 ms are whole ticks of 4 ms, too: of equal counts the longest tick is meant.
    count, tick = max((_cases_at_ticks(batches.values(), tick), tick) for tick in _TICKS)
    share = count / max(1, len(batches))
    yield (
        _AT_TICKS.verdict(share),
        (
            f"the batches of {share:.0%} of the cases last whole ticks of {tick * 1e3:.3g} ms: "
            "launches waited for the scheduler, as on a busy machine"
        ),
    )


def _cases_at_ticks(batches: Iterable[Sequence[float]], tick: float) -> int:
    """How many cases have batches that last whole ticks, mostly; 0 if so many do by chance."""
    near = []
    for seconds in batches:
        phase = np.array([s for s in seconds if tick / 2 < s < _MAX_TICKS * tick]) / tick
        if 2 * len(phase) >= len(seconds):
            near.append(float(np.mean(np.abs(phase - np.round(phase)) < _NEAR_TICK)))
    count = sum(share >= 0.4 for share in near)
    # Of cases that know nothing of it, so many are near by chance, and five standard errors more.
    chance = 2 * _NEAR_TICK * len(near)
    return count if count >= max(_MIN_AT_TICK, chance + 5 * math.sqrt(chance)) else 0


def _of_ceilings(
    record: Mapping[str, Any], machine: Machine, ok: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Whether ceilings that were measured, not looked up, were measured too low."""
    shares = [
        share_of_ceiling(Case.from_columns(row), row["time_us"] * 1e-6, machine)
        for row in ok if not is_from_datasheet(machine)
    ]  # fmt: skip
    above = [share for share in shares if share > MEASURED_SLACK]
    if above:
        yield (
            "noisy",
            (
                f"{len(above)} cases ran above the machine's ceiling, up to {max(above):.2f} of "
                "it: it was measured or derived too low"
            ),
        )
    earlier = record.get("earlier_ceilings")
    if earlier:
        now = {**machine.peaks, "bytes": machine.bandwidth}
        then = {**earlier["peaks"], "bytes": earlier["bandwidth"]}
        ratio = max((max(now[k] / then[k], then[k] / now[k]) for k in now.keys() & then.keys()),
                    default=1.0)  # fmt: skip
        if ratio > 1 + _CEILINGS_APART:
            yield "noisy", f"the ceilings differ from the run before by up to {ratio - 1:.0%}"


def _of_host(events: Sequence[Event], machine: Machine | None) -> Iterator[Finding]:
    """What others took of a CPU's cores, or of the GPU, meanwhile.

    Beside a GPU the cores are idle or compile, for this run or for another GPU's.
    """
    looks = [event for event in events if event["event"] == "host"]
    seconds = sum(look["seconds"] for look in looks)
    if seconds and (machine is None or machine.kind == "cpu"):
        for name, limits, whom in (
            ("steal", _STEAL, "other virtual machines"),
            ("others", _OTHERS, "other processes"),
        ):
            share = sum(look.get(name, 0.0) * look["seconds"] for look in looks) / seconds
            yield limits.verdict(share), f"{whom} had {share:.0%} of the cores' time"
    others = max((look.get("gpu_processes", 0) for look in looks), default=0)
    if others:
        yield "noisy", f"{others} other processes used the GPU"


def _of_merged(record: Mapping[str, Any]) -> Iterator[Finding]:
    """What the recordings that this one was merged of were found to be, each by itself: one that
    was disturbed may hide among quiet ones.
    """
    parts = record.get("merged", ())
    for verdict in VERDICTS[1:]:
        of = [part["worker"] for part in parts if (part["health"] or {}).get("verdict") == verdict]
        if of:
            yield verdict, f"what it was merged of was {verdict} by itself: {', '.join(of)}"
