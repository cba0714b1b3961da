"""Fit the model to a recording, and build the table of measured and predicted times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.model.calibrate import Calibration, calibrate
from analysis.model.nearby import priors_for
from analysis.model.predict import Model
from analysis.model.query import group_of
from analysis.recordings.load import Recording, problems_of
from analysis.recordings.repetition import with_steady_times
from kernels.common.errors import UserError
from kernels.common.program import command, target
from sweeps.schema import IDENTITY
from sweeps.store import write_csv, write_json

PREDICTED = "predicted_"
"""Prefix of the names of the table's predicted columns. It is followed by the name of a column of
:meth:`analysis.model.predict.Prediction.frame`, or by ``tflops``."""

MOST_ROWS = 36_000
"""Maximum number of cases of one group that are analysed without sampling
(:func:`sampled_positions`). The public tables that Rooftile imports have fewer cases per group."""

_SAMPLE = 10_000  # cases in a sample; twice as many hardly improve the predictions


@dataclass(frozen=True)
class Analysis:
    """A recording, the model fitted to it, and a table with one row for each analysed case.

    The table has these columns:

    - the columns of measurements.csv;
    - the held-out prediction of each case, in columns whose names begin with :data:`PREDICTED`;
    - ``flops``, ``least_bytes`` and ``intensity`` of each case's problem, and the case's ``group``;
    - ``steady_log`` and ``steady_error``, from which ratios of times are computed (see
      :func:`analysis.recordings.repetition.steady_ratio`).

    If a group has more than :data:`MOST_ROWS` cases, the table has only a random sample of them.
    ``measured`` is the number of cases before sampling.
    """

    recording: Recording
    calibration: Calibration
    table: pd.DataFrame
    measured: int

    @property
    def sampled(self) -> str:
        """Sentence to print if only a sample of the cases is analysed, otherwise ""."""
        if len(self.table) == self.measured:
            return ""
        return (
            f"{len(self.table):,} of {self.measured:,} measured cases, drawn at random, are "
            "analysed, plotted and fitted."
        )

    @property
    def model(self) -> Model:
        """Model fitted to all cases in the table."""
        return self.calibration.model

    @property
    def errors(self) -> pd.Series:
        """Absolute error of each case's held-out prediction, as a fraction of the measured time."""
        return (self.table[f"{PREDICTED}time_us"] / self.table["time_us"] - 1).abs()


def sampled_positions(rows: pd.DataFrame) -> NDArray[np.intp]:
    """Return the sorted positions of the cases to analyse.

    A group with more than :data:`MOST_ROWS` cases contributes only 10,000 random cases.
    """
    groups = rows.groupby(["op", "pass", "dtype", "implementation"], dropna=False).indices
    rng = np.random.default_rng(0)
    kept = [np.empty(0, dtype=np.intp)]  # for a table without rows
    for positions in groups.values():
        is_sampled = len(positions) > MOST_ROWS
        kept.append(rng.permutation(positions)[:_SAMPLE] if is_sampled else positions)
    return np.sort(np.concatenate(kept)).astype(np.intp)


def analyse(recording: Recording) -> Analysis:
    """Fit the model to a recording, and join measured and predicted times in one table.

    Raises:
        UserError: if the recording has no case that the model can use, or is damaged.
    """
    # 1. Choose the cases to analyse.
    measured = recording.products.reset_index(drop=True)
    sample = measured.iloc[sampled_positions(measured)].reset_index(drop=True)
    rows = with_steady_times(sample, recording)
    if rows.empty and len(recording.ok):
        raise UserError(
            f"{recording.folder} has no measured GEMM or convolution that the model can use. Run "
            f"{target('sweep', 'run')} to measure such cases as well."
        )
    if rows.empty:
        raise UserError(
            f"{recording.folder} has no measured case yet. Run {target('sweep', 'run')}. If the "
            f"sweep has already run, use {command('sweeps doctor')} to look for the cause."
        )
    # 2. Fit the model to them. The calibration also has a held-out prediction of each of them.
    calibration = calibrate(recording.machine, rows, priors_for(recording, rows))
    predicted = calibration.held_out.frame().add_prefix(PREDICTED)
    # 3. Join the measurements, the properties of their problems, and the predictions.
    problems = problems_of(rows)
    properties = pd.DataFrame(
        {
            "flops": [float(problem.flops) for problem in problems],
            "least_bytes": [float(problem.bytes) for problem in problems],
            "intensity": [problem.intensity for problem in problems],
            "group": [
                group_of(implementation, problem)
                for implementation, problem in zip(rows["implementation"], problems, strict=True)
            ],
        }
    )
    table = pd.concat([rows, properties, predicted], axis=1)
    table[f"{PREDICTED}tflops"] = table["flops"] / table[f"{PREDICTED}time_us"] / 1e6
    return Analysis(recording, calibration, table, len(measured))


def write_predictions(analysis: Analysis) -> None:
    """Write predicted.csv (held-out predictions) and calibration.json next to the measurements."""
    frame = analysis.calibration.held_out.frame()
    identity = analysis.table[list(IDENTITY)].reset_index(drop=True)
    table = pd.concat([identity, frame], axis=1)
    # write_csv writes None as an empty cell, but NaN as text.
    records = table.astype(object).where(table.notna(), None).to_dict("records")
    folder = analysis.recording.folder
    write_csv(folder / "predicted.csv", list(table.columns), records)
    document = analysis.calibration.to_json()
    if analysis.sampled:
        document["sample"] = analysis.sampled
    write_json(folder / "calibration.json", document)
