"""What constants are worth on another machine of the generation.

Each machine that has constants and tables is predicted by those of each other one of its
generation, carried over by the datasheets. From these errors the interval of machines without
measurements is learned; and each machine is judged by an interval learned without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from analysis.imports.tables import PublicTable, read_rows
from analysis.model.features import Inputs
from analysis.model.fit import Fit, SoftwareRange
from analysis.model.prior import (
    DTYPE,
    carried_fit,
    mean_fit,
    nearest_sibling,
    sibling_pairs,
)
from analysis.validation.software import CollectionErrors, ErrorRange, judged_row, warm_query
from kernels.machine import Machine, known_machine
from kernels.timemodel.constants import Constants, scaled_constants
from tests.studies.shipping.learning import ShippedFit, software_range, widened_by_others

_NO_RANGE = SoftwareRange(0.0, 0.0, 0.0, 0.0)


def carried_collections(
    fits: Mapping[str, Fit], tables: Iterable[PublicTable]
) -> list[CollectionErrors]:
    """Every collection of each machine, as constants of each other of its generation predict it.

    Args:
        fits: those that are shipped, by slug.
        tables: all that there are.
    """
    pairs = sibling_pairs(fits)
    judged = {here.slug for _, here in pairs}
    found = []
    for table in (t for t in tables if t.rows and t.slug in judged):
        rows = read_rows(table, DTYPE)
        query, seconds = warm_query(rows), rows["time_us"].to_numpy() * 1e-6
        inputs = Inputs.from_query(known_machine(table.slug), query)
        for there, here in pairs:
            if here.slug == table.slug:
                fit = fits[there.slug]
                spreads = fit.spreads(np.ones(len(rows)))  # all alike, as without trees
                constants = scaled_constants(fit.constants, there, here, DTYPE)
                predicted = inputs.estimate(constants).time
                one = CollectionErrors.from_times(
                    here.slug, table.source, query, predicted, seconds, spreads
                )
                found.append(replace(one, origin=there.slug))
    return found


def averaged_collections(
    fits: Mapping[str, Fit], tables: Iterable[PublicTable]
) -> list[CollectionErrors]:
    """Every collection as the mean of the constants of all other generations predicts it.

    Args:
        fits: those that are shipped, by slug.
        tables: all that there are.
    """
    found = []
    for table in (t for t in tables if t.rows and t.slug in fits):
        here = known_machine(table.slug)
        rows = read_rows(table, DTYPE)
        query, seconds = warm_query(rows), rows["time_us"].to_numpy() * 1e-6
        constants = _without_generation(fits, here).constants
        predicted = Inputs.from_query(here, query).estimate(constants).time
        alike = np.ones(len(rows))  # all spreads are alike, as without trees
        found.append(
            CollectionErrors.from_times(here.slug, table.source, query, predicted, seconds, alike)
        )
    return found


def carried_pairs(fits: Mapping[str, Fit]) -> list[tuple[Constants, Constants]]:
    """Fitted constants of each machine, and those that each sibling gives it."""
    return [
        (
            fits[here.slug].constants,
            scaled_constants(fits[there.slug].constants, there, here, DTYPE),
        )
        for there, here in sibling_pairs(fits)
    ]


def averaged_pairs(fits: Mapping[str, Fit]) -> list[tuple[Constants, Constants]]:
    """Fitted constants of each machine, and the mean of those of all other generations."""
    return [
        (fit.constants, _without_generation(fits, known_machine(slug)).constants)
        for slug, fit in fits.items()
    ]


def _without_generation(fits: Mapping[str, Fit], here: Machine) -> Fit:
    known = {
        slug: fit.constants
        for slug, fit in fits.items()
        if known_machine(slug).generation != here.generation
    }
    return mean_fit(known, here, _NO_RANGE)


def judge_generation(
    shipped: Mapping[str, ShippedFit], collections: Sequence[CollectionErrors]
) -> list[dict[str, Any]]:
    """Each machine's collections by the constants that it would get if nobody had measured it.

    Their interval is learned from other machines, and from pairs that the machine is in neither
    way.
    """
    rows = []
    for slug in shipped:
        here = known_machine(slug)
        there = nearest_sibling(here, shipped)
        if there is None:
            continue
        fits = widened_by_others({name: one for name, one in shipped.items() if name != slug})
        learned = software_range([c for c in collections if slug not in (c.origin, c.slug)])
        fit = carried_fit(fits[there.slug], there, here, learned)
        interval = ErrorRange(
            SoftwareRange(fit.low, fit.high, fit.pair_low, fit.pair_high), fit.groups
        )
        rows += [
            {"constants_from": there.slug, **judged_row(one, interval)}
            for one in collections
            if (one.origin, one.slug) == (there.slug, slug)
        ]
    return rows
