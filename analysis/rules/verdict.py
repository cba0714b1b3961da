"""What many ratios of times say together: an effect, its interval, and a verdict on a claim.

A pair is two cases of one run, one *against* a piece of advice and one *following* it; its ratio is
the time of the first over that of the second, times the work of the second over that of the first
where more is computed. Above 1, following the advice is faster. An effect is the geometric mean of
the ratios of some pairs. Where a claim is about a gain, such as one dtype's speed-up over another,
a pair has a *control*: two more cases, whose ratio divides its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.stats import norm, t

from kernels.estimate import Array

MIN_EFFECT = 1.02
"""An effect closer to 1 than this is none, however certain: nobody changes a model for it."""

UNCERTAIN = "the times are too uncertain to tell"

FAMILYWISE_ALPHA = 0.01
"""Chance that any group of a rule is found to differ from the others by accident."""

_LEVEL = 0.05
_TELLING = 1.2  # an interval that leaves room for more than this does not say that there is nothing
_REACHED = 0.9  # of a claimed ratio: sources round
_SCATTER_FROM = 4  # pairs: of fewer, the scatter says less than the measured intervals


@dataclass(frozen=True)
class Pairs:
    """Pairs of cases; arrays have an element a case or a pair.

    ``log_time`` and ``error`` (the standard error of a log time, NaN where nobody knows) are of the
    cases; ``against`` and ``following`` index them, so that pairs may share a case. ``log_work``
    is what a ratio is multiplied by, ``log_claim`` what a source promises of the ratio (NaN where
    it gives no number), ``log_predicted`` what the model says of it, ``group`` what a pair is of.
    ``control`` are two more columns of cases, if pairs have a control.
    """

    log_time: Array
    error: Array
    against: NDArray[np.intp]
    following: NDArray[np.intp]
    log_work: Array
    log_claim: Array
    log_predicted: Array
    group: Sequence[str]
    control: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self.against)

    @property
    def contrast(self) -> csr_array:
        """The sign with which each case (columns) counts in each pair (rows)."""
        signed = [(1.0, self.against), (-1.0, self.following)]
        if self.control is not None:
            signed += [(-1.0, self.control[:, 0]), (1.0, self.control[:, 1])]
        signs = np.repeat([sign for sign, _ in signed], len(self))
        rows = np.tile(np.arange(len(self)), len(signed))
        columns = np.concatenate([cases for _, cases in signed])
        return csr_array((signs, (rows, columns)), shape=(len(self), len(self.log_time)))

    @property
    def log_ratio(self) -> Array:
        """Of each pair."""
        return self.contrast @ self.log_time + self.log_work

    def take(self, where: NDArray[np.intp]) -> Pairs:
        """Some of the pairs, of the same cases."""
        return Pairs(
            self.log_time, self.error, self.against[where], self.following[where],
            self.log_work[where], self.log_claim[where], self.log_predicted[where],
            [self.group[i] for i in where], None if self.control is None else self.control[where],
        )  # fmt: skip

    def by_group(self) -> dict[str, Pairs]:
        """The pairs of each group, in order of appearance."""
        names = np.array(self.group, dtype=object)
        return {name: self.take(np.flatnonzero(names == name)) for name in dict.fromkeys(names)}


@dataclass(frozen=True)
class Effect:
    """A geometric mean of ratios, its interval, and how many pairs it is of."""

    value: float
    lo: float
    hi: float
    pairs: int

    @property
    def sign(self) -> int:
        """1 if following the advice is faster beyond doubt, -1 if slower, 0 if neither."""
        if self.lo > 1 and self.value >= MIN_EFFECT:
            return 1
        return -1 if self.hi < 1 and self.value <= 1 / MIN_EFFECT else 0

    def __str__(self) -> str:
        return f"{self.value:.2f}× [{self.lo:.2f}, {self.hi:.2f}]"


def mean_effect(pairs: Pairs, level: float = _LEVEL) -> Effect:
    """The effect of some pairs with its interval of coverage 1 − ``level``.

    The mean is a weighted sum of log times, in which a case that many pairs share weighs as often.
    With independent errors of equal size s, the scatter of the ratios around their mean estimates
    s² without bias: E[r'Mr] = s² tr(M Σ), where Σ = D D' and D is the contrast of each pair.
    The degrees of freedom are Satterthwaite's. That knows errors of cases alone, which cancel
    where one pair ends as the next begins; true differences between the pairs do not, so the mean
    is also taken as one of independent ratios, and where pairs share a control, as one of
    independent controls. Where the measured intervals say that it is less certain still, they hold:
    the widest counts.
    """
    n = len(pairs)
    ratios = pairs.log_ratio
    contrast = pairs.contrast
    weights = np.asarray(contrast.sum(axis=0)).ravel() / n
    known = np.where(weights != 0, pairs.error, 0.0)
    half = norm.ppf(1 - level / 2) * float(np.sqrt(np.sum((weights * known) ** 2)))
    if n >= _SCATTER_FROM or not np.isfinite(half):
        half = np.nanmax([half, _scatter(ratios, contrast, weights, level)])
        half = max(half, _independent(ratios, level))
        if pairs.control is not None:
            half = max(half, _independent(_means(ratios, pairs.control[:, 1]), level))
    mean = float(ratios.mean())
    value, lo, hi = (float(np.exp(x)) for x in (mean, mean - half, mean + half))
    return Effect(value, lo, hi, n)


def _scatter(ratios: Array, contrast: csr_array, weights: Array, level: float) -> float:
    """Half the interval of the mean ratio, from the scatter of the ratios; infinite for one."""
    n = len(ratios)
    sigma = contrast @ contrast.T
    ones = np.ones(n)
    across = sigma @ ones
    traced = sigma.trace() - ones @ across / n
    squared = (sigma * sigma).sum() - 2 * across @ across / n + (ones @ across / n) ** 2
    if n < 2 or traced <= 0 or squared <= 0:
        return float("inf")
    variance = float(np.sum((ratios - ratios.mean()) ** 2) / traced)
    freedom = traced**2 / squared
    return float(t.ppf(1 - level / 2, freedom) * np.sqrt(variance * np.sum(weights**2)))


def _independent(ratios: Array, level: float) -> float:
    """Half the interval of the mean of independent ratios; infinite for one."""
    n = len(ratios)
    if n < 2:
        return float("inf")
    return float(t.ppf(1 - level / 2, n - 1) * ratios.std(ddof=1) / np.sqrt(n))


def _means(ratios: Array, of: NDArray[np.intp]) -> Array:
    """The mean ratio of each value of ``of``; the ratios themselves where there is but one."""
    _, which = np.unique(of, return_inverse=True)
    means = np.bincount(which, ratios) / np.bincount(which)
    return means if len(means) > 1 else ratios


@dataclass(frozen=True)
class Finding:
    """What was found of a rule: a verdict, the effect that it is about, and that of each group."""

    verdict: str
    effect: Effect
    claim: float | None
    groups: Mapping[str, Effect]


def find_verdict(pairs: Pairs, largest: bool = False, tolerance: float | None = None) -> Finding:
    """The verdict on a rule, from intervals alone.

    ``holds``: following the advice is faster, by what was claimed if a number was. ``holds,
    weaker``: faster, by less than claimed. ``no longer``: it is slower. ``no effect``: neither, and
    the interval leaves no room for much. ``depends: …``: one of these in some groups and another
    in others, or the interval is too wide to tell.

    Args:
        pairs: the evidence.
        largest: the claim is "up to": it is the best group's effect that counts.
        tolerance: the claim is that ratios *are* what is claimed, 1 where no number is, within
            this much: it ``holds`` where the whole interval does, is ``weaker`` where its middle
            does.
    """
    by_group = pairs.by_group()
    level = FAMILYWISE_ALPHA / len(by_group)
    groups = {name: mean_effect(members, level) for name, members in by_group.items()}
    whole = mean_effect(pairs)
    claims = pairs.log_claim
    if largest:  # of those whose gain is beyond doubt, if there is one
        sure = [name for name, e in groups.items() if e.sign > 0] or list(groups)
        best = max(sure, key=lambda name: groups[name].value)
        claims = by_group[best].log_claim
        whole = groups[best]
    claim = None if np.isnan(claims).all() else float(np.exp(np.nanmean(claims)))
    if tolerance is not None:
        verdict = _equal(whole, groups, claim or 1.0, 1 + tolerance)
    elif largest:
        verdict = _against_claim(whole, claim)
        open_ = [name for name, e in groups.items() if claim and e.hi >= _REACHED * claim]
        if verdict == "holds, weaker" and open_:
            verdict = f"depends: {_listed(open_, groups)} too uncertain to tell"
    else:
        verdict = _differing(groups) or _against_claim(whole, claim)
    return Finding(verdict, whole, claim, groups)


def _against_claim(found: Effect, claim: float | None) -> str:
    if found.sign < 0:
        return "no longer"
    if found.sign == 0:
        tells = found.hi <= _TELLING and found.lo >= 1 / _TELLING
        return "no effect" if tells else f"depends: {UNCERTAIN}"
    return "holds" if claim is None or found.hi >= _REACHED * claim else "holds, weaker"


def _equal(found: Effect, groups: Mapping[str, Effect], claim: float, within: float) -> str:
    low, high = claim / within, claim * within
    outside = [name for name, e in groups.items() if e.hi < low or e.lo > high]
    if outside and len(outside) < len(groups):
        return f"depends: not {_listed(outside, groups)}"
    if found.hi < low or found.lo > high:
        return "no longer"
    if low <= found.lo and found.hi <= high:
        return "holds"
    return "holds, weaker"


def _differing(groups: Mapping[str, Effect]) -> str:
    """``depends: …`` where groups contradict one another beyond doubt; empty where they do not.

    A group contradicts where it is slower, or where its interval leaves less than half of what the
    others gain: few pairs are no contradiction.
    """
    gaining = [name for name, e in groups.items() if e.sign > 0]
    losing = [name for name, e in groups.items() if e.sign < 0]
    if not gaining:
        return ""
    least = min(groups[name].value for name in gaining)
    nothing = [
        name
        for name, e in groups.items()
        if e.sign == 0 and np.log(max(e.hi, 1.0)) < 0.5 * np.log(least)
    ]
    if not losing and not nothing:
        return ""
    parts = [f"faster in {_listed(gaining, groups)}"]
    if nothing:
        parts.append(f"nothing sure in {_listed(nothing, groups)}")
    if losing:
        parts.append(f"slower in {_listed(losing, groups)}")
    return f"depends: {', '.join(parts)}"


_MAX_LISTED = 4


def _listed(names: Sequence[str], groups: Mapping[str, Effect]) -> str:
    """The names with their effects, the largest first."""
    order = sorted(names, key=lambda name: -abs(np.log(groups[name].value)))
    shown = [f"{name} ({groups[name].value:.2f}×)" for name in order[:_MAX_LISTED]]
    rest = len(order) - len(shown)
    return "; ".join(shown) + (f" and {rest} more" if rest else "")
