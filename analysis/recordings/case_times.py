"""Times of named cases in one process, from our recordings or from other programs' results.

If individual samples are known, the logarithm of a case's time is the 20% trimmed mean of the
samples' logarithms. The trimmed mean ignores a few disturbed samples. For normally distributed
noise, the trimmed mean has a smaller error than the median. The standard error of the trimmed mean
is computed from the winsorised variance (Tukey and McLaughlin).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kernels.operation import Workload
from sweeps.timing.statistics import Z95

_TRIMMED = 0.2  # share of the samples that is left out at each end


@dataclass(frozen=True)
class CaseTimes:
    """Typical time of a case in one process, with its standard error.

    Attributes:
        log: logarithm of the case's typical time in seconds.
        error: standard error of ``log`` within the process; 0 if no scatter is known.
        freedom: degrees of freedom of ``error``; infinite if no scatter is known.
        count: number of samples; 1 if this number is unknown.
        samples: the samples in seconds; empty if only a summary is known.
    """

    log: float
    error: float = 0.0
    freedom: float = math.inf
    count: int = 1
    samples: tuple[float, ...] = field(default=(), repr=False)
    problem: Workload | None = None

    @classmethod
    def from_samples(cls, samples: Sequence[float], problem: Workload | None = None) -> CaseTimes:
        """Summarise one or more samples, which are positive times in seconds."""
        log, error, freedom = trimmed_mean(np.log(np.asarray(samples, dtype=float)))
        return cls(log, error, freedom, len(samples), tuple(samples), problem)

    @classmethod
    def from_summary(
        cls, seconds: float, deviation: float, count: int, problem: Workload | None = None
    ) -> CaseTimes:
        """Summarise ``count`` samples, given their mean and their standard deviation in seconds.

        ``deviation`` is 0 or NaN if it is unknown. ``count`` is 1 if the number of samples is
        unknown.
        """
        if count < 2 or not deviation > 0:  # the deviation may be NaN
            return cls(math.log(seconds), count=count, problem=problem)
        # A small error of a logarithm is nearly equal to the relative error of the mean.
        error = deviation / seconds / math.sqrt(count)
        return cls(math.log(seconds), error, count - 1, count, problem=problem)

    @classmethod
    def from_interval(
        cls, seconds: float, lo: float, hi: float, count: int, problem: Workload | None = None
    ) -> CaseTimes:
        """Summarise samples, given their median and its 95% interval in seconds.

        The interval is unknown if an end is NaN. ``count`` is 1 if the number of samples is
        unknown.
        """
        if math.isnan(lo + hi):
            return cls(math.log(seconds), count=count, problem=problem)
        # Half of the interval is Z95 standard errors wide.
        error = math.log(hi / lo) / 2 / Z95
        return cls(math.log(seconds), error, max(1, count - 1), count, problem=problem)


@dataclass(frozen=True)
class TimedProcess:
    """Cases that one process timed.

    Attributes:
        name: path of the file or folder that the times come from.
        cases: time of each case, by the case's name.
        lost: reason why a case has no time, by the case's name.
        facts: recorded facts about the process, by the fact's name, such as ``machine``.
    """

    name: str
    cases: Mapping[str, CaseTimes]
    lost: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


def trimmed_mean(values: np.ndarray) -> tuple[float, float, float]:
    """Return the values' 20% trimmed mean, its standard error, and the error's degrees of freedom.

    If the values left after trimming show no scatter, the error is 0 and the degrees of freedom are
    infinite.
    """
    # 1. Leave out the smallest and the largest values, and average the others.
    ordered = np.sort(values)
    count = len(ordered)
    cut = int(_TRIMMED * count)
    kept = count - 2 * cut
    mean = float(ordered[cut : count - cut].mean())
    # 2. Winsorise: replace each value that was left out by the nearest value that was kept.
    winsorised = np.clip(ordered, ordered[cut], ordered[count - cut - 1])
    # The values are compared with each other, because rounding may make the mean of equal values
    # differ from them.
    if kept < 2 or winsorised[0] == winsorised[-1]:
        return mean, 0.0, math.inf
    squares = float(((winsorised - winsorised.mean()) ** 2).sum())
    # 3. Compute the standard error of Tukey and McLaughlin from the winsorised squares.
    return mean, math.sqrt(squares / kept / (kept - 1)), kept - 1
