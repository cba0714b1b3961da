"""Choose what to measure to improve advice: sizes, implementations, and pairs to re-time."""

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
from sweeps.cases.case import Contender

# Maximum number of measured sizes that are added to the best options. The best options are mostly
# predicted. If their predictions turn out to be wrong, a measured gain can still be confirmed.
_MEASURED_NEIGHBOURS = 2


@dataclass(frozen=True)
class Trial:
    """A query about a problem, and the contenders that are timed to answer it.

    Attributes:
        library: implementation with which the original problem and the candidates are timed.
        candidates: other sizes to time.
        others: other implementations to time on the original problem.
        promise: largest expected gain of a candidate after costs, as a fraction, or 0 if there are
            no candidates.
    """

    problem: Problem
    library: str
    question: Question
    candidates: tuple[Problem, ...]
    others: tuple[str, ...] = ()
    promise: float = 0.0

    @property
    def contenders(self) -> list[Contender]:
        """Problems and implementations to be timed, beginning with the original problem."""
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
    """Return a trial of the options with the largest expected gains.

    The candidates are chosen from the options that may bring a gain worth a change: the best
    ``count``, and the best two that were already measured. ``others`` are other implementations;
    the trial has those that were not yet re-timed on the original problem. Return None if another
    size was already re-timed for this query, or if nothing is left to time.

    Raises:
        UserError: for constraints that do not fit the problem, or an unsupported dtype.
    """
    question.constraints.check(problem)
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
    """Return the trial that :func:`trial_of` returns, given the problem's options.

    ``options`` and ``frame`` are the two elements of :data:`analysis.advice.options.Options`.
    """
    problem = options[0]
    fit = model.fit_of(group_of(library, problem))
    choices = weigh(problem, options, frame, fit, measured, question)
    # Re-timing has already answered the query.
    if any(choice.evidence == CONFIRMED for choice in choices):
        return None
    # 1. Rank the options that may bring a gain. Position 0 is the problem itself.
    may_gain = [i for i in range(1, len(options)) if choices[i].gain.hi >= MIN_GAIN]
    best_first = sorted(may_gain, key=lambda i: _net_gain(choices[i]), reverse=True)
    # 2. Take the best options, and the best of those that were measured.
    measured_best = [i for i in best_first if choices[i].evidence == MEASURED]
    chosen = list(dict.fromkeys([*best_first[:count], *measured_best[:_MEASURED_NEIGHBOURS]]))
    # 3. Add the implementations that were not yet re-timed together with the library.
    retimed = {
        implementation for implementation, _ in measured.other_implementations(problem, library)
    }
    untried = tuple(name for name in others if name not in retimed)
    if not chosen and not untried:
        return None
    promise = max((_net_gain(choices[i]) for i in chosen), default=0.0)
    sizes = tuple(options[i] for i in chosen)
    return Trial(problem, library, question, sizes, untried, promise)


def _net_gain(choice: Choice) -> float:
    return net(choice.gain, choice.extra_flops)


def pairs_to_confirm(
    trials: Sequence[Trial], explored: Measurements
) -> Iterator[tuple[Contender, Contender]]:
    """Yield pairs of contenders to re-time: a trial's original problem and an alternative to it.

    The alternatives of a trial are the best other size and the best other implementation, provided
    that their gains are worth a change. ``explored`` has the times of the trials' contenders.
    """
    yielded: set[tuple[Contender, Contender]] = set()
    for trial in trials:
        original = (trial.problem, trial.library)
        # 1. Separate the gains of other sizes from those of other implementations.
        size_gains: dict[Contender, float] = {}
        implementation_gains: dict[Contender, float] = {}
        for contender in trial.contenders[1:]:
            gain = _explored_gain(trial, contender, explored)
            if gain is None:
                continue
            problem, _ = contender
            if problem == trial.problem:
                implementation_gains[contender] = gain
            else:
                size_gains[contender] = gain
        # 2. Yield the best size and the best implementation. Trials of two queries may share a
        #    pair.
        for gains in (size_gains, implementation_gains):
            if not gains:
                continue
            best = max(gains, key=lambda contender: gains[contender])
            if gains[best] >= MIN_GAIN and (original, best) not in yielded:
                yielded.add((original, best))
                yield original, best


def _explored_gain(trial: Trial, contender: Contender, explored: Measurements) -> float | None:
    """Return a contender's gain after costs, computed from measured times; None if unknown."""
    problem, name = contender
    ratio = explored.contender_ratio((trial.problem, trial.library), (problem, name))
    if ratio is None:
        return None
    gain = gain_of(ratio, trial.question.work(trial.problem, problem))
    return net(gain, problem.flops / trial.problem.flops - 1)


def pair_seconds(trial: Trial, seconds: Mapping[Contender, tuple[float, float]]) -> float:
    """Return an upper bound on the seconds that re-timing one pair of the trial takes.

    ``seconds`` is described in :func:`affordable`.
    """
    retiming_seconds = []
    for contender in trial.contenders:
        _, to_retime = seconds[contender]
        retiming_seconds.append(to_retime)
    # No half of a pair takes longer than the slowest contender.
    return 2 * max(retiming_seconds)


def affordable(
    trials: Sequence[Trial], seconds: Mapping[Contender, tuple[float, float]], budget: float
) -> list[Trial]:
    """Return the trials that fit a time budget in seconds, the most promising ones first.

    ``seconds`` has two values for each contender: the seconds of its first timing, and of its
    re-timing in a pair. The budget covers the first timing of all contenders of the returned
    trials, and the re-timing of each trial's costliest pair.
    """
    seconds_to_explore = {contender: to_explore for contender, (to_explore, _) in seconds.items()}
    remaining_seconds = budget
    chosen: list[Trial] = []
    already_explored: set[Contender] = set()
    for trial in sorted(trials, key=lambda trial: -trial.promise):
        # Trials may share contenders, which are explored once.
        new_contenders = [
            contender for contender in trial.contenders if contender not in already_explored
        ]
        exploring_seconds = sum(seconds_to_explore[contender] for contender in new_contenders)
        needed_seconds = exploring_seconds + pair_seconds(trial, seconds)
        # A trial that does not fit is skipped, because a cheaper trial may still fit.
        if needed_seconds <= remaining_seconds:
            remaining_seconds -= needed_seconds
            already_explored.update(new_contenders)
            chosen.append(trial)
    return chosen
