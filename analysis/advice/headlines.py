"""Summarise a recording in at most eight headlines, each with a number.

A function that reports a headline returns None if the recording has too few cases for the headline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.advice.findings import kind_of_change
from analysis.advice.recommend import Advice
from analysis.advice.verdict import DO_IT, EVIDENCE, LEAVE_IT, LIKELY, VERDICTS
from analysis.model.fitted import Analysis
from analysis.recordings.runs import health_lines
from analysis.slices.series import (
    LEAST_COMPARED,
    NEARLY,
    alignment_series,
    fast_from,
    fastest_gemms,
    layout_series,
    mean_alignment,
    mean_ratio,
    roofline_series,
    square_series,
)
from analysis.units import percent_range, rate
from kernels.common.counts import counted, enumerated
from kernels.problem import Problem
from sweeps.timing.statistics import median_interval

UNUSABLE_LINE = (
    "These times do not support any conclusion. Run the sweep again, on a quieter machine if "
    "possible."
)
_CHANGES = 3  # maximum number of changed shapes to report
_MOST = 8  # maximum number of headlines in a summary
_WIDE = 8  # elements: a multiple of this is aligned in every dtype but fp8
_MULTIPLES = (1, 2, 4, 8, 16)  # elements; alignments whose mean speeds are compared
_HARDLY = 0.02  # smallest mean loss of speed that is worth mentioning, as a fraction


@dataclass(frozen=True)
class Headline:
    """A statement about a recording, with the most important number in the statement.

    The meaning of ``value`` depends on ``id``:

    - ``peak``: a speed in TFLOP/s;
    - ``steady``, ``alignment`` and ``layout``: a ratio of speeds;
    - ``size``: the M of a square GEMM;
    - ``accuracy``: the median relative error of predictions;
    - ``change``: a gain as a fraction.

    The interval from ``lo`` to ``hi`` is based on 95% intervals, or on a 90% interval for a
    predicted gain. Both ends are NaN if the interval is unknown. ``count`` is the number of cases,
    pairs or sustained runs behind ``value``.
    """

    id: str
    text: str
    value: float
    lo: float
    hi: float
    count: int

    def to_json(self) -> dict[str, Any]:
        """Return a record for findings.json, with None instead of NaN."""
        record = asdict(self)
        # JSON has no NaN.
        for name in ("value", "lo", "hi"):
            if math.isnan(record[name]):
                record[name] = None
        return record


def health_of(analysis: Analysis) -> list[str]:
    """Return the first lines of a report, which say how far the times can be trusted."""
    lines = health_lines(analysis.recording, float(analysis.errors.median()))
    return [*lines, analysis.sampled] if analysis.sampled else lines


def headlines(analysis: Analysis, advice: Sequence[Advice]) -> list[Headline]:
    """Return a recording's headlines, facts before changes; [] if the recording is unusable."""
    if analysis.recording.unusable:
        return []
    possible_facts = (
        peak(analysis),
        steady(analysis),
        alignment(analysis.table),
        layout(analysis.table),
        size(analysis.table),
        accuracy(analysis),
    )
    facts = [headline for headline in possible_facts if headline is not None]
    return [*facts, *changes(advice)][:_MOST]


def peak(analysis: Analysis) -> Headline | None:
    """Report the fastest GEMM of each dtype that has enough cases.

    ``value`` is the speed of the fastest of these GEMMs. The headline also names every peak that
    was raised because a GEMM was faster than the measured peak.
    """
    plotted = roofline_series(analysis.table, analysis.recording.cache)
    fastest = fastest_gemms(plotted, analysis.recording.machine)
    if not fastest:
        return None
    sentences = []
    for gemm in fastest:
        interval = ""
        if not math.isnan(gemm.lo):
            interval = f" ({_interval_text(rate(gemm.lo), rate(gemm.hi))})"
        sentences.append(
            f"The fastest {gemm.dtype} GEMM reaches {rate(gemm.tflops)}{interval}, "
            f"{gemm.share:.0%} of the peak."
        )
    ceilings = analysis.recording.run.get("ceilings") or {}
    raised_peaks = ceilings.get("raised") or {}
    for dtype, raised in raised_peaks.items():
        sentences.append(
            f"The {dtype} peak was raised from the measured {rate(raised['from'] / 1e12)}, because "
            f"{raised['case']} was faster in two processes."
        )
    best = max(fastest, key=lambda gemm: gemm.tflops)
    return Headline(
        "peak",
        " ".join(sentences),
        best.tflops,
        best.lo,
        best.hi,
        best.cases,
    )


