"""Why a size is better, or why nothing is worth a change, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.advice.options import Question
from analysis.advice.sizes import changed, dimensions
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Problem

_WAVES = {"gpu": "{} waves instead of {}", "cpu": "{} tiles for each thread at most instead of {}"}


def change_text(problem: Problem, option: Problem) -> str:
    """``N 50257 → 50304``; empty if no size changes."""
    return ", ".join(
        f"{d.upper()} {getattr(problem, d)} → {getattr(option, d)}"
        for d in changed(problem, option)
    )


def why(
    problem: Problem,
    option: Problem,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    explained: bool,
    assumed: bool = False,
    kind: str = "gpu",
) -> str:
    """What a change does.

    Args:
        problem: as it was asked.
        option: what it becomes.
        before: the model's prediction of the problem.
        after: that of the option.
        explained: whether the model's tiles and waves explain the gain.
        assumed: whether the price of misalignment is assumed, and decides.
        kind: the machine's; a CPU has threads and vectors where a GPU has SMs and waves.
    """
    reasons = []
    if problem.alignment < WIDE_BYTES and option.alignment > problem.alignment:
        unit = WIDE_BYTES // DTYPE_BYTES[problem.dtype]
        odd = [d.upper() for d in dimensions(problem) if getattr(problem, d) % unit]
        price = ", whose price is assumed: no row of such sizes is known here" if assumed else ""
        reasons.append(f"{' and '.join(odd)} no multiple of {unit}{price}")
    # Numbers of waves compare only for the same tile.
    if explained and after["tile"] == before["tile"] and after["waves"] < before["waves"]:
        reasons.append(_WAVES[kind].format(after["waves"], before["waves"]))
    if explained and after["tile_efficiency"] > before["tile_efficiency"] + 0.02:
        reasons.append(
            f"{after['tile_efficiency']:.0%} instead of {before['tile_efficiency']:.0%} of the "
            "tiles' area useful"
        )
    if not reasons:
        return "the library is faster there; the model does not know why"
    return "; ".join(reasons)


def why_not(row: Mapping[str, Any], question: Question, uncertain: bool) -> str:
    """Why a problem is left as it is.

    Args:
        row: the model's prediction of it.
        question: what was asked.
        uncertain: whether another size may well be better, but may as well lose much.
    """
    if uncertain:
        return "too little is known of the sizes near it to bet on one; --measure would tell"
    if question.choose:
        return "no size near it should compute enough more per second"
    return {
        "launch": "launch-bound: the size hardly matters",
        "memory": "memory-bound: padding only moves more bytes",
    }.get(row["limit"], "no padding should gain enough")
