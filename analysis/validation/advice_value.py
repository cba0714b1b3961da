"""Measure how much following the advice is worth, on the held-out shapes of a table.

For *choose* queries, random neighbourhoods are drawn. A neighbourhood consists of one held-out
shape and all other held-out shapes that differ from it only in size, by at most 15% in each
dimension. A rule, such as following the advice, picks one shape of the neighbourhood. The regret is
the difference in speed (FLOP/s) between the fastest shape of the neighbourhood and the picked
shape, as a share of the highest speed.

For *pad* queries, only shapes that have a padding among the held-out shapes are drawn. A padding is
another shape in which each dimension is equal, or larger by at most 15%.

The advice is compared with simpler rules:

- ``best_guess`` picks the shape that is predicted to be the fastest, but pads a shape only if the
  predicted gain is at least :data:`MIN_GAIN`;
- ``as_asked`` keeps the original shape (only for choose queries);
- ``biggest`` picks the shape with the most FLOPs (only for choose queries).
"""

from __future__ import annotations

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

_MIN_FLOPS = 1e9  # Shapes with fewer FLOP are left out.
_REACH = 0.15  # Largest relative difference between neighbours in each dimension.
_MIN_MEMBERS = 4  # Smallest number of shapes in a neighbourhood to choose from.
_MIN_PAD_MEMBERS = 2  # A neighbourhood to pad in has at least a shape and a padding of it.
_OPPORTUNITY = 0.05  # A shape could gain if its best padding gains at least this much.
DRAWS = 4000
"""Largest number of neighbourhoods to draw for each kind of query. With only a few hundred, the
mean gain would depend strongly on which shapes are drawn."""

_NEIGHBOURHOODS = {"choose": (-_REACH, _MIN_MEMBERS), "pad": (0.0, _MIN_PAD_MEMBERS)}
"""Limits of a neighbourhood for each kind of query.

The first number is the lowest relative difference of a neighbour from the drawn shape in each
dimension. The second number is the smallest number of shapes, including the drawn shape.
"""


@dataclass(frozen=True)
class PaddingValue:
    """Value of one rule for padding. Gains and losses are fractions of the time after padding.

    Attributes:
        moved: number of shapes that were padded.
        gain: mean gain over all shapes, padded or not.
        loss_p95: 95th percentile of the loss over all shapes; a gain is a negative loss.
        found: share of padded shapes among the shapes whose best padding gains at least 5%; 0 if
            there are no such shapes.
    """

    moved: int
    gain: float
    loss_p95: float
    found: float


