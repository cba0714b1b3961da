"""Two questions about a GEMM's sizes or a convolution's channels, or the answer to leave them.

*pad*: "I need at least this; which slightly larger one takes less time?" *choose*: "I may pick
within ±15 %; which one computes most per second?"

Another shape is recommended only if it is better beyond doubt: by the measured intervals where
both shapes were measured, by the prediction less its own uncertainty where not. That uncertainty
is the one of a *ratio* of neighbouring shapes, which is smaller than that of either time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from analysis.advice.measurements import Measurements
from analysis.advice.sizes import dimensions, role, sizes_near, with_sizes
from analysis.model.fit import NEAR, Fit
from analysis.model.predict import Model
from analysis.model.query import Query, group_of
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Problem

MIN_GAIN = 0.01
"""A gain below one percent is not worth a changed model."""

QUESTIONS = ("pad", "choose")

_MAX_COMBINATIONS = 256  # up to which all combinations of sizes are tried
_BEST_SIZES = 3  # per dimension, which are combined where there are more


@dataclass(frozen=True)
class Advice:
    """One shape's answer. Gains are fractions, of what depends on the question: 0.12 means that the
    padded product takes 1/1.12 of the time, or that the chosen one computes 12 % more per second.

    ``measured_gain`` and its interval are None where one of the shapes was not measured.
    """

    problem: Problem
    instead: Problem
    question: str  # of QUESTIONS
    verdict: str  # "pad", "choose" or "leave it"
    evidence: str  # "measured" or "predicted"
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
        """``N 50257 → 50304``; empty if nothing changes."""
        return _change(self.problem, self.instead)

    @property
    def changed(self) -> list[str]:
        """The dimensions that the answer changes."""
        return _changed(self.problem, self.instead)

    @property
    def roles(self) -> str:
        """What those dimensions stand for in a model."""
        return ", ".join(role(self.problem, d) for d in self.changed)

    @property
    def gain(self) -> float:
        """The measured gain where there is one, else the predicted."""
        return self.gain_with_interval[0]

    @property
    def gain_with_interval(self) -> Gain:
        """The measured gain and its ends where there are, else the predicted ones."""
        gain, lo, hi = self.measured_gain, self.measured_lo, self.measured_hi
        if gain is None or lo is None or hi is None:
            return self.predicted_gain, self.predicted_lo, self.predicted_hi
        return gain, lo, hi

    def to_json(self) -> dict[str, Any]:
        """Flat, for JSON and CSV."""
        shapes = {"shape": self.problem.spec(), "instead": self.instead.spec()}
        rest = {k: v for k, v in asdict(self).items() if k not in ("problem", "instead")}
        return {**shapes, "change": self.change, "roles": self.roles, **rest}


def advise(
    problem: Problem, model: Model, measured: Measurements, library: str, allowance: float = 0.125,
    question: str = "pad",
) -> Advice:  # fmt: skip
    """The best other sizes of a problem within ``allowance`` in each dimension, or to leave it.

    Args:
        problem: what is needed at least.
        model: the machine's model.
        measured: what was measured there.
        library: the implementation that predictions are for.
        allowance: how much larger a dimension may become, as a fraction; for ``choose`` also how
            much smaller.
        question: of :data:`QUESTIONS`.
    """
    options, frame = _options(problem, model, measured, library, allowance, question)
    fit = model.fit(group_of(library, problem))
    best, predicted, known = decide(problem, options, frame, fit, measured, question)
    if best == 0:
        verdict, reason = "leave it", _why_not(frame.iloc[0], question)
        guess = max(range(1, len(options)), key=lambda i: predicted[i][0], default=0)
        if guess and not known[guess] and predicted[guess][0] >= MIN_GAIN:
            assumed = _rests_on_alignment(problem, options[guess], fit)
            reason += _best_guess(problem, options[guess], None if assumed else predicted[guess])
    else:
        # The model's tiles and waves explain a gain only if the model predicts half of it.
        explained = predicted[best][0] >= 0.5 * (known[best] or predicted[best])[0]
        verdict = question
        reason = _why(problem, options[best], frame.iloc[0], frame.iloc[best], explained)
    option = options[best]
    gain = known[best] if best else None
    return Advice(
        problem=problem,
        instead=option,
        question=question,
        verdict=verdict,
        evidence="measured" if gain or (not best and any(known[1:])) else "predicted",
        implementation=measured.winner(option, library),
        predicted_gain=predicted[best][0],
        predicted_lo=predicted[best][1] if best else 0.0,
        predicted_hi=predicted[best][2] if best else 0.0,
        measured_gain=gain[0] if gain else None,
        measured_lo=gain[1] if gain else None,
        measured_hi=gain[2] if gain else None,
        extra_flops=option.flops / problem.flops - 1,
        extra_bytes=option.bytes / problem.bytes - 1,
        reason=reason,
    )


Gain = tuple[float, float, float]
"""A gain and its interval, as fractions."""


def decide(
    problem: Problem, options: Sequence[Problem], frame: pd.DataFrame, fit: Fit,
    measured: Measurements, question: str,
) -> tuple[int, list[Gain], list[Gain | None]]:  # fmt: skip
    """Which option to take instead of the problem: the one with the highest lower end of its gain.

    Args:
        problem: the first of the options.
        options: the problem, then other sizes of it.
        frame: the model's prediction of each option.
        fit: the errors of such predictions.
        measured: what was measured of them.
        question: of :data:`QUESTIONS`.

    Returns:
        The best option's position, 0 for the problem itself; the predicted gain of each option,
        and the measured one, None where one of the two was not measured.
    """
    seconds = frame["time_us"].to_numpy()
    spreads = [fit.spread(*ends) for ends in zip(frame["lo_us"], frame["hi_us"], strict=True)]
    work = [_work(problem, option, question) for option in options]
    predicted = [
        _gain(_predicted_ratio(seconds[0], time, _error(problem, option, fit, (spreads[0], s))), w)
        for time, option, s, w in zip(seconds, options, spreads, work, strict=True)
    ]
    ratios = [measured.ratio(problem, option) for option in options]
    known = [r and _gain(r, more) for r, more in zip(ratios, work, strict=True)]
    certain = [
        _certain_gain(gain, guess, assumed=_rests_on_alignment(problem, option, fit))
        for gain, guess, option in zip(known, predicted, options, strict=True)
    ]
    best = max(range(1, len(options)), key=certain.__getitem__, default=0)
    return (best if best and certain[best] >= MIN_GAIN else 0), predicted, known


def _certain_gain(measured: Gain | None, predicted: Gain, assumed: bool) -> float:
    """The lower end of a gain: the measured one if there is one; nothing if it is ``assumed``."""
    if measured is not None:
        return measured[1]
    return 0.0 if assumed else predicted[1]


def _rests_on_alignment(problem: Problem, option: Problem, fit: Fit) -> bool:
    """Whether a gain is a guess: better alignment, of which no calibrated row showed the worth."""
    return fit.aligned_only and option.alignment > problem.alignment


def _work(problem: Problem, option: Problem, question: str) -> float:
    """What a time ratio is multiplied by: choosing compares speeds, padding compares times."""
    return option.flops / problem.flops if question == "choose" else 1.0


def _options(
    problem: Problem, model: Model, measured: Measurements, library: str, allowance: float,
    question: str,
) -> tuple[list[Problem], pd.DataFrame]:  # fmt: skip
    """The problem first, then other sizes of it, and the model's prediction of each.

    All combinations of round sizes where they are few; else all sizes of one dimension at a time,
    and the combinations of the best of these. The measured neighbours are always options.
    """

    def predict(options: Sequence[Problem]) -> pd.DataFrame:
        return model.predict(Query.plain(options, library, measured.warm)).frame()

    choose = question == "choose"
    near = measured.near(problem, -allowance if choose else 0.0, allowance)
    sizes = sizes_near(problem, allowance, choose)
    if math.prod(map(len, sizes.values())) <= _MAX_COMBINATIONS:
        options = _ordered(problem, [*near, *_combined(problem, sizes)])
        return options, predict(options)
    # Three sizes with fifteen values each make thousands of combinations.
    one_by_one = [{d: v} for d, values in sizes.items() for v in values]
    alone = _ordered(problem, [*near, *with_sizes(problem, one_by_one)])
    first = predict(alone)
    time = dict(zip(alone, first["time_us"], strict=True))

    def best(d: str) -> set[int]:
        """The problem's size in one dimension, and the best ones if only that one changes."""
        fixed = {o: getattr(o, d) for o in alone if set(_changed(problem, o)) <= {d}}
        order = sorted(fixed, key=lambda o: time[o] / _work(problem, o, question))
        return {getattr(problem, d), *(fixed[o] for o in order[:_BEST_SIZES])}

    combined = _combined(problem, {d: sorted(best(d)) for d in sizes})
    rest = [option for option in combined if option not in time]
    if not rest:
        return alone, first
    return [*alone, *rest], pd.concat([first, predict(rest)], ignore_index=True)


