"""Decide whether a code change may be merged: is any case slower by a threshold or more?

The answer is one of three:

- ``fail``: a case, or all cases together, became significantly slower, and the slowdown is at least
  the threshold. A slowdown fails only if each version has at least three processes. With any number
  of processes, the answer is also ``fail`` if a case is lost: it has a time in the old results but
  none in the new ones, and the new results state the reason.
- ``pass``: no case is lost, and the *common shift*, which is the change that all cases share, is
  below the threshold if it was estimated. Each case meets one of two conditions: its slowdown is
  shown to be below the threshold, or it is not significantly slower although a slowdown as large as
  the threshold would have been detected with 80% probability.
- ``cannot tell``: the conditions of the other two answers are not met.

*Significantly* means that the null hypothesis "this case did not become slower than the others" is
rejected by a one-sided test at a false-discovery rate of 4% over all cases (Benjamini and
Hochberg). The common shift is tested separately, with a false-alarm rate of 1%, so an unchanged
program fails in at most 5% of runs. The null hypothesis is "not slower", because "slower by less
than the threshold" would be nearly useless: the test would then detect a slowdown of exactly the
threshold with at most 4% probability. A case that is significantly slower, but by less than the
threshold, is unclear if its true slowdown may still reach the threshold.

The *detectable change* is the smallest slowdown of a single case that further runs like these would
detect with 80% probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from analysis.comparing.changes import CaseChanges, CommonShift, Reals
from analysis.units import microseconds, signed_percent
from kernels.common.counts import counted

PASS, FAIL, CANNOT_TELL = "pass", "fail", "cannot tell"
EXIT_CODES = {PASS: 0, FAIL: 1, CANNOT_TELL: 3}

SLOWER, BELOW, UNCLEAR = "slower", "below", "unclear"
"""Verdicts on a case or on the common shift: slower by the threshold or more, below the threshold,
or unclear."""

LARGEST_LOG = 700.0
"""Upper limit of logarithms whose exponentials have to fit into a double."""

POWER = 0.8
"""Probability of detecting a slowdown that is as large as the detectable change."""
_FALSE_CASES = 0.04
"""False-discovery rate over the tests of all cases."""
_FALSE_SHIFT = 0.01
"""Probability, in each direction, of calling a common shift significant if no speed changed."""
_FALSE_BELOW = 0.05
"""Probability that the upper confidence limit of a slowdown is below the threshold if the true
slowdown equals the threshold."""
_MOST_ROUNDS = 10
"""Largest recommended number of rounds, as a multiple of the number that was timed."""
_MOST_PROCESSES = 100
"""Largest recommended number of further processes of each version."""
_LEAST_PROCESSES = 3
"""Minimum number of processes of each version for a slowdown to fail the gate.

