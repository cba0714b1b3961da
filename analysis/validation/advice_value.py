"""Measure what following the advice is worth on held-out rows of a table.

*Choose* takes random neighbourhoods: all measured shapes within ±15% of one of them in every
dimension. It measures how far the recommended shape's speed is from the best in hindsight.

*Pad* takes shapes with a measured neighbour that contains them. It measures how much following the
advice gains, how often it costs time, and what share is changed of the shapes that could gain.

Rooftile's rule changes a shape if that is likely to pay. It is compared with four others: the best
guess, which changes a shape whenever a gain of at least ``MIN_GAIN`` is predicted; the original
shape; the biggest shape; and the best one in hindsight.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.advice.measurements import Measurements
from analysis.advice.options import Question
from analysis.advice.recommend import best_choice, weigh
from analysis.advice.sizes import SizeIndex
from analysis.advice.verdict import MIN_GAIN
from analysis.imports.public import PublicRows
from analysis.model.query import group_of
from analysis.validation.holdout import Validation
from kernels.common.errors import UserError
from kernels.timemodel.estimate import Array

_MIN_FLOPS = 1e9
_REACH = 0.15
_MIN_MEMBERS = 4
_OPPORTUNITY = 0.05  # gain of the best padding from which on a shape counts as one that could gain
DRAWS = 4000
"""Number of neighbourhoods, and of paddings. The mean gain of a few hundred depends mostly on the
draw."""


@dataclass(frozen=True)
class Padding:
    """Worth of one way to pad; gains are fractions.

    Attributes:
        moved: number of shapes that were padded.
        gain: mean gain over all shapes, padded or not.
        loss_p95: 95th percentile of the loss.
        found: among the shapes that could gain 5%, the share that was padded.
    """

    moved: int
    gain: float
    loss_p95: float
    found: float


@dataclass(frozen=True)
class AdviceValue:
    """Worth of the advice as means over draws; gains and regrets are fractions.

    Attributes:
        neighbourhoods: number of neighbourhoods.
        regret: mean regret of each way to choose.
        pads: number of shapes to pad.
        padding: worth of each way to pad.
        hindsight: mean gain of the best padding there is.
        overclaimed: share of the advised changes, to pad or to choose, that gained less than the
            lower end of the claimed gain.
    """

    neighbourhoods: int
    regret: dict[str, float]
    pads: int
    padding: dict[str, Padding]
    hindsight: float
    overclaimed: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the value as a document for JSON."""
        return asdict(self)


class _Claim(NamedTuple):
    """Lower end of the gain that advice claims for a change, and the gain in the table."""

    low: float
    gain: float


def judge_advice(validation: Validation, draws: int = DRAWS) -> AdviceValue:
    """Judge the advice on a validation's held-out rows above 1e9 FLOP.

    Args:
        validation: the held-out rows; its seed draws the neighbourhoods.
        draws: number of draws of each kind.

    Raises:
        UserError: if no row has enough neighbours.
    """
    # Draw shapes with enough neighbours to choose from, and shapes with a padding.
    rows = _HeldOutRows(validation)
    rng = np.random.default_rng(validation.seed)
    shuffled = [int(i) for i in rng.permutation(len(rows.flops))]
    with_neighbours = (i for i in shuffled if len(rows.near(i, -_REACH)) >= _MIN_MEMBERS)
    with_padding = (i for i in shuffled if len(rows.near(i, 0.0)) > 1)
    centres = list(itertools.islice(with_neighbours, draws))
    small_shapes = list(itertools.islice(with_padding, draws))
    if not centres or not small_shapes:
        raise UserError(
            f"{validation.source.name} has too few neighbouring shapes to judge advice."
        )
    regret, choose_claims = _judge_choosing(rows, centres)
    padding, hindsight, pad_claims = _judge_padding(rows, small_shapes)
    overclaimed = [claim.gain < claim.low for claim in (*choose_claims, *pad_claims)]
    return AdviceValue(
        neighbourhoods=len(centres),
        regret=regret,
        pads=len(small_shapes),
        padding=padding,
        hindsight=hindsight,
        overclaimed=float(np.mean(overclaimed)) if overclaimed else None,
    )


