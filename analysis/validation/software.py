"""What other software does to the answers that rest on one framework's table.

A table is of one framework and one version of cuBLAS. Whoever asks runs another: its heuristics
choose other kernels, and its operands other values. So the interval of such an answer is learned
from collections that the model was not made of. Each collection is judged by the interval that all
others give: those of other machines, joined with those of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from analysis.imports.tables import Table, gemms_of, read_rows
from analysis.model.calibrate import pair_errors
from analysis.model.corrected import corrected_estimate
from analysis.model.features import Inputs
from analysis.model.fit import Fit, SoftwareRange
from analysis.model.fitting import fit_constants
from analysis.model.groups import GroupErrors, group_factors, shape_group
from analysis.model.offsets import LIBRARY
from analysis.model.predict import Model, model_from_json
from analysis.model.prior import (
    DTYPE,
    GROUP,
    factors_of_prior,
    shift_of,
    sibling_pairs,
    software_of,
)
from analysis.model.query import Query
from analysis.model.shift import Differing, Shift
from analysis.recordings.imported import VALIDATION, folder_of
from analysis.validation.errors import Errors
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
from sweeps.store import write_whole

FITTED_ROWS = 1500
"""Rows of a table that shipped constants are fitted to; the others judge them."""


def group_in(dtype: str) -> str:
    """The group of the library's products in a dtype."""
    return f"{LIBRARY} gemm {dtype}"


_TAIL = 0.05
_NORMAL = 1.645  # standard deviations on either side that hold nine in ten normal values
_PROMISED = 0.1  # the gain of a pair: advice that is certain of any promises about that much
_SIZES = ["m", "n", "k"]
_MAD_TO_STD = 1.48  # standard deviation of a normal law over its median absolute deviation
_UNDETERMINED = frozenset(
    {"misalignment", "fallback", "fallback_split", "repack", "sustained", "cached", "resident"}
)
"""Constants that warm, aligned bursts tell nothing about."""

