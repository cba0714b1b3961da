"""Priors: what is assumed about the times on a machine before any of them is measured.

A sibling of a machine is another GPU of its generation. A fit starts from the first of these priors
that exists:

1. imported public tables of the machine or of its siblings;
2. constants that Rooftile ships for the machine;
3. shipped constants of a sibling, scaled according to the two datasheets;
4. the mean of the shipped constants of all generations, also scaled;
5. prior 2, 3 or 4 of another dtype (:func:`shared_prior`);
6. default constants of the machine's generation, in most cases with an interval of a factor of two.

Each prior has an uncertainty (:class:`Spread`). It was estimated from public tables, except for
tf32 and for the default constants, whose errors are assumed (:data:`UNKNOWN`). The larger the
uncertainty is, the more a fit moves away from the prior when the machine is measured
(:mod:`analysis.model.fitting`). The prior's 90% interval becomes narrower as measurements determine
the error that all shapes share. As more cases are measured, an interval from their held-out errors
gradually replaces the prior's interval (:mod:`analysis.model.calibrate`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.model.features import Inputs
from analysis.model.fit import (
    FP32_LIKE,
    SOFTWARE_ERROR,
    UNCALIBRATED,
    UNCALIBRATED_PAIR,
    Fit,
    SoftwareRange,
)
from analysis.model.offsets import LIBRARY, CollectionTrees, Offsets
from analysis.model.query import Query
from analysis.model.shift import Shift
from kernels.config import HAND_WRITTEN
from kernels.machine import Machine, known_machine
from kernels.timemodel.constants import (
    Constants,
    default_constants,
    mean_constants,
    measured_on,
    scaled_constants,
    shipped_fits,
)

DTYPE = "bf16"
"""Dtype of the public times from which the uncertainty of priors was learned."""

GROUP = f"{LIBRARY} gemm {DTYPE}"
"""Name of the group of bf16 GEMMs that the vendor library computes."""

TWINS = {"bf16": "fp16", "fp16": "bf16"}
"""Mapping from each 16-bit dtype to the other one. Both dtypes run on the same arithmetic units."""

_TWIN_WIDER = 1.1
"""Factor by which the intervals widen if a fit to times in one 16-bit dtype predicts times in the
other dtype.

The factor was checked on 10,240 measured times of fp16 Llama layers on an H100
(casys-kaist/LLMServingSim).
The shipped bf16 constants predict these times with a mean error of 5.7%, and the 90% interval
contains 97% of them (results/accuracy/every-m.jsonl)."""

_SM_EXPONENT = 0.75
"""Exponent of the power law by which :func:`mean_fit` scales an SM's read and write rates with its
arithmetic rate.

With an exponent of 1, predicted times for graphics GPUs would be too long, because the 16-bit
arithmetic rate of these GPUs is halved, but their read and write rates are not. With this value,
constants of the other generations predict the public tables of each generation best."""
_TREES_MISFIT = 0.05  # Spread.misfit of a prior from public tables.
_NORMAL = 1.645  # Half-width of a normal distribution's 90% interval, in standard deviations.
_FACTOR_OF_TWO = "a factor of two either way"
# The range FP32_LIKE in words.
_FP32_WORDS = "−10% to +42%, which applies to GPUs with the same compute capability"


@dataclass(frozen=True)
class Spread:
    """Uncertainty of a prior, as standard deviations of its errors.

    The error of a shape is log(measured / predicted).

    Attributes:
        scale: error that all shapes of a machine share.
        shape: error of a single shape once the shared error is corrected.
        constants: error of one constant, on the scale on which the constant is fitted, once the
            shared error is corrected.
        misfit: error of a single shape that remains even with the best constants.
    """

    scale: float
    shape: float
    constants: float = 0.15
    misfit: float = 0.1

    def after(self, rows: int) -> float:
        """Return the standard deviation of one shape's error after ``rows`` measured shapes."""
        # The inverse of a variance is a precision, and the precisions of independent sources add
        # up. Each measured shape shows the shared error, blurred by the error of that shape.
        precision_of_shared_error = 1 / self.scale**2 + rows / self.shape**2
        return math.hypot(self.shape, 1 / math.sqrt(precision_of_shared_error))

    def narrowing(self, rows: int) -> float:
        """Return the factor, at most 1, by which ``rows`` measured shapes narrow an interval."""
        return self.after(rows) / self.after(0)

    @classmethod
    def from_shipped(cls, kind: str) -> Spread:
        """Read the learned spread of one kind of prior: public, shipped, sibling or generation."""
        learned = shipped_fits()["spreads"][kind]
        return cls(**learned, misfit=_TREES_MISFIT if kind == "public" else cls.misfit)


