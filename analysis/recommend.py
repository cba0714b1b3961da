"""Two questions about a GEMM's sizes, or the answer to leave them.

*pad*: "I need at least this; which slightly larger one takes less time?" *choose*: "I may pick
within ±15 %; which one computes most per second?"

Another shape is recommended only if it is better beyond doubt: by the measured intervals where
both shapes were measured, by the prediction less its own uncertainty where not. That uncertainty
is the one of a *ratio* of neighbouring shapes, which is smaller than that of either time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.load import problems_of
from analysis.model import NEAR, Fit, Model, Query, group_of
from kernels.config import ceil_div
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Gemm, Problem

LEAST_GAIN = 0.01
"""A gain below one percent is not worth a changed model."""

QUESTIONS = ("pad", "choose")

_MULTIPLES = (8, 16, 32, 64, 128, 256)
_SPREAD = 6  # sizes across a window, beside the nearest multiples
_DIMENSIONS = ("m", "n", "k")


@dataclass(frozen=True)
class Measured:
    """A measured time and its interval, in seconds; the interval is NaN under six samples."""

    time: float
    lo: float
    hi: float

    @property
    def width(self) -> float:
        """Of the interval; infinite where there is none."""
        return math.inf if math.isnan(self.lo) else self.hi - self.lo


class Measurements:
    """What was measured, cold and in bursts, to be asked for a problem and for its neighbours."""

    def __init__(self, times: Mapping[Problem, Mapping[str, Measured]]) -> None:
        """``times`` maps a problem to the time of each implementation that computed it."""
        self._times = times
        kinds: dict[tuple[str, str, int], list[Gemm]] = {}
        for problem in times:
            if isinstance(problem, Gemm):
                kinds.setdefault((problem.dtype, problem.layout, problem.batch), []).append(problem)
        self._kinds = {
            kind: (members, np.array([[p.m, p.n, p.k] for p in members]))
            for kind, members in kinds.items()
        }

    @property
    def problems(self) -> Iterable[Problem]:
        """Every problem that was measured."""
        return self._times

    def of(self, problem: Problem) -> Mapping[str, Measured]:
        """Time of each implementation; empty if the problem was not measured."""
        return self._times.get(problem, {})

    def near(self, problem: Gemm, less: float, more: float) -> list[Gemm]:
        """Measured GEMMs each of whose sizes is this one's, ``less`` to ``more`` larger."""
        kind = (problem.dtype, problem.layout, problem.batch)
        if kind not in self._kinds:
            return []
        members, sizes = self._kinds[kind]
        own = np.array([problem.m, problem.n, problem.k])
        near = ((sizes >= own * (1 + less)) & (sizes <= own * (1 + more))).all(axis=1)
        return [members[i] for i in np.flatnonzero(near)]

    def ratio(self, problem: Gemm, option: Gemm) -> tuple[float, float, float] | None:
        """Time of ``problem`` over that of ``option`` and its interval, each by the fastest of the
        implementations that computed both; None where no interval is known.
        """
        both = self.of(problem).keys() & self.of(option).keys()
        if not both:
            return None
        own, other = (
            min((self.of(p)[name] for name in both), key=lambda t: t.time)
            for p in (problem, option)
        )
        if math.isnan(own.lo + other.lo):
            return None
        return own.time / other.time, own.lo / other.hi, own.hi / other.lo

    def winner(self, problem: Gemm, library: str) -> str:
        """The fastest implementation, if its interval says so; else the library."""
        entry = self.of(problem)
        if library not in entry:
            return library
        name = min(entry, key=lambda key: entry[key].time)
        return name if entry[name].hi < entry[library].lo else library


