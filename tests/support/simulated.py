"""Machines that are made up: what their noise is, and a run on one through the real loop.

A machine is a factor on every launch: one that depends on the moment alone, times one of the sample
alone. The first is what a case's few samples may not show.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.problem import Gemm
from sweeps.cases.case import Case
from sweeps.folding.history import CANARY, History
from sweeps.measuring import bench as bench_module
from sweeps.measuring.bench import OnStart, Ready, Refusal
from sweeps.measuring.rounds import Rounds
from sweeps.planning.plan import PlanEntry
from sweeps.store import Event
from sweeps.timing.sampler import Sampler, Subject
from tests.support.fakes import FakeClock

RUN_SECONDS = 120.0

Course = Callable[[float], float]
"""The factor on all times at a moment of the run."""

Noise = Callable[[random.Random], float]
"""The factor on one sample."""


@dataclass(frozen=True)
class SimulatedMachine:
    """Noise of its samples, its course, and what the host's clock does to a batch of seconds."""

    noise: Noise
    course: Callable[[int], Course] = lambda seed: lambda moment: 1.0
    batch: Callable[[float, random.Random], float] = lambda seconds, rng: seconds
    slow: bool = False  # whether its samples depend on one another
    sensitivity: bool = False  # whether its cases feel the course to a different degree


def log_normal(spread: float) -> Noise:
    return lambda rng: rng.lognormvariate(0.0, spread)


def exponential(scale: float) -> Noise:
    return lambda rng: 1 + rng.expovariate(1 / scale)


def two_speeds(share: float, slower: float, spread: float = 0.002) -> Noise:
    return lambda rng: (1 + slower * (rng.random() >= share)) * rng.lognormvariate(0.0, spread)


def spikes(share: float, height: float) -> Noise:
    """Now and then another process takes the core."""
    return lambda rng: (
        (1 + height * rng.random() * (rng.random() < share)) * rng.lognormvariate(0.0, 0.003)
    )


def pareto(scale: float) -> Noise:
    return lambda rng: 1 + scale * (rng.paretovariate(2.0) - 1)


def uniform(width: float) -> Noise:
    return lambda rng: 1 + width * rng.random()


def alternating(dwell: float, slower: float = 0.10) -> Callable[[int], Course]:
    """Two speeds, each lasting ``dwell`` seconds; the first begins at a moment of chance."""

    def begin(seed: int) -> Course:
        phase = random.Random(seed).uniform(0, 2 * dwell)
        return lambda moment: 1 + slower * ((moment + phase) % (2 * dwell) >= dwell)

    return begin


def drift(by: float, shape: Callable[[float], float] = lambda x: x) -> Callable[[int], Course]:
    return lambda seed: lambda moment: 1 + by * shape(min(1.0, moment / RUN_SECONDS))


def neighbour(on: float, off: float, slower: float) -> Callable[[int], Course]:
    """Comes for ``on`` seconds and is gone for ``off``, on average; exponential times."""

    def begin(seed: int) -> Course:
        rng, moments, moment = random.Random(seed), [0.0], 0.0
        while moment < 2 * RUN_SECONDS:
            moment += rng.expovariate(1 / (off if len(moments) % 2 else on))
            moments.append(moment)
        edges = np.array(moments)
        return lambda at: 1 + slower * (int(np.searchsorted(edges, at, "right")) % 2 == 0)

    return begin


def ticking(tick: float, share: float) -> Callable[[float, random.Random], float]:
    """Of ``share`` of the batches, the second thread waits until the scheduler's next tick."""
    return lambda seconds, rng: (
        math.ceil(seconds / tick) * tick if rng.random() < share else seconds
    )


