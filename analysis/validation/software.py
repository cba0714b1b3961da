"""Judge predictions from one public table against the other public tables of its machine.

Each table was measured with one framework and one version of cuBLAS. Other versions may choose
other kernels. Predictions from an imported table are therefore compared with the other public
tables of the same machine, which are called collections here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.imports.tables import PublicTable, gemms_of, read_rows
from analysis.model.calibrate import pair_errors
from analysis.model.corrected import corrected_estimate
from analysis.model.features import Inputs
from analysis.model.fit import SoftwareRange
from analysis.model.groups import GroupErrors, shape_group
from analysis.model.offsets import LIBRARY
from analysis.model.predict import Model, model_from_json
from analysis.model.prior import (
    DTYPE,
    GROUP,
    factors_of_prior,
    shift_of,
    software_of,
)
from analysis.model.query import Query
from analysis.model.shift import CollectionPair, Shift
from analysis.recordings.imported import VALIDATION
from analysis.validation.error_summary import Errors
from kernels.machine import known_machine
from kernels.timemodel.estimate import Array
from sweeps.store import write_json

_MIN_PREDICTED_GAIN = 0.1
"""Predicted gain above which the time ratio of a pair of shapes is judged. The median gain that
advice predicted was 15% for choose queries and 8% for pad queries (results/accuracy/software.json).
"""
_SIZES = ["m", "n", "k"]
_NO_RANGE = SoftwareRange(0.0, 0.0, 0.0, 0.0)
"""Range of zero width, which leaves every interval unchanged."""


@dataclass(frozen=True)
class CollectionErrors:
    """Errors of a model's predictions for one collection to which the model was not fitted.

    Attributes:
        slug: slug of the collection's machine.
        source: framework and version of the collection.
        log_ratios: log(measured / predicted) of each shape.
        spreads: expected error of the logarithm of each prediction.
        pair_errors: result of :func:`analysis.model.calibrate.pair_errors` for the paddings with a
            predicted gain above 10%.
        groups: kind of each shape, as :func:`analysis.model.groups.shape_group` names it.
        repeated: errors if the imported table's times are taken as predictions; None without an
            imported table.
        seen: log ratios and spreads of the final model's predictions; None without an imported
            table. The final model was fitted to the same shapes in the imported table.
        origin: slug of the machine whose constants are used, or "" for the collection's machine.
    """

    slug: str
    source: str
    errors: Errors
    log_ratios: Array
    spreads: Array
    pair_errors: Array
    groups: NDArray[np.object_]
    repeated: Errors | None = None
    seen: tuple[Array, Array] | None = None
    origin: str = ""

    @classmethod
    def from_times(
        cls, slug: str, source: str, query: Query, predicted: Array, seconds: Array, spreads: Array
    ) -> CollectionErrors:
        """Return the errors of ``predicted`` compared with the measured ``seconds``."""
        log_ratios = np.log(seconds / predicted)
        pairs = pair_errors(query, predicted, log_ratios, spreads, _MIN_PREDICTED_GAIN)
        groups = np.array([shape_group(problem) for problem in query.problems], dtype=object)
        errors = Errors.from_times(predicted, seconds)
        return cls(slug, source, errors, log_ratios, spreads, pairs, groups)

    @property
    def generation(self) -> str:
        """GPU generation of the machine, such as ``hopper``."""
        return known_machine(self.slug).generation

    def ends(self, interval: ErrorRange) -> tuple[Array, Array]:
        """Return the lower and the upper end of each shape's interval, as log ratios."""
        # A kind of shape without an entry has the range of all shapes.
        factors = np.array([interval.factors.get(name, (1.0, 1.0)) for name in self.groups])
        # The columns are the factors of the lower and the upper end. Without shapes, the array has
        # no second axis until it is reshaped.
        low_factors, high_factors = factors.reshape(-1, 2).T
        software = interval.software
        low = software.low * self.spreads * low_factors
        high = software.high * self.spreads * high_factors
        return low, high

    def inside(self, interval: ErrorRange) -> NDArray[np.bool_]:
        """Return a mask of the shapes whose measured times are inside their intervals."""
        low, high = self.ends(interval)
        return (low <= self.log_ratios) & (self.log_ratios <= high)

    def covered_where_seen(self, software: SoftwareRange) -> float | None:
        """Return the share of times that are inside a range around the final model's predictions.

        ``software`` is the range, in multiples of the spread. The share is None if there is no
        imported table.
        """
        if self.seen is None:
            return None
        log_ratios, spreads = self.seen
        relative = log_ratios / spreads
        return float(((software.low <= relative) & (relative <= software.high)).mean())

    def relative_to(self, software: SoftwareRange) -> GroupErrors:
        """Return the errors, scaled so that ``software.low`` is −1 and ``software.high`` is 1."""
        relative = self.log_ratios / self.spreads
        ends = np.where(relative < 0, -software.low, software.high)
        return GroupErrors(relative / ends, self.groups)


