"""The five lines that matter most in a recording."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

import pandas as pd

from analysis.advice.recommend import Advice
from analysis.advice.verdict import DO_IT, LIKELY
from analysis.model.fitted import Analysis
from analysis.model.series import alignment_series, layout_series, layout_summary
from analysis.recordings.runs import health_lines
from analysis.units import rate


def health_of(analysis: Analysis) -> list[str]:
    """How far the times can be trusted: the head of every report."""
    lines = health_lines(analysis.recording, float(analysis.errors.median()))
    return [*lines, analysis.sampled] if analysis.sampled else lines


UNUSABLE_LINE = (
    "Nothing is concluded from times such as these. The same command measures everything again; a "
    "quieter machine helps."
)


def five_lines(analysis: Analysis, advice: Sequence[Advice]) -> list[str]:
    """At most five sentences, each from measured rows; one that has no rows is left out."""
    table = analysis.table
    if analysis.recording.unusable:
        return [UNUSABLE_LINE]
    lines = (
        peak_line(analysis),
        alignment_line(table),
        layout_line(table),
        sizes_line(advice),
        accuracy_line(analysis),
    )
    return [line for line in lines if line]


def peak_line(analysis: Analysis) -> str:
    """The fastest GEMM of each dtype, against the machine's ceiling."""
    gemms = analysis.table[analysis.table["op"] == "gemm"]
    parts = []
    for dtype, rows in gemms.groupby("dtype", sort=False):
        best = rows.loc[rows["tflops"].idxmax()]
        share = best["tflops"] * 1e12 / analysis.recording.machine.peak(str(dtype))
        parts.append(f"{dtype} {rate(best['tflops'])}, {share:.0%} of the ceiling")
    sustained = _sustained(analysis.table)
    return f"Fastest products: {'; '.join(parts)}{sustained}." if parts else ""


def _sustained(table: pd.DataFrame) -> str:
    """Speed without a pause over the burst's, geometric mean over the same cases."""
    rows = table[table["sweep"] == "sustained"]
    same = ["m", "n", "k", "batch", "dtype", "layout", "implementation", "config"]
    pairs = rows[rows["mode"] == "burst"].merge(
        rows[rows["mode"] == "sustained"], on=same, suffixes=("_burst", "_sustained")
    )
    if pairs.empty:
        return ""
    ratio = geometric_mean(pairs["time_us_burst"] / pairs["time_us_sustained"])
    return f"; without a pause {ratio:.0%} of the burst's speed over {len(pairs)} large ones"


def alignment_line(table: pd.DataFrame) -> str:
    """The worst offset from a round size whose interval stays below it."""
    rows = alignment_series(table)
    if rows.empty:
        return ""
    slower = rows[rows["relative_hi"] < 1]
    if slower.empty:
        return "Alignment: no offset from a round size is slower beyond its uncertainty."
    worst = slower.loc[slower["relative"].idxmin()]
    return (
        f"Alignment: {worst['along'].upper()} = {worst['base'] + worst['offset']} runs at "
        f"{worst['relative']:.0%} of the speed of {worst['base']} in {worst['dtype']}, the worst "
        f"of {len(rows)} offsets."
    )


def layout_line(table: pd.DataFrame) -> str:
    """Geometric mean of NHWC's speed over NCHW's."""
    pairs = layout_series(table)
    if pairs.empty:
        return ""
    mean, faster, slower = layout_summary(pairs)
    return (
        f"NHWC against NCHW: {mean:.2f}× the speed in geometric mean over {len(pairs)} pairs; "
        f"clearly faster in {faster}, clearly slower in {slower}."
    )


def sizes_line(advice: Sequence[Advice]) -> str:
    """How many shapes should be changed, and which gains most."""
    sure, likely = (
        [answer for answer in advice if answer.verdict == verdict] for verdict in (DO_IT, LIKELY)
    )
    if not sure and not likely:
        return f"Sizes: none of {len(advice)} questions has a better answer than the size as it is."
    best = max(sure or likely, key=lambda answer: answer.gain.value)
    change = f"with {best.change}" if best.changed else f"by {best.implementation}"
    per_flop = " per FLOP" if best.question == "choose" else ""
    return (
        f"Sizes: of {len(advice)} questions {len(sure)} have an answer measured beyond doubt and "
        f"{len(likely)} a likely one; the best of the {'sure' if sure else 'likely'}: "
        f"{best.problem} {change}, by {best.gain.value:.0%}{per_flop}."
    )


def accuracy_line(analysis: Analysis) -> str:
    """How good the predictions are, and how steady the machine was."""
    error = analysis.errors
    canary = analysis.recording.run.get("canary")
    steady = ""
    if canary and canary.get("certain"):
        steady = f"; the machine drifted by {canary['drift']:+.1%} during the run"
    return (
        f"Predictions of rows that the model had not seen: median error {error.median():.1%}, "
        f"95th percentile {error.quantile(0.95):.0%}{steady}."
    )