@dataclass(frozen=True)
class AdviceValue:
    """Value of following the advice.

    Gains are fractions of the time after padding, and regrets are fractions of the highest speed.

    Attributes:
        neighbourhoods: number of neighbourhoods that were drawn for choose queries.
        regret: mean regret of each rule, by the name of the rule.
        pads: number of shapes that were drawn for pad queries.
        padding: value of each rule for padding, by the name of the rule.
        hindsight: mean gain if each shape is replaced by its fastest padding, unless the original
            shape is faster.
        overclaimed: share of the advised changes that gained less than the lower end of their
            predicted interval, for pad and choose queries together; None if no change was advised.
    """

    neighbourhoods: int
    regret: dict[str, float]
    pads: int
    padding: dict[str, PaddingValue]
    hindsight: float
    overclaimed: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the value as a JSON document."""
        return asdict(self)


class _Claim(NamedTuple):
    """Gain of an advised change: lower end of its predicted interval, and the measured gain."""

    low: float
    gain: float


class _Neighbourhood(NamedTuple):
    """Positions of a drawn shape and of all shapes in its neighbourhood, the drawn one included."""

    original: int
    members: list[int]


def judge_advice(validation: Validation, draws: int = DRAWS) -> AdviceValue:
    """Judge the advice on a validation's held-out shapes of more than 1e9 FLOP.

    At most ``draws`` neighbourhoods are drawn for each kind of query.

    Raises:
        UserError: if no shape has enough neighbours to choose from, or if no shape has a padding.
    """
    rows = _HeldOutRows(validation)
    shuffled = np.random.default_rng(validation.seed).permutation(len(rows.flops)).tolist()
    choose_neighbourhoods = _draw_neighbourhoods(rows, shuffled, "choose", draws)
    pad_neighbourhoods = _draw_neighbourhoods(rows, shuffled, "pad", draws)
    if not choose_neighbourhoods or not pad_neighbourhoods:
        raise UserError(
            f"{validation.source.name} has too few neighbouring shapes to judge advice; give "
            "another file, or leave out --advice."
        )
    regret, choose_claims = _judge_choosing(rows, choose_neighbourhoods)
    padding, hindsight, pad_claims = _judge_padding(rows, pad_neighbourhoods)
    is_overclaimed = [claim.gain < claim.low for claim in (*choose_claims, *pad_claims)]
    return AdviceValue(
        neighbourhoods=len(choose_neighbourhoods),
        regret=regret,
        pads=len(pad_neighbourhoods),
        padding=padding,
        hindsight=hindsight,
        overclaimed=float(np.mean(is_overclaimed)) if is_overclaimed else None,
    )


def _judge_choosing(
    rows: _HeldOutRows, neighbourhoods: Sequence[_Neighbourhood]
) -> tuple[dict[str, float], list[_Claim]]:
    """Return the mean regret of each rule, and the claims of the advised changes."""
    speeds = rows.flops / rows.seconds  # in FLOP/s
    predicted_speeds = rows.flops / rows.predicted
    regrets: dict[str, list[float]] = {}
    claims = []
    for original, members in neighbourhoods:
        advised, claimed_low = rows.decide(original, members, "choose")
        picks = {
            "advice": advised,
            "best_guess": max(members, key=lambda j: predicted_speeds[j]),
            "biggest": max(members, key=lambda j: rows.flops[j]),
            "as_asked": original,
        }
        fastest_speed = speeds[members].max()
        for rule, pick in picks.items():
            regrets.setdefault(rule, []).append(1 - speeds[pick] / fastest_speed)
        if advised != original:
            claims.append(_Claim(claimed_low, speeds[advised] / speeds[original] - 1))
    mean_regrets = {rule: float(np.mean(values)) for rule, values in regrets.items()}
    return mean_regrets, claims


def _judge_padding(
    rows: _HeldOutRows, neighbourhoods: Sequence[_Neighbourhood]
) -> tuple[dict[str, PaddingValue], float, list[_Claim]]:
    """Return the value of each rule, the mean hindsight gain, and the claims of advised changes."""
    best_gains = []
    picks: dict[str, list[int]] = {"advice": [], "best_guess": []}
    claims = []
    for original, members in neighbourhoods:
        advised, claimed_low = rows.decide(original, members, "pad")
        picks["advice"].append(advised)
        guess = min(members, key=lambda j: rows.predicted[j])
        predicted_gain = rows.predicted[original] / rows.predicted[guess] - 1
        picks["best_guess"].append(guess if predicted_gain >= MIN_GAIN else original)
        best_gains.append(rows.seconds[original] / rows.seconds[members].min() - 1)
        if advised != original:
            claims.append(_Claim(claimed_low, rows.seconds[original] / rows.seconds[advised] - 1))
    originals = [original for original, _ in neighbourhoods]
    padding = {
        rule: _padding_value(rows.seconds, originals, picked, best_gains)
        for rule, picked in picks.items()
    }
    return padding, float(np.mean(best_gains)), claims


def _padding_value(
    seconds: Array, originals: Sequence[int], picked: Sequence[int], best_gains: Sequence[float]
) -> PaddingValue:
    """Return the value of the paddings that one rule picked.

    For each original shape, ``best_gains`` has the gain of its fastest padding, or 0 if the
    original shape is faster.
    """
    is_moved = np.not_equal(originals, picked)
    gain = seconds[originals] / seconds[picked] - 1
    could_gain = np.array(best_gains) >= _OPPORTUNITY
    return PaddingValue(
        moved=int(is_moved.sum()),
        gain=float(gain.mean()),
        loss_p95=float(np.quantile(-gain, 0.95)),
        found=float(is_moved[could_gain].mean()) if could_gain.any() else 0.0,
    )


@dataclass(frozen=True)
class MeasuredValue:
    """Value of measuring the original shape and the model's best candidates.

    The fields are fractions, defined as in :class:`AdviceValue` and :class:`PaddingValue`.
    """

    choose_regret: float
    pad_gain: float
    pad_loss_p95: float


def judge_measured(
    validation: Validation, repeated: PublicRows, counts: Sequence[int], draws: int = DRAWS
) -> dict[int, MeasuredValue]:
    """Judge a rule that measures the original shape and the best candidates, and picks the fastest.

    The best candidates are the neighbours that the model predicts to be fastest. The original shape
    is kept if the fastest candidate gains less than :data:`MIN_GAIN`.

    The shape is picked by its time in the table ``repeated``, and judged by its time in the
    validation. With only one table, a pick would seem better than it is, because the same noise
    would affect both the pick and its judgement.

    The result has the value of the rule for each number of candidates in ``counts``.

    Raises:
        UserError: if the two tables share too few shapes.
    """
    # 1. Shuffle the shapes that were measured twice.
    rows = _HeldOutRows(validation)
    repeated_seconds = rows.times_in(repeated)
    shuffled = np.random.default_rng(validation.seed).permutation(len(rows.flops))
    measured_twice = [int(i) for i in shuffled if np.isfinite(repeated_seconds[i])]
    regrets: dict[int, list[float]] = {count: [] for count in counts}
    gains: dict[int, list[float]] = {count: [] for count in counts}
    # 2. For each kind of query, draw shapes with enough neighbours that were measured twice.
    for query_kind in _NEIGHBOURHOODS:
        drawn = _draw_neighbourhoods(rows, measured_twice, query_kind, draws)
        if not drawn:
            raise UserError(
                f"{repeated.name} shares too few shapes with {validation.source.name} to judge "
                "advice; give another file to --again."
            )
        # 3. Pick the fastest of the best candidates by the times in ``repeated``, and judge the
        #    pick by the times of the validation. Shapes are compared by FLOP/s for choose queries,
        #    and by time for pad queries.
        work = rows.flops if query_kind == "choose" else np.ones(len(rows.flops))
        speeds = work / rows.seconds
        repeated_speeds = work / repeated_seconds
        for original, members in drawn:
            others = [j for j in members if j != original]
            guesses = sorted(others, key=lambda j: rows.predicted[j] / work[j])
            for count in counts:
                pick = _best_measured(original, guesses[:count], repeated_speeds)
                if query_kind == "choose":
                    regrets[count].append(1 - speeds[pick] / speeds[members].max())
                else:
                    gains[count].append(speeds[pick] / speeds[original] - 1)
    return {
        count: MeasuredValue(
            choose_regret=float(np.mean(regrets[count])),
            pad_gain=float(np.mean(gains[count])),
            pad_loss_p95=float(np.quantile(-np.array(gains[count]), 0.95)),
        )
        for count in counts
    }


def _draw_neighbourhoods(
    rows: _HeldOutRows, candidates: Sequence[int], query_kind: str, draws: int
) -> list[_Neighbourhood]:
    """Return the neighbourhoods of up to ``draws`` shapes for one kind of query.

    Only shapes and neighbours at the positions ``candidates`` are used.
    """
    smallest_difference, fewest = _NEIGHBOURHOODS[query_kind]
    usable = set(candidates)
    drawn: list[_Neighbourhood] = []
    for original in candidates:
        if len(drawn) == draws:  # do not search for all, because each search reads all shapes
            break
        members = [j for j in rows.near(original, smallest_difference) if j in usable]
        if len(members) >= fewest:
            drawn.append(_Neighbourhood(original, members))
    return drawn


def _best_measured(original: int, candidates: Sequence[int], speeds: Array) -> int:
    """Return the fastest candidate, or the original if none gains at least :data:`MIN_GAIN`."""
    best = max((original, *candidates), key=lambda j: float(speeds[j]))
    gain = speeds[best] / speeds[original] - 1
    return best if gain >= MIN_GAIN else original


class _HeldOutRows:
    """Held-out shapes with more than 1e9 FLOP, as arrays with one element per measurement.

    Times are in seconds. Methods identify a shape by its position in the arrays.
    """

    def __init__(self, validation: Validation) -> None:
        flops = np.array([float(problem.flops) for problem in validation.tested.problems])
        keep = [int(i) for i in np.flatnonzero(flops > _MIN_FLOPS)]
        self._problems = [validation.tested.problems[i] for i in keep]
        self._model = validation.model
        self._implementations = [validation.tested.implementations[i] for i in keep]
        self._frame = validation.prediction.frame().iloc[keep].reset_index(drop=True)
        self.flops = flops[keep]
        self.seconds = validation.tested.seconds[keep]
        self.predicted = self._frame["time_us"].to_numpy() * 1e-6
        self._index = SizeIndex(self._problems)

    def times_in(self, source: PublicRows) -> Array:
        """Return each shape's time in another table, or NaN for a shape that the table lacks.

        Only times of the same implementation are used.
        """
        measured_cases = zip(source.implementations, source.problems, strict=True)
        seconds_by_case = dict(zip(measured_cases, source.seconds, strict=True))
        cases = zip(self._implementations, self._problems, strict=True)
        return np.array([seconds_by_case.get(case, np.nan) for case in cases])

    def near(self, original: int, smallest_difference: float) -> list[int]:
        """Return the positions of a shape, and of nearby shapes that differ from it only in size.

        Only measurements with the same implementation are included, and each shape only once.
        ``smallest_difference`` is the lowest allowed relative difference in each dimension, such as
        −0.15 for shapes that may be up to 15% smaller.
        """
        problem, implementation = self._problems[original], self._implementations[original]
        # A recording may have the same shape in several sweeps. Repetitions must not count, because
        # they would fill a neighbourhood and seem to be paddings of their own shape.
        positions = {problem: original}
        for j in self._index.near(problem, smallest_difference, _REACH):
            if self._implementations[j] == implementation:
                positions.setdefault(self._problems[j], int(j))
        return sorted(positions.values())

    def decide(self, original: int, members: Sequence[int], query_kind: str) -> tuple[int, float]:
        """Return the position of the advised shape, and the lower end of its gain's interval."""
        # The original shape must be the first option.
        order = [original, *(j for j in members if j != original)]
        problem = self._problems[original]
        choices = weigh(
            problem,
            [self._problems[j] for j in order],
            self._frame.iloc[order],
            self._model.fit_of(group_of(self._implementations[original], problem)),
            Measurements({}),
            Question(query_kind, _REACH),
        )
        best = best_choice(choices)
        return order[best], choices[best].gain.lo
