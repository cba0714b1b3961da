"""Combine many ratios of times into an effect, its interval, and a verdict on a claim.

A pair is two cases of one run, one *against* a piece of advice and one *following* it. The ratio of
a pair is the first case's time over the second case's time. If speeds are compared, the ratio is
multiplied by the second case's work (FLOPs or bytes) over the first case's work. A ratio above 1
means that following the advice is faster. An effect is the geometric mean of the ratios of one or
more pairs.

A claim may compare speed-ups of one dtype over another instead of speeds. Each pair then has a
*control*: the same two problems in the other dtype. The pair's ratio is divided by the ratio of its
control.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import ndtri, stdtrit

from kernels.timemodel.estimate import Array

MIN_EFFECT = 1.02
"""Smallest effect that can be significant, as a ratio. Effects closer to 1 are too small to act on,
however certain they are."""

UNCERTAIN = "the times are too uncertain to tell"

FAMILYWISE_ALPHA = 0.01
"""Largest probability, per rule, that at least one group's interval misses the true effect."""

_LEVEL = 0.05  # one minus the coverage of an effect's interval
_MAX_NO_EFFECT = 1.2  # "no effect" needs an interval that rules out a larger effect
_CLAIM_REACHED = 0.9  # share of a claimed ratio that is enough, because sources round
_MIN_SCATTER_PAIRS = 4  # with fewer pairs, the scatter says less than the measured intervals


@dataclass(frozen=True)
class Pairs:
    """Pairs of cases, as arrays with one element per case or one per pair.

    Attributes:
        log_time: logarithm of the time, per case.
        error: standard error of the log time, per case; NaN if unknown.
        against: position of the case against the advice, per pair. Pairs may share a case.
        following: position of the case that follows the advice, per pair.
        log_work: logarithm of the factor that a ratio is multiplied by, per pair.
        log_claim: logarithm of the claimed ratio, per pair; NaN if none is claimed.
        log_predicted: logarithm of the predicted ratio, per pair; NaN if none is predicted.
        control: positions of the control's two cases, the one against the advice first, as one row
            per pair; None if pairs have no control.
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
        """Sign of each case (column) in each pair's log ratio (row), as a sparse matrix."""
        signed_cases = [(1.0, self.against), (-1.0, self.following)]
        if self.control is not None:  # the pair's ratio is divided by that of the control
            signed_cases += [(-1.0, self.control[:, 0]), (1.0, self.control[:, 1])]
        signs = np.repeat([sign for sign, _ in signed_cases], len(self))
        rows = np.tile(np.arange(len(self)), len(signed_cases))
        columns = np.concatenate([cases for _, cases in signed_cases])
        return csr_array((signs, (rows, columns)), shape=(len(self), len(self.log_time)))

    @property
    def log_ratio(self) -> Array:
        """Logarithm of the ratio of each pair."""
        return self.contrast @ self.log_time + self.log_work

    def take(self, positions: NDArray[np.intp]) -> Pairs:
        """Return the pairs at the given positions, with unchanged arrays of cases."""
        return Pairs(
            log_time=self.log_time,
            error=self.error,
            against=self.against[positions],
            following=self.following[positions],
            log_work=self.log_work[positions],
            log_claim=self.log_claim[positions],
            log_predicted=self.log_predicted[positions],
            group=[self.group[i] for i in positions],
            control=None if self.control is None else self.control[positions],
        )

    def by_group(self) -> dict[str, Pairs]:
        """Return the pairs of each group by the group's name."""
        names = np.array(self.group, dtype=object)
        return {name: self.take(np.flatnonzero(names == name)) for name in dict.fromkeys(names)}


@dataclass(frozen=True)
class Effect:
    """A geometric mean of ratios, its interval, and the number of pairs."""

    value: float
    lo: float
    hi: float
    pairs: int

    @property
    def sign(self) -> int:
        """1 if following the advice is significantly faster, -1 if significantly slower, else 0."""
        if self.lo > 1 and self.value >= MIN_EFFECT:
            return 1
        if self.hi < 1 and self.value <= 1 / MIN_EFFECT:
            return -1
        return 0

    def __str__(self) -> str:
        return f"{self.value:.2f}× [{self.lo:.2f}, {self.hi:.2f}]"


