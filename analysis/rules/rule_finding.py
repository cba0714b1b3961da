"""What many ratios of times say together: an effect, its interval, and a verdict on a claim.

A pair is two cases of one run, one *against* a piece of advice and one *following* it; its ratio is
the time of the first over that of the second, times the work of the second over that of the first
where more is computed. Above 1, following the advice is faster. An effect is the geometric mean of
the ratios of some pairs. Where a claim is about a gain, such as one dtype's speed-up over another,
a pair has a *control*: two more cases, whose ratio divides that of the pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.stats import norm, t

from kernels.timemodel.estimate import Array

MIN_EFFECT = 1.02
"""An effect closer to 1 than this counts as none, however certain: too small to act on."""

UNCERTAIN = "the times are too uncertain to tell"

FAMILYWISE_ALPHA = 0.01
"""Chance that any group of a rule is found to differ from the others by accident."""

_LEVEL = 0.05
_MAX_NO_EFFECT = 1.2  # "no effect" needs an interval that rules out more than this
_CLAIM_REACHED = 0.9  # of a claimed ratio: sources round
_MIN_SCATTER_PAIRS = 4  # with fewer, the scatter says less than the measured intervals


@dataclass(frozen=True)
class Pairs:
    """Pairs of cases; arrays have one element per case or one per pair.

    ``log_time`` and ``error`` (the standard error of a log time, NaN where unknown) are per case;
    all others are per pair. ``against`` and ``following`` index the cases, so that pairs may share
    one. ``log_work`` is what a ratio is multiplied by, ``log_claim`` what a source promises of the
    ratio (NaN where it gives no number), ``log_predicted`` the model's prediction of it, ``group``
    the name of its group. ``control`` has two more columns of cases, if pairs have a control.
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
        """The pairs at some positions, with the same cases."""
        return Pairs(
            self.log_time,
            self.error,
            self.against[where],
            self.following[where],
            self.log_work[where],
            self.log_claim[where],
            self.log_predicted[where],
            [self.group[i] for i in where],
            None if self.control is None else self.control[where],
        )

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
    The degrees of freedom are Satterthwaite's. That accounts for errors of cases alone, which
    cancel where one pair ends at the case at which the next begins; true differences between the
    pairs do not cancel, so the mean is also taken as one of independent ratios, and where pairs
    share a control, as one of independent controls. The measured intervals give one more width.
    The widest of all counts.
    """
    n = len(pairs)
    ratios = pairs.log_ratio
    contrast = pairs.contrast
    # The weight of each case in the mean: +1/n for each pair that it is against, −1/n for each
    # that it follows. In a chain of pairs those of the inner cases cancel.
    weights = np.asarray(contrast.sum(axis=0)).ravel() / n
    half = _measured_half_width(pairs.error, weights, level)
    # Few pairs with measured intervals are judged by these alone; without them, by the scatter.
    if n >= _MIN_SCATTER_PAIRS or not np.isfinite(half):
        half = np.nanmax([half, _scatter_half_width(ratios, contrast, weights, level)])
        half = max(half, _independent_half_width(ratios, level))
        if pairs.control is not None:
            # Ratios that share a control share its error: their mean counts as one.
            per_control = _group_means(ratios, pairs.control[:, 1])
            half = max(half, _independent_half_width(per_control, level))
    mean = float(ratios.mean())
    value, lo, hi = (float(np.exp(x)) for x in (mean, mean - half, mean + half))
    return Effect(value, lo, hi, n)


def _measured_half_width(error: Array, weights: Array, level: float) -> float:
    """Half the interval of the mean ratio, from the cases' measured errors; NaN if one is."""
    # A case whose weights cancel does not count, even if its error is unknown.
    counted = np.where(weights != 0, error, 0.0)
    return float(norm.ppf(1 - level / 2) * np.sqrt(np.sum((weights * counted) ** 2)))


def _scatter_half_width(ratios: Array, contrast: csr_array, weights: Array, level: float) -> float:
    """Half the interval of the mean ratio, from the scatter of the ratios; infinite for one."""
    n = len(ratios)
    # The covariance of the ratios over s²: pairs that share a case are correlated.
    sigma = contrast @ contrast.T
    ones = np.ones(n)
    row_sums = sigma @ ones
    # With the centring matrix M = I − 11'/n: tr(M Σ), and tr(M Σ M Σ) expanded so that the dense
    # matrix M is never built.
    trace = sigma.trace() - ones @ row_sums / n
    trace_of_square = (
        (sigma * sigma).sum() - 2 * row_sums @ row_sums / n + (ones @ row_sums / n) ** 2
    )
    if n < 2 or trace <= 0 or trace_of_square <= 0:
        return float("inf")
    variance = float(np.sum((ratios - ratios.mean()) ** 2) / trace)
    freedom = trace**2 / trace_of_square
    return float(t.ppf(1 - level / 2, freedom) * np.sqrt(variance * np.sum(weights**2)))


