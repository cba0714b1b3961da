"""Why a size is better, or why nothing is worth a change, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analysis.advice.options import Question
from analysis.advice.sizes import changed
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Problem

_LEAST_POINTS = 0.5  # percentage points of a gain that are worth a word
_LEAST_SHARE = 0.1  # of the gain, likewise
_SIMILAR = "a measured trend of similar shapes"
_OF_ARITHMETIC = ("compute", "feed", "latency")  # limits that whole tiles and waves decide


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
    gain: float,
    choose: bool = False,
    assumed: bool = False,
    measured: bool = False,
    kind: str = "gpu",
) -> str:
    """Account for a gain: how many of its percentage points what the model knows explains.

    The logarithm of the gain is a sum. By the model, tiles, waves and bytes have their parts in it;
    what is left is another kernel of the library, where its tile or split differs, or alignment.
    Parts that cost are named, too: the points add up to the gain.

    Args:
        problem: as it was asked.
        option: what it becomes.
        before: the model's prediction of the problem.
        after: that of the option.
        gain: what the change brings, as a fraction: of the time or, to choose, per FLOP.
        choose: whether it is per FLOP.
        assumed: whether the price of misalignment is assumed, and decides.
        measured: whether the gain is measured, and not predicted.
        kind: the machine's; a CPU has threads where a GPU has waves of tiles.
    """
    total = math.log1p(gain)
    more = math.log(option.flops / problem.flops)
    parts = _known_parts(before, after, more, choose, kind)
    rest = total - sum(parts.values())
    if rest > 0 and problem.alignment < WIDE_BYTES and option.alignment > problem.alignment:
        parts[_alignment(problem, option, assumed)] = rest
    elif kind == "gpu" and _kernel(before) != _kernel(after):
        parts[_other_kernel(before, after)] = rest
    else:
        parts["a cause that the model does not cover" if measured else _SIMILAR] = rest
    points = {name: 100 * gain * part / total for name, part in parts.items()} if total else {}
    least = max(_LEAST_POINTS, _LEAST_SHARE * 100 * gain)
    causes = {name: value for name, value in points.items() if value >= least}
    costs = {name: value for name, value in points.items() if value <= -least}
    if not causes:
        return "many small causes"
    if len(causes) == 1 and not costs:
        return f"because of {next(iter(causes))}"
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    text = " and ".join(f"{value:.0f} points from {name}" for name, value in ordered)
    return text + "".join(f", minus {-value:.0f} from {name}" for name, value in costs.items())


def _known_parts(
    before: Mapping[str, Any], after: Mapping[str, Any], more: float, choose: bool, kind: str
) -> dict[str, float]:
    """What the model's parts explain of the logarithm of a gain.

    ``more`` is the logarithm of the option's FLOPs over the problem's: they take time where
    arithmetic binds, and are what is gained per byte where memory does.
    """
    if before["limit"] == "memory" and after["limit"] == "memory":
        fewer = math.log(before["bytes"] / after["bytes"]) + (more if choose else 0.0)
        name = "fewer bytes" if fewer >= 0 else "more bytes"
        return {f"{name} per FLOP" if choose else name: fewer}
    if before["limit"] not in _OF_ARITHMETIC or after["limit"] not in _OF_ARITHMETIC:
        return {}
    # Padding within a tile fills it and takes no time: the FLOPs are not a part of their own.
    filled = math.log(after["tile_efficiency"] / before["tile_efficiency"])
    area = filled if choose else filled - more
    shares = [f"{row['tile_efficiency']:.0%}" for row in (before, after)]
    tiles = f"{_full(filled)} tiles ({shares[0]} → {shares[1]} of their area)"
    if area < 0 <= filled:
        tiles = f"{math.expm1(more):.1%} more FLOPs"
    tail = math.log(after["tail_efficiency"] / before["tail_efficiency"])
    counts = f"{before['waves']} → {after['waves']}"
    slots = f"{_full(tail)} waves ({counts})"
    if kind == "cpu":
        how = "more" if tail >= 0 else "less"
        slots = f"{how} evenly loaded threads ({counts} tiles each)"
    return {tiles: area, slots: tail}


def _full(log_ratio: float) -> str:
    return "fuller" if log_ratio >= 0 else "emptier"


def _kernel(row: Mapping[str, Any]) -> tuple[str, int]:
    """The library's kernel as the model takes it to choose: its tile, and how it splits K."""
    return str(row["tile"]), int(row["split"])


def _other_kernel(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    (tile, split), (other_tile, other_split) = _kernel(before), _kernel(after)
    changes = [f"{tile} → {other_tile}"] if tile != other_tile else []
    if split != other_split:
        changes.append(f"K in {split} → {other_split} parts")
    return f"another kernel ({', '.join(changes)})"


def _alignment(problem: Problem, option: Problem, assumed: bool) -> str:
    unit = WIDE_BYTES // DTYPE_BYTES[problem.dtype]
    odd = [d.upper() for d in changed(problem, option) if getattr(problem, d) % unit]
    price = ", an assumed price: no such sizes were measured" if assumed else ""
    verb = "is not a multiple" if len(odd) == 1 else "are not multiples"
    return f"alignment ({' and '.join(odd)} {verb} of {unit}{price})"


def why_not(row: Mapping[str, Any], question: Question, uncertain: bool) -> str:
    """Why a problem is left as it is.

    Args:
        row: the model's prediction of it.
        question: what was asked.
        uncertain: whether another size may well be better, but may as well lose much.
    """
    if uncertain:
        return "too little is known about nearby sizes to recommend one; --measure would time them"
    if question.choose:
        return "no allowed size is expected to compute enough more per second"
    bound = {"launch": "launch-bound: ", "memory": "memory-bound: "}.get(row["limit"], "")
    return f"{bound}no larger allowed size is expected to take enough less time"
