"""Learn the shipped constants, and the intervals of answers, from the tables of all machines.

Each collection is judged by the interval that all others give: those of other machines, joined with
those of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from analysis.imports.tables import PublicTable, read_rows
from analysis.model.corrected import corrected_estimate
from analysis.model.features import Inputs
from analysis.model.fit import Fit, SoftwareRange
from analysis.model.fitting import fit_constants
from analysis.model.groups import group_factors
from analysis.model.offsets import LIBRARY
from analysis.model.predict import model_from_json
from analysis.model.prior import (
    DTYPE,
    GROUP,
    shift_of,
    sibling_pairs,
)
from analysis.model.shift import Shift
from analysis.recordings.imported import folder_of
from analysis.validation.error_summary import Errors
from analysis.validation.software import (
    _NO_RANGE,
    CollectionErrors,
    ErrorRange,
    compare_tables,
    judged_row,
    median_times,
    other_tables,
    warm_query,
)
from kernels.common.errors import UserError
from kernels.machine import Machine, known_machine, known_machines
from kernels.problem import WIDE_BYTES, Gemm
from kernels.timemodel.constants import (
    BOUNDS,
    DURATIONS,
    RATES,
    Constants,
    foreign_constants,
    to_fit_scale,
)
from kernels.timemodel.estimate import Array, priced_alignment

FITTED_ROWS = 1500
"""Rows of a table that shipped constants are fitted to; the others judge them."""


def group_in(dtype: str) -> str:
    """The group of the library's products in a dtype."""
    return f"{LIBRARY} gemm {dtype}"


_TAIL = 0.05
_NORMAL = 1.645  # standard deviations on either side that hold nine in ten normal values
_MAD_TO_STD = 1.48  # standard deviation of a normal law over its median absolute deviation
_UNDETERMINED = frozenset(
    {"misalignment", "fallback", "fallback_split", "repack", "sustained", "cached", "resident"}
)
"""Constants that warm, aligned bursts tell nothing about."""

_NO_SHIFT = Shift()


def learned_factors(
    collections: Sequence[CollectionErrors], ranges: Mapping[str, SoftwareRange]
) -> dict[str, dict[str, tuple[float, float]]]:
    """By generation, what each kind of shape multiplies an interval's ends by.

    Args:
        collections: errors of predictions that had not seen them.
        ranges: the interval of the answers about each machine, by slug.
    """
    found = {}
    for generation in dict.fromkeys(one.generation for one in collections):
        known = [
            one.relative_to(ranges[one.slug]) for one in collections if one.generation == generation
        ]
        found[generation] = group_factors(known)
    return found


def learned_spread(collections: Sequence[CollectionErrors], independent: int) -> dict[str, float]:
    """Two standard deviations of a kind of prior, see :class:`analysis.model.prior.Spread`.

    ``scale`` is the root mean square of the collections' median log ratios, widened because few
    machines showed it: a normal law that wide has the 90% range of Student's predictive law.
    ``shape`` is the median over the collections of a normal law's standard deviation with the same
    middle 90%.

    Args:
        collections: errors of predictions that had not seen them.
        independent: how many of their machines, or generations, are unlike one another.
    """
    medians = [float(np.median(one.log_ratios)) for one in collections]
    ranges = [np.quantile(one.log_ratios, [_TAIL, 1 - _TAIL]) for one in collections]
    widths = [float(high - low) / (2 * _NORMAL) for low, high in ranges]
    few = stats.t.ppf(1 - _TAIL, independent - 1) / _NORMAL * math.sqrt(1 + 1 / independent)
    return {
        "scale": float(few * np.sqrt(np.mean(np.square(medians)))),
        "shape": float(np.median(widths)),
    }