UNKNOWN = Spread(scale=0.37, shape=0.2, constants=1.0)
"""Spread of a prior whose errors were never measured.

``scale`` and ``shape`` together give approximately the interval
:data:`analysis.model.fit.UNCALIBRATED`.
The spread of the constants is wide, because default constants are only a starting point."""


@dataclass(frozen=True)
class Prior:
    """Prior of one group: it predicts times before any measurement, and fits start from it.

    Attributes:
        fit: constants and offsets, with the intervals that hold before any measurement.
        kind: where the prior comes from, as in :class:`analysis.model.basis.Basis`.
        source: where the prior comes from, in words for the user.
        spread: uncertainty of the prior.
        warm: True if ``fit`` predicts warm times: operands that fit into the last-level cache are
            already in it.
        collections: public tables with trees.
        leading: positions of the ``collections`` that predict times before any measurement.
    """

    fit: Fit
    kind: str
    source: str
    spread: Spread
    warm: bool = False
    collections: tuple[CollectionTrees, ...] = ()
    leading: tuple[int, ...] = ()

    @classmethod
    def bare(cls, constants: Constants, spread: Spread = UNKNOWN) -> Prior:
        """Make a prior from constants only, with an interval that follows from ``spread``."""
        end = _NORMAL * spread.after(0)
        return cls(Fit(constants, low=-end, high=end, aligned_only=True), "none", "", spread)

    def same_machine(self, machine: Machine) -> list[bool]:
        """Return a flag for each collection: True if it was measured on ``machine`` itself."""
        return [collection.machine.slug == machine.slug for collection in self.collections]

    @property
    def weights(self) -> list[float]:
        """Weight of each collection before any measurement of the machine."""
        weights = [0.0] * len(self.collections)
        for position in self.leading:
            weights[position] = 1 / len(self.leading)
        return weights


_TREES_ERROR = 0.04
"""Typical standard deviation of log(measured / predicted) when a fit to a public table predicts
held-out times of the same table."""


def prior_from_tables(
    machine: Machine, dtype: str, collections: Sequence[CollectionTrees], query: Query
) -> Prior:
    """Build a prior from public tables of a machine and of its siblings.

    Before any measurement, predictions come from the leading collections (:func:`leaders`), all
    with equal weights. The ends of the intervals were learned as multiples of the spread
    (:class:`analysis.model.fit.Fit`), which depends on the error of a fit to the collections. This
    error is not known for the given collections, so a typical error is assumed
    (:data:`_TREES_ERROR`).

    Args:
        machine: the machine whose times are predicted.
        dtype: dtype of the predicted GEMMs; the collections may have the other 16-bit dtype.
        collections: public tables with trees, the most trusted first; at least one.
        query: GEMMs from which the trees were not grown, at least one. They show how much the trees
            typically disagree.
    """
    # 1. Make a prior without offsets, which knows the weights of the collections. All times are
    #    relative to the formula with the first collection's constants.
    leading = leaders(machine, [collection.machine for collection in collections])
    prior = Prior(
        Fit(collections[0].constants_on(machine, dtype)),
        "public",
        "public tables",
        Spread.from_shipped("public"),
        warm=True,
        collections=tuple(collections),
        leading=tuple(leading),
    )
    # 2. Replace its fit by one with offsets and intervals. A shape for which the trees disagree as
    #    much as usual gets the typical error. The scale of the fit converts the trees' disagreement
    #    to that error.
    offsets = Offsets.from_weights(collections, prior.weights)
    spreads = offsets.spread(offsets.estimates(Inputs.from_query(machine, query)))
    typical_spread = float(np.median(spreads))
    software = software_of(machine.slug, dtype)
    # The factors for kinds of shapes were learned from 16-bit times.
    is_16_bit = dtype in TWINS
    # Public tables only have unbatched GEMMs with aligned rows, in layout nt.
    fit = Fit(
        prior.fit.constants,
        offsets=offsets,
        aligned_only=True,
        layout="nt",
        low=software.low,
        high=software.high,
        pair_low=software.pair_low,
        pair_high=software.pair_high,
        scale=_TREES_ERROR / typical_spread,
        beside=SOFTWARE_ERROR,
        groups=factors_of_prior("public", machine.generation) if is_16_bit else {},
    )
    return replace(prior, fit=fit, source=offsets.source)