def steady(analysis: Analysis) -> Headline | None:
    """Report the speed of a sustained run as a share of the speed in short bursts.

    If the recording has several sustained runs, the one with the (upper) median share is reported.
    """
    entries = sorted(analysis.recording.run.get("steady") or (), key=lambda entry: entry["share"])
    if not entries:
        return None
    entry = entries[len(entries) // 2]
    share = float(entry["share"])
    lo = math.nan if entry["lo"] is None else float(entry["lo"])
    hi = math.nan if entry["hi"] is None else float(entry["hi"])
    interval = "" if math.isnan(lo) else f" ({percent_range(lo, hi)})"
    formats = {"sm_mhz": "{:,.0f} MHz", "power_w": "{:,.0f} W", "energy_j": "{:.3g} J per GEMM"}
    # A machine may lack some of the sensors.
    readings = [
        text.format(entry[name]) for name, text in formats.items() if entry[name] is not None
    ]
    sensors = f" At this speed, the sensors show {enumerated(readings)}." if readings else ""
    return Headline(
        "steady",
        f"Sustained runs of {entry['problem']} settle at {rate(entry['tflops'])}, "
        f"{share:.0%}{interval} of burst speed.{sensors} Times are burst times unless their mode "
        "is sustained.",
        share,
        lo,
        hi,
        len(entries),
    )


def alignment(table: pd.DataFrame) -> Headline | None:
    """Report the speed of sizes that are not multiples of 8, and which multiples are fast enough.

    If each dimension has enough such sizes, the dimensions are reported separately, and ``value``
    is for the slowest one.
    """
    rows = alignment_series(table)
    if rows.empty:
        return None
    misaligned = rows[rows["offset"] % _WIDE != 0]
    if len(misaligned) < LEAST_COMPARED:
        return None
    # A group is named by its dimension; if all dimensions are reported together, its name is empty.
    groups = {along.upper(): group for along, group in misaligned.groupby("along")}
    if min(map(len, groups.values())) < LEAST_COMPARED:
        groups = {"": misaligned}
    means = {name: mean_alignment(group) for name, group in groups.items()}
    speeds = {name: speed for name, (speed, _, _) in means.items()}
    slowest = min(speeds, key=lambda name: speeds[name])
    affected = rows[rows["along"] == slowest.lower()] if slowest else rows
    where = f" along {slowest}" if slowest else ""
    speed, lo, hi = means[slowest]
    others = [f"{mean:.0%} along {name}" for name, mean in speeds.items() if name != slowest]
    other_means = f" The mean is {enumerated(others)}." if others else ""
    return Headline(
        "alignment",
        f"Sizes{where} that are not multiples of {_WIDE} reach on average {speed:.0%} "
        f"({percent_range(lo, hi)}) of the speed of the next smaller round size.{other_means} "
        f"On average{where if others else ''}, {_multiples_clause(affected)}.",
        speed,
        lo,
        hi,
        len(groups[slowest]),
    )


def _multiples_clause(rows: pd.DataFrame) -> str:
    """Say in a clause which multiples are on average nearly as fast as multiples of 16.

    ``rows`` is as in :func:`_sufficient_multiple`.
    """
    sufficient = _sufficient_multiple(rows)
    *_, second_largest, largest = _MULTIPLES
    if sufficient == 1:
        return "alignment hardly matters"
    if sufficient == largest:
        return (
            f"multiples of {second_largest} are more than {_HARDLY:.0%} slower than multiples of "
            f"{largest}"
        )
    return (
        f"multiples of {sufficient} are less than {_HARDLY:.0%} slower than multiples of {largest}"
    )


def _sufficient_multiple(rows: pd.DataFrame) -> int:
    """Return the smallest number whose multiples are on average nearly as fast as multiples of 16.

    ``rows`` come from :func:`alignment_series`, and include the rows of the base sizes.
    """
    mean_log_speed = {
        multiple: float(np.log(rows.loc[rows["offset"] % multiple == 0, "relative"]).mean())
        for multiple in _MULTIPLES
    }
    # The difference of two log speeds is about the relative difference of the speeds. The largest
    # multiple always reaches this speed.
    sufficient_log_speed = mean_log_speed[_MULTIPLES[-1]] - _HARDLY
    return next(
        multiple for multiple in _MULTIPLES if mean_log_speed[multiple] >= sufficient_log_speed
    )


def layout(table: pd.DataFrame) -> Headline | None:
    """Report the speed of NHWC convolutions relative to NCHW, as a geometric mean."""
    pairs = layout_series(table)
    if len(pairs) < LEAST_COMPARED:
        return None
    mean, lo, hi = mean_ratio(pairs, "ratio")
    faster = int((pairs["ratio_lo"] > 1).sum())
    slower = int((pairs["ratio_hi"] < 1).sum())
    return Headline(
        "layout",
        f"NHWC is {mean:.2f}× ({lo:.2f}–{hi:.2f}×) as fast as NCHW (geometric mean of {len(pairs)} "
        f"pairs). It is clearly faster in {faster} pairs, and clearly slower in {slower}.",
        mean,
        lo,
        hi,
        len(pairs),
    )


def size(table: pd.DataFrame) -> Headline | None:
    """Report the size from which square GEMMs reach nearly their best speed.

    ``value`` is for the first dtype that has enough square GEMMs. If even the largest
    measured size is too slow, ``value`` is that size.
    """
    rows = square_series(table)
    fast = []  # phrases about the dtypes whose largest size is fast
    slow = []  # sentences about the other dtypes
    figures = []  # value, interval and count of the headline, for each dtype
    for dtype, group in rows.groupby("dtype", sort=False):
        if len(group) < LEAST_COMPARED:
            continue
        # The upper ends of the speeds' intervals give the lower end of the size, and vice versa.
        # A size is None if even the largest measured size is too slow.
        fast_size = fast_from(group, "tflops")
        lo = fast_from(group, "tflops_hi")
        hi = fast_from(group, "tflops_lo")
        largest = int(group["m"].max())
        if fast_size is None:
            # The upper end of the largest size's speed may be fast enough.
            doubt = "" if lo is None else ", but not significantly"
            slow.append(
                f"The largest square GEMM in {dtype} (M = {largest}) is below {NEARLY:.0%} of the "
                f"best speed{doubt}."
            )
        else:
            fast.append(f"{fast_size}{_size_interval(lo, hi)} in {dtype}")
        figures.append((fast_size or largest, lo or largest, hi or largest, len(group)))
    if not figures:
        return None
    sentences = []
    if fast:
        first, *others = fast
        sentences.append(f"Square GEMMs reach {NEARLY:.0%} of their best speed from M = {first}.")
        if others:
            sentences.append(f"This size is {enumerated(others)}.")
    sentences += slow
    value, lo_of_value, hi_of_value, count = figures[0]
    return Headline(
        "size",
        " ".join(sentences),
        value,
        lo_of_value,
        hi_of_value,
        count,
    )


def _size_interval(lo: int | None, hi: int | None) -> str:
    """Format the interval of a size, such as `` (512–1024)``; "" if both ends are equal.

    If ``hi`` is None, the text is, for example, `` (512 or more)``.
    """
    if lo == hi:
        return ""
    if hi is None:
        return f" ({lo} or more)"
    return f" ({lo}–{hi})"


def accuracy(analysis: Analysis) -> Headline | None:
    """Report prediction errors on held-out cases, and the machine's drift if it is certain."""
    errors = analysis.errors.dropna()
    interval = median_interval(errors.tolist())
    if len(errors) < LEAST_COMPARED or interval is None:
        return None
    lo, hi = interval
    canary = analysis.recording.run.get("canary")
    drift = ""
    if canary and canary.get("certain"):
        # The drift is the relative change of the canary GEMM's time.
        direction = "slower" if canary["drift"] > 0 else "faster"
        drift = f" The machine became {abs(canary['drift']):.1%} {direction} during the run."
    median = float(errors.median())
    return Headline(
        "accuracy",
        f"Predictions of {len(errors):,} held-out cases: median error {median:.1%} "
        f"({100 * lo:.1f}–{hi:.1%}), 95th percentile {errors.quantile(0.95):.0%}.{drift}",
        median,
        lo,
        hi,
        len(errors),
    )


def changes(advice: Sequence[Advice]) -> list[Headline]:
    """Report the best changes, at most three, each of a different shape and of a different kind."""
    changing = [answer for answer in advice if answer.verdict != LEAVE_IT]
    best_changes: list[Advice] = []
    shapes: set[Problem] = set()
    kinds: set[tuple[object, ...]] = set()
    for answer in sorted(changing, key=_sort_key, reverse=True):
        kind = kind_of_change(answer)
        # The pad query and the choose query of one shape usually lead to similar changes.
        if answer.problem not in shapes and kind not in kinds:
            best_changes.append(answer)
            shapes.add(answer.problem)
            kinds.add(kind)
    reported = []
    for best in best_changes[:_CHANGES]:
        action = f"with {best.change}" if best.changed else f"computed by {best.implementation}"
        per_flop = " per FLOP" if best.question == "choose" else ""
        gain = best.gain
        reported.append(
            Headline(
                "change",
                f"{_verdict_and_evidence(best)}: {best.problem} {action} gains "
                f"{gain.value:.0%}{per_flop} ({percent_range(gain.lo, gain.hi)}).",
                gain.value,
                gain.lo,
                gain.hi,
                1,
            )
        )
    return reported


def _verdict_and_evidence(answer: Advice) -> str:
    if answer.verdict == LIKELY:
        return f"Likely ({answer.probability:.0%}, {answer.evidence})"
    return f"{answer.verdict.capitalize()} ({answer.evidence})"


def _sort_key(answer: Advice) -> tuple[int, int, float]:
    """Return a sort key: the verdict, the evidence, and the lower end of the gain's interval."""
    # The positions are negated, because VERDICTS and EVIDENCE begin with the best.
    verdict_position = VERDICTS.index(answer.verdict)
    evidence_position = EVIDENCE.index(answer.evidence)
    return -verdict_position, -evidence_position, answer.gain.lo


def sizes_line(advice: Sequence[Advice]) -> str:
    """Say how many queries are answered with a better size or implementation."""
    confirmed = sum(answer.verdict == DO_IT for answer in advice)
    likely = sum(answer.verdict == LIKELY for answer in advice)
    shapes = counted(len({answer.problem for answer in advice}), "shape")
    if not confirmed and not likely:
        return f"{shapes} checked: no better size or implementation was found."
    return (
        f"Pad and choose queries for {shapes}: "
        f"{counted(confirmed, 'confirmed improvement')}, {counted(likely, 'likely improvement')}."
    )


def _interval_text(lo: str, hi: str) -> str:
    """Format an interval, such as ``86.1–87.9 GFLOP/s``; a common unit is written once."""
    number, _, unit = lo.partition(" ")
    return f"{number}–{hi}" if hi.endswith(unit) else f"{lo}–{hi}"
