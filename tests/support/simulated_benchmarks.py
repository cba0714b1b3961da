"""Benchmarks whose truth is known: processes that time cases with noise, drift and effects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.recordings.case_times import CaseTimes, TimedProcess


@dataclass(frozen=True)
class BenchmarkSetting:
    """What simulated benchmarks are like; scatters are standard deviations of logarithms."""

    cases: int = 100
    rounds: int = 20
    noise: tuple[float, float] = (0.01, 0.1)  # the range that cases have, evenly in the logarithm
    heavy: bool = False  # noise of a t distribution with three degrees of freedom
    drift: float = 0.0  # of a random walk of the machine's speed over the rounds of a process
    shift: float = 0.02  # by which the machine's speed differs between processes
    process: float = 0.01  # by which a case's own speed differs between processes, typically
    uneven: float = 0.0  # of the logarithm of that scatter over the cases
    processes: int = 1  # of each version


class SimulatedBenchmark:
    """A set of cases that can be run again and again."""

    def __init__(self, setting: BenchmarkSetting, rng: np.random.Generator) -> None:
        """Draw the true times and scatters of the cases."""
        self._setting, self._rng = setting, rng
        self._truth = rng.uniform(math.log(1e-5), math.log(1e-2), setting.cases)
        least, most = setting.noise
        self._noise = np.exp(rng.uniform(math.log(least), math.log(most), setting.cases))
        spread = np.exp(setting.uneven * rng.standard_normal(setting.cases) - setting.uneven**2)
        self._process = setting.process * spread

    def run(self, changes: Mapping[int, float] | None = None) -> list[TimedProcess]:
        """Run a version; ``changes`` are the log slowdowns of cases by their number."""
        return [self._one(changes or {}) for _ in range(self._setting.processes)]

    def _one(self, changes: Mapping[int, float]) -> TimedProcess:
        s, rng = self._setting, self._rng
        shape = s.cases, s.rounds
        level = self._truth + s.shift * rng.standard_normal()
        level = level + self._process * rng.standard_normal(s.cases)
        for case, change in changes.items():
            level[case] += change
        walk = s.drift * np.cumsum(rng.standard_normal(s.rounds)) / math.sqrt(s.rounds)
        scatter = rng.standard_t(3, shape) / math.sqrt(3) if s.heavy else rng.standard_normal(shape)
        logs = level[:, None] + walk + self._noise[:, None] * scatter
        times = {name_of(i): CaseTimes.from_samples(row) for i, row in enumerate(np.exp(logs))}
        return TimedProcess("simulated", times)


def name_of(case: int) -> str:
    """The name of a case, by its number."""
    return f"case {case}"


def slowed(processes: Sequence[TimedProcess], changes: Mapping[int, float]) -> list[TimedProcess]:
    """The same samples with cases slower by log changes."""
    by_name = {name_of(case): change for case, change in changes.items()}
    return [
        replace(
            process,
            cases={
                name: replace(times, log=times.log + by_name.get(name, 0.0), samples=())
                for name, times in process.cases.items()
            },
        )
        for process in processes
    ]
