"""Plot how accurate the model is: learning curve, predicted times, errors by shape, and cliffs.

Arguments named ``rows`` are tables from
:func:`analysis.validation.validation_report.held_out_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from analysis.model.query import Query
from analysis.plots.style import NEUTRAL, PREDICTION, panels, save, scatter_predicted
from analysis.validation.error_summary import Errors
from analysis.validation.holdout import Validation
from analysis.validation.learning_curve import CurvePoint
from analysis.validation.validation_report import basis, held_out_table
from kernels.common.counts import counted
from kernels.config import ceil_div
from kernels.problem import Gemm
from kernels.timemodel.estimate import Array

_STYLES = {"rows": ("#0072B2", "o"), "levels": ("#D55E00", "s")}
# Minimum M in a staircase plot, and minimum number of pairs of M and M + 1 in it. A large tile is
# up to 256 rows high, so a GEMM with a smaller M has only one row of tiles, and no cliff.
_MIN_M, _MIN_PAIRS = 256, 8
_ROUND = 16  # predictions between measured sizes are only drawn at multiples of this


def write_validation_plots(
    validation: Validation,
    folder: Path,
    curve: Sequence[CurvePoint] = (),
    floor: Errors | None = None,
) -> list[Path]:
    """Write the plots of a validation as PNG and SVG files; leave out plots without suitable data.

    ``curve`` has the points of the learning curve, if there is one. ``floor`` has the errors that
    even a perfect model would make, or is None if these errors are unknown.

    Returns:
        The path of each plot's PNG file.

    Raises:
        UserError: if the folder cannot be made, or a file cannot be written.
    """
    rows = held_out_table(validation)
    figures = {
        "learning-curve": draw_curve(curve, floor) if curve else None,
        "predicted-measured": draw_scatter(rows),
        "error-by-shape": draw_shapes(rows),
        # With folds, the model was fitted to all rows, so no point would be held out from it.
        "staircase": None if validation.holdout == "folds" else draw_staircase(validation, rows),
    }
    source = validation.source
    caption = (
        f"{validation.machine.name}  ·  {source.dtype}  ·  {source.name}  ·  {basis(validation)}"
    )
    return [
        save(figure, caption, folder, name)
        for name, figure in figures.items()
        if figure is not None
    ]


def draw_curve(curve: Sequence[CurvePoint], floor: Errors | None) -> Figure:
    """Plot the median and the mean error against the number of calibration rows.

    ``curve`` has at least one point. ``floor`` has the errors that even a perfect model would make.
    Dotted lines show these errors, unless ``floor`` is None.
    """
    labels = {
        "rows": "other measurements",
        "levels": "measurements whose M, N and K are all held out",
    }
    figure, axes = panels(2, curve_title(curve), (12.0, 5.5))
    for panel, average in zip(axes, ("median", "mean"), strict=True):
        for holdout, (color, marker) in _STYLES.items():
            points = [point for point in curve if point.holdout == holdout]
            # A source with too few rows for this hold-out has no points. An empty line would still
            # get an entry in the legend.
            if not points:
                continue
            counts = [point.count for point in points]
            errors = [100 * getattr(point.errors, average) for point in points]
            panel.plot(counts, errors, color=color, marker=marker, label=labels[holdout])
        if floor is not None:
            panel.axhline(
                100 * getattr(floor, average),
                color=NEUTRAL,
                linestyle=":",
                label="error of a perfect model",
            )
        panel.set(
            xscale="log",
            xlabel="number of calibration measurements",
            ylabel=f"{average} error, %",
            ylim=(0, None),
        )
        panel.set_xticks(sorted({point.count for point in curve}))
        panel.get_xaxis().set_major_formatter("{x:,.0f}")
        panel.minorticks_off()
    axes[0].legend()
    return figure


def curve_title(curve: Sequence[CurvePoint]) -> str:
    """Return a title with the median errors after calibration on the fewest and the most rows.

    Points whose hold-out differs from that of the first point are ignored.
    """
    same_holdout = [point for point in curve if point.holdout == curve[0].holdout]
    fewest = min(same_holdout, key=lambda point: point.count)
    most = max(same_holdout, key=lambda point: point.count)
    title = (
        f"The median error is {fewest.errors.median:.1%} after calibration on "
        f"{counted(fewest.count, 'measurement')}"
    )
    if most.count > fewest.count:
        title += f". After calibration on {most.count:,}, it is {most.errors.median:.1%}"
    return title


def draw_scatter(rows: pd.DataFrame) -> Figure:
    """Plot predicted against measured time, log-log.

    Colours and markers show the predicted bottlenecks.
    """
    error = rows["error"].abs()
    title = f"Prediction error: median {error.median():.1%}, mean {error.mean():.1%}"
    figure, (axes,) = panels(1, title, (8.0, 7.0))
    scatter_predicted(axes, rows, size=2.5, alpha=0.5)
    return figure


def shapes_data(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of mean absolute errors, with M as its rows and N·K as its columns.

    M is rounded down to a power of two, N·K to a power of four. Errors are fractions of the
    measured time.
    """
    m = 2 ** np.floor(np.log2(rows["m"])).astype(int)
    weights = rows["n"].astype(float) * rows["k"]  # N·K is the number of weights
    nk = 4 ** np.floor(np.log2(weights) / 2).astype(int)
    return rows["error"].abs().groupby([m.rename("m"), nk.rename("nk")]).mean().unstack()