class ErrorRange(NamedTuple):
    """Range of errors, in multiples of the spread, with factors for both ends by kind of shape."""

    software: SoftwareRange
    factors: Mapping[str, tuple[float, float]]


def compare_tables(table: PublicTable, other: PublicTable) -> CollectionPair:
    """Compare the bf16 times of two public tables of one machine, for shapes that both have.

    In the result, the seconds are those of ``table``, and the log ratios are log(other / table).
    """
    other_times = median_times(other).rename("other_us")
    rows = pd.concat([median_times(table), other_times], axis=1, join="inner")
    seconds = rows["measured_us"].to_numpy() * 1e-6
    log_ratios = np.log(rows["other_us"] / rows["measured_us"]).to_numpy()
    return CollectionPair(seconds, log_ratios)


def errors_on_other_tables(
    folder: Path, table: PublicTable, tables: Iterable[PublicTable], shift: Shift
) -> list[CollectionErrors]:
    """Return the errors of an imported table's predictions for the other tables of its machine.

    The result has one element per table that shares bf16 shapes with the imported table. Only these
    shapes are compared.

    Args:
        folder: folder of the imported table's recording, with predicted.csv and calibration.json.
        table: the imported table.
        tables: public tables of any machine.
        shift: expected difference in time between the imported table's framework and other
            frameworks.
    """
    calibration = json.loads((folder / "calibration.json").read_bytes())
    fit = calibration["groups"][GROUP]
    predictions = _held_out_predictions(folder, fit["high"] - fit["low"])
    predictions = predictions.join(median_times(table), on=_SIZES)
    model = model_from_json(known_machine(table.slug), calibration)
    compared = [
        _compare_collection(model, predictions, other, shift)
        for other in other_tables(table, tables)
    ]
    return [errors for errors in compared if errors is not None]


def other_tables(table: PublicTable, tables: Iterable[PublicTable]) -> list[PublicTable]:
    """Return the other tables that have bf16 rows and belong to the machine of ``table``."""
    return [
        other
        for other in tables
        if other.slug == table.slug and other.path != table.path and other.rows
    ]


def _held_out_predictions(folder: Path, interval_width: float) -> pd.DataFrame:
    """Read the held-out predictions of the bf16 shapes in a recording.

    ``interval_width`` is the width of the predicted 90% intervals, in multiples of the spread.
    """
    columns = [*_SIZES, "dtype", "time_us", "lo_us", "hi_us"]
    rows = pd.read_csv(folder / "predicted.csv", usecols=columns)
    rows = rows[rows["dtype"] == DTYPE]
    # Each case's interval was computed without the error of that case. Leaving out one of thousands
    # of errors hardly moves the ends, so the width of the whole fit's interval is close enough.
    spread = np.log(rows["hi_us"] / rows["lo_us"]) / interval_width
    return rows.assign(spread=spread).drop_duplicates(_SIZES)


def median_times(table: PublicTable) -> pd.Series:
    """Return the median time in µs of each bf16 shape, indexed by m, n and k."""
    return read_rows(table).groupby(_SIZES)["time_us"].median().rename("measured_us")