MACHINES: dict[str, SimulatedMachine] = {
    **{f"log-normal {s:.1%}": SimulatedMachine(log_normal(s))
       for s in (0.001, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05)},
    **{f"exponential {s:.1%}": SimulatedMachine(exponential(s)) for s in (0.005, 0.01, 0.03)},
    "two speeds at once, 70 and 30 %": SimulatedMachine(two_speeds(0.7, 0.04)),
    "two speeds at once, half and half": SimulatedMachine(two_speeds(0.5, 0.03)),
    "two speeds at once, 90 and 10 %": SimulatedMachine(two_speeds(0.9, 0.20)),
    "spikes 5 %": SimulatedMachine(spikes(0.05, 1.0)),
    "spikes 20 %": SimulatedMachine(spikes(0.2, 0.5)),
    "pareto 1 %": SimulatedMachine(pareto(0.01)),
    "uniform 3 %": SimulatedMachine(uniform(0.03)),
    **{f"two speeds, {s:g} s each": SimulatedMachine(log_normal(0.003), alternating(s), slow=True)
       for s in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)},
    "two speeds of 3 %, 5 s each": SimulatedMachine(
        log_normal(0.003), alternating(5.0, 0.03), slow=True),
    "drift 2 %": SimulatedMachine(log_normal(0.003), drift(0.02), slow=True),
    "drift 10 %": SimulatedMachine(log_normal(0.003), drift(0.10), slow=True),
    "warming up 5 %": SimulatedMachine(
        log_normal(0.003), drift(-0.05, lambda x: 1 - math.exp(-10 * x)), slow=True),
    "one step of 10 %": SimulatedMachine(
        log_normal(0.003), drift(0.10, lambda x: float(x > 0.6)), slow=True),
    "slow wave of 5 %": SimulatedMachine(
        log_normal(0.003), drift(0.05, lambda x: math.sin(4 * math.pi * x) ** 2), slow=True),
    "ticks of 4 ms, half": SimulatedMachine(
        log_normal(0.003), batch=ticking(0.004, 0.5), slow=True),
    "ticks of 4 ms, all": SimulatedMachine(
        log_normal(0.003), batch=ticking(0.004, 1.0), slow=True),
    "ticks of 16 ms, all": SimulatedMachine(
        log_normal(0.003), batch=ticking(0.016, 1.0), slow=True),
    "neighbour of 1 s in 4": SimulatedMachine(
        log_normal(0.003), neighbour(1.0, 3.0, 0.20), slow=True, sensitivity=True),
    "neighbour of 10 s in 20": SimulatedMachine(
        log_normal(0.003), neighbour(10.0, 10.0, 0.20), slow=True, sensitivity=True),
    "neighbour of 20 s in 80": SimulatedMachine(
        log_normal(0.003), neighbour(20.0, 60.0, 0.20), slow=True, sensitivity=True),
}  # fmt: skip


@dataclass
class SimulatedBench:
    """Cases whose launch takes 1 to 30 ms on a machine that is made up."""

    machine: SimulatedMachine
    seed: int
    gpu: int | None = None
    careful: Collection[str] = frozenset()
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.clock)
        self.rng = random.Random(self.seed)
        self.course = self.machine.course(self.seed)

    def factor(self, one: Case, moment: float) -> float:
        """What the machine's course makes of a case at a moment."""
        felt = random.Random(one.problem.m).random() if self.machine.sensitivity else 1.0  # type: ignore[union-attr]
        return 1 + felt * (self.course(moment) - 1)

    def launch(self, one: Case, index: int) -> float:
        seconds = true_seconds(one) * self.factor(one, self.clock.seconds)
        seconds *= self.machine.noise(self.rng)
        return self.machine.batch(seconds, self.rng)

    def subject(self, one: Case, key: str) -> Subject:
        subject = Subject(key, lambda index: self.launch(one, index))
        subject.launches, subject.cost = 1, true_seconds(one)
        return subject

    def prepare(
        self, cases: Sequence[Case], known: Mapping[str, History], on_start: OnStart
    ) -> Iterator[Ready | Refusal]:
        for one in cases:
            self.clock.pause(0.02)
            yield Ready(one, self.subject(one, one.id))

    def ceilings(self) -> None:
        return None  # as where a datasheet has them

    def canary(self) -> Subject:
        return self.subject(simulated_case(500), CANARY)

    def kernel_columns(
        self, cases: Sequence[Case], on_start: OnStart
    ) -> Iterator[tuple[Case, Mapping[str, Any]]]:
        return iter(())  # nothing here has kernels

    def recover_from(self, error: Exception) -> tuple[str, str]:
        raise error


def simulated_case(m: int) -> Case:
    return Case("simulated", Gemm(m, 64, 64, "fp32"), "mkl")


def true_seconds(one: Case) -> float:
    """1 to 30 ms, by the case's number."""
    return 1e-3 * 30 ** random.Random(-one.problem.m).random()  # type: ignore[union-attr]


def simulate(
    machine: SimulatedMachine, cases: int, seed: int, patch: pytest.MonkeyPatch
) -> tuple[list[PlanEntry], list[Event], SimulatedBench]:
    """A run of :data:`RUN_SECONDS` over so many cases: plan, events and bench."""
    planned = [PlanEntry(simulated_case(m), 0.01) for m in range(1, cases + 1)]
    bench = SimulatedBench(machine, seed)
    events: list[Event] = []
    patch.setattr(bench_module, "time", SimpleNamespace(time=bench.clock.now))
    Rounds(
        planned, {}, bench, "1/1", RUN_SECONDS, 0.0, events.append, lambda ids, s: None, seed=seed
    ).run()
    return planned, events, bench


def true_median(bench: SimulatedBench, one: Case, rng: random.Random, draws: int = 2001) -> float:
    """The median over the run's time, without what ticks add."""
    seconds = [
        bench.factor(one, rng.uniform(0, bench.clock.seconds)) * bench.machine.noise(rng)
        for _ in range(draws)
    ]
    return true_seconds(one) * float(np.median(seconds))
