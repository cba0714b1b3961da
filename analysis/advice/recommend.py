"""Recommend other sizes of a GEMM or convolution, another implementation, or no change.

There are two kinds of queries:

- *pad*: "I need at least these sizes. Which slightly larger sizes take less time?"
- *choose*: "I may pick sizes within ±15%. Which sizes compute the most per second?"

A gain is computed from the first kind of evidence in this list that is available:

1. samples of the original and the new shape, taken together after the new sizes were chosen,
2. earlier measurements of both shapes,
3. the *ratio* of the two times that the model predicts. For neighbouring shapes, the error of this
   ratio is smaller than the error of either time.

:mod:`analysis.advice.verdict` decides whether a gain is worth a change.
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
from analysis.model.fit import NEAR, SOFTWARE_ERROR, UNCALIBRATED, UNCALIBRATED_PAIR, Fit
from analysis.model.predict import Model
from analysis.model.query import group_of
from kernels.problem import Problem
from sweeps.schema import problem_columns

_TOGETHER = 100  # problems that are predicted at once, each with up to thousands of options
_TO_95 = 1.96 / 1.645  # half the 95% interval over half the 90% interval, of a normal error
_CLEAR = 0.05  # smallest predicted gain that would be worth measuring


@dataclass(frozen=True)
class Advice:
    """Advice on one shape.

    Gains are fractions, as in :class:`analysis.advice.verdict.Gain`. ``measured_gain`` and its
    interval are None if the gain is only predicted, or if the advice is to leave the shape as it
    is. If ``instead`` is the problem itself but the verdict is not *leave it*, the advice is
    to use another ``implementation``.
    """

    problem: Problem
    instead: Problem
    question: str  # pad or choose
    verdict: str  # one of VERDICTS
    evidence: str  # one of EVIDENCE
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
        """Sizes that change, such as ``N 50257 → 50304``, or "" if no size changes."""
        return change_text(self.problem, self.instead)

    @property
    def changed(self) -> list[str]:
        """Dimensions that the advice changes."""
        return changed(self.problem, self.instead)

    @property
    def roles(self) -> str:
        """Probable meanings of the changed dimensions in a neural network, such as ``tokens``."""
        return ", ".join(role(self.problem, d) for d in self.changed)

    @property
    def probability(self) -> float:
        """Probability that the advised change brings a gain; 0 if the shape is left as it is."""
        return probability(self.gain, self.evidence) if self.verdict != LEAVE_IT else 0.0

    @property
    def expected_gain(self) -> float:
        """Expected gain after costs; 0 if the shape is left as it is."""
        return net(self.gain, self.extra_flops) if self.verdict != LEAVE_IT else 0.0

    @property
    def gain(self) -> Gain:
        """Measured gain with its interval if the gain was measured, else the predicted gain."""
        gain, lo, hi = self.measured_gain, self.measured_lo, self.measured_hi
        if gain is None or lo is None or hi is None:
            return Gain(self.predicted_gain, self.predicted_lo, self.predicted_hi)
        return Gain(gain, lo, hi)

    def to_json(self) -> dict[str, Any]:
        """Return a flat record for JSON and CSV."""
        new_sizes = {
            f"new_{name}": getattr(self.instead, name) for name in dimensions(self.instead)
        }
        other_fields = asdict(self)
        del other_fields["problem"], other_fields["instead"]
        return {
            "problem": self.problem.spec(),
            "instead": self.instead.spec(),
            **problem_columns(self.problem),
            **new_sizes,
            "change": self.change,
            "roles": self.roles,
            **other_fields,
            "probability": self.probability,
            "expected_gain": self.expected_gain,
        }


def advise(
    problem: Problem,
    model: Model,
    measured: Measurements,
    library: str,
    question: Question | None = None,
) -> Advice:
    """Return advice on a problem: use other sizes, use another implementation, or change nothing.

    ``library`` is the implementation whose times are predicted.

    Raises:
        UserError: if the constraints do not fit the problem, if the machine does not support the
            dtype, or if another version of Rooftile wrote the trees of a fit.
    """
    question = question or Question()
    question.constraints.check(problem)
    options = options_of(problem, model, measured, library, question)
    return _advise_among(options, model, measured, library, question)


def _advise_among(
    candidates: Options, model: Model, measured: Measurements, library: str, question: Question
) -> Advice:
    """Return advice on a problem, given the options; the first option is the problem itself."""
    # 1. Choose the best size. Position 0 is the problem itself.
    options, frame = candidates
    problem = options[0]
    fit = model.fit_of(group_of(library, problem))
    choices = weigh(problem, options, frame, fit, measured, question)
    best = best_choice(choices)
    is_other_size = best > 0
    option = options[best]
    choice = choices[best]
    # 2. Another implementation of the same shape may be better than any other size.
    alternative = _other_implementation(problem, measured, library, question)
    if alternative is not None:
        rank = _rank(alternative.verdict, alternative.gain, 0.0)
        if not is_other_size or rank > choice.rank:
            return alternative
    # 3. Explain the change and report its gain, or explain why no change is recommended.
    is_measured = choice.evidence != PREDICTED
    if is_other_size:
        verdict_on_change = choice.verdict
        evidence = choice.evidence
        predicted_gain = choice.predicted
        measured_gain = choice.gain if is_measured else None
        reason = why(
            problem,
            option,
            before=frame.iloc[0],
            after=frame.iloc[best],
            gain=choice.gain.value,
            choose=question.choose,
            assumed=not is_measured and assumes_alignment(problem, option, fit),
            measured=is_measured,
            kind=model.machine.kind,
        )
    else:
        verdict_on_change = LEAVE_IT
        # The evidence for leaving a problem is ``measured`` if any option was measured.
        any_measured = any(other.evidence != PREDICTED for other in choices[1:])
        evidence = MEASURED if any_measured else PREDICTED
        predicted_gain = Gain(0.0, 0.0, 0.0)
        measured_gain = None
        reason = why_not(problem, frame.iloc[0], question, _are_uncertain(choices))
    return Advice(
        problem=problem,
        instead=option,
        question=question.kind,
        verdict=verdict_on_change,
        evidence=evidence,
        implementation=measured.winner(option, library),
        **_columns("predicted", predicted_gain),
        **_columns("measured", measured_gain),
        extra_flops=option.flops / problem.flops - 1,
        extra_bytes=option.bytes / problem.bytes - 1,
        reason=reason,
    )


def _are_uncertain(choices: Sequence[Choice]) -> bool:
    """Return True if a predicted gain would clearly be worth a change, but no option was re-timed.

    If any option was re-timed, the gains of the best options are already known.
    """
    may_gain = any(
        choice.evidence == PREDICTED and net(choice.gain, choice.extra_flops) >= _CLEAR
        for choice in choices[1:]
    )
    return may_gain and all(choice.evidence != CONFIRMED for choice in choices)


def _columns(name: str, gain: Gain | None) -> dict[str, Any]:
    """Return a gain and its interval as fields of :class:`Advice`, all None if ``gain`` is None."""
    value, lo, hi = gain or (None, None, None)
    return {f"{name}_gain": value, f"{name}_lo": lo, f"{name}_hi": hi}


def _other_implementation(
    problem: Problem, measured: Measurements, library: str, question: Question
) -> Advice | None:
    """Return advice to use the best re-timed implementation, or None if none is worth using."""
    gains = {
        name: gain_of(ratio, 1.0)
        for name, ratio in measured.other_implementations(problem, library)
    }
    if not gains:
        return None
    verdicts = {name: verdict(gain, CONFIRMED, 0.0) for name, gain in gains.items()}
    best = max(gains, key=lambda name: _rank(verdicts[name], gains[name], 0.0))
    verdict_word = verdicts[best]
    if verdict_word == LEAVE_IT:
        return None
    return Advice(
        problem=problem,
        instead=problem,
        question=question.kind,
        verdict=verdict_word,
        evidence=CONFIRMED,
        implementation=best,
        **_columns("predicted", Gain(0.0, 0.0, 0.0)),
        **_columns("measured", gains[best]),
        extra_flops=0.0,
        extra_bytes=0.0,
        reason=f"{best} is faster than {library} for this shape",
    )


def _rank(verdict_word: str, gain: Gain, extra_flops: float) -> tuple[int, float]:
    """Return a sort key, largest for the best answer: the verdict, then a cautious gain.

    The cautious gain ranks the more certain of two equal gains higher.
    """
    cautious = gain._replace(value=(gain.value + gain.lo) / 2)
    return -VERDICTS.index(verdict_word), net(cautious, extra_flops)


@dataclass(frozen=True)
class Choice:
    """An option's gain from the best evidence, its predicted gain, and its additional FLOPs."""

    gain: Gain
    evidence: str
    predicted: Gain
    extra_flops: float

    @property
    def verdict(self) -> str:
        """Verdict on the change to the option, one of :data:`VERDICTS`."""
        return verdict(self.gain, self.evidence, self.extra_flops)

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key of choices; the best choice has the largest key."""
        return _rank(self.verdict, self.gain, self.extra_flops)


def weigh(
    problem: Problem,
    options: Sequence[Problem],
    frame: pd.DataFrame,
    fit: Fit,
    measured: Measurements,
    question: Question,
) -> list[Choice]:
    """Return each option's gain over the problem, computed from the best available evidence.

    ``options`` and ``frame`` are the two elements of :data:`analysis.advice.options.Options`.
    """
    times_us = frame["time_us"].to_numpy()
    spreads = [
        fit.spread(lo_us, hi_us)
        for lo_us, hi_us in zip(frame["lo_us"], frame["hi_us"], strict=True)
    ]
    choices = []
    for option, time_us, spread in zip(options, times_us, spreads, strict=True):
        work = question.work(problem, option)
        both_times = (times_us[0], time_us)
        both_spreads = (spreads[0], spread)
        ratio = predicted_ratio(problem, option, both_times, both_spreads, fit)
        predicted = gain_of(ratio, work)
        gain, evidence = predicted, PREDICTED
        if (confirmed := measured.confirmed(problem, option, question.kind)) is not None:
            gain, evidence = gain_of(confirmed, work), CONFIRMED
        elif (from_times := measured_ratio(problem, option, measured, fit)) is not None:
            gain, evidence = gain_of(from_times, work), MEASURED
        choices.append(Choice(gain, evidence, predicted, option.flops / problem.flops - 1))
    return choices


def measured_ratio(
    problem: Problem, option: Problem, measured: Measurements, fit: Fit
) -> tuple[float, float, float] | None:
    """Return the ratio of the measured times (problem over option) with its 95% interval.

    The interval covers the ratio that a second measurement of both problems would give. If neither
    time has an interval (as in a public table), the ratio's interval covers the ratio that another
    framework would give. Return None if the times cannot be compared, or if only one of them has an
    interval.
    """
    ratio = measured.ratio(problem, option)
    if ratio is not None:
        return ratio
    from_table = measured.plain_ratio(problem, option)
    if from_table is None:
        return None
    # Both times were measured, so the only error is the difference between frameworks.
    spread = max(fit.beside, SOFTWARE_ERROR)
    low, high = _error(problem, option, fit, (spread, spread))
    return from_table, from_table * math.exp(_TO_95 * low), from_table * math.exp(_TO_95 * high)


def best_choice(choices: Sequence[Choice]) -> int:
    """Return the position of the best choice, or 0 (the problem itself) if no change is worthwhile.

    If any choice was re-timed, only re-timed choices are compared, because the most promising
    choices were selected for re-timing.
    """
    candidates = list(range(1, len(choices)))
    confirmed = [i for i in candidates if choices[i].evidence == CONFIRMED]
    if confirmed:
        candidates = confirmed
    best = max(candidates, key=lambda i: choices[i].rank, default=0)
    if choices[best].verdict == LEAVE_IT:
        return 0
    return best


def assumes_alignment(problem: Problem, option: Problem, fit: Fit) -> bool:
    """Return True if the option is better aligned, and no misaligned shape was measured."""
    return fit.aligned_only and option.alignment > problem.alignment


def _error_with_assumed_price(log_ratio: float, fit: Fit, spread: float) -> tuple[float, float]:
    """Return the 90% error range of a log time ratio if the price of misalignment is assumed.

    The price may be wrong by as much as the predicted gain, but by at most a factor of two.
    ``spread`` is the value of :meth:`Fit.spread` for the aligned shape, and is used for both
    shapes.
    """
    low, high = fit.ratio_range(near=True, spreads=(spread, spread))
    # All of the predicted gain may come from the assumed price. If the true price is zero, this
    # gain vanishes.
    price_error = min(max(log_ratio, 0.0), UNCALIBRATED[1])
    # The error of the price is independent of all other errors, so they add up in quadrature.
    return -math.hypot(low, price_error), math.hypot(high, price_error)


def _error(
    problem: Problem, option: Problem, fit: Fit, spreads: tuple[float, float]
) -> tuple[float, float]:
    """Return the 90% error range of a log time ratio (problem over option).

    If no size differs by more than :data:`NEAR`, the range is that of pairs in which one shape is a
    slightly padded copy of the other, with two exceptions:

    - For layouts, batches and alignments that were not measured, the range is at least as wide as
      on a machine without any measurements.
    - If a size of the option is smaller than that of the problem, the range is made symmetric.
    """
    size_ratios = [getattr(option, name) / getattr(problem, name) for name in dimensions(problem)]
    if max(size_ratios) > 1 + NEAR or min(size_ratios) < 1 / (1 + NEAR):
        return fit.ratio_range(near=False, spreads=spreads)
    if fit.has_like(problem) and fit.has_like(option):
        low, high = fit.ratio_range(near=True, spreads=spreads)
    else:
        typical_spreads = (fit.typical_spread, fit.typical_spread)
        low, high = fit.ratio_range(near=True, spreads=typical_spreads)
        low = min(low, UNCALIBRATED_PAIR[0])
        high = max(high, UNCALIBRATED_PAIR[1])
    if min(size_ratios) < 1:
        low, high = min(low, -high), max(high, -low)
    return low, high


def predicted_ratio(
    problem: Problem,
    option: Problem,
    times: tuple[float, float],
    spreads: tuple[float, float],
    fit: Fit,
) -> tuple[float, float, float]:
    """Return the ratio of the predicted times (problem over option) with its 90% interval.

    ``times`` (in any unit) and ``spreads`` (from :meth:`Fit.spread`) each hold the value of the
    problem, followed by the value of the option.
    """
    problem_time, option_time = times
    ratio = problem_time / option_time
    if assumes_alignment(problem, option, fit):
        _, option_spread = spreads
        low, high = _error_with_assumed_price(math.log(ratio), fit, option_spread)
    else:
        low, high = _error(problem, option, fit, spreads)
    return ratio, ratio * math.exp(low), ratio * math.exp(high)


def advise_all(
    problems: Mapping[Problem, str], model: Model, measured: Measurements, question: Question
) -> list[Advice]:
    """Return advice on many problems, given as a mapping from problems to vendor libraries.

    The best verdict comes first, and within a verdict the largest gain.
    """
    answers = []
    for start in range(0, len(problems), _TOGETHER):
        chunk = dict(itertools.islice(problems.items(), start, start + _TOGETHER))
        options_of_chunk = options_of_each(chunk, model, measured, question)
        answers += [
            _advise_among(options, model, measured, library, question)
            for options, library in zip(options_of_chunk, chunk.values(), strict=True)
        ]
    # The problem's text decides between equal gains, so that the order is always the same.
    return sorted(
        answers,
        key=lambda answer: (
            VERDICTS.index(answer.verdict),
            -answer.gain.value,
            answer.problem.spec(),
        ),
    )