def mean_effect(pairs: Pairs, level: float = _LEVEL) -> Effect:
    """Return the effect of one or more pairs, with an interval that has coverage 1 − ``level``.

    The interval is the widest of these:

    1. The interval from the measured errors of the cases, if the errors are known.
    2. The interval from the scatter of the log ratios r, assuming that errors of cases are
       independent and have the same standard deviation s. The scatter around the mean then
       estimates s² without bias: E[r'Mr] = s² tr(M Σ), where M is the centring matrix, Σ = D D',
       and D is :attr:`Pairs.contrast`. The degrees of freedom are Satterthwaite's approximation.
       If a case follows the advice in one pair and is against it in another, as in a chain of
       doubled sizes, the case's error has no effect on the mean.
    3. The interval of a mean of independent ratios. It is needed because true differences between
       the ratios of pairs affect the mean, too.
    4. If the pairs have controls: the same interval, with all ratios whose controls share the
       second case averaged into one.

    If there are fewer than four pairs, and their errors were measured, only the first interval is
    used. A single pair without measured errors has an infinite interval.
    """
    n = len(pairs)
    ratios = pairs.log_ratio
    contrast = pairs.contrast
    # The weight of each case in the mean: +1/n for each pair in which it is against the advice,
    # −1/n for each in which it follows; cases of controls have opposite signs. In a chain of pairs,
    # weights of inner cases cancel.
    weights = np.asarray(contrast.sum(axis=0)).ravel() / n
    half_width = _measured_half_width(pairs.error, weights, level)
    # Few pairs show too little of the scatter. Without measured errors, only the scatter is known.
    if n >= _MIN_SCATTER_PAIRS or not np.isfinite(half_width):
        from_scatter = _scatter_half_width(ratios, contrast, weights, level)
        half_width = np.nanmax([half_width, from_scatter])
        half_width = max(half_width, _independent_half_width(ratios, level))
        if pairs.control is not None:
            # Ratios whose controls share the second case share its error, so their mean counts as
            # one ratio. The first cases of their controls differ.
            shared_means = _group_means(ratios, pairs.control[:, 1])
            half_width = max(half_width, _independent_half_width(shared_means, level))
    mean = float(ratios.mean())
    value = float(np.exp(mean))
    lo = float(np.exp(mean - half_width))
    hi = float(np.exp(mean + half_width))
    return Effect(value, lo, hi, n)


def _measured_half_width(error: Array, weights: Array, level: float) -> float:
    """Return half the width of the mean log ratio's interval, from the cases' measured errors.

    The result is NaN if a case with a nonzero weight has no measured error.
    """
    # A case whose weights cancel does not count, even if its error is unknown.
    counted_error = np.where(weights != 0, error, 0.0)
    error_of_mean = np.sqrt(np.sum((weights * counted_error) ** 2))
    return float(ndtri(1 - level / 2) * error_of_mean)


def _scatter_half_width(ratios: Array, contrast: csr_array, weights: Array, level: float) -> float:
    """Return half the width of the mean log ratio's interval, from the scatter of the ratios.

    The result is infinite if the pairs do not suffice to estimate s². :func:`mean_effect` explains
    the symbols; ``contrast`` is D.
    """
    n = len(ratios)
    # Covariance of the ratios, divided by s². Pairs that share a case are correlated.
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
    variance = float(np.sum((ratios - ratios.mean()) ** 2) / trace)  # the estimate of s²
    freedom = trace**2 / trace_of_square
    error_of_mean = np.sqrt(variance * np.sum(weights**2))
    return float(stdtrit(freedom, 1 - level / 2) * error_of_mean)


def _independent_half_width(ratios: Array, level: float) -> float:
    """Return half the interval's width for the mean of independent log ratios.

    The result is infinite if there is only one ratio.
    """
    n = len(ratios)
    if n < 2:
        return float("inf")
    return float(stdtrit(n - 1, 1 - level / 2) * ratios.std(ddof=1) / np.sqrt(n))


def _group_means(ratios: Array, keys: NDArray[np.intp]) -> Array:
    """Return the mean log ratio of each distinct key.

    If there is only one key, return the ratios themselves, because a single mean has no scatter.
    """
    _, group = np.unique(keys, return_inverse=True)
    means = np.bincount(group, ratios) / np.bincount(group)
    return means if len(means) > 1 else ratios


@dataclass(frozen=True)
class RuleFinding:
    """Verdict on a rule, with the effects that it is based on.

    Attributes:
        effect: the effect of all pairs, or that of the best group if the claim says "up to".
        claim: geometric mean of the claimed ratios of this effect's pairs; None if no ratio is
            claimed.
        best_group: name of the best group if the claim says "up to"; otherwise None.
    """

    verdict: str
    effect: Effect
    claim: float | None
    groups: Mapping[str, Effect]
    best_group: str | None = None