def draw_shapes(rows: pd.DataFrame) -> Figure:
    """Draw the errors of :func:`shapes_data` as a heat map; the title names the worst cell."""
    mean_errors = shapes_data(rows)
    cell_errors = mean_errors.stack()
    worst_m, worst_nk = cell_errors.idxmax()
    title = (
        f"The largest mean error is {cell_errors.max():.1%}, in the cell at M = {worst_m} and "
        f"N × K = 2^{int(np.log2(worst_nk))}"
    )
    figure, (axes,) = panels(1, title, (10.0, 7.0))
    image = axes.imshow(
        100 * mean_errors.to_numpy(), origin="lower", aspect="auto", cmap="cividis", vmin=0
    )
    nk_labels = [f"2^{int(np.log2(nk))}" for nk in mean_errors.columns]
    m_labels = [str(m) for m in mean_errors.index]
    axes.set_xticks(range(len(nk_labels)), nk_labels)
    axes.set_yticks(range(len(m_labels)), m_labels)
    axes.set(xlabel="N × K", ylabel="M, rounded down to a power of two")
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label="mean error, %")
    return figure


def staircase_data(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the cases at constant N and K that have the largest predicted cliffs along M.

    All cases with the same N and K, and with an M of at least 256, form a line. A pair of cases
    with M and M + 1 counts only if arithmetic is the predicted limit at M. With any other limit,
    one more wave costs little. Among the lines with at least eight counted pairs, the line with the
    largest mean predicted cliff from M to M + 1 is chosen. The measured times do not affect the
    choice, so they are a fair test of the predictions.

    ``rows`` are held-out GEMMs that differ only in M, N and K.

    Returns:
        The cases of the chosen line, from its first to its last counted pair; an empty table if no
        line has at least eight counted pairs. The columns ``step`` and ``predicted_step`` are the
        changes in the measured and the predicted time from M to M + 1, as fractions of the time at
        M. Both columns are NaN in a row that does not begin a counted pair.
    """
    # 1. Find the pairs of M and M + 1.
    ordered = rows[rows["m"] >= _MIN_M].sort_values(["n", "k", "m"])
    after = ordered.groupby(["n", "k"])[["m", "measured", "predicted"]].shift(-1)
    is_pair = (after["m"] == ordered["m"] + 1) & (ordered["limit"] == "compute")
    ordered["step"] = (after["measured"] / ordered["measured"] - 1).where(is_pair)
    ordered["predicted_step"] = (after["predicted"] / ordered["predicted"] - 1).where(is_pair)
    # 2. Choose among the lines with enough pairs.
    lines = ordered.groupby(["n", "k"])["predicted_step"].agg(["mean", "count"])
    lines = lines[lines["count"] >= _MIN_PAIRS]
    if lines.empty:
        return ordered.head(0)
    n, k = lines["mean"].idxmax()
    # 3. Keep the line from its first pair to its last.
    line = ordered[(ordered["n"] == n) & (ordered["k"] == k)]
    pair_sizes = line.loc[line["step"].notna(), "m"]
    return line[line["m"].between(pair_sizes.min(), pair_sizes.max() + 1)]


def draw_staircase(validation: Validation, rows: pd.DataFrame) -> Figure | None:
    """Plot time against M at constant N and K; predictions are also drawn between measured sizes.

    An arrow and the title show the largest predicted cliff. The result is None if no line has
    enough pairs for :func:`staircase_data`.
    """
    line = staircase_data(_commonest_gemms(validation, rows))
    if line.empty:
        return None
    # 1. Describe the largest predicted cliff.
    sizes, predicted_seconds = _predicted_between(validation, line)
    steepest = line.loc[line["predicted_step"].idxmax()]
    n = int(steepest["n"])
    k = int(steepest["k"])
    m = int(steepest["m"])
    measured_step = steepest["step"]
    predicted_step = steepest["predicted_step"]
    title = (
        f"Adding one row at M = {m} changes the measured time by {measured_step:+.0%}, and the "
        f"predicted time by {predicted_step:+.0%}"
    )
    # 2. Draw the predicted line, the measured points, and an arrow at this cliff.
    figure, (axes,) = panels(1, title, (11.0, 6.0))
    axes.plot(sizes, predicted_seconds * 1e6, **PREDICTION, label="predicted")
    axes.plot(
        line["m"],
        line["measured"],
        "o",
        color=_STYLES["rows"][0],
        markersize=8,
        label="measured (held out from the model)",
    )
    # The arrow points to the middle of the measured cliff.
    cliff_times = line[line["m"].isin([m, m + 1])]["measured"]
    axes.annotate(
        f"{m} → {m + 1}",
        (m, float(cliff_times.mean())),
        xytext=(36, 0),
        textcoords="offset points",
        va="center",
        fontsize=12,
        arrowprops={"arrowstyle": "->"},
    )
    dtype = validation.source.dtype
    axes.set(
        xlabel=f"M, rows   (N = {n}, K = {k}, {dtype})",
        ylabel="time, µs",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.legend(loc="upper left")
    return figure


def _commonest_gemms(validation: Validation, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the GEMMs with the commonest combination of implementation, layout and batch size."""
    positions_by_kind: dict[tuple[str, str, int], list[int]] = {}
    cases = zip(validation.tested.problems, validation.tested.implementations, strict=True)
    for position, (problem, implementation) in enumerate(cases):
        if isinstance(problem, Gemm):
            kind = (implementation, problem.layout, problem.batch)
            positions_by_kind.setdefault(kind, []).append(position)
    return rows.iloc[max(positions_by_kind.values(), key=len, default=[])]


def _predicted_between(
    validation: Validation, line: pd.DataFrame
) -> tuple[NDArray[np.intp], Array]:
    """Return values of M along a line, and the predicted time in seconds at each value.

    The values are the measured ones and the multiples of 16 between them. The cost of misalignment
    at other values would hide the cliffs.
    """
    low = int(line["m"].min())
    high = int(line["m"].max())
    round_sizes = np.arange(ceil_div(low, _ROUND) * _ROUND, high, _ROUND)
    sizes = np.union1d(round_sizes, line["m"].to_numpy())
    # All cases of the line have the same N, K, dtype, layout and implementation as the first one.
    # The index of each row is the position of its case in ``tested``, as in held_out_table.
    first = int(line.index[0])
    problem = validation.tested.problems[first]
    implementation = validation.tested.implementations[first]
    assert isinstance(problem, Gemm)
    gemms = [replace(problem, m=int(size)) for size in sizes]
    query = Query.plain(gemms, implementation, validation.source.warm)
    return sizes, validation.model.predict(query).estimate.time