A case may run much slower in one process than in the next, although all samples within each process
agree. With one or two processes of each version, a case is therefore called slower in some
comparisons of unchanged versions. With three processes of each version, this happened in none of 20
comparisons (``suspects`` in results/accuracy/gate-here.jsonl)."""
_MORE_PROCESSES = (
    "Time at least three processes of each version, alternating between the versions. Put the "
    "results of each version into one folder, and compare the two folders."
)
_OUTSIDE = 0.025
"""Probability on each side of a 95% interval."""
_MAX_LISTED = 20
"""Maximum number of cases that the text lists under each heading."""
_LARGEST = math.log(11)
"""Largest detectable change that is reported (1,000%), as the logarithm of a ratio. Runs that can
detect only larger changes show nothing useful."""


@dataclass(frozen=True)
class GateResult:
    """Answer of the gate; arrays have one element for each case.

    Attributes:
        verdict: :data:`PASS`, :data:`FAIL` or :data:`CANNOT_TELL`.
        threshold: slowdown to look for, as a fraction.
        changes: the estimated changes that the answer is based on.
        counted: part of the common shift that each case's ratio includes, as a logarithm: all of
            the shift if it is significant, otherwise 0.
        shift_verdict: :data:`SLOWER`, :data:`BELOW` or :data:`UNCLEAR` for the common shift; empty
            if no common shift was estimated.
        case_verdicts: :data:`SLOWER`, :data:`BELOW` or :data:`UNCLEAR` for each case.
        is_significant: whether each case slowed down significantly more than the others, by any
            amount.
        p: probability that an unchanged case has at least the measured deviation; NaN if the error
            of the deviation is unknown.
        detectable: the detectable change, as a logarithm; NaN if the error is unknown.
        more_rounds: further rounds per process that would make the threshold detectable; NaN if
            no such number is known, or if it is too large to recommend.
        more_processes: further processes on each side that would make the threshold detectable
            with the same number of rounds; NaN if no such number is known, or if it is too large
            to recommend.
        lost: reason why each lost case has no time in the new results, by the case's name.
    """

    verdict: str
    threshold: float
    changes: CaseChanges
    counted: float
    shift_verdict: str
    case_verdicts: tuple[str, ...]
    is_significant: np.ndarray
    p: Reals
    detectable: Reals
    more_rounds: Reals
    more_processes: Reals
    lost: dict[str, str]

    @property
    def log_ratio(self) -> Reals:
        """Log ratio of each case, new over old, including :attr:`counted`."""
        # Absurd times may have a ratio that is too large for a double.
        return np.minimum(self.changes.deviation + self.counted, LARGEST_LOG)

    def interval(self) -> tuple[Reals, Reals]:
        """Return the ends of each ratio's 95% interval, new over old; unknown ends are NaN."""
        half_width = stats.t.isf(_OUTSIDE, self.changes.freedom) * self.changes.error
        # With few degrees of freedom, the upper end may be too large for a double.
        log_hi = np.minimum(self.log_ratio + half_width, LARGEST_LOG)
        return np.exp(self.log_ratio - half_width), np.exp(log_hi)

    def count(self, verdict: str) -> int:
        """Return the number of cases with the given verdict."""
        return self.case_verdicts.count(verdict)

    def has(self, verdict: str) -> np.ndarray:
        """Return a mask of the cases with the given verdict."""
        return np.array(self.case_verdicts) == verdict

    @property
    def suspects(self) -> np.ndarray:
        """Mask of the significantly slower cases whose verdict is unclear.

        The mask is all False if each version has at least three processes.
        """
        return self.is_significant & self.has(UNCLEAR) & (not _are_enough(self.changes.processes))


def judge_changes(
    changes: CaseChanges, threshold: float, lost: dict[str, str] | None = None
) -> GateResult:
    """Judge the change of every case, and give one answer for all cases.

    Args:
        changes: estimates of at least one case.
        threshold: slowdown to look for, as a fraction above 0.
        lost: reason why each lost case has no time in the new results, by the case's name; None if
            no case is lost.
    """
    limit = math.log1p(threshold)
    are_enough = _are_enough(changes.processes)
    shift_verdict, counted_shift = judge_shift(changes.shift, limit)
    if shift_verdict == SLOWER and not are_enough:
        shift_verdict = UNCLEAR
    error, freedom = changes.error, changes.freedom
    # 1. Find the cases that are significantly slower than the others. The error of a case may be 0,
    #    so a tiny number takes its place in the division.
    p = stats.t.sf(changes.deviation / np.maximum(error, 1e-300), freedom)
    has_error = np.isfinite(error)
    is_significant = np.zeros(len(p), dtype=bool)
    if has_error.any():
        adjusted = stats.false_discovery_control(np.where(has_error, p, 1.0))
        is_significant = has_error & (adjusted <= _FALSE_CASES)
    # 2. Find those of them whose ratio reaches the threshold, and the cases that are below it.
    detectable = _detectable_in_errors(freedom, _level_of_one_case(changes)) * error
    log_ratio = changes.deviation + counted_shift
    # The counted shift is a part of each slowdown; this deviation is the rest of the threshold.
    deviation_limit = limit - counted_shift
    highest = log_ratio + stats.t.isf(_FALSE_BELOW, freedom) * error
    with np.errstate(invalid="ignore"):
        is_slower = is_significant & (log_ratio >= limit) & are_enough
        is_below = (highest < limit) | (~is_significant & (detectable <= deviation_limit))
    verdicts = np.select([is_slower, is_below], [SLOWER, BELOW], UNCLEAR).tolist()
    # 3. Combine the verdicts on the cases and on the shift.
    lost = lost or {}
    if is_slower.any() or shift_verdict == SLOWER or lost:
        verdict = FAIL
    elif is_below.all() and shift_verdict != UNCLEAR:
        verdict = PASS
    else:
        verdict = CANNOT_TELL
    return GateResult(
        verdict=verdict,
        threshold=threshold,
        changes=changes,
        counted=counted_shift,
        shift_verdict=shift_verdict,
        case_verdicts=tuple(verdicts),
        is_significant=is_significant,
        p=p,
        detectable=detectable,
        more_rounds=_more_rounds(changes, max(deviation_limit, 0.0)),
        more_processes=_more_processes(changes, max(deviation_limit, 0.0)),
        lost=lost,
    )


