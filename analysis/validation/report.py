"""What a validation says, for a reader: errors beside their baselines, by regime and by shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.validation.advice_value import AdviceValue
from analysis.validation.errors import Errors
from analysis.validation.holdout import Validation
from analysis.validation.learning_curve import Point
from kernels.estimate import LIMITS

_M_EDGES = (0, 16, 64, 256, 1024, 4096, np.inf)


def held_back_table(found: Validation) -> pd.DataFrame:
    """One row per held-back problem: sizes, class, measured and predicted µs, limit, error."""
    gemms = [problem.implied_gemm for problem in found.tested.problems]
    predicted = found.prediction.estimate.time
    return pd.DataFrame(
        {
            "m": [gemm.m for gemm in gemms],
            "n": [gemm.n for gemm in gemms],
            "k": [gemm.k for gemm in gemms],
            "class": [problem.shape_class for problem in found.tested.problems],
            "measured": found.tested.seconds * 1e6,
            "predicted": predicted * 1e6,
            "limit": np.array(LIMITS, dtype=object)[found.prediction.estimate.limit],
            "error": predicted / found.tested.seconds - 1,
        }
    )


def validation_text(found: Validation) -> str:
    """Plain text: what was asked, errors and baselines, by limit, by M and by class, cliffs."""
    document = found.to_json()
    skipped = ", ".join(f"{n} {why.replace('_', ' ')}" for why, n in found.source.skipped.items())
    basis = (
        f"calibrated on {len(found.calibrated)} rows"
        if len(found.calibrated)
        else f"with constants of {found.constants_from}"
    )
    lines = [
        f"{found.source.name}, {found.source.dtype}, {found.machine.name}: {basis}, tested on "
        f"{len(found.tested)} others ({found.holdout} held back); left out: {skipped}",
        "",
        _line("", "rows", "median", "mean", "p95"),
        _errors("this model", found.errors),
    ]
    for name, errors in found.baselines.items():
        if errors is not None:
            lines.append(_errors(name.replace("_", " "), errors))
    rows = held_back_table(found)
    by_m = pd.cut(rows["m"], list(_M_EDGES)).astype(str).str.replace(".0", "", regex=False)
    for title, key in (("by limit", rows["limit"]), ("by M", by_m), ("by class", rows["class"])):
        lines += ["", title]
        for name, some in rows.groupby(key, sort=False):
            errors = Errors.of(some["predicted"].to_numpy(), some["measured"].to_numpy())
            lines.append(_errors(f"  {name}", errors))
    if found.by_algorithm:
        lines += ["", "by algorithm, as the kernels' names say"]
        lines += [_errors(f"  {name}", errors) for name, errors in found.by_algorithm.items()]
    lines += ["", f"90 % interval: {document['coverage_90']:.1%} of the held-back rows inside"]
    edge = document["cliffs"]
    if edge["pairs"]:
        said = {name: "–" if value is None else f"{value:.2f}" for name, value in edge.items()}
        lines.append(
            f"cliffs, {edge['pairs']} pairs M, M + 1: recall {said['recall']}, precision "
            f"{said['precision']}, rank correlation {said['rank_correlation']}, recall of steps "
            f"down {said['recall_down']}"
        )
    if found.tile_agreement is not None:
        lines.append(f"tile as in the kernel's name: {found.tile_agreement:.1%} of the rows")
    return "\n".join(lines)


def curve_text(curve: Sequence[Point], floor: Errors | None) -> str:
    """The learning curve and the noise floor, where they were asked for."""
    lines = []
    for holdout in dict.fromkeys(point.holdout for point in curve):
        lines.append(f"rows calibrated ({holdout} held back)")
        lines += [_errors(f"  {p.count}", p.errors) for p in curve if p.holdout == holdout]
    if floor is not None:
        lines.append(_errors("noise floor", floor))
    return "\n".join(lines)


def advice_text(worth: AdviceValue) -> str:
    """What following the advice is worth."""
    ways = ", ".join(f"{name.replace('_', ' ')} {r:.2%}" for name, r in worth.regret.items())
    lines = [f"choose, {worth.neighbourhoods} neighbourhoods, mean regret: {ways}"]
    lines += [
        f"pad by {name.replace('_', ' ')}, {worth.pads} shapes: {pad.moved} moved, mean gain "
        f"{pad.gain:.2%} (in hindsight {worth.hindsight:.2%}), {pad.loss_p95:.1%} slower at the "
        f"95th percentile, {pad.found:.0%} of those that could gain 5 % moved"
        for name, pad in worth.padding.items()
    ]
    if worth.overclaimed is not None:
        lines.append(
            f"{worth.overclaimed:.0%} of the advice's moves gained less than the least claimed"
        )
    return "\n".join(lines)


def _errors(name: str, errors: Errors) -> str:
    shown = ("–" if e is None else f"{e:.1%}" for e in (errors.median, errors.mean, errors.p95))
    return _line(name, str(errors.rows), *shown)


def _line(name: str, *cells: str) -> str:
    return f"{name:22}" + "".join(f"{cell:>10}" for cell in cells)
