"""Explain in words why a size is better, or why no change is worth it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analysis.advice.options import Question
from analysis.advice.sizes import changed
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Problem

_LEAST_POINTS = 0.5  # smallest part of a gain that is mentioned, in percentage points
_LEAST_SHARE = 0.1  # smallest part of a gain that is mentioned, as a share of the gain
_SIMILAR = "a measured trend of similar shapes"
_OF_ARITHMETIC = ("compute", "feed", "latency")  # limits under which tiles and waves count


def change_text(problem: Problem, option: Problem) -> str:
    """Return ``N 50257 → 50304``; empty if no size changes."""
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
    """Attribute the percentage points of a gain to the causes that the model knows.

    The logarithm of the gain is a sum, in which the model knows the parts of tiles, waves and
    bytes. The rest is attributed to alignment if that improves, or to another kernel of the vendor
    library if its tile or split differs. Parts that reduce the gain are named, too, so that the
    points add up to it.

    Args:
        problem: the original problem.
        option: the problem with other sizes.
        before: the model's prediction of the problem.
        after: the model's prediction of the option.
        gain: gain of the change as a fraction: in time or, to choose, per FLOP.
        choose: True if the gain is per FLOP.
        assumed: True if the gain depends on an assumed price of misalignment.
        measured: True if the gain is measured, not predicted.
        kind: kind of the machine. A CPU has threads where a GPU has waves of tiles.
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
    """Return the parts of a gain's logarithm that the model explains.

    ``more`` is the logarithm of the option's FLOPs over the problem's. Where arithmetic is the
    limit, more FLOPs take more time. Where memory is the limit, only the bytes take time; if the
    gain is per FLOP (``choose``), more FLOPs for the same bytes add to it.
    """
    if before["limit"] == "memory" and after["limit"] == "memory":
        fewer = math.log(before["bytes"] / after["bytes"]) + (more if choose else 0.0)
        name = "fewer bytes" if fewer >= 0 else "more bytes"
        return {f"{name} per FLOP" if choose else name: fewer}
    if before["limit"] not in _OF_ARITHMETIC or after["limit"] not in _OF_ARITHMETIC:
        return {}
    # Padding within a tile fills the tile and takes no time, so FLOPs are not a separate part.
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
    """Return the tile and the split of K that the model expects the vendor library to choose."""
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
    """Explain why a problem is left as it is.

    Args:
        row: the model's prediction of the problem.
        question: the pad or choose query.
        uncertain: True if another size may well be better, but may also lose much.
    """
    if uncertain:
        return "too little is known about nearby sizes to recommend one; --measure would time them"
    if question.choose:
        return "no allowed size is expected to compute enough more per second"
    bound = {"launch": "launch-bound: ", "memory": "memory-bound: "}.get(row["limit"], "")
    return f"{bound}no larger allowed size is expected to take enough less time"
