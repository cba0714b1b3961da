"""Priors: knowledge about a machine before any of its own measurements, and how certain it is.

An estimate starts from the best prior there is, in this order:

1. the machine's own public table;
2. the constants that are shipped for it;
3. the constants of a sibling, scaled by the two datasheets;
4. the mean of the constants of all generations, scaled in the same way.

Each kind of prior has two learned spreads: how much faster or slower the machine as a whole may be
(``scale``), and how far off single shapes may still be once that is corrected (``shape``). Own
measurements move the estimate away from the prior only as far as they outweigh these spreads. They
first move the scale, because it is the least certain and all measurements share it; then single
constants; then the weights of public tables; then trees (:mod:`analysis.model.fitting`). The 90%
interval is the prior's, narrowed as the scale becomes known. The more own held-out errors there
are, the more their interval replaces it (:mod:`analysis.model.calibrate`).

A sibling is near enough only if both datasheets differ by no more than those of the pairs of
measured GPUs from which its interval was learned.
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
"""Dtype that priors are learned from; public tables say too little about others, or nothing."""

GROUP = f"{LIBRARY} gemm {DTYPE}"
"""Group of bf16 GEMMs by the vendor library, named as in the fits of a model."""

TWINS = {"bf16": "fp16", "fp16": "bf16"}
"""The two 16-bit dtypes, which run on the same units."""

_TWIN_WIDER = 1.1
"""Factor by which an interval is wider in the other 16-bit dtype. The shipped bf16 constants
predict fp16 Llama layers on an H100 (casys-kaist/LLMServingSim, 10,240 times) with a mean error of
5.7%, and the 90% interval holds 97% of them (results/accuracy/every-m.jsonl)."""

_GROWTH = 0.75
"""Exponent by which an SM's reads and writes grow with its arithmetic across generations. With 1,
graphics GPUs, whose arithmetic is halved in 16 bits, are predicted to be too slow. The value was
chosen by predicting the public tables of each generation from the constants of the others."""
_TREES_MISFIT = 0.05  # misfit, as a log ratio, where the prior is a public table of the machine
_NORMAL = 1.645  # standard deviations on either side that hold nine in ten normal values
_FACTOR_OF_TWO = "a factor of two either way"
_FP32_WORDS = "−10% to +42%, as on GPUs like it"


@dataclass(frozen=True)
class Spread:
    """Uncertainty of a prior, as standard deviations of log(measured / predicted).

    Attributes:
        scale: error that all shapes of a machine share.
        shape: error of a single shape once the shared one is corrected.
        constants: error of each constant once the scale is corrected, a part of ``shape``.
        misfit: error that the best constants still leave.
    """

    scale: float
    shape: float
    constants: float = 0.15
    misfit: float = 0.1

    def after(self, rows: int) -> float:
        """Return the standard deviation of one shape's error after ``rows`` measurements."""
        return math.hypot(self.shape, 1 / math.sqrt(1 / self.scale**2 + rows / self.shape**2))

    def narrowing(self, rows: int) -> float:
        """Return the factor, at most 1, by which ``rows`` measurements narrow the interval."""
        return self.after(rows) / self.after(0)

    @classmethod
    def from_shipped(cls, kind: str) -> Spread:
        """Read the learned spread of one kind of prior: public, shipped, sibling or generation."""
        learned = shipped_fits()["spreads"][kind]
        return cls(**learned, misfit=_TREES_MISFIT if kind == "public" else cls.misfit)


UNKNOWN = Spread(scale=0.37, shape=0.2, constants=1.0)
"""Spread where nothing was learned. Its parts together are as wide as
:data:`analysis.model.fit.UNCALIBRATED`. The constants are hardly held, because those of a CPU are
only a starting point."""


@dataclass(frozen=True)
class Prior:
    """Answer for a group without own measurements, and the start of a fit to own measurements.

    Attributes:
        fit: constants, with the intervals of an answer without own measurements.
        kind: ``public``, ``shipped``, ``generation`` or ``none``.
        source: where the prior comes from, in words.
        spread: how far the prior may be off.
        warm: True if ``fit`` is for operands that come from the cache where they fit it.
        collections: public tables whose weights own measurements move.
        leading: positions of the collections that answer without own measurements.
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
        """Make a prior of constants only; its interval comes from ``spread``."""
        end = _NORMAL * spread.after(0)
        return cls(Fit(constants, low=-end, high=end, aligned_only=True), "none", "", spread)

    def is_own(self, machine: Machine) -> list[bool]:
        """Return a flag for each collection, True if it is of the machine itself."""
        return [collection.machine.slug == machine.slug for collection in self.collections]

    @property
    def weights(self) -> list[float]:
        """Weight of each collection in an answer without own measurements."""
        weights = [0.0] * len(self.collections)
        for position in self.leading:
            weights[position] = 1 / len(self.leading)
        return weights


_TREES_ERROR = 0.04
"""Typical standard deviation of a public table's log ratios to its own model."""


