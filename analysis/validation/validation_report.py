"""Format the results of a validation as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.model.prior import DTYPE, floor_sentences
from analysis.validation.advice_value import AdviceValue, MeasuredValue
from analysis.validation.error_summary import Errors
from analysis.validation.holdout import Validation
from analysis.validation.learning_curve import CurvePoint
from kernels.common.counts import counted
from kernels.problem import Gemm
from kernels.timemodel.estimate import LIMITS

_M_EDGES = (0, 16, 64, 256, 1024, 4096, np.inf)  # edges of the ranges of M that are reported
_SKIPPED = {"other_machines": "from other machines", "other_dtypes": "in other dtypes"}
"""Words for the reasons why measurements are left out."""

_RULES = {"best_guess": "best guess", "as_asked": "original shape"}
"""Words for the rules that pick a shape."""


def held_out_table(validation: Validation) -> pd.DataFrame:
    """Return a table with one row per held-out problem.

    The columns are:

    - ``m``, ``n`` and ``k``: sizes of the GEMM, or of a convolution's implicit GEMM;
    - ``class``: class of the shape, such as ``skinny``;
    - ``measured`` and ``predicted``: time in µs;
    - ``limit``: name of the largest part of the predicted time, such as ``memory``;
    - ``error``: predicted / measured − 1.
    """
    gemms = [problem.implied_gemm for problem in validation.tested.problems]
    predicted = validation.prediction.estimate.time
    return pd.DataFrame(
        {
            "m": [gemm.m for gemm in gemms],
            "n": [gemm.n for gemm in gemms],
            "k": [gemm.k for gemm in gemms],
            "class": [problem.shape_class for problem in validation.tested.problems],
            "measured": validation.tested.seconds * 1e6,
            "predicted": predicted * 1e6,
            "limit": np.array(LIMITS, dtype=object)[validation.prediction.estimate.limit],
            "error": predicted / validation.tested.seconds - 1,
        }
    )


def validation_text(validation: Validation) -> str:
    """Return a report in plain text, with the errors of the model and of its baselines."""
    skipped = ", ".join(
        f"{count:,} {_SKIPPED.get(reason, reason)}"
        for reason, count in validation.source.skipped.items()
        if count
    )
    left_out = [f"Measurements left out: {skipped}"] if skipped else []
    lines = [
        f"{validation.source.name}, {validation.source.dtype}, {validation.machine.name}: "
        f"{basis(validation)}",
        *left_out,
        "",
        _line("", "rows", "median", "mean", "p95"),
        _error_line("this model", validation.errors),
    ]
    for name, errors in validation.baselines.items():
        if errors is not None:
            lines.append(_error_line(name.replace("_", " "), errors))
    # The noise floor is known only for bf16 GEMMs.
    has_only_gemms = all(isinstance(problem, Gemm) for problem in validation.tested.problems)
    if validation.source.dtype == DTYPE and has_only_gemms:
        lines += floor_sentences(validation.machine.slug)
    lines += _breakdowns(held_out_table(validation))
    if validation.by_algorithm:
        lines += ["", "by algorithm, according to kernel names"]
        lines += [
            _error_line(f"  {name}", errors) for name, errors in validation.by_algorithm.items()
        ]
    lines += ["", f"The 90% intervals contain {validation.coverage:.1%} of the held-out times."]
    if validation.tile_agreement is not None:
        lines.append(
            f"The predicted tile agrees with the kernel name in {validation.tile_agreement:.1%} of "
            "the measurements whose kernel name contains a tile."
        )
    return "\n".join(lines)


def basis(validation: Validation) -> str:
    """Return a phrase with the model's origin, the number of tested rows and the hold-out."""
    if len(validation.calibrated):
        origin = f"calibrated on {counted(len(validation.calibrated), 'measurement')}"
    elif validation.constants_from:
        origin = f"predicted without calibration (constants: {validation.constants_from})"
    else:
        origin = "predicted from public tables without calibration"
    tested = counted(len(validation.tested), "measurement")
    return f"{origin}, tested on {tested} (hold-out: {validation.holdout})"


def _breakdowns(rows: pd.DataFrame) -> list[str]:
    lines = []
    # Because one edge is infinite, all edges are floats. Their labels should be whole numbers.
    by_m = pd.cut(rows["m"], list(_M_EDGES)).cat.rename_categories(
        lambda interval: str(interval).replace(".0", "")
    )
    # Ranges of M are sorted; limits and classes come in the order of the rows.
    for title, key, is_sorted in (
        ("by limit", rows["limit"], False),
        ("by M", by_m, True),
        ("by class", rows["class"], False),
    ):
        lines += ["", title]
        for name, group in rows.groupby(key, sort=is_sorted, observed=True):
            errors = Errors.from_times(group["predicted"].to_numpy(), group["measured"].to_numpy())
            lines.append(_error_line(f"  {name}", errors))
    return lines


def curve_text(curve: Sequence[CurvePoint], floor: Errors | None) -> str:
    """Return a learning curve and a noise floor as text, or "" if both are missing."""
    lines = []
    for holdout in dict.fromkeys(point.holdout for point in curve):
        lines.append(f"calibration measurements (hold-out: {holdout})")
        lines += [
            _error_line(f"  {point.count:,}", point.errors)
            for point in curve
            if point.holdout == holdout
        ]
    if floor is not None:
        lines.append(_error_line("noise floor", floor))
    return "\n".join(lines)


def advice_text(worth: AdviceValue, measured: Mapping[int, MeasuredValue] | None = None) -> str:
    """Describe the value of following the advice, and of measuring the best candidates first."""
    drawn = counted(worth.neighbourhoods, "choose query", "choose queries")
    lines = [f"Mean regret (speed lost compared with the fastest shape) of {drawn}, by rule:"]
    lines += [
        _line(f"  {_RULES.get(name, name)}", f"{regret:.2%}")
        for name, regret in worth.regret.items()
    ]
    # The option "z" of the formats below prints a loss or gain that rounds to -0.0% as 0.0%.
    for name, padding in worth.padding.items():
        verb = "was" if padding.moved == 1 else "were"
        lines.append(
            f"Pad queries, following the {_RULES.get(name, name)}: {padding.moved:,} of "
            f"{counted(worth.pads, 'shape')} {verb} padded. The mean gain is {padding.gain:z.2%}; "
            f"the best possible mean gain is {worth.hindsight:.2%}. The 95th percentile of the "
            f"loss is {padding.loss_p95:z.1%}. This rule pads {padding.found:.0%} of the shapes "
            "that could gain at least 5%."
        )
    if worth.overclaimed is not None:
        lines.append(
            f"{worth.overclaimed:.0%} of the advised changes gained less than the lower end of "
            "their predicted interval."
        )
    for count, value in (measured or {}).items():
        candidates = "candidate" if count == 1 else f"{count} candidates"
        lines.append(
            f"With the best {candidates} measured, the mean regret of choose queries is "
            f"{value.choose_regret:.2%}. The mean gain of pad queries is {value.pad_gain:z.2%}, "
            f"and the 95th percentile of their loss is {value.pad_loss_p95:z.1%}."
        )
    return "\n".join(lines)


def _error_line(name: str, errors: Errors) -> str:
    figures = (errors.median, errors.mean, errors.p95)
    cells = ["–" if figure is None else f"{figure:.1%}" for figure in figures]
    return _line(name, f"{errors.rows:,}", *cells)


def _line(name: str, *cells: str) -> str:
    return f"{name:22}" + "".join(f"{cell:>10}" for cell in cells)