def constants_spread(pairs: Iterable[tuple[Constants, Constants]]) -> float:
    """The standard deviation of a constant about another machine's, once the scale is corrected.

    Args:
        pairs: fitted constants and what they were expected to be. It is 1.48 times the median of
            the absolute differences on the constants' fit scale, over those that tables determine.
    """
    names = [name for name in BOUNDS if name not in _UNDETERMINED]
    direction = np.array([-(name in RATES) + (name in DURATIONS) for name in names], dtype=float)
    direction /= np.linalg.norm(direction)

    def vector(c: Constants) -> Array:
        return np.array([to_fit_scale(name, getattr(c, name)) for name in names])

    apart = [vector(fitted) - vector(expected) for fitted, expected in pairs]
    left = [one - direction * (one @ direction) for one in apart]
    return float(_MAD_TO_STD * np.median(np.abs(left)))


def software_range(collections: Sequence[CollectionErrors]) -> SoftwareRange:
    """The range of nine in ten errors.

    Every machine weighs as much, by the constants of each other machine; on it every collection.

    Raises:
        UserError: there is no collection.
    """
    if not collections:
        raise UserError("There is no collection to learn an interval from; import more tables.")

    def ends(parts: Sequence[Array]) -> tuple[float, float]:
        owners = [(c.origin, c.slug) for c in collections]
        weights = [
            np.full(len(part), 1 / owners.count(owner) / max(len(part), 1))
            for owner, part in zip(owners, parts, strict=True)
        ]
        values, weight = np.concatenate(parts), np.concatenate(weights)
        low, high = np.quantile(values, [_TAIL, 1 - _TAIL], weights=weight, method="inverted_cdf")
        return float(low), float(high)

    times = ends([c.log_ratios / c.spreads for c in collections])
    pairs = [c.pair_errors for c in collections]
    # A coarse grid has no neighbours. The errors of two unlike shapes are independent: relative to
    # the root of the sum of both spreads' squares, as wide as one's own.
    return SoftwareRange(*times, *(ends(pairs) if any(map(len, pairs)) else times))


def sibling_shift(
    table: PublicTable, chosen: Mapping[str, PublicTable], tables: Iterable[PublicTable]
) -> Shift:
    """How other software differs from a table's on its machine's siblings (none of its own rows).

    Args:
        table: the one that answers rest on.
        chosen: likewise of every machine, by slug.
        tables: all that there are.
    """
    pairs = sibling_pairs(chosen)
    siblings = [chosen[there.slug] for there, here in pairs if here.slug == table.slug]
    alike = [sibling for sibling in siblings if sibling.framework == table.framework]
    every = list(tables)
    return Shift.learned(
        [
            [compare_tables(sibling, other) for other in other_tables(sibling, every)]
            for sibling in alike
        ]
    )


@dataclass(frozen=True)
class ShippedFit:
    """Constants to be shipped; the first collection is of the rows that they were not fitted to."""

    fit: Fit
    collections: Sequence[CollectionErrors]