def _judge_choosing(
    rows: _HeldOutRows, centres: Sequence[int]
) -> tuple[dict[str, float], list[_Claim]]:
    """Compare the speed of each pick with the best speed in its neighbourhood.

    Returns:
        The mean regret of each way to choose, and the claims for the advised changes.
    """
    speeds = rows.flops / rows.seconds
    predicted_speeds = rows.flops / rows.predicted
    regrets: dict[str, list[float]] = {}
    claims = []
    for i in centres:
        members = rows.near(i, -_REACH)
        advised, low = rows.decide(i, members, "choose")
        picks = {
            "advice": advised,
            "best_guess": max(members, key=lambda j: predicted_speeds[j]),
            "biggest": max(members, key=lambda j: rows.flops[j]),
            "as_asked": i,
        }
        for name, pick in picks.items():
            regrets.setdefault(name, []).append(1 - speeds[pick] / speeds[members].max())
        if advised != i:
            claims.append(_Claim(low, speeds[advised] / speeds[i] - 1))
    return {name: float(np.mean(values)) for name, values in regrets.items()}, claims


def _judge_padding(
    rows: _HeldOutRows, small_shapes: Sequence[int]
) -> tuple[dict[str, Padding], float, list[_Claim]]:
    """Compare the time of each padding with that of the original shape.

    Returns:
        The worth of each way to pad, the mean gain of the best padding in hindsight, and the claims
        for the advised changes.
    """
    best_gains = []
    picks: dict[str, list[int]] = {"advice": [], "best_guess": []}
    claims = []
    for i in small_shapes:
        members = rows.near(i, 0.0)
        advised, low = rows.decide(i, members, "pad")
        guess = min(members, key=lambda j: rows.predicted[j])
        is_worthwhile = rows.predicted[i] / rows.predicted[guess] - 1 >= MIN_GAIN
        picks["advice"].append(advised)
        picks["best_guess"].append(guess if is_worthwhile else i)
        best_gains.append(rows.seconds[i] / rows.seconds[members].min() - 1)
        if advised != i:
            claims.append(_Claim(low, rows.seconds[i] / rows.seconds[advised] - 1))
    padding = {
        name: _padding_value(rows.seconds, small_shapes, picked, best_gains)
        for name, picked in picks.items()
    }
    return padding, float(np.mean(best_gains)), claims


def _padding_value(
    seconds: Array, originals: Sequence[int], picked: Sequence[int], best_gains: Sequence[float]
) -> Padding:
    """Summarise one way to pad.

    Args:
        seconds: seconds of every row.
        originals: rows of the original shapes.
        picked: the row that replaces each of them, which may be itself.
        best_gains: gain of the best padding of each of them, in hindsight.
    """
    is_moved = np.not_equal(originals, picked)
    gain = seconds[originals] / seconds[picked] - 1
    could_gain = np.array(best_gains) >= _OPPORTUNITY
    return Padding(
        moved=int(is_moved.sum()),
        gain=float(gain.mean()),
        loss_p95=float(np.quantile(-gain, 0.95)),
        found=float(is_moved[could_gain].mean()) if could_gain.any() else 0.0,
    )


@dataclass(frozen=True)
class MeasuredValue:
    """Worth of measuring the model's best guesses together with the original shape, as fractions.

    Attributes:
        choose_regret: mean regret of the shape that is fastest in those measurements.
        pad_gain: mean gain over all shapes of the best padding in those measurements.
        pad_loss_p95: 95th percentile of the loss.
    """

    choose_regret: float
    pad_gain: float
    pad_loss_p95: float