def _are_enough(processes: tuple[int, int]) -> bool:
    return min(processes) >= _LEAST_PROCESSES


def judge_shift(shift: CommonShift | None, limit: float) -> tuple[str, float]:
    """Return the verdict on the common shift, and the part of the shift that log ratios include.

    If the shift is not significant, it may merely be a difference between runs, and no ratio
    includes it. If no shift was estimated, the verdict is an empty string, and the part is 0.
    ``limit`` is the threshold, as the logarithm of a ratio.
    """
    if shift is None:
        return "", 0.0
    reaches_limit = shift.log >= limit
    if not math.isnan(shift.error):
        critical = stats.t.isf(_FALSE_SHIFT, shift.freedom) * shift.error
        if abs(shift.log) > critical:
            return (SLOWER if reaches_limit else BELOW), shift.log
    return (UNCLEAR if reaches_limit else BELOW), 0.0


def _level_of_one_case(changes: CaseChanges) -> float:
    """Return the largest p value at which a case counts as slower, if it is the only such case.

    The procedure of Benjamini and Hochberg compares the smallest p value with the false-discovery
    rate divided by the number of cases.
    """
    return _FALSE_CASES / len(changes.names)


def _detectable_in_errors(freedom: Any, probability: float) -> Any:
    """Return the detectable change as a multiple of the standard error.

    ``probability`` is the test's probability of calling an unchanged case slower. ``freedom`` has
    the degrees of freedom of the standard error, as a number or as an array.

    A change of ``k`` estimated standard errors is found in a new run if the new run's test
    statistic exceeds the critical value ``t``. The unit of ``k`` is the standard error of this run.
    The standard errors of this run and of the new run are both estimates with a relative variance
    of about ``1 / (2 freedom)``. The distance of the statistic from ``t`` is then roughly normal,
    with the variance ``1 + (k² + t²) / (2 freedom)``. For a power of 80%, the equation ``k - t = q
    sqrt(1 + (k² + t²) / (2 freedom))`` is solved for ``k``. The quantile ``q`` comes from Student's
    t distribution, because the estimates are not quite normal.
    """
    t = stats.t.isf(probability, freedom)
    q = stats.t.ppf(POWER, freedom)
    # Squaring both sides gives a quadratic equation in k. With s = 1 - q² / (2 freedom), its larger
    # solution is k = (t + sqrt(t² (1 - s²) + s q²)) / s.
    s = 1 - q**2 / (2 * np.maximum(freedom, 1.0))
    return (t + np.sqrt(t**2 * (1 - s**2) + s * q**2)) / s


