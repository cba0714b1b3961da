"""Two questions about a GEMM's sizes or a convolution's channels, or the answer to leave them.

*pad*: "I need at least this; which slightly larger one takes less time?" *choose*: "I may pick
within ±15 %; which one computes most per second?"

A gain is what a pair of samples taken anew says of it where there is one, else what both shapes'
measured times say, else what the model predicts, with the error of a *ratio* of neighbouring
shapes, which is smaller than that of either time. :mod:`analysis.advice.verdict` decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from analysis.advice.measurements import Measurements
from analysis.advice.options import Options, Question, options_of, options_of_each
from analysis.advice.reasons import change_text, why, why_not
from analysis.advice.sizes import changed, dimensions, role
from analysis.advice.verdict import (
    CONFIRMED,
    LEAVE_IT,
    MEASURED,
    PREDICTED,
    VERDICTS,
    Gain,
    gain_of,
    net,
    probability,
    verdict,
)
from analysis.model.fit import NEAR, SOFTWARE_ERROR, UNCALIBRATED_PAIR, Fit
from analysis.model.predict import Model
from analysis.model.query import group_of
from kernels.problem import Problem
from sweeps.schema import problem_columns


@dataclass(frozen=True)
class Advice:
    """One shape's answer. Gains are fractions, of what depends on the question: 0.12 means that the
    padded product takes 1/1.12 of the time, or that the chosen one computes 12 % more per second.

    ``measured_gain`` and its interval are None where one of the shapes was not measured; they are
    of samples taken anew where ``evidence`` is ``confirmed``. Where ``instead`` is the problem
    itself and the verdict is not to leave it, another ``implementation`` is faster.
    """

    problem: Problem
    instead: Problem
    question: str  # pad or choose
    verdict: str  # of VERDICTS
    evidence: str  # confirmed, measured or predicted
    implementation: str
    predicted_gain: float
    predicted_lo: float
    predicted_hi: float
    measured_gain: float | None
    measured_lo: float | None
    measured_hi: float | None
    extra_flops: float
    extra_bytes: float
    reason: str

    @property
    def change(self) -> str:
        """``N 50257 → 50304``; empty if no size changes."""
        return change_text(self.problem, self.instead)

    @property
    def changed(self) -> list[str]:
        """The dimensions that the answer changes."""
        return changed(self.problem, self.instead)

    @property
    def roles(self) -> str:
        """What those dimensions stand for in a model."""
        return ", ".join(role(self.problem, d) for d in self.changed)

    @property
    def probability(self) -> float:
        """The probability that following the answer gains; of one to leave the shape, 0."""
        return probability(self.gain, self.evidence) if self.verdict != LEAVE_IT else 0.0

    @property
    def expected_gain(self) -> float:
        """The gain to expect after costs; of an answer to leave the shape, 0."""
        return net(self.gain, self.extra_flops) if self.verdict != LEAVE_IT else 0.0

    @property
    def gain(self) -> Gain:
        """The measured gain and its ends where there are, else the predicted ones."""
        gain, lo, hi = self.measured_gain, self.measured_lo, self.measured_hi
        if gain is None or lo is None or hi is None:
            return Gain(self.predicted_gain, self.predicted_lo, self.predicted_hi)
        return Gain(gain, lo, hi)

    def to_json(self) -> dict[str, Any]:
        """Flat, for JSON and CSV: sizes as in measurements.csv, ``new_m`` those of ``instead``."""
        shapes = {
            "problem": self.problem.spec(),
            "instead": self.instead.spec(),
            **problem_columns(self.problem),
            **{f"new_{d}": getattr(self.instead, d) for d in dimensions(self.instead)},
        }
        rest = {k: v for k, v in asdict(self).items() if k not in ("problem", "instead")}
        sureness = {"probability": self.probability, "expected_gain": self.expected_gain}
        return {**shapes, "change": self.change, "roles": self.roles, **rest, **sureness}


def advise(
    problem: Problem,
    model: Model,
    measured: Measurements,
    library: str,
    question: Question | None = None,
) -> Advice:
    """The best other sizes of a problem, or to leave it.

    Args:
        problem: what is asked about.
        model: the machine's model.
        measured: what was measured there.
        library: the implementation that predictions are for.
        question: what is asked; padding by at most 12.5 % if None.

    Raises:
        UserError: the question's wishes do not fit the problem.
    """
    question = question or Question()
    question.wishes.check(problem)
    options = options_of(problem, model, measured, library, question)
    return _advise_among(options, model, measured, library, question)


def _advise_among(
    found: Options, model: Model, measured: Measurements, library: str, question: Question
) -> Advice:
    """As :func:`advise`, among options, of which the first is the problem."""
    options, frame = found
    problem = options[0]
    fit = model.fit(group_of(library, problem))
    choices = weigh(problem, options, frame, fit, measured, question)
    best = best_of(choices)
    option, choice = options[best], choices[best]
    other = _otherwise(problem, measured, library, question)
    if other is not None and (not best or _rank(other.verdict, other.gain, 0.0) > choice.rank):
        return other
    if best:
        assumed = choice.evidence == PREDICTED and assumes_alignment(problem, option, fit)
        rows = frame.iloc[0], frame.iloc[best]
        known_gain = choice.evidence != PREDICTED
        reason = why(
            problem,
            option,
            *rows,
            choice.gain.value,
            question.choose,
            assumed,
            known_gain,
            model.machine.kind,
        )
    else:
        risky = any(
            c.evidence == PREDICTED and net(c.gain, c.extra_flops) >= _CLEAR for c in choices[1:]
        ) and not any(c.evidence == CONFIRMED for c in choices)
        reason = why_not(frame.iloc[0], question, risky)
    known = choice.gain if best and choice.evidence != PREDICTED else None
    none = Gain(0.0, 0.0, 0.0)
    any_known = any(c.evidence != PREDICTED for c in choices[1:])
    return Advice(
        problem=problem,
        instead=option,
        question=question.kind,
        verdict=choice.verdict if best else LEAVE_IT,
        evidence=choice.evidence if best else MEASURED if any_known else PREDICTED,
        implementation=measured.winner(option, library),
        **_columns("predicted", choice.predicted if best else none),
        **_columns("measured", known),
        extra_flops=option.flops / problem.flops - 1,
        extra_bytes=option.bytes / problem.bytes - 1,
        reason=reason,
    )


_TOGETHER = 100  # problems whose options, up to thousands of each, are predicted at once
_TO_95 = 1.96 / 1.645  # from half a 90 % interval of a normal law to half a 95 % interval
_CLEAR = 0.05  # a gain that would be worth measuring


def _columns(name: str, gain: Gain | None) -> dict[str, Any]:
    value, lo, hi = gain or (None, None, None)
    return {f"{name}_gain": value, f"{name}_lo": lo, f"{name}_hi": hi}


def _otherwise(
    problem: Problem, measured: Measurements, library: str, question: Question
) -> Advice | None:
    """The advice to compute a problem as it is with another implementation, if one is faster."""
    gains = {name: gain_of(ratio, 1.0) for name, ratio in measured.other_ways(problem, library)}
    if not gains:
        return None
    name = max(gains, key=lambda key: gains[key].value)
    what_to_do = verdict(gains[name], CONFIRMED, 0.0)
    if what_to_do == LEAVE_IT:
        return None
    return Advice(
        problem,
        problem,
        question.kind,
        what_to_do,
        CONFIRMED,
        name,
        0.0,
        0.0,
        0.0,
        *gains[name],
        0.0,
        0.0,
        f"{name} is faster than {library} for this shape",
    )


def _rank(what_to_do: str, gain: Gain, extra_flops: float) -> tuple[int, float]:
    """What answers are put in order by: of two gains that should be equal, the surer is best."""
    middle = gain._replace(value=(gain.value + gain.lo) / 2)
    return -VERDICTS.index(what_to_do), net(middle, extra_flops)


@dataclass(frozen=True)
class Choice:
    """What an option would bring: the gain by the best evidence, and the predicted one."""

    gain: Gain
    evidence: str
    predicted: Gain
    extra_flops: float

    @property
    def verdict(self) -> str:
        """Whether to take it."""
        return verdict(self.gain, self.evidence, self.extra_flops)

    @property
    def rank(self) -> tuple[int, float]:
        """What choices are put in order by, the best the largest."""
        return _rank(self.verdict, self.gain, self.extra_flops)


def weigh(
    problem: Problem,
    options: Sequence[Problem],
    frame: pd.DataFrame,
    fit: Fit,
    measured: Measurements,
    question: Question,
) -> list[Choice]:
    """What each option would bring instead of the problem, which is the first of them.

    Args:
        problem: the first of the options.
        options: the problem, then other sizes of it.
        frame: the model's prediction of each option.
        fit: the errors of such predictions.
        measured: what was measured of them.
        question: what is asked.
    """
    seconds = frame["time_us"].to_numpy()
    spreads = [fit.spread(*ends) for ends in zip(frame["lo_us"], frame["hi_us"], strict=True)]
    choices = []
    for option, time, spread in zip(options, seconds, spreads, strict=True):
        work = question.work(problem, option)
        ratio = predicted_ratio(problem, option, (seconds[0], time), (spreads[0], spread), fit)
        predicted = gain_of(ratio, work)
        gain, evidence = predicted, PREDICTED
        if (known := measured.confirmed(problem, option, question.kind)) is not None:
            gain, evidence = gain_of(known, work), CONFIRMED
        elif (known := measured_ratio(problem, option, measured, fit)) is not None:
            gain, evidence = gain_of(known, work), MEASURED
        choices.append(Choice(gain, evidence, predicted, option.flops / problem.flops - 1))
    return choices


def measured_ratio(
    problem: Problem, option: Problem, measured: Measurements, fit: Fit
) -> tuple[float, float, float] | None:
    """The problem's measured time over the option's, with the 95 % interval of a repetition.

    Of two times in a public table, the interval holds the ratio on other software, whose times lie
    apart from the table's even where the model has nothing to predict. None where the two were not
    measured in one place.
    """
    known = measured.ratio(problem, option)
    if known is not None:
        return known
    plain = measured.plain_ratio(problem, option)
    if plain is None:
        return None
    low, high = _error(problem, option, fit, (max(fit.beside, SOFTWARE_ERROR),) * 2)
    return plain, plain * math.exp(_TO_95 * low), plain * math.exp(_TO_95 * high)


def best_of(choices: Sequence[Choice]) -> int:
    """The position of the choice to take; 0, the problem itself, if none is worth it.

    Where one was measured anew, it was the best of those that were tried: what the others promise
    is what they were not chosen for.
    """
    candidates = range(1, len(choices))
    confirmed = [i for i in candidates if choices[i].evidence == CONFIRMED]
    best = max(confirmed or candidates, key=lambda i: choices[i].rank, default=0)
    return best if best and choices[best].verdict != LEAVE_IT else 0


def assumes_alignment(problem: Problem, option: Problem, fit: Fit) -> bool:
    """Whether a gain is assumed: better alignment, of which no calibrated row showed the worth."""
    return fit.aligned_only and option.alignment > problem.alignment


def _with_assumed_price(log_ratio: float, fit: Fit, spread: float) -> tuple[float, float]:
    """The 90 % range of a log ratio's error where it rests on an assumed price of misalignment.

    The price may be nothing, or twice as much. The other errors are those of two shapes as well
    known as the aligned one.
    """
    low, high = fit.ratio_range(True, (spread, spread))
    price = max(log_ratio, 0.0)
    return -math.hypot(low, price), math.hypot(high, price)


def _error(
    problem: Problem, option: Problem, fit: Fit, spreads: tuple[float, float]
) -> tuple[float, float]:
    """The 90 % range of the error of a predicted log ratio, the problem's time over the option's.

    It was measured over pairs of which one pads the other by little (:data:`NEAR`). An option that
    is smaller in a size gets the wider side of it both ways, and one further away the range of any
    two shapes. Of layouts, batches and alignments that were not measured, neither was it.
    """
    growth = [getattr(option, d) / getattr(problem, d) for d in dimensions(problem)]
    if max(growth) > 1 + NEAR or min(growth) < 1 / (1 + NEAR):
        return fit.ratio_range(False, spreads)
    if fit.has_like(problem) and fit.has_like(option):
        low, high = fit.ratio_range(True, spreads)
    else:  # at least as wide as on a machine of which nothing was measured
        fitted = fit.ratio_range(True, (fit.typical_spread,) * 2)
        low, high = min(UNCALIBRATED_PAIR[0], fitted[0]), max(UNCALIBRATED_PAIR[1], fitted[1])
    if min(growth) < 1:
        low, high = min(low, -high), max(high, -low)
    return low, high


def predicted_ratio(
    problem: Problem,
    option: Problem,
    times: tuple[float, float],
    spreads: tuple[float, float],
    fit: Fit,
) -> tuple[float, float, float]:
    """The problem's predicted time over the option's, and the 90 % interval of that.

    Args:
        problem: as it is.
        option: with other sizes.
        times: both predicted times, in any unit.
        spreads: of both predictions.
        fit: the errors of such predictions.
    """
    ratio = times[0] / times[1]
    low, high = _error(problem, option, fit, spreads)
    if assumes_alignment(problem, option, fit):
        low, high = _with_assumed_price(math.log(ratio), fit, spreads[1])
    return ratio, ratio * math.exp(low), ratio * math.exp(high)


def advise_all(
    problems: Mapping[Problem, str], model: Model, measured: Measurements, question: Question
) -> list[Advice]:
    """Advice for each of many problems (mapped to their library): those to act on first, of them
    the largest gains.
    """
    answers = []
    for start in range(0, len(problems), _TOGETHER):
        some = dict(itertools.islice(problems.items(), start, start + _TOGETHER))
        found = options_of_each(some, model, measured, question)
        answers += [
            _advise_among(options, model, measured, name, question)
            for options, name in zip(found, some.values(), strict=True)
        ]
    return sorted(
        answers, key=lambda a: (VERDICTS.index(a.verdict), -a.gain.value, a.problem.spec())
    )