def judge_measured(
    validation: Validation, again: PublicRows, counts: Sequence[int], draws: int = DRAWS
) -> dict[int, MeasuredValue]:
    """Judge advice for which the best guesses are measured first, in a second table of the grid.

    The second table stands for the measurement, and the validation's own table for the truth, so
    that a choice does not profit from the noise that it is based on. A shape is kept unless another
    one is measured to be better by at least :data:`MIN_GAIN`.

    Args:
        validation: the held-out rows, their predictions, and the seed of the draws.
        again: the same problems, measured a second time.
        counts: numbers of best guesses to measure.
        draws: number of shapes to choose for, and to pad.

    Returns:
        The worth for each count.

    Raises:
        UserError: if no row has enough neighbours that were measured twice.
    """
    # 1. Shuffle the rows that were measured twice.
    rows = _HeldOutRows(validation)
    measured = rows.times_in(again)
    shuffled = np.random.default_rng(validation.seed).permutation(len(rows.flops))
    measured_twice = [int(i) for i in shuffled if np.isfinite(measured[i])]
    regrets: dict[int, list[float]] = {count: [] for count in counts}
    gains: dict[int, list[float]] = {count: [] for count in counts}
    # 2. For each kind of query, draw shapes with enough neighbours that were measured twice.
    for question, less, fewest in (("choose", -_REACH, _MIN_MEMBERS), ("pad", 0.0, 2)):
        neighbourhoods = (
            (i, [j for j in rows.near(i, less) if np.isfinite(measured[j])]) for i in measured_twice
        )
        large_enough = ((i, members) for i, members in neighbourhoods if len(members) >= fewest)
        drawn = list(itertools.islice(large_enough, draws))
        if not drawn:
            raise UserError(f"{again.name} has too few of the same shapes to judge advice.")
        # 3. Measure the best guesses, and compare the fastest one with the truth. To choose, shapes
        # are compared by FLOPs per second; to pad, only by their times.
        work = rows.flops if question == "choose" else np.ones(len(rows.flops))
        speeds = work / rows.seconds
        for i, members in drawn:
            others = [j for j in members if j != i]
            guesses = sorted(others, key=lambda j: rows.predicted[j] / work[j])
            for count in counts:
                pick = _best_measured(i, guesses[:count], work / measured)
                if question == "choose":
                    regrets[count].append(1 - speeds[pick] / speeds[members].max())
                else:
                    gains[count].append(speeds[pick] / speeds[i] - 1)
    return {
        count: MeasuredValue(
            choose_regret=float(np.mean(regrets[count])),
            pad_gain=float(np.mean(gains[count])),
            pad_loss_p95=float(np.quantile(-np.array(gains[count]), 0.95)),
        )
        for count in counts
    }


def _best_measured(original: int, candidates: Sequence[int], speed: Array) -> int:
    """Return the candidate measured as fastest; the original shape if the gain is too small."""
    best = max((original, *candidates), key=lambda j: float(speed[j]))
    return best if speed[best] / speed[original] - 1 >= MIN_GAIN else original


class _HeldOutRows:
    """Held-out rows of more than 1e9 FLOP, as arrays with one element per row.

    ``flops`` are those of the rows' problems, ``seconds`` their measured and ``predicted`` their
    predicted seconds.
    """

    def __init__(self, validation: Validation) -> None:
        """Keep the large rows of a validation."""
        flops = np.array([float(problem.flops) for problem in validation.tested.problems])
        keep = [int(i) for i in np.flatnonzero(flops > _MIN_FLOPS)]
        self._problems = [validation.tested.problems[i] for i in keep]
        self._model = validation.model
        self._names = [validation.tested.implementations[i] for i in keep]
        self._frame = validation.prediction.frame().iloc[keep].reset_index(drop=True)
        self.flops = flops[keep]
        self.seconds = validation.tested.seconds[keep]
        self.predicted = self._frame["time_us"].to_numpy() * 1e-6
        self._index = SizeIndex(self._problems)

    def times_in(self, source: PublicRows) -> Array:
        """Return the seconds of each row's problem in another table; NaN where it has none."""
        seconds_by_problem = dict(zip(source.problems, source.seconds, strict=True))
        return np.array([seconds_by_problem.get(problem, np.nan) for problem in self._problems])

    def near(self, i: int, less: float) -> list[int]:
        """Return the rows that differ from row i only in size, by ``less`` (a fraction) to 15%.

        Row i is one of them.
        """
        return [int(j) for j in self._index.near(self._problems[i], less, _REACH)]

    def decide(self, i: int, members: Sequence[int], question: str) -> tuple[int, float]:
        """Return the row that the advice takes instead of row i, and the lower end of its gain.

        Args:
            i: the row to advise about; the advice may be to keep it.
            members: the rows to choose from, which may include row i.
            question: ``pad`` or ``choose``.
        """
        order = [i, *(j for j in members if j != i)]  # the original shape is the first option
        problem = self._problems[i]
        choices = weigh(
            problem,
            [self._problems[j] for j in order],
            self._frame.iloc[order],
            self._model.fit(group_of(self._names[i], problem)),
            Measurements({}),
            Question(question, _REACH),
        )
        best = best_choice(choices)
        return order[best], choices[best].gain.lo
