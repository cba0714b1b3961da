"""Judge the model on held-out measurements of a recording or of a public table.

Each tested row is predicted by a model that was not calibrated on this row. The calibration rows
are chosen without looking at their times. The constants that Rooftile ships for the GPU under test
are never used, not even as the start of a fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.imports.public import PublicRows
from analysis.model.calibrate import calibrate_query, fastest_paddings
from analysis.model.features import Inputs
from analysis.model.fit import Fit
from analysis.model.nearby import sizes_of
from analysis.model.predict import Model, Prediction
from analysis.model.prior import TWINS, UNKNOWN, Prior, Spread
from analysis.model.query import Query
from analysis.validation.baselines import baseline_errors
from analysis.validation.design import choose_rows
from analysis.validation.error_summary import Errors
from kernels.common.checks import check_word
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.machine import Machine
from kernels.timemodel.constants import Constants, foreign_constants

HOLDOUTS = ("rows", "levels", "beyond", "folds")
"""Ways to choose the held-out rows; :func:`validate` explains each way."""
FOLDS = 5
"""Number of folds of the hold-out ``folds``, and of the cross-validation in a calibration."""
_WITHHELD_SHARE = 0.3  # Hold-out "levels": share of the values of M, N and K that are withheld.
_MAX_CALIBRATED_M = 2304  # Hold-out "beyond": largest M to calibrate on.
_LARGE_FLOPS = 1e11  # Errors of rows with more FLOP are also reported separately.


@dataclass(frozen=True)
class Validation:
    """Result of a validation.

    Attributes:
        source: all measured rows.
        holdout: way in which the held-out rows were chosen, one of :data:`HOLDOUTS`.
        calibrated: positions in ``source`` of the rows that the model was calibrated on.
        tested: the held-out rows, in the order of ``prediction``.
        constants_from: slug of the machine whose constants are used, or ``cpu`` for a CPU; "" if
            the model was calibrated or comes from public tables.
        baselines: errors of each baseline on the held-out rows; None for a baseline that was not
            judged.
        prior: names of the tables that served as the prior.
    """

    machine: Machine
    source: PublicRows
    seed: int
    holdout: str
    calibrated: NDArray[np.intp]
    tested: PublicRows
    prediction: Prediction
    model: Model
    constants_from: str
    baselines: Mapping[str, Errors | None]
    prior: Sequence[str] = ()

    @property
    def errors(self) -> Errors:
        """Errors over all held-out rows."""
        return Errors.from_times(self.prediction.estimate.time, self.tested.seconds)

    @property
    def by_algorithm(self) -> dict[str, Errors]:
        """Errors by algorithm, for the held-out rows whose kernel name shows the algorithm."""
        names = np.array(self.tested.algorithms, dtype=object)
        times = self.prediction.estimate.time
        return {
            name: Errors.from_times(times[names == name], self.tested.seconds[names == name])
            for name in sorted(set(names) - {""})
        }

    @property
    def tile_agreement(self) -> float | None:
        """Share of held-out rows whose predicted tile equals the tile in the kernel's name.

        Rows whose kernel name contains no tile are left out. The share is None if this leaves
        no rows.
        """
        estimate = self.prediction.estimate
        predicted = [f"{bm:.0f}x{bn:.0f}" for bm, bn in zip(estimate.bm, estimate.bn, strict=True)]
        agrees = [
            predicted_tile == tile
            for predicted_tile, tile in zip(predicted, self.tested.tiles, strict=True)
            if tile  # "" if the kernel's name contains no tile
        ]
        return float(np.mean(agrees)) if agrees else None

    @property
    def coverage(self) -> float:
        """Share of held-out rows whose measured times are inside the predicted 90% intervals."""
        above_lo = self.prediction.lo <= self.tested.seconds
        below_hi = self.tested.seconds <= self.prediction.hi
        return float((above_lo & below_hi).mean())

    @property
    def neighbours(self) -> dict[str, Any]:
        """Errors of predicted time ratios within pairs of held-out shapes.

        A pair is a GEMM and its padding with the shortest predicted time
        (:func:`fastest_paddings`). A ratio is the GEMM's time divided by the padding's time.
        ``pairs`` is the number of pairs. ``low`` and ``high`` are the 5th and the 95th percentile
        of log(measured ratio / predicted ratio) over all pairs, or None without pairs.
        """
        predicted = self.prediction.estimate.time
        tested = self.tested
        query = Query.with_implementations(tested.problems, tested.implementations, tested.warm)
        small, large = fastest_paddings(query, predicted)
        log_ratios = np.log(tested.seconds / predicted)  # of measured and predicted times
        errors = log_ratios[small] - log_ratios[large]
        if not len(errors):
            return {"pairs": 0, "low": None, "high": None}
        low, high = np.quantile(errors, [0.05, 0.95])
        return {"pairs": len(errors), "low": low, "high": high}

    def to_json(self) -> dict[str, Any]:
        """Return the results for JSON."""
        flops = np.array([float(problem.flops) for problem in self.tested.problems])
        large = flops > _LARGE_FLOPS
        predicted = self.prediction.estimate.time
        baselines = {
            name: None if errors is None else _figures(errors)
            for name, errors in self.baselines.items()
        }
        return {
            "machine": self.machine.slug,
            "source": self.source.name,
            "dtype": self.source.dtype,
            "rows": len(self.tested),
            "skipped": self.source.skipped,
            "calibrated": len(self.calibrated),
            "seed": self.seed,
            "constants_from": self.constants_from,
            **_figures(self.errors),
            "coverage_90": self.coverage,
            "neighbours": self.neighbours,
            "above_1e11": asdict(Errors.from_times(predicted[large], self.tested.seconds[large])),
            "holdout": self.holdout,
            "baselines": baselines,
            "by_algorithm": {name: asdict(errors) for name, errors in self.by_algorithm.items()},
            "tile_agreement": self.tile_agreement,
            "constants": {name: fit.constants.to_json() for name, fit in self.model.fits.items()},
            "prior": list(self.prior),
            "weights": {
                name: fit.offsets.named_weights()
                for name, fit in self.model.fits.items()
                if fit.offsets
            },
        }


def _figures(errors: Errors) -> dict[str, float | None]:
    return {name: value for name, value in asdict(errors).items() if name != "rows"}


def validate(
    source: PublicRows,
    machine: Machine,
    calibrate: int | None = 256,
    seed: int = 0,
    holdout: str = "rows",
    constants: str | None = None,
) -> Validation:
    """Calibrate the model on some rows of a table, and judge the model on other rows.

    The hold-out decides which rows are tested:

    - ``rows``: all rows that the model was not calibrated on.
    - ``levels``: 30% of the values of M, of N and of K are withheld. Rows without a withheld value
      may be used for calibration. Rows whose M, N and K are all withheld are tested.
    - ``beyond``: rows with M up to 2,304 may be used for calibration. Rows with a larger M
      are tested.
    - ``folds``: all rows are divided into five folds. Each fold is predicted with a fit to the
      other four.

    Args:
        source: the measured rows.
        machine: the machine on which they were measured.
        calibrate: number of rows to calibrate on; None for all rows that may be used. With
            0, the model has the constants of another machine, or the general constants for CPUs.
            The hold-out ``folds`` always uses all rows.
        seed: seed for choosing the calibration rows, and the values that ``levels`` withholds.
        holdout: one of :data:`HOLDOUTS`.
        constants: slug of another machine, from whose constants the calibration starts; None for
            the machine that :func:`foreign_constants` selects. For a CPU, ``constants`` has no
            effect.

    Raises:
        UserError: if the hold-out is not known, if there are too few rows, if the machine does not
            support the dtype, or if ``constants`` does not name another machine with constants in
            this dtype.
    """
    check_word("holdout", holdout, HOLDOUTS)
    # 1. Divide the rows into those that may be calibrated on and those that may be tested.
    query = Query.with_implementations(source.problems, source.implementations, source.warm)
    other_constants, constants_from = foreign_constants(machine, source.dtype, constants)
    pool, tested = split_rows(source, holdout, seed)
    count = len(pool) if holdout == "folds" or calibrate is None else calibrate
    # 2. Calibrate on rows that are chosen by their features only. Without calibration, the model is
    #    the formula with constants of another machine.
    calibration_rows = choose_calibration_rows(machine, source, pool, count, seed, other_constants)
    groups = dict.fromkeys(query.groups())
    model = Model(machine, {group: Fit(other_constants) for group in groups})
    if count:
        prior = Prior.bare(other_constants, _spread(machine, source.dtype))
        calibration = calibrate_query(
            machine,
            query.take(calibration_rows),
            source.seconds[calibration_rows],
            FOLDS,
            source.take(calibration_rows).algorithms,
            dict.fromkeys(model.fits, prior),
        )
        # A group without calibration rows keeps the constants of the other machine.
        model = replace(model, fits={**model.fits, **calibration.model.fits})
    # 3. Predict the held-out rows with the model and with the baselines.
    if holdout != "folds":
        tested = np.setdiff1d(tested, calibration_rows)
    if not len(tested):
        raise UserError(
            f"{source.name} has no measurements left to test; give a smaller --calibrate or "
            "another --holdout."
        )
    held_out = source.take(tested)
    # With folds, the calibration already predicted each row with a fit to the other folds.
    prediction = calibration.held_out if holdout == "folds" else model.predict(query.take(tested))
    baselines = baseline_errors(model, source.take(calibration_rows), held_out, query.take(tested))
    if holdout == "folds":  # these two baselines were fitted to the tested rows
        baselines |= {"physics": None, "four_fitted": None}
    return Validation(
        machine=machine,
        source=source,
        seed=seed,
        holdout=holdout,
        calibrated=calibration_rows,
        tested=held_out,
        prediction=prediction,
        model=model,
        constants_from="" if count else constants_from,
        baselines=baselines,
    )


def choose_calibration_rows(
    machine: Machine,
    source: PublicRows,
    pool: NDArray[np.intp],
    count: int,
    seed: int,
    constants: Constants,
) -> NDArray[np.intp]:
    """Choose ``count`` calibration rows by their features, without looking at times.

    ``pool`` has the positions in ``source`` of the rows that may be calibrated on. One of the
    features is the time that the formula estimates with ``constants``.

    Raises:
        UserError: if ``pool`` has fewer rows than ``count``, or if the machine does not support the
            dtype.
    """
    if count > len(pool):
        raise UserError(
            f"--calibrate is {count}, but {source.name} has only "
            f"{counted(len(pool), 'measurement')} to calibrate on; give at most {len(pool)}."
        )
    if count == 0:
        return np.empty(0, dtype=np.intp)
    query = Query.with_implementations(source.problems, source.implementations, source.warm)
    features = Inputs.from_query(machine, query.take(pool)).design(constants)
    return pool[choose_rows(features, count, seed)]


def _spread(machine: Machine, dtype: str) -> Spread:
    """Return the uncertainty of another machine's constants."""
    # The uncertainty was learned only for 16-bit dtypes on GPUs.
    is_learned = machine.kind == "gpu" and dtype in TWINS
    return Spread.from_shipped("generation") if is_learned else UNKNOWN


def split_rows(
    source: PublicRows, holdout: str, seed: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the positions of the rows that may be calibrated on, and of those that may be tested.

    With the hold-outs ``rows`` and ``folds``, both results contain all rows. With ``rows``,
    :func:`validate` then tests only the rows that it did not calibrate on.
    """
    rows = np.arange(len(source), dtype=np.intp)
    if holdout in ("rows", "folds"):
        return rows, rows
    sizes = sizes_of(source.problems)  # columns: M, N and K
    if holdout == "beyond":
        is_large = sizes[:, 0] > _MAX_CALIBRATED_M
        return rows[~is_large], rows[is_large]
    # Hold-out "levels": withhold some of the values of M, of N and of K.
    rng = np.random.default_rng(seed)
    is_withheld = np.zeros(sizes.shape, dtype=bool)
    for column in range(sizes.shape[1]):
        levels = np.unique(sizes[:, column])
        withheld = rng.choice(levels, round(_WITHHELD_SHARE * len(levels)), replace=False)
        is_withheld[:, column] = np.isin(sizes[:, column], withheld)
    return rows[~is_withheld.any(axis=1)], rows[is_withheld.all(axis=1)]