def _changed(problem: Problem, option: Problem) -> list[str]:
    """The dimensions in which an option differs."""
    return [d for d in dimensions(problem) if getattr(problem, d) != getattr(option, d)]


def _change(problem: Problem, option: Problem) -> str:
    """``N 50257 → 50304``."""
    changed = _changed(problem, option)
    return ", ".join(f"{d.upper()} {getattr(problem, d)} → {getattr(option, d)}" for d in changed)


def _combined(problem: Problem, sizes: Mapping[str, Sequence[int]]) -> Iterator[Problem]:
    products = itertools.product(*sizes.values())
    return with_sizes(problem, [dict(zip(sizes, values, strict=True)) for values in products])


def _ordered(problem: Problem, options: Sequence[Problem]) -> list[Problem]:
    """The problem first, then the options by FLOPs, without duplicates."""
    unique = {problem, *options}
    return sorted(unique, key=lambda option: (option != problem, option.flops, option.spec()))


def _error(
    problem: Problem, option: Problem, fit: Fit, spreads: tuple[float, float]
) -> tuple[float, float]:
    """The 90 % range of the error of a predicted log ratio, the problem's time over the option's.

    It was measured over pairs of which one pads the other by little (:data:`NEAR`). An option that
    is smaller in a size gets the wider side of it both ways, and one further away the range of any
    two shapes.
    """
    growth = [getattr(option, d) / getattr(problem, d) for d in dimensions(problem)]
    if max(growth) > 1 + NEAR or min(growth) < 1 / (1 + NEAR):
        return fit.ratio_range(False, spreads)
    low, high = fit.ratio_range(True, spreads)
    if min(growth) < 1:
        low, high = min(low, -high), max(high, -low)
    return low, high


