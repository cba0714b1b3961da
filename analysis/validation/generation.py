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

from analysis.model.features import Inputs
from analysis.model.fit import Fit, SoftwareRange
from analysis.model.generation import DTYPE, carried_fit, nearest_sibling, sibling_pairs
from analysis.recordings.tables import Table, read_rows
from analysis.validation.software import (
    Collection,
    ShippedFit,
    judged_row,
    software_range,
    warm_query,
    widened_by_others,
)
from kernels.constants import scaled_constants
from kernels.machine import known_machine


def carried_collections(fits: Mapping[str, Fit], tables: Iterable[Table]) -> list[Collection]:
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
        inputs = Inputs.of(known_machine(table.slug), query)
        for there, here in pairs:
            if here.slug == table.slug:
                fit = fits[there.slug]
                spreads = fit.spreads(np.ones(len(rows)))  # all alike, as without trees
                constants = scaled_constants(fit.constants, there, here, DTYPE)
                predicted = inputs.estimate(constants).time
                one = Collection.of(here.slug, table.source, query, predicted, seconds, spreads)
                found.append(replace(one, origin=there.slug))
    return found


def judge_generation(
    shipped: Mapping[str, ShippedFit], collections: Sequence[Collection]
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
        interval = SoftwareRange(fit.low, fit.high, fit.pair_low, fit.pair_high)
        rows += [
            {"constants_from": there.slug, **judged_row(one, interval)}
            for one in collections
            if (one.origin, one.slug) == (there.slug, slug)
        ]
    return rows
