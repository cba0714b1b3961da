"""Explain in words why a size is better, or why no change is worth it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analysis.advice.options import Question
from analysis.advice.sizes import aligned_multiple, changed, misaligned
from kernels.common.counts import counted, enumerated
from kernels.problem import TIMED_DTYPES, Problem

_LEAST_POINTS = 0.5  # smallest part of a gain that is mentioned, in percentage points
_LEAST_SHARE = 0.1  # smallest part of a gain that is mentioned, as a share of the gain
_SIMILAR = "a measured trend among similar shapes"
_OF_ARITHMETIC = ("compute", "feed", "latency")  # limits under which tiles and waves matter


def change_text(problem: Problem, option: Problem) -> str:
    """Format the sizes that change, such as ``N 50257 → 50304``, or return "" if none changes."""
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
    """Explain a gain: name its causes, such as fuller tiles, and the percentage points from each.

    The logarithm of one plus the gain is a sum of parts. The model computes the parts that are due
    to tiles, waves or bytes, and the remainder is attributed to one other cause. Small parts are
    left out.

    ``before`` and ``after`` are the model's predictions of ``problem`` and ``option``. ``gain`` is
    a fraction, per FLOP if ``choose`` is True. ``assumed`` is True if the gain depends on an
    assumed price of misalignment, and ``measured`` is True if the gain was computed from
    measured times. ``kind`` is the kind of the machine, ``gpu`` or ``cpu``.
    """
    # 1. Compute the parts that the model explains, and attribute the remainder to one further
    #    cause.
    log_gain = math.log1p(gain)
    log_work = math.log(option.flops / problem.flops)
    parts = _known_parts(before, after, log_work, choose, kind)
    remainder = log_gain - sum(parts.values())
    if remainder > 0 and option.alignment > problem.alignment:
        parts[_alignment_cause(problem, option, assumed)] = remainder
    elif kind == "gpu" and _kernel(before) != _kernel(after):
        parts[_kernel_cause(before, after)] = remainder
    else:
        parts["effects that the model does not include" if measured else _SIMILAR] = remainder
    # 2. Convert the parts to percentage points, and name only the large ones. A gain of exactly 0
    #    has no parts.
    points: dict[str, float] = {}
    if log_gain:
        points = {cause: 100 * gain * part / log_gain for cause, part in parts.items()}
    least_points = max(_LEAST_POINTS, _LEAST_SHARE * 100 * gain)
    gained = {cause: value for cause, value in points.items() if value >= least_points}
    lost = {cause: value for cause, value in points.items() if value <= -least_points}
    # 3. List the causes of the gain, the largest first, and then the causes that reduce the gain.
    if not gained:
        return "many small causes"
    if len(gained) == 1 and not lost:
        (only_cause,) = gained
        return f"because of {only_cause}"
    largest_first = sorted(gained, key=lambda cause: -gained[cause])
    causes = " and ".join(
        f"{counted(round(gained[cause]), 'point')} from {cause}" for cause in largest_first
    )
    return causes + "".join(f", minus {-value:.0f} from {cause}" for cause, value in lost.items())


def _known_parts(
    before: Mapping[str, Any], after: Mapping[str, Any], log_work: float, choose: bool, kind: str
) -> dict[str, float]:
    """Return the parts of a gain's logarithm that the model explains, keyed by the cause in words.

    ``log_work`` is the logarithm of the ratio of FLOPs, option over problem.
    """
    # 1. Memory is the limit before and after the change.
    if before["limit"] == "memory" and after["limit"] == "memory":
        log_bytes = math.log(before["bytes"] / after["bytes"])
        if choose:
            log_bytes += log_work
        cause = "fewer bytes" if log_bytes >= 0 else "more bytes"
        if choose:
            cause += " per FLOP"
        return {cause: log_bytes}
    # 2. Launching is a limit, or memory is the limit only before or only after the change. The
    #    model cannot divide such a gain into parts.
    if before["limit"] not in _OF_ARITHMETIC or after["limit"] not in _OF_ARITHMETIC:
        return {}
    # 3. Arithmetic is the limit. Padding within a tile fills the tile and takes no time, so FLOPs
    #    are not a separate part.
    tile_gain = math.log(after["tile_efficiency"] / before["tile_efficiency"])
    area_gain = tile_gain if choose else tile_gain - log_work
    areas = f"{before['tile_efficiency']:.0%} → {after['tile_efficiency']:.0%} of their area"
    tile_text = f"{_fullness(tile_gain)} tiles ({areas})"
    # If the tiles are fuller but their total area still grows, the additional FLOPs cost the time.
    if area_gain < 0 <= tile_gain:
        tile_text = "more FLOPs"
    wave_gain = math.log(after["tail_efficiency"] / before["tail_efficiency"])
    if kind == "cpu":
        degree = "more" if wave_gain >= 0 else "less"
        most_tiles = f"{before['waves']} → {after['waves']} tiles for the busiest thread"
        wave_text = f"{degree} evenly loaded threads ({most_tiles})"
    else:
        slots = f"{before['tail_efficiency']:.0%} → {after['tail_efficiency']:.0%} of their slots"
        wave_text = f"{_fullness(wave_gain)} waves ({slots})"
    return {tile_text: area_gain, wave_text: wave_gain}


def _fullness(log_ratio: float) -> str:
    return "fuller" if log_ratio >= 0 else "emptier"


def _kernel(row: Mapping[str, Any]) -> tuple[str, int]:
    return str(row["tile"]), int(row["split"])


def _kernel_cause(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Describe the change of the kernel, for example ``another kernel (128x128 → 256x128)``."""
    tile, split = _kernel(before)
    new_tile, new_split = _kernel(after)
    changes = []
    if tile != new_tile:
        changes.append(f"{tile} → {new_tile}")
    if split != new_split:
        changes.append(f"parts of K: {split} → {new_split}")
    return f"another kernel ({', '.join(changes)})"


def _alignment_cause(problem: Problem, option: Problem, assumed: bool) -> str:
    """Name the misaligned sizes that change, and the other sizes whose change may contribute."""
    misaligned_names = [name.upper() for name in misaligned(problem, option)]
    other_names = [
        name.upper() for name in changed(problem, option) if name.upper() not in misaligned_names
    ]
    also = f" and the change in {enumerated(other_names)}" if other_names else ""
    verb = "is not a multiple" if len(misaligned_names) == 1 else "are not multiples"
    fact = f"{enumerated(misaligned_names)} {verb} of {aligned_multiple(problem)}"
    caveat = "; the price of misalignment is assumed, not measured" if assumed else ""
    return f"alignment{also} ({fact}{caveat})"


def why_not(problem: Problem, row: Mapping[str, Any], question: Question, uncertain: bool) -> str:
    """Explain why a problem is left as it is; ``row`` is the model's prediction of the problem.

    ``uncertain`` is True if another size may bring a gain, but the evidence is too weak.
    """
    if uncertain:
        reason = "too little is known about nearby sizes to recommend one"
        # ``recommend --measure`` refuses dtypes that cannot be timed.
        if problem.dtype not in TIMED_DTYPES:
            return reason
        return f"{reason}, so time them with `recommend --measure`"
    if question.choose:
        return "no size within the limits is expected to raise the speed enough"
    # These two limits are themselves a reason why a larger size does not help.
    prefixes = {"launch": "launch-bound: ", "memory": "memory-bound: "}
    prefix = prefixes.get(row["limit"], "")
    return f"{prefix}no larger size within the limits is expected to save enough time"