def prior_from_tables(
    machine: Machine, dtype: str, collections: Sequence[CollectionTrees], query: Query
) -> Prior:
    """Build a prior from public tables of a machine or of its siblings.

    The trees of the tables must not have seen the shapes of the query. Without own measurements,
    the machine's first collection answers; if it has none, the first collections of its siblings
    answer with equal weights. The interval is the one that was learned from other frameworks. It
    was learned from tables whose own error is known; here a typical error is assumed.

    Args:
        machine: the machine to predict.
        dtype: dtype of the answers; the collections may be of the other 16-bit dtype.
        collections: the collections, the most trusted first.
        query: shapes over which the typical disagreement of the trees is taken.
    """
    leading = leaders(machine, [collection.machine for collection in collections])
    prior = Prior(
        Fit(collections[0].constants_on(machine, dtype)),
        "public",
        "public tables",
        Spread.from_shipped("public"),
        True,
        tuple(collections),
        tuple(leading),
    )
    # The scale of the fit makes the error of a shape with a typical spread a typical error.
    offsets = Offsets.from_weights(collections, prior.weights)
    spreads = offsets.spread(offsets.at(Inputs.from_query(machine, query)))
    typical_spread = float(np.median(spreads))
    software = software_of(machine.slug, dtype)
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
        groups=factors_of_prior("public", machine.generation) if dtype in TWINS else {},
    )
    return replace(prior, fit=fit, source=offsets.source)


def leaders(machine: Machine, machines: Sequence[Machine]) -> list[int]:
    """Return the positions of the collections that answer without own measurements.

    These are the first one of the machine itself or, if it has none, the first one of each sibling.

    Args:
        machine: the machine to predict.
        machines: the machine of each collection.
    """
    slugs = [owner.slug for owner in machines]
    if machine.slug in slugs:
        return [slugs.index(machine.slug)]
    return [slugs.index(slug) for slug in dict.fromkeys(slugs)]


def software_of(slug: str, dtype: str = DTYPE) -> SoftwareRange:
    """Return how far frameworks differ on a machine, as a range in spreads.

    It is the range of all machines, widened if frameworks differ more on this one. It was learned
    from bf16. Each framework quantises for fp8 in its own way, so for fp8 the range is that of a
    machine without any measurement, even where the model's own error is zero.
    """
    if dtype == "fp8":
        # The spread of a prediction without an error of its own is SOFTWARE_ERROR. That of a pair
        # of such predictions is √2 times as large.
        low, high = (end / SOFTWARE_ERROR for end in UNCALIBRATED)
        pair_low, pair_high = (end / math.sqrt(2) / SOFTWARE_ERROR for end in UNCALIBRATED_PAIR)
        return SoftwareRange(low, high, pair_low, pair_high)
    shipped = shipped_fits()
    software = SoftwareRange(**shipped["software"])
    measured = shipped["machines"].get(slug)
    return software.joined(SoftwareRange(**measured["software"])) if measured else software


def factors_of_prior(kind: str, generation: str) -> dict[str, tuple[float, float]]:
    """Return the factors of an interval by kind of shape (:mod:`analysis.model.groups`).

    Args:
        kind: kind of the prior, ``public`` or ``shipped``.
        generation: generation of the machine.
    """
    factors = shipped_fits()["groups"][kind].get(generation, {})
    return {name: (low, high) for name, (low, high) in factors.items()}


def shift_of(slug: str, group: str = GROUP) -> Shift:
    """Return the expected difference between a machine's table and other frameworks."""
    machines = shipped_fits()["machines"]
    if slug not in machines or group not in machines[slug]["groups"]:
        return Shift()
    return Fit.from_json(machines[slug]["groups"][group]).shift


def floor_sentences(slug: str | None = None) -> list[str]:
    """Say how far a framework's earlier version is from its later one: the floor of predictions.

    Args:
        slug: the machine; None for all machines that were measured with two versions.
    """
    return [
        f"Floor on {pair['machine']}: the times of {pair['earlier']} predict those of "
        f"{pair['later']} with a median error of {pair['median']:.1%}, mean {pair['mean']:.1%}."
        for pair in shipped_fits()["floor"]
        if slug in (None, pair["machine"])
    ]


