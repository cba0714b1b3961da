"""What to measure so that advice need not guess: candidates, and of these the ones to confirm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.advice.measurements import Measurements
from analysis.advice.options import Question, options_of
from analysis.advice.recommend import Choice, weigh
from analysis.advice.verdict import CONFIRMED, MEASURED, MIN_GAIN, gain_of, net
from analysis.model.predict import Model
from analysis.model.query import group_of
from kernels.problem import Problem
from sweeps.cases.case import Way

_MEASURED_NEIGHBOURS = 2  # the best of them are candidates, whatever the model thinks


@dataclass(frozen=True)
class Trial:
    """A question about a problem, and what is timed for it.

    ``candidates`` are other sizes on the library, ``others`` the implementations that may compute
    the problem as it is, ``promise`` the gain after costs that the best guess should bring.
    """

    problem: Problem
    library: str
    question: Question
    candidates: tuple[Problem, ...]
    others: tuple[str, ...] = ()
    promise: float = 0.0

    @property
    def ways(self) -> list[Way]:
        """Everything to be timed, the problem as it was asked first."""
        sizes = [(size, self.library) for size in (self.problem, *self.candidates)]
        return [*sizes, *((self.problem, name) for name in self.others)]


def trial_of(
    problem: Problem,
    model: Model,
    measured: Measurements,
    library: str,
    question: Question,
    count: int,
    others: Collection[str] = (),
) -> Trial | None:
    """The best guesses of a problem, to be timed; None where nothing might gain, or is known.

    Args:
        problem: what is asked about.
        model: the machine's model.
        measured: what was measured there.
        library: the implementation that predictions are for.
        question: what is asked.
        count: how many of the model's best guesses are candidates.
        others: implementations that compute it as it is.

    Raises:
        UserError: the question's wishes do not fit the problem.
    """
    question.wishes.check(problem)
    options, frame = options_of(problem, model, measured, library, question)
    return trial_among(options, frame, model, measured, library, question, count, others)


def trial_among(
    options: Sequence[Problem],
    frame: pd.DataFrame,
    model: Model,
    measured: Measurements,
    library: str,
    question: Question,
    count: int,
    others: Collection[str] = (),
) -> Trial | None:
    """As :func:`trial_of`, among given options, of which the first is the problem.

    Args:
        options: the problem, then other sizes of it.
        frame: the model's prediction of each option.
        model: the machine's model.
        measured: what was measured there.
        library: the implementation that predictions are for.
        question: what is asked.
        count: how many of the model's best guesses are candidates.
        others: implementations that compute it as it is.
    """
    problem = options[0]
    fit = model.fit(group_of(library, problem))
    choices = weigh(problem, options, frame, fit, measured, question)
    if any(choice.evidence == CONFIRMED for choice in choices):
        return None
    open_ = [i for i in range(1, len(options)) if choices[i].gain.hi >= MIN_GAIN]

    def worth(i: int) -> float:
        return _worth(choices[i])

    best = sorted(open_, key=worth, reverse=True)
    known = [i for i in best if choices[i].evidence == MEASURED][:_MEASURED_NEIGHBOURS]
    chosen = list(dict.fromkeys([*best[:count], *known]))
    done = {other for other, _ in measured.other_ways(problem, library)}
    left = tuple(name for name in others if name not in done)
    if not chosen and not left:
        return None
    promise = max(map(worth, chosen), default=0.0)
    sizes = tuple(options[i] for i in chosen)
    return Trial(problem, library, question, sizes, left, promise)


def _worth(choice: Choice) -> float:
    return net(choice.gain, choice.extra_flops)


def pairs_to_confirm(trials: Sequence[Trial], explored: Measurements) -> Iterator[tuple[Way, Way]]:
    """Of each trial, the ways to be timed anew beside the problem as it was asked.

    They are the size and the other implementation that were best among the samples of the trial,
    if these gained enough to be worth a change.
    """
    seen: set[tuple[Way, Way]] = set()
    for trial in trials:
        asked = (trial.problem, trial.library)
        gains = {way: _explored_gain(trial, way, explored) for way in trial.ways[1:]}
        for same_shape in (False, True):
            group = {
                way: gain
                for way, gain in gains.items()
                if (way[0] == trial.problem) == same_shape and gain is not None
            }
            best = max(group, key=lambda way: group[way] or 0.0, default=None)
            if best is None or (group[best] or 0.0) < MIN_GAIN or (asked, best) in seen:
                continue
            seen.add((asked, best))
            yield asked, best


def _explored_gain(trial: Trial, way: Way, explored: Measurements) -> float | None:
    """What a way gained after costs, by the samples of the trial; None where it has none."""
    problem, name = way
    ratio = explored.ratio_of((trial.problem, trial.library), (problem, name))
    if ratio is None:
        return None
    gain = gain_of(ratio, trial.question.work(trial.problem, problem))
    return net(gain, problem.flops / trial.problem.flops - 1)


def pair_seconds(trial: Trial, seconds: Mapping[Way, tuple[float, float]]) -> float:
    """Seconds of the pair that may have to be timed anew, at most; see :func:`affordable`."""
    return 2 * max(seconds[way][1] for way in trial.ways)


def affordable(
    trials: Sequence[Trial], seconds: Mapping[Way, tuple[float, float]], budget: float
) -> list[Trial]:
    """The trials that fit a budget, those that promise most first.

    Args:
        trials: what might be measured.
        seconds: of each way, to explore it and for its half of a pair.
        budget: seconds, all of a trial's ways and a pair of the dearest included.
    """
    chosen: list[Trial] = []
    counted: set[Way] = set()
    for trial in sorted(trials, key=lambda t: -t.promise):
        new = [way for way in trial.ways if way not in counted]
        cost = sum(seconds[way][0] for way in new) + pair_seconds(trial, seconds)
        if cost <= budget:
            budget -= cost
            counted.update(new)
            chosen.append(trial)
    return chosen