_NO_SHIFT = Shift()
_NO_RANGE = SoftwareRange(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Collection:
    """How one collection's times differ from predictions that had not seen it.

    ``log_ratios`` are of measured over predicted time, ``spreads`` the predictions' own,
    ``pair_errors`` those of the time ratios of neighbouring shapes (see
    :func:`analysis.model.calibrate.pair_errors`) that promise a gain, ``groups`` the kind of each
    shape. ``repeated`` are the errors of the table's own time of the very shape, if it has one.
    ``seen`` has the log ratios and spreads of predictions by the model that answers, which was
    fitted to all shapes. ``origin`` is the machine whose constants predict, empty if it is the
    collection's own.
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
    ) -> Collection:
        """Compare measured seconds with predicted ones."""
        log_ratios = np.log(seconds / predicted)
        pairs = pair_errors(query, predicted, log_ratios, spreads, _PROMISED)
        groups = np.array([shape_group(problem) for problem in query.problems], dtype=object)
        errors = Errors.of(predicted, seconds)
        return cls(slug, source, errors, log_ratios, spreads, pairs, groups)

    @property
    def generation(self) -> str:
        """The generation of its machine."""
        return known_machine(self.slug).generation

    def ends(self, interval: Interval) -> tuple[Array, Array]:
        """The lower and the upper end of each row's interval, as log ratios."""
        factors = np.array([interval.factors.get(name, (1.0, 1.0)) for name in self.groups])
        below, above = factors.reshape(-1, 2).T
        software = interval.software
        return software.low * self.spreads * below, software.high * self.spreads * above

    def inside(self, interval: Interval) -> NDArray[np.bool_]:
        """Whether each row lies inside its interval."""
        low, high = self.ends(interval)
        return (low <= self.log_ratios) & (self.log_ratios <= high)

    def covered_where_seen(self, software: SoftwareRange) -> float | None:
        """The share inside of the model that was fitted to all shapes; None without one."""
        if self.seen is None:
            return None
        relative = self.seen[0] / self.seen[1]
        return float(((software.low <= relative) & (relative <= software.high)).mean())

    def relative_to(self, software: SoftwareRange) -> GroupErrors:
        """Its errors as multiples of the ends of an interval, negative below the prediction."""
        relative = self.log_ratios / self.spreads
        ends = np.where(relative < 0, -software.low, software.high)
        return GroupErrors(relative / ends, self.groups)


class Interval(NamedTuple):
    """The range of all shapes' errors in spreads, and what each kind of shape multiplies it by."""

    software: SoftwareRange
    factors: Mapping[str, tuple[float, float]]


def learned_factors(
    collections: Sequence[Collection], ranges: Mapping[str, SoftwareRange]
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


def learned_spread(collections: Sequence[Collection], independent: int) -> dict[str, float]:
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


def software_range(collections: Sequence[Collection]) -> SoftwareRange:
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


def sibling_shift(table: Table, chosen: Mapping[str, Table], tables: Iterable[Table]) -> Shift:
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
        [[_differing(sibling, other) for other in _beside(sibling, every)] for sibling in alike]
    )


def _differing(table: Table, other: Table) -> Differing:
    """At the shapes that both have."""
    there = _median_times(other).rename("there_us")
    rows = pd.concat([_median_times(table), there], axis=1, join="inner")
    seconds = rows["measured_us"].to_numpy() * 1e-6
    return Differing(seconds, np.log(rows["there_us"] / rows["measured_us"]).to_numpy())


def other_collections(
    folder: Path, table: Table, tables: Iterable[Table], shift: Shift
) -> list[Collection]:
    """The other collections of an imported table's machine, at the shapes that both have.

    Args:
        folder: the imported table's recording; each of its predictions is by a fit that had seen
            neither that shape nor another collection.
        table: what it is of.
        tables: all that there are.
        shift: how other software is expected to differ.
    """
    predictions = _held_back(folder).join(_median_times(table), on=_SIZES)
    calibration = json.loads((folder / "calibration.json").read_bytes())
    model = model_from_json(known_machine(table.slug), calibration)
    return [_compared(model, predictions, other, shift) for other in _beside(table, tables)]


def _beside(table: Table, tables: Iterable[Table]) -> list[Table]:
    """The other tables of its machine."""
    return [t for t in tables if t.slug == table.slug and t.path != table.path and t.rows]


def _held_back(folder: Path) -> pd.DataFrame:
    """Each shape's prediction by a fit that had not seen it, and the spread of that."""
    calibration = json.loads((folder / "calibration.json").read_bytes())
    fit = calibration["groups"][GROUP]
    columns = [*_SIZES, "dtype", "time_us", "lo_us", "hi_us"]
    rows = pd.read_csv(folder / "predicted.csv", usecols=columns)
    rows = rows[rows["dtype"] == DTYPE]
    # Each row's interval leaves out its own error, which moves it by one rank of thousands.
    spread = np.log(rows["hi_us"] / rows["lo_us"]) / (fit["high"] - fit["low"])
    return rows.assign(spread=spread).drop_duplicates(_SIZES)


def _median_times(table: Table) -> pd.Series:
    """Microseconds of each shape; of one that was measured twice, the median."""
    return read_rows(table).groupby(_SIZES)["time_us"].median().rename("measured_us")


def _compared(model: Model, predictions: pd.DataFrame, table: Table, shift: Shift) -> Collection:
    """At the shapes that both have."""
    there = _median_times(table).rename("there_us")
    rows = predictions.join(there, on=_SIZES, how="inner")
    names = ("there_us", "measured_us", "time_us")
    seconds, repeated, predicted = (rows[name].to_numpy() * 1e-6 for name in names)
    query, fit = warm_query(rows), model.fits[GROUP].for_software(_NO_RANGE, shift)
    expected, spreads = shift.applied(predicted), fit.spreads(rows["spread"].to_numpy())
    one = Collection.from_times(table.slug, table.source, query, expected, seconds, spreads)
    inputs = Inputs.of(model.machine, query)
    guess, spread = corrected_estimate(inputs, fit.constants, fit.residual)
    seen = np.log(seconds / shift.applied(guess.time)), fit.spreads(spread)
    return replace(one, repeated=Errors.of(repeated, seconds), seen=seen)


def warm_query(rows: pd.DataFrame) -> Query:
    """The shapes as others time them: operands from the cache where they fit it."""
    return Query.plain(gemms_of(rows), LIBRARY, True)


@dataclass(frozen=True)
class ShippedFit:
    """Constants to be shipped; the first collection is of the rows beside those fitted to."""

    fit: Fit
    collections: Sequence[Collection]


def shipped_fit(
    machine: Machine,
    table: Table,
    tables: Iterable[Table],
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
    every = [table, *_beside(table, tables)]
    rows_of = {t.source: rows for t in every if len(rows := read_rows(t, dtype))}
    pooled = list(rows_of) if dtype == "fp8" else [table.source]
    chosen = {source: np.zeros(len(rows), dtype=bool) for source, rows in rows_of.items()}
    for source in pooled:
        order = np.random.default_rng(0).permutation(len(rows_of[source]))
        chosen[source][order[: FITTED_ROWS // len(pooled)]] = True
    sample = pd.concat([rows_of[source][chosen[source]] for source in pooled], ignore_index=True)
    start, _ = foreign_constants(machine, dtype)
    inputs = Inputs.of(machine, warm_query(sample))
    constants = fit_constants(inputs, sample["time_us"].to_numpy() * 1e-6, start)

    def judged(source: str, part: pd.DataFrame, fit: Fit) -> Collection:
        query, seconds = warm_query(part), part["time_us"].to_numpy() * 1e-6
        predicted = fit.shift.applied(Inputs.of(machine, query).estimate(constants).time)
        spreads = fit.spreads(np.ones(len(part)))  # all alike, as without trees
        return Collection.from_times(machine.slug, source, query, predicted, seconds, spreads)

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
) -> tuple[list[Collection], list[Collection]]:
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
        inputs = Inputs.of(machine, query)
        calibration = json.loads(
            (folder_of(results, machine.slug) / "calibration.json").read_bytes()
        )
        fit = model_from_json(machine, calibration).fits[GROUP]
        fit = fit.for_software(_NO_RANGE, shift_of(machine.slug))
        guess, spread = corrected_estimate(inputs, fit.constants, fit.residual)
        predicted = fit.shift.applied(guess.time)
        public.append(
            Collection.from_times(
                machine.slug, path.stem, query, predicted, seconds, fit.spreads(spread)
            )
        )
        fit = fits[machine.slug]
        predicted = fit.shift.applied(inputs.estimate(fit.constants).time)
        alike = fit.spreads(np.ones(len(seconds)))
        shipped.append(
            Collection.from_times(machine.slug, path.stem, query, predicted, seconds, alike)
        )
    return public, shipped


def framework_floor(tables: Iterable[Table]) -> list[dict[str, Any]]:
    """How far a framework's earlier version is from its later one on the same machine.

    No prediction without own measurements can be expected to be closer. Errors are of the earlier
    version's times, as predictions of the later one's.
    """
    known = [t for t in tables if t.rows and t.slug in known_machines()]
    found = []
    for one, other in itertools.permutations(known, 2):
        alike = (one.slug, one.framework) == (other.slug, other.framework)
        if alike and _version_key(one) < _version_key(other):
            pair = _differing(one, other)
            later = pair.seconds * np.exp(pair.log_ratios)
            found.append(
                {
                    "machine": one.slug, "earlier": one.source, "later": other.source,
                    **asdict(Errors.of(pair.seconds, later)),
                }
            )  # fmt: skip
    return found


def _version_key(table: Table) -> list[int]:
    """The numbers in a framework's version, in their order: 0.5.6.post2 comes before 0.5.14."""
    return [int(number) for number in re.findall(r"\d+", table.version)]


def write_validation(folder: Path, table: Table, tables: Iterable[Table]) -> None:
    """validation.json: how wrong an imported table's model is on rows that it has not seen.

    ``same`` are rows of its own table, predicted by a fit to other rows; ``other`` the collections
    of other software, with the share that lies in the range of other ``software``, by which answers
    are widened. That range was learned from them, too: :func:`judge_model` leaves them out.
    """
    software = software_of(table.slug)
    others = other_collections(folder, table, tables, shift_of(table.slug))
    factors = factors_of_prior("public", known_machine(table.slug).generation)
    fit = json.loads((folder / "calibration.json").read_bytes())["groups"][GROUP]
    document = {
        "source": table.source,
        "software": software.to_json(),
        "same": {name: fit[name] for name in ("rows", "median", "mean", "p95")},
        "other": [judged_row(one, Interval(software, factors)) for one in others],
    }
    write_whole(folder / VALIDATION, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write_own_validation(folder: Path) -> None:
    """validation.json of a file of the user's: there is no other software to judge it by."""
    fits = json.loads((folder / "calibration.json").read_bytes())["groups"]
    errors = {
        group: {name: fit[name] for name in ("rows", "median", "mean", "p95")}
        for group, fit in fits.items()
    }
    document: dict[str, Any] = {"software": None, "same": errors, "other": []}
    write_whole(folder / VALIDATION, json.dumps(document, indent=1, allow_nan=False) + "\n")


def judge_model(
    collections: Sequence[Collection], more: Sequence[Collection] = ()
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
    one: Collection, collections: Sequence[Collection], more: Sequence[Collection]
) -> Interval:
    others = [c for c in collections if c is not one]
    others += [c for c in more if c.slug != one.slug]
    ranges = {c.slug: _range_without(one, collections) for c in others}
    return Interval(
        _range_without(one, collections),
        learned_factors(others, ranges).get(one.generation, {}),
    )


def _range_without(one: Collection, collections: Sequence[Collection]) -> SoftwareRange:
    elsewhere = [c for c in collections if c.slug != one.slug]
    here = [c for c in collections if c.slug == one.slug and c is not one]
    if not elsewhere or not here:
        return software_range(elsewhere or here)
    return software_range(elsewhere).joined(software_range(here))


def judge_shipped(
    shipped: Sequence[ShippedFit], more: Sequence[Collection] = ()
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


def judged_row(one: Collection, interval: Interval) -> dict[str, Any]:
    """One collection's errors, and its coverage by an interval, of all rows and of each kind."""
    inside = one.inside(interval)
    low, high = one.ends(interval)
    row = {
        "machine": one.slug, "source": one.source, **asdict(one.errors),
        "coverage_90": float(inside.mean()),
        "median_width": float(np.median(np.exp(high) - np.exp(low))),
        "coverage_by_group": {
            name: [float(inside[one.groups == name].mean()), int((one.groups == name).sum())]
            for name in sorted(set(one.groups))
        },
    }  # fmt: skip
    if one.repeated is None:
        return row
    seen = one.covered_where_seen(interval.software)
    return {**row, "coverage_90_seen": seen, "repeated": asdict(one.repeated)}


@dataclass(frozen=True)
class Move:
    """Advice to move, and what it gained in another collection; gains are fractions."""

    question: str
    claimed: float
    claimed_lo: float
    gained: float


def advised_moves(folder: Path, table: Table, tables: Iterable[Table]) -> list[Move]:
    """An imported table's advice to move, once per other collection that timed both shapes."""
    told = json.loads((folder / "recommendations.json").read_bytes())
    moves = []
    for times in (_median_times(other).to_dict() for other in _beside(table, tables)):
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