def prior_without_tables(machine: Machine, group: str) -> Prior:
    """Return the best prior that needs no imported table.

    Args:
        machine: the machine to predict.
        group: implementation, operation and dtype, as in :func:`analysis.model.query.group_of`.
    """
    prior = _measured_prior(machine, group) or _twin_prior(machine, group)
    return prior or _default(machine, group)


def _measured_prior(machine: Machine, group: str) -> Prior | None:
    """Return a prior of shipped constants, of a sibling's, or of the mean of all generations.

    Returns:
        The first of these that exists; None if there is none.
    """
    shipped = shipped_fits()
    # 1. The machine's own constants. Their factors for kinds of shapes were learned from bf16.
    entry = shipped["machines"].get(machine.slug)
    if entry and group in entry["groups"]:
        fit = Fit.from_json(entry["groups"][group])
        if group == GROUP:
            fit = replace(fit, groups=factors_of_prior("shipped", machine.generation))
        source = f"shipped constants, fitted to {fit.rows:,} public rows of it, {entry['source']}"
        return Prior(fit, "shipped", f"{source}, warm", Spread.from_shipped("shipped"), True)
    # 2. The constants of a sibling. These and the mean were learned from bf16 GEMMs only.
    if group != GROUP or DTYPE not in machine.peaks:
        return None
    fits = {
        slug: Fit.from_json(data["groups"][GROUP]) for slug, data in shipped["machines"].items()
    }
    sibling = nearest_sibling(machine, fits)
    if sibling is not None:
        learned = SoftwareRange(**shipped["generation"])
        source = (
            f"constants of {sibling.slug}, scaled, warm; interval learned from "
            f"{len(sibling_pairs(fits))} pairs of GPUs of the same generation"
        )
        fit = carried_fit(fits[sibling.slug], sibling, machine, learned)
        fit = replace(fit, groups=factors_of_prior("shipped", machine.generation))
        return Prior(fit, "generation", source, Spread.from_shipped("sibling"), True)
    # 3. The mean of all generations.
    learned = SoftwareRange(**shipped["generations"])
    fit = mean_fit({slug: fit.constants for slug, fit in fits.items()}, machine, learned)
    source = (
        f"mean of the constants of {len(fits)} GPUs, scaled, warm; interval learned by leaving "
        "each GPU's generation out"
    )
    measured = {known_machine(slug).generation for slug in fits}
    kind = "generation" if machine.generation in measured else "none"
    return Prior(fit, kind, source, Spread.from_shipped("generation"), True)


def _twin_prior(machine: Machine, group: str) -> Prior | None:
    """Return the prior of the other 16-bit dtype at the same peak; for tf32, bf16's constants.

    The result is None if that dtype has no prior, or if the machine lacks one of the two dtypes.
    """
    operation, _, dtype = group.rpartition(" ")
    twin = TWINS.get(dtype, DTYPE if dtype == "tf32" else None)
    if twin is None or dtype not in machine.peaks or twin not in machine.peaks:
        return None
    twin_prior = _measured_prior(machine, f"{operation} {twin}")
    return twin_prior and shared_prior(twin_prior, machine, twin, dtype)


def shared_prior(known: Prior, machine: Machine, twin: str, dtype: str) -> Prior | None:
    """Transfer what is known about one dtype to another one.

    tf32 takes the constants of the other dtype at its own peak. Any other dtype takes the whole
    prior with wider intervals; the result is None if the two dtypes have different peaks.

    Args:
        known: what is known about ``twin``.
        machine: the machine to predict.
        twin: the dtype that was measured.
        dtype: the other dtype.
    """
    if dtype == "tf32":
        source = (
            f"{known.source}; tf32 by the constants of {twin} at its own peak, {_FACTOR_OF_TWO}"
        )
        fit = Fit(known.fit.constants, aligned_only=True)
        return Prior(fit, known.kind, source, UNKNOWN, known.warm)
    if machine.peaks[dtype] != machine.peaks[twin]:
        return None
    source = f"{known.source}; {dtype} uses what is known of {twin}, which has the same peak"
    return replace(known, fit=known.fit.stretched(_TWIN_WIDER), source=source)


def _default(machine: Machine, group: str) -> Prior:
    """Return the constants of the machine's generation, with an interval of a factor of two.

    The interval is narrower for fp32 GEMMs on GPUs like a measured one (:func:`is_fp32_known`).
    """
    dtype = group.rpartition(" ")[2]
    is_known = is_fp32_known(machine, group)
    low, high = FP32_LIKE if is_known else UNCALIBRATED
    fit = Fit(default_constants(machine.generation, dtype), low=low, high=high, aligned_only=True)
    origin = measured_on(machine.generation, dtype)
    if origin is None:
        return Prior(fit, "none", f"constants that were never measured, {_FACTOR_OF_TWO}", UNKNOWN)
    kind = "generation" if known_machine(origin).generation == machine.generation else "none"
    words = _FP32_WORDS if is_known else _FACTOR_OF_TWO
    return Prior(fit, kind, f"constants of {origin}, {words}", UNKNOWN)


