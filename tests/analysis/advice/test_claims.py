"""Check claims on simulated machines, whose true gains are known: are the shown claims true?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from analysis.advice.claims import ExpectedRatio, MeasuredRatio, expect, from_processes
from analysis.advice.verdict import CONFIRMED, DO_IT, Gain, verdict
from sweeps.folding.history import BLOCKS, PROCESSES
from sweeps.timing.statistics import CHECKPOINTS
from tests.support.tiers import quick_and_long

NOISE = 0.03  # standard deviation of one log sample
BETWEEN = 0.005  # standard deviation of a case's log time between processes
QUESTIONS, CANDIDATES, REPEATED = 40, 3, 24

Gains = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]

GAINS: dict[str, Gains] = {
    "small gains and losses": lambda rng, shape: rng.normal(0.0, 0.02, shape),
    "gains and losses of 5 %": lambda rng, shape: rng.normal(0.0, 0.05, shape),
    "most of no effect, some of 10 %": lambda rng, shape: np.where(
        rng.random(shape) < 0.7, rng.normal(0.0, 0.003, shape), rng.exponential(0.1, shape)
    ),
    "most slower": lambda rng, shape: rng.normal(-0.03, 0.04, shape),
}


@dataclass
class Shown:
    """Claims that were shown: whether each holds, the claimed gain and the true gain."""

    holds: list[bool] = field(default_factory=list)
    claimed: list[float] = field(default_factory=list)
    gained: list[float] = field(default_factory=list)

    def add(self, truth: float, ratio: float, lo: float, hi: float) -> None:
        gain = Gain(ratio - 1, lo - 1, hi - 1)
        if verdict(gain, CONFIRMED, 0.0) == DO_IT:
            self.holds.append(lo <= math.exp(truth) <= hi)
            self.claimed.append(gain.value)
            self.gained.append(math.expm1(truth))

    @property
    def excess(self) -> tuple[float, float]:
        """Mean claimed gain minus mean true gain, and the standard error of the difference."""
        apart = np.subtract(self.claimed, self.gained)
        return float(apart.mean()), float(apart.std(ddof=1) / math.sqrt(len(apart)))

    def __str__(self) -> str:
        return (
            f"{len(self.holds):6} shown, {np.mean(self.holds):6.1%} hold, "
            f"claimed {np.mean(self.claimed):6.2%}, gained {np.mean(self.gained):6.2%}"
        )


def estimated_between(rng: np.random.Generator) -> float:
    """Estimate the deviation between processes as a run does, from cases that it re-times."""
    samples = CHECKPOINTS[1]
    own = math.pi / 2 * NOISE**2 / samples
    first, second = rng.normal(0.0, math.hypot(math.sqrt(own), BETWEEN), (2, REPEATED))
    return math.sqrt(max(0.0, float(np.var(second - first, ddof=1)) / 2 - own) or 1e-8)


def on_machines(count: int, gains: Gains) -> tuple[Shown, Shown, Shown]:
    """Return the claims that are shown if gains are judged in three ways.

    The claims rest on fresh samples with the correction, on fresh samples without it, and on the
    samples by which the best candidate was chosen.
    """
    corrected, fresh, chosen_by = Shown(), Shown(), Shown()
    for seed in range(count):
        rng = np.random.default_rng(seed)
        truth = gains(rng, (QUESTIONS, CANDIDATES))
        # An error that all cases of a process share cancels in a ratio, so only the error of each
        # case is simulated.
        process = rng.normal(0.0, BETWEEN, (QUESTIONS, CANDIDATES + 1))
        error = math.sqrt(math.pi / 2) * NOISE / math.sqrt(CHECKPOINTS[1])
        explored = (
            truth + process[:, 1:] - process[:, :1]
            + rng.normal(0.0, error, (QUESTIONS, CANDIDATES))
            + rng.normal(0.0, error, (QUESTIONS, 1))
        )  # fmt: skip
        between = estimated_between(rng)
        taken, truths = [], []
        for q, best in enumerate(explored.argmax(axis=1)):
            if explored[q, best] < math.log(1.01):
                continue
            alone = math.hypot(math.sqrt(2) * error, math.sqrt(2) * between)
            ends = (math.exp(explored[q, best] + s * 1.96 * alone) for s in (-1, 1))
            chosen_by.add(truth[q, best], math.exp(explored[q, best]), *ends)
            samples = rng.normal(0.0, NOISE, (PROCESSES, BLOCKS, 4))
            blocks = (samples[:, :, 0] + samples[:, :, 3] - samples[:, :, 1] - samples[:, :, 2]) / 2
            terms = rng.normal(0.0, BETWEEN, (PROCESSES, 2))
            blocks += (truth[q, best] + terms[:, 1] - terms[:, 0])[:, None]
            taken.append(blocks.tolist())
            truths.append(truth[q, best])
        measured = from_processes(taken, [between] * len(taken), [REPEATED] * len(taken))
        for real, one, expected in zip(truths, measured, expect(measured), strict=True):
            corrected.add(real, expected.ratio, expected.lo, expected.hi)
            ends = (math.exp(one.log_ratio + s * 1.96 * one.error) for s in (-1, 1))
            fresh.add(real, math.exp(one.log_ratio), *ends)
    return corrected, fresh, chosen_by


@pytest.mark.parametrize("machines", quick_and_long([60, 1000]))
@pytest.mark.parametrize("kind", GAINS)
def test_claims_that_are_shown_hold_as_often_as_they_say(kind: str, machines: int) -> None:
    """The output for 1,000 machines is recorded in results/accuracy/claims.txt."""
    long = machines == 1000
    corrected, fresh, chosen_by = on_machines(machines, GAINS[kind])
    print(f"\n{kind}")
    for what, shown in (("corrected", corrected), ("fresh samples alone", fresh),
                        ("those of the choice", chosen_by)):  # fmt: skip
        print(f"  {what:20} {shown}")
    # The short run may differ from the limits of the long run by four standard errors.
    chance = 0 if long else 4 * math.sqrt(0.05 * 0.95 / max(1, len(corrected.holds)))
    assert 0.93 - chance <= np.mean(corrected.holds) <= 0.97 + chance
    apart, error = corrected.excess
    assert abs(apart) <= max(4 * error, 0.002)
    assert np.mean(fresh.holds) < np.mean(corrected.holds)
    assert np.mean(chosen_by.holds) < np.mean(corrected.holds)
    assert chosen_by.excess[0] > 3 * chosen_by.excess[1]  # the winner's curse


def test_a_gain_much_larger_than_its_error_is_claimed_as_measured() -> None:
    (one,) = expect([MeasuredRatio(math.log(1.5), 0.01, 20.0)])
    assert one.ratio == pytest.approx(1.5, rel=0.005)
    assert one.lo == pytest.approx(1.5 * math.exp(-0.0209), rel=0.005)
    assert one.hi == pytest.approx(1.5 * math.exp(0.0209), rel=0.005)


@pytest.mark.parametrize("ratio", [0.5, 0.97, 1.1, 1.5, 9.8, 40.0])
@pytest.mark.parametrize("error", [3e-4, 1e-3, 0.01])
def test_a_claim_lies_in_the_middle_of_its_interval(ratio: float, error: float) -> None:
    """On a GPU, gains of 700% were once claimed at or above the upper ends of their intervals."""
    (one,) = expect([MeasuredRatio(math.log(ratio), error, 10.0)])
    width = 2 * 2.228 * error * ratio  # of the 95% interval of a t distribution
    assert one.ratio == pytest.approx((one.lo + one.hi) / 2, abs=0.1 * width)
    assert one.hi - one.lo == pytest.approx(width, rel=0.1)


def test_a_gain_within_its_error_shrinks_towards_none() -> None:
    (one,) = expect([MeasuredRatio(math.log(1.02), 0.02, 20.0)])
    assert 1.0 < one.ratio < 1.015
    assert one.lo < 1.0


def test_among_many_of_no_effect_the_largest_is_not_believed() -> None:
    rng = np.random.default_rng(0)
    noise = [MeasuredRatio(float(x), 0.01, 20.0) for x in rng.normal(0.0, 0.01, 200)]
    largest = MeasuredRatio(0.03, 0.01, 20.0)
    alone, among = expect([largest])[0], expect([*noise, largest])[-1]
    assert isinstance(among, ExpectedRatio)
    assert among.ratio < alone.ratio
    assert among.lo < 1.01 < alone.ratio


def test_nothing_measured_expects_nothing() -> None:
    assert expect([]) == []


def test_one_wild_block_does_not_move_a_ratio() -> None:
    calm = [[0.05 + 0.001 * i for i in range(BLOCKS)]] * PROCESSES
    (one,) = from_processes([calm], [0.0], [4])
    (wild,) = from_processes([[[*calm[0][:-1], 3.0], *calm[1:]]], [0.0], [4])
    assert wild.log_ratio == pytest.approx(one.log_ratio, abs=0.002)
    assert wild.error < 0.01


def test_what_processes_differ_by_is_part_of_the_error() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.normal(0.05, 0.01, (50, PROCESSES, BLOCKS))
    moved = blocks + rng.normal(0.0, 0.05, (50, PROCESSES, 1))
    alike, apart = (from_processes(of.tolist(), [0.0] * 50, [4] * 50) for of in (blocks, moved))
    assert alike[0].error < 0.01
    expected = 0.05 / math.sqrt(PROCESSES)
    assert np.mean([one.error for one in apart]) == pytest.approx(expected, rel=0.35)
    # The error of a single pair comes mostly from the deviation that its run measured.
    (known,) = from_processes(blocks[:1].tolist(), [0.05], [24])
    assert known.error > 0.02