def _compare_collection(
    model: Model, predictions: pd.DataFrame, table: PublicTable, shift: Shift
) -> CollectionErrors | None:
    """Compare the times in a collection with the predictions for the same shapes.

    Return None if ``predictions`` has none of the collection's shapes. The column measured_us of
    ``predictions`` has the imported table's times.
    """
    # 1. Compare the collection with held-out predictions.
    other_times = median_times(table).rename("other_us")
    rows = predictions.join(other_times, on=_SIZES, how="inner")
    if rows.empty:
        return None
    seconds = rows["other_us"].to_numpy() * 1e-6
    expected = shift.applied(rows["time_us"].to_numpy() * 1e-6)
    query = warm_query(rows)
    fit = model.fits[GROUP].for_software(_NO_RANGE, shift)
    spreads = fit.spreads(rows["spread"].to_numpy())
    errors = CollectionErrors.from_times(
        table.slug, table.source, query, expected, seconds, spreads
    )
    # 2. Compare the collection with the times of the imported table, and with predictions of the
    #    final model.
    imported_seconds = rows["measured_us"].to_numpy() * 1e-6
    inputs = Inputs.from_query(model.machine, query)
    estimate, disagreement = corrected_estimate(inputs, fit.constants, fit.residual)
    log_ratios = np.log(seconds / shift.applied(estimate.time))
    return replace(
        errors,
        repeated=Errors.from_times(imported_seconds, seconds),
        seen=(log_ratios, fit.spreads(disagreement)),
    )


def warm_query(rows: pd.DataFrame) -> Query:
    """Return a query for the GEMMs in ``rows``; public tables contain only warm times."""
    return Query.plain(gemms_of(rows), LIBRARY, warm=True)


def write_validation(folder: Path, table: PublicTable, tables: Iterable[PublicTable]) -> None:
    """Write the errors of an imported table's model to validation.json in ``folder``.

    The arguments are described in :func:`errors_on_other_tables`. The document has these entries
    besides the source:

    - ``software``: 90% ranges of the errors for other frameworks (:class:`SoftwareRange`).
    - ``same``: errors of held-out predictions for the imported table itself.
    - ``other``: results of :func:`judged_row`, one for each collection. The coverages are
      optimistic, because the ranges in ``software`` were also learned from these collections.
    """
    software = software_of(table.slug)
    collection_errors = errors_on_other_tables(folder, table, tables, shift_of(table.slug))
    factors = factors_of_prior("public", known_machine(table.slug).generation)
    fit = json.loads((folder / "calibration.json").read_bytes())["groups"][GROUP]
    document = {
        "source": table.source,
        "software": software.to_json(),
        "same": {name: fit[name] for name in ("rows", "median", "mean", "p95")},
        "other": [
            judged_row(errors, ErrorRange(software, factors)) for errors in collection_errors
        ],
    }
    write_json(folder / VALIDATION, document)


def write_own_validation(folder: Path) -> None:
    """Write validation.json for a user's file, with the held-out errors of each group of the model.

    The entry ``other`` is empty, because a user's file is not compared with public tables.
    """
    fits = json.loads((folder / "calibration.json").read_bytes())["groups"]
    errors = {
        group: {name: fit[name] for name in ("rows", "median", "mean", "p95")}
        for group, fit in fits.items()
    }
    document: dict[str, Any] = {"software": None, "same": errors, "other": []}
    write_json(folder / VALIDATION, document)


def judged_row(collection: CollectionErrors, interval: ErrorRange) -> dict[str, Any]:
    """Return the errors of one collection and the coverage of an interval, as a JSON document.

    A coverage is the share of the shapes whose times are inside an interval. The document has these
    entries besides the machine, the source and the errors:

    - ``coverage_90``: the coverage of ``interval``.
    - ``median_width``: median width of the intervals, as a fraction of the predicted time.
    - ``coverage_by_group``: coverage of ``interval`` and number of shapes, for each kind of shape.
    - ``coverage_90_seen``: coverage of ``interval.software`` around the predictions of the final
      model, which was fitted to the same shapes.
    - ``repeated``: errors if the times of an imported table are taken as predictions.

    Without an imported table, the last two entries are left out.
    """
    inside = collection.inside(interval)
    low, high = collection.ends(interval)
    coverage_by_group = {}
    for kind in sorted(set(collection.groups)):
        inside_of_kind = inside[collection.groups == kind]
        coverage_by_group[kind] = [float(inside_of_kind.mean()), len(inside_of_kind)]
    row = {
        "machine": collection.slug,
        "source": collection.source,
        **asdict(collection.errors),
        "coverage_90": float(inside.mean()),
        "median_width": float(np.median(np.exp(high) - np.exp(low))),
        "coverage_by_group": coverage_by_group,
    }
    if collection.repeated is None:
        return row
    coverage_seen = collection.covered_where_seen(interval.software)
    return {**row, "coverage_90_seen": coverage_seen, "repeated": asdict(collection.repeated)}