def is_fp32_known(machine: Machine, group: str) -> bool:
    """Return True if a group is of fp32 GEMMs on a compute capability that was measured.

    The generation does not suffice: within one, graphics GPUs have twice as many fp32 lanes.
    """
    operation, _, dtype = group.rpartition(" ")
    origin = measured_on(machine.generation, dtype)
    if dtype != "fp32" or not operation.endswith("gemm") or origin is None:
        return False
    return known_machine(origin).capability == machine.capability


def sibling_pairs(measured: Iterable[str]) -> list[tuple[Machine, Machine]]:
    """Return the ordered pairs of machines of one generation: source and target of constants."""
    machines = map(known_machine, measured)
    pairs = itertools.permutations(machines, 2)
    return [(source, target) for source, target in pairs if source.generation == target.generation]


def nearest_sibling(machine: Machine, measured: Iterable[str]) -> Machine | None:
    """Return the measured machine whose constants suit another one of its generation, if any.

    Neither peak nor bandwidth may differ by a larger factor than in some pair of measured machines
    of one generation. If several machines qualify, the one is taken whose two factors have the
    smallest product. An L4 or an RTX 4090 therefore takes nothing from an L40S, and an H20 takes
    nothing from an H200, because nobody has shown that constants carry over that far. The function
    cannot see what a datasheet does not say, such as the lower power limit of a card on PCIe.

    Args:
        machine: the machine that needs constants.
        measured: slugs of the machines that have constants.
    """
    slugs = list(measured)
    pair_factors = [_log_factors(source, target) for source, target in sibling_pairs(slugs)]
    if not pair_factors or DTYPE not in machine.peaks:
        return None
    largest_peak_factor = max(peak_factor for peak_factor, _ in pair_factors)
    largest_bandwidth_factor = max(bandwidth_factor for _, bandwidth_factor in pair_factors)
    distances = []
    for candidate in map(known_machine, slugs):
        if candidate.generation != machine.generation or candidate.slug == machine.slug:
            continue
        peak_factor, bandwidth_factor = _log_factors(candidate, machine)
        if peak_factor <= largest_peak_factor and bandwidth_factor <= largest_bandwidth_factor:
            distances.append((peak_factor + bandwidth_factor, candidate))
    if not distances:
        return None
    _, nearest = min(distances, key=lambda pair: pair[0])  # the first one, if several are as near
    return nearest


def _log_factors(first: Machine, second: Machine) -> tuple[float, float]:
    """Return the factors by which two machines' peaks and bandwidths differ, as absolute logs."""
    peak_factor = abs(math.log(first.peak(DTYPE) / second.peak(DTYPE)))
    bandwidth_factor = abs(math.log(first.bandwidth / second.bandwidth))
    return peak_factor, bandwidth_factor


def carried_fit(fit: Fit, there: Machine, here: Machine, learned: SoftwareRange) -> Fit:
    """Carry the fit of one machine over to another one that was not measured.

    Its interval is the one learned from pairs of machines, widened where the fit's own is wider:
    constants are no more certain on another machine than on the one they were fitted to.

    Args:
        fit: the fit to carry over.
        there: the machine that it was fitted on.
        here: the machine to predict.
        learned: the range of the errors of such predictions.
    """
    constants = scaled_constants(fit.constants, there, here, DTYPE)
    unseen = replace(
        fit, constants=constants, shift=Shift(), rows=0, pairs=0, median=None, mean=None, p95=None
    )
    return unseen.widened(learned)


def mean_fit(known: Mapping[str, Constants], here: Machine, learned: SoftwareRange) -> Fit:
    """Average the constants of measured machines for a generation that nobody measured.

    Each machine's constants are scaled by the two datasheets, and every generation counts the same.
    The constants of a single machine, such as one of the nearest generation, are further off.

    Args:
        known: constants by the slug of the machine that they were fitted on.
        here: the machine that needs constants.
        learned: the range of the errors of such predictions.
    """
    by_generation: dict[str, list[Constants]] = {}
    for slug, constants in known.items():
        origin = known_machine(slug)
        scaled = scaled_constants(constants, origin, here, DTYPE, _GROWTH)
        by_generation.setdefault(origin.generation, []).append(scaled)
    constants = mean_constants([mean_constants(members) for members in by_generation.values()])
    # An empty interval, once widened, is the learned range.
    return Fit(constants, aligned_only=True, layout="nt", low=0.0, high=0.0).widened(learned)