def find_verdict(
    pairs: Pairs, largest: bool = False, tolerance: float | None = None
) -> RuleFinding:
    """Judge a rule by the effect of all its pairs and by the effects of its groups.

    Without a ``tolerance``, the verdicts are:

    - ``holds``: following the advice is significantly faster. If a ratio was claimed, the interval
      reaches 90% of that ratio.
    - ``holds, weaker``: following the advice is significantly faster, but by less than claimed.
    - ``no longer``: following the advice is significantly slower.
    - ``no effect``: the effect is not significant, and the interval rules out a large effect.
    - ``depends: …``: groups contradict one another, or an interval is too wide to tell.

    Args:
        pairs: one or more pairs of cases that test the rule.
        largest: if True, the claim says "up to", so the effect of the best group is judged.
        tolerance: if given, the claim is that ratios *equal* the claimed ratio (1 if no number is
            claimed), within this fraction. If groups disagree, the verdict is ``depends: …``.
            Otherwise, it is ``holds`` if the effect's interval is wholly within the tolerance,
            ``holds, weaker`` if the interval is partly outside, and ``no longer`` if it is wholly
            outside.
    """
    # 1. Compute the effect of each group and of all pairs.
    by_group = pairs.by_group()
    level = FAMILYWISE_ALPHA / len(by_group)  # Bonferroni
    groups = {name: mean_effect(members, level) for name, members in by_group.items()}
    effect = mean_effect(pairs)
    # 2. Choose the effect that the claim is about, and average the claims of its pairs.
    log_claims = pairs.log_claim
    best_group = None
    if largest:
        # Take the group with the largest significant gain. If no gain is significant, take the
        # group with the largest effect.
        significant = [name for name, group in groups.items() if group.sign > 0]
        best_group = max(significant or groups, key=lambda name: groups[name].value)
        log_claims = by_group[best_group].log_claim
        effect = groups[best_group]
    claim = None if np.isnan(log_claims).all() else float(np.exp(np.nanmean(log_claims)))
    # 3. Judge the claim.
    if tolerance is not None:
        equal_to = 1.0 if claim is None else claim
        verdict = _judge_equality(effect, groups, equal_to, 1 + tolerance)
    elif largest:
        verdict = _judge_claim(effect, claim)
        # A group with a wide interval may reach the claim, although the best group does not.
        if verdict == "holds, weaker" and claim is not None:
            reach = _CLAIM_REACHED * claim
            possible = [name for name, group in groups.items() if group.hi >= reach]
            if possible:
                verdict = f"depends: {UNCERTAIN} in {_listed(possible, groups)}"
    else:
        verdict = _contradiction(groups) or _judge_claim(effect, claim)
    return RuleFinding(verdict, effect, claim, groups, best_group)


def _judge_claim(effect: Effect, claim: float | None) -> str:
    """Return the verdict on the claim that following the advice is faster."""
    if effect.sign < 0:
        return "no longer"
    if effect.sign == 0:
        is_narrow = effect.hi <= _MAX_NO_EFFECT and effect.lo >= 1 / _MAX_NO_EFFECT
        return "no effect" if is_narrow else f"depends: {UNCERTAIN}"
    if claim is None or effect.hi >= _CLAIM_REACHED * claim:
        return "holds"
    return "holds, weaker"


def _judge_equality(
    effect: Effect, groups: Mapping[str, Effect], claim: float, within: float
) -> str:
    """Return the verdict on a rule that claims a ratio of ``claim``.

    A ratio counts as equal to ``claim`` if the two differ by at most a factor of ``within``.
    """
    low = claim / within
    high = claim * within
    below = [name for name, group in groups.items() if group.hi < low]
    above = [name for name, group in groups.items() if group.lo > high]
    outside = [*below, *above]
    if (outside and len(outside) < len(groups)) or (below and above):
        return f"depends: not as claimed in {_listed(outside, groups)}"
    if effect.hi < low or effect.lo > high:
        return "no longer"
    if low <= effect.lo and effect.hi <= high:
        return "holds"
    return "holds, weaker"


def _contradiction(groups: Mapping[str, Effect]) -> str:
    """Return ``depends: …`` if groups contradict one another, else an empty string.

    Slower groups contradict faster groups. A group without a significant effect contradicts the
    faster groups if its interval lies below half of their smallest gain, on a log scale.
    """
    gaining = [name for name, group in groups.items() if group.sign > 0]
    losing = [name for name, group in groups.items() if group.sign < 0]
    if not gaining:
        return ""
    half_of_smallest = 0.5 * np.log(min(groups[name].value for name in gaining))
    not_gaining = [
        name
        for name, group in groups.items()
        if group.sign == 0 and np.log(max(group.hi, 1.0)) < half_of_smallest
    ]
    if not losing and not not_gaining:
        return ""
    phrases = [f"faster in {_listed(gaining, groups)}"]
    if not_gaining:
        phrases.append(f"no significant effect in {_listed(not_gaining, groups)}")
    if losing:
        phrases.append(f"slower in {_listed(losing, groups)}")
    return f"depends: {', '.join(phrases)}"


_MAX_LISTED = 4  # maximum number of groups that one list in a verdict names


def _listed(names: Sequence[str], groups: Mapping[str, Effect]) -> str:
    """List at most four groups, those with effects farthest from 1 first, and count the others."""
    farthest_first = sorted(names, key=lambda name: -abs(np.log(groups[name].value)))
    shown = [f"{name} ({groups[name].value:.2f}×)" for name in farthest_first[:_MAX_LISTED]]
    left_out_count = len(names) - len(shown)
    more = f" and {left_out_count} more" if left_out_count else ""
    return "; ".join(shown) + more