def leaders(machine: Machine, machines: Sequence[Machine]) -> list[int]:
    """Return the positions of the collections that predict times before a machine is measured.

    The result is the machine's first collection, or else the first collection of each sibling.
    ``machines`` has the machine on which each collection was measured.
    """
    slugs = [owner.slug for owner in machines]
    if machine.slug in slugs:
        return [slugs.index(machine.slug)]
    return [slugs.index(slug) for slug in dict.fromkeys(slugs)]


def software_of(slug: str, dtype: str = DTYPE) -> SoftwareRange:
    """Return the 90% ranges of prediction errors for other frameworks, in units of the spread.

    For fp8, the resulting interval is at least as wide as without any measurement, because
    frameworks quantise in different ways.
    """
    if dtype == "fp8":
        # A prediction without any model error has the spread SOFTWARE_ERROR, and a pair of such
        # predictions √2 times as much. Even then, the interval must be UNCALIBRATED.
        low, high = UNCALIBRATED
        pair_low, pair_high = UNCALIBRATED_PAIR
        return SoftwareRange(
            low / SOFTWARE_ERROR,
            high / SOFTWARE_ERROR,
            pair_low / math.sqrt(2) / SOFTWARE_ERROR,
            pair_high / math.sqrt(2) / SOFTWARE_ERROR,
        )
    shipped = shipped_fits()
    over_all_machines = SoftwareRange(**shipped["software"])
    if slug not in shipped["machines"]:
        return over_all_machines
    on_this_machine = SoftwareRange(**shipped["machines"][slug]["software"])
    return over_all_machines.joined(on_this_machine)


def factors_of_prior(kind: str, generation: str) -> dict[str, tuple[float, float]]:
    """Return the factors of an interval's two ends by kind of shape (:mod:`analysis.model.groups`).

    Args:
        kind: kind of the prior, ``public`` or ``shipped``.
        generation: generation of the machine, such as ``hopper``.
    """
    factors = shipped_fits()["groups"][kind].get(generation, {})
    return {name: (low, high) for name, (low, high) in factors.items()}


def shift_of(slug: str, group: str = GROUP) -> Shift:
    """Return the expected shift from the times in a machine's table to other frameworks' times.

    The shift is zero if no constants are shipped for the machine or for the group.
    """
    machines = shipped_fits()["machines"]
    if slug not in machines or group not in machines[slug]["groups"]:
        return Shift()
    return Fit.from_json(machines[slug]["groups"][group]).shift


def floor_sentences(slug: str | None = None) -> list[str]:
    """Say how well the times of a framework's earlier version predict those of a later version.

    No model can be expected to predict the times of another version better, so the error of such
    a prediction is a floor. ``slug`` is the slug of a machine, or None for all machines.
    """
    return [
        f"Floor on {pair['machine']}: the times of {pair['earlier']} predict those of "
        f"{pair['later']} with a median error of {pair['median']:.1%} and a mean error of "
        f"{pair['mean']:.1%}."
        for pair in shipped_fits()["floor"]
        if slug is None or slug == pair["machine"]
    ]


def prior_without_tables(machine: Machine, group: str) -> Prior:
    """Return the first prior of the module's list that exists and needs no imported table."""
    prior = _measured_prior(machine, group)
    if prior is None:
        prior = _prior_of_other_dtype(machine, group)
    if prior is None:
        prior = _default_prior(machine, group)
    return prior