def _more_rounds(changes: CaseChanges, limit: float) -> Reals:
    """Return :attr:`GateResult.more_rounds` for a deviation of ``limit`` (a logarithm)."""
    # A deviation of ``limit`` is detectable if the standard error is at most ``largest_error``.
    # More rounds reduce only the variance within processes, so the variance between processes is
    # subtracted.
    largest_error = limit / _detectable_in_errors(changes.freedom, _level_of_one_case(changes))
    allowed_within = largest_error**2 - changes.between
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = changes.within / allowed_within
        helps = (allowed_within > 0) & (factor <= _MOST_ROUNDS)
        more = np.ceil(np.maximum(factor - 1, 0) * changes.rounds)
    return np.where(helps, more, np.nan)


def _more_processes(changes: CaseChanges, limit: float) -> Reals:
    """Return :attr:`GateResult.more_processes` for a deviation of ``limit`` (a logarithm)."""
    probability = _level_of_one_case(changes)
    sizes = changes.processes
    least = max(0, _LEAST_PROCESSES - min(sizes))
    # Variance of a single process; the variance of a difference of means falls with 1/old + 1/new.
    variance = (changes.within + changes.between) / sum(1 / size for size in sizes)
    more = np.full(len(changes.names), np.nan)
    # Count down, so that the smallest sufficient number is the one that remains.
    for extra in range(_MOST_PROCESSES, least - 1, -1):
        larger_sizes = [size + extra for size in sizes]
        # Both versions get the extra processes, and each process adds one degree of freedom.
        freedom = changes.freedom + 2 * extra
        error = np.sqrt(variance * sum(1 / size for size in larger_sizes))
        with np.errstate(invalid="ignore"):
            detectable = _detectable_in_errors(freedom, probability) * error
            more = np.where(detectable <= limit, extra, more)
    return more


# --- Words ----------------------------------------------------------------------------------------


def gate_json(result: GateResult) -> dict[str, Any]:
    """Return the whole result for JSON. Slowdowns are fractions, and ratios are new over old.

    A detectable change is None if it is unknown or over 1,000%. At the top level, ``detectable``
    is the largest detectable change of any case, or None if it is None for any case. The top-level
    ``more_rounds`` and ``more_processes`` are the largest values of the unclear cases. They are 0
    if no case is unclear, and None if any unclear case has no value.
    """
    changes, shift = result.changes, result.changes.shift
    unclear = result.has(UNCLEAR)
    lo, hi = result.interval()
    shift_json = None
    if shift is not None:
        shift_json = {
            "ratio": math.exp(shift.log),
            "detectable": _change(_detectable_shift(shift)),
            "counts": result.counted != 0,
            "verdict": result.shift_verdict,
        }
    return {
        "verdict": result.verdict,
        "threshold": result.threshold,
        "detectable": _change(_largest(result.detectable)),
        "detectable_median": _change(_middle(result.detectable)),
        "processes": list(changes.processes),
        "more_rounds": _whole(_largest(result.more_rounds[unclear])),
        "more_processes": _whole(_largest(result.more_processes[unclear])),
        "counts": {verdict: result.count(verdict) for verdict in (SLOWER, BELOW, UNCLEAR)},
        "shift": shift_json,
        "lost": [{"name": name, "reason": reason} for name, reason in result.lost.items()],
        "cases": [
            {
                "name": name,
                "old_us": math.exp(changes.old[i]) * 1e6,
                "new_us": math.exp(changes.new[i]) * 1e6,
                "ratio": math.exp(result.log_ratio[i]),
                "ratio_lo": _number(lo[i]),
                "ratio_hi": _number(hi[i]),
                "p": _number(result.p[i]),
                "found": bool(result.is_significant[i]),
                "verdict": result.case_verdicts[i],
                "detectable": _change(result.detectable[i]),
                "more_rounds": _whole(result.more_rounds[i]),
                "more_processes": _whole(result.more_processes[i]),
            }
            for i, name in enumerate(changes.names)
        ],
    }