@dataclass(frozen=True)
class Advice:
    """One shape's answer. Gains are fractions of :data:`QUESTIONS`' own kind: 0.12 means that the
    padded product takes 1/1.12 of the time, or that the chosen one computes 12 % more a second.

    ``measured_gain`` and its interval are None where one of the shapes was not measured.
    """

    problem: Gemm
    instead: Gemm
    verdict: str  # "pad", "choose" or "leave it"
    basis: str  # "measured" or "predicted"
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
        return ", ".join(
            f"{d.upper()} {getattr(self.problem, d)} → {getattr(self.instead, d)}"
            for d in _DIMENSIONS
            if getattr(self.problem, d) != getattr(self.instead, d)
        )

    def to_json(self) -> dict[str, Any]:
        """Flat, for JSON and CSV."""
        shapes = {"shape": self.problem.spec(), "instead": self.instead.spec()}
        rest = {k: v for k, v in asdict(self).items() if k not in ("problem", "instead")}
        return {**shapes, "change": self.change, **rest}


def advise(
    problem: Gemm, model: Model, measured: Measurements, library: str, allowance: float = 0.125,
    question: str = "pad",
) -> Advice:  # fmt: skip
    """The best other sizes of a GEMM within ``allowance`` in each dimension, or to leave it.

    Args:
        problem: what is needed at least.
        model: the machine's model.
        measured: what was measured there.
        library: the implementation that predictions are for.
        allowance: how much larger a dimension may become, as a fraction; for ``choose`` also how
            much smaller.
        question: of :data:`QUESTIONS`.
    """
    choose = question == "choose"
    options = _candidates(problem, measured, allowance, choose)
    fit = model.fit(group_of(library, problem))
    frame = model.predict(Query.plain(options, library)).frame()
    seconds = frame["time_us"].to_numpy()
    work = [option.flops / problem.flops if choose else 1.0 for option in options]
    predicted = [
        _times(_predicted_ratio(seconds[0], time, _error(problem, option, fit)), more)
        for time, option, more in zip(seconds, options, work, strict=True)
    ]
    ratios = [measured.ratio(problem, option) for option in options]
    known = [r and _times(r, more) for r, more in zip(ratios, work, strict=True)]
    # What is certain of each option's gain, by measurement where there is one.
    certain = [(known[i] or predicted[i])[1] for i in range(len(options))]
    best = max(range(1, len(options)), key=certain.__getitem__, default=0)
    if best == 0 or certain[best] < LEAST_GAIN:
        best, verdict, reason = 0, "leave it", _why_not(frame.iloc[0])
    else:
        # Tiles and waves are the reason only where they foresee a good part of the gain.
        foreseen = predicted[best][0] >= 0.5 * (known[best] or predicted[best])[0]
        why = _why(problem, options[best], frame.iloc[0], frame.iloc[best], foreseen)
        verdict, reason = question, why
    option = options[best]
    gain = known[best] if best else None
    return Advice(
        problem=problem,
        instead=option,
        verdict=verdict,
        basis="measured" if gain or (not best and any(known[1:])) else "predicted",
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


def _candidates(
    problem: Gemm, measured: Measurements, allowance: float, choose: bool
) -> list[Gemm]:
    """The problem first, then all combinations of round sizes, and the measured ones, in reach."""
    less = -allowance if choose else 0.0
    choices = []
    for name in _DIMENSIONS:
        size = getattr(problem, name)
        least, most = math.ceil(size * (1 + less)), math.floor(size * (1 + allowance))
        rounded = {int(ceil_div(size, step)) * step for step in _MULTIPLES}
        if choose:
            rounded |= {size // step * step for step in _MULTIPLES}
            coarse = _MULTIPLES[-1] * ceil_div(most - least, _SPREAD * _MULTIPLES[-1])
            step = next((s for s in _MULTIPLES if most - least <= _SPREAD * s), coarse)
            rounded |= set(range(ceil_div(least, step) * step, most + 1, step))
        choices.append(sorted({size} | {v for v in rounded if least <= v <= most and v > 0}))
    options = {replace(problem, m=m, n=n, k=k) for m, n, k in itertools.product(*choices)}
    options.update(measured.near(problem, less, allowance))
    return sorted(options, key=lambda option: (option != problem, option.flops, option.spec()))


def _error(problem: Gemm, option: Gemm, fit: Fit) -> tuple[float, float]:
    """The 90 % range of the error of a predicted log ratio, own over option's.

    It is known of pairs of which one pads the other a little. Where sizes shrink, it is taken to
    be as wide either way; further off it is that of any two shapes.
    """
    growth = [getattr(option, d) / getattr(problem, d) for d in _DIMENSIONS]
    if max(growth) > 1 + NEAR or min(growth) < 1 / (1 + NEAR):
        return fit.ratio_range(near=False)
    low, high = fit.ratio_range(near=True)
    if min(growth) < 1:
        low, high = min(low, -high), max(high, -low)
    return low, high


def _predicted_ratio(
    own: float, other: float, error: tuple[float, float]
) -> tuple[float, float, float]:
    """Ratio and its 90 % interval from two predicted times and the error of such ratios."""
    ratio = own / other
    return ratio, ratio * math.exp(error[0]), ratio * math.exp(error[1])


def _times(ratio: tuple[float, float, float], work: float) -> tuple[float, float, float]:
    """The gain of a time ratio where ``work`` times as much is computed."""
    value, lo, hi = (part * work - 1 for part in ratio)
    return value, lo, hi


def _why(
    problem: Gemm, option: Gemm, own: Mapping[str, Any], padded: Mapping[str, Any], foreseen: bool
) -> str:
    """What the padding changes, in words; no more than the model can answer for."""
    reasons = []
    if problem.alignment < WIDE_BYTES and option.alignment > problem.alignment:
        unit = WIDE_BYTES // DTYPE_BYTES[problem.dtype]
        odd = [d.upper() for d in _DIMENSIONS if getattr(problem, d) % unit]
        reasons.append(f"{' and '.join(odd)} no multiple of {unit}")
    # Waves of different tiles do not compare.
    if foreseen and padded["tile"] == own["tile"] and padded["waves"] < own["waves"]:
        reasons.append(f"{padded['waves']} waves instead of {own['waves']}")
    if foreseen and padded["tile_efficiency"] > own["tile_efficiency"] + 0.02:
        reasons.append(
            f"{padded['tile_efficiency']:.0%} instead of {own['tile_efficiency']:.0%} of the "
            "tiles' area useful"
        )
    if not reasons:
        return "the library is faster there; the model does not know why"
    return "; ".join(reasons)


def _why_not(own: Mapping[str, Any]) -> str:
    return {
        "launch": "launch-bound: the size hardly matters",
        "memory": "memory-bound: padding only moves more bytes",
    }.get(own["limit"], "no padding is faster beyond its own uncertainty")


def advise_all(problems: Mapping[Gemm, str], model: Model, measured: Measurements) -> list[Advice]:
    """Advice for each of many shapes (mapped to their library), the largest gains first."""
    answers = [advise(p, model, measured, library) for p, library in problems.items()]

    def worth(answer: Advice) -> float:
        measured_first = answer.measured_gain
        return answer.predicted_gain if measured_first is None else measured_first

    return sorted(answers, key=lambda a: (a.verdict != "pad", -worth(a), a.problem.spec()))


def read_measurements(rows: pd.DataFrame) -> Measurements:
    """The measured times of ``ok`` rows: cold and in bursts."""
    rows = rows[(rows["cache"] == "cold") & (rows["mode"] == "burst")]
    columns = (
        rows[name].to_numpy(dtype=float, na_value=np.nan) * 1e-6
        for name in ("time_us", "time_lo_us", "time_hi_us")
    )
    times: dict[Problem, dict[str, Measured]] = {}
    for problem, name, *values in zip(
        problems_of(rows), rows["implementation"], *columns, strict=True
    ):
        found = Measured(*values)
        known = times.setdefault(problem, {})
        # The same problem in two sweeps: the narrower interval stands for it.
        if name not in known or found.width < known[name].width:
            known[name] = found
    return Measurements(times)