def _predicted_ratio(
    before: float, after: float, error: tuple[float, float]
) -> tuple[float, float, float]:
    """Ratio and its 90 % interval from two predicted times and the error of such ratios."""
    ratio = before / after
    return ratio, ratio * math.exp(error[0]), ratio * math.exp(error[1])


def _gain(ratio: tuple[float, float, float], work: float) -> Gain:
    """The gain of a time ratio where ``work`` times as much is computed."""
    value, lo, hi = (part * work - 1 for part in ratio)
    return value, lo, hi


def _why(
    problem: Problem,
    option: Problem,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    explained: bool,
) -> str:
    """What the change does, in words; tiles and waves only where the model ``explained`` it."""
    reasons = []
    if problem.alignment < WIDE_BYTES and option.alignment > problem.alignment:
        unit = WIDE_BYTES // DTYPE_BYTES[problem.dtype]
        odd = [d.upper() for d in dimensions(problem) if getattr(problem, d) % unit]
        reasons.append(f"{' and '.join(odd)} no multiple of {unit}")
    # Numbers of waves compare only for the same tile.
    if explained and after["tile"] == before["tile"] and after["waves"] < before["waves"]:
        reasons.append(f"{after['waves']} waves instead of {before['waves']}")
    if explained and after["tile_efficiency"] > before["tile_efficiency"] + 0.02:
        reasons.append(
            f"{after['tile_efficiency']:.0%} instead of {before['tile_efficiency']:.0%} of the "
            "tiles' area useful"
        )
    if not reasons:
        return "the library is faster there; the model does not know why"
    return "; ".join(reasons)


def _best_guess(problem: Problem, option: Problem, gain: Gain | None) -> str:
    """What may be better but is not certain: to be measured before a model is changed.

    Without a gain: what misaligned sizes cost there is assumed, so that no figure is given.
    """
    change = _change(problem, option)
    if gain is None:
        return (
            f"; {change} is better aligned, which may pay: no row of misaligned sizes is known "
            "here to tell how much, so measure it"
        )
    value, lo, hi = gain
    return f"; the best guess is {change}, by {value:.1%} ({lo:+.1%} to {hi:+.1%}): measure it"


def _why_not(row: Mapping[str, Any], question: str) -> str:
    if question == "choose":
        return "no size near it computes more a second beyond its own uncertainty"
    return {
        "launch": "launch-bound: the size hardly matters",
        "memory": "memory-bound: padding only moves more bytes",
    }.get(row["limit"], "no padding is faster beyond its own uncertainty")


def advise_all(
    problems: Mapping[Problem, str], model: Model, measured: Measurements, question: str,
    allowance: float,
) -> list[Advice]:  # fmt: skip
    """Advice for each of many problems (mapped to their library), the largest gains first."""
    answers = [
        advise(p, model, measured, name, allowance, question) for p, name in problems.items()
    ]
    return sorted(answers, key=lambda a: (a.verdict == "leave it", -a.gain, a.problem.spec()))