def gate_text(result: GateResult) -> str:
    """Return the answer as text for people, with the cases to check."""
    changes = result.changes
    cases = counted(len(changes.names), "case")
    threshold = _percent(math.log1p(result.threshold))
    old, new = changes.processes
    lines = [
        f"{result.verdict}: {result.count(SLOWER):,} of {cases} slower by {threshold} or more",
        f"other cases: {result.count(BELOW):,} below the threshold, "
        f"{result.count(UNCLEAR):,} unclear",
        f"processes: {old} old, {new} new",
        _detectable_sentence(result),
    ]
    if changes.shift is not None:
        lines.append(_shift_sentence(result, changes.shift))
    suspects, unclear = result.suspects, result.has(UNCLEAR)
    detectable = np.nan_to_num(result.detectable, nan=np.inf)
    lines += _listed(result, result.has(SLOWER), f"slower by {threshold} or more", result.log_ratio)
    lines += _listed(
        result,
        suspects,
        "slower, but timed in fewer than three processes of a version",
        result.log_ratio,
    )
    lines += _listed(result, unclear & ~suspects, "unclear", detectable)
    if result.lost:
        lines += ["", f"no longer timed: {len(result.lost):,}"]
        lines += [f"  {name} ({why})" for name, why in list(result.lost.items())[:_MAX_LISTED]]
        if len(result.lost) > _MAX_LISTED:
            lines.append(_count_of_unlisted(len(result.lost)))
    if result.verdict == CANNOT_TELL:
        lines += ["", *_next_steps(result)]
    return "\n".join(lines)


def _detectable_sentence(result: GateResult) -> str:
    largest = _largest(result.detectable)
    slowdowns = "unknown"
    if not math.isnan(largest):
        middle = _middle(result.detectable)
        slowdowns = f"{_percent(middle)} (median of the cases), {_percent(largest)} (worst case)"
    return f"smallest slowdown that is found with 80% probability: {slowdowns}"


def _shift_sentence(result: GateResult, shift: CommonShift) -> str:
    text = f"common shift of all cases: {signed_percent(math.expm1(shift.log))}"
    if result.counted:
        return (
            f"{text}, which is larger than the noise between runs, so the ratio of each case "
            "includes it"
        )
    if math.isnan(shift.error):
        return (
            f"{text}; one process of a version cannot show whether the program or the machine is "
            "the cause, so the ratio of each case leaves the shift out"
        )
    return (
        f"{text}, which is within the noise between runs, so the ratio of each case leaves it out; "
        f"the smallest detectable shift is {_percent(_detectable_shift(shift))}"
    )


def _listed(result: GateResult, mask: np.ndarray, title: str, sort_values: Reals) -> list[str]:
    """Return the lines that list the cases in ``mask``, sorted by their ``sort_values``.

    The case with the largest value comes first.
    """
    chosen = [i for i in np.argsort(-sort_values, kind="stable") if mask[i]]
    if not chosen:
        return []
    lo, hi = result.interval()
    lines = ["", f"{title}: {len(chosen):,}"]
    for i in chosen[:_MAX_LISTED]:
        interval = "" if math.isnan(lo[i]) else f" [{lo[i]:.3f}, {hi[i]:.3f}]"
        old = microseconds(math.exp(result.changes.old[i]) * 1e6)
        new = microseconds(math.exp(result.changes.new[i]) * 1e6)
        detectable = result.detectable[i]
        detectable_text = "" if math.isnan(detectable) else f", detectable {_percent(detectable)}"
        lines.append(
            f"  {math.exp(result.log_ratio[i]):.3f}{interval}  {old} → {new} µs{detectable_text}  "
            f"{result.changes.names[i]}"
        )
    if len(chosen) > _MAX_LISTED:
        lines.append(_count_of_unlisted(len(chosen)))
    return lines


def _count_of_unlisted(count: int) -> str:
    return f"  and {count - _MAX_LISTED:,} more (--json lists all)"