def _measured_prior(machine: Machine, group: str) -> Prior | None:
    """Return prior 2, 3 or 4 of the module's list: the first one that exists, or None."""
    shipped = shipped_fits()
    # 1. Use the constants shipped for the machine. The factors for kinds of shapes were learned
    #    from bf16 GEMMs, so other groups do not get them.
    entry = shipped["machines"].get(machine.slug)
    if entry and group in entry["groups"]:
        fit = Fit.from_json(entry["groups"][group])
        if group == GROUP:
            fit = replace(fit, groups=factors_of_prior("shipped", machine.generation))
        source = (
            f"shipped constants, fitted to {fit.rows:,} public measurements, {entry['source']}, "
            "warm"
        )
        return Prior(fit, "shipped", source, Spread.from_shipped("shipped"), warm=True)
    # 2. Use the constants of the nearest sibling. The errors of such constants, and those of the
    #    mean, are only known for bf16 GEMMs.
    if group != GROUP or DTYPE not in machine.peaks:
        return None
    measured_fits = {
        slug: Fit.from_json(data["groups"][GROUP]) for slug, data in shipped["machines"].items()
    }
    sibling = nearest_sibling(machine, measured_fits)
    if sibling is not None:
        sibling_range = SoftwareRange(**shipped["generation"])
        source = (
            f"constants of {sibling.slug}, scaled, warm, with an interval learned from "
            f"{len(sibling_pairs(measured_fits))} pairs of GPUs of the same generation"
        )
        fit = carried_fit(measured_fits[sibling.slug], sibling, machine, sibling_range)
        fit = replace(fit, groups=factors_of_prior("shipped", machine.generation))
        return Prior(fit, "generation", source, Spread.from_shipped("sibling"), warm=True)
    # 3. Use the mean of all generations.
    mean_range = SoftwareRange(**shipped["generations"])
    constants_by_slug = {slug: measured.constants for slug, measured in measured_fits.items()}
    fit = mean_fit(constants_by_slug, machine, mean_range)
    source = (
        f"mean of the constants of {len(measured_fits)} GPUs, scaled, warm, with an interval "
        "learned by leaving out each GPU's generation in turn"
    )
    # If a GPU of the machine's generation was measured, its constants are part of the mean.
    measured_generations = {known_machine(slug).generation for slug in measured_fits}
    kind = "generation" if machine.generation in measured_generations else "none"
    return Prior(fit, kind, source, Spread.from_shipped("generation"), warm=True)


def _prior_of_other_dtype(machine: Machine, group: str) -> Prior | None:
    """Return prior 5 of the module's list, or None if it does not exist.

    It is a prior for fp16 from bf16, for bf16 from fp16, or for tf32 from bf16.
    """
    implementation, operation, dtype = group.rsplit(maxsplit=2)
    known_dtype = DTYPE if dtype == "tf32" else TWINS.get(dtype)
    if known_dtype is None or dtype not in machine.peaks or known_dtype not in machine.peaks:
        return None
    known = _measured_prior(machine, f"{implementation} {operation} {known_dtype}")
    if known is None:
        return None
    return shared_prior(known, machine, known_dtype, dtype)


def shared_prior(known: Prior, machine: Machine, known_dtype: str, dtype: str) -> Prior | None:
    """Derive a prior for one dtype from the known prior of another dtype.

    A prior for tf32 has the constants of the known prior, and an interval of a factor of two. For
    any other dtype, the result is a copy of the known prior with wider intervals, or None if the
    peaks of the two dtypes differ.

    Args:
        known: the prior to derive from.
        machine: the machine whose times are predicted; it supports both dtypes.
        known_dtype: dtype of the known prior.
        dtype: dtype of the derived prior.
    """
    if dtype == "tf32":
        source = (
            f"{known.source}; tf32 uses the constants of {known_dtype} and the peak of tf32, with "
            f"an interval of {_FACTOR_OF_TWO}"
        )
        fit = Fit(known.fit.constants, aligned_only=True)
        return Prior(fit, known.kind, source, UNKNOWN, warm=known.warm)
    if machine.peaks[dtype] != machine.peaks[known_dtype]:
        return None
    source = f"{known.source}; {dtype} uses the fit of {known_dtype}, because their peaks are equal"
    return replace(known, fit=known.fit.stretched(_TWIN_WIDER), source=source)


def _default_prior(machine: Machine, group: str) -> Prior:
    implementation, _, dtype = group.rsplit(maxsplit=2)
    is_known = is_fp32_known(machine, group)
    low, high = FP32_LIKE if is_known else UNCALIBRATED
    constants = default_constants(
        machine.generation, dtype, hand_written=implementation in HAND_WRITTEN
    )
    fit = Fit(constants, low=low, high=high, aligned_only=True)
    origin = measured_on(machine.generation, dtype)
    if origin is None:
        source = f"constants not fitted to any machine, with an interval of {_FACTOR_OF_TWO}"
        return Prior(fit, "none", source, UNKNOWN)
    kind = "generation" if known_machine(origin).generation == machine.generation else "none"
    interval = _FP32_WORDS if is_known else _FACTOR_OF_TWO
    return Prior(fit, kind, f"constants of {origin}, with an interval of {interval}", UNKNOWN)