def shipped_fit(
    machine: Machine,
    table: PublicTable,
    tables: Iterable[PublicTable],
    dtype: str = DTYPE,
    shift: Shift = _NO_SHIFT,
) -> ShippedFit:
    """Constants fitted to a sample of a table, judged on its other rows and other collections.

    They answer for any software, so all are judged by times as they are shifted, the table's too.
    Their own error is that of the sample: few constants cannot learn so many rows by heart. Their
    interval is as wide as the other rows of these collections ask for.

    In fp8 the sample is of all the machine's collections: frameworks quantise each in its own way,
    and constants of one are a bias for the others.
    """
    every = [table, *other_tables(table, tables)]
    rows_of = {t.source: rows for t in every if len(rows := read_rows(t, dtype))}
    pooled = list(rows_of) if dtype == "fp8" else [table.source]
    chosen = {source: np.zeros(len(rows), dtype=bool) for source, rows in rows_of.items()}
    for source in pooled:
        order = np.random.default_rng(0).permutation(len(rows_of[source]))
        chosen[source][order[: FITTED_ROWS // len(pooled)]] = True
    sample = pd.concat([rows_of[source][chosen[source]] for source in pooled], ignore_index=True)
    start, _ = foreign_constants(machine, dtype)
    inputs = Inputs.from_query(machine, warm_query(sample))
    constants = fit_constants(inputs, sample["time_us"].to_numpy() * 1e-6, start)

    def judged(source: str, part: pd.DataFrame, fit: Fit) -> CollectionErrors:
        query, seconds = warm_query(part), part["time_us"].to_numpy() * 1e-6
        predicted = fit.shift.applied(Inputs.from_query(machine, query).estimate(constants).time)
        spreads = fit.spreads(np.ones(len(part)))  # all alike, as without trees
        return CollectionErrors.from_times(machine.slug, source, query, predicted, seconds, spreads)

    rest = {source: rows[~chosen[source]] for source, rows in rows_of.items()}
    bare = Fit(constants, rows=len(sample), aligned_only=True, layout="nt", shift=shift)
    ends = software_range([judged(table.source, sample, bare)])
    known = replace(bare, low=ends.low, high=ends.high, pair_low=0.0, pair_high=0.0)
    fit = known.for_software(_NO_RANGE, shift)
    collections = [judged(source, rows, fit) for source, rows in rest.items()]
    errors = collections[0].errors
    fit = replace(
        fit.widened(software_range(collections)), median=errors.median, mean=errors.mean,
        p95=errors.p95, pairs=sum(len(c.pair_errors) for c in collections),
    )  # fmt: skip
    return ShippedFit(fit, collections)


def narrow_collections(
    path: Path, results: Path, fits: Mapping[str, Fit]
) -> tuple[list[CollectionErrors], list[CollectionErrors]]:
    """A file's times at small N, as the imported tables and as the shipped constants predict them.

    Args:
        path: a CSV with the columns machine, m, n, k and time_us.
        results: where the tables are imported.
        fits: the shipped ones, by slug.
    """
    rows = pd.read_csv(path).assign(dtype=DTYPE)
    public, shipped = [], []
    for slug, part in rows.groupby("machine"):
        machine = known_machine(str(slug))
        query, seconds = warm_query(part), part["time_us"].to_numpy(dtype=float) * 1e-6
        like = np.array([priced_alignment(p) >= WIDE_BYTES for p in query.problems])
        query, seconds = query.take(np.flatnonzero(like)), seconds[like]
        inputs = Inputs.from_query(machine, query)
        calibration = json.loads(
            (folder_of(results, machine.slug) / "calibration.json").read_bytes()
        )
        fit = model_from_json(machine, calibration).fits[GROUP]
        fit = fit.for_software(_NO_RANGE, shift_of(machine.slug))
        guess, spread = corrected_estimate(inputs, fit.constants, fit.residual)
        predicted = fit.shift.applied(guess.time)
        public.append(
            CollectionErrors.from_times(
                machine.slug, path.stem, query, predicted, seconds, fit.spreads(spread)
            )
        )
        fit = fits[machine.slug]
        predicted = fit.shift.applied(inputs.estimate(fit.constants).time)
        alike = fit.spreads(np.ones(len(seconds)))
        shipped.append(
            CollectionErrors.from_times(machine.slug, path.stem, query, predicted, seconds, alike)
        )
    return public, shipped


def framework_floor(tables: Iterable[PublicTable]) -> list[dict[str, Any]]:
    """How far a framework's earlier version is from its later one on the same machine.

    No prediction without own measurements can be expected to be closer. Errors are of the earlier
    version's times, as predictions of the later one's.
    """
    known = [t for t in tables if t.rows and t.slug in known_machines()]
    found = []
    for one, other in itertools.permutations(known, 2):
        alike = (one.slug, one.framework) == (other.slug, other.framework)
        if alike and _version_key(one) < _version_key(other):
            pair = compare_tables(one, other)
            later = pair.seconds * np.exp(pair.log_ratios)
            found.append(
                {
                    "machine": one.slug, "earlier": one.source, "later": other.source,
                    **asdict(Errors.from_times(pair.seconds, later)),
                }
            )  # fmt: skip
    return found


def _version_key(table: PublicTable) -> list[int]:
    """The numbers in a framework's version, in their order: 0.5.6.post2 comes before 0.5.14."""
    return [int(number) for number in re.findall(r"\d+", table.version)]


def judge_model(
    collections: Sequence[CollectionErrors], more: Sequence[CollectionErrors] = ()
) -> list[dict[str, Any]]:
    """Each collection's errors, and its coverage by an interval that had not seen it.

    That is the one of all other machines, joined with that of the machine's other collections, as
    answers have it (:func:`analysis.model.prior.software_of`), with the factors that the
    generation's other collections ask for.

    Args:
        collections: of all machines, judged one by one.
        more: collections of rare kinds of shapes, from which only factors are learned; they are
            judged, too, by the factors of other machines.
    """
    rows = [judged_row(one, _interval_without(one, collections, more)) for one in collections]
    return rows + [judged_row(one, _interval_without(one, collections, more)) for one in more]


def _interval_without(
    one: CollectionErrors, collections: Sequence[CollectionErrors], more: Sequence[CollectionErrors]
) -> ErrorRange:
    others = [c for c in collections if c is not one]
    others += [c for c in more if c.slug != one.slug]
    ranges = {c.slug: _range_without(one, collections) for c in others}
    return ErrorRange(
        _range_without(one, collections),
        learned_factors(others, ranges).get(one.generation, {}),
    )


def _range_without(one: CollectionErrors, collections: Sequence[CollectionErrors]) -> SoftwareRange:
    elsewhere = [c for c in collections if c.slug != one.slug]
    here = [c for c in collections if c.slug == one.slug and c is not one]
    if not elsewhere or not here:
        return software_range(elsewhere or here)
    return software_range(elsewhere).joined(software_range(here))


def judge_shipped(
    shipped: Sequence[ShippedFit], more: Sequence[CollectionErrors] = ()
) -> list[dict[str, Any]]:
    """Each collection's errors, and its coverage by an interval that had not seen it.

    As in :func:`judge_model`, by constants of several machines and of one dtype.
    """
    return judge_model([one for each in shipped for one in each.collections], more)


def widened_by_others(shipped: Mapping[str, ShippedFit]) -> dict[str, Fit]:
    """The fits by slug, with intervals as wide as other machines' collections ask for, too."""
    fits = {}
    for slug, one in shipped.items():
        elsewhere = [c for each in shipped.values() for c in each.collections if c.slug != slug]
        fits[slug] = one.fit.widened(software_range(elsewhere)) if elsewhere else one.fit
    return fits


@dataclass(frozen=True)
class Move:
    """Advice to move, and what it gained in another collection; gains are fractions."""

    question: str
    claimed: float
    claimed_lo: float
    gained: float


def advised_moves(folder: Path, table: PublicTable, tables: Iterable[PublicTable]) -> list[Move]:
    """An imported table's advice to move, once per other collection that timed both shapes."""
    told = json.loads((folder / "recommendations.json").read_bytes())
    moves = []
    for times in (median_times(other).to_dict() for other in other_tables(table, tables)):
        for answer in told:
            before, after = (Gemm.parse(answer[name]) for name in ("problem", "instead"))
            here, there = (times.get((gemm.m, gemm.n, gemm.k)) for gemm in (before, after))
            if answer["verdict"] == "leave it" or here is None or there is None:
                continue
            # To choose is to compare speeds, to pad is to compare times.
            work = after.flops / before.flops if answer["question"] == "choose" else 1.0
            claimed = answer["predicted_gain"], answer["predicted_lo"]
            moves.append(Move(answer["question"], *claimed, here / there * work - 1))
    return moves


def judge_moves(moves: Sequence[Move]) -> list[dict[str, Any]]:
    """By question: how many moves other software timed, and what came of them."""
    return [
        {
            "question": question,
            "moves": len(rows),
            "faster": float((rows["gained"] > 0).mean()),
            "reached_lower_end": float((rows["gained"] >= rows["claimed_lo"]).mean()),
            "median_claimed": float(rows["claimed"].median()),
            "median_gained": float(rows["gained"].median()),
        }
        for question, rows in pd.DataFrame(map(asdict, moves)).groupby("question", sort=True)
    ]
