"""Judge the answers from one framework's table by the tables of other frameworks.

A table comes from one framework and one version of cuBLAS. Users run others, with heuristics that
choose other kernels, and with operands of other values. The answers from an imported table are
therefore judged by the other collections of its machine.
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

_PROMISED = 0.1  # the least gain that pairs promise; certain advice promises about that much
_SIZES = ["m", "n", "k"]
_NO_RANGE = SoftwareRange(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class CollectionErrors:
    """Differences of one collection's times from predictions that had not seen it.

    Attributes:
        slug: the machine of the collection.
        source: framework and version of the collection.
        errors: summary of the errors.
        log_ratios: logs of measured over predicted time.
        spreads: spreads of the predictions.
        pair_errors: errors of the time ratios of neighbouring shapes that promise a gain (see
            :func:`analysis.model.calibrate.pair_errors`).
        groups: kind of each shape.
        repeated: errors of the imported table's measured times, taken as predictions; None if the
            collection is not compared with an imported table.
        seen: log ratios and spreads of predictions by the model that answers, which was fitted to
            all shapes.
        origin: the machine whose constants predict; empty if it is the collection's own.
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
        """Compare measured with predicted seconds.

        Args:
            slug: the machine of the collection.
            source: framework and version of the collection.
            query: the measured shapes.
            predicted: predicted seconds of each shape.
            seconds: measured seconds of each shape.
            spreads: spread of each prediction.
        """
        log_ratios = np.log(seconds / predicted)
        pairs = pair_errors(query, predicted, log_ratios, spreads, _PROMISED)
        groups = np.array([shape_group(problem) for problem in query.problems], dtype=object)
        errors = Errors.from_times(predicted, seconds)
        return cls(slug, source, errors, log_ratios, spreads, pairs, groups)

    @property
    def generation(self) -> str:
        """Generation of the machine."""
        return known_machine(self.slug).generation

    def ends(self, interval: ErrorRange) -> tuple[Array, Array]:
        """Return the lower and the upper end of each row's interval, as log ratios."""
        # A kind of shape without factors of its own has the range of all shapes.
        factors = np.array([interval.factors.get(name, (1.0, 1.0)) for name in self.groups])
        below, above = factors.reshape(-1, 2).T
        software = interval.software
        return software.low * self.spreads * below, software.high * self.spreads * above

    def inside(self, interval: ErrorRange) -> NDArray[np.bool_]:
        """Return a mask of the rows that lie inside their interval."""
        low, high = self.ends(interval)
        return (low <= self.log_ratios) & (self.log_ratios <= high)

    def covered_where_seen(self, software: SoftwareRange) -> float | None:
        """Return the share of rows inside the range around the model that was fitted to all shapes.

        It is None if there is no such model.
        """
        if self.seen is None:
            return None
        log_ratios, spreads = self.seen
        relative = log_ratios / spreads
        return float(((software.low <= relative) & (relative <= software.high)).mean())

    def relative_to(self, software: SoftwareRange) -> GroupErrors:
        """Return the errors as multiples of an interval's ends, negative below the prediction."""
        relative = self.log_ratios / self.spreads
        ends = np.where(relative < 0, -software.low, software.high)
        return GroupErrors(relative / ends, self.groups)


class ErrorRange(NamedTuple):
    """Range of the errors of all shapes in spreads, and its factors for each kind of shape."""

    software: SoftwareRange
    factors: Mapping[str, tuple[float, float]]


def differing(table: PublicTable, other: PublicTable) -> CollectionPair:
    """Compare the times of two tables at the shapes that both have."""
    other_times = median_times(other).rename("other_us")
    rows = pd.concat([median_times(table), other_times], axis=1, join="inner")
    seconds = rows["measured_us"].to_numpy() * 1e-6
    log_ratios = np.log(rows["other_us"] / rows["measured_us"]).to_numpy()
    return CollectionPair(seconds, log_ratios)


def other_collections(
    folder: Path, table: PublicTable, tables: Iterable[PublicTable], shift: Shift
) -> list[CollectionErrors]:
    """Compare an imported table's predictions with the other collections of its machine.

    Only the shapes that both have are compared.

    Args:
        folder: recording of the imported table. Each of its predictions is by a fit that had seen
            neither that shape nor another collection.
        table: the imported table itself.
        tables: all public tables, of any machine.
        shift: expected difference of other frameworks.
    """
    predictions = _held_back(folder).join(median_times(table), on=_SIZES)
    calibration = json.loads((folder / "calibration.json").read_bytes())
    model = model_from_json(known_machine(table.slug), calibration)
    return [
        _compare_collection(model, predictions, other, shift)
        for other in other_tables(table, tables)
    ]


