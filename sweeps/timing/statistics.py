"""The median of few samples, its distribution-free interval, and when to stop.

The interval between the k-th smallest and the k-th largest of n samples covers the median with
probability 1 − 2 P(Binomial(n, ½) < k), whatever the distribution. Looking again after every
sample and stopping at the first narrow interval would lower that, so the rule looks only at the
counts of :data:`CHECKPOINTS`. What is then left of the stated 95 %, simulated with independent
samples: at least 94 % for noise with one hump (log-normal of 0.3 to 5 %, exponential of 1 to 3 %),
90 % in the worst case of noise that jumps between two speeds. Samples that share a disturbance are
worth less than independent ones; shuffled rounds spread them out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import exp, lgamma, log

LEVEL = 0.95
Z95 = 1.959964
"""Standard errors of a normal deviate on either side of it that make its 95 % interval."""
CHECKPOINTS = (6, 8, 11, 16, 23, 30)
"""Sample counts at which a case may be finished; at the last it is finished in any case.

On a CPU whose speed jumps, ending at 23 repeats worse than PyTorch's timer (1.06 of its scatter in
geometric mean over eight runs) and ending at 37 better (0.81), in 0.29 and 0.33 of its time; ending
at 30 took 0.22 and 0.23 of it (tests/recordings/cpu-amd-epyc-2t, sampler.csv and sampler.json)."""
TOLERANCE = 0.01
"""How far from the median, relative to it, either end of a converged case's interval may be."""


@functools.cache
def interval_rank(n: int) -> int:
    """Largest k (from 1) whose order-statistic interval covers at least 95 %; 0 for n < 6.

    Probabilities are exponentials of logarithms: of a table's 71,400 errors, exact binomial
    coefficients would have as many bits each, and their sum would take hours.
    """
    below, k = 0.0, 0
    while True:
        ways = lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
        below += exp(ways - n * log(2))
        if 1 - 2 * below < LEVEL:
            return k
        k += 1


def median(samples: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(samples)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the median; None under six samples, which cannot have one."""
    k = interval_rank(len(samples))
    if k == 0:
        return None
    ordered = sorted(samples)
    return ordered[k - 1], ordered[-k]


def converged(samples: Sequence[float]) -> bool:
    """Whether both ends of the samples' interval are within ±1 % of their median."""
    return is_narrow(median(samples), median_interval(samples))


def is_narrow(middle: float, interval: tuple[float, float] | None) -> bool:
    """Whether there is an interval, both ends of which are within ±1 % of the median."""
    if interval is None:
        return False
    return max(interval[1] - middle, middle - interval[0]) <= TOLERANCE * middle


def finished(samples: Sequence[float]) -> bool:
    """Whether to stop sampling: converged at a checkpoint, or at the last one."""
    n = len(samples)
    return n >= CHECKPOINTS[-1] or (n in CHECKPOINTS and converged(samples))