def is_fp32_known(machine: Machine, group: str) -> bool:
    """Return True for fp32 GEMMs if the constants come from a GPU with the same compute capability.

    The same generation is not enough: an SM of an A40, for example, has twice as many fp32 lanes as
    an SM of an A100.
    """
    _, operation, dtype = group.rsplit(maxsplit=2)
    origin = measured_on(machine.generation, dtype)
    if dtype != "fp32" or operation != "gemm" or origin is None:
        return False
    return known_machine(origin).capability == machine.capability


def sibling_pairs(measured: Iterable[str]) -> list[tuple[Machine, Machine]]:
    """Return all ordered pairs of measured machines of the same generation.

    ``measured`` has the slugs of the machines.
    """
    machines = map(known_machine, measured)
    pairs = itertools.permutations(machines, 2)
    return [(source, target) for source, target in pairs if source.generation == target.generation]


def nearest_sibling(machine: Machine, measured: Iterable[str]) -> Machine | None:
    """Return the measured sibling that is most similar to ``machine``, or None if none is similar.

    The interval for scaled constants was learned from the pairs of :func:`sibling_pairs`. Two
    machines therefore count as similar only if the factor between their bf16 peaks is at most the
    largest such factor among these pairs. The same rule applies to their bandwidths. For example,
    an H20 does not get the constants of an H200. The result is also None if ``machine`` does not
    support bf16.

    ``measured`` has the slugs of the machines with constants.
    """
    slugs = list(measured)
    pair_distances = [_log_distances(source, target) for source, target in sibling_pairs(slugs)]
    if not pair_distances or DTYPE not in machine.peaks:
        return None
    largest_peak_distance = max(peak_distance for peak_distance, _ in pair_distances)
    largest_bandwidth_distance = max(bandwidth_distance for _, bandwidth_distance in pair_distances)
    candidates = []
    for candidate in map(known_machine, slugs):
        if candidate.generation != machine.generation or candidate.slug == machine.slug:
            continue
        peak_distance, bandwidth_distance = _log_distances(candidate, machine)
        if (
            peak_distance <= largest_peak_distance
            and bandwidth_distance <= largest_bandwidth_distance
        ):
            # The sum of the logarithms orders the candidates as the product of the factors does.
            candidates.append((peak_distance + bandwidth_distance, candidate))
    if not candidates:
        return None
    _, nearest = min(candidates, key=lambda pair: pair[0])  # the first one of equally near ones
    return nearest


def _log_distances(first: Machine, second: Machine) -> tuple[float, float]:
    peak_distance = abs(math.log(first.peak(DTYPE) / second.peak(DTYPE)))
    bandwidth_distance = abs(math.log(first.bandwidth / second.bandwidth))
    return peak_distance, bandwidth_distance


def carried_fit(fit: Fit, origin: Machine, machine: Machine, learned: SoftwareRange) -> Fit:
    """Convert one machine's fit for bf16 GEMMs to a fit for a machine that was not measured.

    The new interval contains the learned interval and that of the fit, because constants are never
    more certain for another machine than for the machine whose times were fitted. The new fit lacks
    the shift, the numbers of cases and the errors, which only hold for the measured machine.

    Args:
        fit: the fit to convert.
        origin: the machine whose times were fitted.
        machine: the machine whose times are predicted.
        learned: 90% ranges of prediction errors with scaled constants.
    """
    constants = scaled_constants(fit.constants, origin, machine, DTYPE)
    unseen = replace(
        fit, constants=constants, shift=Shift(), rows=0, pairs=0, median=None, mean=None, p95=None
    )
    return unseen.widened(learned)


def mean_fit(measured: Mapping[str, Constants], machine: Machine, learned: SoftwareRange) -> Fit:
    """Return a fit with the mean of the measured machines' constants for bf16 GEMMs.

    The constants are first scaled to ``machine``. Every generation has the same weight. The mean
    predicts better than the constants of a single machine of the nearest generation.

    Args:
        measured: constants of the measured machines, by slug.
        machine: the machine that needs constants.
        learned: 90% ranges of prediction errors with mean constants.
    """
    by_generation: dict[str, list[Constants]] = {}
    for slug, constants in measured.items():
        origin = known_machine(slug)
        scaled = scaled_constants(constants, origin, machine, DTYPE, _SM_EXPONENT)
        by_generation.setdefault(origin.generation, []).append(scaled)
    constants = mean_constants([mean_constants(members) for members in by_generation.values()])
    # Public tables only have unbatched GEMMs with aligned rows, in layout nt. The interval for
    # single times is empty, so widening gives the learned one.
    return Fit(constants, aligned_only=True, layout="nt", low=0.0, high=0.0).widened(learned)