def _independent_half_width(ratios: Array, level: float) -> float:
    """Half the interval of the mean of independent ratios; infinite for one."""
    n = len(ratios)
    if n < 2:
        return float("inf")
    return float(t.ppf(1 - level / 2, n - 1) * ratios.std(ddof=1) / np.sqrt(n))


def _group_means(ratios: Array, keys: NDArray[np.intp]) -> Array:
    """The mean ratio of each distinct key; the ratios themselves where there is only one key."""
    _, group = np.unique(keys, return_inverse=True)
    means = np.bincount(group, ratios) / np.bincount(group)
    return means if len(means) > 1 else ratios


@dataclass(frozen=True)
class RuleFinding:
    """The result for a rule: a verdict, the effect that it is about, and that of each group."""

    verdict: str
    effect: Effect
    claim: float | None
    groups: Mapping[str, Effect]


def find_verdict(
    pairs: Pairs, largest: bool = False, tolerance: float | None = None
) -> RuleFinding:
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
    level = FAMILYWISE_ALPHA / len(by_group)  # Bonferroni
    groups = {name: mean_effect(members, level) for name, members in by_group.items()}
    effect = mean_effect(pairs)
    claims = pairs.log_claim
    if largest:  # of those whose gain is beyond doubt, if there is one
        certain = [name for name, e in groups.items() if e.sign > 0] or list(groups)
        best = max(certain, key=lambda name: groups[name].value)
        claims = by_group[best].log_claim
        effect = groups[best]
    claim = None if np.isnan(claims).all() else float(np.exp(np.nanmean(claims)))
    if tolerance is not None:
        verdict = _judge_equality(effect, groups, claim or 1.0, 1 + tolerance)
    elif largest:
        verdict = _judge_claim(effect, claim)
        # Another group than the best may reach the claim, where its interval is wide enough.
        possible = [n for n, e in groups.items() if claim and e.hi >= _CLAIM_REACHED * claim]
        if verdict == "holds, weaker" and possible:
            verdict = f"depends: {_listed(possible, groups)} too uncertain to tell"
    else:
        verdict = _contradiction(groups) or _judge_claim(effect, claim)
    return RuleFinding(verdict, effect, claim, groups)


def _judge_claim(effect: Effect, claim: float | None) -> str:
    if effect.sign < 0:
        return "no longer"
    if effect.sign == 0:
        narrow = effect.hi <= _MAX_NO_EFFECT and effect.lo >= 1 / _MAX_NO_EFFECT
        return "no effect" if narrow else f"depends: {UNCERTAIN}"
    return "holds" if claim is None or effect.hi >= _CLAIM_REACHED * claim else "holds, weaker"


def _judge_equality(
    effect: Effect, groups: Mapping[str, Effect], claim: float, within: float
) -> str:
    low, high = claim / within, claim * within
    outside = [name for name, e in groups.items() if e.hi < low or e.lo > high]
    if outside and len(outside) < len(groups):
        return f"depends: not {_listed(outside, groups)}"
    if effect.hi < low or effect.lo > high:
        return "no longer"
    if low <= effect.lo and effect.hi <= high:
        return "holds"
    return "holds, weaker"


def _contradiction(groups: Mapping[str, Effect]) -> str:
    """``depends: …`` where groups contradict one another beyond doubt; empty where they do not.

    A group contradicts those that gain where it is slower, or where its interval ends below half
    of the smallest gain among them. A group of few pairs has a wide interval and does neither.
    """
    gaining = [name for name, e in groups.items() if e.sign > 0]
    losing = [name for name, e in groups.items() if e.sign < 0]
    if not gaining:
        return ""
    smallest = min(groups[name].value for name in gaining)
    not_gaining = [
        name
        for name, e in groups.items()
        if e.sign == 0 and np.log(max(e.hi, 1.0)) < 0.5 * np.log(smallest)
    ]
    if not losing and not not_gaining:
        return ""
    parts = [f"faster in {_listed(gaining, groups)}"]
    if not_gaining:
        parts.append(f"nothing sure in {_listed(not_gaining, groups)}")
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