def _next_steps(result: GateResult) -> list[str]:
    """Return sentences about further measurements that could settle an unclear answer."""
    sentences: list[str] = []
    asks_for_processes = False
    # 1. Say what the unclear cases need.
    unclear = result.has(UNCLEAR)
    if np.isnan(result.detectable[unclear]).any():
        # The errors are unknown only if there is one process of each version, with few cases.
        sentences.append(
            "A single process of each version does not show how much processes differ from each "
            "other."
        )
        asks_for_processes = True
    elif result.suspects.any():
        sentences.append(
            "A process can be slower than others of the same version because it was disturbed, or "
            "because its operands are at different memory addresses."
        )
        asks_for_processes = True
    elif unclear.any():
        sentence = _step_for_cases(result, unclear)
        if sentence:
            sentences.append(sentence)
        else:
            asks_for_processes = True
    # 2. Say what the common shift needs.
    if result.shift_verdict == UNCLEAR:
        threshold = _percent(math.log1p(result.threshold))
        sentences.append(
            f"All cases together are slower by {threshold} or more, and the machine may be the "
            "cause."
        )
        if _are_enough(result.changes.processes):
            sentences.append("Measure both versions again, alternating between them.")
        else:  # with so few processes, another measurement would not show the cause either
            asks_for_processes = True
    # 3. Ask for more processes once, even if both need them.
    if asks_for_processes:
        sentences.append(_MORE_PROCESSES)
    return sentences


def _step_for_cases(result: GateResult, unclear: np.ndarray) -> str:
    """Return a sentence about the further measurements that would make the threshold detectable.

    Return an empty string if no sufficient number of rounds or processes is known and a version has
    fewer than three processes. At least one case must be unclear, and the detectable change of each
    unclear case must be known.
    """
    threshold = _percent(math.log1p(result.threshold))
    rounds = result.more_rounds[unclear]
    processes = result.more_processes[unclear]
    needs_more = rounds != 0  # also where the number of rounds is unknown
    if not needs_more.any():
        # A slowdown of the threshold is detectable, but the true slowdown may be above or below it.
        return (
            f"These runs can detect a slowdown of {threshold} in each unclear case, but they do "
            f"not show whether the true slowdown is above or below {threshold}. More processes of "
            "each version would narrow the intervals."
        )
    remedies = []
    if np.isfinite(rounds).all():
        remedies.append(f"{counted(int(rounds.max()), 'more round')} in each process")
    if np.isfinite(processes).all():
        more = counted(int(processes.max()), "more process", "more processes")
        remedies.append(f"{more} of each version")
    if remedies:
        remedy = f"add {', or '.join(remedies)}."
        if needs_more.all():
            return f"To detect a slowdown of {threshold} in every unclear case, {remedy}"
        cases = counted(int(needs_more.sum()), "unclear case")
        return f"These runs may miss a slowdown of {threshold} in {cases}. To detect it, {remedy}"
    if not _are_enough(result.changes.processes):
        return ""
    return (
        f"Not even {_MOST_PROCESSES} more processes of each version would detect a slowdown of "
        f"{threshold} in every unclear case. Give --gate a larger slowdown, or measure on a "
        "quieter machine."
    )


def _detectable_shift(shift: CommonShift) -> float:
    """Return the smallest detectable common shift, as a logarithm; NaN if its error is unknown."""
    if math.isnan(shift.error):
        return math.nan
    return float(_detectable_in_errors(shift.freedom, _FALSE_SHIFT) * shift.error)


def _largest(values: Reals) -> float:
    """Return the largest of the values, none of which is negative.

    Return NaN if any value is NaN, and 0 if ``values`` is empty.
    """
    return float(np.max(values, initial=0.0))


def _middle(values: Reals) -> float:
    return float(np.median(values))


def _percent(log: float) -> str:
    return "over 1,000%" if log > _LARGEST else f"{100 * math.expm1(log):.3g}%"


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _change(log: float) -> float | None:
    return math.expm1(log) if log <= _LARGEST else None


def _whole(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None