def other_tables(table: PublicTable, tables: Iterable[PublicTable]) -> list[PublicTable]:
    """Return the other tables of a table's machine that have rows."""
    return [
        other
        for other in tables
        if other.slug == table.slug and other.path != table.path and other.rows
    ]


def _held_back(folder: Path) -> pd.DataFrame:
    """Read each shape's prediction by a fit that had not seen it, with the prediction's spread.

    Returns:
        The columns m, n, k, dtype, time_us, lo_us, hi_us and spread, with each shape once.
    """
    calibration = json.loads((folder / "calibration.json").read_bytes())
    fit = calibration["groups"][GROUP]
    columns = [*_SIZES, "dtype", "time_us", "lo_us", "hi_us"]
    rows = pd.read_csv(folder / "predicted.csv", usecols=columns)
    rows = rows[rows["dtype"] == DTYPE]
    # The interval of each row leaves out its own error, which moves it by one rank of thousands.
    spread = np.log(rows["hi_us"] / rows["lo_us"]) / (fit["high"] - fit["low"])
    return rows.assign(spread=spread).drop_duplicates(_SIZES)


def median_times(table: PublicTable) -> pd.Series:
    """Return the microseconds of each shape, the median if it was measured several times."""
    return read_rows(table).groupby(_SIZES)["time_us"].median().rename("measured_us")


def _compare_collection(
    model: Model, predictions: pd.DataFrame, table: PublicTable, shift: Shift
) -> CollectionErrors:
    """Compare a collection with predictions at the shapes that both have.

    Args:
        model: the model of the imported table, which was fitted to all of its shapes.
        predictions: table of :func:`_held_back` with the imported table's times as measured_us.
        table: the collection.
        shift: expected difference of other frameworks.
    """
    # 1. Compare it with predictions by fits that had not seen the shape.
    other_times = median_times(table).rename("other_us")
    rows = predictions.join(other_times, on=_SIZES, how="inner")
    seconds = rows["other_us"].to_numpy() * 1e-6
    expected = shift.applied(rows["time_us"].to_numpy() * 1e-6)
    query = warm_query(rows)
    fit = model.fits[GROUP].for_software(_NO_RANGE, shift)
    spreads = fit.spreads(rows["spread"].to_numpy())
    errors = CollectionErrors.from_times(
        table.slug, table.source, query, expected, seconds, spreads
    )
    # 2. Compare it with the imported table's times, and with the model that has seen the shape.
    imported_seconds = rows["measured_us"].to_numpy() * 1e-6
    inputs = Inputs.from_query(model.machine, query)
    estimate, spread = corrected_estimate(inputs, fit.constants, fit.residual)
    seen = np.log(seconds / shift.applied(estimate.time)), fit.spreads(spread)
    return replace(errors, repeated=Errors.from_times(imported_seconds, seconds), seen=seen)


def warm_query(rows: pd.DataFrame) -> Query:
    """Return the shapes as public tables time them: operands from the cache where they fit it."""
    return Query.plain(gemms_of(rows), LIBRARY, True)


def write_validation(folder: Path, table: PublicTable, tables: Iterable[PublicTable]) -> None:
    """Write validation.json: how wrong an imported table's model is on held-out rows.

    ``same`` has the errors on rows of the table itself, predicted by a fit to other rows. ``other``
    has the errors on other frameworks' collections, with the share of rows inside the range
    ``software``, by which answers are widened. That range was learned from these collections, too;
    ``judge_model`` in tests/studies/shipping leaves them out.
    """
    software = software_of(table.slug)
    collection_errors = other_collections(folder, table, tables, shift_of(table.slug))
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
    """Write validation.json for a user's file, which no other collection can judge."""
    fits = json.loads((folder / "calibration.json").read_bytes())["groups"]
    errors = {
        group: {name: fit[name] for name in ("rows", "median", "mean", "p95")}
        for group, fit in fits.items()
    }
    document: dict[str, Any] = {"software": None, "same": errors, "other": []}
    write_json(folder / VALIDATION, document)


def judged_row(one: CollectionErrors, interval: ErrorRange) -> dict[str, Any]:
    """Return one collection's errors and its coverage by an interval, as a document for JSON.

    The coverage is the share of rows inside the interval. ``coverage_by_group`` has that of each
    kind of shape, with the number of its rows.
    """
    inside = one.inside(interval)
    low, high = one.ends(interval)
    row = {
        "machine": one.slug,
        "source": one.source,
        **asdict(one.errors),
        "coverage_90": float(inside.mean()),
        "median_width": float(np.median(np.exp(high) - np.exp(low))),
        "coverage_by_group": {
            name: [float(inside[one.groups == name].mean()), int((one.groups == name).sum())]
            for name in sorted(set(one.groups))
        },
    }
    if one.repeated is None:
        return row
    seen = one.covered_where_seen(interval.software)
    return {**row, "coverage_90_seen": seen, "repeated": asdict(one.repeated)}
